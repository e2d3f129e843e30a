"""Prefill saved on live engines, by the engines' own counters: each way to use the planner, primes included.

    python benchmarks/live_savings.py [--engines vllm,vllm-sliding,vllm-recurrent,llama.cpp] [--arms link,batch]
    python benchmarks/live_savings.py --endpoint http://localhost:30000/v1 --name sglang

Engines that are started here, with models of few layers, since counts do not depend on weights:

- `vllm`: full attention;
- `vllm-sliding`: five sliding windows of 512 tokens per layer with full attention, KV blocks of 128 tokens;
- `vllm-recurrent`: three recurrent layers per layer with full attention, KV blocks of 256 tokens;
- `llama.cpp`: the first layer of a small real model, four slots, evicted prompts in host memory.

Arms, each from an empty cache, one request at a time, about the standard library:

- `relevance`: relevance order, without warmprefix;
- `link`: `EngineLink`, which reports the engine's usage; the profile is learned from that;
- `commit, report`: `commit(plan)`, then `report(plan, ...)`, without a link;
- `1 prime`: `EngineLink(primes=1)`, the profile learned; `named, 1 prime`: with the profile's name;
- `batch`: `plan_batch` and `BatchRunner`, one at a time, with the profile's name, so with primes.

"Prefill" is what the engine computed of all prompts by its counters in `/metrics`, compared with the usage of its
answers. "Saved" is relative to relevance order on the same engine. Runs with the default sizes replace their rows in
`results/live_savings.csv`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from openai import AsyncOpenAI, OpenAI

from common import print_table
from engine_client import EngineClient
from engine_workload import EngineQuestion, read
from gguf_layers import first_layers
from result_files import write_rows
from vllm_server import VllmServer, engine_version, environment_folder, model_folder, prepare, succeed
from warmprefix import BatchRequest, ContextPlanner, EngineReport
from warmprefix_openai import BatchRunner, EngineLink, messages_for
from warmprefix_tools.local.llama_server import LocalModel
from warmprefix_tools.local.weights import fetch_weights

NAME = "live_savings"
PREAMBLE = "Answer the question from the passages, or write that they do not contain the answer."
ARMS = ("relevance", "link", "commit, report", "1 prime", "named, 1 prime", "batch")
KV_BLOCKS = 4_000
COUNTERS = (
    ("vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total"),
    ("sglang:prompt_tokens_total", "sglang:cached_tokens_total"),
    ("llamacpp:prompt_tokens_total", None),
)
"""Of prompt tokens, and of those among them that were cached."""


@dataclass(frozen=True)
class LiveEngine:
    """An engine of the benchmark, and the size of its runs."""

    requests: int
    k: int
    block: int | None = None
    """Tokens between checkpoints; None for an engine without them."""
    kind: str | None = None
    """Layers of the model that is made for it."""

    @property
    def profile(self) -> str:
        return "auto" if self.block is None else f"vllm-checkpoints({self.block})"

    @property
    def arms(self) -> Sequence[str]:
        return [arm for arm in ARMS if self.block is not None or "prime" not in arm]


ENGINES: Mapping[str, LiveEngine] = {
    "vllm": LiveEngine(60, 8),
    "vllm-sliding": LiveEngine(100, 8, 128, "sliding"),
    "vllm-recurrent": LiveEngine(100, 8, 256, "recurrent"),
    "llama.cpp": LiveEngine(100, 5),
    "sglang": LiveEngine(60, 8),
}


# -- engines -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(name: str) -> Iterator[EngineClient]:
    """Start an engine with an empty cache."""
    engine = ENGINES[name]
    if name == "llama.cpp":
        with tempfile.TemporaryDirectory() as temporary:
            gguf = Path(temporary, "one-layer.gguf")
            first_layers(fetch_weights(lambda line: print(line, file=sys.stderr)), gguf, 1)
            with LocalModel(gguf, context=4_096) as server:
                yield EngineClient(server.base_url)
        return
    options: list[str] = []
    if engine.kind is not None:
        folder = hybrid_folder(engine.kind)
        options = ["--model", str(folder), "--block-size", str(engine.block), "--load-format", "dummy"]
    with VllmServer("tiny", kv_blocks=KV_BLOCKS, arguments=options) as vllm:
        yield EngineClient(vllm.base_url)


def hybrid_folder(kind: str) -> Path:
    """Return the folder of a model with these layers, made once."""
    folder = environment_folder() / "models" / f"hybrid-{kind}"
    if not (folder / "config.json").exists():
        script = Path(__file__).parent / "engine" / "make_hybrid.py"
        succeed([prepare(), script, folder, "--like", model_folder("tiny"), "--kind", kind])
    return folder


def empty(client: EngineClient) -> None:
    """Empty the engine's cache, if it allows that; each run has a preamble of its own in any case."""
    if not client.reset_prefix_cache():
        with contextlib.suppress(OSError):
            request = urllib.request.Request(f"{client.url.removesuffix('/v1')}/flush_cache", method="POST")
            urllib.request.urlopen(request, timeout=30).close()


