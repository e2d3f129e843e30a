from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from statistics import fmean

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from warmprefix import MissingExtraError
from warmprefix.batch import Device
from warmprefix.batch.planners import Placed, Progress, no_progress
from warmprefix_baselines import cluster
from warmprefix_baselines.cluster import ContextIndexPlanner, Linkage, index_contexts
from warmprefix_baselines.context_index import context_distance
from warmprefix_kernels.distances import Ragged, condensed_distances

contexts_of_few = st.lists(st.lists(st.integers(0, 6), max_size=5, unique=True), max_size=9)
linkages = pytest.mark.parametrize("linkage", ["average", "complete", "single"])


def arrange(contexts: Sequence[Sequence[int]], linkage: Linkage = "average") -> list[Placed]:
    blocks = max((max(context, default=0) for context in contexts), default=0) + 1
    return ContextIndexPlanner(linkage=linkage, device="cpu").arrange(contexts, [1] * blocks, no_progress)


def orders(contexts: Sequence[Sequence[int]], linkage: Linkage = "average") -> list[list[int]]:
    """Return the planned orders by context, not in execution order."""
    return [list(placed.order) for placed in sorted(arrange(contexts, linkage))]


# -- ContextPilot's worked example -------------------------------------------------------------------------------------

BUILD = [[2, 1, 3], [2, 6, 1], [4, 1, 0]]


@linkages
def test_the_worked_example(linkage: Linkage) -> None:
    assert orders(BUILD, linkage) == [[1, 2, 3], [1, 2, 6], [1, 4, 0]]


def test_tree_of_the_worked_example() -> None:
    """The first two contexts are nearest and make {1, 2}; the third makes {1} of it."""
    indexed = index_contexts(BUILD, [(0, 1), (2, 3)])
    assert [context.prefix for context in indexed] == [(1, 2), (1, 2), (1,)]
    assert [context.path for context in indexed] == [(0, 0, 0), (0, 0, 1), (0, 1)]
    assert [list(context.order) for context in indexed] == [[1, 2, 3], [1, 2, 6], [1, 4, 0]]


@linkages
def test_example_of_scheduling(linkage: Linkage) -> None:
    """C6, C3, C7 and C8 run as C6, C8, C3, C7."""
    contexts = [[1, 2, 4], [1, 4, 0], [5, 7, 8], [1, 2, 9]]
    assert arrange(contexts, linkage) == [
        Placed(0, (1, 2, 4)),
        Placed(3, (1, 2, 9)),
        Placed(1, (1, 4, 0)),
        Placed(2, (5, 7, 8)),
    ]


def test_planned_orders_begin_like_those_of_the_online_index() -> None:
    contexts = [*BUILD, [2, 1, 4], [5, 7, 8], [1, 2, 9]]
    assert orders(contexts) == [[1, 2, 3], [1, 2, 6], [1, 4, 0], [1, 2, 4], [5, 7, 8], [1, 2, 9]]


# -- the tree ----------------------------------------------------------------------------------------------------------


def test_merge_without_shared_blocks_makes_no_node() -> None:
    indexed = index_contexts([[1, 2], [3, 4], [2, 1, 5], [4, 6]], [(0, 2), (1, 3), (4, 5)])
    assert [context.path for context in indexed] == [(0,), (1, 0), (0, 0), (1, 1)]
    assert [context.order for context in indexed] == [(1, 2), (4, 3), (1, 2, 5), (4, 6)]


def test_equal_nodes_of_different_merges_are_one() -> None:
    indexed = index_contexts([[1, 9], [8, 9], [3], [7, 9], [6, 9]], [(0, 1), (3, 4), (2, 5), (6, 7)])
    assert [context.path for context in indexed] == [(0, 0), (0, 1), (1,), (0, 2), (0, 3)]
    assert [context.prefix for context in indexed] == [(9,), (9,), (), (9,), (9,)]


def test_lifted_node_hangs_from_the_largest_node_that_it_extends() -> None:
    # {5, 6} and {5} are merged with contexts that share nothing, so both are lifted; {5, 6} begins like {5}.
    contexts = [[7, 6, 5], [5, 6, 8], [1, 2], [5, 3], [4, 5], [0]]
    indexed = index_contexts(contexts, [(0, 1), (2, 6), (3, 4), (5, 8), (7, 9)])
    assert [context.prefix for context in indexed] == [(5, 6), (5, 6), (), (5,), (5,), ()]
    assert [context.path for context in indexed] == [(0, 0, 0), (0, 0, 1), (1,), (0, 1), (0, 2), (2,)]


def test_lifted_node_chooses_the_largest_of_several_parents() -> None:
    contexts = [[2, 10], [11, 2], [1, 2, 12], [13, 2, 1], [3, 2, 1], [0], [20], [21]]
    indexed = index_contexts(contexts, [(0, 1), (2, 3), (4, 5), (8, 6), (9, 7), (11, 12), (10, 13)])
    assert indexed[4].order == (2, 1, 3)
    assert indexed[4].prefix == indexed[2].prefix == (2, 1)


