"""vLLM's and SGLang's routers, as published, and `ReplicaRouter`, in front of the same emulated engines.

    pip install sglang-router vllm-router     # in an environment of their own
    python benchmarks/real_routers.py --routers ENVIRONMENT/bin [TRACE ...] [--sessions FOLDER] [--hints] [--write]

Without `--routers` only `ReplicaRouter` is measured. Each engine and each router is a process of its own. The engines
are emulators, `--speed` times as fast as their defaults, with 100,000 tokens of cache each; they publish KV events,
which vLLM's policy `kv_aware` follows. `ReplicaRouter` is in the client, has no events here, and its requests go
straight to the engines.

Questions (a generated stream, and each TRACE) arrive at random, as many as keep all engines busy for `--load` of the
time if nothing is cached. *as retrieved*: the context in its order of relevance. *planned*: ordered by a
`ContextPlanner`, for all replicas alike. *hints*: planned, with `SessionHints`.

Sessions of recorded agents (FOLDER, as for `agent_sessions.py`) run 12 at a time, each with half a second between an
answer and the next prompt. There is nothing to order; with *hints* the session is named.

`hits`: cached tokens of all prompt tokens, in %. `p50` and `p95` of the TTFT are in ms, through the router. `load`: the
busiest engine's prompt tokens over the mean. `--hints` instead lists the headers by which each policy keeps a session
at one engine: 6 sessions with 6 different prompts each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from agent_sessions import Messages, sessions_of
from common import percentile, print_table, zipf_requests
from gateway_replicas import plain, turns_of
from result_files import write_rows
from router_processes import BASE, Engine, engines, router
from traces import reported_k, trace_of
from warmprefix import ContextBlock, ContextPlan, ContextPlanner, EngineReport
from warmprefix_openai import messages_for
from warmprefix_routing import ReplicaRouter, RequestHints, Route, SessionHints
from warmprefix_tools.replay.workload import Workload
from warmprefix_tools.traces.reader import read_trace
from warmprefix_tools.traces.trace import Trace

KV_BLOCKS = 6_251
CAPACITY = (KV_BLOCKS - 1) * BASE.block_size
ANSWER = 50
PREAMBLE = "Answer the question from the documents. If they have no answer, write that."
MODEL = BASE.model
SESSIONS_AT_ONCE = 12
THINKING = 0.5
POLICIES = {
    "sglang": ("random", "round_robin", "power_of_two", "cache_aware", "manual"),
    "vllm": (
        "random", "round_robin", "power_of_two", "cache_aware", "consistent_hash", "sticky_least_loaded", "kv_aware",
        "kv_aware --kv-aware-session-affinity-ttl-secs 600",
    ),
}  # fmt: skip
HINTS: dict[str, SessionHints] = {
    "sglang": SessionHints("sglang"),
    "vllm": SessionHints("vllm-router"),
}
HEADERS = (
    "x-session-id", "session-id", "x-user-id", "x-tenant-id", "x-correlation-id", "x-claude-code-session-id",
    "X-SMG-Routing-Key",
)  # fmt: skip
WORDS = [f"{first}{second}{third}e" for first in "bdfglmnprst" for second in "aiou" for third in "dklmnrst"]


@dataclass(frozen=True)
class Question:
    """What one user asks, and what was retrieved for it."""

    text: str
    blocks: Sequence[ContextBlock]


@dataclass
class Measured:
    """What the client has seen."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    failed: int = 0
    ttfts: list[float] = field(default_factory=list)


# -- one request -------------------------------------------------------------------------------------------------------


async def ask(
    client: httpx.AsyncClient,
    url: str,
    messages: Messages,
    measured: Measured,
    hints: RequestHints | None = None,
    first_token: Callable[[], object] = lambda: None,
) -> tuple[int, int]:
    """Send a chat and read its answer; return the tokens of the prompt, and how many of them were cached."""
    body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER, "stream": True}
    body |= {"stream_options": {"include_usage": True}} | ({} if hints is None else hints.extra_body)
    began = time.perf_counter()
    usage: dict[str, Any] | None = None
    seen = False
    headers = {} if hints is None else hints.headers
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            if not seen and any(choice["delta"].get("content") for choice in event["choices"]):
                seen = True
                measured.ttfts.append(time.perf_counter() - began)
                first_token()
    assert usage is not None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    measured.prompt_tokens += usage["prompt_tokens"]
    measured.cached_tokens += cached
    return usage["prompt_tokens"], cached


