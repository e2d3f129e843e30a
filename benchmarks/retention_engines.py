"""Retention on engines: touches on a real vLLM, and priorities in SGLang's own prefix cache.

    python benchmarks/retention_engines.py vllm
    WARMPREFIX_SGLANG=FOLDER python benchmarks/retention_engines.py sglang [TRACE ...]

`vllm`: requests of a few topics through an `EngineLink`, one after the other, on two vLLMs with a KV cache for a third
of all passages each, one with `touches=False` and one with the default, for three seeds. "Computed" is what the engine
computed of all prompts by its counters, touches included; "TTFT" is measured by the client, planning included. The next
request comes at once, so touches compete with it.

`sglang`: the plans of a trace, without any engine's reports, through the cache class of SGLang's server, whose Python
needs no GPU; FOLDER is an environment that has SGLang. "LRU" is its default, without priorities. "Priorities" are the
requests and the touches that a sender makes of the plans of a planner with the profile `priority-eviction`. "Simulated"
is the cache model of `warmprefix replay` for the same requests. Without files the generated traces of a clone are used.
Touches count as computed in "net".

Runs replace their rows in `results/retention_engines_vllm.csv` and `results/retention_engines_sglang.csv`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from openai import OpenAI

from common import print_table, zipf_requests
from engine_client import EngineClient
from live_savings import prefilled
from result_files import write_rows
from traces import from_a_clone, given_files, reported_k
from vllm_server import BLOCK_SIZE, VllmServer, engine_version
from warmprefix import ContextBlock, ContextPlanner
from warmprefix.plan import Touch
from warmprefix_openai import EngineLink, messages_for
from warmprefix_tools.replay.arrange import ArrangeOptions, ContextOrder, KeepBy, PlannerArranger
from warmprefix_tools.replay.simulation import Replay
from warmprefix_tools.replay.workload import ReplayRequest, Workload
from warmprefix_tools.traces.reader import read_trace
from warmprefix_tools.traces.trace import Trace

Row = dict[str, Any]
SGLANG = "WARMPREFIX_SGLANG"
ARMS: Mapping[str, KeepBy] = {"LRU": "none", "priorities": "priorities"}
SEEDS = (0, 1, 2)
REQUESTS = 700
K, TOPICS, PER_TOPIC = 10, 30, 14
KV_BLOCKS = 480
"""Of the tokens of all passages, a third."""
PREAMBLE = "Answer the question from the passages."
WORDS = ("river", "stone", "window", "garden", "letter", "winter", "bridge", "market", "harbour", "candle", "forest")


# -- vLLM --------------------------------------------------------------------------------------------------------------


def passages(client: EngineClient, seed: int) -> list[ContextBlock]:
    """Return the passages of all topics, with their tokens by the engine's own count."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(25, 65))) for _ in range(TOPICS * PER_TOPIC)]
    return [
        ContextBlock(text, id=number, tokens=client.count_tokens(f"[{number}] {text}\n\n"))
        for number, text in enumerate(texts)
    ]


def on_vllm(servers: Mapping[str, EngineClient], capacity: int, seed: int, requests: int) -> list[Row]:
    """Return one row per arm. Each request goes to both engines, first to one or to the other in turn."""
    blocks = passages(servers["off"], seed)
    asked = [[blocks[number] for number in numbers] for numbers in zipf_requests(requests, K, TOPICS, PER_TOPIC, seed)]
    distinct = sum({block.id: block.tokens or 0 for request in asked for block in request}.values())
    for client in servers.values():
        client.reset_prefix_cache()
    before = {arm: prefilled(client) for arm, client in servers.items()}
    with ExitStack() as stack:
        arms = [stack.enter_context(Sender(arm, client)) for arm, client in servers.items()]
        for number, request in enumerate(asked):
            for sender in arms if number % 2 else reversed(arms):
                sender.ask(request, f"What is in it, number {number}?")
    computed = {arm: int(prefilled(client) - before[arm]) for arm, client in servers.items()}
    return [
        {
            "seed": seed,
            "arm": sender.arm,
            "requests": len(asked),
            "cache_share": round(capacity / distinct, 3),
            "prompt_tokens": sender.prompt_tokens,
            "computed_tokens": computed[sender.arm],
            "saved_percent": round(100 * (1 - computed[sender.arm] / computed["off"]), 2),
            "ttft_ms": round(1_000 * fmean(sender.seconds), 1),
            "touches": sender.link.touch_stats().sent,
            "touch_tokens": sender.link.touch_stats().computed_tokens,
            "made": {"engine": engine_version()},
        }
        for sender in arms
    ]


