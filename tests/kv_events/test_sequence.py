"""Classification of messages by their sequence numbers."""

from __future__ import annotations

from warmprefix_kv_events.kv_events import Arrival, SequenceTracker


def after(*numbers: int) -> SequenceTracker:
    """Return a tracker with these live messages applied, one second apart."""
    sequence = SequenceTracker()
    for number in numbers:
        sequence.arrive(number, float(number))
        sequence.apply(number, float(number))
    return sequence


def test_only_message_zero_begins_without_a_gap() -> None:
    assert SequenceTracker().arrive(0, 1.0) is Arrival.NEXT
    assert SequenceTracker().arrive(3, 1.0) is Arrival.GAP


def test_live_messages_are_next_gap_or_restart() -> None:
    assert after(0, 1).arrive(2, 2.0) is Arrival.NEXT
    assert after(0, 1).arrive(3, 3.0) is Arrival.GAP
    assert after(0, 1).arrive(1, 1.0) is Arrival.RESTART
    assert after(0, 1).arrive(0, 9.0) is Arrival.RESTART


def test_replayed_messages_are_seen() -> None:
    sequence = SequenceTracker()
    sequence.apply(5, 5.0)
    assert sequence.arrive(4, 4.0) is Arrival.SEEN
    assert sequence.arrive(5, 5.0) is Arrival.SEEN
    assert sequence.arrive(6, 6.0) is Arrival.NEXT


def test_a_replayed_number_with_a_newer_batch_is_a_restart() -> None:
    sequence = SequenceTracker()
    sequence.apply(5, 5.0)
    assert sequence.arrive(0, 6.0) is Arrival.RESTART


def test_reset_forgets_applied_but_not_live_messages() -> None:
    sequence = after(0, 1, 2)
    sequence.reset()
    assert sequence.arrive(3, 3.0) is Arrival.GAP
    sequence.apply(3, 3.0)
    assert sequence.arrive(1, 1.0) is Arrival.RESTART
