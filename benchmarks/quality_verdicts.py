"""Count how often `warmprefix quality` errs, over simulated readers whose answers change as those of real models do.

    python benchmarks/quality_verdicts.py [--runs N]

An arm turns right answers into wrong ones and back at a fixed rate. *2 points lost*: more losses than wins. *nothing
lost*: as many. *style only*: the same answers in a sentence. *style and changes*: as many losses as wins, in sentences.
*6 arms*: nothing is lost in any of them, and the run stops when all are certain. The counts are of arms. *fixed*: all
questions are asked. *stops*: the run stops when it is certain, after any question behind the 50th; the code that
watches, scores and decides is the command's own. *wrong*: a verdict against the truth; a loss of the margin must not be
refuted. *covered*: the 95 % interval holds the true difference. *f1 worse*: the verdict would be worse by F1.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

from common import print_table
from result_files import write_rows
from warmprefix_tools.quality.answer_store import CallKey, GivenAnswer
from warmprefix_tools.quality.paired import Comparison, compare_pairs
from warmprefix_tools.quality.questions import EvidenceQuestion
from warmprefix_tools.quality.scores import AnswerScores, score
from warmprefix_tools.quality.watch import RunWatch

ACCURACY = 0.8
BASELINE = "relevance"
EXPECTED = ("farmer",)


class Scenario(NamedTuple):
    """A reader, and a run that asks it; shares are from 0 to 1."""

    name: str
    changed: float
    lost: float
    in_sentences: bool
    questions: int
    margin: float
    arms: int = 1


SCENARIOS = [
    Scenario("2 points lost", 0.14, 0.02, False, 4_000, 0.02),
    Scenario("nothing lost", 0.14, 0.0, False, 4_000, 0.02),
    Scenario("style only", 0.0, 0.0, True, 4_000, 0.02),
    Scenario("style and changes", 0.14, 0.0, True, 4_000, 0.02),
    Scenario("6 arms", 0.14, 0.0, False, 4_000, 0.02, 6),
    Scenario("2 points lost", 0.04, 0.02, False, 500, 0.02),
    Scenario("nothing lost", 0.04, 0.0, False, 500, 0.02),
    Scenario("10 points lost", 0.14, 0.1, False, 500, 0.02),
]


class Ended(NamedTuple):
    """A comparison at the end of a run."""

    compared: Comparison
    f1: Comparison
    asked: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    options = parser.parse_args()
    rows = [row for scenario in SCENARIOS for row in measured(scenario, options.runs)]
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    write_rows("quality_verdicts", rows, ("scenario", "changed_percent", "questions", "mode"))


def measured(scenario: Scenario, runs: int) -> Iterator[dict[str, Any]]:
    ended: dict[str, list[Ended]] = {"fixed": [], "stops": []}
    for seed in range(runs):
        for mode, found in run(scenario, random.Random(f"{scenario}{seed}")).items():
            ended[mode] += found
    for mode, found in ended.items():
        verdicts = [each.compared.verdict(scenario.margin) for each in found]
        yield {
            "scenario": scenario.name,
            "changed_percent": round(100 * scenario.changed),
            "questions": scenario.questions,
            "margin_points": round(100 * scenario.margin),
            "mode": mode,
            "arms": len(found),
            "worse_percent": percent([verdict.startswith("worse") for verdict in verdicts]),
            "better_percent": percent([verdict == "better" for verdict in verdicts]),
            "not_worse_percent": percent([each.compared.is_not_worse(scenario.margin) for each in found]),
            "open_percent": percent([verdict == "open" for verdict in verdicts]),
            "wrong_percent": percent([is_wrong(verdict, scenario) for verdict in verdicts]),
            "covered_percent": percent([each.compared.low <= -scenario.lost <= each.compared.high for each in found]),
            "f1_worse_percent": percent([each.f1.high < 0 for each in found]),
            "asked": round(fmean(each.asked for each in found)),
        }


def percent(found: list[bool]) -> float:
    return round(100 * fmean(found), 1)


def is_wrong(verdict: str, scenario: Scenario) -> bool:
    if scenario.lost >= scenario.margin:
        return verdict in ("better", "not worse", "worse, within margin")
    return verdict not in ("not worse", "open")


def run(scenario: Scenario, rng: random.Random) -> dict[str, list[Ended]]:
    """Ask all questions of a run; return the comparisons at its end, and those where it would have stopped."""
    arms = [f"arm-{number}" for number in range(scenario.arms)]
    questions = [EvidenceQuestion(str(n), "?", EXPECTED, ("-",)) for n in range(scenario.questions)]
    watch = RunWatch({BASELINE: BASELINE} | dict.fromkeys(arms, BASELINE), questions, scenario.margin, stops=True)
    pairs: dict[str, list[tuple[AnswerScores, AnswerScores]]] = {arm: [] for arm in arms}
    stopped: dict[str, list[Ended]] = {}
    for asked, question in enumerate(questions, 1):
        is_right = rng.random() < ACCURACY
        texts = {BASELINE: text(is_right, in_sentence=False)}
        for arm in arms:
            texts[arm] = text(after_change(is_right, scenario, rng), scenario.in_sentences)
            pairs[arm].append((scored(texts[arm]), scored(texts[BASELINE])))
        if not stopped:
            for arm, answer in texts.items():
                watch.add(GivenAnswer(CallKey(question.id, arm, 0), True, answer))
            if watch.is_certain or asked == len(questions):
                stopped["stops"] = [ended(pairs[arm], len(questions)) for arm in arms]
    return {"fixed": [ended(pairs[arm], None) for arm in arms], **stopped}


def after_change(is_right: bool, scenario: Scenario, rng: random.Random) -> bool:
    """Return whether an answer is right in an arm: shares of all answers are won and lost."""
    won, lost = (scenario.changed - scenario.lost) / 2, (scenario.changed + scenario.lost) / 2
    return rng.random() >= lost / ACCURACY if is_right else rng.random() < won / (1 - ACCURACY)


@cache
def scored(answer: str) -> AnswerScores:
    return score(answer, EXPECTED)


def text(is_right: bool, in_sentence: bool) -> str:
    word = "farmer" if is_right else "baker"
    return f"Brook is a {word}." if in_sentence else word.title()


def ended(pairs: list[tuple[AnswerScores, AnswerScores]], most: int | None) -> Ended:
    contains, f1 = (
        compare_pairs([getattr(arm, name) - getattr(baseline, name) for arm, baseline in pairs], most)
        for name in ("contains", "f1")
    )
    return Ended(contains, f1, len(pairs))


if __name__ == "__main__":
    main()
