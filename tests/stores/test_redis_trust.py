"""Which servers are trusted, and when; by a clock that stands still."""

from __future__ import annotations

import pytest

from warmprefix.stores.redis.server_trust import ForgetJournal, ServerTrust
from warmprefix.stores.redis.wire import ServerIdentity


class World:
    def __init__(self, settle: float = 2.0) -> None:
        self.now = 1_000.0
        self.journal = ForgetJournal()
        self.trust = ServerTrust(settle, self.journal, lambda: self.now)

    def replay(self, server: ServerIdentity) -> bool:
        """Do what `maintain` does; True if the journal was replayed."""
        if not self.trust.needs_replay(server):
            return False
        self.trust.replayed(server, self.now)
        return True


@pytest.fixture
def world() -> World:
    return World()


def server(name: str, uptime: int = 1_000, promoted: bool = False) -> ServerIdentity:
    return ServerIdentity(name.encode(), uptime, promoted)


def test_the_first_is_trusted_if_it_has_run_for_long(world: World) -> None:
    assert world.trust.is_trusted(server("a"))


@pytest.mark.parametrize("young", [server("a", uptime=2), server("a", promoted=True)])
def test_the_first_is_not_trusted_if_it_may_be_another_s_successor(world: World, young: ServerIdentity) -> None:
    assert not world.trust.is_trusted(young)
    world.now += 1.9
    assert not world.trust.is_trusted(young)
    world.now += 0.1
    assert world.trust.is_trusted(young)


def test_its_siblings_of_a_cluster_are_first_too(world: World) -> None:
    assert world.trust.is_trusted(server("a"))
    world.now += 1
    assert world.trust.is_trusted(server("b"))


def test_one_that_is_met_later_is_not_trusted_however_long_it_has_run(world: World) -> None:
    assert world.trust.is_trusted(server("a"))
    world.now += 2.1
    assert not world.trust.is_trusted(server("b"))
    world.now += 2
    assert world.trust.is_trusted(server("b"))
    assert world.trust.is_trusted(server("a"))


def test_who_has_forgotten_something_repeats_it_when_it_is_met_and_when_it_has_settled(world: World) -> None:
    world.trust.is_trusted(server("a"))
    world.journal.add(b"chat")
    assert not world.replay(server("a")), "it was there"
    world.now += 10
    assert not world.trust.is_trusted(server("b"))
    assert world.replay(server("b"))
    assert not world.replay(server("b"))
    world.now += 2
    assert not world.trust.is_trusted(server("b"))
    assert world.replay(server("b"))
    assert world.trust.is_trusted(server("b"))
    assert not world.replay(server("b"))


def test_a_repetition_that_failed_is_due_again(world: World) -> None:
    world.trust.is_trusted(server("a"))
    world.journal.add(b"chat")
    world.now += 10
    assert world.trust.needs_replay(server("b"))
    world.now += 5
    assert world.trust.needs_replay(server("b"))
    assert not world.trust.is_trusted(server("b"))


def test_what_is_forgotten_once_it_is_trusted_changes_nothing(world: World) -> None:
    world.trust.is_trusted(server("a"))
    world.journal.add(b"chat")
    assert world.trust.is_trusted(server("a"))


def test_nobody_is_waited_for_if_nobody_is_to_be() -> None:
    world = World(settle=0)
    assert world.trust.is_trusted(server("a", uptime=0, promoted=True))
    world.now += 10
    assert world.trust.is_trusted(server("b", uptime=0))
    world.journal.add(b"chat")
    assert not world.trust.is_trusted(server("c"))
    assert world.replay(server("c"))
    assert world.trust.is_trusted(server("c"))


def test_only_so_many_servers_are_known(world: World) -> None:
    for number in range(1_000):
        world.now += 10
        world.trust.is_trusted(server(str(number)))
    assert len(world.trust._met) <= 256


def test_the_journal_keeps_the_last_in_order_and_each_once() -> None:
    journal = ForgetJournal(size=3)
    for name in (b"a", b"b", b"a", b"c", b"d"):
        journal.add(name)
    assert journal.recent() == [b"a", b"c", b"d"]
    assert len(journal) == 3
