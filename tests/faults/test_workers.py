"""Several workers on one conversation, as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redis_servers import Server, wait_until
from true_prompts import Dialogue
from warmprefix import ContextPlanner

HERE = Path(__file__).parent
SEARCH_PATH = os.pathsep.join([str(HERE.parent.parent / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])])
OpenPlanner = Callable[..., ContextPlanner]


def start_worker(
    server: Server, application: str, number: int, races: int, *value_format: int
) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": SEARCH_PATH}
    arguments = [server.url, application, *map(str, (number, races, *value_format))]
    command = [sys.executable, str(HERE / "racing_worker.py"), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def outcome_of(worker: subprocess.Popen[str]) -> Any:
    output, _ = worker.communicate(timeout=120)
    assert worker.returncode == 0
    return json.loads(output)


@pytest.mark.slow
@pytest.mark.parametrize("application", ["obedient", "careless"])
def test_a_thousand_races(application: str) -> None:
    with Server() as server:
        workers = [start_worker(server, application, number, 500) for number in range(2)]
        outcomes = [outcome_of(worker) for worker in workers]
    assert [outcome["wrong"] for outcome in outcomes] == [0, 0], outcomes
    assert sum(outcome["references"] for outcome in outcomes) > 0
    lost = "abandoned" if application == "obedient" else "conflicts"
    assert sum(outcome[lost] for outcome in outcomes) > 250  # they really raced


@pytest.mark.slow
def test_two_versions_of_the_value_format_side_by_side() -> None:
    with Server() as server:
        workers = [start_worker(server, "obedient", number, 150, 1 + number) for number in range(2)]
        outcomes = [outcome_of(worker) for worker in workers]
    for outcome in outcomes:
        assert outcome["wrong"] == 0, outcome
        assert outcome["references"] > 0  # while the other worker is silent, there is a record again


@pytest.mark.slow
def test_a_worker_killed_with_plans_in_flight(open_planner: OpenPlanner) -> None:
    with Server() as server, server.client() as client:
        doomed = start_worker(server, "obedient", 0, 10**9)
        survivor = start_worker(server, "obedient", 1, 200)
        wait_until(lambda: client.get("meeting 60"), "they race")
        doomed.send_signal(signal.SIGKILL)
        doomed.communicate(timeout=30)
        outcome = outcome_of(survivor)
    assert outcome["wrong"] == 0, outcome
    assert outcome["alone"]
    assert outcome["references"] > 0


def test_the_lease_of_a_dead_worker_ends(open_planner: OpenPlanner, dialogue: Dialogue) -> None:
    script = """
import os, signal, sys
from true_prompts import Dialogue
from warmprefix import ContextPlanner
from warmprefix.stores import RecordBounds
from warmprefix_redis import RedisSeenStore
store = RedisSeenStore(sys.argv[1], bounds=RecordBounds(lease_ttl=2), timeout=5)
planner = ContextPlanner(store=store, annotate="both")
assert planner.plan(Dialogue.blocks([1, 9]), conversation="chat", placement="tail").turn == 2
os.kill(os.getpid(), signal.SIGKILL)
"""
    with Server() as server:
        planner = open_planner(server.url, budget=2, lease_ttl=2)
        dialogue.turn(planner, [1, 2])
        environment = {**os.environ, "PYTHONPATH": SEARCH_PATH}
        dead = subprocess.run([sys.executable, "-c", script, server.url], env=environment, check=False)
        assert dead.returncode == -signal.SIGKILL
        # Turns that both had seen are certain. Later ones are not: the dead worker's turn may have been stored instead.
        assert len(dialogue.turn(planner, [1, 2, 3]).references) == 2
        assert len(dialogue.turn(planner, [1, 2, 3]).references) == 2
        deadline = time.monotonic() + 10
        while len(dialogue.turn(planner, [1, 2, 3]).references) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
