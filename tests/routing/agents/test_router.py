"""`AgentRouter`: assignments, agents, conversations, reports, bounds and bad input."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from warmprefix import ContextBlock, ContextPlanner, EngineReport
from warmprefix.errors import EngineError, NoAgentError
from warmprefix_routing import Agent, AgentBounds, AgentRouter, Assignment, RouterStats


def block(name: object, tokens: int = 100) -> ContextBlock:
    return ContextBlock(f"text of {name}", id=str(name), tokens=tokens)


def blocks(*names: object, tokens: int = 100) -> list[ContextBlock]:
    return [block(name, tokens) for name in names]


def read(router: AgentRouter, given: Sequence[ContextBlock], **options: Any) -> Assignment:
    """Assign and commit."""
    assignment = router.assign(given, **options)
    assert router.commit(assignment) == bool(given)
    return assignment


def readers(assignment: Assignment) -> dict[str, str]:
    return {assigned.block.text: assigned.agent for assigned in assignment.blocks}


# -- one assignment ----------------------------------------------------------------------------------------------------


def test_neighbours_in_one_prompt_go_to_one_agent() -> None:
    router = AgentRouter(["a", "b", "c"])
    run = [ContextBlock(f"part {i}", id=i, tokens=100, follows=i - 1) for i in range(1, 5)]
    for others in (range(10, 18), range(20, 28)):
        given = [*blocks(*others), *run]
        together = read(router, given, together=True)
        assert len({readers(together)[block.text] for block in run}) == 1
        assert [assigned.block for assigned in together.blocks] == given
    assert [assigned.held for assigned in together.blocks[-4:]] == ["cache"] * 4
    assert router.stats().held_tokens == 400
    alone = AgentRouter(["a", "b", "c"]).assign(run)
    assert len({assigned.agent for assigned in alone.blocks}) == 3
    open_one = router.assign(run, together=True)
    assert router.abandon(open_one, blocks=run[:2])
    moved = router.reassign(open_one, open_one.blocks[0].agent)
    assert [assigned.block for assigned in moved.blocks] == run[2:]
    assert len({assigned.agent for assigned in moved.blocks}) == 1


def test_committed_blocks_go_to_the_same_agents_again() -> None:
    router = AgentRouter(["a", "b", "c"])
    first = read(router, blocks(*range(9)))
    assert not any(assigned.held for assigned in first.blocks)
    assert Counter(assigned.agent for assigned in first.blocks) == {"a": 3, "b": 3, "c": 3}
    again = read(router, blocks(*reversed(range(9))))
    assert readers(again) == readers(first)
    assert {assigned.held for assigned in again.blocks} == {"cache"}
    assert again.held_tokens == again.total_tokens == 900


def test_assignment_identifies_its_request() -> None:
    router = AgentRouter(["a", "b"])
    one, two = blocks("one", "two")
    assignment = router.assign([one, two, one, two.text], ["b"], conversation="chat", tenant="acme", together=True)
    assert (assignment.tenant, assignment.conversation, assignment.agents) == ("acme", "chat", ("b",))
    assert [(assigned.block, assigned.positions) for assigned in assignment.blocks] == [(one, (0, 2)), (two, (1, 3))]
    assert assignment.segments == {"b": (one, two)}
    assert assignment.together
    assert assignment.total_tokens == 200
    assert len({assignment.id, *(router.assign(["x"]).id for _ in range(9))}) == 10


def test_segments_begin_with_the_agent_of_the_most_relevant_block() -> None:
    router = AgentRouter(["a", "b", "c"])
    given = blocks(*range(12))
    assignment = router.assign(given)
    segments = assignment.segments
    assert list(segments) == list(dict.fromkeys(assigned.agent for assigned in assignment.blocks))
    assert next(iter(segments.values()))[0] is given[0]
    for segment in segments.values():
        assert [given.index(each) for each in segment] == sorted(given.index(each) for each in segment)
    assert sorted(sum(segments.values(), ()), key=given.index) == given


def test_simultaneous_requests_for_a_document_go_to_one_agent() -> None:
    """Before any of them was read."""
    router = AgentRouter([f"agent-{i}" for i in range(15)])
    assert len({router.assign(blocks("hot")).blocks[0].agent for _ in range(20)}) == 1


def test_request_without_blocks() -> None:
    router = AgentRouter(["a"])
    assignment = router.assign([], conversation="chat")
    assert (assignment.blocks, assignment.segments, assignment.total_tokens) == ((), {}, 0)
    assert assignment.agents == ("a",)
    assert not router.commit(assignment)
    assert not router.abandon(assignment)
    assert router.reassign(assignment, "a").blocks == ()
    assert replace(router.stats(), memory_bytes=0) == RouterStats(assignments=2, tenants=1)


def test_blocks_of_no_length_are_spread_too() -> None:
    router = AgentRouter(["a", "b", "c"])
    assignment = router.assign(blocks(*range(9), tokens=0))
    assert Counter(assigned.agent for assigned in assignment.blocks) == {"a": 3, "b": 3, "c": 3}
    assert assignment.total_tokens == assignment.held_tokens == 0
    assert [assigned.held for assigned in router.assign(["", ""]).blocks] == [None]


def test_more_agents_than_blocks() -> None:
    router = AgentRouter([f"agent-{i}" for i in range(32)])
    assignment = router.assign(blocks("one", "two"))
    assert len(assignment.agents) == 32
    assert len(assignment.segments) == 2


# -- taking back -------------------------------------------------------------------------------------------------------


def holders(router: AgentRouter, tenant: str | None = None) -> dict[bytes, list[str]]:
    return {key: [member.name for member in held] for key, held in router._tenants.states[tenant].holders.items()}


def test_abandon_restores_load_and_holders() -> None:
    router = AgentRouter(["a", "b", "c"])
    read(router, blocks(*range(5)))
    before = router.load(), holders(router)
    first = router.assign(blocks(*range(3, 12)))
    second = router.assign(blocks(*range(6, 15)))
    assert router.abandon(second)
    assert router.abandon(first)
    assert router.load() == pytest.approx(before[0])
    assert holders(router) == before[1]
    assert not router.abandon(first)
    assert not router.commit(first)
    assert router.stats().abandoned == 18


def test_block_stays_held_until_all_its_readers_abandon() -> None:
    router = AgentRouter(["a", "b"])
    first, second, third = (router.assign(blocks("hot")) for _ in range(3))
    router.abandon(first)
    assert len(holders(router)) == 1, "two are on their way to hold it"
    router.abandon(third)
    router.abandon(second)
    assert not holders(router)
    fourth, fifth = (router.assign(blocks("hot")) for _ in range(2))
    router.commit(fourth)
    router.abandon(fifth)
    assert len(holders(router)) == 1, "one did read it"


def test_abandon_keeps_a_block_that_was_evicted_and_read_again() -> None:
    router = AgentRouter([Agent("a", capacity_tokens=100)])
    early = router.assign(blocks("x"))
    read(router, blocks("y"))
    assert not router.assign(blocks("x")).blocks[0].held
    router.abandon(early)
    assert router.assign(blocks("x")).blocks[0].held


def test_parts_of_an_assignment_end_separately() -> None:
    router = AgentRouter(["a", "b"])
    given = blocks(*range(8))
    assignment = router.assign(given, conversation="chat")
    by_agent = assignment.segments
    assert router.commit(assignment, "a", blocks=by_agent["a"][:1])
    assert not router.commit(assignment, "a", blocks=by_agent["b"]), "the other's"
    assert not router.abandon(assignment, "a", blocks=[by_agent["a"][0].text]), "ended"
    assert router.abandon(assignment, "a", blocks=[by_agent["a"][1].text])
    assert router.stats().open == 1
    assert router.commit(assignment, "b")
    assert router.abandon(assignment)
    assert router.stats().open == 0
    held = {assigned.block: assigned.held for assigned in router.assign(given, conversation="chat").blocks}
    assert held == {
        by_agent["a"][0]: "conversation",
        **dict.fromkeys(by_agent["a"][1:]),
        **dict.fromkeys(by_agent["b"], "conversation"),
    }


def test_oldest_assignment_beyond_max_open_counts_as_read() -> None:
    router = AgentRouter(["a", "b"], bounds=AgentBounds(max_open=3))
    made = [router.assign(blocks(i)) for i in range(5)]
    assert router.stats().open == 3
    assert [router.commit(assignment) for assignment in made] == [False, False, True, True, True]
    assert all(assigned.held for assigned in router.assign(blocks(*range(5))).blocks)


def test_abandoned_blocks_do_not_age_the_load() -> None:
    router = AgentRouter(["a", "b"], bounds=AgentBounds(window_tokens=100))
    read(router, blocks(*range(4)))
    before = router.load()
    for _ in range(50):
        router.abandon(router.assign(blocks(*range(20))))
    assert router.load() == pytest.approx(before)
    read(router, blocks(*range(20)))
    assert router.load() != pytest.approx(before)


# -- reassigning -------------------------------------------------------------------------------------------------------


def test_reassign_moves_the_unread_blocks_of_a_failed_agent() -> None:
    router = AgentRouter(["a", "b", "c", "d"])
    given = blocks(*range(12))
    assignment = router.assign([given[0], *given], ["a", "b", "c"])
    read_already = assignment.segments["b"][0]
    router.commit(assignment, "b", blocks=[read_already])
    router.fail("b")
    more = router.reassign(assignment, "b")
    assert more.agents == ("a", "c")
    left = {assigned.block: assigned.positions for assigned in assignment.blocks if assigned.agent == "b"}
    del left[read_already]
    assert {assigned.block: assigned.positions for assigned in more.blocks} == left
    assert router.commit(assignment)
    assert router.commit(more)
    assert router.reassign(assignment, "b").blocks == ()
    assert router.stats().open == 0


def test_ended_blocks_are_not_reassigned() -> None:
    router = AgentRouter(["a", "b"])
    for end in (router.commit, router.abandon):
        assignment = router.assign(blocks(*range(4)))
        end(assignment)
        assert router.reassign(assignment, "a").blocks == ()


def test_assignment_without_bookings_is_reassigned_whole() -> None:
    """Reading twice is better than not reading."""
    router, other = AgentRouter(["a", "b"], bounds=AgentBounds(max_open=1)), AgentRouter(["a", "b"])
    foreign = other.assign(blocks(*range(4)))
    pushed_out = router.assign(blocks(*range(4)))
    router.assign(blocks("x"))
    before_reset = router.assign(blocks(*range(4)))
    for assignment in (foreign, pushed_out):
        assert {given.block for given in router.reassign(assignment, "a").blocks} == set(assignment.segments["a"])
    router.reset()
    assert {given.block for given in router.reassign(before_reset, "a").blocks} == set(before_reset.segments["a"])


def test_no_agent_is_left() -> None:
    router = AgentRouter(["a", "b"])
    assignment = router.assign(blocks(*range(4)), ["a"])
    router.fail("a")
    with pytest.raises(NoAgentError, match="'a'"):
        router.reassign(assignment, "a")
    assert router.assign(["x"]).agents == ("b",)
    router.fail("b")
    with pytest.raises(NoAgentError) as error:
        router.assign(["x"])
    assert isinstance(error.value, EngineError)
    with pytest.raises(NoAgentError):
        router.assign(["x"], ["a", "b"])
    router.join("a")
    assert len(router.reassign(assignment, "b").blocks) == 0, "b got none"


# -- who is there ------------------------------------------------------------------------------------------------------


def test_only_blocks_of_the_failed_agent_move() -> None:
    names = [f"agent-{i}" for i in range(8)]
    router = AgentRouter(names, bounds=AgentBounds(eps=1.0))
    before: dict[str, str] = {}
    for i in range(40):
        before |= readers(read(router, blocks(*range(10 * i, 10 * i + 10))))
    router.fail(names[3])
    for i in range(40):
        for text, agent in readers(read(router, blocks(*range(10 * i, 10 * i + 10)))).items():
            assert agent != names[3]
            if before[text] != names[3]:
                assert agent == before[text]
    assert router.stats().failures == 1


def test_joining_agent_takes_a_fair_share_of_new_blocks() -> None:
    """It starts with the mean load, so that it does not receive everything at once."""
    router = AgentRouter([f"agent-{i}" for i in range(7)])
    held: dict[str, str] = {}
    for i in range(60):
        held |= readers(read(router, blocks(*range(10 * i, 10 * i + 10), tokens=300)))
    router.join("new")
    assert router.load()["new"] == pytest.approx(sum(router.load().values()) / 8)
    for i in range(20):
        again = readers(read(router, blocks(*range(10 * i, 10 * i + 10), tokens=300)))
        assert "new" not in again.values(), "all of it is held"
    got = Counter[str]()
    for i in range(100):
        got.update(readers(read(router, blocks(*range(9_000 + 10 * i, 9_010 + 10 * i), tokens=300))).values())
    assert 70 < got["new"] < 200, "of 1000, 125 are an eighth"


def test_returning_agent_holds_nothing() -> None:
    router = AgentRouter(["a", Agent("b", capacity_tokens=5_000, weight=2.0)])
    first = read(router, blocks(*range(10)), conversation="chat")
    assert first.segments["b"]
    router.fail("b")
    router.fail("b")
    assert list(router.agents) == [Agent("a")]
    router.join("b")
    assert list(router.agents) == [Agent("a"), Agent("b", 5_000, 2.0)], "as it was"
    again = router.assign(blocks(*range(10)), conversation="chat")
    for assigned in again.blocks:
        was = readers(first)[assigned.block.text]
        assert assigned.held == ("conversation" if was == "a" else None)
    assert router.commit(again)
    router.fail("b")
    router.join(Agent("b"))
    assert list(router.agents) == [Agent("a"), Agent("b")], "as given"
    assert router.stats().failures == 2


def test_bookings_of_an_agent_that_failed_meanwhile_do_no_harm() -> None:
    router = AgentRouter(["a", "b"])
    one, two = (router.assign(blocks(*range(8)), conversation="chat") for _ in range(2))
    router.fail("b")
    router.join("b")
    before = router.load()["b"]
    assert router.commit(one, "b")
    assert router.abandon(two, "b")
    assert router.load()["b"] == pytest.approx(before, rel=0.01)
    assert not router._tenants.states[None].chats, "b was another agent when it got these blocks"
    assert not [held for held in holders(router).values() if "b" in held]


def test_agent_that_left_is_not_registered() -> None:
    router = AgentRouter(["a", "b"])
    assignment = router.assign(blocks(*range(4)))
    router.leave("b")
    assert not [held for held in holders(router).values() if "b" in held]
    with pytest.raises(ValueError, match="'b'"):
        router.assign(["x"], ["a", "b"])
    for act in (router.leave, router.fail):
        with pytest.raises(ValueError, match="'b'"):
            act("b")
    assert {each.agent for each in router.reassign(assignment, "b").blocks} == {"a"}
    router.fail("a")
    router.leave("a")
    with pytest.raises(ValueError, match="'a'"):
        router.assign(["x"], ["a"])
    assert router.agents == ()


def test_predicted_cache_respects_its_capacity() -> None:
    router = AgentRouter([Agent("small", capacity_tokens=300), Agent("large")])
    only = ["small"]
    for i in range(4):
        read(router, blocks(i), agents=only)
    held = [router.assign(blocks(i), only).blocks[0].held for i in (3, 2, 1)]
    assert held == ["cache"] * 3
    assert router.assign(blocks(0), only).blocks[0].held is None
    read(router, blocks(0), agents=["large"])
    assert router.assign(blocks(0)).blocks[0].agent == "large"


# -- conversations -----------------------------------------------------------------------------------------------------


def test_conversation_holds_blocks_after_commit_only() -> None:
    router = AgentRouter(["a", "b", "c"])
    given = blocks(*range(6))
    first = router.assign(given, conversation="chat")
    assert {each.held for each in router.assign(given, conversation="chat").blocks} == {"cache"}
    router.commit(first)
    second = router.assign(given, conversation="chat")
    assert {each.held for each in second.blocks} == {"conversation"}
    assert readers(second) == readers(first)
    assert {each.held for each in router.assign(given, conversation="other").blocks} == {"cache"}
    router.end("chat")
    assert {each.held for each in router.assign(given, conversation="chat").blocks} == {"cache"}
    router.end("missing")
    router.end("chat", tenant="missing")


def test_cached_copies_do_not_count_behind_a_chat() -> None:
    router = AgentRouter(["a", "b"])
    (one, two) = blocks("one", "two")
    read(router, [one], agents=["a"])
    read(router, [two], agents=["b"], conversation="chat", together=True)
    held = {each.block: each.held for each in router.assign([one], ["b"], conversation="chat", together=True).blocks}
    assert held == {one: None}
    assert router.assign([one], conversation="chat", together=True).blocks[0].held == "cache", "a has no chat yet"
    read(router, [one], agents=["a"], conversation="chat", together=True)
    assert router.assign([one], conversation="chat", together=True).blocks[0].held == "conversation"
    third = block("three")
    read(router, [third], agents=["a"])
    assert router.assign([third], conversation="chat", together=True).blocks[0].held is None
    assert router.assign([third], conversation="chat").blocks[0].held == "cache", "a prompt of its own has no chat"


def test_together_an_agent_gets_no_more_than_its_share() -> None:
    router = AgentRouter(["a", "b", "c"], bounds=AgentBounds(prompt_tokens=0))
    read(router, blocks(*range(9)), agents=["a"])
    apart = router.assign(blocks(*range(9)))
    assert set(readers(apart).values()) == {"a"}
    router.abandon(apart)
    together = router.assign(blocks(*range(9)), together=True)
    assert Counter(each.agent for each in together.blocks) == {"a": 3, "b": 3, "c": 3}
    assert sum(each.spilled for each in together.blocks) == 6


# -- what engines report -----------------------------------------------------------------------------------------------


def stale_after(router: AgentRouter, given: Sequence[ContextBlock], cached: int | None, **options: Any) -> int:
    before = router.stats().stale
    assert router.commit(router.assign(given), report=EngineReport(cached_tokens=cached), **options)
    return router.stats().stale - before


def test_a_report_of_nothing_cached_drops_what_is_older() -> None:
    router = AgentRouter(["a"])
    for i in range(10):
        read(router, blocks(i, tokens=400))
    assert stale_after(router, blocks(6, tokens=400), cached=0) == 7, "six before it, and itself"
    held = {i: router.assign(blocks(i, tokens=400)).blocks[0].held for i in range(10)}
    assert held == {i: "cache" if i >= 6 else None for i in range(10)}


@pytest.mark.parametrize(("tokens", "cached"), [(400, 400), (400, 190), (400, None), (60, 0), (0, 0)])
def test_report_consistent_with_the_prediction_drops_nothing(tokens: int, cached: int | None) -> None:
    """Engines count whole KV blocks, so a short block may have no cached token; and some do not report."""
    router = AgentRouter(["a"])
    for i in range(3):
        read(router, blocks(i, tokens=tokens))
    assert stale_after(router, blocks(2, tokens=tokens), cached) == 0
    assert all(each.held for each in router.assign(blocks(*range(3), tokens=tokens)).blocks)


def test_misses_of_simultaneous_requests_are_no_eviction() -> None:
    router = AgentRouter(["a"])
    for i in range(5):
        read(router, blocks(i, tokens=400))
    one, two = (router.assign(blocks("hot", tokens=400)) for _ in range(2))
    assert two.blocks[0].held == "cache", "on its way"
    router.commit(two, report=EngineReport(cached_tokens=0))
    router.commit(one, report=EngineReport(cached_tokens=0))
    assert router.stats().stale == 0
    assert all(each.held for each in router.assign(blocks(*range(5), "hot", tokens=400)).blocks)


def test_blocks_read_while_a_booking_was_pending_are_not_dropped() -> None:
    router = AgentRouter(["a"])
    read(router, blocks("x", tokens=400))
    read(router, blocks("y", tokens=400))
    pending = router.assign(blocks("x", tokens=400))
    assert stale_after(router, blocks("x", tokens=400), cached=0) == 1, "x itself; y was read after it"
    router.commit(pending)
    assert router.assign(blocks("y", tokens=400)).blocks[0].held


def test_plan_determines_the_prompts_first_block() -> None:
    router, planner = AgentRouter(["a"]), ContextPlanner()
    given = blocks("old", "x", "y", tokens=400)
    for each in given:
        read(router, [each])
    assignment = router.assign(given[1:])
    plan = planner.plan(list(reversed(given[1:])))  # and so y first
    router.commit(assignment, "a", EngineReport(cached_tokens=0), plan=plan)
    assert router.stats().stale == 2, "old and y; x was on its way itself"
    behind = planner.plan(given[1:], conversation="chat", placement="tail", history=[{"role": "user", "content": "?"}])
    assert not behind.opens_prompt
    router.commit(router.assign(given[1:]), "a", EngineReport(cached_tokens=0), plan=behind)
    assert router.stats().stale == 2, "it is behind a history, where nothing follows from the report"


def test_report_on_several_agents_is_ignored() -> None:
    router = AgentRouter(["a", "b"])
    given = blocks(*range(6), tokens=400)
    read(router, given)
    router.commit(router.assign(given), report=EngineReport(cached_tokens=0))
    assert router.stats().stale == 0


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_memory_is_bounded() -> None:
    router = AgentRouter(["a", "b"], bounds=AgentBounds(max_blocks=5, max_tenants=3, max_conversations=2, max_open=4))
    for tenant in range(6):
        for i in range(40):
            assignment = router.assign(blocks(i, i + 1, i + 2), conversation=f"chat {i % 7}", tenant=f"tenant {tenant}")
            if i % 3:
                router.commit(assignment)
    assert router.stats().tenants == len(router._tenants.states) == 3
    assert router.stats().open == 3 * 4
    for state in router._tenants.states.values():
        assert len(state.holders) <= 2 * 5
        assert all(len(member.cache.blocks) <= 5 for member in state.agents.values())
        assert len(state.chats) <= 2
        assert all(len(chats.readers) <= 5 for chats in state.chats.values())


def test_agents_that_come_and_go_leave_nothing() -> None:
    router = AgentRouter(["a", "b"])
    for _ in range(50):
        router.commit(router.assign(blocks(*range(40)), conversation="chat"))
        router.fail("b")
        router.join("b")
    state = router._tenants.states[None]
    (chats,) = state.chats.values()
    assert len(chats.agents) <= 3
    assert all(len(members) <= 3 for members in chats.readers.values())
    dead = [member for members in chats.readers.values() for member in members if not member.alive]
    assert all(len(member.cache.blocks) == 0 for member in dead)


def test_forgotten_tenant_starts_empty() -> None:
    """Late calls on its earlier assignments change nothing."""
    router = AgentRouter(["a", "b"], bounds=AgentBounds(max_tenants=1))
    old = [router.assign(blocks(*range(6)), tenant="acme", conversation="chat") for _ in range(3)]
    router.assign(["x"], tenant="other")
    fresh = router.assign(blocks(*range(6)), tenant="acme", conversation="chat")
    before = router.load("acme"), holders(router, "acme")
    assert not router.commit(old[0])
    assert not router.abandon(old[1])
    assert (router.load("acme"), holders(router, "acme")) == before
    assert {each.held for each in router.assign(blocks(*range(6)), tenant="acme", conversation="chat").blocks} == {
        "cache"
    }
    assert router.commit(fresh)


def test_reset_forgets_everything_except_the_agents() -> None:
    router = AgentRouter(["a", Agent("b", 1_000)])
    router.fail("a")
    router.join("a")
    read(router, blocks(*range(6)), conversation="chat", tenant="acme")
    left = router.assign(blocks(*range(6)), tenant="acme")
    agents = router.agents
    router.reset()
    assert (router.stats(), router.agents, router.load("acme")) == (RouterStats(), agents, {})
    for end in (router.commit, router.abandon):
        assert not end(left)
    new, unused = AgentRouter(agents), router
    for i in range(30):
        one, other = (r.assign(blocks(*range(i, i + 9)), conversation="chat", tenant="acme") for r in (new, unused))
        assert (one.agents, one.blocks) == (other.agents, other.blocks)
        new.commit(one)
        unused.commit(other)


def test_stats_add_up() -> None:
    router = AgentRouter(["a", "b", "c"], bounds=AgentBounds(free_tokens=0, eps=0.1))
    made: list[Assignment] = []
    hot = blocks("hot", tokens=900)
    for i in range(60):
        made.append(router.assign([*hot, *blocks(i, i // 2)], tenant=("x", None)[i % 2]))
        (router.abandon if i % 5 == 0 else router.commit)(made[-1])
    stats = router.stats()
    given = [each for assignment in made for each in assignment.blocks]
    assert stats.assignments == 60
    assert stats.blocks == len(given)
    assert stats.tokens == sum(assignment.total_tokens for assignment in made)
    assert stats.held == sum(each.held is not None for each in given)
    assert stats.held_tokens == sum(assignment.held_tokens for assignment in made)
    assert stats.spilled == sum(each.spilled for each in given) > 0
    assert stats.abandoned == sum(len(assignment.blocks) for assignment in made[::5])
    assert (stats.open, stats.tenants, stats.stale, stats.learned, stats.feed_errors) == (0, 2, 0, 0, 0)
    copies = Counter(
        key for state in router._tenants.states.values() for m in state.agents.values() for key in m.cache.blocks
    )
    distinct = sum(len(state.holders) for state in router._tenants.states.values())
    assert stats.replicas == copies.total() - distinct > 0


def test_unreferenced_router_is_collected() -> None:
    router = AgentRouter(["a"])
    read(router, blocks("x"))
    reference = weakref.ref(router)
    del router
    gc.collect()
    assert reference() is None


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_bad_ends_are_refused_and_change_nothing() -> None:
    router = AgentRouter(["a"])
    assignment = router.assign(["x"])
    end: Any
    for end in (router.commit, router.abandon):
        for wrong in ("x", 5, [5], b"x"):
            with pytest.raises(TypeError, match="blocks"):
                end(assignment, blocks=wrong)
    commit: Any = router.commit
    with pytest.raises(TypeError, match="report must be an EngineReport or None, got int"):
        commit(assignment, report=5)
    with pytest.raises(TypeError, match="plan must be a ContextPlan or None, got int"):
        commit(assignment, plan=5)
    assert not router.commit(assignment, "another")
    assert not router.commit(assignment, blocks=[])
    assert not router.commit(assignment, blocks=["y"])
    assert router.commit(assignment)


def test_names_may_be_anything() -> None:
    names = ["ä" * 500, "\ud800", "a\0b", "a\nb", " ", "{a}"]
    router = AgentRouter(names)
    for name in names:
        assignment = router.assign(blocks(*range(20)), conversation=name, tenant=name)
        assert set(assignment.segments) <= set(names)
        assert router.commit(assignment)
        assert all(each.held for each in router.assign(blocks(*range(20)), conversation=name, tenant=name).blocks)


# -- forks -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("busy", [False, True])
def test_forked_process_continues_independently(busy: bool) -> None:
    """It neither waits for a lock of another thread, nor uses the state that this thread was changing."""
    router = AgentRouter(["a", "b"])
    before = router.assign(blocks(*range(6)))
    router.commit(before)
    over, locked = threading.Event(), threading.Event()

    def hold() -> None:
        with router._lock:
            locked.set()
            over.wait(30)

    thread = threading.Thread(target=hold)
    if busy:
        thread.start()
        locked.wait(30)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            assignment = router.assign(blocks(*range(6)))
            held = all(each.held for each in assignment.blocks)
            os.write(writer, f"{assignment.id} {held} {router.commit(assignment)}".encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    over.set()
    if busy:
        thread.join()
    assert os.waitpid(pid, 0)[1] == 0
    with os.fdopen(reader) as pipe:
        id, held_before, committed = pipe.read().split()
    assert (held_before, committed) == (str(not busy), "True")
    assert id.split(".")[0] != before.id.split(".")[0]
