"""Workers with bad connections to the server, and commits at unusual times."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fault_proxy import Delay, Dribble, FaultProxy, Reorder, Stall, Swallow, Truncate
from redis_servers import Server, wait_until
from true_prompts import Dialogue
from warmprefix import ContextPlanner
from warmprefix_redis.breaker import CircuitBreaker

Recover = Callable[..., int]
OpenPlanner = Callable[..., ContextPlanner]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server for all tests, because none of them breaks it; old enough to be trusted."""
    with Server() as running, running.client() as client:
        wait_until(lambda: client.info("server")["uptime_in_seconds"] >= 1, "it has run for a while")
        yield running


@pytest.fixture
def prefix() -> str:
    """Prefix of the keys of one test."""
    return f"wp-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.port, seed=3) as running:
        yield running


@pytest.fixture
def planner(
    proxy: FaultProxy, prefix: str, open_planner: OpenPlanner, dialogue: Dialogue, recover: Recover
) -> ContextPlanner:
    """Return a worker behind the proxy, in a conversation with the blocks 1, 2 and 3."""
    worker = open_planner(f"redis://127.0.0.1:{proxy.port}", prefix=prefix)
    recover(dialogue, worker)
    return worker


@pytest.fixture
def other(
    server: Server, prefix: str, open_planner: OpenPlanner, dialogue: Dialogue, recover: Recover
) -> ContextPlanner:
    """Return a worker with its own path to the server."""
    worker = open_planner(server.url, prefix=prefix)
    recover(dialogue, worker)
    return worker


# -- cut off -------------------------------------------------------------------------------------------------------

FAULTS: dict[str, dict[str, Any]] = {
    f"{way} {name}": {way: fault}
    for way in ("requests", "replies")
    for name, fault in {
        "stall": Stall(),
        "are swallowed": Swallow(),
        "are truncated at once": Truncate(0),
        "are truncated": Truncate(37),
        "are late": Delay(0.03),
        "dribble": Dribble(0.001),
        "reordered by the byte": Reorder(1),
        "reordered by 16 bytes": Reorder(16),
        "reordered by 50 bytes": Reorder(50),
    }.items()
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_connection(
    fault: str,
    proxy: FaultProxy,
    planner: ContextPlanner,
    other: ContextPlanner,
    dialogue: Dialogue,
    recover: Recover,
) -> None:
    turn = dialogue.plan(planner, [1, 2, 30])
    with proxy.breaking(**FAULTS[fault]):
        dialogue.keep(turn)
        for number in range(31, 35):
            dialogue.turn(planner, [1, 2, number])
            time.sleep(0.05)  # so that the breaker lets some of them through
    assert planner.stats().store_errors > 0
    recover(dialogue, other, planner)
    recover(dialogue, planner, other)
    for worker in (other, planner):
        dialogue.turn(worker, range(30, 36))


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["requests", "replies"])
def test_damaged_messages_that_look_valid(way: str, proxy: FaultProxy, prefix: str, open_planner: OpenPlanner) -> None:
    # TCP's checksums are meant to rule this out. What is left must not become a wrong reference.
    planner = open_planner(f"redis://127.0.0.1:{proxy.port}", prefix=prefix, breaker=CircuitBreaker(0, 0))
    rng = random.Random(1)
    answered = 0
    for i in range(150):
        talk = Dialogue(f"chat-{i}")
        talk.turn(planner, rng.sample(range(30), 6))
        talk.turn(planner, rng.sample(range(30), 6))
        failures = planner.stats().store_errors
        with proxy.breaking(**{way: Reorder(rng.choice([4, 8, 16, 32]), swaps=1)}):
            for _ in range(3):
                talk.turn(planner, rng.sample(range(30), 6))
        answered += 6 - (planner.stats().store_errors - failures)
        talk.turn(planner, rng.sample(range(30), 6))
        talk.turn(planner, rng.sample(range(30), 6))
        assert talk.findings.wrong == 0, talk.findings.examples
    assert answered < 150 * 6 / 2