def test_equal_nodes_keep_the_deepest_place() -> None:
    contexts = [[5, 6, 7, 1], [5, 6, 7, 2], [5, 6, 7, 3], [5, 6, 7, 4], [7, 5, 8], [6, 9]]
    indexed = index_contexts(contexts, [(0, 1), (2, 3), (6, 4), (7, 5), (8, 9)])
    assert [context.prefix for context in indexed] == [*[(5, 7, 6)] * 4, (5, 7), ()]


def test_added_blocks_are_in_ascending_order() -> None:
    indexed = index_contexts([[8, 1, 64, 2], [64, 8, 3, 1], [9, 64]], [(0, 1), (2, 3)])
    assert [context.order for context in indexed] == [(64, 1, 8, 2), (64, 1, 8, 3), (64, 9)]


def test_context_may_itself_be_a_node() -> None:
    indexed = index_contexts([[1, 2], [2, 1, 4], [1, 2, 5]], [(1, 2), (0, 3)])
    assert [context.path for context in indexed] == [(0,), (0, 0), (0, 1)]
    assert [context.order for context in indexed] == [(1, 2), (1, 2, 4), (1, 2, 5)]


def test_contexts_hang_from_the_root_without_merges() -> None:
    indexed = index_contexts([[3, 1], [], [2]], [])
    assert [context.path for context in indexed] == [(0,), (), (1,)]
    assert [context.order for context in indexed] == [(3, 1), (), (2,)]


