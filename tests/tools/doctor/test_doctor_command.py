"""`warmprefix doctor` through the runner, and twice in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from warmprefix_tools.cli import app
from warmprefix_tools.doctor.diagnosis import diagnose
from warmprefix_tools.doctor.doctor_options import DoctorOptions
from warmprefix_tools.doctor.log_reader import ReadLog

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


def test_clean_log_is_reported_as_clean(warm: Path) -> None:
    done = run(warm)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "No defect was found." in done.stdout


@pytest.mark.parametrize(("percent", "status"), [("0", 1), ("50", 1), ("100", 0)])
def test_exit_status_depends_on_the_lost_share(cold: Path, percent: str, status: int) -> None:
    assert run(cold, "--fail-above", percent).exit_code == status


def test_clean_log_passes_any_limit(warm: Path) -> None:
    assert run(warm, "--fail-above", "0").exit_code == 0


def test_standard_output_takes_json_alone(cold: Path) -> None:
    done = run(cold, "--json", "-")
    report = json.loads(done.stdout)
    assert "40 requests from" in done.stderr
    assert report["requests"] == 40
    assert report["capacity_tokens"] == "unbounded"
    assert report["hit_tokens"] + report["lost_tokens"] == report["repaired_hit_tokens"]
    assert report["lost_share"] == pytest.approx(report["lost_tokens"] / report["prompt_tokens"])
    (finding,) = report["findings"]
    assert finding["kind"] == "timestamp"
    assert finding["lost_tokens"] == report["lost_tokens"] > 0
    assert finding["divergence"]["earlier"]["message"] == 0
    assert finding["divergence"]["earlier"]["line"] < finding["divergence"]["later"]["line"]


def test_files_are_written_whole(cold: Path, tmp_path: Path) -> None:
    done = run(cold, "--json", tmp_path / "report.json", "--html", tmp_path / "report.html")
    assert done.exit_code == 0, done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["findings"][0]["kind"] == "timestamp"
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "It is 2026-03-01" in page


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


def test_several_logs_count_as_one(cold: Path, warm: Path) -> None:
    assert json.loads(run(cold, warm, "--json", "-").stdout)["requests"] == 80


@pytest.mark.parametrize("log", ["empty.jsonl", "notes.txt", "missing.jsonl", "."])
def test_unusable_input_exits_with_status_2(tmp_path: Path, log: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "notes.txt").write_text("Nothing of use.\n")
    done = run(tmp_path / log)
    assert (done.exit_code, done.stdout) == (2, "")
    assert str(tmp_path) in done.stderr


def test_output_that_can_not_be_written_exits_with_status_2(tmp_path: Path, warm: Path) -> None:
    done = run(warm, "--html", tmp_path / "missing" / "report.html")
    assert done.exit_code == 2
    assert "there is no directory" in done.stderr


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
        (options(capacity_tokens=15), "--capacity-tokens must be --kv-block-size (16) or more, got 15"),
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
        (lambda: diagnose(ReadLog(), 16, 15), "capacity_tokens must be kv_block_size (16) or more, got 15"),
    ],
)
def test_bad_values_are_refused_by_name_value_and_range(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        call()
    assert str(caught.value) == message


def test_bad_option_is_a_usage_error(warm: Path) -> None:
    done = run(warm, "--fail-above", "200")
    assert done.exit_code == 2
    assert "--fail-above must be from 0 to 100" in done.stderr