def prefilled(client: EngineClient) -> float:
    """Return the tokens that the engine has computed of all prompts."""
    metrics = client.metrics()
    for prompts, cached in COUNTERS:
        whole = counter(metrics, prompts)
        if whole is not None:
            return whole - (counter(metrics, cached) or 0 if cached else 0)
    raise SystemExit(f"{client.url} counts no prompt tokens in /metrics")


def counter(metrics: str, name: str) -> float | None:
    values = [line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(map(float, values)) if values else None


# -- arms --------------------------------------------------------------------------------------------------------------


class Use:
    """Tokens by the usage of the answers."""

    def __init__(self) -> None:
        self.prompt = self.cached = self.primes = 0
        self.learned: dict[str, object] = {}
        """What the planner has learned by the end."""

    def add(self, prompt: int | None, cached: int | None) -> None:
        self.prompt += prompt or 0
        self.cached += cached or 0


def relevance(client: EngineClient, asked: Sequence[EngineQuestion], preamble: str, engine: LiveEngine) -> Use:
    use = Use()
    planner = ContextPlanner(policy="relevance", annotate="none")
    for request in asked:
        plan = planner.plan(request.blocks, preamble=preamble)
        answer = client.ask(messages_for(plan, request.question, preamble=preamble))
        use.add(answer.prompt_tokens, answer.cached_tokens)
    return use


def reported(client: EngineClient, asked: Sequence[EngineQuestion], preamble: str, engine: LiveEngine) -> Use:
    use = Use()
    planner = ContextPlanner()
    for request in asked:
        plan = planner.plan(request.blocks, preamble=preamble)
        answer = client.ask(messages_for(plan, request.question, preamble=preamble))
        planner.commit(plan)
        planner.report(plan, EngineReport(answer.cached_tokens, answer.prompt_tokens))
        use.add(answer.prompt_tokens, answer.cached_tokens)
    use.learned = learned(planner)
    return use


def linked(profile: str, primes: int) -> Callable[..., Use]:
    def run(client: EngineClient, asked: Sequence[EngineQuestion], preamble: str, engine: LiveEngine) -> Use:
        use = Use()
        planner = ContextPlanner(profile=engine.profile if profile == "named" else profile)
        with (
            EngineLink(planner, primes=primes) as link,
            OpenAI(
                base_url=client.url, api_key="none", max_retries=0, http_client=link.http_client(timeout=300.0)
            ) as sdk,
        ):
            for request in asked:
                plan = planner.plan(request.blocks, preamble=preamble)
                answer = sdk.chat.completions.create(
                    model=client.model,
                    messages=cast(Any, messages_for(plan, request.question, preamble=preamble)),
                    max_tokens=1,
                    extra_headers=link.headers(plan),
                )
                assert answer.usage is not None
                details = answer.usage.prompt_tokens_details
                use.add(answer.usage.prompt_tokens, details.cached_tokens if details else 0)
            stats = link.prime_stats()
        use.primes = stats.sent
        use.learned = {
            **learned(planner),
            "prime_computed_tokens": stats.computed_tokens,
            "prime_found_tokens": stats.found_tokens,
        }
        return use

    return run


def batched(client: EngineClient, asked: Sequence[EngineQuestion], preamble: str, engine: LiveEngine) -> Use:
    use = Use()
    requests = [BatchRequest(request.number, request.blocks, request.question) for request in asked]
    runner = BatchRunner(ContextPlanner(profile=engine.profile).plan_batch(requests, preamble=preamble))

    async def run() -> None:
        async with AsyncOpenAI(base_url=client.url, api_key="none", timeout=300.0) as sdk:
            async for result in runner.run(sdk, client.model, concurrency=1, max_tokens=1):
                if result.error is not None:
                    raise SystemExit(f"{result.id}: {result.error}")
                use.add(result.prompt_tokens, result.cached_tokens)

    asyncio.run(run())
    use.primes = runner.prime_stats().sent
    return use


def learned(planner: ContextPlanner) -> dict[str, object]:
    stats = planner.stats()
    return {"profile": stats.profile, "capacity_tokens": stats.capacity_tokens}


RUNS: Mapping[str, Callable[..., Use]] = {
    "relevance": relevance,
    "link": linked("auto", 0),
    "commit, report": reported,
    "1 prime": linked("auto", 1),
    "named, 1 prime": linked("named", 1),
    "batch": batched,
}


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(
    name: str, client: EngineClient, arms: Sequence[str], requests: int | None, version: str
) -> list[dict[str, Any]]:
    """Return one row per arm."""
    engine = ENGINES[name]
    asked = read("stdlib", requests or engine.requests, engine.k)
    rows: list[dict[str, Any]] = []
    client.ask([{"role": "user", "content": "Warm up."}])  # SGLang has no counters before its first request
    for arm in ("relevance", *(arm for arm in engine.arms if arm != "relevance" and arm in arms)):
        empty(client)
        session = random.Random(f"{arm}{time.time_ns()}").randrange(10**8, 10**9)
        before = prefilled(client)
        use = RUNS[arm](client, asked, f"Session {session}. {PREAMBLE}", engine)
        computed = int(prefilled(client) - before)
        base = rows[0]["prefill_tokens"] if rows else computed
        rows.append(
            {
                "engine": name,
                "arm": arm,
                "requests": len(asked),
                "k": engine.k,
                "prompt_tokens": use.prompt,
                "prefill_tokens": computed,
                "saved_percent": round(100 * (1 - computed / base), 1),
                "primes": use.primes,
                "usage_agrees": bool(use.primes) or computed == use.prompt - use.cached,
                **use.learned,
                "made": {"engine": version},
            }
        )
        print(f"{name}, {arm}: {computed:,} tokens, {rows[-1]['saved_percent']} % saved", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--engines", type=given, default=[name for name in ENGINES if name != "sglang"])
    parser.add_argument("--arms", type=lambda text: [arm.strip() for arm in text.split(";")], default=ARMS)
    parser.add_argument("--endpoint", help="base URL of an engine that runs already, with /v1")
    parser.add_argument("--name", choices=ENGINES, default="sglang", help="the engine at the endpoint")
    parser.add_argument("--version", default="", help="its version, for the result file")
    parser.add_argument("--requests", type=int, help="requests per arm; by default each engine's own number")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.endpoint is not None:
        rows = measure(options.name, EngineClient(options.endpoint), options.arms, options.requests, options.version)
    else:
        for name in options.engines:
            with started(name) as client:
                version = "xllamacpp" if name == "llama.cpp" else engine_version()
                rows += measure(name, client, options.arms, options.requests, version)
    print_table([*rows[0]][:9], [[row[key] for key in [*rows[0]][:9]] for row in rows])
    if options.requests is None:
        write_rows(NAME, rows, ("engine", "arm"))
    disagreeing = [f"{row['engine']}, {row['arm']}" for row in rows if not row["usage_agrees"]]
    if disagreeing:
        sys.exit(f"the engine's counters do not agree with its usage: {'; '.join(disagreeing)}")


if __name__ == "__main__":
    main()
