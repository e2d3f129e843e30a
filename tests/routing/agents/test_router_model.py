"""A router under random calls: its state stays consistent, and agrees with a simple model."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from warmprefix import ContextBlock, EngineReport
from warmprefix.errors import NoAgentError
from warmprefix_routing import Agent, AgentBounds, AgentRouter, Assignment, agent_state
from warmprefix_routing.agent_state import AgentTenant

BLOCKS = [ContextBlock(f"block {i}", tokens=(0, 40, 200, 400)[i % 4]) for i in range(14)]
NAMES = ["a", "b", "c", "d"]
TENANTS = [None, "acme", "other"]


def check_integrity(router: AgentRouter) -> None:
    """Check what must hold between any two calls."""
    assert not set(router._members) & set(router._failed)
    for state in router._tenants.states.values():
        assert list(state.agents) == list(router._members)
        pending = Counter[int]()
        for _, bookings in state.open.values():
            assert bookings, "an assignment without bookings"
            pending.update(id(booking.block) for booking in bookings.values())
        index: dict[bytes, set[str]] = {}
        for name, member in state.agents.items():
            assert member.alive
            assert member.load >= 0
            assert member.cache.tokens == sum(block.tokens for block in member.cache.blocks.values())
            for key in member.cache.blocks:
                index.setdefault(key, set()).add(name)
                block = member.cache.blocks.get(key)
                assert block is not None
                assert block.pending == pending[id(block)]
                assert block.pending or block.read, "held, but without a reader"
        assert {key: {member.name for member in held} for key, held in state.holders.items()} == index
        assert sum(map(len, state.holders.values())) == sum(map(len, index.values())), "a holder twice"
        assert state.copies == sum(len(held) - 1 for held in index.values())
        assert len(state.open) <= router._bounds.max_open
        assert len(state.chats) <= router._bounds.max_conversations
        assert state.memory_bytes == recounted_bytes(state)
    stats = router.stats()
    assert stats.open == sum(len(state.open) for state in router._tenants.states.values())
    assert 0 <= stats.held + stats.spilled <= stats.blocks
    assert stats.abandoned <= stats.blocks
    recorded = [state.recorded_bytes for state in router._tenants.states.values()]
    assert router._tenants.total_bytes == sum(recorded)
    assert stats.memory_bytes <= sum(recorded)


def recounted_bytes(state: AgentTenant) -> int:
    """Return the estimate, counted from scratch."""
    held = agent_state._BLOCK * len(state.holders) + agent_state._COPY * sum(map(len, state.holders.values()))
    booked = sum(agent_state._OPEN + agent_state._BOOKING * len(bookings) for _, bookings in state.open.values())
    read = sum(
        agent_state._CHAT
        + agent_state._CHAT_AGENT * len(chats.agents)
        + sum(agent_state._CHAT_BLOCK + agent_state._CHAT_COPY * len(members) for members in chats.readers.values())
        for chats in state.chats.values()
    )
    return agent_state._TENANT + agent_state._MEMBER * len(state.agents) + held + booked + read


class RouterMachine(RuleBasedStateMachine):
    """The model has the agents, and the exact load: the sum over all assignments."""

    assignments: Bundle[Assignment] = Bundle("assignments")

    @initialize(capacity=st.none() | st.integers(100, 1_500), bound=st.integers(1, 8), eps=st.sampled_from([0, 0.25]))
    def begin(self, capacity: int | None, bound: int, eps: float) -> None:
        self.router = AgentRouter(
            [Agent(name, capacity) for name in NAMES[:3]],
            bounds=AgentBounds(
                eps=eps, free_tokens=300, max_blocks=6, max_tenants=2, max_conversations=2, max_open=bound
            ),
        )
        self.alive, self.failed = set(NAMES[:3]), set[str]()

    @rule(
        target=assignments,
        numbers=st.lists(st.integers(0, 13), max_size=8),
        tenant=st.sampled_from(TENANTS),
        conversation=st.sampled_from([None, "one", "two", "three"]),
        among=st.none() | st.sets(st.sampled_from(NAMES), min_size=1),
        together=st.booleans(),
    )
    def assign(
        self, numbers: list[int], tenant: str | None, conversation: str | None, among: set[str] | None, together: bool
    ) -> Assignment | MultipleResults[Assignment]:
        blocks = [BLOCKS[i] for i in numbers]
        names = None if among is None else sorted(among)
        call: Callable[[], Assignment] = lambda: self.router.assign(  # noqa: E731
            blocks, names, conversation=conversation, tenant=tenant, together=together
        )
        possible = self.alive if among is None else self.alive & among
        if among is not None and among - self.alive - self.failed:
            with pytest.raises(ValueError, match="must be"):
                call()
            return multiple()
        if not possible:
            with pytest.raises(NoAgentError):
                call()
            return multiple()
        assignment = call()
        assert set(assignment.agents) == possible
        assert [assigned.block for assigned in assignment.blocks] == list(dict.fromkeys(blocks))
        assert all(assigned.agent in possible for assigned in assignment.blocks)
        return assignment

    @rule(
        assignment=assignments,
        agent=st.none() | st.sampled_from(NAMES),
        some=st.none() | st.integers(0, 8),
        cached=st.none() | st.integers(0, 400),
    )
    def commit(self, assignment: Assignment, agent: str | None, some: int | None, cached: int | None) -> None:
        blocks = None if some is None else [assigned.block for assigned in assignment.blocks[:some]]
        report = None if cached is None else EngineReport(cached_tokens=cached)
        if self.router.commit(assignment, agent, report, blocks=blocks):
            assert not self.router.commit(assignment, agent, report, blocks=blocks)

    @rule(assignment=assignments, agent=st.none() | st.sampled_from(NAMES), some=st.none() | st.integers(0, 8))
    def abandon(self, assignment: Assignment, agent: str | None, some: int | None) -> None:
        blocks = None if some is None else [assigned.block for assigned in assignment.blocks[:some]]
        if self.router.abandon(assignment, agent, blocks=blocks):
            assert not self.router.abandon(assignment, agent, blocks=blocks)

    @rule(target=assignments, assignment=consumes(assignments), agent=st.sampled_from(NAMES))
    def reassign(self, assignment: Assignment, agent: str) -> Assignment:
        given = {assigned.block for assigned in assignment.blocks if assigned.agent == agent}
        try:
            more = self.router.reassign(assignment, agent)
        except NoAgentError:
            assert not self.alive & set(assignment.agents) - {agent}
            return assignment
        assert {assigned.block for assigned in more.blocks} <= given
        assert agent not in more.agents
        return more

    @rule(numbers=st.lists(st.integers(0, 13), max_size=8), tenant=st.sampled_from(TENANTS), together=st.booleans())
    def give_and_take_back(self, numbers: list[int], tenant: str | None, together: bool) -> None:
        """Abandoning restores the state, except for evictions from a full cache or list."""
        if not self.alive:
            return
        load = self.router.load(tenant)
        state = self.router._tenants.states.get(tenant)
        held = {} if state is None else {key: set(members) for key, members in state.holders.items()}
        full = state is None or len(state.open) >= self.router._bounds.max_open
        assignment = self.router.assign([BLOCKS[i] for i in numbers], tenant=tenant, together=together)
        self.router.abandon(assignment)
        after = self.router._tenants.states[tenant]
        if not full:
            assert self.router.load(tenant) == pytest.approx(load, abs=1e-6)
            for key, members in after.holders.items():
                assert set(members) <= held.get(key, set())

    @rule(name=st.sampled_from(NAMES), weight=st.sampled_from([None, 1.0, 2.0]))
    def join(self, name: str, weight: float | None) -> None:
        agent = name if weight is None else Agent(name, 500, weight)
        if name in self.alive:
            with pytest.raises(ValueError, match="twice"):
                self.router.join(agent)
            return
        self.router.join(agent)
        self.alive.add(name)
        self.failed.discard(name)
        for state in self.router._tenants.states.values():
            assert len(state.agents[name].cache.blocks) == 0

    @rule(name=st.sampled_from(NAMES))
    def fail(self, name: str) -> None:
        if name in self.alive | self.failed:
            self.router.fail(name)
            self.alive.discard(name)
            self.failed.add(name)
        else:
            with pytest.raises(ValueError, match="must be"):
                self.router.fail(name)

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        if name in self.alive | self.failed:
            self.router.leave(name)
            self.alive.discard(name)
            self.failed.discard(name)
        else:
            with pytest.raises(ValueError, match="must be"):
                self.router.leave(name)

    @rule(conversation=st.sampled_from(["one", "two"]), tenant=st.sampled_from(TENANTS))
    def end(self, conversation: str, tenant: str | None) -> None:
        self.router.end(conversation, tenant)

    @rule()
    def reset(self) -> None:
        self.router.reset()
        assert self.router.stats().tenants == self.router.stats().open == 0

    @invariant()
    def check(self) -> None:
        if hasattr(self, "router"):
            assert {agent.name for agent in self.router.agents} == self.alive
            check_integrity(self.router)


TestRouterModel = RouterMachine.TestCase
TestRouterModel.settings = settings()


@pytest.mark.parametrize("max_bytes", [500_000_000, 12_000])
def test_concurrent_calls_keep_the_state_consistent(max_bytes: int) -> None:
    router = AgentRouter(NAMES, bounds=AgentBounds(max_blocks=20, max_open=50, max_tenants=2, max_bytes=max_bytes))
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = Random(seed)
        mine: list[Assignment] = []
        try:
            for _ in range(400):
                what = rng.randrange(20)
                try:
                    if what < 10:
                        blocks = [BLOCKS[rng.randrange(14)] for _ in range(rng.randrange(6))]
                        mine.append(
                            router.assign(blocks, conversation=rng.choice([None, "one"]), tenant=rng.choice(TENANTS))
                        )
                    elif what < 14 and mine:
                        router.commit(mine.pop(), report=EngineReport(cached_tokens=rng.choice([0, 500])))
                    elif what < 16 and mine:
                        router.abandon(mine.pop())
                    elif what == 16 and mine:
                        mine.append(router.reassign(mine.pop(), rng.choice(NAMES)))
                    elif what == 17:
                        router.fail(rng.choice(NAMES[1:]))
                    elif what == 18:
                        router.join(rng.choice(NAMES[1:]))
                    else:
                        router.end("one", rng.choice(TENANTS))
                        assert router.stats().blocks >= 0
                except NoAgentError:  # of the others, all have failed just now
                    assert what == 16
                except ValueError:  # it is there already
                    assert what == 18
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    check_integrity(router)
    for name in NAMES[1:]:
        if name not in {agent.name for agent in router.agents}:
            router.join(name)
    assignment = router.assign(BLOCKS, tenant="acme")
    assert len(assignment.blocks) == len(BLOCKS)
    check_integrity(router)