@pytest.mark.parametrize("fault", ["dropped", "refused"])
def test_no_connection(
    fault: str, proxy: FaultProxy, planner: ContextPlanner, other: ContextPlanner, dialogue: Dialogue, recover: Recover
) -> None:
    turn = dialogue.plan(planner, [1, 2, 5])
    if fault == "refused":
        proxy.refuse()
    assert proxy.drop() > 0
    dialogue.keep(turn)
    dialogue.turn(planner, [1, 2, 5])
    assert planner.stats().store_errors > 0 or fault == "dropped"  # a client notices the drop and connects again
    dialogue.turn(other, [1, 2, 5])
    proxy.heal()
    recover(dialogue, planner)


def test_late_answers_are_not_taken_for_the_next_call(
    proxy: FaultProxy, planner: ContextPlanner, recover: Recover
) -> None:
    # Each conversation holds one block of its own when it requests those of all, so that an answer to another
    # conversation would make a dangling reference.
    talks = [Dialogue(f"chat-{i}") for i in range(6)]
    own = range(0)
    for delay in (0.0, 0.015, 0.019, 0.021, 0.03):
        with proxy.breaking(replies=Delay(delay)):
            for _ in range(2):
                own = range(own.stop, own.stop + len(talks))
                for talk, number in zip(talks, own, strict=True):
                    talk.turn(planner, [number])
                time.sleep(0.05)
                for talk in talks:
                    talk.turn(planner, own)
                time.sleep(0.05)
    for talk in talks:
        recover(talk, planner)
        assert talk.findings.wrong == 0, talk.findings.examples


# -- commits at odd times ------------------------------------------------------------------------------------------


@pytest.fixture
def patient(server: Server, prefix: str, open_planner: OpenPlanner) -> OpenPlanner:
    """Return a function that makes workers without time limits."""

    def patient(**options: Any) -> ContextPlanner:
        return open_planner(server.url, budget=2, prefix=prefix, **options)

    return patient


def test_repeated_commit(patient: OpenPlanner, dialogue: Dialogue) -> None:
    planner = patient()
    dialogue.turn(planner, [1, 2])
    turn = dialogue.plan(planner, [1, 10])
    dialogue.keep(turn)
    assert not planner.commit(turn.plan)
    assert len(dialogue.turn(planner, [1, 2, 10]).references) == 3


def test_repeated_commit_after_a_lost_answer(
    proxy: FaultProxy, planner: ContextPlanner, patient: OpenPlanner, dialogue: Dialogue
) -> None:
    turn = dialogue.plan(planner, [1, 10])
    with proxy.breaking(replies=Swallow()):
        dialogue.keep(turn)
    assert planner.stats().unsettled_conversations == 1
    another = Dialogue("another")

    def settled() -> bool:
        another.turn(planner, [1])  # with its commit other conversations are settled
        return not planner.stats().unsettled_conversations

    wait_until(settled, "the breaker is closed, and the conversation settled")
    assert dialogue.turn(patient(), [1, 2, 3, 10]).references == ()
    assert len(dialogue.turn(patient(), [1, 2, 3, 10]).references) == 4


def test_late_commit(patient: OpenPlanner, dialogue: Dialogue) -> None:
    planner, other = patient(lease_ttl=0.2), patient(lease_ttl=0.2)
    dialogue.turn(planner, [1, 2, 3])
    slow = dialogue.plan(planner, [1, 2, 3, 4])
    time.sleep(0.3)
    assert dialogue.keep(slow)
    assert len(dialogue.turn(other, [1, 2, 3, 4]).references) == 3  # the late commit is not recorded
    assert len(dialogue.turn(planner, [1, 2, 3, 4]).references) == 4


def test_commit_from_an_old_epoch(patient: OpenPlanner, dialogue: Dialogue) -> None:
    planner, other = patient(), patient()
    dialogue.turn(planner, [1, 2])
    old = dialogue.plan(planner, [1, 2, 11])
    dialogue.cut(other)
    dialogue.turn(other, [11, 12])
    assert dialogue.turn(other, [11, 12]).references == ()  # the application may keep that plan's turn instead
    assert not planner.commit(old.plan)
    assert dialogue.turn(other, [1, 11, 12]).references == ()
    assert len(dialogue.turn(planner, [1, 11, 12]).references) == 3
