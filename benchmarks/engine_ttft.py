"""Time to first token on a real engine: the same requests in relevance order, in published orders, and in ours.

    python benchmarks/engine_ttft.py --start-vllm [--mode online] [--text stdlib] [--requests 400] [--k 8] [--kv 100000]
    python benchmarks/engine_ttft.py --start-vllm --shape smollm2 --requests 60 --k 5
    python benchmarks/engine_ttft.py --start-llama --requests 60 --k 5
    python benchmarks/engine_ttft.py --endpoint http://localhost:8000/v1

With `--start-vllm` and `--kv` every arm gets a real vLLM of its own on the CPU (vllm_server.py); without `--kv`, where
nothing is ever evicted, all arms share one. With `--start-llama` every arm gets a llama.cpp server of its own, with a
small real model. Request by request each arm takes its turn, so that only one engine works at a time and other load on
the machine affects all arms alike. With `--endpoint` the arms follow each other on one engine, whose prefix cache is
reset between them if it allows `/reset_prefix_cache`. A different number in front of each arm's instructions keeps the
arms apart.

Modes: `online`, requests one by one; `batch`, all requests planned together; `turns`, follow-up questions, where
context stays in the history; `control`, where no two requests share a block, so that nothing can be saved.
`--concurrency 4` sends four requests at once, each planned in sight of the others. `--kv` is the engine's KV cache, in
tokens; without it nothing is ever evicted. Texts: see engine_workload.py.

Times are the client's, from the retrieved blocks to the answer's first token, planning included, for batches without.
Ratios are relevance order's time over the arm's, with 95 % confidence intervals: bootstrap over requests, each with
its times in both arms. Hits are the engine's reported share of all prompt tokens; "predicted" is replay's result
for the same requests and cache size, of context tokens. "Saved" is the share of relevance order's prefilled
tokens that is not prefilled; its prediction includes tokens that replay does not see, such as questions.

Runs of 400 requests or more, and of 60 or more with a model of real weights, are merged into
`results/engine_ttft.csv`, each in the place of an earlier one of the same kind; `--samples FILE` keeps all times.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from common import percentile, print_table
from engine_arms import PREAMBLE, TODAY, Arm, Batch, Conversations, Online, Predicted
from engine_client import EngineClient
from engine_workload import TEXTS, EngineQuestion, as_trace, counted, read, taking_turns, unshared
from result_files import commit, processor, write_rows
from vllm_server import BLOCK_SIZE, SHAPES, VllmServer, engine_version
from warmprefix_tools.local.llama_server import LocalModel
from warmprefix_tools.traces.trace import Trace

NAME = "engine_ttft"
FULL_LENGTH = 400
REAL_LENGTH = 60
"""The same, for a model of real weights, of which a CPU computes some hundred tokens a second."""
RESAMPLES = 2_000
AT_A_TIME = 4
"""Minimum of concurrent conversations, if the text does not define them."""
LONGEST = 65_536
"""Tokens per prompt."""
UNBOUNDED = 10**9
MOST_KV = {"tiny": 10**8, "wide": 10**8, "smollm2": 260_000, "smollm2-1": 10**7}
"""Tokens of the KV cache that fit into the memory of a small machine, by model."""
KIND = ("mode", "text", "concurrency", "kv_tokens", "requests", "k", "seed", "engine", "model_shape", "arm")
"""Rows with equal values of these are the same measurement."""
COUNTED = ("hit_percent", "predicted_hit_percent", "saved_percent", "predicted_saved_percent")
ARMS = {
    "online": (TODAY, "frequency", "greedy", "context-index", "coaccess"),
    "batch": (TODAY, "context-index", "merge"),
    "turns": (TODAY, "coaccess"),
    "control": (TODAY, "coaccess"),
}


@dataclass(frozen=True)
class Sample:
    """One request in one arm; times in seconds."""

    asked: EngineQuestion
    ttft: float
    planning: float
    prompt_tokens: int
    cached_tokens: int


def main() -> None:
    options = arguments()
    asked = read(options.text, options.requests, options.k, options.seed)
    if options.text != "stdlib" and (options.mode == "turns" or options.concurrency > 1):
        # The text has no arrival times: concurrent questions come from different people.
        asked = taking_turns(asked, max(AT_A_TIME, options.concurrency))
    if options.mode == "control":
        asked = unshared(asked)
    with contextlib.ExitStack() as stack:
        if options.start_llama:
            engines = started_llama(options, stack)
        else:
            engines = started(options, asked, stack) if options.start_vllm else reached(options)
        rows = measure(options, counted(asked, engines.count_tokens), engines)
    print_rows(rows)
    if len(asked) >= (REAL_LENGTH if rows[0]["model_shape"] == "smollm2" else FULL_LENGTH):
        write_rows(NAME, rows, KIND)
    disagreeing = [row["arm"] for row in rows if not row["metrics_agree"]]
    if disagreeing:
        sys.exit(f"the engine's metrics do not agree with its usage: {', '.join(disagreeing)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engine = parser.add_mutually_exclusive_group(required=True)
    engine.add_argument("--endpoint", help="base URL of an OpenAI-compatible engine, with /v1")
    engine.add_argument("--start-vllm", action="store_true", help="start vLLM on the CPU, and install it if necessary")
    engine.add_argument("--start-llama", action="store_true", help="start a llama.cpp server for each arm")
    parser.add_argument("--model", help="model of the endpoint; by default the first one listed")
    parser.add_argument("--api-key", help="API key of the endpoint")
    parser.add_argument("--shape", choices=SHAPES, default="wide", help="shape of the model that vLLM serves")
    parser.add_argument("--mode", choices=ARMS, default="online")
    parser.add_argument("--text", choices=TEXTS, default="stdlib")
    parser.add_argument("--arms", type=lambda text: text.split(","), help="separated by commas; relevance is added")
    parser.add_argument("--requests", type=int, default=FULL_LENGTH)
    parser.add_argument("--k", type=int, default=8, help="blocks per request")
    parser.add_argument("--seed", type=int, default=0, help="seed of the questions about the standard library")
    parser.add_argument("--kv", type=int, help="tokens of the KV cache; by default no bound")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1, help="repetitions of all runs, from empty caches")
    parser.add_argument("--samples", type=Path, help="file for all times, one line per request and arm")
    options = parser.parse_args()
    options.arms = [TODAY, *(name for name in options.arms or ARMS[options.mode] if name != TODAY)]
    return options


# -- engines -----------------------------------------------------------------------------------------------------------


class Engines:
    """Yield one engine per arm, or one for all."""

    def __init__(
        self, clients: Sequence[EngineClient], capacity_tokens: int, version: str, *, takes_turns: bool = True
    ) -> None:
        self.clients = clients
        self.takes_turns = takes_turns
        """True if the arms take turns, request by request."""
        self.capacity_tokens = capacity_tokens
        self.version = version
        self._counts: dict[str, int] = {}

    def count_tokens(self, text: str) -> int:
        """Count with the engine's tokenizer, or with the planner's estimate if the engine has none."""
        if text not in self._counts:
            try:
                self._counts[text] = self.clients[0].count_tokens(text)
            except (RuntimeError, KeyError):
                self._counts[text] = (len(text.encode()) + 3) // 4
        return self._counts[text]


def started(options: argparse.Namespace, asked: Sequence[EngineQuestion], stack: contextlib.ExitStack) -> Engines:
    """Start a vLLM per arm, with the requested KV cache, or one large enough for all prompts of all arms."""
    everything = sum(len(text.encode()) for request in asked for text in prompt_texts(request)) // 2 * len(options.arms)
    kv_blocks = (options.kv or min(everything, MOST_KV[options.shape])) // BLOCK_SIZE + 1
    count = 1 if options.kv is None else len(options.arms)
    servers = [VllmServer(options.shape, kv_blocks=kv_blocks, longest=LONGEST) for _ in range(count)]
    for server in servers:
        stack.callback(server.close)
    for number, server in enumerate(servers):
        server.launch()
        if number % 2 == 1 or server is servers[-1]:  # two at a time: they start no faster all at once
            server.wait()
    for server in servers:
        server.wait()
    clients = [EngineClient(server.base_url, server.model) for server in servers]
    return Engines(clients, servers[0].capacity_tokens, engine_version())


def started_llama(options: argparse.Namespace, stack: contextlib.ExitStack) -> Engines:
    """Start a llama.cpp server per arm: four slots, and earlier prompts in host memory."""
    servers = [stack.enter_context(LocalModel(slots=max(4, options.concurrency), context=4_096)) for _ in options.arms]
    clients = [EngineClient(server.base_url) for server in servers]
    return Engines(clients, UNBOUNDED, f"xllamacpp {importlib.metadata.version('xllamacpp')}")


def prompt_texts(asked: EngineQuestion) -> Iterator[str]:
    yield from (PREAMBLE, asked.question, asked.answer)
    yield from (block.text for block in asked.blocks)


def reached(options: argparse.Namespace) -> Engines:
    """Return the endpoint with the given or reported cache size, or one that is never full."""
    client = EngineClient(options.endpoint, options.model, options.api_key)
    capacity = options.kv or client.capacity_tokens() or UNBOUNDED
    return Engines([client], capacity, options.endpoint, takes_turns=False)


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, asked: Sequence[EngineQuestion], engines: Engines) -> list[dict[str, Any]]:
    """Return one row per arm."""
    for client in engines.clients:
        warm_up(client)
    samples: dict[str, list[list[Sample]]] = {}
    agree: dict[str, bool] = {}
    runs: list[Run] = []
    for repeat in range(options.repeats):
        runs = [
            Run(arm_of(options, name, asked, engines, repeat), engines.clients[place % len(engines.clients)], asked)
            for place, name in enumerate(options.arms)
        ]
        serve(runs, options.concurrency, repeat, one_by_one=not engines.takes_turns)
        for run, name in zip(runs, options.arms, strict=True):
            samples.setdefault(name, []).append(run.in_order_of_arrival())
            agree[name] = agree.get(name, True) and run.metrics_agree
    if options.samples is not None:
        write_samples(options.samples, samples)
    trace = as_trace(options.text, asked, engines.count_tokens)
    predicted = {name: run.arm.predicted(trace) for name, run in zip(options.arms, runs, strict=True)}
    outside = (
        0 if options.mode == "turns" else outside_context(samples[TODAY][0], trace, engines.count_tokens(PREAMBLE))
    )
    what = {
        "mode": options.mode,
        "text": options.text,
        "requests": len(asked),
        "k": options.k,
        "seed": options.seed,
        "concurrency": options.concurrency,
        "kv_tokens": options.kv if options.endpoint is None else engines.capacity_tokens,
    }
    origin = {
        "engine": engines.version,
        "model_shape": "smollm2" if options.start_llama else options.shape if options.start_vllm else None,
        "processor": processor(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
    }
    return [
        {
            **what,
            "arm": name,
            **figures_of(samples[name], samples[TODAY], options.mode == "turns"),
            **percent(predicted[name], predicted[TODAY], trace, outside),
            "metrics_agree": agree[name],
            **origin,
        }
        for name in options.arms
    ]


def warm_up(client: EngineClient) -> None:
    """Warm up the engine, so that no measured request finds it cold."""
    for number in range(3):
        text = " ".join(f"{number}{word}" for word in range(800))
        client.ask([{"role": "user", "content": text}])


def arm_of(
    options: argparse.Namespace, name: str, asked: Sequence[EngineQuestion], engines: Engines, repeat: int
) -> Arm:
    session = random.Random(f"{name}{repeat}{time.time_ns()}").randrange(10**8, 10**9)
    preamble = f"Session {session}. {PREAMBLE}"
    if options.mode == "turns":
        return Conversations(name, asked, engines.capacity_tokens, preamble)
    if options.mode == "batch" and name != TODAY:
        return Batch(name, asked, engines.capacity_tokens, preamble)
    return Online(name, asked, engines.capacity_tokens, preamble)


class Run:
    """A run of one arm on one engine."""

    def __init__(self, arm: Arm, client: EngineClient, asked: Sequence[EngineQuestion]) -> None:
        self.arm = arm
        self.client = client
        by_number = {request.number: request for request in asked}
        self._waiting = [by_number[number] for number in arm.order()]
        self._waiting.reverse()
        self._arrival = [request.number for request in asked]
        self._samples: dict[int, Sample] = {}
        self._counted: tuple[float | None, float | None] = (None, None)
        self.metrics_agree = True

    def begin(self) -> None:
        """Begin with an empty cache, if the engine allows it."""
        self.client.reset_prefix_cache()
        self._counted = self._counters()

    def end(self, runs: Sequence[Run]) -> None:
        """Compare the engine's metrics with the reported usage of all runs on it."""
        sampled = [sample for run in runs if run.client is self.client for sample in run.in_order_of_arrival()]
        sums = [sum(s.prompt_tokens for s in sampled), sum(s.cached_tokens for s in sampled)]
        for before, after, used in zip(self._counted, self._counters(), sums, strict=True):
            if before is not None and after is not None and after - before != used:
                self.metrics_agree = False

    def _counters(self) -> tuple[float | None, float | None]:
        return self.client.counter("prefix_cache_queries_total"), self.client.counter("prefix_cache_hits_total")

    @property
    def is_done(self) -> bool:
        return not self._waiting

    def serve_group(self, most: int, pool: ThreadPoolExecutor) -> None:
        """Send the next requests concurrently, no two of one conversation, and wait for all answers."""
        group: list[EngineQuestion] = []
        while self._waiting and len(group) < most:
            if self._waiting[-1].conversation in {request.conversation for request in group} and self._keeps_history:
                break
            group.append(self._waiting.pop())
        for asked in group:
            self.arm.announce(asked)
        for asked, sample in zip(group, pool.map(self._serve, group), strict=True):
            self._samples[asked.number] = sample

    @property
    def _keeps_history(self) -> bool:
        return isinstance(self.arm, Conversations)

    def _serve(self, asked: EngineQuestion) -> Sample:
        began = time.perf_counter()
        prepared = self.arm.prepare(asked)
        planning = time.perf_counter() - began
        answer = self.client.ask(prepared.messages)
        self.arm.answered(asked, prepared, answer)
        waited = answer.ttft + (0.0 if isinstance(self.arm, Batch) else planning)
        return Sample(asked, waited, planning, answer.prompt_tokens, answer.cached_tokens)

    def in_order_of_arrival(self) -> list[Sample]:
        return [self._samples[number] for number in self._arrival]