Ask = Callable[[httpx.AsyncClient, Measured, Question], Awaitable[None]]
AskTurn = Callable[[httpx.AsyncClient, Measured, str, Messages], Awaitable[None]]


def question_through(url: str, planned: bool, hints: SessionHints | None) -> Ask:
    """Ask through a router, with the context in one order for all replicas."""
    planner = planner_of(planned, replicas=4)

    async def one(client: httpx.AsyncClient, measured: Measured, question: Question) -> None:
        with planner.planning(question.blocks, preamble=PREAMBLE) as plan:
            messages = messages_for(plan, question.text, preamble=PREAMBLE)
            await ask(client, url, messages, measured, None if hints is None else hints.for_plan(plan))

    return one


def question_routed(serving: Sequence[Engine], planned: bool) -> Ask:
    """Ask the replica that `ReplicaRouter` chooses, with the context in one order for all replicas."""
    placing = ReplicaRouter([engine.url for engine in serving], capacity_tokens=CAPACITY)
    planner = planner_of(planned, replicas=len(serving))

    async def one(client: httpx.AsyncClient, measured: Measured, question: Question) -> None:
        with planner.planning(question.blocks, preamble=PREAMBLE) as plan:
            messages = messages_for(plan, question.text, preamble=PREAMBLE)
            order = [block.block for block in plan.blocks]
            route = placing.route(order, preamble=PREAMBLE, order_locked=True)
            await routed(client, measured, messages, placing, route, plan)

    return one


def turn_through(url: str, hints: SessionHints | None) -> AskTurn:
    """Send a prompt of a session through a router."""
    planner = planner_of(False)

    async def one(client: httpx.AsyncClient, measured: Measured, session: str, messages: Messages) -> None:
        plan = planner.plan((), conversation=session, placement="tail")
        planner.abandon(plan)
        await ask(client, url, messages, measured, None if hints is None else hints.for_plan(plan))

    return one


def turn_routed(serving: Sequence[Engine]) -> AskTurn:
    """Send a prompt of a session to the replica that `ReplicaRouter` chooses."""
    placing = ReplicaRouter([engine.url for engine in serving], capacity_tokens=CAPACITY)

    async def one(client: httpx.AsyncClient, measured: Measured, session: str, messages: Messages) -> None:
        tokens = sum(len(message["content"]) for message in messages) // 4
        await routed(client, measured, messages, placing, placing.route(conversation=session, prompt_tokens=tokens))

    return one


async def routed(
    client: httpx.AsyncClient,
    measured: Measured,
    messages: Messages,
    placing: ReplicaRouter,
    route: Route,
    plan: ContextPlan | None = None,
) -> None:
    """Ask a route's replica, and end the route."""
    try:
        prompt, cached = await ask(
            client, route.replica, messages, measured, first_token=lambda: placing.prefilled(route)
        )
    except BaseException:
        placing.abandon(route)
        raise
    placing.commit(route, EngineReport(cached, prompt), plan)


def planner_of(planned: bool, replicas: int = 1) -> ContextPlanner:
    return ContextPlanner(
        policy="coaccess" if planned else "relevance", annotate="none", capacity_tokens=CAPACITY * replicas
    )


# -- what is asked -----------------------------------------------------------------------------------------------------


def questions_of(trace: Trace, limit: int) -> list[Question]:
    """Return the requests of a trace, with made-up texts as long as the trace's blocks."""
    texts: dict[object, ContextBlock] = {}

    def block(id: Any, tokens: int) -> ContextBlock:
        if id not in texts:
            words = random.Random(str(id)).choices(WORDS, k=max(tokens - 4, 1))
            texts[id] = ContextBlock(f"Document {len(texts)}. {' '.join(words)}", id=str(id), tokens=tokens)
        return texts[id]

    requests = Workload(trace, reported_k(trace)).requests[:limit]
    return [
        Question(f"Question {number}?", [block(id, trace.tokens[id]) for id in request.ids])
        for number, request in enumerate(requests)
        if request.ids
    ]


