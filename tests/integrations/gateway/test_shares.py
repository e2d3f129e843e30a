"""Fair shares: whatever the others do, a party gets its part."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from warmprefix_gateway.shares import FairTurns, Shares

PARTIES = st.sampled_from([None, "a", "b", "c"])


class PlacesMachine(RuleBasedStateMachine):
    """Three parties have 15 of 90 units each; the rest is for all."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares(90, parties=3)
        self.held: list[tuple[str, int]] = []

    def units_of(self, party: str) -> int:
        return sum(units for holder, units in self.held if holder == party)

    @rule(party=st.sampled_from("abc"), units=st.integers(1, 20), times=st.integers(1, 100))
    def take(self, party: str, units: int, times: int) -> None:
        for _ in range(times):
            is_its_own = self.units_of(party) + units <= 15
            if self.shares.take(party, units):
                self.held.append((party, units))
            else:
                assert not is_its_own

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.shares.give_back(*self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def counts_agree(self) -> None:
        assert self.shares.used == sum(units for _, units in self.held) <= 90


TestPlaces = PlacesMachine.TestCase


@given(st.integers(1, 5))
def test_parties_that_are_not_counted_leave_room_for_another_one(busy: int) -> None:
    shares = Shares(2_000)
    for party in range(busy):
        while shares.take(str(party)):
            pass
    assert shares.take("late")


def test_one_party_alone_has_everything_if_there_are_no_tenants() -> None:
    shares = Shares(3)
    assert [shares.take(None) for _ in range(4)] == [True, True, True, False]
    shares.give_back(None)
    assert shares.take(None)


def test_what_many_busy_parties_hold_is_near_an_equal_share() -> None:
    shares = Shares(2_000)
    alone = 0
    while shares.take("a"):
        alone += 1
    assert 1_300 < alone < 1_350
    shares.give_back("a", alone)
    held: Counter[str] = Counter()
    for _ in range(2_000):
        held.update(party for party in "abcd" if shares.take(party))
    assert all(430 < number < 450 for number in held.values())


@given(st.lists(st.tuples(PARTIES, st.sampled_from(["enter", "leave", "give up"])), max_size=200))
def test_turns_are_never_lost_and_go_round(steps: Sequence[tuple[str | None, str]]) -> None:
    turns: FairTurns[tuple[str | None, int]] = FairTurns(4, 2)
    running: Counter[str | None] = Counter()
    waiting: deque[tuple[str | None, int]] = deque()
    for number, (party, step) in enumerate(steps):
        if step == "enter":
            if turns.enter(party, (party, number)):
                running[party] += 1
            else:
                waiting.append((party, number))
        elif step == "leave" and running[party]:
            running[party] -= 1
            ticket = turns.leave(party)
            if ticket is not None:
                waiting.remove(ticket)
                running[ticket[0]] += 1
        elif step == "give up" and waiting:
            ticket = waiting.popleft()
            turns.give_up(ticket[0], ticket)
        assert running.total() <= 4
        assert all(running[name] <= 2 for name in "abc")
        free = running.total() < 4
        assert not any(free and running[name] < (4 if name is None else 2) for name, _ in waiting)


def test_a_party_with_one_request_does_not_wait_behind_the_hundred_of_another_one() -> None:
    turns: FairTurns[str] = FairTurns(2, 1)
    assert turns.enter("busy", "0")
    assert not any(turns.enter("busy", str(number)) for number in range(1, 100))
    assert turns.enter("other", "x")
    assert not turns.enter("third", "y")
    assert turns.leave("other") == "y"
    assert turns.leave("busy") == "1"
    assert turns.leave("third") is None
