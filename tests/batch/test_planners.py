"""The contract of batch planners, checked for each of them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from warmprefix.batch.merge import MergePlanner
from warmprefix.batch.planners import BatchPlanner, Placed, RelevancePlanner, no_progress
from warmprefix_baselines.cluster import ContextIndexPlanner
from warmprefix_baselines.planners import FrequencyPlanner

PLANNERS: dict[str, Callable[[], BatchPlanner]] = {
    "relevance": RelevancePlanner,
    "frequency": FrequencyPlanner,
    "context-index, average": lambda: ContextIndexPlanner(device="cpu"),
    "context-index, complete": lambda: ContextIndexPlanner(linkage="complete", device="cpu"),
    "context-index, single": lambda: ContextIndexPlanner(linkage="single", device="cpu"),
    "merge": lambda: MergePlanner(device="cpu"),
}
planners = pytest.mark.parametrize("planner", [pytest.param(make(), id=name) for name, make in PLANNERS.items()])

Contexts = list[list[int]]
batches = st.lists(st.lists(st.integers(0, 15), max_size=6, unique=True), max_size=12)


def arrange(planner: BatchPlanner, contexts: Contexts) -> list[Placed]:
    blocks = max((max(context, default=0) for context in contexts), default=0) + 1
    return list(planner.arrange(contexts, [10 + block % 7 for block in range(blocks)], no_progress))


def is_complete(planned: list[Placed], contexts: Contexts) -> bool:
    """Return True if every context comes once, with all its blocks."""
    return sorted(placed.context for placed in planned) == list(range(len(contexts))) and all(
        sorted(placed.order) == sorted(contexts[placed.context]) for placed in planned
    )


@planners
def test_planner_satisfies_the_protocol(planner: BatchPlanner) -> None:
    assert isinstance(planner, BatchPlanner)


@planners
@given(contexts=batches)
@example(contexts=[])
@example(contexts=[[]])
@example(contexts=[[], []])
@example(contexts=[[3, 1, 2]])
@example(contexts=[[3, 1, 2], [], [3, 1, 2], [1, 2, 3]])
def test_each_context_is_placed_once_with_all_blocks(planner: BatchPlanner, contexts: Contexts) -> None:
    given = [list(context) for context in contexts]
    planned = arrange(planner, contexts)
    assert is_complete(planned, contexts)
    assert all(type(i) is int and all(type(block) is int for block in order) for i, order in planned)
    assert contexts == given, "the contexts were changed"
    assert arrange(planner, contexts) == planned, "planned differently the second time"


@planners
@given(contexts=batches)
def test_copies_run_next_to_each_other_in_one_order(planner: BatchPlanner, contexts: Contexts) -> None:
    planned = arrange(planner, contexts)
    for context in contexts:
        at = [i for i, placed in enumerate(planned) if contexts[placed.context] == context]
        assert at == list(range(at[0], at[-1] + 1))
        assert len({planned[i].order for i in at}) == 1
        assert [planned[i].context for i in at] == sorted(planned[i].context for i in at)


@pytest.mark.sample(6)
@planners
@pytest.mark.parametrize(
    "contexts",
    [
        pytest.param([[3 * i, 3 * i + 1, 3 * i + 2] for i in range(1_100)], id="disjoint"),
        pytest.param([[2, 0, 1]] * 1_100, id="all the same"),
        pytest.param([[*range(2 * i + 1, 2 * i + 3), 0] for i in range(5_000)], id="one block in all"),
        pytest.param([[]] * 1_100, id="all empty"),
        pytest.param([list(range(length)) for length in range(700)], id="each within the next"),
        pytest.param([random.Random(i).sample(range(300), 15) for i in range(600)], id="random"),
    ],
)
def test_large_batches(planner: BatchPlanner, contexts: Contexts) -> None:
    assert is_complete(arrange(planner, contexts), contexts)
