"""Intervals and tests: planted differences are found, and no others."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest

from planted_reader import PlantedReader
from warmprefix_tools.emulator.tokenizer import ChatMessage
from warmprefix_tools.quality.arms import ArmPrompt, prompts_of
from warmprefix_tools.quality.made_up import made_up_questions
from warmprefix_tools.quality.paired import Comparison, PairCounts, compare_pairs, mcnemar, questions_needed
from warmprefix_tools.quality.scores import score

RUNS = 200
MOST_ERRORS = 17
"""Of 200 runs with an error rate of 5 %, more err in 1 of 100 tests only."""
MARGIN = 0.03


def test_no_difference_is_no_difference() -> None:
    compared = compare_pairs([0.0] * 500)
    assert (compared.difference, compared.wins, compared.losses, compared.p_value) == (0.0, 0, 0, 1.0)
    assert compared.low < 0 < compared.high
    assert not compared.differs
    assert compared.is_not_worse(0.01)
    assert not compare_pairs([0.0] * 20).is_not_worse(0.01), "20 questions show nothing about one point"


@pytest.mark.parametrize(("won", "lost", "same"), [(12, 2, 36), (0, 4, 96), (1, 0, 9), (30, 30, 40)])
def test_the_ends_are_where_the_score_test_refutes(won: int, lost: int, same: int) -> None:
    """Its variance takes the likeliest share of losses that gives the difference, found here by trying all."""
    compared = compare_pairs([1.0] * won + [-1.0] * lost + [0.0] * same)
    pairs = won + lost + same
    for end, sign in ((compared.low, 1), (compared.high, -1)):
        least, most = max(0.0, -end), (1 - end) / 2
        shares = [least + (most - least) * step / 100_000 for step in range(1, 100_000)]

        def likelihood(share: float, end: float = end) -> float:
            shown = [(won, share + end), (lost, share), (same, 1 - 2 * share - end)]
            return sum(count * math.log(max(rate, 1e-300)) for count, rate in shown if count)

        share = max(shares, key=likelihood)
        deviation = math.sqrt(pairs * (2 * share + end - end * end))
        assert (won - lost - pairs * end) / deviation == pytest.approx(sign * 1.95996, abs=0.01)


def test_wins_and_losses_are_treated_alike() -> None:
    differences = [1.0] * 9 + [-1.0] * 4 + [0.25] * 50 + [0.0] * 100
    one, other = compare_pairs(differences), compare_pairs([-each for each in differences])
    assert (one.low, one.high, one.p_value) == pytest.approx((-other.high, -other.low, other.p_value))
    assert one.low < one.worst < one.difference < one.high


def test_every_pair_may_be_won_or_lost() -> None:
    assert compare_pairs([1.0] * 10).high == pytest.approx(1.0)
    assert compare_pairs([-1.0] * 10).low == pytest.approx(-1.0)
    assert 0 < compare_pairs([1.0] * 10).low < 1


@pytest.mark.parametrize(("wins", "losses", "p"), [(0, 0, 1.0), (5, 0, 0.0625), (10, 2, 0.0386), (7, 7, 1.0)])
def test_mcnemar(wins: int, losses: int, p: float) -> None:
    assert mcnemar(wins, losses) == mcnemar(losses, wins) == pytest.approx(p, abs=1e-4)


def test_a_verdict_is_what_the_interval_says() -> None:
    """5 of 5 changed answers are a difference, although McNemar's exact test, which is conservative, says 0.06."""
    for won, lost, same, margin, expected in [
        (31, 49, 248, 0.01, "worse"),
        (49, 31, 248, 0.01, "better"),
        (5, 0, 495, 0.01, "better"),
        (1, 1, 498, 0.01, "not worse"),
        (0, 5, 495, 0.03, "worse, within margin"),
        (3, 5, 92, 0.01, "open"),
    ]:
        compared = compare_pairs([1.0] * won + [-1.0] * lost + [0.0] * same)
        assert compared.verdict(margin) == expected
        assert (compared.low > 0 or compared.high < 0) == (expected not in ("open", "not worse"))
        assert (compared.worst > -margin) == (expected not in ("open", "worse"))


