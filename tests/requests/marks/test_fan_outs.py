"""Calls at the same time behind a context that the API does not hold yet: one of them writes it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import pytest

from warmprefix.cache_profiles import as_profile
from warmprefix_requests.marks.mark_planner import CacheUsage, MarkDecision, MarkedPart, MarkPlanner, PartKind
from warmprefix_requests.marks.marker import CacheMarker
from warmprefix_tools.caches import Admission, Mark, MarkedPrompt, UnitTokens, simulated_cache
from warmprefix_tools.emulator.anthropic_bodies import MessagesRequest

PROFILE = as_profile("anthropic")
ANSWER_SECONDS = 3.0
Units = list[tuple[tuple[str, int], int]]


class FanOut(NamedTuple):
    pause: float
    prompts: list[Units]


def fan_outs(number: int, *, sizes: tuple[int, int], new_instructions: bool) -> Iterator[FanOut]:
    """Yield parallel calls behind a context of their own; instructions are new, too, or the same for all."""
    chosen = random.Random(11)
    for each in range(number):
        instructions = ("system", each if new_instructions else 0)
        length = chosen.choice([50, 300, 1_500, 6_000]) if new_instructions else 1_500
        context = [
            (("block", 10 * each + i), chosen.choice([60, 300, 900, 2_500])) for i in range(chosen.randint(1, 8))
        ]
        calls = range(chosen.randint(*sizes))
        own = [(("task", 100 * each + call), chosen.choice([20, 100, 600])) for call in calls]
        yield FanOut(
            chosen.choice([1.0, 30.0, 400.0, 4_000.0]), [[(instructions, length), *context, task] for task in own]
        )


class Api:
    """One API with its cache, and one way to mark: `none`, `usual` (as LangChain and LiteLLM do) or `ours`."""

    def __init__(self, arm: str) -> None:
        self._arm, self._now, self._units = arm, 0.0, UnitTokens()
        self._cache = simulated_cache(PROFILE)
        self._planner = MarkPlanner(PROFILE, count_tokens=len, clock=lambda: self._now)

    def cost(self, fan_out: FanOut) -> float:
        """Return the price of a fan-out in uncached tokens. All calls are sent before the first one is answered."""
        self._now += fan_out.pause
        running = [self._admitted(units) for units in fan_out.prompts]
        self._now += ANSWER_SECONDS
        for admission, decision in running:
            admission.store(self._now)
            admission.free()
            use = admission.use
            if decision is not None:
                self._planner.report(decision, CacheUsage(use.read, sum(use.written), use.uncached))
        return sum(admission.use.cost(PROFILE) for admission, _ in running)

    def _admitted(self, units: Units) -> tuple[Admission, MarkDecision | None]:
        ends = tuple(accumulate(length for _, length in units))
        last = len(units) - 1
        inner: list[PartKind] = ["inner"] * (last - 1)
        kinds: list[PartKind] = ["system", *inner, "end"]
        marks: tuple[Mark, ...] = (Mark(0), Mark(last)) if self._arm == "usual" else ()
        decision = None
        if self._arm == "ours":
            parts = [
                MarkedPart(repr(unit).encode(), kind, length, max(place - 1, 0))
                for place, (kind, (unit, length)) in enumerate(zip(kinds, units, strict=True))
            ]
            decision = self._planner.decide(parts)
            marks = tuple(Mark(part, lifetime) for part, lifetime in decision.lifetimes.items())
        prompt = MarkedPrompt(self._units.encode(units), None, ends, marks, (last,), automatic=False)
        admission = self._cache.admit(prompt, self._now)
        assert admission is not None
        return admission, decision


@pytest.mark.parametrize(
    "number", [pytest.param(100, id="100"), pytest.param(2_500, id="2500", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("new_instructions", [True, False])
@pytest.mark.parametrize("learns", [True, False])
def test_a_fan_out_costs_at_most_4_percent_more_than_the_better_of_no_marks_and_the_usual_ones(
    number: int, new_instructions: bool, learns: bool
) -> None:
    apis = [Api(arm) for arm in ("none", "usual", "ours")]
    worst = 0.0
    for fan_out in fan_outs(number, sizes=(8, 16), new_instructions=new_instructions):
        if not learns:
            apis = [Api(arm) for arm in ("none", "usual", "ours")]
        plain, usual, ours = [api.cost(fan_out) for api in apis]
        worst = max(worst, ours / min(plain, usual))
    assert 1.0 <= worst <= 1.04  # one of eight writes, at a quarter more


def test_a_call_that_failed_leaves_the_writing_to_the_next_one() -> None:
    now = 0.0
    planner = MarkPlanner(PROFILE, count_tokens=len, clock=lambda: now)
    parts = [MarkedPart(b"instructions", "system", 4_000), MarkedPart(b"question", "end", 10)]
    first, second = planner.decide(parts), planner.decide(parts)
    assert (dict(first.lifetimes), dict(second.lifetimes)) == ({0: 300.0}, {})
    planner.report(first, None)
    assert dict(planner.decide(parts).lifetimes) == {0: 300.0}


def test_what_is_held_is_read_while_more_is_being_written() -> None:
    now = 0.0
    planner = MarkPlanner(PROFILE, count_tokens=len, clock=lambda: now)
    instructions = MarkedPart(b"instructions", "system", 4_000)

    def parts(question: bytes) -> list[MarkedPart]:
        return [instructions, MarkedPart(b"context", "past", 4_000), MarkedPart(question, "end", 10)]

    planner.report(planner.decide([instructions]), CacheUsage(0, 4_000, 0))
    leader = planner.decide(parts(b"1"))
    assert dict(leader.lifetimes) == {0: 300.0, 1: 300.0}
    assert [dict(planner.decide(parts(b"%d" % call)).lifetimes) for call in range(2, 9)] == [{0: 300.0}] * 7
    planner.report(leader, CacheUsage(4_000, 4_000, 10))
    assert dict(planner.decide(parts(b"9")).lifetimes) == {0: 300.0, 1: 300.0}


def test_parallel_bodies_of_the_messages_api_have_one_new_mark() -> None:
    marker = CacheMarker(PROFILE, clock=lambda: 0.0)
    context = [{"type": "text", "text": f"passage {number} " * 400} for number in range(4)]
    system = [{"type": "text", "text": "Answer from the passages. " * 300}]
    bodies: list[dict[str, Any]] = [
        {
            "model": "m",
            "max_tokens": 5,
            "system": system,
            "messages": [{"role": "user", "content": [*context, {"type": "text", "text": f"task {call}"}]}],
        }
        for call in range(8)
    ]
    sent = [marker.mark("messages", body).body for body in bodies]
    marks = [MessagesRequest(**body).prompt_for(PROFILE, "key").marks for body in sent]
    assert [bool(each) for each in marks] == [True, *[False] * 7]
