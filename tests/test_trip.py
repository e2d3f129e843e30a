"""How far one request walks through the code: a plan that one reads in one sitting.

Counted while a planner that has served 20 requests plans and commits one more: files entered, functions entered (a
comprehension belongs to its function), and moves, which are calls of a function in another file than the last call's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import warmprefix
from warmprefix import ContextBlock, ContextPlanner
from warmprefix.ordering import CoAccessPolicy

T = TypeVar("T")

CORE = str(Path(warmprefix.__file__).parent)


class Trip(NamedTuple):
    files: int
    functions: int
    moves: int


def walked(act: Callable[[], T]) -> tuple[T, Trip]:
    """Return the result of a call, and the trip that it made through the core."""
    entered: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(CORE):
            entered.append((code.co_filename, getattr(code, "co_qualname", code.co_name)))

    sys.setprofile(note)
    try:
        result = act()
    finally:
        sys.setprofile(None)
    files = [file for file, _ in entered]
    moves = sum(file != before for before, file in pairwise(files))
    functions = {(file, name) for file, name in entered if not name.endswith(">")}
    return result, Trip(len(set(files)), len(functions), moves)


def next_request(planner: ContextPlanner) -> list[ContextBlock]:
    """Return one more request for a planner that now has served 20."""
    blocks = [ContextBlock(f"passage {i} " * 40, id=f"d{i}") for i in range(30)]
    for i in range(20):
        with planner.planning([blocks[(i * 3 + j) % 30] for j in range(8)]):
            pass
    return [blocks[i] for i in (4, 9, 2, 17, 5, 28, 11, 3)]


def test_a_plan_and_a_commit_stay_short() -> None:
    planner = ContextPlanner()
    request = next_request(planner)
    plan, planned = walked(lambda: planner.plan(request))
    assert plan.order_annotation is not None, "the longest way of a plan: its order needs a note"
    is_recorded, committed = walked(lambda: planner.commit(plan))
    assert is_recorded
    assert all(found <= most for found, most in zip(planned, Trip(12, 60, 30), strict=True)), planned
    # Three ghosts serve the request, each with its own tree: 11 functions, and 10 moves each.
    assert all(found <= most for found, most in zip(committed, Trip(12, 61, 63), strict=True)), committed


def test_a_commit_without_ghosts_stays_short() -> None:
    planner = ContextPlanner(policy=partial(CoAccessPolicy, trust=11))
    plan = planner.plan(next_request(planner))
    _, committed = walked(lambda: planner.commit(plan))
    assert all(found <= most for found, most in zip(committed, Trip(12, 50, 35), strict=True)), committed
