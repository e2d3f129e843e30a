"""A process forked while other threads work continues at once, with whole state."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from warmprefix import forks
from warmprefix.forks import fork_safe_lock, in_each_process
from warmprefix_tools.fork_safe_property import ForkSafeProperty

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

PROGRAM = """
import asyncio, gc, itertools, multiprocessing, os, signal, sys, tempfile, threading
from warmprefix import ContextBlock, ContextPlanner, EngineReport
from warmprefix_openai import EngineLink
from warmprefix_routing import AgentRouter, ReplicaRouter
from warmprefix.stores import MemorySeenStore
from warmprefix.telemetry import LatencyHistogram
from warmprefix_telemetry.trace_recorder import TraceRecorder

DOCUMENTS = [ContextBlock(f"Document {i}: " + "word " * 90) for i in range(60)]
NUMBERS = itertools.count()

class FlakyStore(MemorySeenStore):
    "Fails often, so that many conversations are unsettled."
    def execute(self, operation):
        if next(NUMBERS) % 3 == 0:
            raise ConnectionError
        return super().execute(operation)

def serve(planner):
    number = next(NUMBERS)
    for placement in ("head", "tail"):
        plan = planner.plan(DOCUMENTS[number % 9:][:9], conversation=f"c{number % 50}", placement=placement)
        assert planner.commit(plan, report=EngineReport(cached_tokens=100)) in (True, False)
    planner.abandon(planner.plan(DOCUMENTS[:2]))
    planner.stats()
    assert not gc.garbage

def aserve(planner):
    async def main():
        async with planner.planning(DOCUMENTS[:4], conversation="a", placement="tail"):
            pass
    asyncio.run(main())

def assign(router):
    router.commit(router.assign(DOCUMENTS[next(NUMBERS) % 9:][:9], conversation="c", tenant=f"t{next(NUMBERS) % 5}"))
    router.stats()

def route(router):
    route = router.route(DOCUMENTS[next(NUMBERS) % 9:][:9], tenant=f"t{next(NUMBERS) % 5}")
    router.commit(route)
    router.stats()

def link(planner):
    made = EngineLink(planner)
    made.stats(), made.prime_stats(), made.close()
    serve(planner)

def record(recorder):
    recorder.record(DOCUMENTS[:9], conversation="c")

def observe(histogram):
    histogram.observe(0.1)
    histogram.snapshot()

SUBJECTS = {
    "planner": (ContextPlanner, serve),
    "tasks": (ContextPlanner, aserve),
    "flaky store": (lambda: ContextPlanner(store=FlakyStore()), serve),
    "agent router": (lambda: AgentRouter(["a", "b", "c"]), assign),
    "replica router": (lambda: ReplicaRouter(["a", "b", "c"]), route),
    "link": (ContextPlanner, link),
    "recorder": (lambda: TraceRecorder(tempfile.mkdtemp() + "/trace.jsonl"), record),
    "histogram": (LatencyHistogram, observe),
}

def main(name):
    make, use = SUBJECTS[name]
    subject = make()

    def churn():
        while True:
            use(subject)

    for _ in range(4):
        threading.Thread(target=churn, daemon=True).start()
    failed = 0
    for _ in range(10):
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            try:
                for _ in range(3):
                    use(subject)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        failed += os.waitpid(pid, 0)[1] != 0
    context = multiprocessing.get_context("fork")
    process = context.Process(target=use, args=(subject,))
    process.start()
    process.join(60)
    failed += process.exitcode != 0
    sys.stdout.write(f"{failed} children failed")
    sys.stdout.flush()
    os._exit(0)

