"""`warmprefix plan-batch` as a user runs it: in a process of its own."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from warmprefix.batch.cluster import MAX_DISTINCT
from warmprefix.errors import MissingExtraError

Line = dict[str, Any]
Write = Callable[[Path, list[Line]], Path]

COMMAND = [sys.executable, "-m", "warmprefix_tools", "plan-batch"]


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        env={**os.environ, **environment},
    )


def test_a_run_with_everything(
    trace: Path, tmp_path: Path, recount: Callable[[list[Line], list[Line], int | None], int]
) -> None:
    numbers, orders = tmp_path / "numbers.json", tmp_path / "orders.jsonl"
    options = ["--planner", "merge", "-k", 6, "--limit", 150, "--capacity-tokens", "4k", "--device", "cpu"]
    result = run(trace, *options, "--time-budget", 0.2, "--json", numbers, "--orders-out", orders)
    assert (result.returncode, result.stderr) == (0, "Planning 150 requests ...\n")
    assert "\x1b" not in result.stdout
    for word in ("topics: 150 requests, a cache of 4,000 tokens", "merge", "as they came -> ", "s on cpu"):
        assert word in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100

    written = json.loads(numbers.read_text())
    assert list(written) == [
        "planner", "trace", "requests", "saved_tokens", "total_tokens", "hit_ratio", "upper_bound", "seconds", "device",
    ]  # fmt: skip
    assert (written["planner"], written["requests"], written["device"]) == ("merge", 150, "cpu")
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert written["saved_tokens"] == recount(lines, list(map(json.loads, orders.read_text().splitlines())), 4_000)


def test_without_options_a_table_is_all_there_is(trace: Path, tmp_path: Path) -> None:
    result = subprocess.run([*COMMAND, str(trace)], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (result.returncode, list(tmp_path.iterdir())) == (0, [])
    words = [line.split("  ")[0].strip() for line in result.stdout.splitlines()[1:6]]
    assert words == ["planner", "hit ratio", "tokens saved", "upper bound", "planned in"]
    assert "topics: 200 requests, a cache without bounds" in result.stdout


def test_standard_output_takes_json_alone(trace: Path) -> None:
    result = run(trace, "--json", "-", "--limit", 50)
    assert result.returncode == 0
    assert json.loads(result.stdout)["requests"] == 50
    assert "topics: 50 requests" in result.stderr


def test_the_same_command_twice(trace: Path, tmp_path: Path) -> None:
    runs: list[tuple[bytes, dict[str, Any]]] = []
    for i in range(2):
        orders, file = tmp_path / f"{i}.jsonl.gz", tmp_path / f"{i}.json"
        result = run(trace, "--capacity-tokens", "3k", "--orders-out", orders, "--json", file, PYTHONHASHSEED=str(i))
        assert result.returncode == 0
        numbers = json.loads(file.read_text())
        del numbers["seconds"]
        runs.append((orders.read_bytes(), numbers))
    assert runs[0] == runs[1]
    assert len(gzip.decompress(runs[0][0]).splitlines()) == 200


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--planner", "best"],
            "--planner must be one of auto, merge, context-index, frequency, relevance; got 'best'",
        ),
        (["-k", 0], "-k must be 1 or more, got 0"),
        (["--limit", -1], "--limit must be 1 or more, got -1"),
        (["--capacity-tokens", "much"], "--capacity-tokens takes unbounded, or whole numbers"),
        (["--capacity-tokens", "0"], "--capacity-tokens takes unbounded, or whole numbers"),
        (["--capacity-tokens", "100,000"], "--capacity-tokens takes one size here, and no commas in it; got '100,000'"),
        (["--device", "tpu"], "--device"),
        (["--time-budget", -1], "--time-budget must be from 0 to"),
        (["--time-budget", "nan"], "--time-budget must be from 0 to"),
        (["--time-budget", "inf"], "--time-budget must be from 0 to"),
        (["--orders-out", "-"], "--orders-out needs the name of a file"),
        (["--orders-out", "same", "--json", "./same"], "--json and --orders-out must name different files"),
    ],
)
def test_a_wrong_call_is_explained_with_status_2(trace: Path, arguments: list[object], said: str) -> None:
    result = run(trace, *arguments, TERMINAL_WIDTH="300")
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (None, ": cannot be read: No such file or directory"),
        ("", ": empty; a trace begins with a header line"),
        ('{"name": "no requests"}\n', ": no request in it; a trace has lines like"),
        ('{"name": "bad"}\n{"block": 1, "tokens": -3}\n', ", line 2: tokens must be"),
        (
            '{}\n{"request": 1, "blocks": []}\n{"request": 1, "blocks": []}\n',
            ", line 3: request 1 stands on line 2 too",
        ),
    ],
)
def test_what_is_no_trace_is_told_in_one_line(tmp_path: Path, contents: str | None, said: str) -> None:
    bad, orders = tmp_path / "bad.jsonl", tmp_path / "orders.jsonl"
    if contents is not None:
        bad.write_text(contents)
    result = run(bad, "--orders-out", orders)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{bad}{said}")
    assert len(result.stderr.splitlines()) == 1
    assert not orders.exists()


@pytest.mark.parametrize("option", ["--json", "--orders-out"])
def test_an_output_that_cannot_be_written_is_told_before_all_else(tmp_path: Path, option: str) -> None:
    file = tmp_path / "missing" / "file"
    result = run(tmp_path / "no-trace.jsonl", option, file)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"Cannot write {file}: there is no directory {file.parent}.\n"
    result = run(tmp_path / "no-trace.jsonl", option, tmp_path)
    assert (result.returncode, result.stderr) == (2, f"Cannot write {tmp_path}: it is a directory.\n")


def test_the_trace_is_never_written_over(trace: Path) -> None:
    before = trace.read_bytes()
    result = run(trace, "--orders-out", trace, TERMINAL_WIDTH="300")
    assert (result.returncode, result.stdout) == (2, "")
    assert "is to be read, so --json and --orders-out can't be written there" in result.stderr
    assert trace.read_bytes() == before


def test_a_planner_that_is_not_up_to_it_says_so_and_leaves_no_file(tmp_path: Path, write: Write) -> None:
    many = MAX_DISTINCT + 1
    lines: list[Line] = [{}, *({"block": i, "tokens": 1} for i in range(many))]
    trace = write(tmp_path / "many.jsonl", lines + [{"request": i, "blocks": [i]} for i in range(many)])
    result = run(trace, "--planner", "context-index", "--orders-out", tmp_path / "orders.jsonl")
    assert (result.returncode, result.stdout) == (2, "")
    said = f"the planner 'context-index' takes at most {MAX_DISTINCT} distinct contexts, got {many}"
    assert result.stderr.splitlines()[1].startswith(f"Cannot plan {trace}: {said}")
    assert len(result.stderr.splitlines()) == 2
    assert list(tmp_path.iterdir()) == [trace]


def test_no_cuda_device(trace: Path, tmp_path: Path) -> None:
    torch = "from types import SimpleNamespace\ncuda = SimpleNamespace(is_available=lambda: False)\n"
    (tmp_path / "torch.py").write_text(torch)
    result = run(trace, "--device", "cuda", PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[1:] == [
        f"Cannot plan {trace}: device must be auto or cpu on this machine, got 'cuda': torch finds no CUDA device."
    ]


@pytest.mark.parametrize(
    ("absent", "options", "extra"),
    [
        ("torch", ["--device", "cuda"], "gpu"),
        ("scipy", ["--planner", "context-index"], "batch"),
        ("rich", [], "cli"),
    ],
)
def test_without_an_extra_the_command_says_how_to_get_it(
    trace: Path, absent: str, options: list[str], extra: str
) -> None:
    arguments = ["warmprefix", "plan-batch", str(trace), *options]
    script = (
        f"import sys; sys.modules[{absent!r}] = None; sys.argv = {arguments!r};"
        " from warmprefix_tools.__main__ import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == str(MissingExtraError(extra, absent))
    assert "Traceback" not in result.stderr


HOSTILE = "evil\x1b]0;title\x07\x9b31m\u202ename"


def test_names_from_a_trace_control_no_terminal(
    tmp_path: Path, write: Write, topic_lines: Callable[..., list[Line]]
) -> None:
    named = write(tmp_path / "t.jsonl", topic_lines(requests=20, name=HOSTILE))
    bad = write(tmp_path / "bad.jsonl", [{"name": "bad"}, {"request": 0, "blocks": [HOSTILE]}])
    for path, status in ((named, 0), (bad, 2)):
        result = run(path)
        assert result.returncode == status
        assert "title" in result.stdout + result.stderr
        assert not set(result.stdout + result.stderr) & set("\x1b\x07\x9b\u202e")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals like these")
def test_who_watches_sees_a_bar_which_goes_away(trace: Path) -> None:
    import pty

    reader, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with os.fdopen(reader, "rb", buffering=0) as seen:
        result = subprocess.run(
            [*COMMAND, str(trace)], stdout=subprocess.PIPE, stderr=terminal, text=True, timeout=60, env=environment
        )
        os.close(terminal)
        shown = seen.read(100_000).decode()
    assert result.returncode == 0
    assert "planning" in shown
    assert "━" in shown
    assert "Planning" not in shown
    assert "━" not in result.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("options", [[], ["--json", "-"]])
def test_a_full_disk_behind_standard_output_is_said(trace: Path, options: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        command = [*COMMAND, str(trace), "--limit", "20", *options]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.endswith("Cannot write standard output: No space left on device.\n")
    assert "Traceback" not in result.stderr


def test_ctrl_c_ends_it_without_a_traceback_and_leaves_no_half_file(trace: Path, tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import signal, sys
        from warmprefix_tools.__main__ import main
        from warmprefix_tools.plan_batch import command

        lines = command.order_lines
        def interrupted(*arguments):
            for number, line in enumerate(lines(*arguments)):
                if number == 100:
                    signal.raise_signal(signal.SIGINT)
                yield line
        command.order_lines = interrupted
        sys.argv[0] = "warmprefix"
        main()
        """
    )
    orders = tmp_path / "orders.jsonl"
    command = [sys.executable, "-c", script, "plan-batch", str(trace), "--orders-out", str(orders)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (130, "")
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_planner_of_the_command_is_not_recorded(trace: Path, tmp_path: Path) -> None:
    result = run(trace, WARMPREFIX_RECORD=str(tmp_path / "recorded.jsonl"))
    assert result.returncode == 0
    assert list(tmp_path.iterdir()) == []
