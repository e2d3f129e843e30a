"""Touches behind a link's requests: where they may go, what they say, and what they never disturb."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import openai
import pytest

from warmprefix import ContextBlock, ContextPlan, ContextPlanner, EngineReport
from warmprefix.cache_profiles import PROFILES, CacheProfile
from warmprefix.plan import Retention, Scope, Touch
from warmprefix_openai import EngineLink, messages_for
from warmprefix_requests.touches import TouchStats
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

Json = dict[str, Any]

BLOCKS = [ContextBlock(f"Passage {n} is about subject {n}. " * 12, id=f"p{n}") for n in range(4)]


class NamingPlanner(ContextPlanner):
    """Names the touches that a test wants, and records how they were answered."""

    def __init__(self, **options: Any) -> None:
        super().__init__(salt_key=b"secret", **options)
        self.named: list[Touch] = []
        self.reports: list[EngineReport | None] = []
        self.was_answered = threading.Event()
        self.was_named = threading.Event()

    def touches(self, scope: Scope, most: int = 1) -> list[Touch]:
        named = [touch for touch in self.named if touch.scope == scope][:most]
        for touch in named:
            self.named.remove(touch)
            self.was_named.set()
        return named

    def touched(self, touch: Touch, report: EngineReport | None = None) -> None:
        self.reports.append(report)
        self.was_answered.set()


@pytest.fixture
def planner() -> NamingPlanner:
    return NamingPlanner()


def touch_of(plan: ContextPlan, blocks: int = 2, priority: int = 0) -> Touch:
    return Touch(plan.scope, plan.id, blocks, 100, priority)


def named_plan(planner: NamingPlanner, *, tenant: str | None = None, blocks: int = 2) -> ContextPlan:
    """Return a plan that is touched once it is committed."""
    plan = planner.plan(BLOCKS, tenant=tenant, order_locked=True)
    planner.named.append(touch_of(plan, blocks))
    return plan


def options_of(link: EngineLink, plan: ContextPlan) -> Json:
    messages = messages_for(plan, "Why?", preamble="Be brief.")
    return {"model": "warmprefix-emulator", "messages": messages, "extra_headers": link.headers(plan), "max_tokens": 4}


def ask(link: EngineLink, base_url: str, *plans: ContextPlan, wait: Callable[[], object] | None = None) -> None:
    options: Json = {"base_url": base_url, "api_key": "none", "max_retries": 0, "http_client": link.http_client()}
    with openai.OpenAI(**options) as client:
        for plan in plans:
            client.chat.completions.create(**options_of(link, plan))
            if wait is not None:
                wait()


def ask_in_tasks(
    link: EngineLink, base_url: str, *plans: ContextPlan, wait: Callable[[], object] | None = None
) -> None:
    async def run() -> None:
        options: Json = {"base_url": base_url, "api_key": "none", "max_retries": 0}
        async with openai.AsyncOpenAI(http_client=link.async_http_client(), **options) as client:
            for plan in plans:
                await client.chat.completions.create(**options_of(link, plan))
                if wait is not None:
                    await asyncio.to_thread(wait)

    asyncio.run(run())


def until_idle(link: EngineLink) -> None:
    """Wait until no touch is in flight."""
    while link._touches.toucher._touching() is not None:
        threading.Event().wait(0.001)


def show_metrics(link: EngineLink, server: EmulatorServer) -> None:
    """Have the link read the metrics of an engine."""
    ask(link, server.base_url, link._tracker.planner.plan(BLOCKS[:1]))
    for thread in threading.enumerate():
        if thread.name == "warmprefix-metrics":
            thread.join()


@pytest.fixture
def completion_reply(reply: Any, completion: Json) -> Any:
    return reply([json.dumps(completion).encode()])


@pytest.mark.parametrize("is_async", [False, True])
def test_an_engine_of_ones_own_is_touched_and_finds_the_path(
    planner: NamingPlanner, emulator: EmulatorServer, is_async: bool
) -> None:
    with EngineLink(planner) as link:
        show_metrics(link, emulator)
        plan = named_plan(planner, tenant=f"acme {is_async}")
        if is_async:
            ask_in_tasks(link, emulator.base_url, plan, wait=planner.was_answered.wait)
        else:
            ask(link, emulator.base_url, plan, wait=planner.was_answered.wait)
        (report,) = planner.reports
        assert report is not None
        assert report.cached_tokens is not None
        assert report.prompt_tokens is not None
        assert 0 < report.prompt_tokens - report.cached_tokens <= 32
        computed = report.prompt_tokens - report.cached_tokens
        assert link.touch_stats() == TouchStats(sent=1, computed_tokens=computed, found_tokens=report.cached_tokens)
        assert link.stats().errors == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_touch_has_the_requests_beginning_and_its_own_end(
    planner: NamingPlanner, scripted: Any, completion_reply: Any, is_async: bool
) -> None:
    scripted.script.append(completion_reply)
    with EngineLink(planner, touches=True) as link:
        plan = named_plan(planner, tenant="acme")
        if is_async:
            ask_in_tasks(link, scripted.base_url, plan, wait=planner.was_answered.wait)
        else:
            ask(link, scripted.base_url, plan, wait=planner.was_answered.wait)
    request, touch = scripted.seen
    assert touch.path == request.path
    assert touch.headers["authorization"] == request.headers["authorization"]
    assert not {name for name in touch.headers if "warmprefix" in name}
    texts = [planned.render() for planned in plan.blocks]
    assert touch.body == {
        "model": "warmprefix-emulator",
        "messages": [request.body["messages"][0], {"role": "user", "content": f"{texts[0]}\n\n{texts[1]}\n\nP"}],
        "max_tokens": 1,
        "cache_salt": plan.cache_salt,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }


def test_an_engine_that_may_bill_is_touched_only_if_asked(
    planner: NamingPlanner, scripted: Any, completion_reply: Any
) -> None:
    scripted.script.append(completion_reply)
    for touches, sent in ((None, 0), (False, 0), (True, 1)):
        scripted.seen.clear()
        link = EngineLink(planner, touches=touches)
        ask(link, scripted.base_url, named_plan(planner), wait=partial(until_idle, link))
        link.close()
        assert link.touch_stats().sent + link.touch_stats().failed == len(scripted.seen) - 1 == sent
        planner.named.clear()


@pytest.mark.parametrize(
    "profile",
    ["anthropic", "openai", "openai-before-5.6", "gemini", "deepseek", "vllm-checkpoints(528)", "llama.cpp(4)"],
)
def test_profiles_that_bill_or_keep_no_paths_are_never_touched(
    profile: str, scripted: Any, completion_reply: Any
) -> None:
    planner = NamingPlanner(profile=profile)
    scripted.script.append(completion_reply)
    with EngineLink(planner, touches=True) as link:
        ask(link, scripted.base_url, named_plan(planner), named_plan(planner))
    assert len(scripted.seen) == 2


def test_refused_fields_are_left_out(planner: NamingPlanner, scripted: Any, reply: Any, completion_reply: Any) -> None:
    scripted.script.extend([completion_reply, reply([b"{}"], status=400), completion_reply])
    with EngineLink(planner, touches=True) as link:
        ask(link, scripted.base_url, named_plan(planner), wait=planner.was_answered.wait)
        assert link.touch_stats().sent == 1
    first, second = (seen.body for seen in scripted.seen[1:])
    assert first.pop("continue_final_message") is True
    assert first.pop("add_generation_prompt") is False
    assert first == second


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("failure", ["status", "no usage", "no json", "cut"])
def test_failed_touches_cost_a_count_and_then_pause(
    planner: NamingPlanner,
    scripted: Any,
    reply: Any,
    completion: Json,
    completion_reply: Any,
    cut: object,
    failure: str,
    is_async: bool,
) -> None:
    failures = {
        "status": reply([b"{}"], status=503),
        "no usage": reply([json.dumps({**completion, "usage": None}).encode()]),
        "no json": reply([b"\xff\x00"]),
        "cut": reply([cut]),
    }
    link = EngineLink(planner, touches=True)
    for failed in range(5):
        scripted.script.clear()
        scripted.script.extend([completion_reply, failures[failure]])
        plan = named_plan(planner)
        planner.was_named.clear()
        (ask_in_tasks if is_async else ask)(link, scripted.base_url, plan, wait=partial(until_idle, link))
        link.close()
        assert planner.was_named.is_set() == (failed < 3)
        planner.named.clear()
    assert link.touch_stats() == TouchStats(failed=3)
    assert link.stats().commits == 5
    assert link.stats().errors == 0
    assert not planner.reports


def test_an_engine_that_is_gone_or_a_closed_client_only_counts(
    planner: NamingPlanner, scripted: Any, reply: Any, completion: Json
) -> None:
    link = EngineLink(planner, touches=True)
    plan = named_plan(planner)
    later = planner.plan(BLOCKS, order_locked=True)
    planner.named.clear()
    scripted.script.append(reply([json.dumps(completion).encode()]))
    ask(link, scripted.base_url, plan)  # the client is closed behind it
    planner.named.append(touch_of(plan))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()[1]
    with pytest.raises(openai.APIConnectionError):
        ask(link, f"http://127.0.0.1:{address}/v1", later)
    ask(link, scripted.base_url, later)
    link.close()
    assert link.touch_stats() == TouchStats(skipped=1)
    assert len(scripted.seen) == 2


@pytest.mark.parametrize("is_async", [False, True])
def test_closing_the_link_ends_a_touch_in_flight(
    planner: NamingPlanner, scripted: Any, reply: Any, completion: Json, completion_reply: Any, is_async: bool
) -> None:
    held = threading.Event()
    scripted.script.extend([completion_reply, reply([held, json.dumps(completion).encode()])])
    link = EngineLink(planner, touches=True)
    plan = named_plan(planner)

    async def run() -> None:
        options: Json = {"base_url": scripted.base_url, "api_key": "none", "max_retries": 0}
        async with openai.AsyncOpenAI(http_client=link.async_http_client(), **options) as client:
            await client.chat.completions.create(**options_of(link, plan))
            while len(scripted.seen) < 2:
                await asyncio.sleep(0.001)
            link.close()
            while asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.sleep(0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if is_async:
            asyncio.run(run())
            assert link.touch_stats() == TouchStats(failed=1)
        else:
            ask(link, scripted.base_url, plan)
            link.close()  # waits a second at most
        held.set()
        gc.collect()
    assert not planner.reports or not is_async


def test_a_loop_that_ends_in_the_middle_of_a_touch_leaves_nothing_behind(
    planner: NamingPlanner, scripted: Any, reply: Any, completion: Json, completion_reply: Any, caplog: Any
) -> None:
    held = threading.Event()
    scripted.script.extend([completion_reply, reply([held, json.dumps(completion).encode()]), completion_reply])
    link = EngineLink(planner, touches=True)
    ask_in_tasks(link, scripted.base_url, named_plan(planner), wait=planner.was_named.wait)
    held.set()
    assert link.touch_stats() == TouchStats(failed=1)
    ask_in_tasks(link, scripted.base_url, named_plan(planner), wait=planner.was_answered.wait)  # the next one goes out
    assert link.touch_stats().sent == 1
    assert not caplog.records


def test_there_is_one_touch_per_request_and_none_beside_many(
    planner: NamingPlanner, scripted: Any, completion_reply: Any
) -> None:
    scripted.script.append(completion_reply)
    link = EngineLink(planner, touches=True)
    toucher = link._touches.toucher
    for _ in range(9):
        toucher.began()
    plan = named_plan(planner)
    ask(link, scripted.base_url, plan)
    link.close()
    assert link.touch_stats() == TouchStats()
    for _ in range(9):
        toucher.ended()
    planner.named.clear()
    other = planner.plan(BLOCKS, order_locked=True)
    planner.named += [touch_of(other, blocks) for blocks in (1, 2, 3, 4) * 5]
    ask(link, scripted.base_url, other, wait=partial(until_idle, link))
    link.close()
    assert link.touch_stats().sent == 8
    planner.named.clear()


def test_the_thread_ends_with_its_link(planner: NamingPlanner, scripted: Any, completion_reply: Any) -> None:
    scripted.script.append(completion_reply)
    link = EngineLink(planner, touches=True)
    ask(link, scripted.base_url, named_plan(planner), wait=planner.was_answered.wait)
    threads = [thread for thread in threading.enumerate() if thread.name == "warmprefix-touches"]
    assert threads
    del link
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_process_starts_with_nothing(planner: NamingPlanner, scripted: Any, completion_reply: Any) -> None:
    scripted.script.append(completion_reply)
    link = EngineLink(planner, touches=True)
    plan = named_plan(planner)
    ask(link, scripted.base_url, plan, wait=planner.was_answered.wait)
    planner.named.append(touch_of(plan))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        link._touches.served(plan)
        os._exit(0 if link.touch_stats() == TouchStats() and planner.named else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    link.close()


def test_concurrent_requests_are_served_beside_touches(planner: NamingPlanner, emulator: EmulatorServer) -> None:
    with EngineLink(planner, touches=True) as link:
        options: Json = {"base_url": emulator.base_url, "api_key": "none", "http_client": link.http_client()}
        with openai.OpenAI(**options) as client:

            def work(number: int) -> None:
                for _ in range(5):
                    plan = named_plan(planner, tenant=f"tenant {number}", blocks=number % 4 + 1)
                    client.chat.completions.create(**options_of(link, plan))

            threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            link.close()
    assert link.stats().commits == 30
    assert link.stats().errors == 0
    assert link.touch_stats().failed == 0
    assert link._touches.toucher._in_flight == 0


def charged_tokens(touches: bool | None, requests: int = 240) -> tuple[int, TouchStats]:
    """Return the tokens that an engine with a small cache computes for requests and touches, and the touches."""
    random = Random(7)
    words = [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "omega",
        "sigma",
        "river",
        "mountain",
        "station",
        "engine",
        "prefix",
        "signal",
        "window",
        "garden",
    ]
    texts: dict[str, str] = {}
    planner = ContextPlanner()
    config = EmulatorConfig(kv_blocks=480, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
    with ExitStack() as stack:
        server = stack.enter_context(EmulatorServer(config))
        link = stack.enter_context(EngineLink(planner, touches=touches))
        show_metrics(link, server)
        options: Json = {"base_url": server.base_url, "api_key": "none", "http_client": link.http_client()}
        client = stack.enter_context(openai.OpenAI(**options))
        for number in range(requests):
            hot = [f"hot {random.randrange(4)} {place}" for place in range(3)] if number % 4 == 0 else []
            names = [*hot, *[f"new {number} {place}" for place in range(3)]]
            for name in names:
                texts[name] = texts.get(name) or f"{name}: {' '.join(random.choices(words, k=60))}"
            plan = planner.plan([texts[name] for name in names])
            client.chat.completions.create(**options_of(link, plan))
            until_idle(link)
        stats = planner.stats()
        return stats.reported_uncached_tokens + link.touch_stats().computed_tokens, link.touch_stats()


def test_touches_of_a_real_planner_save_more_than_they_cost() -> None:
    without, none = charged_tokens(False)
    charged, touches = charged_tokens(None)
    assert none == TouchStats()
    assert touches.sent > 5
    assert touches.failed == 0
    assert touches.found_tokens > 5 * touches.computed_tokens
    assert charged < without


# -- priorities --------------------------------------------------------------------------------------------------------


class RetainingPlanner(NamingPlanner):
    """Finds that retention pays."""

    def __init__(self, profile: CacheProfile | str = "priority-eviction") -> None:
        super().__init__(profile=profile)

    def plan(self, *blocks: Any, **options: Any) -> ContextPlan:
        return replace(super().plan(*blocks, **options), retention=Retention(2, 90))


def test_requests_carry_the_time_and_touches_what_their_path_deserves(scripted: Any, completion_reply: Any) -> None:
    planner = RetainingPlanner()
    scripted.script.append(completion_reply)
    with EngineLink(planner) as link:
        plans = [planner.plan(BLOCKS, order_locked=True) for _ in range(3)]
        ask(link, scripted.base_url, *plans[:2])
        planner.named.append(touch_of(plans[0], priority=90))
        ask(link, scripted.base_url, plans[2])
        planner.named.clear()
        link.close()
        assert link.stats().priorities == 3
    numbers = [seen.body["priority"] for seen in scripted.seen]
    assert numbers == sorted(numbers)
    assert all(1_000_000_000_000 < number < 2**62 for number in numbers)


def test_a_refused_priority_is_counted_and_left_out(scripted: Any, reply: Any, completion_reply: Any) -> None:
    planner = RetainingPlanner()
    refusal = reply([b'{"message": "Using priority is disabled for this server."}'], status=503)
    scripted.script.extend([refusal, completion_reply, refusal, completion_reply, completion_reply])
    with EngineLink(planner, touches=False) as link:
        for question in range(3):
            plan = planner.plan(BLOCKS[question:], order_locked=True)
            ask(link, scripted.base_url, plan)
        assert (link.stats().priorities, link.stats().refused_priorities, link.stats().commits) == (0, 2, 3)
    assert ["priority" in seen.body for seen in scripted.seen] == [True, False, True, False, False]


def test_requests_without_a_plan_are_not_evicted_first(scripted: Any, reply: Any, completion_reply: Any) -> None:
    planner = RetainingPlanner()
    scripted.script.append(completion_reply)
    other: Json = {"model": "warmprefix-emulator", "messages": [{"role": "user", "content": "Hi."}]}
    with EngineLink(planner, touches=False) as link:
        options: Json = {"base_url": scripted.base_url, "api_key": "none", "max_retries": 0}
        with openai.OpenAI(http_client=link.http_client(), **options) as client:
            client.chat.completions.create(**other)  # it is not known yet whether the engine takes one
            client.chat.completions.create(**options_of(link, planner.plan(BLOCKS, order_locked=True)))
            client.chat.completions.create(**other)
            client.chat.completions.create(**{**other, "model": "another"})
            with link.sending(planner.plan(BLOCKS, order_locked=True)):
                client.chat.completions.create(**other)
    assert ["priority" in seen.body for seen in scripted.seen] == [False, True, True, False, True]


def test_an_engine_beside_one_that_evicts_by_priority_gets_neither_priorities_nor_touches(
    scripted: Any, completion_reply: Any
) -> None:
    planner = RetainingPlanner("auto")
    config = EmulatorConfig(prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
    with EmulatorServer(config) as other, EngineLink(planner, touches=True) as link:
        shown = EngineReport(capacity_tokens=100_000, profile=PROFILES["priority-eviction"])
        link._tracker.metrics._read = lambda engine: EngineReport() if engine in scripted.base_url else shown
        show_metrics(link, other)
        ask(link, other.base_url, planner.plan(BLOCKS, order_locked=True), planner.plan(BLOCKS, order_locked=True))
        assert (planner.profile.eviction, link.stats().priorities) == ("priority", 2)
        scripted.script.append(completion_reply)
        ask(link, scripted.base_url, named_plan(planner), planner.plan(BLOCKS, order_locked=True))
        until_idle(link)
        assert (link.touch_stats(), link.stats().priorities) == (TouchStats(skipped=1), 2)
    assert ["priority" in seen.body for seen in scripted.seen] == [False, False]


@pytest.mark.parametrize("profile", sorted(PROFILES.keys() - {"priority-eviction"}))
def test_no_other_engine_gets_a_priority(scripted: Any, completion_reply: Any, profile: str) -> None:
    planner = RetainingPlanner(profile)
    scripted.script.append(completion_reply)
    with EngineLink(planner, touches=False) as link:
        ask(link, scripted.base_url, planner.plan(BLOCKS, order_locked=True))
    assert "priority" not in scripted.seen[0].body


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "warmprefix-touches":
            thread.join(10)
            assert not thread.is_alive()