@st.composite
def merged(draw: st.DrawFn) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Draw contexts and any dendrogram over them."""
    contexts = draw(contexts_of_few)
    merges: list[tuple[int, int]] = []
    clusters = list(range(len(contexts)))
    while len(clusters) > 1:
        a, b = (clusters.pop(draw(st.integers(0, len(clusters) - 1))) for _ in range(2))
        clusters.append(len(contexts) + len(merges))
        merges.append((a, b))
    return contexts, merges


@given(merged())
def test_contexts_begin_with_the_blocks_of_their_nodes(
    given: tuple[list[list[int]], list[tuple[int, int]]],
) -> None:
    contexts, merges = given
    indexed = index_contexts(contexts, merges)
    at_path: dict[tuple[int, ...], list[int]] = {}
    for i, (context, place) in enumerate(zip(contexts, indexed, strict=True)):
        assert sorted(place.order) == sorted(context)
        assert place.order[: len(place.prefix)] == place.prefix
        rest = place.order[len(place.prefix) :]
        assert list(rest) == [block for block in context if block in rest]
        assert len(place.path) <= len(context)
        for depth in range(len(place.path) + 1):
            at_path.setdefault(place.path[:depth], []).append(i)
    for path, members in at_path.items():
        children = sorted({indexed[i].path[len(path)] for i in members if len(indexed[i].path) > len(path)})
        assert children == list(range(len(children)))
        first = [min(i for i in members if indexed[i].path[: len(path) + 1] == (*path, child)) for child in children]
        assert first == sorted(first)
        if len(members) > 1:  # a node: its contexts share at least as many first blocks as it is deep
            beginnings = {indexed[i].order[: len(path)] for i in members}
            assert len(beginnings) == 1


@given(merged())
def test_contexts_begin_with_all_blocks_that_their_clusters_share(
    given: tuple[list[list[int]], list[tuple[int, int]]],
) -> None:
    contexts, merges = given
    held = {i: {i} for i in range(len(contexts))}
    for number, (a, b) in enumerate(merges, len(contexts)):
        held[number] = held[a] | held[b]
    shared = {number: frozenset.intersection(*(frozenset(contexts[i]) for i in held[number])) for number in held}
    # Equal nodes are one, so one of two in different places would lose its parent; excluded here.
    outermost: dict[frozenset[int], set[int]] = {}
    for number in reversed(held):
        outermost.setdefault(shared[number], held[number])
    assume(all(held[number] <= outermost[shared[number]] for number in held if shared[number]))
    indexed = index_contexts(contexts, merges)
    for number in range(len(contexts), len(held)):
        for i in held[number]:
            assert shared[number] == set(indexed[i].order[: len(shared[number])])


@given(merged())
def test_contexts_with_the_same_blocks_share_a_place(
    given: tuple[list[list[int]], list[tuple[int, int]]],
) -> None:
    contexts, merges = given
    places: dict[frozenset[int], set[object]] = {}
    for context, place in zip(contexts, index_contexts(contexts, merges), strict=True):
        places.setdefault(frozenset(context), set()).add(place)
    assert all(len(same) == 1 for same in places.values())


# -- the planner -------------------------------------------------------------------------------------------------------


def test_copies_run_next_to_each_other_and_keep_relevance_order() -> None:
    assert arrange([[3, 1], [2, 0], [3, 1], [2, 0], [3, 1]]) == [
        Placed(0, (3, 1)),
        Placed(2, (3, 1)),
        Placed(4, (3, 1)),
        Placed(1, (2, 0)),
        Placed(3, (2, 0)),
    ]


@linkages
@given(contexts=contexts_of_few)
@example(contexts=[[], [], [1]])
def test_contexts_without_shared_blocks_keep_relevance_order(linkage: Linkage, contexts: list[list[int]]) -> None:
    for context, order in zip(contexts, orders(contexts, linkage), strict=True):
        others = [set(other) for other in contexts if set(other) != set(context)]
        if not any(other & set(context) for other in others) and contexts.count(context) == sum(
            set(other) == set(context) for other in contexts
        ):
            assert order == context


def test_5000_contexts_that_share_one_block() -> None:
    contexts = [[*range(1 + 3 * i, 4 + 3 * i), 0] for i in range(5_000)]
    planned = arrange(contexts)
    assert [placed.context for placed in planned] == list(range(5_000))
    assert all(placed.order == (0, *contexts[placed.context][:3]) for placed in planned)


def test_chain_of_nested_contexts_needs_no_recursion() -> None:
    contexts = [list(reversed(range(length))) for length in range(1, 2_000)]
    last = len(contexts) - 1
    merges = [(last, last - 1), *((len(contexts) + i, last - 2 - i) for i in range(last - 1))]
    for context, place in zip(contexts, index_contexts(contexts, merges), strict=True):
        assert len(place.path) == len(context)
        assert place.order == tuple(range(len(context)))


def test_1100_disjoint_contexts() -> None:
    contexts = [[2 * i + 1, 2 * i] for i in range(1_100)]
    assert arrange(contexts) == [Placed(i, tuple(context)) for i, context in enumerate(contexts)]


def test_too_many_distinct_contexts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "MAX_DISTINCT", 3)
    assert len(arrange([[1], [2], [3], [1], [2]])) == 5
    with pytest.raises(ValueError, match="at most 3 distinct contexts, got 4; the planner 'merge'"):
        arrange([[1], [2], [3], [1], [4]])


def test_progress_reports_distances_and_linkage() -> None:
    steps: list[tuple[str, int, int]] = []
    ContextIndexPlanner(device="cpu").arrange([[1], [2], [2, 1]], [1] * 3, lambda *step: steps.append(step))
    assert steps == [("distances", 3, 3), ("linkage", 0, 2), ("linkage", 2, 2)]


@pytest.mark.parametrize(("linkage", "of_pairs"), [("average", fmean), ("complete", max), ("single", min)])
def test_clusters_are_merged_by_the_distances_of_their_pairs(
    linkage: Linkage, of_pairs: Callable[[Iterable[float]], float]
) -> None:
    rng = random.Random(7)
    contexts = [rng.sample(range(150), 100) for _ in range(12)]
    clusters = {i: [i] for i in range(len(contexts))}
    merges: list[tuple[int, int]] = []
    distances = {(i, j): context_distance(contexts[i], contexts[j]) for i in clusters for j in clusters}
    assert len({round(distance, 6) for distance in distances.values()}) == 1 + 12 * 11 // 2, "there are ties"
    while len(clusters) > 1:
        _, a, b = min(
            (of_pairs([distances[i, j] for i in clusters[a] for j in clusters[b]]), a, b)
            for a, b in combinations(clusters, 2)
        )
        clusters[len(contexts) + len(merges)] = clusters.pop(a) + clusters.pop(b)
        merges.append((a, b))
    assert orders(contexts, linkage) == [list(place.order) for place in index_contexts(contexts, merges)]


@linkages
def test_last_bit_of_a_distance_does_not_change_the_plan(linkage: Linkage, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(2)
    contexts = [rng.sample(range(60), 10) for _ in range(150)]
    planned = arrange(contexts, linkage)

    def almost(contexts: Ragged, alpha: float, device: Device, progress: Progress) -> npt.NDArray[np.float32]:
        exact = condensed_distances(contexts, alpha, device, progress)
        directions = np.random.default_rng(3).choice(np.array([-1, 0.5, 2], np.float32), exact.shape)
        shifted: npt.NDArray[np.float32] = np.nextafter(exact, directions)
        return shifted

    monkeypatch.setattr(cluster, "condensed_distances", almost)
    assert arrange(contexts, linkage) == planned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 0.0}, r"alpha must be in \[0.001, 0.01\], got 0.0"),
        ({"alpha": float("nan")}, "alpha must be in"),
        ({"linkage": "ward"}, "linkage must be one of average, complete, single, got 'ward'"),
        ({"device": "gpu"}, "device must be one of auto, cpu, cuda, got 'gpu'"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContextIndexPlanner(**arguments)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("module", ["numpy", "scipy"])
def test_missing_extra_is_named(module: str) -> None:
    code = f"""
import sys
sys.modules["{module}"] = None
try:
    import warmprefix_baselines.cluster
except ImportError as error:
    print(type(error).__name__, error)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == f"{MissingExtraError.__name__} {MissingExtraError('batch', module)}\n"
