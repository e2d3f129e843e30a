"""The command `warmprefix replay`."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from warmprefix.errors import MissingExtraError
from warmprefix_baselines import POLICIES
from warmprefix_tools.replay.prompt_cache import CachedPieces, CacheModel

Run = Callable[..., Any]

CONTRACT = [
    "trace", "policy", "capacity_tokens", "k", "requests", "hit_ratio", "saved_tokens", "total_tokens", "plan_us_p50",
    "plan_us_p99",
]  # fmt: skip


def write_trace(path: Path, *, requests: int = 300, k: int = 8, name: str | None = "topics", seed: int = 0) -> Path:
    """Conversations on 12 topics of 12 blocks each."""
    rng = random.Random(seed)
    lines: list[dict[str, Any]] = [{"name": name, "k": k}]
    lines += [{"block": i, "tokens": rng.randrange(50, 200)} for i in range(144)]
    for number in range(requests):
        topic = rng.randrange(12)
        blocks = rng.sample(range(12 * topic, 12 * topic + 12), k)
        conversation = {"conversation": f"c{number % 60}", "turn": 1 + number // 60, "query_tokens": 20}
        lines.append({"request": f"r{number}", "blocks": blocks, **conversation})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("traces") / "topics.jsonl")


def numbers(path: Path) -> list[dict[str, Any]]:
    results = json.loads(path.read_text())["results"]
    assert isinstance(results, list)
    return results


def test_run_with_every_option(run: Run, trace: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("numbers.json", "orders.jsonl", "page.html")]
    arguments = [
        "--json",
        files[0],
        "--orders-out",
        files[1],
        "--html",
        files[2],
        "--capacity-tokens",
        "4000,unbounded",
    ]
    result = run("replay", trace, *arguments, "--prefill-rate", 8000, "--price", 3, "--cached-price", 0.3)
    assert (result.returncode, result.stderr) == (0, "Replaying 1 trace, 8 runs each ...\n")
    assert "\x1b" not in result.stdout
    for word in ("topics: 300 requests, k = 8, placement head", "coaccess", "no bound", "4,000 tokens", "est. TTFT"):
        assert word in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 110
    assert "With a cache of 4,000 tokens, coaccess would have found " in result.stdout
    assert "<html" in files[2].read_text()

    results = numbers(files[0])
    assert [(row["policy"], row["capacity_tokens"]) for row in results] == [
        (policy, capacity)
        for capacity in (4000, "unbounded")
        for policy in ("relevance", "frequency", "greedy", "coaccess")
    ]
    for row in results:
        assert [key for key in row if key in CONTRACT] == CONTRACT
        assert row["hit_ratio"] == row["saved_tokens"] / row["total_tokens"]
        notes = row["note_tokens"] - row["saved_note_tokens"]
        assert row["ttft_seconds"] == (row["prefilled_tokens"] + notes) / 8000 / 300
        cached = 0.3 * (row["saved_tokens"] + row["saved_note_tokens"])
        assert row["cost"] == pytest.approx((3 * (row["prefilled_tokens"] + notes) + cached) / 1e6)
        today = row["today_total_tokens"] - row["today_saved_tokens"]
        assert row["net_saved_tokens"] == today - row["prefilled_tokens"] - notes
        assert row["prefill_change"] == pytest.approx(-row["net_saved_tokens"] / today)
        assert sum(row["misses"].values()) == row["prefilled_tokens"]
    before, after = results[4], results[7]
    assert 0 < before["saved_tokens"] < after["saved_tokens"]

    orders = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert len(orders) == 8 * 300
    assert list(orders[0]) == ["trace", "policy", "capacity_tokens", "request", "order"]
    asked = [json.loads(line) for line in trace.read_text().splitlines()][-300:]
    assert [order["request"] for order in orders[:300]] == [request["request"] for request in asked]
    for order, request in zip(orders, asked * 8, strict=True):
        assert sorted(order["order"]) == sorted(request["blocks"])


def test_json_goes_to_standard_output_alone(run: Run, trace: Path) -> None:
    result = run("replay", trace, "--json", "-", "--policies", "coaccess", "--limit", 50)
    assert result.returncode == 0
    (bounded, unbounded) = json.loads(result.stdout)["results"]
    assert (bounded["capacity_tokens"], unbounded["capacity_tokens"]) == (100_000, "unbounded")
    assert bounded["requests"] == 50
    assert "topics: 50 requests" in result.stderr


@pytest.mark.slow
def test_same_command_writes_the_same_bytes_for_any_hash_seed(run: Run, trace: Path, tmp_path: Path) -> None:
    timings = ("plan_us_p50", "plan_us_p99", "commit_us_p50", "commit_us_p99")
    runs: list[tuple[bytes, list[dict[str, Any]]]] = []
    for i in range(2):
        orders, file = tmp_path / f"{i}.jsonl.gz", tmp_path / f"{i}.json"
        options = ["--policies", "all", "--capacity-tokens", "3k,unbounded", "--placement", "tail", "--limit", "150"]
        arguments = ["replay", str(trace), *options, "--orders-out", str(orders), "--json", str(file)]
        if i == 0:
            assert run(*arguments).returncode == 0
        else:
            environment = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
            command = [sys.executable, "-m", "warmprefix_tools", *arguments]
            subprocess.run(command, check=True, timeout=60, env=environment)
        rows = [{key: value for key, value in row.items() if key not in timings} for row in numbers(file)]
        runs.append((orders.read_bytes(), rows))
    assert runs[0] == runs[1]
    assert [row["policy"] for row in runs[0][1]] == 2 * list(POLICIES)
    assert len(gzip.decompress(runs[0][0]).splitlines()) == 2 * len(POLICIES) * 150


def test_tail_replay_lists_the_blocks_of_references(run: Run, trace: Path, tmp_path: Path) -> None:
    orders, file = tmp_path / "orders.jsonl", tmp_path / "numbers.json"
    options = ["--placement", "tail", "--answer-tokens", 30, "--policies", "relevance,coaccess", "--annotate", "both"]
    result = run("replay", trace, *options, "--capacity-tokens", "unbounded", "--orders-out", orders, "--json", file)
    assert result.returncode == 0
    assert "referred" in result.stdout
    today, ours = numbers(file)
    tokens = {
        line["block"]: line["tokens"] for line in map(json.loads, trace.read_text().splitlines()) if "block" in line
    }
    lines = [json.loads(line) for line in orders.read_text().splitlines()]
    referred = [line for line in lines if "references" in line]
    assert {line["policy"] for line in referred} == {"coaccess"}
    assert all(set(line["references"]) < set(line["order"]) or line["references"] for line in referred)
    assert ours["reference_tokens"] == sum(tokens[id] for line in referred for id in line["references"])
    assert ours["referring_requests"] == len(referred)
    assert today["reference_tokens"] == 0
    assert ours["prefilled_tokens"] < today["prefilled_tokens"]


@pytest.mark.parametrize("annotate", ["auto", "note", "labels", "both", "none"])
def test_annotate_decides_what_is_written(run: Run, trace: Path, tmp_path: Path, annotate: str) -> None:
    file = tmp_path / "numbers.json"
    options = ["--annotate", annotate, "--policies", "relevance,greedy", "--capacity-tokens", "unbounded"]
    assert run("replay", trace, *options, "--json", file).returncode == 0
    document = json.loads(file.read_text())
    assert (document["annotate"], document["tokenizer"], document["waiting"]) == (annotate, None, 0)
    today, ours = document["results"]
    assert (today["note_tokens"], today["untouched_requests"]) == (0, 300)
    assert (ours["note_tokens"] > 0) == (annotate != "none")
    assert (ours["saved_note_tokens"] > 0) == (annotate in ("labels", "both"))
    assert (ours["untouched_requests"] > 0) == (annotate not in ("labels", "both"))
    assert ours["net_saved_tokens"] <= ours["saved_tokens"] - today["saved_tokens"]


def test_requests_that_wait_are_seen_by_plans(run: Run, trace: Path) -> None:
    options = ["--policies", "coaccess", "--capacity-tokens", "4000", "--annotate", "none", "--json", "-"]
    found = [
        json.loads(run("replay", trace, *options, "--waiting", waiting).stdout)["results"][0]["saved_tokens"]
        for waiting in (0, 8)
    ]
    assert found[1] > 1.02 * found[0]


class Engine(BaseHTTPRequestHandler):
    """Counts words as `/tokenize` of an engine does."""

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        body = json.dumps({"tokens": list(range(len(text.split())))}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        pass


def test_touches_are_counted_and_paid_for(run: Run, tmp_path: Path) -> None:
    """Two of ten requests have the same blocks, which are evicted in between unless they are touched."""
    lines: list[dict[str, Any]] = [{"name": "again"}, *({"block": i, "tokens": 100} for i in range(2_005))]
    for number in range(400):
        first = 0 if number % 10 < 2 else 5 * number
        lines.append({"request": number, "blocks": list(range(first, first + 5))})
    trace = tmp_path / "again.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--policies", "relevance,coaccess", "--capacity-tokens", "3500", "--json", "-"]
    results = {
        retention: json.loads(run("replay", trace, *options, "--retention", retention).stdout)
        for retention in ("none", "touches", "priorities")
    }
    for retention, document in results.items():
        assert document["retention"] == retention
        before, after = document["results"]
        assert (before["touches"], before["touch_tokens"], before["saved_tokens"]) == (0, 0, 40 * 500)
        assert after["net_saved_tokens"] == after["saved_tokens"] - before["saved_tokens"] - after["touch_tokens"]
        assert after["touch_tokens"] >= 18 * after["touches"]
        assert (after["net_saved_tokens"] > 10_000) == (after["touches"] > 0) == (retention != "none")


def test_engine_counts_the_tokens_of_notes(run: Run, trace: Path) -> None:
    options = ["--policies", "greedy", "--capacity-tokens", "unbounded", "--annotate", "labels", "--json", "-"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as engine:
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{engine.server_port}/v1"
        document = json.loads(run("replay", trace, *options, "--tokenizer", url).stdout)
        engine.shutdown()
    assert document["tokenizer"] == url
    assert document["results"][0]["note_tokens"] == 300 * 8  # a label is one word
    result = run("replay", trace, *options, "--tokenizer", url)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Cannot count tokens with {url}: ")
    assert len(result.stderr.splitlines()) == 1


def test_file_counts_the_tokens_of_notes(
    run: Run, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tokenizer:
        """Stands for `tokenizers.Tokenizer`, which is not in this environment."""

        @staticmethod
        def from_file(path: str) -> Tokenizer:
            if not Path(path).exists():
                raise Exception(f"No such file or directory:\n{path}")
            return Tokenizer()

        def encode(self, text: str, *, add_special_tokens: bool) -> SimpleNamespace:
            assert not add_special_tokens
            return SimpleNamespace(ids=text.split())

    file = tmp_path / "tokenizer.json"
    options = ["--policies", "greedy", "--capacity-tokens", "unbounded", "--annotate", "labels", "--json", "-"]
    monkeypatch.setitem(sys.modules, "tokenizers", cast(ModuleType, SimpleNamespace(Tokenizer=Tokenizer)))
    result = run("replay", trace, *options, "--tokenizer", file)
    assert result.returncode == 2
    assert result.stderr == f"Cannot count tokens with {file}: No such file or directory: {file}.\n"
    file.touch()
    document = json.loads(run("replay", trace, *options, "--tokenizer", file).stdout)
    assert document["results"][0]["note_tokens"] == 300 * 8
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    result = run("replay", trace, *options, "--tokenizer", file)
    assert (result.returncode, result.stderr) == (2, f"{MissingExtraError('tokenizers', 'tokenizers')}\n")


def test_traces_that_share_a_name_are_named_by_their_paths(run: Run, tmp_path: Path) -> None:
    paths = [write_trace(tmp_path / f"{i}.jsonl", requests=20, seed=i) for i in range(2)]
    other = write_trace(tmp_path / "other.jsonl", requests=20, name=None)
    result = run("replay", *paths, other, "--json", "-", "--policies", "relevance", "--capacity-tokens", "1")
    assert result.returncode == 0
    assert [row["trace"] for row in json.loads(result.stdout)["results"]] == [*map(str, paths), "other"]


BAD_OPTIONS = [
    (["--policies", "best"], "--policies takes all, or names of relevance, sorted,", "got 'best'"),
    (["--capacity-tokens", "much"], "--capacity-tokens takes unbounded, or whole numbers from 1 on", "got 'much'"),
    (["-k", 0], "-k must be 1 or more", "got 0"),
    (["--limit", 0], "--limit must be 1 or more", "got 0"),
    (["--placement", "middle"], "--placement", "'middle' is not one of 'head', 'tail'"),
    (["--answer-tokens", -1], "--answer-tokens must be 0 or more", "got -1"),
    (["--annotate", "all"], "--annotate", "'all' is not one of 'auto', 'note', 'labels', 'both', 'none'"),
    (["--waiting", -1], "--waiting must be from 0 to 32", "got -1"),
    (["--retention", "pins"], "--retention", "'pins' is not one of 'none', 'touches', 'priorities'"),
    (["--waiting", 33], "--waiting must be from 0 to 32", "got 33"),
    (["--answer-tokens", 5], "--answer-tokens needs --placement tail", "got 5 with head"),
    (["--prefill-rate", 0.5], "--prefill-rate must be from 1 to 1,000,000,000,000", "got 0.5"),
    (["--prefill-rate", "inf"], "--prefill-rate must be from 1 to 1,000,000,000,000", "got inf"),
    (["--price", -1], "--price must be from 0 to 1,000,000,000,000", "got -1"),
    (["--price", 1e300], "--price must be from 0 to 1,000,000,000,000", "got 1e+300"),
    (["--price", "nan"], "--price must be from 0 to 1,000,000,000,000", "got nan"),
    (["--price", 1, "--cached-price", -1], "--cached-price must be from 0 to 1,000,000,000,000", "got -1"),
    (["--cached-price", 1], "--cached-price needs --price too", "got 1 without it"),
    (["--orders-out", "-"], "--orders-out must name a file", "got -; only --json takes - for standard output"),
    (["--html", "-"], "--html must name a file", "got -; only --json takes - for standard output"),
    (["--html", "x", "--json", "./x"], "--json, --orders-out and --html must name different files", "got x twice"),
]


@pytest.mark.parametrize(("arguments", "allowed", "got"), BAD_OPTIONS, ids=[case[1] for case in BAD_OPTIONS])
def test_bad_option_is_refused_with_option_value_and_allowed_values(
    run: Run, trace: Path, arguments: list[object], allowed: str, got: str
) -> None:
    result = run("replay", trace, *arguments, COLUMNS="300")
    assert (result.returncode, result.stdout) == (2, "")
    assert allowed in result.stderr
    assert got in result.stderr
    assert "Traceback" not in result.stderr


def test_bad_trace_is_reported_before_any_replay(run: Run, trace: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"name": "bad"}\n{"block": 1, "tokens": -3}\n')
    orders = tmp_path / "orders.jsonl"
    result = run("replay", trace, bad, "--orders-out", orders)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{bad}, line 2: tokens must be")
    assert len(result.stderr.splitlines()) == 1
    assert not orders.exists()


@pytest.mark.parametrize("option", ["--json", "--orders-out", "--html"])
def test_unwritable_output_is_reported_before_any_replay(run: Run, trace: Path, tmp_path: Path, option: str) -> None:
    file = tmp_path / "missing" / "file"
    result = run("replay", trace, option, file)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"Cannot write {file}: there is no directory {file.parent}.\n"


def test_trace_is_never_overwritten(run: Run, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", requests=20)
    before = path.read_bytes()
    result = run("replay", path, "--html", path, COLUMNS="300")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--html must name a file that the command does not read" in result.stderr
    assert path.read_bytes() == before


HOSTILE = "evil\x1b]0;title\x07\x9b31m\u202ename"


def test_names_from_a_trace_control_no_terminal(run: Run, tmp_path: Path) -> None:
    hostile, bad = tmp_path / "t.jsonl", tmp_path / "bad.jsonl"
    write_trace(hostile, requests=20, name=HOSTILE)
    bad.write_text(json.dumps({"name": "bad"}) + "\n" + json.dumps({"request": 0, "blocks": [HOSTILE]}) + "\n")
    for path, status in ((hostile, 0), (bad, 2)):
        result = run("replay", path, "--policies", "relevance")
        assert result.returncode == status
        assert "title" in result.stdout + result.stderr
        assert not set(result.stdout + result.stderr) & set("\x1b\x07\x9b\u202e")


def test_hint_at_placement_tail_for_conversations(run: Run, trace: Path, tmp_path: Path) -> None:
    hint = "60 conversations of several turns: if your application keeps their earlier context in the history"
    options = ["--policies", "relevance", "--capacity-tokens", "unbounded"]
    assert hint in " ".join(run("replay", trace, *options).stdout.split())
    assert "conversations" not in run("replay", trace, *options, "--placement", "tail").stdout
    assert "conversations" not in run("replay", trace, *options, "--limit", 50).stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("options", [[], ["--json", "-"]])
def test_full_disk_behind_standard_output_is_reported(
    run_main: Run, trace: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it fails too
    monkeypatch.setattr("sys.stdout", full)
    try:
        result = run_main("replay", trace, "--limit", 20, "--policies", "relevance", *options)
    finally:
        with suppress(OSError):
            full.close()
    assert result.returncode == 2
    assert result.stderr.endswith("Cannot write standard output: No space left on device.\n")


def test_ctrl_c_ends_with_status_130_and_leaves_no_partial_file(
    run_main: Run, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, served = CacheModel.serve, itertools.count(1)

    def interrupted(*arguments: Any) -> CachedPieces:
        if next(served) == 400:
            signal.raise_signal(signal.SIGINT)
        return serve(*arguments)

    monkeypatch.setattr(CacheModel, "serve", interrupted)
    result = run_main("replay", trace, "--orders-out", tmp_path / "orders.jsonl")
    assert (result.returncode, result.stdout) == (130, "")
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_missing_extra_is_reported_with_the_command_that_installs_it(
    run_main: Run, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    for module in ("warmprefix_tools.console", "warmprefix_tools.replay.run_replay"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    result = run_main("replay", trace)
    assert (result.returncode, result.stderr) == (2, f"{MissingExtraError('cli', 'rich')}\n")