main(sys.argv[1])
"""


@pytest.mark.parametrize(
    "name",
    [
        "planner",
        "tasks",
        "flaky store",
        "agent router",
        "replica router",
        "link",
        "recorder",
        "histogram",
    ],
)
def test_children_forked_under_load_continue(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, name], capture_output=True, text=True, check=False, timeout=300
    )
    assert (run.stdout, run.returncode) == ("0 children failed", 0), run.stderr


def in_child(check: object) -> bool:
    """Return the result of a function in a forked process."""
    assert callable(check)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def is_free(lock: threading.RLock) -> bool:
    """Return True if another thread can take the lock."""
    taken: list[bool] = []
    thread = threading.Thread(target=lambda: taken.append(lock.acquire(timeout=10.0)))
    thread.start()
    thread.join()
    return taken == [True]


class Guarded:
    def __init__(self) -> None:
        self.lock = fork_safe_lock(self.drop)
        self.value = "half changed"

    def drop(self) -> None:
        self.value = "dropped"


def test_state_of_a_lock_that_is_held_too_long_is_dropped_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_MAX_WAIT_SECONDS", 0.01)
    guarded, other = Guarded(), Guarded()
    over, locked = threading.Event(), threading.Event()

    def hold() -> None:
        with guarded.lock:
            locked.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait()
    try:
        assert in_child(lambda: is_free(guarded.lock) and is_free(other.lock) and guarded.value == "dropped")
        assert in_child(lambda: other.value == "half changed"), "its lock was free"
    finally:
        over.set()
        thread.join()
    assert guarded.value == "half changed"
    assert is_free(guarded.lock)


def test_thread_may_fork_while_it_holds_locks() -> None:
    guarded = Guarded()
    with guarded.lock:
        assert in_child(lambda: guarded.lock.acquire(blocking=False) and guarded.value == "half changed")
    assert is_free(guarded.lock)


def test_threads_that_take_locks_in_opposite_orders_do_not_stop_a_fork() -> None:
    one, two = fork_safe_lock(), fork_safe_lock()
    over = threading.Event()

    def churn(first: threading.RLock, second: threading.RLock) -> None:
        while not over.is_set():
            with first:
                if second.acquire(timeout=0.001):
                    second.release()

    threads = [threading.Thread(target=churn, args=pair) for pair in ((one, two), (two, one))]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert in_child(lambda: is_free(one) and is_free(two))
    finally:
        over.set()
        for thread in threads:
            thread.join()


class Sum:
    """A value that one thread computes as long as `goes_on` is not set."""

    def __init__(self, goes_on: threading.Event) -> None:
        self.began = threading.Event()
        self.goes_on = goes_on
        self.computed = 0

    @ForkSafeProperty
    def value(self) -> int:
        """Number of computations."""
        self.computed += 1
        self.began.set()
        self.goes_on.wait()
        return self.computed


def test_property_that_a_thread_computes_is_free_in_a_child() -> None:
    goes_on, free = threading.Event(), threading.Event()
    free.set()
    busy = Sum(goes_on)
    thread = threading.Thread(target=lambda: busy.value)
    thread.start()
    try:
        assert busy.began.wait(10)
        assert in_child(lambda: Sum(free).value == 1)
    finally:
        goes_on.set()
        thread.join()
    assert (busy.value, busy.value, busy.computed) == (1, 1, 1)


def test_two_threads_may_fork_at_once() -> None:
    guarded = Guarded()
    results: list[bool] = []
    check = lambda: is_free(guarded.lock) and guarded.value == "half changed"  # noqa: E731
    threads = [threading.Thread(target=lambda: results.append(in_child(check))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def test_locks_and_owners_are_not_kept_alive() -> None:
    class Owner(Guarded):
        def __init__(self) -> None:
            super().__init__()
            in_each_process(self.drop)

    before = len(forks._locks), len(forks._set_ups)
    owner = Owner()
    gone = weakref.ref(owner), weakref.ref(owner.lock)
    del owner
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert (len(forks._locks), len(forks._set_ups)) <= before


def test_no_other_lock_can_stay_locked_in_a_child() -> None:
    """A plain lock stays locked in a process that is forked while a thread holds it."""
    allowed = {
        "core/warmprefix/forks.py",
        "core/warmprefix_openai/touching.py",  # made in each process
        "core/warmprefix_redis/connections.py",  # made in each process: held while connecting
        "integrations/chain_of_agents/warmprefix_chain_of_agents/bridge.py",  # a thread's own
        "integrations/gateway/warmprefix_gateway/recording.py",  # a server's
        "integrations/gateway/warmprefix_gateway/reordering.py",
    }
    folders = [*ROOT.glob("core/*"), *ROOT.glob("integrations/*/*"), *ROOT.glob("kernels/*")]
    with_locks = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        if folder.name.startswith("warmprefix")
        for path in folder.rglob("*.py")
        if any(f"threading.{kind}(" in path.read_text(encoding="utf-8") for kind in ("Lock", "RLock", "Condition"))
    }
    assert with_locks <= allowed
    cached = [path for folder in [*folders, *ROOT.glob("tools/*")] for path in folder.rglob("*.py")]
    assert not [path for path in cached if "@cached_property" in path.read_text(encoding="utf-8")]
