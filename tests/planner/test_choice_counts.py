"""What `ContextPlanner.stats` shows of choices, against counts worked out by hand or with code of the test."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from warmprefix import Choice, ContextBlock, ContextPlanner
from warmprefix.batch import BatchRequest
from warmprefix_telemetry.exported_metrics import METRICS

DECAY = 0.999


def candidates(names: str, *scores: float) -> list[ContextBlock]:
    return [
        ContextBlock(f"Passage {name}.", id=name, tokens=1_000, score=score)
        for name, score in zip(names, scores, strict=True)
    ]


def test_candidates_that_enter_are_counted_with_each_plan() -> None:
    planner = ContextPlanner()
    choice = Choice(2, keep=1, within=0.1, extra=1)
    for found in (
        candidates("AB", 3, 2),
        candidates("CD", 3, 2),
        candidates("ACB", 3, 2, 1.95),  # B in place of C
        candidates("AEB", 3, 2, 1),  # B is worse than E by more
        candidates("ADB", 3, 2, 1.95),
    ):
        with planner.planning(found, choose=choice):
            pass
    planner.abandon(planner.plan(candidates("ABE", 3, 2, 1.95), choose=choice))
    with planner.planning(candidates("ABCDE", 3, 2, 1.95, 1.9, 1)):
        pass  # not chosen, but fed
    stats = planner.stats()
    assert (stats.candidate_blocks, stats.exchanged_blocks, stats.extra_blocks) == (16, 2, 0)
    assert (stats.twin_blocks, stats.superseded_blocks) == (0, 0)
    assert stats.fed_passages == 5
    committed = ["AB", "CD", "AB", "AE", "AB", "ABCDE"]
    weights = [DECAY**age for age in reversed(range(6))]
    total = sum(weight * len(names) for weight, names in zip(weights, committed, strict=True))
    assert stats.most_fed_share == pytest.approx((sum(weights) - weights[1]) / total)  # A, in all but one
    planner.reset()
    assert (planner.stats().candidate_blocks, planner.stats().fed_passages) == (0, 0)
    assert planner.stats().most_fed_share is None


@pytest.mark.parametrize(("keep", "extra"), [(2, 0), (4, 3)])
def test_candidates_of_batches_are_counted(keep: int, extra: int) -> None:
    planner = ContextPlanner()
    rng = random.Random(5)
    k, requests = 4, []
    for number in range(40):
        names = rng.sample("ABCDEFGHIJKL", 9)
        scores = sorted([rng.random() for _ in names], reverse=True)
        requests.append(BatchRequest(number, candidates("".join(names), *scores)))
    batch = planner.plan_batch(requests, choose=Choice(k, keep=keep, within=1.0, extra=extra))
    fed = [{*planned.order} for planned in batch]
    left = [set(range(k)) - positions for positions in fed]
    stats = planner.stats()
    assert stats.candidate_blocks == 40 * 9
    assert stats.exchanged_blocks == sum(map(len, left))
    assert stats.extra_blocks == sum(map(len, fed)) - 40 * k
    assert (stats.exchanged_blocks > 0, stats.extra_blocks > 0) == (keep < k, extra > 0)


def test_extra_candidates_are_counted() -> None:
    planner = ContextPlanner()
    with planner.planning(candidates("ABC", 3, 2, 1), choose=Choice(3)):
        pass
    with planner.planning(candidates("ABC", 3, 2, 1.95), choose=Choice(2, keep=2, extra=1)) as plan:
        assert len(plan.blocks) == 3
    assert (planner.stats().exchanged_blocks, planner.stats().extra_blocks) == (0, 1)


def test_exposure_is_the_share_of_the_most_fed_passages_of_each_scope() -> None:
    planner = ContextPlanner()
    rng = random.Random(4)
    fed: dict[str, list[list[int]]] = {"red": [], "blue": []}
    for _ in range(400):
        tenant = rng.choice(["red", "red", "blue"])
        numbers = sorted({min(int(rng.paretovariate(0.3)), 500) for _ in range(6)})[-4:]
        found = [ContextBlock(f"Passage {n}.", tokens=100, score=-float(n)) for n in numbers]
        with planner.planning(found, choose=Choice(4, keep=4), tenant=tenant):
            fed[tenant].append(numbers)
    shares, sizes = [], []
    for requests in fed.values():
        counts: Counter[int] = Counter()
        for age, numbers in enumerate(reversed(requests)):
            for n in numbers:
                counts[n] += DECAY**age  # type: ignore[assignment]
        top = max(round(len(counts) / 100), 1)
        shares.append(sum(times for _, times in counts.most_common(top)) / sum(counts.values()))
        sizes.append(sum(DECAY**age for age in range(len(requests))))
        assert len(counts) > 100
    stats = planner.stats()
    assert stats.fed_passages == sum(len({n for numbers in requests for n in numbers}) for requests in fed.values())
    expected = sum(share * size for share, size in zip(shares, sizes, strict=True)) / sum(sizes)
    assert stats.most_fed_share == pytest.approx(expected)
    assert planner.stats().most_fed_share == stats.most_fed_share


def test_a_planner_that_never_chose_exports_no_share() -> None:
    planner = ContextPlanner()
    with planner.planning(candidates("AB", 2, 1)):
        pass
    metric = next(metric for metric in METRICS if metric.name == "most_fed_ratio")
    assert metric.samples(planner.stats()) == []
    with planner.planning(candidates("AB", 2, 1), choose=Choice(1)):
        pass
    assert metric.samples(planner.stats()) == [({}, 1.0)]
