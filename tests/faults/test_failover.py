"""A conversation whose server changes: a replica takes over, or its slot moves to another node."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import redis

from redis_servers import Cluster, SentinelSetup, Server
from true_prompts import Dialogue
from warmprefix import ContextPlanner

Recover = Callable[..., int]
OpenPlanner = Callable[..., ContextPlanner]


def test_failover_in_the_middle_of_a_conversation(
    dialogue: Dialogue, open_planner: OpenPlanner, recover: Recover
) -> None:
    with SentinelSetup() as setup:
        planner, other = open_planner(setup.url), open_planner(setup.url)
        recover(dialogue, planner, other)
        recover(dialogue, other, planner)
        turn = dialogue.plan(planner, [1, 2, 40])
        assert len(turn.plan.references) == 2
        old = setup.master
        old.kill()
        dialogue.keep(turn)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:  # turns go on during the failover
            dialogue.turn(planner, [1, 2])
            dialogue.turn(other, [1, 2])
            time.sleep(0.02)
        assert planner.stats().store_errors > 0
        setup.wait_for_failover(old)
        recover(dialogue, planner, other)
        recover(dialogue, other, planner)


@pytest.mark.slow
def test_a_replica_that_missed_a_cut_takes_over(
    dialogue: Dialogue, open_planner: OpenPlanner, recover: Recover
) -> None:
    with SentinelSetup() as setup:
        planner, other = (
            open_planner(setup.url, budget=0.2),
            open_planner(setup.url, budget=0.2),
        )
        recover(dialogue, planner, other)
        recover(dialogue, other, planner)
        old = setup.master
        replica = next(server for server in setup.servers if server is not old)
        replica.pause()  # it receives no more writes
        dialogue.cut(planner)
        old.kill()
        replica.resume()
        assert setup.wait_for_failover(old) is replica
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            dialogue.turn(other, [1, 2, 3])
            time.sleep(0.05)
        recover(dialogue, planner)


def test_a_slot_moves_in_the_middle_of_a_conversation(
    dialogue: Dialogue, open_planner: OpenPlanner, recover: Recover
) -> None:
    with Cluster() as cluster:
        planner, other = open_planner(cluster.url), open_planner(cluster.url)
        recover(dialogue, planner)
        recover(dialogue, other)
        with cluster.client() as client:
            [key] = client.keys("wp:*", target_nodes="primaries")
            assert isinstance(key, bytes)
        source = cluster.owner(key)
        target = next(node for node in cluster.nodes if node is not source)
        turn = dialogue.plan(planner, [1, 2, 50])
        assert len(turn.plan.references) == 2
        migration = Migration(source, target, key, cluster)
        try:
            migration.open()
            dialogue.keep(turn)
            dialogue.turn(other, [1, 2, 50])
            migration.move_key()
            dialogue.turn(planner, [1, 2, 51])  # the key has moved, the slot has not
            dialogue.turn(other, [1, 2, 52])
            migration.close()
        finally:
            migration.end()
        assert cluster.owner(key) is target
        recover(dialogue, planner, other)
        recover(dialogue, other, planner)
        assert len(dialogue.turn(other, [1, 2]).references) == 2


class Migration:
    """A step-by-step move of the only key of a slot, and then of the slot."""

    def __init__(self, source: Server, target: Server, key: bytes, cluster: Cluster) -> None:
        self._nodes = [node.client(decode_responses=True) for node in cluster.nodes]
        self._source, self._target = source.client(decode_responses=True), target.client(decode_responses=True)
        self._key = key
        self._port = target.port
        self._slot = int(ask(self._source, "CLUSTER KEYSLOT", key))
        self._ids = [ask(client, "CLUSTER MYID") for client in (self._source, self._target)]

    def open(self) -> None:
        ask(self._target, "CLUSTER SETSLOT", self._slot, "IMPORTING", self._ids[0])
        ask(self._source, "CLUSTER SETSLOT", self._slot, "MIGRATING", self._ids[1])

    def move_key(self) -> None:
        ask(self._source, "MIGRATE", "127.0.0.1", self._port, self._key, 0, 5_000)

    def close(self) -> None:
        for client in (self._target, self._source, *self._nodes):
            ask(client, "CLUSTER SETSLOT", self._slot, "NODE", self._ids[1])

    def end(self) -> None:
        for client in (*self._nodes, self._source, self._target):
            client.close()


def ask(client: redis.Redis, *command: object) -> str:
    return str(client.execute_command(*command))  # type: ignore[no-untyped-call]
