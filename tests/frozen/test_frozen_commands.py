"""The JSON of `replay`, `plan-batch` and `doctor` on seeded inputs is the committed one."""

from __future__ import annotations

import hashlib
import importlib
import json
import random
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

Json = dict[str, Any]

VOLATILE = frozenset(
    {
        "warmprefix",  # the version
        "python",
        "seconds",
        *(f"{call}_us_{percentile}" for call in ("plan", "commit") for percentile in ("p50", "p99")),
    }
)
"""Keys whose values depend on the time, the machine or the version."""

POLICIES = "relevance,sorted,frequency,greedy,recency,oracle,context-index,coaccess"
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "theta", "iota", "kappa", "lambda", "omicron", "sigma")


def load_app() -> Any:
    """Return the typer app of the `warmprefix` command, wherever its module is."""
    names = ("warmprefix_tools.cli", "warmprefix.cli")
    found = [name for name in names if find_spec(name.partition(".")[0]) and find_spec(name)]
    return importlib.import_module(found[0]).app


def run(*arguments: object, status: int = 0) -> Json:
    """Run a command with its JSON in `out.json`; return that without volatile keys."""
    result = CliRunner().invoke(load_app(), [*map(str, arguments), "--json", "out.json"])
    assert result.exit_code == status, (result.output, result.exception)
    written: Json = without_volatile(json.loads(Path("out.json").read_text("utf-8")))
    return written


def without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_volatile(inner) for key, inner in value.items() if key not in VOLATILE}
    return [without_volatile(inner) for inner in value] if isinstance(value, list) else value


