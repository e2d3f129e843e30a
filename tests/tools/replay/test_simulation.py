"""Counts of a replay, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import pytest

from warmprefix.annotate import Annotate, Templates
from warmprefix.ordering import BlockView, PrefixView
from warmprefix.plan import Placement
from warmprefix_baselines import POLICIES
from warmprefix_tools.replay.results import Misses
from warmprefix_tools.replay.simulation import Replay
from warmprefix_tools.replay.workload import Workload
from warmprefix_tools.traces.trace import BlockId, Trace, TraceRequest

TOKENS: dict[BlockId, int] = {"A": 100, "B": 50, "C": 30, "D": 20}
TEMPLATES = Templates()


def words(text: str) -> int:
    return len(text.split())


def trace(*requests: TraceRequest, k: int | None = None) -> Trace:
    return Trace("by-hand", requests, TOKENS, k)


def alone(*contexts: str, scope: str | None = None) -> list[TraceRequest]:
    return [TraceRequest(i, tuple(context), scope=scope) for i, context in enumerate(contexts)]


def test_better_order_gains_requests() -> None:
    result = Replay(Workload(trace(*alone("ABC", "CBA", "DA"))), tokenizer=words).run("greedy", None)
    # The third finds A below the root, and D has never been seen.
    assert result.saved_tokens == 180 + 100
    assert result.misses == Misses(new=180 + 20)
    assert (result.gained_requests, result.lost_requests, result.reordered_requests) == (2, 0, 2)
    assert result.untouched_requests == 1
    assert (result.today_saved_tokens, result.today_total_tokens) == (0, 480)
    notes = [TEMPLATES.quotes.format(quotes='"two words"') for _ in range(2)]
    assert result.note_tokens == result.prefilled_note_tokens == sum(map(words, notes))
    assert result.net_saved_tokens == 280 - result.note_tokens
    assert result.prefill_change == (200 + result.note_tokens) / 480 - 1


def test_labels_are_part_of_the_blocks_and_notes_are_not() -> None:
    workload = Workload(trace(*alone("ABC", "CBA", "DA")))
    labels = Replay(workload, annotate="labels", tokenizer=words).run("greedy", None)
    # Four labels of one word are written for the first time, and found with their blocks ever after.
    assert (labels.saved_tokens, labels.total_tokens, labels.hit_ratio) == (280, 480, 280 / 480)
    assert (labels.note_tokens, labels.saved_note_tokens, labels.untouched_requests) == (3 + 3 + 2, 3 + 1, 0)
    assert labels.net_saved_tokens == 280 - 4
    both = Replay(workload, annotate="both", tokenizer=words).run("greedy", None)
    # "Please read the context in the following priority order: [C] > [B] > [A] and answer the question.", then two.
    assert both.note_tokens == labels.note_tokens + 18 + 16
    assert both.net_saved_tokens == labels.net_saved_tokens - 18 - 16
    none = Replay(workload, annotate="none").run("greedy", None)
    assert (none.note_tokens, none.net_saved_tokens, none.reordered_requests) == (0, 280, 2)


@pytest.mark.parametrize(("note_tokens", "gained", "lost"), [(35, 1, 0), (36, 0, 0), (37, 0, 1)])
def test_gained_and_lost_requests_are_counted_net(note_tokens: int, gained: int, lost: int) -> None:
    tokens: dict[BlockId, int] = {"A": 20, "B": 10, "C": 6, "D": 4}
    workload = Workload(Trace("by-hand", tuple(alone("ABC", "DCBA")), tokens))
    result = Replay(workload, tokenizer=lambda text: note_tokens).run("greedy", None)
    # The second finds all but D.
    assert (result.gained_requests, result.lost_requests, result.even_requests) == (gained, lost, 2 - gained - lost)
    assert (result.saved_tokens, result.net_saved_tokens) == (36, 36 - note_tokens)


def test_application_without_warmprefix_writes_nothing() -> None:
    chats = trace(turn(0, 1, "AB"), turn(1, 1, "AC"), turn(2, 2, "BA"))
    for annotate in get_args(Annotate):
        for placement in get_args(Placement):
            result = Replay(Workload(chats), placement, annotate=annotate).run("relevance", None)
            assert (result.note_tokens, result.net_saved_tokens, result.untouched_requests) == (0, 0, 3)


def test_tokenizer_that_fails_is_counted_and_estimated() -> None:
    def broken(text: str) -> int:
        raise RuntimeError(text)

    workload = Workload(trace(*alone("ABC", "CBA", "DA")))
    result = Replay(workload, tokenizer=broken).run("greedy", None)
    estimated = Replay(workload).run("greedy", None)
    assert (result.tokenizer_errors > 0, estimated.tokenizer_errors) == (True, 0)
    assert result.note_tokens == estimated.note_tokens > 0


def test_waiting_requests_are_those_that_follow_in_their_scope() -> None:
    """The second request shares A with one that waits; without a sight of it, nothing speaks for another order."""
    requests = [
        TraceRequest(0, ("D", "B"), scope="one"),
        TraceRequest(1, ("C", "B", "A"), scope="two"),
        TraceRequest(2, ("A", "D"), scope="two"),
    ]
    workload = Workload(trace(*requests))
    orders: list[tuple[int, ...]] = []
    for waiting in (0, 1):
        replay = Replay(workload, annotate="none", waiting=waiting)
        result = replay.run("coaccess", None, observe=lambda request, order: orders.append(order.order))
        assert result.saved_tokens == 100 * waiting
    assert orders == [(0, 1), (0, 1, 2), (0, 1), (0, 1), (2, 1, 0), (0, 1)]


def test_waiting_requests_that_continue_a_conversation_are_not_announced() -> None:
    chats = trace(turn(0, 1, "D"), turn(1, 2, "CBA"), turn(2, 1, "AB"), turn(3, 3, "AB"))
    orders: list[tuple[int, ...]] = []
    for waiting in (0, 1, 2):
        replay = Replay(Workload(chats), "tail", waiting=waiting, tokenizer=lambda text: 1)
        replay.run("coaccess", None, observe=lambda request, order: orders.append(order.order))
    assert orders[1::4] == [(0, 1, 2), (0, 1, 2), (2, 1, 0)]


def test_evicted_tokens_are_counted_apart_from_new_ones() -> None:
    # Room for A and C: B goes when C comes, and A with D.
    result = Replay(Workload(trace(*alone("AB", "C", "AB", "BA")))).run("relevance", 150)
    # Of AB, C evicts B; then A is a hit and B is not; then B opens a prompt that none has opened.
    assert result.saved_tokens == 100
    assert result.misses == Misses(new=180, order=150, evicted=50)
    unbounded = Replay(Workload(trace(*alone("AB", "C", "AB", "BA")))).run("relevance", None)
    assert (unbounded.saved_tokens, unbounded.misses) == (150, Misses(new=180, order=150))


def test_scopes_share_room_and_no_prefix() -> None:
    requests = [*alone("AB", "AB", scope="one"), *alone("AB", scope="two"), *alone("AB")]
    numbered = [TraceRequest(i, each.blocks, scope=each.scope) for i, each in enumerate(requests)]
    unbounded = Replay(Workload(trace(*numbered))).run("coaccess", None)
    assert unbounded.saved_tokens == 150
    assert unbounded.misses == Misses(new=3 * 150)
    in_turn = [numbered[0], numbered[2], numbered[1]]
    assert Replay(Workload(trace(*in_turn))).run("coaccess", None).saved_tokens == 150
    crowded = Replay(Workload(trace(*in_turn))).run("coaccess", 150)
    assert (crowded.saved_tokens, crowded.misses) == (0, Misses(new=300, evicted=150))


def test_empty_traces_save_nothing() -> None:
    for requests in ([], alone("", "")):
        result = Replay(Workload(trace(*requests))).run("coaccess", 100)
        assert (result.requests, result.total_tokens, result.hit_ratio, result.prefill_change) == (
            len(requests),
            0,
            0,
            0,
        )


@pytest.mark.parametrize("placement", ["head", "tail"])
@pytest.mark.parametrize("capacity", [None, 200])
def test_every_policy_accounts_for_every_token(placement: str, capacity: int | None) -> None:
    requests = [
        TraceRequest(i, tuple(context), conversation=i % 3, query_tokens=7)
        for i, context in enumerate(["ABC", "BA", "CDA", "AB", "DB", "ABCD", "BAC", "", "DC"] * 5)
    ]
    replay = Replay(Workload(trace(*requests)), "tail" if placement == "tail" else "head", 5 * (placement == "tail"))
    for policy in POLICIES:
        result = replay.run(policy, capacity)
        assert result.misses.total == result.prefilled_tokens
        assert min(result.misses.new, result.misses.order, result.misses.evicted, result.misses.other) >= 0
        assert (result.misses.evicted > 0) == (capacity is not None)
        assert result.plan_us_p99 >= result.plan_us_p50 > 0
        assert result.commit_us_p99 >= result.commit_us_p50 > 0


class Failing:
    """A policy that sometimes returns too few positions."""

    def __init__(self) -> None:
        self._asked = 0

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        self._asked += 1
        return list(range(len(blocks)))[::-1] if self._asked % 2 else [0]

    def observe(self, served: Sequence[BlockView]) -> None:
        pass


def test_failing_policy_is_counted() -> None:
    result = Replay(Workload(trace(*alone("ABC", "CBA", "ABC")))).run(Failing, None)
    assert (result.policy_errors, result.reordered_requests, result.saved_tokens) == (1, 2, 180 + 180)


@pytest.mark.parametrize(
    ("policy", "capacity", "error"),
    [("best", None, "policy must be one of"), ("coaccess", 0, "capacity_tokens must be 1 or more")],
)
def test_bad_arguments_are_refused(policy: str, capacity: int | None, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Replay(Workload(trace(*alone("A")))).run(policy, capacity)
    with pytest.raises(ValueError, match="answer_tokens must be 0 or more, got -1"):
        Replay(Workload(trace(*alone("A"))), "tail", -1)


# -- placement tail ----------------------------------------------------------------------------------------------------

REFERENCE = words("Please also use the context labelled [A~4c6eb6] above in this conversation.")


def turn(number: int, conversation: int, context: str) -> TraceRequest:
    return TraceRequest(number, tuple(context), conversation=conversation, query_tokens=10)


def test_tail_keeps_the_history_and_refers_to_it() -> None:
    chats = trace(turn(0, 1, "AB"), turn(1, 1, "AC"), turn(2, 2, "BA"))
    result = Replay(Workload(chats), "tail", 20, tokenizer=words, annotate="both").run("greedy", None)
    first, second, other = 160, (160 + 20) + 30 + 10, 160
    assert result.total_tokens == first + second + other
    # All of the history is held, answer included; the other conversation's context is put in the first one's order.
    assert result.saved_tokens == 0 + 180 + 150
    assert result.reference_tokens == 100
    assert (result.reordered_requests, result.referring_requests, result.untouched_requests) == (1, 1, 0)
    assert result.misses == Misses(new=150 + 30, other=10 + 10 + 10)
    # The second turn writes a label for C and a reference; the other conversation two labels, and a note.
    note = words("Please read the context in the following priority order: [B] > [A] and answer the question.")
    assert result.note_tokens == 2 + (2 + 1 + REFERENCE) + (2 + note)
    assert result.saved_note_tokens == 0 + 2 + 2
    assert result.net_saved_tokens == (160 + (100 + 40) + 160) - (160 + 40 + 10) - (2 + 1 + REFERENCE + note)
    assert (result.gained_requests, result.lost_requests) == (2, 1)
    assert result.worst_request_change == pytest.approx(2 / 160), "two labels, in the first turn"
    quoted = Replay(Workload(chats), "tail", 20, tokenizer=words).run("greedy", None)
    assert (quoted.reference_tokens, quoted.lost_requests, quoted.worst_request_change) == (100, 0, 0)
    assert 0 < quoted.note_tokens < result.note_tokens