async def run_questions(one: Ask, questions: Sequence[Question], rate: float) -> Measured:
    """Ask the questions at random times, `rate` per second on average."""
    rng, measured = random.Random(5), Measured()
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:

        async def safely(question: Question) -> None:
            try:
                await one(client, measured, question)
            except httpx.HTTPError:
                measured.failed += 1

        began, at, tasks = time.perf_counter(), 0.0, []
        for question in questions:
            at += rng.expovariate(rate)
            await asyncio.sleep(max(began + at - time.perf_counter(), 0))
            tasks.append(asyncio.create_task(safely(question)))
        await asyncio.gather(*tasks)
    return measured


async def run_sessions(one: AskTurn, sessions: Sequence[Sequence[Messages]]) -> Measured:
    """Run the sessions, some at a time."""
    measured, waiting = Measured(), iter(enumerate(sessions))
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:

        async def run(number: int) -> None:
            rng = random.Random(number)
            for session, prompts in waiting:
                for messages in prompts:
                    try:
                        await one(client, measured, f"session {session}", messages)
                    except httpx.HTTPError:
                        measured.failed += 1
                    await asyncio.sleep(rng.expovariate(1 / THINKING))

        await asyncio.gather(*[run(number) for number in range(SESSIONS_AT_ONCE)])
    return measured


# -- measuring ---------------------------------------------------------------------------------------------------------

Row = dict[str, object]


@dataclass(frozen=True)
class Arm:
    """A router, and what it gets."""

    router: str
    """"sglang", "vllm" or "ReplicaRouter"."""
    policy: str
    order: str

    @property
    def hints(self) -> SessionHints | None:
        return HINTS[self.router] if self.order == "hints" else None


def arms_of(programs: Path | None, orders: Sequence[str]) -> Iterator[Arm]:
    """Yield what is measured; hints only for policies that read one."""
    for kind, policies in POLICIES.items() if programs is not None else ():
        for policy in policies:
            for order in orders:
                if (
                    order != "hints"
                    or policy.split()[0] in ("manual", "consistent_hash", "sticky_least_loaded")
                    or ("affinity" in policy)
                ):
                    yield Arm(kind, policy, order)
    for order in orders:
        if order != "hints":
            yield Arm("ReplicaRouter", "", order)


def measure(options: argparse.Namespace, arm: Arm, stream: Sequence[Question] | Sequence[Sequence[Messages]]) -> Row:
    """Run one arm with engines whose caches are empty."""
    with ExitStack() as stack:
        serving = stack.enter_context(engines(options.replicas, KV_BLOCKS, options.speed))
        url = ""
        if arm.router != "ReplicaRouter":
            url = stack.enter_context(router(options.routers, arm.router, arm.policy, serving, MODEL))
        before = [engine.counter("vllm:prompt_tokens_total") for engine in serving]
        first = stream[0]
        if isinstance(first, Question):
            questions: Any = stream
            tokens = sum(sum(block.tokens for block in question.blocks) + 50 for question in questions)
            seconds = BASE.prefill_seconds(round(tokens / len(stream))) / options.speed
            planned = arm.order != "as retrieved"
            one = question_through(url, planned, arm.hints) if url else question_routed(serving, planned)
            measured = asyncio.run(run_questions(one, questions, options.load * options.replicas / seconds))
        else:
            sessions: Any = stream
            turn = turn_through(url, arm.hints) if url else turn_routed(serving)
            measured = asyncio.run(run_sessions(turn, sessions))
        loads = [engine.counter("vllm:prompt_tokens_total") for engine in serving]
        work = [after - earlier for after, earlier in zip(loads, before, strict=True)]
    return {
        "router": arm.router,
        "policy": arm.policy,
        "order": arm.order,
        "answers": len(measured.ttfts),
        "failed": measured.failed,
        "hit_percent": round(100 * measured.cached_tokens / measured.prompt_tokens, 1),
        "ttft_p50_ms": round(1_000 * percentile(measured.ttfts, 50)),
        "ttft_p95_ms": round(1_000 * percentile(measured.ttfts, 95)),
        "max_over_mean": round(max(work) * len(work) / sum(work), 2),
    }


def print_hints(options: argparse.Namespace) -> list[Row]:
    """Return which headers keep a session at one engine, for each policy."""
    rows: list[Row] = []
    for kind, policies in POLICIES.items():
        for policy in policies:
            with ExitStack() as stack:
                serving = stack.enter_context(engines(options.replicas, KV_BLOCKS, 1e6))
                url = stack.enter_context(router(options.routers, kind, policy, serving, MODEL))
                read = [header for header in HEADERS if keeps_sessions(url, header, serving)]
            rows.append({"router": kind, "policy": policy, "reads": read})
            print(kind, policy, read, flush=True)
    return rows