def serve(runs: Sequence[Run], concurrency: int, repeat: int, *, one_by_one: bool) -> None:
    """Finish all runs: request by request in rotating order, or one after the other on one engine."""
    with ThreadPoolExecutor(concurrency) as pool:
        turn = repeat
        if one_by_one:
            for place in range(len(runs)):
                run = runs[(place + turn) % len(runs)]
                run.begin()
                while not run.is_done:
                    run.serve_group(concurrency, pool)
                run.end([run])
            return
        for run in runs:
            run.begin()
        while not all(run.is_done for run in runs):
            for place in range(len(runs)):
                runs[(place + turn) % len(runs)].serve_group(concurrency, pool)
            turn += 1
        for run in runs:
            run.end(runs)


# -- results -----------------------------------------------------------------------------------------------------------


def figures_of(arm: Sequence[Sequence[Sample]], today: Sequence[Sequence[Sample]], follow_ups: bool) -> dict[str, Any]:
    """Return the figures of an arm relative to `today`; of conversations only follow-up questions are timed."""
    timed = [place for place, sample in enumerate(arm[0]) if sample.asked.turn > 1 or not follow_ups]
    ours, theirs = times(arm, timed), times(today, timed)
    prompt, cached = tokens(arm)
    prompt_today, cached_today = tokens(today)
    return {
        "timed_requests": len(timed),
        **ratios(ours, theirs),
        "ttft_mean_ms": milliseconds(statistics.mean(ours)),
        "ttft_p50_ms": milliseconds(percentile(ours, 50)),
        "ttft_p95_ms": milliseconds(percentile(ours, 95)),
        "planning_p50_us": round(1e6 * percentile([sample.planning for run in arm for sample in run], 50)),
        "prompt_tokens": prompt,
        "prefilled_tokens": prompt - cached,
        "hit_percent": round(100 * cached / prompt, 2),
        "saved_percent": round(100 * (1 - (prompt - cached) / (prompt_today - cached_today)), 2),
    }


