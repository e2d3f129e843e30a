"""Ghosts follow the best candidate by what it has saved lately, and see a stable sample of large caches."""

from __future__ import annotations

import pytest

from warmprefix.blocks import fingerprint
from warmprefix.ghosts import Ghosts, GhostSample


def test_the_default_stays_until_another_candidate_is_better_by_the_margin() -> None:
    ghosts = Ghosts(("default", "other", "third"), margin=0.1)
    assert ghosts.best == "default"
    ghosts.score([1.0, 1.09, 0.0])
    assert ghosts.best == "default"
    ghosts.score([1.0, 1.2, 1.0])
    assert ghosts.best == "other"
    ghosts.score([1.0, 1.2, 3.0])
    assert ghosts.best == "third"


def test_costs_count_against_a_candidate() -> None:
    ghosts = Ghosts((False, True))
    ghosts.score([-0.5, -0.2])
    assert ghosts.best
    ghosts.score([0.0, -9.0])
    assert not ghosts.best


def test_old_scores_fade() -> None:
    ghosts = Ghosts((1, 2), decay=0.5, margin=0.0)
    for _ in range(5):
        ghosts.score([0.0, 100.0])
    for _ in range(9):
        ghosts.score([1.0, 0.0])
    assert ghosts.best == 1


@pytest.mark.parametrize(("capacity", "rate"), [(100_000, 1), (1_000_000, 1), (5_000_000, 4), (10**12, 8)])
def test_only_of_a_large_cache_and_after_many_requests_a_share_is_seen(capacity: int, rate: int) -> None:
    firsts = [fingerprint(str(i % 2_000)) for i in range(8_000)]
    sample = GhostSample()
    assert sample.fit(capacity, 4_000) == capacity
    assert sum([sample.sees(first) for first in firsts[:1_024]]) == 1_024
    assert sample.fit(capacity, 4_000) == capacity  # they were not too many yet
    sample.sees(firsts[0])
    assert sample.fit(capacity, 4_000) == capacity // rate
    seen = [sample.sees(first) for first in firsts]
    assert sum(seen) == pytest.approx(len(firsts) / rate, rel=0.2)
    assert seen == 4 * seen[:2_000]  # a block is seen always or never


def test_a_cache_or_a_request_without_tokens_has_a_sample() -> None:
    assert GhostSample().fit(1, 0) == 1
    assert Ghosts((None,)).best is None
    single = Ghosts((5,))
    single.score([1.0])
    assert single.best == 5