def keeps_sessions(url: str, header: str, serving: Sequence[Engine]) -> bool:
    """Return True if requests with one value of a header go to one engine, and those with others elsewhere."""
    used = set()
    for session in range(6):
        before = [engine.counter("vllm:request_success_total") for engine in serving]
        for number in range(6):
            text = f"{header} {session} {number} " + " ".join(
                random.Random(f"{header}{session}{number}").choices(WORDS, k=80)
            )
            body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
            name = f"session-{session}-{header}"
            httpx.post(f"{url}/v1/chat/completions", json=body, headers={header: name}, timeout=30).raise_for_status()
        after = [engine.counter("vllm:request_success_total") for engine in serving]
        grown = [number for number, (now, then) in enumerate(zip(after, before, strict=True)) if now > then]
        if len(grown) > 1:
            return False
        used.update(grown)
    return len(used) > 1


def main() -> None:
    options = arguments()
    if options.hints:
        rows = print_hints(options)
        if options.write:
            write_rows("real_routers_hints", rows, ["router", "policy"])
        return
    streams: list[tuple[str, Any]] = []
    generated = trace_of("generated_topics", zipf_requests(600, k=10, topics=40, per_topic=20))
    traces = [generated, *map(read_trace, options.traces)]
    streams += [(trace.name, questions_of(trace, options.limit)) for trace in traces]
    if options.sessions is not None:
        files = sorted([*options.sessions.rglob("*.json"), *options.sessions.rglob("*.traj")])
        found = (turns_of(messages, options.turns, 60_000) for path in files for messages in sessions_of(path))
        sessions = list(islice((prompts for prompts in found if len(prompts) > 2), options.session_count))
        streams.append(
            (f"sessions of {options.sessions.name}", [[plain(prompt) for prompt in one] for one in sessions])
        )
    for name, stream in streams:
        if options.only and options.only not in name:
            continue
        orders = ("as retrieved", "planned", "hints") if isinstance(stream[0], Question) else ("as retrieved", "hints")
        rows = []
        for arm in arms_of(options.routers, orders):
            rows.append({"stream": name, **measure(options, arm, stream)})
            print(*rows[-1].values(), sep=" | ", flush=True)
        print_table(list(rows[0])[1:], [list(row.values())[1:] for row in rows])
        if options.write:
            write_rows("real_routers", rows, ["stream", "router", "policy", "order"])


def table(rows: Sequence[Row]) -> str:
    """Return the table of docs/routing.md: hits in %, and the p95 of the TTFT in ms."""
    measured = {(row["stream"], row["router"], row["policy"], row["order"]): row for row in rows}
    questions, sessions = dict.fromkeys(str(row["stream"]) for row in rows)
    columns = [(questions, order) for order in ("planned", "hints")]
    columns += [(sessions, order) for order in ("as retrieved", "hints")]
    lines = [
        "| router | questions | questions, hints | sessions | sessions, hints |",
        "|---|---|---|---|---|",
    ]
    for router_, policy in dict.fromkeys((row["router"], row["policy"]) for row in rows):
        if policy in ("random", "power_of_two"):  # they see neither prompts nor sessions
            continue
        name = "**ReplicaRouter**" if not policy else f"{router_} `{str(policy).partition(' ')[0]}`"
        name += ", session affinity" * ("affinity" in str(policy))
        found = [measured.get((stream, router_, policy, order)) for stream, order in columns]
        cells = ["-" if one is None else f"{one['hit_percent']} / {one['ttft_p95_ms']}" for one in found]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--routers", type=Path, help="folder of programs of the environment with the routers")
    parser.add_argument("--sessions", type=Path, help="recorded sessions of agents")
    parser.add_argument("--hints", action="store_true", help="list the headers that each policy reads")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--speed", type=float, default=2.0)
    parser.add_argument("--limit", type=int, default=300, help="questions of each stream")
    parser.add_argument("--turns", type=int, default=12, help="prompts of each session")
    parser.add_argument("--session-count", type=int, default=30)
    parser.add_argument("--only", help="part of the name of the streams to run")
    parser.add_argument("--write", action="store_true", help="write the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
