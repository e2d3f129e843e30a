"""Faults of one Redis server in the middle of a conversation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fault_proxy import FaultProxy, Stall, Swallow
from redis_servers import Clock, Server, wait_until
from true_prompts import Dialogue
from warmprefix import ContextPlanner
from warmprefix.errors import StoreError

Recover = Callable[..., int]
OpenPlanner = Callable[..., ContextPlanner]


@pytest.fixture
def server() -> Iterator[Server]:
    """A server whose acknowledged writes outlive its process."""
    with Server(appendonly="yes", appendfsync="no") as running:
        yield running


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.port, seed=3) as running:
        yield running


@pytest.fixture
def planner(proxy: FaultProxy, open_planner: OpenPlanner, dialogue: Dialogue, recover: Recover) -> ContextPlanner:
    """Return a worker behind the proxy, in a conversation with the blocks 1, 2 and 3."""
    worker = open_planner(f"redis://127.0.0.1:{proxy.port}")
    recover(dialogue, worker)
    return worker


@pytest.fixture
def other(server: Server, open_planner: OpenPlanner, dialogue: Dialogue, recover: Recover) -> ContextPlanner:
    """Return a worker with its own path to the server."""
    worker = open_planner(server.url)
    recover(dialogue, worker)
    return worker


@pytest.fixture
def patient(server: Server, open_planner: OpenPlanner, dialogue: Dialogue, recover: Recover) -> ContextPlanner:
    """Return a worker without time limits, for faults that cost no time."""
    worker = open_planner(server.url, budget=2)
    recover(dialogue, worker)
    return worker


def in_background(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


# -- killed --------------------------------------------------------------------------------------------------------


def test_killed_between_prepare_and_commit(
    server: Server, planner: ContextPlanner, dialogue: Dialogue, recover: Recover
) -> None:
    turn = dialogue.plan(planner, [1, 2, 9])
    assert len(turn.plan.references) == 2
    server.kill()
    dialogue.keep(turn)
    assert planner.stats().store_errors > 0
    assert dialogue.turn(planner, [1, 2, 9]).references == ()  # no record, so all is sent
    server.start()
    recover(dialogue, planner)


@pytest.mark.parametrize("executed", [False, True], ids=["before it is executed", "when it is executed"])
@pytest.mark.parametrize("operation", ["prepare", "commit", "abandon", "forget"])
def test_killed_during_each_operation(
    operation: str,
    executed: bool,
    server: Server,
    proxy: FaultProxy,
    planner: ContextPlanner,
    dialogue: Dialogue,
    recover: Recover,
) -> None:
    turn = dialogue.plan(planner, [1, 4, 5]) if operation in ("commit", "abandon") else None
    failures = planner.stats().store_errors
    proxy.set(**({"replies": Swallow()} if executed else {"requests": Stall()}))

    def operate() -> None:
        if operation == "prepare":
            dialogue.turn(planner, [1, 4, 5])
        elif operation == "forget":
            with pytest.raises(StoreError):
                dialogue.cut(planner)
        elif turn is not None and operation == "commit":
            dialogue.keep(turn)
        elif turn is not None:
            planner.abandon(turn.plan)

    operating = in_background(operate)
    proxy.wait_for_hit("swallow" if executed else "stall")
    server.kill()
    operating.join()
    assert planner.stats().store_errors > failures or operation == "forget"  # which raises instead
    proxy.drop()
    proxy.heal()
    assert dialogue.turn(planner, [1, 4, 5]).references == ()
    server.start()
    recover(dialogue, planner)


def test_restarted_with_empty_data(
    server: Server, planner: ContextPlanner, other: ContextPlanner, dialogue: Dialogue, recover: Recover
) -> None:
    turn = dialogue.plan(other, [1, 2, 7])
    server.kill()
    server.config["appendonly"] = "no"
    server.start()
    dialogue.keep(turn)
    dialogue.turn(planner, [1, 2, 7])
    recover(dialogue, planner, other)
    recover(dialogue, other, planner)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("who", "outage"),
    [("the one who forgot", 0), ("another", 0), ("a new one", 0), ("another", 2), ("a new one", 2)],
)
def test_restored_from_before_the_history_was_cut(
    who: str, outage: int, server: Server, open_planner: OpenPlanner, dialogue: Dialogue, recover: Recover
) -> None:
    forgetful, another = open_planner(server.url, budget=0.2), open_planner(server.url)
    recover(dialogue, forgetful)
    dialogue.turn(another, [1])
    with server.client() as client:
        client.save()
    dialogue.cut(forgetful)
    server.kill()
    if outage:  # a long outage must not make it look for the server too rarely
        until = time.monotonic() + outage
        while time.monotonic() < until:
            Dialogue("another").turn(forgetful, [1])
            time.sleep(0.05)
    server.config["appendonly"] = "no"  # otherwise it would read this file, not the snapshot
    server.start()
    with server.client() as client:
        records = [client.hlen(key) for key in client.keys("wp:*:seen")]
        assert max(records) > 4  # the record of the history before the cut
    worker = {"the one who forgot": forgetful, "another": another}.get(who) or open_planner(server.url)
    assert dialogue.turn(worker, [1, 2, 3]).references == ()
    recover(dialogue, worker)


def test_restored_from_before_a_turn(
    server: Server, planner: ContextPlanner, dialogue: Dialogue, recover: Recover
) -> None:
    with server.client() as client:
        client.save()
    turn = dialogue.plan(planner, [1, 5])
    server.kill()
    server.config["appendonly"] = "no"
    server.start()
    dialogue.keep(turn)
    recover(dialogue, planner)


# -- unable --------------------------------------------------------------------------------------------------------


def test_a_replica_that_takes_no_writes(
    server: Server, planner: ContextPlanner, dialogue: Dialogue, recover: Recover
) -> None:
    turn = dialogue.plan(planner, [1, 6])
    with Server() as master, server.client() as client, master.client() as behind:
        client.replicaof("127.0.0.1", str(master.port))
        wait_until(lambda: client.info("replication")["master_link_status"] == "up", "it is a replica")
        failures = planner.stats().store_errors
        dialogue.keep(turn)
        assert dialogue.turn(planner, [1, 2, 3]).references == ()
        assert planner.stats().store_errors > failures
        assert behind.dbsize() == 0
        client.replicaof("NO", "ONE")
    recover(dialogue, planner)


def test_out_of_memory(server: Server, planner: ContextPlanner, dialogue: Dialogue, recover: Recover) -> None:
    turn = dialogue.plan(planner, [1, 6])
    with server.client() as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        client.config_set("maxmemory", "1")
        dialogue.keep(turn)
        assert dialogue.turn(planner, [1, 2, 6]).references == ()
        assert planner.stats().store_errors > 0
        client.config_set("maxmemory", "0")
    recover(dialogue, planner)


def test_a_full_memory_does_not_keep_a_history_from_being_cut(
    server: Server, planner: ContextPlanner, open_planner: OpenPlanner, dialogue: Dialogue, recover: Recover
) -> None:
    patient = open_planner(server.url, budget=0.2)
    with server.client() as client:
        client.config_set("maxmemory", "1")
        dialogue.cut(patient)  # would raise if the store failed
        client.config_set("maxmemory", "0")
    assert dialogue.turn(planner, [1, 2, 3]).references == ()
    recover(dialogue, planner)


def test_scripts_flushed(server: Server, patient: ContextPlanner, dialogue: Dialogue) -> None:
    for _ in range(3):
        with server.client() as client:
            client.script_flush()
        assert len(dialogue.turn(patient, [1, 2, 3]).references) == 3
    assert patient.stats().store_errors == 0


def test_keys_flushed_or_evicted(server: Server, patient: ContextPlanner, dialogue: Dialogue) -> None:
    turn = dialogue.plan(patient, [1, 8])
    with server.client() as client:
        client.flushall()
    dialogue.keep(turn)
    assert dialogue.turn(patient, [1, 2, 3, 8]).references == ()
    assert len(dialogue.turn(patient, [1, 2, 3, 8]).references) == 4
    assert patient.stats().store_errors == 0


def test_stopped_and_continued(server: Server, planner: ContextPlanner, dialogue: Dialogue, recover: Recover) -> None:
    turn = dialogue.plan(planner, [1, 9])
    server.pause()
    dialogue.keep(turn)
    assert dialogue.turn(planner, [1, 2, 9]).references == ()
    assert planner.stats().store_errors > 0
    server.resume()
    recover(dialogue, planner)


@pytest.mark.parametrize("hours", [1, -1])
def test_the_clock_jumps(hours: int, dialogue: Dialogue, open_planner: OpenPlanner, recover: Recover) -> None:
    clock = Clock()
    with Server(clock=clock) as server:
        planner, other = open_planner(server.url, budget=2), open_planner(server.url, budget=2)
        recover(dialogue, planner)
        turn = dialogue.plan(planner, [1, 2, 4])
        assert len(turn.plan.references) == 2
        clock.jump(3_600 * hours)
        assert dialogue.keep(turn)
        dialogue.turn(other, [1, 2, 4])
        recover(dialogue, other)
        recover(dialogue, planner)
        assert planner.stats().store_errors == 0
    clock.close()
