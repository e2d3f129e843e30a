"""Calls in other threads, waited for no longer than their time."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from warmprefix_redis.lanes import Lanes

LONG = 30.0
"""Seconds that no test should come to wait."""


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes(4)
    yield lanes
    lanes.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Return an event that hanging calls wait for; it is set at the end."""
    gate = threading.Event()
    yield gate
    gate.set()


def store_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "warmprefix-store"}


def eventually(condition: object) -> bool:
    deadline = time.monotonic() + LONG
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def test_run_returns_or_raises_what_the_call_does(lanes: Lanes) -> None:
    assert lanes.run(lambda: 1 + 1, LONG) == 2
    with pytest.raises(ZeroDivisionError):
        lanes.run(lambda: 1 // 0, LONG)


def test_a_call_is_made_in_another_thread(lanes: Lanes) -> None:
    assert lanes.run(threading.get_ident, LONG) != threading.get_ident()


def test_timeout_ends_the_wait(lanes: Lanes, gate: threading.Event) -> None:
    with pytest.raises(TimeoutError, match="no answer in 10 ms"):
        lanes.run(gate.wait, 0.01)
    assert lanes.run(lambda: "next", LONG) == "next"


def test_one_thread_is_enough_for_calls_one_after_the_other() -> None:
    lanes, before = Lanes(4), store_threads()
    for _ in range(50):
        lanes.run(lambda: None, LONG)
        assert eventually(lambda: lanes._crew._busy == 0)
    assert len(store_threads() - before) == 1
    lanes.close()


def test_no_more_threads_than_its_size(gate: threading.Event) -> None:
    lanes, before = Lanes(2), store_threads()
    for _ in range(5):
        with pytest.raises(TimeoutError):
            lanes.run(gate.wait, 0.01)
    assert len(store_threads() - before) == 2
    gate.set()
    assert lanes.run(lambda: "free again", LONG) == "free again"
    lanes.close()


def test_call_not_started_in_time_never_starts(gate: threading.Event) -> None:
    lanes, made = Lanes(1), []
    with pytest.raises(TimeoutError):
        lanes.run(gate.wait, 0.01)
    with pytest.raises(TimeoutError):
        lanes.run(lambda: made.append("late"), 0.01)
    gate.set()
    assert lanes.run(lambda: "after", LONG) == "after"
    assert not made
    lanes.close()


def test_many_threads_share_the_lanes(lanes: Lanes) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: lanes.run(lambda: i * i, LONG), range(2_000)))
    assert answers == [i * i for i in range(2_000)]


def test_threads_end_on_close_or_collection(gate: threading.Event) -> None:
    for end in ("close", "collect"):
        before = store_threads()
        lanes = Lanes(3)
        lanes.run(lambda: None, LONG)
        started = store_threads() - before
        assert started
        if end == "close":
            lanes.close()
        del lanes
        gc.collect()
        assert eventually(lambda started=started: not any(thread.is_alive() for thread in started))


def test_run_works_after_close(lanes: Lanes) -> None:
    lanes.run(lambda: None, LONG)
    lanes.close()
    assert lanes.run(lambda: "again", LONG) == "again"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_run_works_in_a_forked_process(lanes: Lanes) -> None:
    lanes.run(lambda: None, LONG)
    child = os.fork()
    if child == 0:
        os._exit(0 if lanes.run(lambda: "child", LONG) == "child" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert lanes.run(lambda: "parent", LONG) == "parent"


def test_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="size must be 1 or more, got 0"):
        Lanes(0)
