"""What a message's number says."""

from __future__ import annotations

from warmprefix.residency.sequence import Arrival, Sequence


def after(*numbers: int) -> Sequence:
    """Live messages that were applied, each a second after the one before."""
    sequence = Sequence()
    for number in numbers:
        sequence.arrive(number, float(number))
        sequence.apply(number, float(number))
    return sequence


def test_the_first_message_of_all() -> None:
    assert Sequence().arrive(0, 1.0) is Arrival.NEXT
    assert Sequence().arrive(3, 1.0) is Arrival.GAP


def test_in_order_and_not() -> None:
    assert after(0, 1).arrive(2, 2.0) is Arrival.NEXT
    assert after(0, 1).arrive(3, 3.0) is Arrival.GAP
    assert after(0, 1).arrive(1, 1.0) is Arrival.RESTART
    assert after(0, 1).arrive(0, 9.0) is Arrival.RESTART


def test_what_a_replay_brought_before() -> None:
    sequence = Sequence()
    sequence.apply(5, 5.0)
    assert sequence.arrive(4, 4.0) is Arrival.SEEN
    assert sequence.arrive(5, 5.0) is Arrival.SEEN
    assert sequence.arrive(6, 6.0) is Arrival.NEXT


def test_a_number_that_was_replayed_but_written_later() -> None:
    sequence = Sequence()
    sequence.apply(5, 5.0)
    assert sequence.arrive(0, 6.0) is Arrival.RESTART


def test_a_reset_forgets_what_was_applied_but_not_what_was_live() -> None:
    sequence = after(0, 1, 2)
    sequence.reset()
    assert sequence.arrive(3, 3.0) is Arrival.GAP
    sequence.apply(3, 3.0)
    assert sequence.arrive(1, 1.0) is Arrival.RESTART
