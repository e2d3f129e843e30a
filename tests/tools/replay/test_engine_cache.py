"""The engine's cache of a replay: what stays, against a model that searches all prefixes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from warmprefix.prefix import PrefixTree
from warmprefix_tools.replay.engine_cache import EngineCache

LENGTHS = (7, 0, 30, 12, 5, 20)
"""Tokens of each piece."""

contexts = st.lists(st.lists(st.integers(0, 5), max_size=5, unique=True), min_size=1, max_size=60)


def serve(cache: EngineCache, pieces: list[int], priority: int = 0) -> int:
    return cache.serve(pieces, [LENGTHS[piece] for piece in pieces], priority)


class Prefixes:
    """The same cache as a dictionary: by prefix, its greatest priority and its last use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: dict[tuple[int, ...], tuple[int, int]] = {}
        self.requests = 0

    def serve(self, pieces: list[int], priority: int) -> int:
        prefixes = [tuple(pieces[: i + 1]) for i in range(len(pieces))]
        found = next((i for i, prefix in enumerate(prefixes) if prefix not in self.held), len(prefixes))
        self.requests += 1
        for prefix in prefixes:
            self.held[prefix] = max(priority, self.held.get(prefix, (0, 0))[0]), self.requests
        while sum(LENGTHS[prefix[-1]] for prefix in self.held) > self.capacity:
            leaves = self.held.keys() - {prefix[:-1] for prefix in self.held}
            del self.held[min(leaves, key=self.held.__getitem__)]
        return found


@given(contexts, st.integers(1, 120), st.data())
def test_lowest_priority_then_least_recently_used_goes_first(
    served: list[list[int]], capacity: int, data: st.DataObject
) -> None:
    cache, model = EngineCache(capacity), Prefixes(capacity)
    for pieces in served:
        priority = data.draw(st.integers(0, 3))
        assert serve(cache, pieces, priority) == model.serve(pieces, priority)
        assert cache.tokens == sum(LENGTHS[prefix[-1]] for prefix in model.held) <= capacity


@given(contexts, st.one_of(st.none(), st.integers(1, 120)))
def test_without_priorities_it_is_lru_like_the_planners_mirror(served: list[list[int]], capacity: int | None) -> None:
    cache, mirror = EngineCache(capacity), PrefixTree[int](capacity)
    growing = EngineCache(capacity)
    for number, pieces in enumerate(served):
        found = mirror.insert(pieces, [LENGTHS[piece] for piece in pieces]).blocks
        assert serve(cache, pieces) == serve(growing, pieces, number) == found
        assert cache.tokens == mirror.resident_tokens


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    cache = EngineCache(40)
    serve(cache, [0])
    assert serve(cache, [2, 0, 3, 5]) == 0
    assert serve(cache, [2, 0, 3]) == 2
    assert cache.tokens == 37


def test_what_several_prompts_share_has_the_highest_of_their_priorities() -> None:
    cache = EngineCache(60)
    serve(cache, [0, 3], 9)
    serve(cache, [0, 5], 1)
    serve(cache, [2], 2)
    assert [serve(cache, pieces, 3) for pieces in ([0, 3], [2], [0, 5])] == [2, 1, 1]
