"""`warmprefix doctor` through the runner, and twice in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from warmprefix_tools.cli import app
from warmprefix_tools.doctor.diagnosis import diagnose
from warmprefix_tools.doctor.doctor_options import DoctorOptions
from warmprefix_tools.doctor.log_reader import ReadLog, read_log

RULES = " ".join(f"Rule {n}: answer from the passages, and admit it if they lack the answer." for n in range(40))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def run_process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "warmprefix_tools", "doctor", *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        env={**os.environ, **environment},
    )


def write_log(path: Path, systems: Sequence[str]) -> Path:
    bodies: list[dict[str, Any]] = [
        {
            "model": "m",
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": f"Question number {n}?"}],
        }
        for n, system in enumerate(systems)
    ]
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """Log in which every prompt begins with another time."""
    return write_log(tmp_path / "cold.jsonl", [f"It is 2026-03-01 10:{n:02}:{n:02}. {RULES}" for n in range(40)])


@pytest.fixture
def warm(tmp_path: Path) -> Path:
    """Log without defects."""
    return write_log(tmp_path / "warm.jsonl", [RULES] * 40)


def test_finding_is_printed_with_cost_place_and_fix(cold: Path) -> None:
    done = run(cold)
    assert (done.exit_code, done.stderr) == (0, "")
    printed = " ".join(done.stdout.split())
    assert "40 requests from" in printed
    assert "1. A date or time stands in front of text that requests share timestamp" in printed
    assert "messages[0] (system)" in printed
    assert "It is 2026-03-01 10:" in printed
    assert "\u00bb" in printed


def test_exit_status_depends_on_the_lost_share(cold: Path, warm: Path, tmp_path: Path) -> None:
    statuses = [run(cold, "--fail-above", percent).exit_code for percent in (0, 50, 100)]
    assert (statuses, run(warm, "--fail-above", "0").exit_code) == ([1, 1, 0], 0)
    assert run(warm, "--fail-above", "200").exit_code == 2
    assert run(warm, "--html", tmp_path / "missing" / "report.html").exit_code == 2


def test_standard_output_takes_json_alone(cold: Path, tmp_path: Path) -> None:
    done = run(cold, "--json", "-", "--html", tmp_path / "report.html")
    assert "It is 2026-03-01" in (tmp_path / "report.html").read_text()
    report = json.loads(done.stdout)
    assert "40 requests from" in done.stderr
    assert report["requests"] == 40
    assert report["hit_tokens"] + report["lost_tokens"] == report["repaired_hit_tokens"]
    assert report["lost_share"] == pytest.approx(report["lost_tokens"] / report["prompt_tokens"])
    (finding,) = report["findings"]
    assert finding["kind"] == "timestamp"
    assert finding["lost_tokens"] == report["lost_tokens"] > 0
    assert finding["divergence"]["earlier"]["message"] == 0
    assert finding["divergence"]["earlier"]["line"] < finding["divergence"]["later"]["line"]


def test_report_does_not_depend_on_the_hash_seed_or_the_terminal(cold: Path) -> None:
    first = run_process(cold, "--json", "-", PYTHONHASHSEED="1")
    second = run_process(cold, "--json", "-", PYTHONHASHSEED="2", PYTHONIOENCODING="ascii")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout == second.stdout
    assert json.loads(first.stdout)["findings"]
    assert "40 requests from" in second.stderr  # with excerpts that have characters beyond ASCII
    assert "Traceback" not in second.stderr


def test_unreadable_lines_are_listed(warm: Path) -> None:
    with warm.open("a") as log:
        log.write('{"model": "m", "messages": [\n\nsome prose\n{"messages": 3}\n')
    done = run(warm)
    assert done.exit_code == 0
    assert "3 records could not be read:" in done.stdout
    for line in (41, 43, 44):
        assert f"line {line}:" in done.stdout


@pytest.mark.parametrize("log", ["empty.jsonl", "notes.txt", "missing.jsonl", "."])
def test_unusable_input_exits_with_status_2(tmp_path: Path, log: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "notes.txt").write_text("Nothing of use.\n")
    done = run(tmp_path / log)
    assert (done.exit_code, done.stdout) == (2, "")
    assert str(tmp_path) in done.stderr


def test_control_characters_are_made_visible(tmp_path: Path) -> None:
    log = write_log(tmp_path / "cold.jsonl", [f"\x1b[2J\u202eIt is 10:{n:02}:{n:02}. {RULES}" for n in range(30)])
    done = run(log)
    assert "\x1b" not in done.stdout
    assert "\u202e" not in done.stdout
    assert "\u2039U+001B\u203a" in done.stdout


def options(**values: Any) -> Callable[[], object]:
    return lambda: DoctorOptions(**{"logs": [Path("log")], **values})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (options(kv_block_size=0), "--kv-block-size must be 1 or more, got 0"),
        (options(fail_above=101), "--fail-above must be from 0 to 100, got 101"),
        (options(fail_above=-0.5), "--fail-above must be from 0 to 100, got -0.5"),
        (options(fail_above=float("nan")), "--fail-above must be from 0 to 100, got nan"),
        (options(html_file=Path("-")), "--html must name a file, got -; only --json takes - for standard output"),
        (
            options(json_file=Path("a"), html_file=Path("a")),
            "--json and --html must name different files, got a twice",
        ),
        (options(json_file=Path("log")), "--json must name a file that the command does not read, got log"),
        (lambda: diagnose(ReadLog(), 0), "kv_block_size must be 1 or more, got 0"),
    ],
)
def test_bad_values_are_refused_by_name_value_and_range(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        call()
    assert str(caught.value) == message


def test_turns_that_the_cache_forgot_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    records = []
    for turn, (cached, minute) in enumerate([(0, 0), (1_000, 1), (16, 20), (3_000, 21), (64, 22)]):
        messages = [{"role": "user", "content": f"Turn {n}. {RULES}"} for n in range(turn + 1)]
        usage = {"prompt_tokens": 1_000 * (turn + 1), "prompt_tokens_details": {"cached_tokens": cached}}
        time = f"2026-09-01T10:{minute:02}:00Z"
        request = {"model": "m", "messages": messages, "session_id": "s"}
        records.append({"time": time, "request": request, "usage": usage})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (note,) = json.loads(run(path, "--json", "-").stdout)["notes"]
    assert "2 of 4 turns" in note
    assert f"{2_000 - 16 + 4_000 - 64:,} tokens were computed again" in note
    assert "1 of them came after more than 5 minutes" in note


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only POSIX forks")
def test_child_that_is_forked_while_others_examine_a_log_can_examine_one(cold: Path, warm: Path) -> None:
    """Nothing that the doctor uses is locked in a child."""
    stops = threading.Event()

    def examine() -> None:
        while not stops.is_set():
            diagnose(read_log([warm]))

    threads = [threading.Thread(target=examine) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tested
                child = os.fork()
            if not child:
                signal.alarm(60)
                os._exit(0 if run(cold).exit_code == 0 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stops.set()
        for thread in threads:
            thread.join()
