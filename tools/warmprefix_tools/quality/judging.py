"""Asks a second model which of two answers is better, in both orders."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from warmprefix.errors import MissingExtraError
from warmprefix_tools.quality.answer_store import AnswerStore, Judgement
from warmprefix_tools.quality.calls import RefusedPromptError, call_all, complete
from warmprefix_tools.quality.quality_options import QualityJudgeOptions
from warmprefix_tools.quality.questions import EvidenceQuestion
from warmprefix_tools.quality.scores import normalized

try:
    import openai
except ImportError as exc:
    raise MissingExtraError("openai", "openai") from exc

__all__ = ["judge_all"]

_PROMPT = """\
Compare two answers to a question.

Question: {question}
Expected answer: {expected}

Answer A: {first}

Answer B: {second}

Which answer agrees better with the expected one? Length and style do not count. Reply with one word: A, B, or equal."""
_REFUSAL_EXPECTED = "The context does not hold the answer, so the right answer is a refusal."
_VERDICT = re.compile(r"\W*(?:answer\s+)?(a|b|equal)\b\W*", re.IGNORECASE)
_MAX_TOKENS = 8


class _Pair(NamedTuple):
    """Two answers for the judge, in one order."""

    question: EvidenceQuestion
    arm: str
    arm_first: bool
    first: str
    second: str


async def judge_all(store: AnswerStore, options: QualityJudgeOptions, progress: Callable[[int, int], None]) -> None:
    """Ask the judge about each answer that differs from its baseline's, and store what it returns.

    Of repeated calls, the first answer counts. Earlier judgements stay.

    Args:
        store: The answers of a run.
        options: The judge's endpoint and model.
        progress: Called after each call with the numbers of all calls and of those that are left.

    Raises:
        StoreFileError: The file holds no run, or the judgements of another model.
        EndpointError: See `call_all`.
    """
    done = store.begin_judging(options.model)
    pairs = list(_pairs(store))
    waiting = [pair for pair in pairs if (pair.question.id, pair.arm, pair.arm_first) not in done]

    async def make(client: openai.AsyncOpenAI, pair: _Pair) -> None:
        messages = [{"role": "user", "content": _prompt(pair)}]
        try:
            answer = await complete(client, messages, model=options.model, max_tokens=_MAX_TOKENS)
            text = answer.choices[0].message.content if answer.choices else None
        except RefusedPromptError:
            text = None
        store.add_judgement(Judgement(pair.question.id, pair.arm, pair.arm_first, _preferred(text, pair.arm_first)))

    await call_all(waiting, options, make, lambda remaining: progress(len(pairs), remaining))


def _pairs(store: AnswerStore) -> Iterator[_Pair]:
    baselines = store.settings()["arms"]
    questions = {question.id: question for question in store.questions()}
    texts = {
        (answer.key.question, answer.key.arm): answer.text
        for answer in store.answers()
        if answer.key.repeat == 0 and answer.text is not None
    }
    for (id, arm), text in texts.items():
        other = texts.get((id, baselines[arm]))
        if other is None or normalized(other) == normalized(text):
            continue
        yield _Pair(questions[id], arm, True, text, other)
        yield _Pair(questions[id], arm, False, other, text)


def _prompt(pair: _Pair) -> str:
    expected = " or ".join(pair.question.answers) or _REFUSAL_EXPECTED
    return _PROMPT.format(
        question=pair.question.question, expected=expected, first=pair.first.strip(), second=pair.second.strip()
    )


def _preferred(text: str | None, arm_first: bool) -> str | None:
    """Return which answer the judge prefers; None if it answered something else."""
    found = _VERDICT.fullmatch(text or "")
    if found is None:
        return None
    word = found[1].lower()
    return "neither" if word == "equal" else "arm" if (word == "a") == arm_first else "baseline"
