"""The contract of every `SeenStore`. Another store joins through the fixture `kits` of `conftest.py`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from warmprefix.stores import (
    Abandon,
    Commit,
    Conversation,
    Forget,
    Prepare,
    PreparedTurn,
    SeenBlock,
    SeenStore,
    Snapshot,
)

pytestmark = pytest.mark.sample(3)

CHAT = Conversation("acme", "chat")


class Kit(Protocol):
    """Makes the stores of one kind, and lets their time pass."""

    def store(self, **bounds: float) -> SeenStore: ...

    def wait(self, seconds: float) -> None: ...


class Kits(Protocol):
    """All that is made with one of them is of the same kind, and starts with nothing."""

    examples: int
    """Number of random histories to try."""

    def __call__(self) -> Kit: ...


@pytest.fixture
def kit(kits: Kits) -> Kit:
    return kits()


@pytest.fixture
def store(kit: Kit) -> SeenStore:
    return kit.store()


def key(name: str) -> bytes:
    return name.encode().ljust(16, b"\xff")


def labelled(names: str) -> dict[bytes, str]:
    return {key(name): f"Doc_{name}" for name in names}


def sent(names: str, turn: int = 1) -> list[SeenBlock]:
    return [SeenBlock(key(name), f"Doc_{name}", turn, 100) for name in names]


def prepare(store: SeenStore, plan: str, names: str = "", conversation: Conversation = CHAT) -> PreparedTurn:
    return store.execute(Prepare(conversation, plan, labelled(names)))


def serve(store: SeenStore, plan: str, names: str, conversation: Conversation = CHAT) -> bool:
    turn = prepare(store, plan, names, conversation).turn + 1
    return store.execute(Commit(conversation, plan, sent(names, turn)))


def seen(store: SeenStore, conversation: Conversation = CHAT) -> str:
    """Return the names of all blocks that a new plan would find seen."""
    names = "ABCDEFGH"
    found = prepare(store, "look", names, conversation).seen
    store.execute(Abandon(conversation, "look"))
    return "".join(name for name in names if key(name) in found)


def state(store: SeenStore, conversation: Conversation = CHAT) -> Snapshot:
    snapshot = store.inspect(conversation)
    assert snapshot is not None
    return snapshot


# -- prepare, commit, abandon --------------------------------------------------------------------------------------


def test_a_new_conversation_has_seen_nothing(store: SeenStore) -> None:
    assert prepare(store, "p1", "AB") == PreparedTurn(0, {}, frozenset())


def test_a_block_is_seen_only_once_a_plan_that_sent_it_is_committed(store: SeenStore) -> None:
    prepare(store, "p1", "AB")
    assert seen(store) == ""
    assert store.execute(Commit(CHAT, "p1", sent("AB")))
    assert seen(store) == "AB"


def test_prepare_returns_seen_blocks_as_sent(store: SeenStore) -> None:
    serve(store, "p1", "AB")
    prepared = prepare(store, "p2", "BC")
    assert prepared.turn == 1
    assert dict(prepared.seen) == {key("B"): SeenBlock(key("B"), "Doc_B", 1, 100)}
    assert prepared.taken == frozenset()


def test_sent_blocks_count_not_proposed_ones(store: SeenStore) -> None:
    prepare(store, "p1", "AB")
    store.execute(Commit(CHAT, "p1", sent("C")))
    assert seen(store) == "C"


def test_turns_count_commits(store: SeenStore) -> None:
    for turn, names in enumerate(["AB", "", "C"]):
        assert prepare(store, f"p{turn}", names).turn == turn
        assert store.execute(Commit(CHAT, f"p{turn}", sent(names, turn + 1)))
    assert state(store).turn == 3
    assert {block.turn for block in state(store).blocks} == {1, 3}


def test_a_second_commit_changes_nothing(store: SeenStore) -> None:
    serve(store, "p1", "A")
    before = state(store)
    assert not store.execute(Commit(CHAT, "p1", sent("B", 2)))
    assert state(store) == before


def test_an_abandoned_plan_leaves_nothing(store: SeenStore) -> None:
    prepare(store, "p1", "A")
    assert store.execute(Abandon(CHAT, "p1"))
    assert not store.execute(Abandon(CHAT, "p1"))
    assert not store.execute(Commit(CHAT, "p1", sent("A")))
    assert seen(store) == ""
    assert state(store).turn == 0


def test_a_committed_plan_cannot_be_abandoned(store: SeenStore) -> None:
    serve(store, "p1", "A")
    assert not store.execute(Abandon(CHAT, "p1"))
    assert seen(store) == "A"


def test_every_operation_accepts_an_unknown_conversation(store: SeenStore) -> None:
    assert not store.execute(Commit(CHAT, "p1", sent("A")))
    assert not store.execute(Abandon(CHAT, "p1"))
    store.execute(Forget(CHAT))
    assert store.inspect(CHAT) is None


def test_abandoning_an_unknown_plan_changes_nothing(store: SeenStore) -> None:
    serve(store, "p1", "A")
    prepare(store, "p2", "B")
    before = state(store)
    assert not store.execute(Abandon(CHAT, "unknown"))
    assert state(store) == before


def test_commit_without_lease_voids_the_record(store: SeenStore) -> None:
    """The history may continue from a past that the store has not recorded."""
    prepare(store, "p1", "A")
    store.execute(Forget(CHAT))
    serve(store, "p2", "B")
    prepare(store, "p3", "C")
    assert not store.execute(Commit(CHAT, "p1", sent("A")))
    assert seen(store) == ""
    assert not store.execute(Commit(CHAT, "p3", sent("C")))
    assert serve(store, "p4", "D")


def test_label_of_two_texts_is_taken_for_both(store: SeenStore) -> None:
    prepare(store, "p1")
    prepare(store, "p2")
    store.execute(Commit(CHAT, "p1", [SeenBlock(key("A"), "x", 1, 1)]))
    store.execute(Commit(CHAT, "p2", [SeenBlock(key("B"), "x", 1, 1)]))
    for name in "ABC":
        assert store.execute(Prepare(CHAT, "p3", {key(name): "x"})).taken == {"x"}


def test_plan_ids_belong_to_one_conversation(store: SeenStore) -> None:
    other = Conversation("acme", "other")
    prepare(store, "p1", "A")
    prepare(store, "p2", "A", other)
    assert not store.execute(Commit(other, "p1", sent("A")))
    assert not store.execute(Abandon(other, "p1"))
    assert store.execute(Commit(CHAT, "p1", sent("A")))
    assert seen(store, other) == ""


def test_results_do_not_change_later(store: SeenStore) -> None:
    serve(store, "p1", "A")
    prepared = prepare(store, "p2", "AB")
    snapshot = state(store)
    store.execute(Commit(CHAT, "p2", sent("B", 2)))
    store.execute(Forget(CHAT))
    assert set(prepared.seen) == {key("A")}
    assert [block.fingerprint for block in snapshot.blocks] == [key("A")]


def test_inspect_returns_the_whole_state(store: SeenStore) -> None:
    serve(store, "p1", "AB")
    prepare(store, "p2", "C")
    prepare(store, "p3", "C")
    snapshot = state(store)
    assert set(snapshot.blocks) == set(sent("AB"))
    assert set(snapshot.leases) == {"p2", "p3"}
    assert snapshot.turn == 1


def test_any_bytes_and_names_are_accepted(store: SeenStore) -> None:
    for i, name in enumerate(["", "\x00", "a\nb", "{chat}", "é\U0001f600", "x" * 500]):
        chat = Conversation(name, name)
        fingerprint = bytes([0, 255, 10, 13, i] + [0] * 11)
        store.execute(Prepare(chat, "p:{1}", {fingerprint: "Doc:/é"}))
        assert store.execute(Commit(chat, "p:{1}", [SeenBlock(fingerprint, "Doc:/é", 1, 0)]))
        prepared = store.execute(Prepare(chat, "p2", {fingerprint: "Doc:/é"}))
        assert dict(prepared.seen) == {fingerprint: SeenBlock(fingerprint, "Doc:/é", 1, 0)}


# -- plans side by side --------------------------------------------------------------------------------------------


def test_two_parallel_plans_are_both_forgotten(store: SeenStore) -> None:
    serve(store, "p1", "A")
    prepare(store, "p2", "B")
    prepare(store, "p3", "C")
    assert store.execute(Commit(CHAT, "p2", sent("B", 2)))
    epoch = state(store).epoch
    assert not store.execute(Commit(CHAT, "p3", sent("C", 2)))
    assert seen(store) == "A", "their common past is still seen, and nothing else"
    assert state(store).epoch > epoch


def test_conflict_forgets_everything_since_the_common_past(store: SeenStore) -> None:
    serve(store, "p1", "A")
    prepare(store, "slow", "H")
    serve(store, "p2", "B")
    serve(store, "p3", "C")
    assert seen(store) == "ABC"
    assert not store.execute(Commit(CHAT, "slow", sent("H", 2)))
    assert seen(store) == "A"


def test_a_plan_prepared_before_a_conflict_and_committed_after_it_is_not_recorded(store: SeenStore) -> None:
    prepare(store, "p1", "A")
    prepare(store, "p2", "B")
    store.execute(Commit(CHAT, "p1", sent("A")))
    prepare(store, "p3", "AC")
    assert not store.execute(Commit(CHAT, "p2", sent("B")))
    assert not store.execute(Commit(CHAT, "p3", sent("C", 2)))
    assert seen(store) == ""


def test_after_a_conflict_the_next_turn_is_recorded(store: SeenStore) -> None:
    prepare(store, "p1", "A")
    prepare(store, "p2", "B")
    store.execute(Commit(CHAT, "p1", sent("A")))
    store.execute(Commit(CHAT, "p2", sent("B")))
    assert serve(store, "p3", "AB")
    assert seen(store) == "AB"


def test_abandoned_plan_causes_no_conflict(store: SeenStore) -> None:
    prepare(store, "p1", "A")
    prepare(store, "p2", "B")
    store.execute(Abandon(CHAT, "p1"))
    assert store.execute(Commit(CHAT, "p2", sent("B")))
    assert seen(store) == "B"


# -- what an open plan could take back -----------------------------------------------------------------------------


def contested(store: SeenStore) -> str:
    """Return the names of all contested blocks."""
    names = "ABCDEFGH"
    prepared = prepare(store, "look", names)
    store.execute(Abandon(CHAT, "look"))
    assert prepared.contested <= set(prepared.seen)
    return "".join(name for name in names if key(name) in prepared.contested)


def test_blocks_recorded_during_an_open_plan_are_contested(store: SeenStore) -> None:
    serve(store, "p1", "A")
    prepare(store, "slow", "H")
    assert contested(store) == ""
    serve(store, "p2", "B")
    serve(store, "p3", "C")
    assert seen(store) == "ABC"
    assert contested(store) == "BC"


def test_abandoning_the_plan_ends_the_contest(store: SeenStore) -> None:
    prepare(store, "slow", "H")
    serve(store, "p1", "A")
    store.execute(Abandon(CHAT, "slow"))
    assert seen(store) == "A"
    assert contested(store) == ""


def test_plan_does_not_contest_its_own_blocks(store: SeenStore) -> None:
    prepare(store, "p1", "A")
    serve(store, "p2", "B")
    assert prepare(store, "p1", "AB").contested == frozenset()


def test_earliest_open_plan_decides_what_is_contested(store: SeenStore) -> None:
    serve(store, "p1", "A")
    prepare(store, "early", "")
    serve(store, "p2", "B")
    prepare(store, "late", "")
    serve(store, "p3", "C")
    assert contested(store) == "BC"
    store.execute(Abandon(CHAT, "early"))
    assert contested(store) == "C"


def test_plan_ended_by_forget_still_contests_later_blocks(store: SeenStore) -> None:
    prepare(store, "slow", "H")
    store.execute(Forget(CHAT))
    serve(store, "p1", "A")
    assert contested(store) == "A"
    assert not store.execute(Abandon(CHAT, "slow"))
    assert seen(store) == "A"
    assert contested(store) == ""


def test_timed_out_plan_counts_as_committed(kit: Kit) -> None:
    store = kit.store(lease_ttl=60)
    serve(store, "p1", "A")
    prepare(store, "crashed", "H")
    serve(store, "p2", "B")
    epoch = state(store).epoch
    kit.wait(61)
    assert seen(store) == "A"
    assert contested(store) == ""
    assert state(store).epoch > epoch
    assert state(store).leases == ()


def test_timed_out_plan_ended_by_forget_counts_as_committed(kit: Kit) -> None:
    store = kit.store(lease_ttl=60)
    prepare(store, "crashed", "H")
    store.execute(Forget(CHAT))
    serve(store, "p1", "A")
    kit.wait(61)
    assert seen(store) == ""
    assert serve(store, "p2", "B")
    assert seen(store) == "B"
    assert contested(store) == ""


def test_timed_out_plan_without_parallel_commits_costs_nothing(kit: Kit) -> None:
    store = kit.store(lease_ttl=60)
    serve(store, "p1", "A")
    prepare(store, "crashed", "H")
    kit.wait(61)
    assert seen(store) == "A"
    assert contested(store) == ""


def test_plan_dropped_by_the_bound_counts_as_committed(kit: Kit) -> None:
    store = kit.store(max_leases=2)
    serve(store, "p1", "A")
    prepare(store, "first", "H")
    serve(store, "p2", "B")
    prepare(store, "second", "")
    prepare(store, "third", "")
    assert set(state(store).leases) == {"second", "third"}
    assert {block.fingerprint for block in state(store).blocks} == {key("A")}


def test_prepare_after_the_end_takes_no_lease(store: SeenStore) -> None:
    """Its question was on its way for longer than its planner waited."""
    serve(store, "p1", "A")
    store.execute(Abandon(CHAT, "late"))
    assert prepare(store, "late", "AB").turn == 1
    assert state(store).leases == ()
    serve(store, "p2", "B")
    assert contested(store) == ""


# -- what a planner could not notify the store of in time ----------------------------------------------------------


def test_forget_returns_the_leases_of_ended_plans(store: SeenStore) -> None:
    serve(store, "p1", "A")
    prepare(store, "p2", "B")
    store.execute(Forget(CHAT, ended=["p2", "unknown"]))
    assert serve(store, "p3", "C")
    assert contested(store) == ""
    assert not store.execute(Commit(CHAT, "p2", sent("B", 2))), "it comes late"
    assert prepare(store, "unknown", "C").turn == 2
    assert set(state(store).leases) == set(), "so does this one"
    assert seen(store) == "C"


def test_forget_contests_what_follows_an_open_plan(store: SeenStore) -> None:
    """The answer to that plan may be stored over it before anybody commits it."""
    store.execute(Forget(CHAT, open=["p1"]))
    serve(store, "p2", "A")
    assert contested(store) == "A"
    assert state(store).leases == ()
    assert not store.execute(Commit(CHAT, "p1", sent("B")))
    assert seen(store) == ""
    store.execute(Forget(CHAT, open=["p1"]))
    serve(store, "p3", "C")
    assert contested(store) == "", "the plan has ended"


def test_open_plan_of_forget_times_out(kit: Kit) -> None:
    store = kit.store(lease_ttl=60)
    store.execute(Forget(CHAT, open=["p1"]))
    serve(store, "p2", "A")
    kit.wait(61)
    assert seen(store) == ""
    assert serve(store, "p3", "B")
    assert contested(store) == ""


def test_forget_takes_the_labels_of_sent_blocks(store: SeenStore) -> None:
    store.execute(Forget(CHAT, sent=[SeenBlock(key("A"), "x", 1, 1), SeenBlock(key("B"), "y", 1, 1)]))
    prepared = store.execute(Prepare(CHAT, "p1", {key("A"): "x", key("C"): "y"}))
    assert prepared.seen == {}
    assert prepared.taken == {"y"}


def test_forget_may_be_executed_twice(store: SeenStore) -> None:
    serve(store, "p1", "A")
    prepare(store, "p2", "B")
    for _ in range(2):
        store.execute(Forget(CHAT, ["p2"], ["p3"], sent("B")))
    store.execute(Abandon(CHAT, "p3"))
    assert serve(store, "p4", "C")
    assert contested(store) == ""


def test_forget_keeps_the_bounds(kit: Kit) -> None:
    store = kit.store(max_blocks=2, max_leases=2)
    prepare(store, "p1", "A")
    plans = [f"q{number}" for number in range(5)]
    store.execute(Forget(CHAT, plans, [f"{plan}?" for plan in plans], sent("ABCDEFGH")))
    assert serve(store, "p2", "C")
    assert serve(store, "p3", "D")
    assert len(state(store).blocks) <= 2


# -- forget and clear ----------------------------------------------------------------------------------------------


def test_forget_empties_the_record_and_starts_an_epoch(store: SeenStore) -> None:
    serve(store, "p1", "AB")
    serve(store, "p2", "C")
    epoch = state(store).epoch
    store.execute(Forget(CHAT))
    assert seen(store) == ""
    assert state(store).blocks == ()
    assert state(store).epoch > epoch


def test_forget_ends_every_lease(store: SeenStore) -> None:
    prepare(store, "p1", "A")
    prepare(store, "p2", "B")
    store.execute(Forget(CHAT))
    assert state(store).leases == ()
    assert not store.execute(Commit(CHAT, "p1", sent("A")))
    assert not store.execute(Abandon(CHAT, "p2"))
    assert seen(store) == ""


def test_after_forget_the_next_turn_is_recorded(store: SeenStore) -> None:
    serve(store, "p1", "A")
    store.execute(Forget(CHAT))
    assert serve(store, "p2", "AB")
    assert seen(store) == "AB"


def test_forget_affects_one_conversation_and_clear_all(store: SeenStore) -> None:
    other = Conversation(None, "chat")
    serve(store, "p1", "A")
    serve(store, "p2", "B", other)
    store.execute(Forget(CHAT))
    assert seen(store, other) == "B"
    store.clear()
    assert store.inspect(CHAT) is store.inspect(other) is None
    assert not store.execute(Commit(other, "p2", sent("B")))
    assert seen(store, other) == ""


# -- labels --------------------------------------------------------------------------------------------------------


def test_a_label_that_names_another_block_is_taken(store: SeenStore) -> None:
    store.execute(Prepare(CHAT, "p1", {key("A"): "x"}))
    store.execute(Commit(CHAT, "p1", [SeenBlock(key("A"), "x", 1, 100)]))
    prepared = store.execute(Prepare(CHAT, "p2", {key("B"): "x", key("C"): "y"}))
    assert prepared.taken == {"x"}


def test_a_label_is_not_taken_for_the_block_that_it_names(store: SeenStore) -> None:
    serve(store, "p1", "A")
    assert prepare(store, "p2", "A").taken == frozenset()


def test_a_seen_block_needs_no_label(store: SeenStore) -> None:
    """It keeps the one it was sent under, whatever it would be called now."""
    serve(store, "p1", "AB")
    prepared = store.execute(Prepare(CHAT, "p2", {key("B"): "Doc_A"}))
    assert prepared.seen[key("B")].label == "Doc_B"
    assert prepared.taken == frozenset()


def test_a_leased_label_is_not_taken(store: SeenStore) -> None:
    prepare(store, "p1", "A")
    assert store.execute(Prepare(CHAT, "p2", {key("B"): "Doc_A"})).taken == frozenset()


@pytest.mark.parametrize("event", ["conflict", "forget"])
def test_labels_stay_taken_when_their_blocks_are_no_longer_seen(store: SeenStore, event: str) -> None:
    """The history may still show the texts that they name."""
    prepare(store, "slow", "H")
    serve(store, "p1", "A")
    if event == "conflict":
        store.execute(Commit(CHAT, "slow", sent("H")))
    else:
        store.execute(Forget(CHAT))
    prepared = store.execute(Prepare(CHAT, "p2", {key("B"): "Doc_A"}))
    assert prepared.taken == {"Doc_A"}
    assert store.execute(Prepare(CHAT, "p3", {key("A"): "Doc_A"})).taken == frozenset()


def test_labels_are_taken_in_one_conversation_alone(store: SeenStore) -> None:
    serve(store, "p1", "A")
    assert store.execute(Prepare(Conversation("acme", "other"), "p2", {key("B"): "Doc_A"})).taken == frozenset()


# -- isolation -----------------------------------------------------------------------------------------------------


def test_tenants_and_conversations_share_nothing(store: SeenStore) -> None:
    """Whatever the names are, joining tenant and id to one string must not make two conversations one."""
    chats = [
        Conversation(tenant, id)
        for tenant, id in [
            ("a", "chat"),
            ("b", "chat"),
            (None, "chat"),
            ("None", "chat"),
            ("", "chat"),
            ("a", "chat "),
            ("a:chat", ""),
            ("a", "b:c"),
            ("a:b", "c"),
            ("a\x00b", "c"),
            ("a", "b\x00c"),
        ]
    ]
    for i, chat in enumerate(chats):
        serve(store, f"p{i}", "ABCDEFGH"[i % 8], chat)
    for i, chat in enumerate(chats):
        assert seen(store, chat) == "ABCDEFGH"[i % 8]


# -- time ----------------------------------------------------------------------------------------------------------


def test_lease_lasts_for_its_time(kit: Kit) -> None:
    store = kit.store(lease_ttl=60)
    prepare(store, "p1", "A")
    kit.wait(59)
    assert store.execute(Commit(CHAT, "p1", sent("A")))


def test_a_lease_that_timed_out_commits_nothing(kit: Kit) -> None:
    store = kit.store(lease_ttl=60)
    prepare(store, "p1", "A")
    kit.wait(61)
    assert not store.execute(Commit(CHAT, "p1", sent("A")))
    assert seen(store) == ""
    assert serve(store, "p2", "A")


def test_late_commit_conflicts_with_parallel_plans(kit: Kit) -> None:
    """The model did see its prompt, so it may be its answer that the history goes on from."""
    store = kit.store(lease_ttl=60)
    serve(store, "p0", "A")
    prepare(store, "slow", "B")
    kit.wait(50)
    prepare(store, "parallel", "D")
    serve(store, "p1", "C")
    kit.wait(20)
    assert not store.execute(Commit(CHAT, "slow", sent("B", 2)))
    assert seen(store) == "A"
    assert not store.execute(Commit(CHAT, "parallel", sent("D", 2)))
    assert seen(store) == "A"


def test_unused_conversation_expires(kit: Kit) -> None:
    store = kit.store(ttl=600)
    serve(store, "p1", "A")
    prepare(store, "p2", "B")
    kit.wait(601)
    assert store.inspect(CHAT) is None
    assert not store.execute(Commit(CHAT, "p2", sent("B", 2)))
    assert prepare(store, "p3", "AB") == PreparedTurn(0, {}, frozenset())


@pytest.mark.parametrize("use", ["prepare", "commit"])
def test_use_renews_a_conversation(kit: Kit, use: str) -> None:
    store = kit.store(ttl=600, lease_ttl=10_000)
    serve(store, "p1", "A")
    prepare(store, "p2", "B")
    kit.wait(500)
    if use == "prepare":
        prepare(store, "p3")
    else:
        store.execute(Commit(CHAT, "p2", sent("B", 2)))
    kit.wait(500)
    assert seen(store) == ("A" if use == "prepare" else "AB")


# -- bounds --------------------------------------------------------------------------------------------------------


def test_the_oldest_blocks_beyond_the_bound_are_sent_again(kit: Kit) -> None:
    store = kit.store(max_blocks=3)
    serve(store, "p1", "AB")
    serve(store, "p2", "CD")
    assert seen(store) == "BCD"
    assert len(state(store).blocks) == 3


def test_resending_a_block_makes_it_the_newest(kit: Kit) -> None:
    store = kit.store(max_blocks=2)
    for plan, names in enumerate(["A", "B", "A", "C"]):
        serve(store, f"p{plan}", names)
    assert seen(store) == "AC"


def test_a_label_outlives_its_block(kit: Kit) -> None:
    store = kit.store(max_blocks=1)
    serve(store, "p1", "A")
    serve(store, "p2", "B")
    assert store.execute(Prepare(CHAT, "p3", {key("C"): "Doc_A"})).taken == {"Doc_A"}


def test_the_oldest_leases_beyond_the_bound_commit_nothing(kit: Kit) -> None:
    store = kit.store(max_leases=2)
    for plan in ("p1", "p2", "p3"):
        prepare(store, plan, "A")
    assert len(state(store).leases) == 2
    assert not store.execute(Commit(CHAT, "p1", sent("A")))
    assert not store.execute(Commit(CHAT, "p3", sent("A"))), "it was prepared in parallel to p1"


@pytest.mark.sample(1)
def test_thousands_of_turns_stay_within_the_bounds(kit: Kit) -> None:
    store = kit.store(max_blocks=10, max_leases=5)
    for turn in range(2_000):
        fingerprint = turn.to_bytes(16, "big")
        store.execute(Prepare(CHAT, f"lost-{turn}", {fingerprint: str(turn)}))
        store.execute(Prepare(CHAT, f"p{turn}", {fingerprint: str(turn)}))
        assert store.execute(Commit(CHAT, f"p{turn}", [SeenBlock(fingerprint, str(turn), turn + 1, 1)]))
    assert len(state(store).blocks) <= 10
    assert len(state(store).leases) <= 5


# -- threads -------------------------------------------------------------------------------------------------------


@pytest.fixture
def eager_switching() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_switching")
def test_threads_on_one_conversation_never_lose_count(store: SeenStore) -> None:
    barrier = threading.Barrier(4)

    def work(worker: int) -> list[bool]:
        barrier.wait()
        return [serve(store, f"{worker}-{i}", "ABCD"[worker]) for i in range(100)]

    with ThreadPoolExecutor(4) as pool:
        recorded = [outcome for outcomes in pool.map(work, range(4)) for outcome in outcomes]
    snapshot = state(store)
    assert snapshot.turn == len(recorded) == 400
    assert snapshot.leases == ()
    assert (snapshot.epoch > 0) == (False in recorded)


@pytest.mark.usefixtures("eager_switching")
def test_threads_on_their_own_conversations_do_not_disturb_each_other(store: SeenStore) -> None:
    barrier = threading.Barrier(4)

    def work(worker: int) -> None:
        chat = Conversation("acme", str(worker))
        barrier.wait()
        for turn in range(100):
            prepared = prepare(store, f"{worker}-{turn}", "AB", chat)
            assert prepared.turn == turn
            assert len(prepared.seen) == (2 if turn else 0)
            assert store.execute(Commit(chat, f"{worker}-{turn}", sent("" if turn else "AB")))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


# -- against true histories ----------------------------------------------------------------------------------------

History = tuple[frozenset[bytes], ...]
"""The blocks that each turn sent in full."""


@dataclass
class Flight:
    """A plan that the model is answering."""

    conversation: Conversation
    plan: str
    sent: str
    turn: int
    bases: frozenset[History]
    """Possible histories before this turn."""
    commits: int
    """Number of commits in its conversation before it."""
    deadline: float

    def continued(self) -> frozenset[History]:
        """Return the possible histories with this plan's turn."""
        turn = frozenset(key(name) for name in self.sent)
        return frozenset((*base, turn) for base in self.bases)


