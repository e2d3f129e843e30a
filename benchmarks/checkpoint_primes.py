"""The prefill that primes save on engines that keep checkpoints, by vLLM's own scheduler.

    python benchmarks/checkpoint_primes.py [--requests 200] [--texts stdlib,xquad]

Four engines: sliding-window layers with blocks of 128 tokens, and recurrent layers with blocks of 256 tokens, or of
528 and 1,056 tokens and a prefix match unit of 16. Each is vLLM's scheduler and prefix cache without a model
(`engine/scheduler.py`), so its cached tokens are those of a server; see `vllm_server.py` for its installation. The
cache has room for all prompts.

Arms: relevance order in order of arrival; our order in order of arrival, with no, one or two primes per request, as
`EngineLink(primes=...)` sends them; and the same requests as one batch, without and with its primes, as `BatchRunner`
sends them. Planners and primers get the engine's reports. "Saved" is prefill against relevance order on the same
engine: prompt tokens minus cached tokens of all requests, the primes included. Only a run with the default options is
written to `results/`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import print_table
from engine_workload import EngineQuestion, read
from result_files import write_results
from vllm_server import engine_version, model_folder, prepare
from warmprefix import BatchRequest, ContextPlanner
from warmprefix.cache_profiles import vllm_checkpoints
from warmprefix.residency import EngineReport
from warmprefix_openai import cut_chat, messages_for
from warmprefix_openai.primer import PrimeLengths, Primer, shortened
from warmprefix_requests import FieldRefusals, read_call
from warmprefix_requests.prefixes import EXACT_END

K = 8
PREAMBLE = "Answer the question from the passages, or write that they do not contain the answer."
KV_BLOCKS = 200_000
ENGINES: Mapping[str, tuple[str, int, int | None]] = {
    "sliding window, block 128": ("sliding", 128, None),
    "recurrent, block 256": ("recurrent", 256, None),
    "recurrent, block 528, unit 16": ("recurrent", 528, 16),
    "recurrent, block 1056, unit 16": ("recurrent", 1_056, 16),
}
HEADER = ["text", "engine", "arm", "prefill tokens", "saved %", "primes per request"]


class SchedulerProcess:
    """vLLM's scheduler in the engine's own Python."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.computed = 0
        """Tokens of prefill since the last `start`."""

    def start(self, kind: str, block: int, unit: int | None) -> None:
        """Start an engine with an empty cache."""
        self.computed = 0
        self._write({"kind": kind, "block": block, "unit": unit, "kv_blocks": KV_BLOCKS})

    def ask(self, messages: Sequence[Mapping[str, Any]], *, exact: bool = False) -> EngineReport:
        self._write({"messages": list(messages), "exact": exact})
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        self.computed += answer["tokens"] - answer["cached"]
        return EngineReport(answer["cached"], answer["tokens"])

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()


@contextmanager
def open_scheduler() -> Iterator[SchedulerProcess]:
    script = Path(__file__).parent / "engine" / "scheduler.py"
    command = [str(prepare()), str(script), str(model_folder("tiny"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield SchedulerProcess(process)
        finally:
            process.terminate()


def relevance(engine: SchedulerProcess, asked: Sequence[EngineQuestion]) -> int:
    planner = ContextPlanner(policy="relevance", annotate="none")
    for request in asked:
        engine.ask(messages_for(planner.plan(request.blocks), request.question, preamble=PREAMBLE))
    return 0


def online(engine: SchedulerProcess, asked: Sequence[EngineQuestion], profile: Any, primes: int) -> int:
    """Plan requests as they arrive; return the number of primes."""
    planner = ContextPlanner(profile=profile)
    primer = Primer(planner, primes)
    refusals = FieldRefusals()
    for request in asked:
        plan = planner.plan(request.blocks, preamble=PREAMBLE)
        messages = messages_for(plan, request.question, preamble=PREAMBLE)
        content = json.dumps({"model": "model", "messages": messages}).encode()
        call = read_call("POST", "/v1/chat/completions", {"content-type": "application/json"}, content)
        assert call is not None
        for prime, sent in primer.requests(plan, call):
            report = engine.ask(sent.body["messages"], exact=EXACT_END.items() <= sent.body.items())
            primer.answered(prime, refusals.attempt(sent, ""), 200, report.prompt_tokens, report.cached_tokens)
        report = engine.ask(messages)
        planner.commit(plan, report=report)
        primer.learn(plan, report)
    return primer.stats().sent


def batched(engine: SchedulerProcess, asked: Sequence[EngineQuestion], profile: Any, *, primes: bool) -> int:
    requests = [BatchRequest(request.number, request.blocks, request.question) for request in asked]
    batch = ContextPlanner(profile=profile).plan_batch(requests, preamble=PREAMBLE)
    due = defaultdict(list)
    for prime in batch.primes if primes else ():
        due[prime.before.id].append(prime)
    lengths = PrimeLengths()
    for planned in batch:
        for prime in due[planned.id]:
            chat = cut_chat(prime.before.messages(), prime.shared_text)
            assert chat is not None
            cut = lengths.cut(chat, profile.checkpoints)
            lengths.add(cut.estimated, engine.ask(shortened(chat, cut), exact=True).prompt_tokens or 0)
        engine.ask(planned.messages())
    return len(batch.primes) if primes else 0


def measure(engine: SchedulerProcess, text: str, name: str, asked: Sequence[EngineQuestion]) -> list[dict[str, Any]]:
    kind, block, unit = ENGINES[name]
    profile = vllm_checkpoints(block, unit)
    arms: dict[str, Callable[[], int]] = {
        "relevance order": lambda: relevance(engine, asked),
        "online": lambda: online(engine, asked, profile, 0),
        "online, 1 prime": lambda: online(engine, asked, profile, 1),
        "online, 2 primes": lambda: online(engine, asked, profile, 2),
        "batch": lambda: batched(engine, asked, profile, primes=False),
        "batch with primes": lambda: batched(engine, asked, profile, primes=True),
    }
    rows: list[dict[str, Any]] = []
    for arm, run in arms.items():
        engine.start(kind, block, unit)
        sent = run()
        base = rows[0]["prefill_tokens"] if rows else engine.computed
        row: dict[str, Any] = {"text": text, "engine": name, "arm": arm, "prefill_tokens": engine.computed}
        row["saved_percent"] = round(100 * (1 - engine.computed / base), 1)
        row["primes_per_request"] = round(sent / len(asked), 2)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--texts", default="stdlib,xquad")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with open_scheduler() as engine:
        for text in options.texts.split(","):
            asked = read(text, options.requests, K)
            for name in ENGINES:
                rows += measure(engine, text, name, asked)
    keys = ["text", "engine", "arm", "prefill_tokens", "saved_percent", "primes_per_request"]
    print_table(HEADER, [[row[key] for key in keys] for row in rows])
    if [options.requests, options.texts] == [parser.get_default(name) for name in ("requests", "texts")]:
        made = {"made": {"engine": engine_version()}}
        write_results("checkpoint_primes", [{**row, **made} for row in rows])


if __name__ == "__main__":
    main()