def sha256(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def write_lines(path: str, lines: list[Json]) -> None:
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def trace_lines(seed: int) -> list[Json]:
    """Conversations on 8 topics of 10 blocks each, in three scopes."""
    rng = random.Random(seed)
    lines: list[Json] = [{"name": f"topics {seed}", "k": 6}]
    lines += [{"block": f"b{number}", "tokens": rng.randrange(50, 200)} for number in range(80)]
    for number in range(120):
        topic = rng.randrange(8)
        blocks = [f"b{block}" for block in rng.sample(range(10 * topic, 10 * topic + 10), 6)]
        place = {"conversation": f"c{number % 24}", "turn": 1 + number // 24, "query_tokens": 20}
        scope = {"scope": f"s{number % 3}"} if seed == 2 else {}
        lines.append({"request": f"r{number}", "blocks": blocks, **place, **scope})
    return lines


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on files with short names, which go into the reports."""
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        write_lines(f"t{seed}.jsonl", trace_lines(seed))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("head", ["t1.jsonl", "--policies", POLICIES, "--capacity-tokens", "3k,unbounded"]),
        ("tail", ["t1.jsonl", "--policies", POLICIES, "--capacity-tokens", "4k", "--placement", "tail"]),
        ("two-traces", ["t1.jsonl", "t2.jsonl", "-k", 4, "--limit", 70, "--policies", "relevance,coaccess"]),
        ("answers", ["t1.jsonl", "--placement", "tail", "--answer-tokens", 30, "--policies", "coaccess"]),
        ("prices", ["t2.jsonl", "--prefill-rate", 8000, "--price", 3, "--cached-price", 0.3, "--policies", "greedy"]),
    ],
)
def test_replay_writes_the_committed_json(name: str, arguments: list[object], freeze: Callable[..., None]) -> None:
    report = run("replay", *arguments, "--orders-out", "orders.jsonl")
    for row in report["results"]:
        row["over_time"] = row["over_time"][-1:]  # a running total
    freeze("replay.json", {**report, "orders": sha256("orders.jsonl")}, name)


@pytest.mark.parametrize("planner", ["auto", "merge", "context-index", "frequency", "relevance"])
@pytest.mark.parametrize("capacity", ["unbounded", "2k"])
@pytest.mark.parametrize("trace", ["t1", "t2"])
def test_plan_batch_writes_the_committed_json(
    planner: str, capacity: str, trace: str, freeze: Callable[..., None]
) -> None:
    options = ["--planner", planner, "--capacity-tokens", capacity, "--device", "cpu", "--orders-out", "orders.jsonl"]
    report = run("plan-batch", f"{trace}.jsonl", *options)
    freeze("plan_batch.json", {**report, "orders": sha256("orders.jsonl")}, f"{trace}-{planner}-{capacity}")


# -- logs with defects ------------------------------------------------------------------------------------------------


RULES = " ".join(f"Rule {number}: quote the passages and be brief." for number in range(30))


def prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words)).capitalize() + "."


def chat(system: str, *turns: str, **more: Any) -> Json:
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}]
    messages += [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"model": "m", "messages": messages, **more}


def clean(rng: random.Random) -> Iterator[Json]:
    for number in range(30):
        yield chat(RULES, f"Question {number}: {prose(rng, 8)}")


def timestamp(rng: random.Random) -> Iterator[Json]:
    for number in range(30):
        yield chat(f"It is 2026-03-01 10:{number:02}:{number:02}. {RULES}", prose(rng, 8))


def random_id(rng: random.Random) -> Iterator[Json]:
    for _ in range(30):
        value = f"{rng.getrandbits(64):016x}"
        yield chat(f"Trace: req-{value}. {RULES}", prose(rng, 8))


def shuffled_passages(rng: random.Random) -> Iterator[Json]:
    passages = [f"[p{number}] {prose(rng, 40)}" for number in range(6)]
    for number in range(30):
        found = rng.sample(passages, 5)
        context = "\n\n".join(found if number % 2 else [f"(score: {rng.random():.4f}) {text}" for text in found])
        yield chat(RULES, f"{context}\n\nQuestion: {prose(rng, 8)}")


def shuffled_tools(rng: random.Random) -> Iterator[Json]:
    tools: list[Json] = [
        {"type": "function", "function": {"name": f"tool_{number}", "description": prose(rng, 20)}}
        for number in range(6)
    ]
    for number in range(30):
        given = rng.sample(tools, 6) if number % 2 else [dict(reversed(tool.items())) for tool in tools]
        yield chat(RULES, prose(rng, 8), tools=given)


def cut_histories(rng: random.Random) -> Iterator[Json]:
    for talk in range(6):
        turns = [f"Talk {talk}: {prose(rng, 40)}"]
        for _ in range(6):
            yield chat(RULES, *turns[-3:])
            turns += [prose(rng, 40), prose(rng, 40)]


def split_salts(rng: random.Random) -> Iterator[Json]:
    for number in range(30):
        yield chat(RULES, prose(rng, 8), cache_salt=f"salt-{number % 7}", user=f"user-{number % 3}")


def spelling(rng: random.Random) -> Iterator[Json]:
    spelled = (RULES, RULES.replace(". ", ".  "), RULES.replace("e", "e\u200b", 1), RULES.replace("Rule", "R\u00faLe"))
    for number in range(32):
        yield chat(spelled[number % 4], prose(rng, 8))


LOGS = (clean, timestamp, random_id, shuffled_passages, shuffled_tools, cut_histories, split_salts, spelling)


@pytest.mark.parametrize("make", LOGS, ids=lambda make: str(make.__name__).replace("_", "-"))
def test_doctor_writes_the_committed_json(
    make: Callable[[random.Random], Iterator[Json]], freeze: Callable[..., None]
) -> None:
    write_lines("log.jsonl", list(make(random.Random(3))))
    freeze("doctor.json", run("doctor", "log.jsonl"), make.__name__)


def test_doctor_with_larger_blocks_writes_the_committed_json(freeze: Callable[..., None]) -> None:
    rng = random.Random(4)
    bodies = [body for make in LOGS for body in make(rng)]
    rng.shuffle(bodies)
    write_lines("log.jsonl", bodies)
    options = ["--kv-block-size", 32, "--fail-above", 1]
    freeze("doctor.json", run("doctor", "log.jsonl", *options, status=1), "all with larger blocks")
