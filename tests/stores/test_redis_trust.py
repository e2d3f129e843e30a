"""Which servers are trusted, and when; by a clock that stands still."""

from __future__ import annotations

import pytest

from warmprefix_redis.server_trust import ForgetJournal, ServerTrust
from warmprefix_redis.wire import ServerIdentity


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


def test_first_server_is_trusted_after_a_long_uptime(world: World) -> None:
    assert world.trust.is_trusted(server("a"))


@pytest.mark.parametrize("young", [server("a", uptime=2), server("a", promoted=True)])
def test_first_server_is_not_trusted_if_it_may_be_a_successor(world: World, young: ServerIdentity) -> None:
    assert not world.trust.is_trusted(young)
    world.now += 1.9
    assert not world.trust.is_trusted(young)
    world.now += 0.1
    assert world.trust.is_trusted(young)


def test_other_primaries_of_a_cluster_count_as_first(world: World) -> None:
    assert world.trust.is_trusted(server("a"))
    world.now += 1
    assert world.trust.is_trusted(server("b"))


def test_later_server_is_not_trusted_whatever_its_uptime(world: World) -> None:
    assert world.trust.is_trusted(server("a"))
    world.now += 2.1
    assert not world.trust.is_trusted(server("b"))
    world.now += 2
    assert world.trust.is_trusted(server("b"))
    assert world.trust.is_trusted(server("a"))


def test_journal_replays_forgets_after_failover(world: World) -> None:
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


def test_failed_replay_is_due_again(world: World) -> None:
    world.trust.is_trusted(server("a"))
    world.journal.add(b"chat")
    world.now += 10
    assert world.trust.needs_replay(server("b"))
    world.now += 5
    assert world.trust.needs_replay(server("b"))
    assert not world.trust.is_trusted(server("b"))


def test_forgetting_on_a_trusted_server_changes_nothing(world: World) -> None:
    world.trust.is_trusted(server("a"))
    world.journal.add(b"chat")
    assert world.trust.is_trusted(server("a"))


def test_settle_of_zero_trusts_at_once() -> None:
    world = World(settle=0)
    assert world.trust.is_trusted(server("a", uptime=0, promoted=True))
    world.now += 10
    assert world.trust.is_trusted(server("b", uptime=0))
    world.journal.add(b"chat")
    assert not world.trust.is_trusted(server("c"))
    assert world.replay(server("c"))
    assert world.trust.is_trusted(server("c"))


def test_number_of_remembered_servers_is_bounded(world: World) -> None:
    for number in range(1_000):
        world.now += 10
        world.trust.is_trusted(server(str(number)))
    assert len(world.trust._met) <= 256


def test_journal_keeps_recent_keys_in_order_once() -> None:
    journal = ForgetJournal(size=3)
    for name in (b"a", b"b", b"a", b"c", b"d"):
        journal.add(name)
    assert journal.recent() == [b"a", b"c", b"d"]
    assert len(journal) == 3
