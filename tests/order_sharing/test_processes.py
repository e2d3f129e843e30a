"""Threads and processes: none is left behind, none is kept waiting."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from redis_servers import HOST, Server, free_port, wait_until
from warmprefix import ContextBlock, ContextPlanner
from warmprefix.order_sharing import LearnedOrder
from warmprefix.plan import Scope
from warmprefix_redis.order_sharing import RedisOrderSharing

NewWorker = Callable[..., Any]
MakeOrders = Callable[..., list[LearnedOrder]]
NAME = "warmprefix-sharing"


def threads() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


def test_no_thread_before_use_or_after_close(own_server: Server, orders: MakeOrders, scope: Scope) -> None:
    sharing = RedisOrderSharing(own_server.url)
    assert threads() == 0
    sharing.publish(scope, orders(1)[0])
    assert threads() == 1
    sharing.close()
    assert threads() == 0
    assert sharing.stats().published == 1, "what waited was sent"
    sharing.publish(scope, orders(1)[0])
    sharing.follow(scope, print)
    sharing.close()
    assert threads() == 0
    assert sharing.stats().dropped == 1
    with own_server.client() as client:
        wait_until(lambda: len(client.client_list()) == 1, "its connection is closed")


def test_close_does_not_wait_long_for_a_hanging_server(own_server: Server, orders: MakeOrders, scope: Scope) -> None:
    sharing = RedisOrderSharing(own_server.url)
    own_server.pause()
    sharing.publish(scope, orders(1)[0])
    sharing.close(timeout=0.01)  # with the server paused for good, waiting for it would never end
    own_server.resume()
    wait_until(lambda: threads() == 0, "the thread ends by itself")


@pytest.mark.parametrize("is_up", [True, False])
def test_collected_planner_ends_its_thread(own_server: Server, is_up: bool) -> None:
    url = own_server.url if is_up else f"redis://{HOST}:{free_port()}"
    planner = ContextPlanner(sharing=RedisOrderSharing(url))
    with planner.planning([ContextBlock("The sky is blue.")]):
        pass
    assert threads() == 1
    gone = weakref.ref(planner)
    del planner
    wait_until(lambda: is_gone(gone), "both are gone")
    with own_server.client() as client:
        wait_until(lambda: len(client.client_list()) == 1, "its connection is closed")


def test_learn_function_that_references_its_sharing_keeps_neither_alive(
    own_server: Server, orders: MakeOrders, scope: Scope
) -> None:
    class Holder:
        def __init__(self) -> None:
            self.sharing = RedisOrderSharing(own_server.url)
            self.sharing.follow(scope, self.learn)

        def learn(self, orders: object) -> None: ...

    holder = Holder()
    holder.sharing.publish(scope, orders(1)[0])
    gone = weakref.ref(holder)
    del holder

    wait_until(lambda: is_gone(gone), "both are gone")


def is_gone(what: weakref.ref[Any]) -> bool:
    gc.collect()
    return what() is None and threads() == 0


def test_signal_handler_may_publish(own_server: Server, new_worker: NewWorker, orders: MakeOrders) -> None:
    import signal

    one, two = new_worker(own_server), new_worker(own_server)
    two.follow()
    number = 1_000_000

    def handle(*_: object) -> None:
        nonlocal number
        if number < 1_000_500:  # so many wait for a thread that gets no time, and stay in Redis until all are read
            one.publish(orders(1, first=number))
            number += 1

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        one.publish(orders(3_000))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert number > 1_000_000
    wait_until(lambda: len(two.names()) == 3_000 + number - 1_000_000, "all arrive")


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


@needs_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # it is what is being tested
def test_forked_process_is_another_worker(own_server: Server, new_worker: NewWorker, orders: MakeOrders) -> None:
    one, two = new_worker(own_server), new_worker(own_server)
    for worker in (one, two):
        worker.follow()
    one.publish(orders(3))
    two.wait_for(orders(3))
    status = run_in_a_fork(lambda: child_of(one, orders))
    assert status == 0
    # The child's orders reach the parent too, which takes it for what it is: another.
    wait_until(lambda: one.names() == [order.keys[0] for order in orders(3, first=100)], "the parent learns")
    two.wait_for([*orders(3), *orders(3, first=100)])
    one.publish(orders(3, first=200))
    two.wait_for([*orders(3), *orders(3, first=100), *orders(3, first=200)])


def child_of(worker: Any, orders: MakeOrders) -> None:
    assert threads() == 0
    worker.publish_and_wait(orders(3, first=100))
    assert threads() == 1
    worker.sharing.close()
    assert worker.names() == []


@needs_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_unsent_orders_of_a_parent_are_sent_once(own_server: Server, new_worker: NewWorker, orders: MakeOrders) -> None:
    one, two = new_worker(own_server), new_worker(own_server)
    two.follow()
    one.publish_and_wait(orders(1))
    own_server.pause()
    one.publish(orders(20, first=1))
    assert run_in_a_fork(lambda: one.sharing.close(timeout=0.01)) == 0
    own_server.resume()
    two.wait_for(orders(21))


@needs_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_fork_waits_for_learning_planners(own_server: Server, new_worker: NewWorker, orders: MakeOrders) -> None:
    """Or it would inherit the planner's lock, held by a thread that it does not have."""
    one = new_worker(own_server)
    planner = ContextPlanner(sharing=RedisOrderSharing(own_server.url, prefix=one.sharing._prefix))
    scope = Scope(None, None, None)
    block = ContextBlock("The sky is blue.")
    over = threading.Event()

    def serve() -> None:
        number = 0
        while not over.is_set():
            one.publish(orders(50, first=number), scope)
            number += 50
            time.sleep(0.001)

    serving = threading.Thread(target=serve)
    with planner:
        planner.abandon(planner.plan([block]))
        serving.start()
        try:
            for _ in range(20):
                assert run_in_a_fork(lambda: planner.commit(planner.plan([block]))) == 0
        finally:
            over.set()
            serving.join()
        wait_until(lambda: planner.stats().shared_orders > 0, "it did learn")


def run_in_a_fork(body: Callable[[], object], seconds: float = 20.0) -> int:
    """Return the exit status of a child that makes this call: 0 without exception, -9 if it does not end."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, 9)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


PROGRAM = """
import sys
from warmprefix.plan import Scope
from warmprefix.order_sharing import LearnedOrder
from warmprefix_redis.order_sharing import RedisOrderSharing

sharing = RedisOrderSharing(sys.argv[1], prefix=sys.argv[2])
sharing.follow(Scope("acme", "model", None), lambda orders: None)
sharing.publish(Scope("acme", "model", None), LearnedOrder([b"k" * 16], [1], [0]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_up", [True, False])
def test_interpreter_exits_cleanly(own_server: Server, new_worker: NewWorker, prefix: str, is_up: bool) -> None:
    """Without a close, what was published last is sent all the same."""
    url = own_server.url if is_up else f"redis://{HOST}:{free_port()}"
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-X", "dev", "-W", "error", "-c", PROGRAM, url, prefix],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 0
        # The one line is the log record of a library whose application has not configured logging.
        assert "Traceback" not in ended.stderr if is_up else "sharing of learned orders failed" in ended.stderr
    two = new_worker(own_server)
    two.follow()
    if is_up:
        wait_until(lambda: two.names() == [b"k" * 16] * 3, "all three were sent")
