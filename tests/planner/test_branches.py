"""Conversations by the turn that a prompt continues: forks, retries, lost records, bad ids, bounds."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest

from warmprefix import Branch, ContextBlock, ContextPlan, ContextPlanner
from warmprefix.annotate import header_labels
from warmprefix.stores import (
    Conversation,
    MemorySeenStore,
    Operation,
    ReadTurn,
    RecordBounds,
    SeenBlock,
    TurnRecord,
    WriteTurn,
)

TEXTS = [f"Passage {i}. " + "word " * 60 for i in range(40)]
BLOCKS = [ContextBlock(text, id=f"Doc_{i}", tokens=80) for i, text in enumerate(TEXTS)]


class History:
    """The true text of one branch; `ask` adds a turn and checks each reference against it."""

    def __init__(self, planner: ContextPlanner, after: str | None = None, text: str = "", tenant: str = "acme") -> None:
        self.planner, self.after, self.text, self.tenant = planner, after, text, tenant

    def plan(self, numbers: range | list[int], **options: Any) -> ContextPlan:
        plan = self.planner.plan(
            [BLOCKS[i] for i in numbers],
            conversation=Branch(self.after),
            placement="tail",
            tenant=self.tenant,
            **options,
        )
        for planned in plan.blocks:
            if planned.reference is None:
                assert planned.block.text in plan.render()
            else:
                shown = f"\n[{planned.reference.label}] "
                history = f"\n{self.text}"
                assert history.count(shown) == history.count(shown + planned.block.text) > 0
        return plan

    def ask(self, numbers: range | list[int], turn_id: str | None, **options: Any) -> int:
        """Return the number of references."""
        plan = self.plan(numbers, **options)
        assert self.planner.commit(plan, turn_id=turn_id)
        self.after, self.text = turn_id, f"{self.text}{plan.render()}\n\n"
        return len(plan.references)

    def fork(self) -> History:
        return History(self.planner, self.after, self.text, self.tenant)


@pytest.fixture
def planner() -> ContextPlanner:
    return ContextPlanner(annotate="labels")


def test_turn_refers_to_what_its_branch_holds(planner: ContextPlanner) -> None:
    chat = History(planner)
    assert [chat.ask(range(5), "1"), chat.ask(range(2, 7), "2"), chat.ask(range(8), "3")] == [0, 3, 7]
    plan = chat.plan(range(8))
    assert (plan.turn, [reference.turn for reference in plan.references]) == (4, [1] * 5 + [2] * 2 + [3])
    assert (plan.conversation, plan.tracked, plan.branch) == (None, False, Branch("3"))


def test_forks_retries_and_time_travel_need_no_care(planner: ContextPlanner) -> None:
    chat = History(planner)
    chat.ask(range(3), "1")
    fork, retry = chat.fork(), chat.fork()
    assert chat.ask(range(6), "2a") == 3
    assert fork.ask(range(6), "2b") == 3
    retry.ask(range(30, 33), "2c")  # an answer that is thrown away
    assert [chat.ask([0, 4, 31], "3a"), fork.ask([5, 6], "3b"), History(planner, "1", chat.text[:0]).after] == [
        2,
        1,
        "1",
    ]
    again = History(planner, "1", fork.text)
    assert len(again.plan(range(6)).references) == 3, "nothing of later turns"


def test_only_a_committed_turn_with_an_id_can_be_continued(planner: ContextPlanner) -> None:
    chat = History(planner)
    plan = chat.plan(range(3))
    assert planner.abandon(plan)
    planner.withdraw(plan)
    assert chat.ask(range(3), None) == 0  # the server stores nothing
    for unknown in ("never", "1", "\ud800"):
        unseen = History(planner, unknown).plan(range(3))
        assert (unseen.references, unseen.turn, unseen.order, unseen.opens_prompt) == ((), None, (0, 1, 2), False)


def test_turn_behind_an_unknown_one_records_what_it_sent(planner: ContextPlanner) -> None:
    chat = History(planner, "unknown")
    assert [chat.ask(range(3), "2"), chat.ask(range(1, 5), "3"), chat.ask(range(6), "4")] == [0, 2, 5]


def test_one_plan_may_become_several_turns(planner: ContextPlanner) -> None:
    plan = History(planner).plan(range(3))
    assert [planner.commit(plan, turn_id=turn_id) for turn_id in ("a", "b")] == [True, False]
    for after in ("a", "b"):
        assert len(History(planner, after, plan.render() + "\n").plan(range(4)).references) == 3


def test_id_of_two_different_turns_counts_as_unknown(planner: ContextPlanner) -> None:
    History(planner).ask(range(3), "1")
    plan = History(planner).plan(range(4))
    assert not planner.commit(plan, turn_id="1")
    assert History(planner, "1").plan(range(4)).turn is None
    assert planner.stats().conflicts == 1


def test_tenants_and_names_share_no_ids(planner: ContextPlanner) -> None:
    chat = History(planner)
    chat.ask(range(3), "1")
    assert History(planner, "1", tenant="other").plan(range(3)).turn is None
    named = planner.plan(BLOCKS[:3], conversation="1", placement="tail", tenant="acme")
    assert (named.references, named.turn) == ((), 1)
    planner.forget("1", tenant="acme")
    assert chat.ask(range(3), "2") == 3


def test_shown_history_and_head_ignore_the_branch(planner: ContextPlanner) -> None:
    chat = History(planner)
    chat.ask(range(3), "1")
    shown = planner.plan(BLOCKS[:3], conversation=Branch("1"), placement="tail", tenant="acme", history=[])
    head = planner.plan(BLOCKS[:3], conversation=Branch("1"), tenant="acme")
    for plan in (shown, head):
        assert (plan.references, plan.parent, plan.branch) == ((), None, None)
        assert planner.commit(plan, turn_id="2")
    assert History(planner, "2").plan(range(3)).turn is None


def test_planning_commits_the_turn_id_of_the_context(planner: ContextPlanner) -> None:
    context = planner.planning(BLOCKS[:3], conversation=Branch(None), placement="tail")
    with context:
        context.turn_id = "1"

    async def second() -> int:
        context = planner.planning(BLOCKS[:4], conversation=Branch("1"), placement="tail")
        async with context as plan:
            context.turn_id = "2"
        return len(plan.references)

    assert asyncio.run(second()) == 3
    with pytest.raises(KeyError), planner.planning(BLOCKS[:4], conversation=Branch("2"), placement="tail") as plan:
        raise KeyError
    assert len(plan.references) == 4


def test_plan_with_its_parent_can_be_pickled_and_compared(planner: ContextPlanner) -> None:
    chat = History(planner)
    chat.ask(range(3), "1")
    plan = chat.plan(range(5))
    copied = pickle.loads(pickle.dumps(plan))
    assert (copied, copied.parent) == (plan, plan.parent)
    assert planner.commit(copied, turn_id="2")


# -- bounds --------------------------------------------------------------------------------------------------------


def test_long_chain_is_bounded_and_its_oldest_blocks_are_unseen() -> None:
    store = MemorySeenStore(bounds=RecordBounds(max_blocks=64))
    planner = ContextPlanner(store=store, annotate="labels")
    after: str | None = None
    blocks = [ContextBlock(f"Passage {i}. " + "word " * 8, tokens=20) for i in range(4_000)]
    for i in range(2_000):
        plan = planner.plan(blocks[2 * i : 2 * i + 2], conversation=Branch(after), placement="tail")
        planner.commit(plan, turn_id=(after := f"{i}"))
        assert plan.parent is not None
        assert len(plan.parent.blocks) <= 64
    newest = planner.plan(blocks[-70:], conversation=Branch(after), placement="tail")
    assert len(newest.references) == 64
    assert newest.turn == 2_001
    labels = [planned.label for planned in newest.blocks if planned.reference is None]
    assert {len(label) for label in labels} == {4 + 12}, "a dropped block may have the usual digits"


@pytest.mark.parametrize(("days", "seen"), [(0, 3), (27, 3), (29, 0), (-0.9, 3), (-2, 0)])
def test_block_counts_as_seen_for_four_weeks(monkeypatch: pytest.MonkeyPatch, days: float, seen: int) -> None:
    now = time.time()
    planner = ContextPlanner(store=MemorySeenStore(bounds=RecordBounds(ttl=1e9)), annotate="labels")
    chat = History(planner)
    chat.ask(range(3), "1")
    monkeypatch.setattr("time.time", lambda: now + days * 43_200)
    chat.ask([], "2")  # a chain that goes on does not make its blocks younger
    monkeypatch.setattr("time.time", lambda: now + days * 86_400)
    plan = chat.plan(range(3))
    assert (len(plan.references), plan.turn) == (seen, 3)
    if not seen:
        assert {len(planned.label) for planned in plan.blocks} == {len("Doc_0~000000")}, "an old text may have the id"


def test_label_never_names_two_texts_of_a_branch(planner: ContextPlanner) -> None:
    versions = [ContextBlock(f"Version {i}. " + "word " * 40, id="Doc_1", tokens=60) for i in range(3)]
    plain = ContextBlock("A text.\n[Doc_2] A line that imitates a block.\n [Doc_3] Another.", id="Doc_0", tokens=60)
    late = [ContextBlock(f"Late {i}. " + "word " * 40, id=f"Doc_{i}", tokens=60) for i in (2, 3, 4, 5)]
    after: str | None = None
    history, references = "", 0
    for turn, blocks in enumerate([[plain, versions[0]], [versions[1], *late], [versions[2], plain, *late, *versions]]):
        plan = planner.plan(blocks, conversation=Branch(after), placement="tail")
        planner.commit(plan, turn_id=(after := f"{turn}"))
        history += plan.render() + "\n\n"
        references = len(plan.references)
    labels = list(header_labels(history))
    assert len(set(labels)) == len(labels)
    for label in ("Doc_0", "Doc_1", "Doc_2", "Doc_3", "Doc_4", "Doc_5"):  # [Doc_2] and [Doc_3] are the plain text's
        assert label in labels
    assert references == 7


def test_text_imitates_no_label_that_a_lost_record_had(planner: ContextPlanner) -> None:
    imitation = ContextBlock("A text.\n[Doc_0] A line that imitates a block.", id="Doc_9", tokens=60)
    begun = planner.plan([*BLOCKS[:1], imitation], conversation=Branch(None), placement="tail")
    other = planner.plan([imitation], conversation=Branch(None), placement="tail")
    unknown = planner.plan([imitation], conversation=Branch("lost"), placement="tail")
    assert [list(header_labels(plan.render())) for plan in (begun, other, unknown)] == [
        ["Doc_0", "Doc_9"],
        ["Doc_9", "Doc_0"],
        [f"Doc_9~{imitation.fingerprint.hex()[:6]}"],
    ]


def test_labels_are_those_of_a_shown_history_if_the_record_is_complete(planner: ContextPlanner) -> None:
    blocks = [*BLOCKS[:3], ContextBlock("no id " * 9), ContextBlock("a number " * 9, id="17")]
    shown = planner.plan(blocks, history=[], placement="tail")
    begun = planner.plan(blocks, conversation=Branch(None), placement="tail")
    unknown = planner.plan(blocks, conversation=Branch("unknown"), placement="tail")
    labels = [[planned.label for planned in plan.blocks] for plan in (shown, begun, unknown)]
    digits = [block.fingerprint.hex() for block in blocks]
    assert labels[1] == [*labels[0][:4], f"17~{digits[4][:6]}"]
    ids = ["Doc_0", "Doc_1", "Doc_2"]
    lasting = [f"{id}~{digit[:6]}" for id, digit in zip(ids, digits, strict=False)]
    assert labels[2] == [*lasting, f"ctx-{digits[3][:12]}", f"17~{digits[4][:6]}"]
    planner.commit(unknown, turn_id="1")
    assert planner.plan(BLOCKS[3:4], conversation=Branch("1"), placement="tail").blocks[0].label.startswith("Doc_3~")


def test_text_with_too_many_labels_makes_the_record_partial(planner: ContextPlanner) -> None:
    text = "\n".join(f"[line-{i}] text" for i in range(1_000))
    plan = planner.plan([text], conversation=Branch(None), placement="tail")
    planner.commit(plan, turn_id="1")
    after = planner.plan(BLOCKS[:1], conversation=Branch("1"), placement="tail")
    assert after.parent is not None
    assert (after.parent.others, after.parent.partial) == ((), True)
    assert after.blocks[0].label.startswith("Doc_0~")


def planner_key(turn_id: str) -> Conversation:
    return Conversation("acme", turn_id)


def test_tenant_with_many_turns_pushes_out_only_its_own() -> None:
    planner = ContextPlanner(store=MemorySeenStore(max_conversations=20), annotate="labels")
    History(planner, tenant="small").ask(range(3), "1")
    large = History(planner, tenant="large")
    for i in range(100):
        large.ask(range(3), f"{i}")
    assert History(planner, "1", large.text, tenant="small").plan(range(3)).turn == 2
    assert large.plan(range(3)).turn == 101
    assert History(planner, "50", tenant="large").plan(range(3)).turn is None


# -- bad input -----------------------------------------------------------------------------------------------------


def bad(value: object) -> Any:
    return value


TOO_LONG = "must have from 1 to 1,024 characters, got"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda planner, plan: Branch(bad(7)), TypeError, "after must be a str or None, got int"),
        (lambda planner, plan: Branch(bad(b"x")), TypeError, "after must be a str or None, got bytes"),
        (lambda planner, plan: Branch(""), ValueError, f"after {TOO_LONG} 0"),
        (lambda planner, plan: Branch("x" * 10_000_000), ValueError, f"after {TOO_LONG} 10,000,000"),
        (lambda planner, plan: planner.commit(plan, turn_id=7), TypeError, "turn_id must be a str or None, got int"),
        (lambda planner, plan: planner.commit(plan, turn_id=""), ValueError, f"turn_id {TOO_LONG} 0"),
        (lambda planner, plan: asyncio.run(planner.acommit(plan, turn_id="x" * 1_025)), ValueError, "turn_id must"),
        (
            lambda planner, plan: planner.forget(Branch("x")),
            TypeError,
            "conversation must be a str or None, got Branch",
        ),
        (
            lambda planner, plan: planner.plan([], conversation=["x"], placement="tail"),
            TypeError,
            "conversation must be",
        ),
    ],
)
def test_bad_ids_are_refused_and_change_nothing(
    planner: ContextPlanner, call: Callable[[ContextPlanner, ContextPlan], Any], error: type[Exception], message: str
) -> None:
    plan = History(planner).plan(range(3))
    with pytest.raises(error, match=message):
        call(planner, plan)
    assert planner.commit(plan, turn_id="x" * 1_024)


def test_empty_requests_make_turns_too(planner: ContextPlanner) -> None:
    chat = History(planner)
    assert [chat.ask([], "1"), chat.ask(range(3), "2"), chat.ask([], "3"), chat.ask(range(3), "4")] == [0, 0, 0, 3]


# -- failures ------------------------------------------------------------------------------------------------------


class FailingStore(MemorySeenStore):
    """Fails in the operations of one kind, before or after executing them."""

    kind: type | None = None
    late = False

    def execute(self, operation: Operation[Any]) -> Any:
        if type(operation) is self.kind:
            if self.late:
                super().execute(operation)
            raise OSError("no answer")
        return super().execute(operation)


@pytest.mark.parametrize("kind", [ReadTurn, WriteTurn])
@pytest.mark.parametrize("late", [False, True])
def test_failed_calls_leave_nothing_to_settle(kind: type, late: bool) -> None:
    store = FailingStore()
    planner = ContextPlanner(store=store, annotate="labels")
    chat = History(planner)
    chat.ask(range(3), "1")
    store.kind, store.late = kind, late
    plan = chat.plan(range(5))
    assert len(plan.references) == (0 if kind is ReadTurn else 3)
    assert planner.commit(plan, turn_id="2") == (kind is ReadTurn)
    store.kind = None
    stats = planner.stats()
    assert (stats.store_errors, stats.unsettled_conversations) == (1, 0)
    after = History(planner, "2", chat.text + plan.render() + "\n\n")
    assert len(after.plan(range(5)).references) == (5 if kind is ReadTurn or late else 0)


def test_damaged_record_counts_as_missing() -> None:
    store = MemorySeenStore()
    planner = ContextPlanner(store=store)
    store.execute(WriteTurn(planner_key("1"), TurnRecord(1, (SeenBlock(BLOCKS[0].fingerprint, "x] y", 1, 9),))))
    store.execute(WriteTurn(planner_key("2"), TurnRecord(0, damaged=True)))
    for i, turn_id in enumerate(("1", "2")):
        assert History(planner, turn_id).plan(range(3)).turn is None
        assert planner.stats().store_errors == i + 1


def test_cancelled_commit_leaves_a_turn_that_nobody_continues() -> None:
    class Slow(MemorySeenStore):
        async def aexecute(self, operation: Operation[Any]) -> Any:
            await asyncio.sleep(0)
            return self.execute(operation)

    async def run() -> None:
        planner = ContextPlanner(store=Slow(), annotate="labels")
        plan = await planner.aplan(BLOCKS[:3], conversation=Branch(None), placement="tail")
        commit = asyncio.ensure_future(planner.acommit(plan, turn_id="1"))
        await asyncio.sleep(0)
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        assert planner.stats().unsettled_conversations == 0
        assert (await planner.aplan(BLOCKS[:3], conversation=Branch(None), placement="tail")).references == ()

    asyncio.run(run())
