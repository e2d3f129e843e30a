"""The run that is watched, and the probe of its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from warmprefix_requests.usage import TokenUsage
from warmprefix_tools.quality.answer_store import CallKey, GivenAnswer
from warmprefix_tools.quality.cache_probe import probe_cache
from warmprefix_tools.quality.questions import EvidenceQuestion
from warmprefix_tools.quality.watch import RunWatch

QUESTIONS = [EvidenceQuestion(str(number), "?", ("farmer",), ("-",)) for number in range(500)]
BASELINES = {"relevance": "relevance", "note": "relevance", "labels": "relevance"}


def watched(texts: Sequence[str | None], *, margin: float = 0.02, repeats: int = 1, stops: bool = True) -> RunWatch:
    """Return a watch that got these answers of `note`, in turn; the other arms are right."""
    watch = RunWatch(BASELINES, QUESTIONS, margin, repeats=repeats, stops=stops)
    for number, text in enumerate(texts):
        key = CallKey(QUESTIONS[number // repeats].id, "note", number % repeats)
        for arm in BASELINES:
            watch.add(GivenAnswer(key._replace(arm=arm), True, text if arm == "note" else "Farmer"))
    return watch


def test_a_run_is_certain_when_every_arm_is() -> None:
    right, wrong = "Brook is a farmer.", "Baker"
    assert not watched([wrong] * 50).is_certain, "nothing is certain after a tenth of the run"
    assert not watched([wrong] * 100 + [right] * 20).is_certain, "`labels` is open"
    assert watched([wrong] * 400).is_certain
    assert watched([right] * 400).is_certain
    assert not watched([right] * 400, margin=0.005).is_certain
    assert not watched([right] * 400, stops=False).is_certain
    assert not watched([None] * 400).is_certain, "an arm without an answer shows nothing"


def test_a_question_counts_when_all_of_its_answers_are_there() -> None:
    watch = watched(["Farmer", "Baker"] * 60, repeats=2)
    assert watch.answered == 60
    assert "changes 0 to 100%" in watch.forecast(), "half of a right answer is a change"
    watch.add(GivenAnswer(CallKey("99", "note", 0), True, "Farmer"))
    assert watch.answered == 60


@pytest.mark.parametrize(("stops", "needed"), [(False, "133 to 2,164"), (True, "189 to 2,748")])
def test_the_forecast_names_changes_and_questions(stops: bool, needed: str) -> None:
    assert watched(["Farmer"] * 43 + ["Baker"] * 7, stops=stops).forecast() == (
        "After 50 questions, an arm changes 0 to 14% of the answers from right to wrong or back. At that rate, refuting"
        f" a loss of 2 points takes about {needed} questions if nothing is lost; this run has 500."
    )
    assert "changes 0% of the answers" in watched([None] * 50, stops=stops).forecast()


def test_baselines_alone_are_never_certain() -> None:
    watch = RunWatch({"relevance": "relevance"}, QUESTIONS, 0.02, stops=True)
    for question in QUESTIONS:
        watch.add(GivenAnswer(CallKey(question.id, "relevance", 0), False, "Farmer"))
    assert not watch.is_certain
    assert "no arm can be compared" in watch.forecast()


@pytest.mark.parametrize(
    ("answers", "support"),
    [
        # vLLM leaves the field out where nothing is cached.
        ([TokenUsage(100), TokenUsage(100, 96), TokenUsage(100)], "kept"),
        ([TokenUsage(100, 0), TokenUsage(100, 96), TokenUsage(100, 0)], "kept"),
        ([TokenUsage(100), TokenUsage(100, 96), TokenUsage(100, 99)], "ignored"),
        ([TokenUsage(100), TokenUsage(100), TokenUsage(100)], "unreported"),
        ([TokenUsage(), TokenUsage(), TokenUsage()], "unreported"),
        ([TokenUsage(100, 0), TokenUsage(100, 0), TokenUsage(100, 0)], "unreported"),
        ([None, TokenUsage(100)], "refused"),
        ([None, None], "unreported"),
    ],
)
def test_what_an_engine_does_with_salts_is_found_out(answers: list[TokenUsage | None], support: str) -> None:
    given = iter(answers)
    salts: list[str | None] = []

    async def ask(salt: str | None) -> TokenUsage | None:
        salts.append(salt)
        return next(given)

    assert asyncio.run(probe_cache(ask, "salt")) == support
    assert salts == (["salt-1", None] if answers[0] is None else ["salt-1", "salt-1", "salt-2"])
