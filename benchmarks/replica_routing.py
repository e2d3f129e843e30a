"""Replicas of one model behind different routers: what their prefix caches hit, and how soon the first token comes.

    python benchmarks/replica_routing.py [TRACE_OR_FOLDER ...] [--replicas 4,8] [--load 0.9] [--limit N]

Without an argument the traces are those of `REPORTED` in the folder that the environment variable WARMPREFIX_TRACES
names, if it does, behind the generated ones: requests on topics, the same with one document in 60 % of them, chats,
and a control in which nothing recurs.

A discrete-event simulation in virtual time: requests come at random, as many as would keep all replicas busy for
`--load` of the time if nothing was cached. Each replica is the emulator's engine: its exact KV cache, one prefill after
the other at `EmulatorConfig`'s rates, and decoding in parallel. A turn of a chat comes when the one before was
answered, behind all of the history. Contexts come first in the prompt, behind a common preamble, ordered by a
`ContextPlanner`: *behind* the router, one scope a replica, or *in front* of it, for all replicas alike, where the
router looks at the prompt; it is run both ways, and the better one by mean TTFT is reported.

The published policies are written down here in a few lines each, after their source, with their default parameters
(docs/routing.md): they track prefixes in a tree of the prompts that they sent to each replica, as large as the cache.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Literal

from common import percentile, print_table, zipf_requests
from result_files import write_rows
from traces import given_files, reported_k, trace_of
from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix.prefix.tree import PrefixTree
from warmprefix_routing import ReplicaRouter, Route
from warmprefix_tools.emulator import EmulatorConfig, KvSequence, PrefixCache
from warmprefix_tools.replay.workload import Workload
from warmprefix_tools.traces.reader import read_trace
from warmprefix_tools.traces.trace import Trace

Where = Literal["as retrieved", "behind", "in front"]

ENGINE = EmulatorConfig(kv_blocks=6_251)
"""100,000 tokens of cache."""
ANSWER = 100
"""Tokens of each answer."""
QUESTION = 32
PREAMBLE = [*range(1 << 30, (1 << 30) + 64)]
MODEL = "model"
THINKING = 2.0
"""Seconds, on average, before the next turn of a chat."""
REPORTED = ("ragpulse_rag", "multihoprag_partial100_bm25_k20", "qasper80_1024_bm25_k20")
HOT_SHARE = 0.6


# -- what is asked -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Job:
    """One request, and what became of it."""

    number: int
    blocks: Sequence[ContextBlock]
    key: str
    """What a hash of the session would go by: the conversation, or the first block."""
    conversation: str | None = None
    next: Job | None = None
    """The turn that follows."""
    history: list[int] = field(default_factory=list)
    """Tokens of the turns before, answers included."""
    plan: ContextPlan | None = None
    order: Sequence[ContextBlock] = ()
    prompt: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    """Its length, once it was answered."""
    replica: int = 0
    arrival: float = 0.0
    cached: int = 0
    ttft: float = 0.0


@dataclass(frozen=True)
class Stream:
    """Requests in order of arrival: those of chats by their first turns."""

    name: str
    jobs: Sequence[Job]
    requests: int
    mean_tokens: float


def stream_of(name: str, contexts: Iterator[Sequence[ContextBlock]]) -> Stream:
    jobs = [Job(i, blocks, blocks[0].fingerprint.hex()) for i, blocks in enumerate(contexts) if blocks]
    tokens = sum(len(PREAMBLE) + QUESTION + sum(block.tokens for block in job.blocks) for job in jobs)
    return Stream(name, jobs, len(jobs), tokens / len(jobs))


def traced(trace: Trace, limit: int | None, hot: bool = False) -> Stream:
    workload = Workload(trace, reported_k(trace))
    rng = random.Random(3)
    document = ContextBlock("the document that every user asks for", tokens=600)

    def contexts() -> Iterator[Sequence[ContextBlock]]:
        for request in workload.requests[:limit]:
            blocks = list(request.blocks)
            if hot and rng.random() < HOT_SHARE:
                blocks.insert(rng.randrange(len(blocks) + 1), document)
            yield blocks

    return stream_of(trace.name + (", one hot document" if hot else ""), contexts())


def chats(conversations: int = 100, turns: int = 10, seed: int = 4) -> Stream:
    """Histories that grow by some 700 tokens a turn; each document is new."""
    rng = random.Random(seed)
    first: list[Job] = []
    numbers = count()
    documents = count()
    total = 0
    for conversation in range(conversations):
        length = len(PREAMBLE)
        before: Job | None = None
        for _ in range(rng.randrange(turns // 2, turns * 3 // 2)):
            blocks = [ContextBlock(f"d{next(documents)}", tokens=rng.randrange(100, 400)) for _ in range(2)]
            job = Job(next(numbers), blocks, f"c{conversation}", conversation=f"c{conversation}")
            length += QUESTION + sum(block.tokens for block in blocks)
            total += length
            length += ANSWER
            if before is None:
                first.append(job)
            else:
                before.next = job
            before = job
    requests = next(numbers)
    return Stream("generated_chats", first, requests, total / requests)


def generated(limit: int | None) -> Iterator[Stream]:
    topics = trace_of("generated_topics", zipf_requests(600, k=10, topics=40, per_topic=20))
    yield traced(topics, limit)
    yield traced(topics, limit, hot=True)
    yield chats()
    yield traced(trace_of("generated_control", ([5 * i + j for j in range(5)] for i in range(250))), limit)


# -- who is asked ------------------------------------------------------------------------------------------------------


class Engine:
    """One replica: the emulator's engine, in virtual time."""

    def __init__(self) -> None:
        self.cache = PrefixCache(ENGINE.kv_blocks, ENGINE.block_size)
        self.queue: deque[Job] = deque()
        self.computing: tuple[Job, KvSequence] | None = None
        self.sequences: dict[int, KvSequence] = {}
        self.decoding: dict[int, Job] = {}
        self.served_tokens = 0

    @property
    def unanswered(self) -> list[Job]:
        """The requests that it works on."""
        return [*([] if self.computing is None else [self.computing[0]]), *self.decoding.values()]

    def start(self) -> float | None:
        """Begin with the next prompt, if there is one and room for it, and nothing else is computed: for how long."""
        if self.computing is not None or not self.queue:
            return None
        job = self.queue[0]
        sequence = self.cache.allocate(job.prompt, room_for=ANSWER - 1)
        if sequence is None:
            return None
        self.queue.popleft()
        self.computing = job, sequence
        job.cached = sequence.cached_tokens
        self.served_tokens += len(job.prompt)
        return ENGINE.prefill_seconds(len(job.prompt) - sequence.cached_tokens)

    def prefilled(self) -> Job:
        assert self.computing is not None
        job, sequence = self.computing
        self.computing = None
        self.cache.store(sequence)
        self.sequences[job.number] = sequence
        self.decoding[job.number] = job
        return job

    def finished(self, job: Job) -> None:
        sequence = self.sequences.pop(job.number)
        del self.decoding[job.number]
        for token in answer_of(job)[:-1]:
            self.cache.append(sequence, token)
        self.cache.free(sequence)