class TrueHistories(RuleBasedStateMachine):
    """Whatever is called seen is in the history, however the application resolves plans made side by side.

    The model keeps every history that a conversation may have: when a plan is committed, its answer continues the
    history in front of which it was prepared; if others were committed meanwhile, those may as well have been kept
    and this one dropped. It makes no difference that the store dropped the plan's lease before.

    The application may also have stored the answer of a plan that it has not committed yet. So what may be referred to,
    being seen and not contested, is in those histories too, as long as the store has not given up on that plan.
    """

    kit: Kits
    flights = Bundle("flights")
    chats = st.sampled_from([CHAT] * 6 + [Conversation("b", "chat"), Conversation(None, "chat")])
    names = st.lists(st.sampled_from("ABCDE"), min_size=1, max_size=3, unique=True).map("".join)

    @initialize(max_blocks=st.sampled_from([2, 100]), max_leases=st.sampled_from([2, 100]))
    def start(self, max_blocks: int, max_leases: int) -> None:
        self.tools = self.kit()
        self.store = self.tools.store(max_blocks=max_blocks, max_leases=max_leases, ttl=1_000, lease_ttl=100)
        self.all_are_leased = max_leases == 100
        self.open: list[Flight] = []
        self.now = 0.0
        self.plans = 0
        self.histories: dict[Conversation, frozenset[History]] = {}
        self.commits: dict[Conversation, int] = {}

    def history(self, chat: Conversation) -> frozenset[History]:
        return self.histories.get(chat, frozenset({()}))

    @rule(target=flights, chat=chats, names=names | st.just(""))
    def prepare(self, chat: Conversation, names: str) -> Flight:
        self.plans += 1
        plan = f"p{self.plans}"
        prepared = prepare(self.store, plan, names, chat)
        for history in self.history(chat):
            assert set(prepared.seen) <= set().union(*history)
        for history in self.uncommitted_histories(chat):
            assert set(prepared.seen) - prepared.contested <= set().union(*history)
        new = "".join(name for name in names if key(name) not in set(prepared.seen) - prepared.contested)
        commits = self.commits.get(chat, 0)
        flight = Flight(chat, plan, new, prepared.turn + 1, self.history(chat), commits, self.now + 100)
        self.open.append(flight)
        return flight

    @rule(chat=chats, names=names)
    def serve(self, chat: Conversation, names: str) -> None:
        self.commit(self.prepare(chat, names))

    def uncommitted_histories(self, chat: Conversation) -> Iterator[History]:
        for flight in self.open:
            if flight.conversation == chat and self.now < flight.deadline and self.all_are_leased:
                yield from flight.continued()

    @rule(flight=consumes(flights))
    def commit(self, flight: Flight) -> None:
        chat = flight.conversation
        snapshot = self.store.inspect(chat)
        leased = snapshot is not None and flight.plan in snapshot.leases
        alone = flight.commits == self.commits.get(chat, 0)
        recorded = self.store.execute(Commit(chat, flight.plan, sent(flight.sent, flight.turn)))
        assert recorded == (leased and alone and self.now < flight.deadline)
        self.open.remove(flight)
        self.histories[chat] = flight.continued() if alone else self.history(chat) | flight.continued()
        self.commits[chat] = self.commits.get(chat, 0) + 1
        assert not self.store.execute(Commit(chat, flight.plan, sent("ABCDE", flight.turn)))

    @rule(flight=consumes(flights))
    def abandon(self, flight: Flight) -> None:
        self.open.remove(flight)
        self.store.execute(Abandon(flight.conversation, flight.plan))

    @rule(flight=consumes(flights))
    def crash(self, flight: Flight) -> None:
        """Lose the answer without notifying the store."""
        self.open.remove(flight)

    @rule(flight=consumes(flights), was_committed=st.booleans(), names=names)
    def lose(self, flight: Flight, was_committed: bool, names: str) -> None:
        """Commit a plan, of which the store learns only by a `Forget`; maybe it got the commit too, early or late."""
        chat = flight.conversation
        forget = Forget(chat, (flight.plan,), (), sent(flight.sent, flight.turn))
        commit = Commit(chat, flight.plan, sent(flight.sent, flight.turn))
        for operation in (commit, forget) if was_committed else (forget, commit):
            self.store.execute(operation)
        self.open.remove(flight)
        self.histories[chat] = self.history(chat) | flight.continued()
        self.commits[chat] = self.commits.get(chat, 0) + 1

    @rule(chat=chats)
    def cut(self, chat: Conversation) -> None:
        self.histories[chat] = frozenset(history[:kept] for history in self.history(chat) for kept in (0, 1, 2))
        self.store.execute(Forget(chat))

    @rule(seconds=st.sampled_from([1, 99, 101, 1_001]))
    def wait(self, seconds: int) -> None:
        self.tools.wait(seconds)
        self.now += seconds

    @invariant()
    def whatever_is_recorded_is_in_every_possible_history(self) -> None:
        for chat, histories in getattr(self, "histories", {}).items():
            snapshot = self.store.inspect(chat)
            recorded = set() if snapshot is None else {block.fingerprint for block in snapshot.blocks}
            for history in histories:
                assert recorded <= set().union(*history)


def test_seen_blocks_are_always_in_the_history(kits: Kits) -> None:
    machine = type("TrueHistoriesOfKit", (TrueHistories,), {"kit": staticmethod(kits)})
    examples = settings(max_examples=kits.examples)
    run_state_machine_as_test(machine, settings=examples)
