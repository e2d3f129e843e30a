"""Choosing which of more documents agents read: what they have read lately, and nothing of other tenants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import Choice, ContextBlock, EngineReport
from warmprefix_routing import Agent, AgentBounds, AgentRouter, Assignment

CHOICE = Choice(k=4, keep=1)
EARLIER = ("xpqr", "ypqr", "zpqr", "abcd")
"""Requests after which all documents have been read."""


def candidates(names: str, scores: Sequence[float] | None = None) -> list[ContextBlock]:
    scores = [1.0, *[0.5 - 0.001 * place for place in range(len(names) - 1)]] if scores is None else scores
    return [
        ContextBlock(f"text of {name}", id=name, tokens=100, score=score)
        for name, score in zip(names, scores, strict=True)
    ]


def ids(assignment: Assignment) -> str:
    return "".join([str(assigned.block.id) for assigned in assignment.blocks])


def read(router: AgentRouter, names: str, choose: Choice | None = CHOICE, tenant: str | None = None) -> str:
    assignment = router.assign(candidates(names), tenant=tenant, choose=choose)
    router.commit(assignment)
    return ids(assignment)


@pytest.mark.parametrize("together", [False, True])
def test_documents_that_were_read_take_the_places_of_those_that_left_the_caches(together: bool) -> None:
    router = AgentRouter([Agent("ann", 300), Agent("ben", 300)])
    for names in EARLIER:
        router.commit(router.assign(candidates(names), choose=CHOICE, together=together))
    assignment = router.assign(candidates("axyzbcd"), choose=CHOICE, together=together)
    assert ids(assignment) == "abcd"
    assert [(left.block.id, left.reason, left.instead) for left in assignment.left_out] == [
        ("x", "exchanged", 4),
        ("y", "exchanged", 5),
        ("z", "exchanged", 6),
    ]
    assert [assigned.positions for assigned in assignment.blocks] == [(0,), (4,), (5,), (6,)]


def test_without_anything_read_the_first_are_read() -> None:
    assert read(AgentRouter(["ann", "ben"]), "abcdefgh") == "abcd"
    assert read(AgentRouter(["ann", "ben"]), "abc") == "abc"
    assert AgentRouter(["ann"]).assign([], choose=CHOICE).blocks == ()


def test_documents_that_no_agent_read_yet_stay() -> None:
    router = AgentRouter(["ann", "ben"])
    assert read(router, "abcd") == "abcd"
    assert read(router, "axyzbcd") == "axyz"


def test_conversations_pins_and_neighbours_get_the_first() -> None:
    router = AgentRouter([Agent("ann", 300), Agent("ben", 300)])
    for names in EARLIER:
        read(router, names)
    given = candidates("axyzbcd")
    pinned = [
        *given[:3],
        ContextBlock(given[3].text, id="z", tokens=100, score=given[3].score, pinned="end"),
        *given[4:],
    ]
    follows = [
        *given[:3],
        ContextBlock(given[3].text, id="z", tokens=100, score=given[3].score, follows="y"),
        *given[4:],
    ]
    assert ids(router.assign(given, conversation="chat", choose=CHOICE)) == "axyz"
    assert ids(router.assign(pinned, choose=CHOICE)) == "axyz"
    assert ids(router.assign(follows, choose=CHOICE)) == "axyz"


def test_blank_and_equal_documents_take_no_place() -> None:
    a, *others = candidates("abcdef")
    assignment = AgentRouter(["ann"]).assign([ContextBlock(" "), a, a, *others], choose=CHOICE)
    assert ids(assignment) == "abcd"
    assert [assigned.positions for assigned in assignment.blocks] == [(1, 2), (3,), (4,), (5,)]
    assert [left.position for left in assignment.left_out] == [6, 7]


def test_versions_and_twins_hold() -> None:
    sources = {"b": ("handbook", 1), "e": ("handbook", 2)}
    newest = replace(CHOICE, version=lambda block: sources.get(block.id))
    assert ids(AgentRouter(["ann"]).assign(candidates("abcdef"), choose=newest)) == "aecd"
    alike = replace(CHOICE, twins=lambda block: "bc" if block.id in "bc" else None)
    assert ids(AgentRouter(["ann"]).assign(candidates("abcdef"), choose=alike)) == "abd"


def test_a_function_that_fails_is_left_out(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmprefix_routing.agents._failed_choices", iter(range(10)))
    router = AgentRouter(["ann"])
    failing = replace(CHOICE, version=lambda block: 1 / 0)  # type: ignore[arg-type, return-value]
    for _ in range(2):
        assert ids(router.assign(candidates("abcdef"), choose=failing)) == "abcd"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("blocks", "match"),
    [
        (["a", "b"], "candidate 0 must have a finite score"),
        (candidates("ab", [1.0, float("nan")]), "candidate 1 must have a finite score"),
        (candidates("ab", [0.1, 0.2]), "descending scores, but candidate 1"),
    ],
)
def test_unusable_scores_are_refused(blocks: list[ContextBlock | str], match: str) -> None:
    router = AgentRouter(["ann"])
    with pytest.raises(ValueError, match=match):
        router.assign(blocks, choose=CHOICE)
    with pytest.raises(TypeError, match="choose must be a Choice or None, got int"):
        router.assign(candidates("ab"), choose=4)  # type: ignore[arg-type]
    assert router.stats().assignments == 0


def test_what_is_moved_to_other_agents_is_not_chosen_again() -> None:
    router = AgentRouter(["ann", "ben", "cem"])
    assignment = router.assign(candidates("abcdef"), choose=CHOICE)
    agent = assignment.blocks[0].agent
    router.fail(agent)
    moved = router.reassign(assignment, agent)
    assert {*ids(moved)} == {str(assigned.block.id) for assigned in assignment.blocks if assigned.agent == agent}


def test_a_tenant_that_is_too_large_forgets_what_it_chose_by() -> None:
    router = AgentRouter(["ann", "ben"], bounds=AgentBounds(max_bytes=60_000, max_tenants=2))
    for number in range(60):
        given = [ContextBlock(f"{number} {i}", tokens=10, score=-float(i)) for i in range(8)]
        router.commit(router.assign(given, choose=CHOICE))
    assert router.stats().memory_bytes <= 60_000
    router.reset()
    assert router.stats().memory_bytes == 0


words = st.lists(st.permutations("abcdefgh").map(lambda names: "".join(names[:7])), min_size=1, max_size=12)


@given(words, st.integers(0, 2**32))
def test_other_tenants_change_nothing_that_is_read(requests: list[str], seed: int) -> None:
    """Neither their requests nor the reports on this tenant's, which show what others evict."""
    alone, shared = (AgentRouter([Agent("ann", 250), Agent("ben", 250)]) for _ in range(2))
    rng = Random(seed)
    for names in requests:
        for _ in range(rng.randrange(3)):
            read(shared, "".join(rng.sample("abcdefgh", 7)), tenant="other")
        mine = alone.assign(candidates(names), tenant="mine", choose=CHOICE)
        alone.commit(mine)
        again = shared.assign(candidates(names), tenant="mine", choose=CHOICE)
        for agent in {assigned.agent for assigned in again.blocks}:
            shared.commit(again, agent, EngineReport(rng.choice([0, 100]), 200, None))
        assert ids(again) == ids(mine)
        assert again.left_out == mine.left_out
        assert ids(mine)[0] == names[0]  # the first is always read
        assert {*ids(mine)} <= {*names}