def test_a_run_that_may_stop_has_wider_intervals_until_its_end() -> None:
    differences = [1.0] * 6 + [-1.0] * 4 + [0.0] * 90
    fixed, last, early = (compare_pairs(differences, most) for most in (None, 100, 1_000))
    assert early.low < last.low < fixed.low < fixed.high < last.high < early.high
    assert (early.worst < last.worst < fixed.worst, fixed.difference) == (True, early.difference)
    assert compare_pairs(differences, 50) == last, "more answers than planned widen nothing"


@pytest.mark.parametrize("most", [60, 100, 2_000])
@pytest.mark.parametrize("lost", [0, 1, 6, 40])
def test_a_look_is_certain_exactly_when_the_interval_decides(most: int, lost: int) -> None:
    for won in range(0, 60, 3):
        differences = [1.0] * won + [-1.0] * lost + [0.0] * 20
        counts = PairCounts()
        for each in differences:
            counts.add(each)
        decided = compare_pairs(differences, most).verdict(0.02) != "open"
        assert counts.is_certain(0.02, most) == decided
    assert not PairCounts().is_certain(0.02, most)


def test_something_must_be_compared() -> None:
    with pytest.raises(ValueError, match="got none"):
        compare_pairs([])


# -- planted in a reader -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts() -> list[ArmPrompt]:
    return list(prompts_of(["relevance", "note"], list(made_up_questions(500))))


def comparisons(prompts: list[ArmPrompt], reader: Callable[[int], PlantedReader]) -> Iterator[Comparison]:
    """Yield the comparison of each of many runs, whose readers have other seeds."""
    chats = {
        (prompt.question.id, prompt.arm): [ChatMessage(each["role"], each["content"]) for each in prompt.messages]
        for prompt in prompts
    }
    questions = {prompt.question.id: prompt.question for prompt in prompts}
    for seed in range(RUNS):
        answer = reader(seed).answer
        right = {
            (id, arm): score(answer(messages), questions[id].answers).exact for (id, arm), messages in chats.items()
        }
        differences = [right[id, "note"] - right[id, "relevance"] for id in questions]
        yield compare_pairs(differences)


@pytest.mark.slow
def test_two_points_are_found(prompts: list[ArmPrompt]) -> None:
    noted = sum("Most relevant above" in prompt.messages[-1]["content"] for prompt in prompts)  # of 500
    made = comparisons(prompts, lambda seed: PlantedReader(note_loss=0.021 * 500 / noted, seed=seed))
    found = [each.differs and each.difference < 0 for each in made]
    assert sum(found) >= 0.9 * RUNS


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_nothing_is_found_where_nothing_was_planted(prompts: list[ArmPrompt], noise: float) -> None:
    found = [each.differs for each in comparisons(prompts, lambda seed: PlantedReader(noise=noise, seed=seed))]
    assert sum(found) <= MOST_ERRORS


# -- drawn -------------------------------------------------------------------------------------------------------------


def drawn(wins: float, losses: float, seed: int) -> Comparison:
    """Compare 500 pairs of right and wrong answers with these shares of wins and losses."""
    differences = random.Random(seed).choices([1.0, -1.0, 0.0], [wins, losses, 1 - wins - losses], k=500)
    return compare_pairs(differences)


@pytest.mark.parametrize("changed", [0.02, 0.04, 0.14])
def test_the_error_rate_is_five_percent(changed: float) -> None:
    """Counted, not drawn: the chance of all outcomes of 500 questions that would be called a difference."""
    wrong = 0.0
    for changes in range(150):
        chance = math.comb(500, changes) * changed**changes * (1 - changed) ** (500 - changes)
        for won in range(changes + 1) if chance > 1e-6 else ():
            compared = compare_pairs([1.0] * won + [-1.0] * (changes - won) + [0.0] * (500 - changes))
            wrong += compared.differs * chance * math.comb(changes, won) / 2**changes
    assert 0.035 <= wrong <= 0.055


