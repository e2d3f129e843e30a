"""Faults of Redis in the middle of a branch: its records are true or missing, whatever copy the server has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from fault_proxy import FaultProxy, Stall, Swallow, Truncate
from redis_servers import SentinelSetup, Server, wait_until
from true_prompts import Chain
from warmprefix import ContextPlanner

Recover = Callable[..., int]
OpenPlanner = Callable[..., ContextPlanner]


@pytest.fixture
def server() -> Iterator[Server]:
    """A server whose acknowledged writes outlive its process."""
    with Server(appendonly="yes", appendfsync="no") as running:
        yield running


@pytest.fixture
def chain() -> Iterator[Chain]:
    """Return a branch; whatever the test does, no reference may dangle."""
    chain = Chain()
    yield chain
    assert chain.findings.wrong == 0, chain.findings.examples


def reconnect(planner: ContextPlanner) -> None:
    """Wait until the server is called again after a failure."""

    def is_answered() -> bool:
        elsewhere = Chain("elsewhere")
        elsewhere.turn(planner, [1])
        return bool(elsewhere.turn(planner, [1]).references)

    wait_until(is_answered, "the server is called again")


@pytest.mark.parametrize("executed", [False, True], ids=["before it is executed", "when it is executed"])
@pytest.mark.parametrize("operation", ["plan", "commit"])
def test_killed_during_each_operation(
    operation: str, executed: bool, server: Server, open_planner: OpenPlanner, chain: Chain, recover: Recover
) -> None:
    with FaultProxy(server.port, seed=3) as proxy:
        planner = open_planner(f"redis://127.0.0.1:{proxy.port}")
        recover(chain, planner)
        turn = chain.plan(planner, [1, 4]) if operation == "commit" else None
        proxy.set(**({"replies": Swallow()} if executed else {"requests": Stall()}))
        if turn is None:
            assert chain.turn(planner, [1, 4]).references == ()
        else:
            chain.keep(turn)
        server.kill()
        proxy.drop()
        proxy.heal()
        assert planner.stats().store_errors > 0
        server.start()
        reconnect(planner)
        # A write that was executed counts although its answer was lost. A turn behind an unknown one is unknown, too.
        patient = open_planner(server.url, budget=2)
        assert bool(chain.plan(patient, [1, 4]).plan.references) == (executed and operation == "commit")
        recover(chain, planner)
        assert planner.stats().unsettled_conversations == 0


def test_old_copy_is_never_wrong(server: Server, open_planner: OpenPlanner, chain: Chain, recover: Recover) -> None:
    planner = open_planner(server.url, budget=2)
    recover(chain, planner)
    fork = chain.fork()
    with server.client() as client:
        client.save()
    chain.turn(planner, [7, 8])
    server.kill()
    server.config["appendonly"] = "no"  # otherwise it would read this file, not the snapshot
    server.start()
    reconnect(planner)
    unknown = chain.plan(planner, [1, 7, 8]).plan
    assert (unknown.turn, unknown.references) == (None, ())
    assert len(fork.turn(planner, [1, 2, 3, 7]).references) == 3, "a turn of the copy is as true as ever"
    recover(chain, planner)


@pytest.mark.parametrize("loss", ["flushed", "restarted with nothing"])
def test_lost_data(loss: str, server: Server, open_planner: OpenPlanner, chain: Chain, recover: Recover) -> None:
    planner = open_planner(server.url, budget=2)
    recover(chain, planner)
    turn = chain.plan(planner, [1, 2, 9])
    assert len(turn.plan.references) == 2
    if loss == "flushed":
        with server.client() as client:
            client.flushall()
    else:
        server.kill()
        server.config["appendonly"] = "no"
        server.start()
        reconnect(planner)
    chain.keep(turn)  # the plan has brought the record along
    assert len(chain.turn(planner, [1, 2, 3, 9]).references) == 4


def test_replica_that_takes_no_writes(
    server: Server, open_planner: OpenPlanner, chain: Chain, recover: Recover
) -> None:
    planner = open_planner(server.url, budget=2)
    recover(chain, planner)
    fork = chain.fork()
    with Server() as master, server.client() as client:
        with master.client() as copy:
            for key in client.keys("*"):
                value = client.dump(key)
                assert value is not None
                copy.restore(key, 0, value)
        client.replicaof("127.0.0.1", str(master.port))
        wait_until(lambda: client.info("replication")["master_link_status"] == "up", "it is a replica")
        assert len(chain.turn(planner, [1, 2, 3]).references) == 3, "reads go on"
        assert planner.stats().store_errors == 1
        assert chain.turn(planner, [1, 2, 3]).references == (), "its write was refused"
        client.replicaof("NO", "ONE")
    reconnect(planner)
    assert len(fork.turn(planner, [1, 2, 3]).references) == 3
    recover(chain, planner)


def test_out_of_memory(server: Server, open_planner: OpenPlanner, chain: Chain, recover: Recover) -> None:
    planner = open_planner(server.url)
    recover(chain, planner)
    with server.client() as client:
        client.config_set("maxmemory", "1")
        turn = chain.plan(planner, [1, 2, 3])
        chain.keep(turn)
        assert planner.stats().store_errors > 0
        client.config_set("maxmemory", "0")
    recover(chain, planner)


@pytest.mark.parametrize("place", [0, 1, 5, 30, 60, 200])
def test_truncated_bytes(place: int, server: Server, open_planner: OpenPlanner, chain: Chain, recover: Recover) -> None:
    with FaultProxy(server.port, seed=place) as proxy:
        planner = open_planner(f"redis://127.0.0.1:{proxy.port}")
        for fault in ("replies", "requests"):
            recover(chain, planner)
            proxy.set(**{fault: Truncate(place)})
            chain.turn(planner, [1, 2, 3, 4])
            chain.turn(planner, [1, 2, 3, 5])
            proxy.heal()
            reconnect(planner)


def test_failover_in_the_middle_of_a_branch(open_planner: OpenPlanner, chain: Chain, recover: Recover) -> None:
    with SentinelSetup() as setup:
        planner, other = open_planner(setup.url), open_planner(setup.url)
        recover(chain, planner)
        recover(chain, other)
        with setup.master.client() as client:
            assert client.wait(1, 10_000) == 1, "the replica has the turns"
        fork, old = chain.fork(), setup.master
        old.kill()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:  # turns go on during the failover
            chain.turn(planner, [1, 2])
            chain.turn(other, [1, 2])
            time.sleep(0.02)
        setup.wait_for_failover(old)
        recover(chain, planner)
        recover(chain, other)
        patient = open_planner(setup.url, budget=2)
        assert len(fork.turn(patient, [1, 2, 3]).references) == 3, "what the replica has is as true as ever"