def tokens_of(block: ContextBlock) -> list[int]:
    """As many token ids as the block has, which no other block has in this order."""
    start = int.from_bytes(block.fingerprint[:3], "big") << 7
    return [*range(start, start + block.tokens)]


def answer_of(job: Job) -> list[int]:
    return [(1 << 31) + job.number] * ANSWER


def prompt_of(job: Job) -> list[int]:
    prompt = job.history or list(PREAMBLE)
    for block in job.order:
        prompt = prompt + tokens_of(block)
    return prompt + [(3 << 30) + job.number] * QUESTION


# -- who routes --------------------------------------------------------------------------------------------------------


class Policy(ABC):
    """Picks a replica, and is notified of the first token and of the complete answer."""

    reads_prompts = False
    """True if the order of the blocks matters."""

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self.replicas = range(replicas)
        self.rng = rng
        self.running = [0] * replicas

    @abstractmethod
    def pick(self, job: Job, order: Sequence[ContextBlock]) -> int: ...

    def sent(self, job: Job) -> None:
        """In the order that it was sent in."""
        self.running[job.replica] += 1

    def first_token(self, job: Job) -> None:  # noqa: B027 - most do not care
        pass

    def done(self, job: Job) -> None:
        self.running[job.replica] -= 1

    def shortest_queue(self, among: Sequence[int] | None = None) -> int:
        least = min(self.running[i] for i in among or self.replicas)
        return self.rng.choice([i for i in among or self.replicas if self.running[i] == least])


class RoundRobin(Policy):
    """Each in its turn."""

    turn = -1

    def pick(self, job: Job, order: Sequence[ContextBlock]) -> int:
        self.turn = (self.turn + 1) % len(self.replicas)
        return self.turn


class Random(Policy):
    """Any."""

    def pick(self, job: Job, order: Sequence[ContextBlock]) -> int:
        return self.rng.choice(self.replicas)


class LeastLoaded(Policy):
    """The one with the fewest requests in flight."""

    def pick(self, job: Job, order: Sequence[ContextBlock]) -> int:
        return self.shortest_queue()


