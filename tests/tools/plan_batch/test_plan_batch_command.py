"""The command `warmprefix plan-batch`."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from warmprefix.errors import MissingExtraError
from warmprefix_baselines.cluster import MAX_DISTINCT
from warmprefix_tools.plan_batch import run_plan_batch

Line = dict[str, Any]
Write = Callable[[Path, list[Line]], Path]

Run = Callable[..., Any]


def test_run_with_every_option(
    run: Run, trace: Path, tmp_path: Path, recount: Callable[[list[Line], list[Line], int | None], int]
) -> None:
    numbers, orders = tmp_path / "numbers.json", tmp_path / "orders.jsonl"
    options = ["--planner", "merge", "-k", 6, "--limit", 150, "--capacity-tokens", "4k", "--device", "cpu"]
    result = run("plan-batch", trace, *options, "--time-budget", 0.2, "--json", numbers, "--orders-out", orders)
    assert (result.returncode, result.stderr) == (0, "Planning 150 requests ...\n")
    assert "\x1b" not in result.stdout
    for word in ("topics: 150 requests, a cache of 4,000 tokens", "merge", "as they came -> ", "s on cpu"):
        assert word in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100

    written = json.loads(numbers.read_text())
    assert list(written) == [
        "planner", "trace", "requests", "saved_tokens", "total_tokens", "hit_ratio", "today_saved_tokens",
        "note_tokens", "net_saved_tokens", "prefill_change", "upper_bound", "seconds", "device",
    ]  # fmt: skip
    assert (written["planner"], written["requests"], written["device"]) == ("merge", 150, "cpu")
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert written["saved_tokens"] == recount(lines, list(map(json.loads, orders.read_text().splitlines())), 4_000)


def test_without_options_only_a_table_is_written(
    run: Run, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("plan-batch", trace)
    assert (result.returncode, list(tmp_path.iterdir())) == (0, [])
    words = [line.split("  ")[0].strip() for line in result.stdout.splitlines()[1:8]]
    assert words == [
        "planner", "gross hit ratio", "tokens saved", "labels and notes", "net saved", "upper bound", "planned in",
    ]  # fmt: skip
    assert "topics: 200 requests, a cache without bounds" in result.stdout


def test_same_command_writes_the_same_bytes_for_any_hash_seed(run: Run, trace: Path, tmp_path: Path) -> None:
    runs: list[tuple[bytes, dict[str, Any]]] = []
    for i in range(2):
        orders, file = tmp_path / f"{i}.jsonl.gz", tmp_path / f"{i}.json"
        arguments = [
            "plan-batch", str(trace), "--capacity-tokens", "3k", "--orders-out", str(orders), "--json", str(file),
        ]  # fmt: skip
        if i == 0:
            assert run(*arguments).returncode == 0
        else:
            environment = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
            command = [sys.executable, "-m", "warmprefix_tools", *arguments]
            subprocess.run(command, check=True, timeout=120, env=environment)
        numbers = json.loads(file.read_text())
        del numbers["seconds"]
        runs.append((orders.read_bytes(), numbers))
    assert runs[0] == runs[1]
    assert len(gzip.decompress(runs[0][0]).splitlines()) == 200


BAD_OPTIONS = [
    (["--planner", "best"], "--planner must be one of auto, merge, context-index, frequency, relevance", "got 'best'"),
    (["-k", 0], "-k must be 1 or more", "got 0"),
    (["--limit", -1], "--limit must be 1 or more", "got -1"),
    (["--capacity-tokens", "much"], "--capacity-tokens takes unbounded, or whole numbers from 1 on", "got 'much'"),
    (["--capacity-tokens", "0"], "--capacity-tokens takes unbounded, or whole numbers from 1 on", "got '0'"),
    (["--capacity-tokens", "100,000"], "--capacity-tokens takes one size here, without commas", "got '100,000'"),
    (["--annotate", "all"], "--annotate", "'all' is not one of 'auto', 'note', 'labels', 'both', 'none'"),
    (["--device", "tpu"], "--device", "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
    (["--time-budget", -1], "--time-budget must be from 0 to 1,000,000,000", "got -1"),
    (["--time-budget", "nan"], "--time-budget must be from 0 to 1,000,000,000", "got nan"),
    (["--time-budget", "inf"], "--time-budget must be from 0 to 1,000,000,000", "got inf"),
    (["--orders-out", "-"], "--orders-out must name a file", "got -; only --json takes - for standard output"),
    (["--orders-out", "x", "--json", "./x"], "--json and --orders-out must name different files", "got x twice"),
]


@pytest.mark.parametrize(("arguments", "allowed", "got"), BAD_OPTIONS, ids=[case[1] for case in BAD_OPTIONS])
def test_bad_option_is_refused_with_option_value_and_allowed_values(
    run: Run, trace: Path, arguments: list[object], allowed: str, got: str
) -> None:
    result = run("plan-batch", trace, *arguments, COLUMNS="300")
    assert (result.returncode, result.stdout) == (2, "")
    assert allowed in result.stderr
    assert got in result.stderr
    assert "Traceback" not in result.stderr


def test_trace_is_never_overwritten(run: Run, trace: Path) -> None:
    before = trace.read_bytes()
    result = run("plan-batch", trace, "--orders-out", trace, COLUMNS="300")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--orders-out must name a file that the command does not read" in result.stderr
    assert trace.read_bytes() == before


def test_planner_that_cannot_plan_the_trace_leaves_no_file(run: Run, tmp_path: Path, write: Write) -> None:
    many = MAX_DISTINCT + 1
    lines: list[Line] = [{}, *({"block": i, "tokens": 1} for i in range(many))]
    trace = write(tmp_path / "many.jsonl", lines + [{"request": i, "blocks": [i]} for i in range(many)])
    result = run("plan-batch", trace, "--planner", "context-index", "--orders-out", tmp_path / "orders.jsonl")
    assert (result.returncode, result.stdout) == (2, "")
    problem = f"the planner 'context-index' takes at most {MAX_DISTINCT} distinct contexts, got {many}"
    assert result.stderr.splitlines()[1].startswith(f"Cannot plan {trace}: {problem}")
    assert len(result.stderr.splitlines()) == 2
    assert list(tmp_path.iterdir()) == [trace]


def test_missing_cuda_device_is_reported(run: Run, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", cast(ModuleType, torch))
    result = run("plan-batch", trace, "--device", "cuda")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[1:] == [
        f"Cannot plan {trace}: device must be auto or cpu on this machine, got 'cuda': torch finds no CUDA device."
    ]


def test_missing_torch_or_rich_is_reported_with_the_command_that_installs_it(
    run_main: Run, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run_main("plan-batch", trace, "--device", "cuda")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == str(MissingExtraError("gpu", "torch"))

    monkeypatch.setitem(sys.modules, "rich.console", None)
    for module in ("warmprefix_tools.console", "warmprefix_tools.plan_batch.run_plan_batch"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    result = run_main("plan-batch", trace)
    assert (result.returncode, result.stderr) == (2, f"{MissingExtraError('cli', 'rich')}\n")


HOSTILE = "evil\x1b]0;title\x07\x9b31m\u202ename"


def test_names_from_a_trace_control_no_terminal(
    run: Run, tmp_path: Path, write: Write, topic_lines: Callable[..., list[Line]]
) -> None:
    named = write(tmp_path / "t.jsonl", topic_lines(requests=20, name=HOSTILE))
    bad = write(tmp_path / "bad.jsonl", [{"name": "bad"}, {"request": 0, "blocks": [HOSTILE]}])
    for path, status in ((named, 0), (bad, 2)):
        result = run("plan-batch", path)
        assert result.returncode == status
        assert "title" in result.stdout + result.stderr
        assert not set(result.stdout + result.stderr) & set("\x1b\x07\x9b\u202e")


def test_ctrl_c_ends_with_status_130_and_leaves_no_partial_file(
    run_main: Run, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_lines = run_plan_batch._order_lines

    def interrupted(*arguments: Any) -> Iterator[str]:
        for number, line in enumerate(order_lines(*arguments)):
            if number == 100:
                signal.raise_signal(signal.SIGINT)
            yield line

    monkeypatch.setattr(run_plan_batch, "_order_lines", interrupted)
    result = run_main("plan-batch", trace, "--orders-out", tmp_path / "orders.jsonl")
    assert (result.returncode, result.stdout) == (130, "")
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_plan_batch_records_no_trace(run: Run, trace: Path, tmp_path: Path) -> None:
    result = run("plan-batch", trace, WARMPREFIX_RECORD=str(tmp_path / "recorded.jsonl"))
    assert result.returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("profile", ["anthropic", "openai", "vllm-checkpoints(128)", "full-attention"])
def test_profile_counts_the_plan_in_its_cache(run: Run, trace: Path, profile: str) -> None:
    result = run("plan-batch", trace, "--profile", profile, "--json", "-")
    written = json.loads(result.stdout)
    assert written["profile"] == profile
    before, after = written["today_profile_use"], written["profile_use"]
    assert after["read"] > before["read"]
    assert after["cost"] < before["cost"]
    assert (written["primes"] > 0) == (profile == "vllm-checkpoints(128)")
    assert "In a cache such as" in run("plan-batch", trace, "--profile", profile).stdout


def test_unknown_profile_is_named(run: Run, trace: Path) -> None:
    result = run("plan-batch", trace, "--profile", "claude")
    assert result.returncode == 2
    assert "--profile: profile must be one of" in " ".join(result.stderr.replace("│", " ").split())