def times(runs: Sequence[Sequence[Sample]], timed: Sequence[int]) -> list[float]:
    """Return the mean of each timed request over all repeats."""
    return [statistics.mean(run[place].ttft for run in runs) for place in timed]


def tokens(runs: Sequence[Sequence[Sample]]) -> tuple[int, int]:
    return (
        sum(sample.prompt_tokens for run in runs for sample in run) // len(runs),
        sum(sample.cached_tokens for run in runs for sample in run) // len(runs),
    )


def milliseconds(seconds: float) -> float:
    return round(1_000 * seconds, 1)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Return their time over ours with a 95 % interval, resampling requests with both of their times."""
    pairs = np.array([theirs, ours])
    drawn = np.random.default_rng(0).integers(pairs.shape[1], size=(RESAMPLES, pairs.shape[1]))
    statistics_of: dict[str, Callable[..., Any]] = {"mean": np.mean, "p50": np.median}
    result: dict[str, Any] = {}
    for name, statistic in statistics_of.items():
        whole, again = statistic(pairs, axis=1), statistic(pairs[:, drawn], axis=2)
        result[f"ratio_{name}"] = round(float(whole[0] / whole[1]), 3)
        result[f"ratio_{name}_95"] = [round(float(x), 3) for x in np.quantile(again[0] / again[1], (0.025, 0.975))]
    return result


def outside_context(samples: Sequence[Sample], trace: Trace, preamble_tokens: int) -> int:
    """Return the tokens that every order prefills: questions, chat template, and the first preamble."""
    prompts = sum(sample.prompt_tokens for sample in samples)
    return prompts - context_tokens(trace) - (len(samples) - 1) * preamble_tokens


def context_tokens(trace: Trace) -> int:
    return sum(trace.tokens[block] for request in trace.requests for block in request.blocks)


def percent(predicted: Predicted, today: Predicted, trace: Trace, outside: int) -> dict[str, float]:
    """Return replay's percentages of context tokens, and those of whole prompts."""
    prefilled_today = context_tokens(trace) * (1 - today.hit)
    return {
        "outside_context_tokens": outside,
        "predicted_hit_percent": round(100 * predicted.hit, 2),
        "predicted_saved_of_context_percent": round(100 * predicted.saved, 2) + 0.0,
        "predicted_saved_percent": round(100 * predicted.saved * prefilled_today / (prefilled_today + outside), 2)
        + 0.0,
    }


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    cache = "without bound" if first["kv_tokens"] is None else f"of {first['kv_tokens']:,} tokens"
    print(
        f"\n{first['mode']}, {first['text']}: {first['requests']} requests of {first['k']} blocks,"
        f" {first['concurrency']} at a time, a cache {cache}\n"
    )
    print_table(
        ["arm", "mean TTFT, ratio", "p50, ratio", "mean ms", "p50 ms", "p95 ms", "prefilled", "hit %", "predicted",
         "saved %", "predicted"],
        [
            [
                row["arm"],
                *(ratio(row[f"ratio_{x}"], *row[f"ratio_{x}_95"]) for x in ("mean", "p50")),
                *(f"{row[f'ttft_{x}_ms']:,.0f}" for x in ("mean", "p50", "p95")),
                f"{row['prefilled_tokens']:,}",
                *(f"{row[name]:.1f}" for name in COUNTED),
            ]
            for row in rows
        ],
    )  # fmt: skip


def ratio(value: float, low: float, high: float) -> str:
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def write_samples(path: Path, samples: dict[str, list[list[Sample]]]) -> None:
    with path.open("w") as file:
        for name, runs in samples.items():
            for repeat, run in enumerate(runs):
                for sample in run:
                    line = {
                        "arm": name,
                        "repeat": repeat,
                        "request": sample.asked.number,
                        "turn": sample.asked.turn,
                        "ttft": sample.ttft,
                        "planning": sample.planning,
                        "prompt_tokens": sample.prompt_tokens,
                        "cached_tokens": sample.cached_tokens,
                    }
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