class Sender:
    """An application that asks one engine through a link."""

    def __init__(self, arm: str, client: EngineClient) -> None:
        self.arm = arm
        self.seconds: list[float] = []
        self.prompt_tokens = 0
        self._planner = ContextPlanner()
        self.link = EngineLink(self._planner, touches=None if arm == "touches" else False)
        http = self.link.http_client(timeout=300.0)
        self._sdk = OpenAI(base_url=client.url, api_key="none", max_retries=0, http_client=http)
        self._model = client.model

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *error: object) -> None:
        self.link.close()
        self._sdk.close()

    def ask(self, blocks: Sequence[ContextBlock], question: str) -> None:
        began = time.perf_counter()
        plan = self._planner.plan(blocks, preamble=PREAMBLE)
        with self.link.sending(plan):
            stream = self._sdk.chat.completions.create(
                model=self._model,
                messages=cast(Any, messages_for(plan, question, preamble=PREAMBLE)),
                max_tokens=1,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            for number, chunk in enumerate(stream):
                if not number:
                    self.seconds.append(time.perf_counter() - began)
                if chunk.usage is not None:
                    self.prompt_tokens += chunk.usage.prompt_tokens


def vllm(requests: int) -> list[Row]:
    with ExitStack() as stack:
        servers = [stack.enter_context(VllmServer("tiny", kv_blocks=KV_BLOCKS, longest=4_096)) for _ in range(2)]
        clients = {arm: EngineClient(each.base_url) for arm, each in zip(("off", "touches"), servers, strict=True)}
        for client in clients.values():
            client.ask([{"role": "user", "content": "Warm up."}])
        rows: list[Row] = []
        for seed in SEEDS:
            rows += on_vllm(clients, (KV_BLOCKS - 1) * BLOCK_SIZE, seed, requests)
            print(*rows[-2:], sep="\n", file=sys.stderr, flush=True)
        return rows


# -- SGLang ------------------------------------------------------------------------------------------------------------


class RecordingArranger(PlannerArranger):
    """An arranger that keeps what a sender would send, as the driver of SGLang's cache takes it."""

    def __init__(self, workload: Workload, capacity: int, options: ArrangeOptions) -> None:
        super().__init__(workload, "coaccess", capacity, options)
        self.sent: list[Row] = []
        self._served: dict[str, list[list[int]]] = {}
        self._number = 0
        """Of the latest request: its priority, as in the simulation."""
        self._own_pieces = count(workload.keys)

    def arrange(self, request: ReplayRequest) -> ContextOrder:
        order = super().arrange(request)
        self._number = len(self._served)
        pieces = [[request.keys[place], request.tokens[place]] for place in order.order]
        self._served[order.plan_id] = pieces
        self._send(pieces, self._number)
        return order

    def touched(self, touch: Touch, found_tokens: int) -> None:
        super().touched(touch, found_tokens)
        self._send(self._served[touch.plan_id][: touch.blocks], self._number + touch.priority, is_touch=True)

    def _send(self, pieces: list[list[int]], priority: int, *, is_touch: bool = False) -> None:
        # A question, or the end of a touch: one token that no other prompt has there.
        whole = [*pieces, [next(self._own_pieces), 1]]
        self.sent.append({"pieces": whole, "salt": None, "priority": priority, "answer_tokens": 1, "touch": is_touch})


def in_sglang(caches: SglangCaches, trace: Trace, capacity: int) -> list[Row]:
    """Return one row per arm."""
    workload = Workload(trace, reported_k(trace))
    lengths = {key: n for each in workload.requests for key, n in zip(each.keys, each.tokens, strict=True)}
    distinct = sum(lengths.values())
    rows: list[Row] = []
    for arm, retention in ARMS.items():
        replay = Replay(workload, annotate="none", retention=retention)
        recorder = RecordingArranger(workload, capacity, ArrangeOptions("head", "none", None, None, 0, retention))
        simulated = replay.run_arranger(recorder, capacity, name=arm)
        policy = "lru" if retention == "none" else "priority"
        found = caches.hits({"capacity": capacity, "policy": policy, "requests": recorder.sent})
        sizes = [sum(length for _, length in each["pieces"]) for each in recorder.sent]
        touches = [each["touch"] for each in recorder.sent]
        hits = sum(hit for hit, is_touch in zip(found, touches, strict=True) if not is_touch)
        touched = sum(n - hit for n, hit, is_touch in zip(sizes, found, touches, strict=True) if is_touch)
        total = simulated.total_tokens
        rows.append(
            {
                "trace": trace.name,
                "capacity": capacity,
                "cache_share": round(capacity / distinct, 3),
                "arm": arm,
                "requests": len(workload.requests),
                "touches": sum(touches),
                "hit_percent": round(100 * hits / total, 2),
                "net_percent": round(100 * (hits - touched) / total, 2),
                "simulated_percent": round(100 * simulated.saved_tokens / total, 2),
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


class SglangCaches:
    """SGLang's Python, which answers one workload after the other."""

    def __enter__(self) -> SglangCaches:
        driver = Path(__file__).parent / "engine" / "radix_hits.py"
        command = [Path(os.environ[SGLANG], "bin", "python"), driver]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def hits(self, workload: Row) -> list[int]:
        """Return the tokens that the cache finds of each prompt."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(workload)}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:  # SGLang may print lines of its own
            if line.startswith("["):
                return cast("list[int]", json.loads(line))
        raise SystemExit("SGLang's cache ended early")


def sglang(paths: Sequence[Path], requests: int | None, capacities: Sequence[int]) -> list[Row]:
    files = given_files(paths)
    traces = [read_trace(path, requests) for path in files] if files else [*from_a_clone()]
    with SglangCaches() as caches:
        return [row for trace in traces for capacity in capacities for row in in_sglang(caches, trace, capacity)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("trace", nargs="*", type=Path)
    parser.add_argument("--requests", type=int, help="requests per run, which is then not recorded")
    parser.add_argument("--capacities", type=lambda text: [*map(int, text.split(","))], default=[30_000, 100_000])
    options = parser.parse_args()
    identity: tuple[str, ...] = ("seed", "arm")
    if options.engine == "vllm":
        rows = vllm(options.requests or REQUESTS)
    else:
        rows, identity = sglang(options.trace, options.requests, options.capacities), ("trace", "capacity", "arm")
    shown = [field for field in rows[0] if field != "made"]
    print_table(shown, [[row[field] for field in shown] for row in rows])
    if options.requests is None:
        write_rows(f"retention_engines_{options.engine}", rows, identity)


if __name__ == "__main__":
    main()