@pytest.mark.slow
@pytest.mark.parametrize(("wins", "losses"), [(0.03, 0.05), (0.1, 0.1), (0.02, 0.06), (0.15, 0.05)])
def test_intervals_cover_the_difference(wins: float, losses: float) -> None:
    runs = [drawn(wins, losses, seed) for seed in range(2 * RUNS)]
    covered = sum(each.low <= wins - losses <= each.high for each in runs)
    assert 0.93 <= covered / len(runs) <= 0.975


@pytest.mark.slow
@pytest.mark.parametrize("changed", [0.01, 0.04, 0.2])
def test_a_loss_of_the_margin_is_rarely_overlooked(changed: float) -> None:
    wins, losses = (changed - 0.01) / 2, (changed + 0.01) / 2
    overlooked = [drawn(wins, losses, seed).is_not_worse(0.01) for seed in range(2 * RUNS)]
    assert sum(overlooked) <= 0.07 * len(overlooked)


@pytest.mark.slow
def test_a_harmless_arm_is_recognised() -> None:
    assert sum(drawn(0.005, 0.005, seed).is_not_worse(0.01) for seed in range(RUNS)) >= 0.6 * RUNS


@pytest.mark.slow
def test_the_needed_questions_are_enough() -> None:
    """Of runs with as many questions, 80 % refute the loss of the margin."""
    needed = questions_needed(0.14, 0.03)
    runs = [random.Random(seed).choices([1.0, -1.0, 0.0], [0.07, 0.07, 0.86], k=needed) for seed in range(RUNS)]
    assert 0.74 <= sum(compare_pairs(run).is_not_worse(0.03) for run in runs) / RUNS <= 0.86


# -- looked at after every question ------------------------------------------------------------------------------------


def first_verdict(wins: float, losses: float, seed: int, most: int | None = 2_000) -> tuple[str, int]:
    """Return the first verdict of a run of 2,000 questions that is looked at after each one, and the question."""
    counts, differences = PairCounts(), list[float]()
    for each in random.Random(seed).choices([1.0, -1.0, 0.0], [wins, losses, 1 - wins - losses], k=2_000):
        counts.add(each)
        differences.append(each)
        if len(differences) >= 50 and counts.is_certain(MARGIN, most):
            break
    return compare_pairs(differences, most).verdict(MARGIN), len(differences)


@pytest.mark.slow
@pytest.mark.parametrize("changed", [0.14, 0.3])
def test_looking_at_every_question_finds_no_difference_that_is_not_there(changed: float) -> None:
    wrong = ("better", "worse", "worse, within margin")
    looked = [first_verdict(changed / 2, changed / 2, seed)[0] in wrong for seed in range(RUNS)]
    assert sum(looked) <= MOST_ERRORS
    # Intervals that do not know of the looks err more often, so this test would notice.
    naive = [first_verdict(changed / 2, changed / 2, seed, most=None)[0] in wrong for seed in range(RUNS)]
    assert sum(naive) > MOST_ERRORS


@pytest.mark.slow
@pytest.mark.parametrize("changed", [0.05, 0.14])
def test_looking_at_every_question_overlooks_no_loss_of_the_margin(changed: float) -> None:
    wins, losses = (changed - MARGIN) / 2, (changed + MARGIN) / 2
    looked = [first_verdict(wins, losses, seed)[0] not in ("worse", "open") for seed in range(RUNS)]
    assert sum(looked) <= MOST_ERRORS


@pytest.mark.slow
def test_clear_runs_stop_early() -> None:
    large = [first_verdict(0.02, 0.12, seed) for seed in range(RUNS)]
    none = [first_verdict(0.02, 0.02, seed) for seed in range(RUNS)]
    assert {verdict for verdict, _ in large} == {"worse"}
    assert sum(verdict == "not worse" for verdict, _ in none) >= 0.95 * RUNS
    assert sum(asked for _, asked in large) < 0.5 * 2_000 * RUNS
    assert sum(asked for _, asked in none) < 0.6 * 2_000 * RUNS