class Hash(Policy):
    """Of the session, or of the first block; load is of no account."""

    def pick(self, job: Job, order: Sequence[ContextBlock]) -> int:
        def score(i: int) -> bytes:
            return blake2b(f"{job.key} {i}".encode(), digest_size=8).digest()

        return max(self.replicas, key=score)


class PrefixPolicy(Policy):
    """Tracks the prompts that it sent to each replica."""

    reads_prompts = True

    def __init__(self, replicas: int, rng: random.Random) -> None:
        super().__init__(replicas, rng)
        self.trees = [PrefixTree[object](ENGINE.capacity_tokens) for _ in self.replicas]
        self.sent_tokens = [0] * replicas

    def pick(self, job: Job, order: Sequence[ContextBlock]) -> int:
        keys, tokens = self.path(job, order)
        prompt = sum(tokens) + QUESTION
        return self.choose(job, [tree.match_prefix(keys).tokens for tree in self.trees], prompt)

    @abstractmethod
    def choose(self, job: Job, matched: Sequence[int], prompt: int) -> int: ...

    def sent(self, job: Job) -> None:
        super().sent(job)
        keys, tokens = self.path(job, job.order)
        self.trees[job.replica].insert(keys, tokens)
        self.sent_tokens[job.replica] += sum(tokens)

    @staticmethod
    def path(job: Job, order: Sequence[ContextBlock]) -> tuple[list[object], list[int]]:
        """Return the prompt as a router sees it: a chat's KV blocks are its own, up to the last block."""
        if job.conversation is None:
            return [block.fingerprint for block in order], [block.tokens for block in order]
        size = ENGINE.block_size * 4
        length = len(job.history or PREAMBLE) + sum(block.tokens for block in order)
        keys: list[object] = [(job.conversation, i) for i in range(length // size)]
        return keys, [size] * len(keys)


class CacheAware(PrefixPolicy):
    """SGLang's: the best match above 0.3, else the shortest queue; that, too, if max - min > 64 and max > 1.5 min."""

    def choose(self, job: Job, matched: Sequence[int], prompt: int) -> int:
        most, least = max(self.running), min(self.running)
        if (most - least > 64 and most > 1.5 * least) or max(matched) <= 0.3 * prompt:
            return self.shortest_queue()
        return matched.index(max(matched))


class Dynamo(PrefixPolicy):
    """NVIDIA Dynamo's, in KV blocks: max(active prefill + prompt - overlap, 0) + active decode + prompt."""

    def __init__(self, replicas: int, rng: random.Random) -> None:
        super().__init__(replicas, rng)
        self.prefill = [0.0] * replicas
        self.decode = [0.0] * replicas
        self.booked: dict[int, tuple[float, float]] = {}

    def choose(self, job: Job, matched: Sequence[int], prompt: int) -> int:
        costs = [max(self.prefill[i] + prompt - matched[i], 0) + self.decode[i] + prompt for i in self.replicas]
        least = min(costs)
        chosen = self.rng.choice([i for i in self.replicas if costs[i] == least])
        self.booked[job.number] = prompt - matched[chosen], prompt
        return chosen

    def sent(self, job: Job) -> None:
        super().sent(job)
        prefill, decode = self.booked[job.number]
        self.prefill[job.replica] += prefill
        self.decode[job.replica] += decode

    def first_token(self, job: Job) -> None:
        self.prefill[job.replica] -= self.booked[job.number][0]

    def done(self, job: Job) -> None:
        super().done(job)
        self.decode[job.replica] -= self.booked.pop(job.number)[1]


class LlmD(PrefixPolicy):
    """llm-d's scorers: 2 x the matched share, and a half less a 128th part of that for each request in the queue."""

    def choose(self, job: Job, matched: Sequence[int], prompt: int) -> int:
        scores = [2 * matched[i] / prompt + 0.5 * (1 - min(self.running[i], 128) / 128) for i in self.replicas]
        return self.rng.choice([i for i in self.replicas if scores[i] == max(scores)])


class AiBrix(PrefixPolicy):
    """AIBrix's: the shortest queue if max - min > 8; else the best match whose queue is at most mean + sigma."""

    def choose(self, job: Job, matched: Sequence[int], prompt: int) -> int:
        if max(self.running) - min(self.running) > 8:
            return self.shortest_queue()
        mean = sum(self.running) / len(self.replicas)
        sigma = (sum((running - mean) ** 2 for running in self.running) / len(self.replicas)) ** 0.5
        for i in sorted(self.replicas, key=lambda i: (-matched[i], self.running[i], self.rng.random())):
            if matched[i] and self.running[i] <= mean + sigma:
                return i
        return self.shortest_queue()


class Ray(PrefixPolicy):
    """Ray Serve's: the best match from 10 % on, else the replica that was sent the fewest; no bound on the load."""

    def choose(self, job: Job, matched: Sequence[int], prompt: int) -> int:
        if max(matched) < 0.1 * prompt:
            return self.shortest_queue([i for i in self.replicas if self.sent_tokens[i] == min(self.sent_tokens)])
        return self.shortest_queue([i for i in self.replicas if matched[i] == max(matched)])


class Ours(Policy):
    """`ReplicaRouter` with its defaults."""

    reads_prompts = True

    def __init__(self, replicas: int, rng: random.Random) -> None:
        super().__init__(replicas, rng)
        self.router = ReplicaRouter(map(str, self.replicas), capacity_tokens=ENGINE.capacity_tokens)
        self.routes: dict[int, Route] = {}
        self.seconds: list[float] = []

    def pick(self, job: Job, order: Sequence[ContextBlock]) -> int:
        tokens = len(job.history or PREAMBLE) + sum(block.tokens for block in job.blocks) + QUESTION
        began = time.perf_counter()
        route = self.router.route(
            order, conversation=job.conversation, prompt_tokens=tokens, order_locked=job.plan is not None
        )
        self.seconds.append(time.perf_counter() - began)
        self.routes[job.number] = route
        return int(route.replica)

    def first_token(self, job: Job) -> None:
        self.router.prefilled(self.routes[job.number])

    def done(self, job: Job) -> None:
        super().done(job)
        self.router.commit(self.routes.pop(job.number), plan=job.plan)


POLICIES: dict[str, Callable[[int, random.Random], Policy]] = {
    "round robin": RoundRobin,
    "random": Random,
    "least loaded": LeastLoaded,
    "session hash": Hash,
    "SGLang cache_aware": CacheAware,
    "Dynamo": Dynamo,
    "llm-d": LlmD,
    "AIBrix": AiBrix,
    "Ray Serve": Ray,
    "ReplicaRouter": Ours,
}


# -- what happens ------------------------------------------------------------------------------------------------------


def simulate(stream: Stream, policy: Policy, where: Where, load: float, seed: int = 5) -> dict[str, object]:
    """Run a stream to its end, and return its figures."""
    replicas = len(policy.replicas)
    rng = random.Random(seed)
    rate = load * replicas / ENGINE.prefill_seconds(round(stream.mean_tokens))
    if stream.jobs[0].conversation is not None:
        rate *= len(stream.jobs) / stream.requests
    planner = ContextPlanner(
        policy="relevance" if where == "as retrieved" else "coaccess",
        capacity_tokens=ENGINE.capacity_tokens * (replicas if where == "in front" else 1),
    )
    engines = [Engine() for _ in policy.replicas]
    numbers = count()
    events: list[tuple[float, int, str, Job]] = []
    at = 0.0
    for job in stream.jobs:
        at += rng.expovariate(rate)
        heapq.heappush(events, (at, next(numbers), "arrival", job))
    served: list[Job] = []

    def plan(job: Job, model: str) -> None:
        if job.conversation is None:  # what follows a history is not ordered
            job.plan = planner.plan(job.blocks, model=model)
            job.order = [planned.block for planned in job.plan.blocks]

    def begin(engine: Engine, now: float) -> None:
        seconds = engine.start()
        if seconds is not None and engine.computing is not None:
            heapq.heappush(events, (now + seconds, next(numbers), "first token", engine.computing[0]))

    while events:
        now, _, what, job = heapq.heappop(events)
        engine = engines[job.replica]
        if what == "arrival":
            job.arrival = now
            job.order = job.blocks
            if where == "in front":
                plan(job, MODEL)
            job.replica = policy.pick(job, job.order)
            engine = engines[job.replica]
            if where != "in front":
                plan(job, f"{MODEL}@{job.replica}")
            policy.sent(job)
            job.prompt = prompt_of(job)
            engine.queue.append(job)
        elif what == "first token":
            engine.prefilled()
            job.ttft = now - job.arrival
            policy.first_token(job)
            heapq.heappush(events, (now + (ANSWER - 1) / ENGINE.decode_rate, next(numbers), "done", job))
        else:
            engine.finished(job)
            policy.done(job)
            if job.plan is not None:
                planner.commit(job.plan)
            served.append(job)
            if job.next is not None:
                job.next.history = job.prompt + answer_of(job)
                heapq.heappush(events, (now + rng.expovariate(1 / THINKING), next(numbers), "arrival", job.next))
        begin(engine, now)
    prompts = sum(len(job.prompt) for job in served)
    ttfts = [job.ttft for job in served]
    loads = [engine.served_tokens for engine in engines]
    result: dict[str, object] = {
        "ordered": where,
        "requests": len(served),
        "hit_percent": round(100 * sum(job.cached for job in served) / prompts, 1),
        "ttft_mean_ms": round(1_000 * sum(ttfts) / len(ttfts)),
        "ttft_p90_ms": round(1_000 * percentile(ttfts, 90)),
        "max_over_mean": round(max(loads) * replicas / sum(loads), 2),
    }
    if isinstance(policy, Ours):
        result["route_us_p50"] = round(1e6 * percentile(policy.seconds, 50), 1)
    for job in served:
        job.history, job.prompt, job.plan = [], [], None
    return result


def measure(stream: Stream, replicas: int, load: float) -> dict[str, object]:
    found: dict[str, dict[str, object]] = {}
    found["round robin, as retrieved"] = simulate(stream, RoundRobin(replicas, random.Random(6)), "as retrieved", load)
    for name, make in POLICIES.items():
        ways = orders(make(replicas, random.Random(6)), stream)
        runs = [simulate(stream, make(replicas, random.Random(6)), where, load) for where in ways]
        found[name] = min(runs, key=lambda run: float(str(run["ttft_mean_ms"])))
        found[name]["hit_percent_by_order"] = {str(run["ordered"]): run["hit_percent"] for run in runs}
    return {"stream": stream.name, "requests": stream.requests, "replicas": replicas, "load": load, "routers": found}


def orders(policy: Policy, stream: Stream) -> Sequence[Where]:
    """Return the placements to run; policies that do not read prompts route alike in all."""
    return ("behind", "in front") if policy.reads_prompts and stream.jobs[0].conversation is None else ("behind",)


def main() -> None:
    options = arguments()
    started = time.perf_counter()
    paths = given_files(options.traces)
    if paths and not options.traces:
        paths = [path for path in paths if path.name.partition(".")[0] in REPORTED]
    streams = list(generated(options.limit))
    for path in paths:
        trace = read_trace(path)
        streams.append(traced(trace, options.limit))
        if path.name.startswith(REPORTED[0]):
            streams.append(traced(trace, options.limit, hot=True))
    rows: list[dict[str, object]] = []
    for stream in streams:
        for replicas in options.replicas:
            began = time.perf_counter()
            rows.append(measure(stream, replicas, options.load))
            print_row(rows[-1])
            print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
    print(f"{time.perf_counter() - started:.0f} s in all")
    if paths and options.limit is None and options.replicas == [4, 8]:
        write_rows("replica_routing", rows, ("stream", "replicas"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="trace files, or folders of them")
    parser.add_argument("--replicas", type=numbers_of, default=[4, 8], help="with commas between them")
    parser.add_argument("--load", type=float, default=0.9, help="of what all replicas can compute, were nothing cached")
    parser.add_argument("--limit", type=int, help="requests of each stream")
    return parser.parse_args()


def numbers_of(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


SHOWN = {
    "ragpulse_rag": "ragpulse_rag",
    "multihoprag_partial100_bm25_k20": "multihoprag",
    "generated_chats": "chats",
}


def table(rows: Sequence[dict[str, object]], replicas: int) -> str:
    """Return the table of docs/routing.md: hits in %, and the mean TTFT in ms."""
    measured: dict[object, dict[str, dict[str, object]]] = {
        row["stream"]: dict(row["routers"])  # type: ignore[call-overload]
        for row in rows
        if row["replicas"] == replicas
    }
    lines = [
        "| router | " + " | ".join(SHOWN.values()) + " |",
        "|---|" + "---|" * len(SHOWN),
    ]
    for router in measured["generated_chats"]:
        cells = []
        for stream in SHOWN:
            found = measured[stream][router]
            cells.append(f"{found['hit_percent']} / {found['ttft_mean_ms']}")
        name = f"**{router}**" if router == "ReplicaRouter" else router
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def print_row(row: dict[str, object]) -> None:
    print(f"\n{row['stream']}, {row['requests']} requests, {row['replicas']} replicas\n")
    routers = row["routers"]
    assert isinstance(routers, dict)
    columns = ("ordered", "hit_percent", "ttft_mean_ms", "ttft_p90_ms", "max_over_mean")
    print_table(
        ["router", "ordered", "hits, %", "mean TTFT, ms", "p90 TTFT, ms", "max / mean"],
        [[name, *(result[column] for column in columns)] for name, result in routers.items()],
    )


if __name__ == "__main__":
    main()
