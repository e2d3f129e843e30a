"""`warmprefix doctor` as a user runs it: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from warmprefix_tools.doctor.doctor_options import DoctorOptions

COMMAND = [sys.executable, "-m", "warmprefix_tools", "doctor"]
RULES = " ".join(f"Rule {n}: answer from the passages, and say so if they do not hold the answer." for n in range(40))


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
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
    """Every prompt begins with its own second."""
    return write_log(tmp_path / "cold.jsonl", [f"It is 2026-03-01 10:{n:02}:{n:02}. {RULES}" for n in range(40)])


@pytest.fixture
def warm(tmp_path: Path) -> Path:
    return write_log(tmp_path / "warm.jsonl", [RULES] * 40)


def test_a_defect_is_told_with_its_cost_its_place_and_its_mend(cold: Path) -> None:
    done = run(cold)
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.split())
    assert "40 requests from" in told
    assert "1. A date or time stands in front of text that requests share timestamp" in told
    assert "messages[0] (system)" in told
    assert "It is 2026-03-01 10:" in told
    assert "\u00bb" in told


def test_a_clean_log_is_called_so(warm: Path) -> None:
    done = run(warm)
    assert (done.returncode, done.stderr) == (0, "")
    assert "No defect was found." in done.stdout


@pytest.mark.parametrize(("percent", "status"), [("0", 1), ("50", 1), ("100", 0)])
def test_the_exit_status_tells_ci_what_is_lost(cold: Path, percent: str, status: int) -> None:
    assert run(cold, "--fail-above", percent).returncode == status


def test_a_clean_log_passes_any_limit(warm: Path) -> None:
    assert run(warm, "--fail-above", "0").returncode == 0


def test_json_alone_goes_to_standard_output(cold: Path) -> None:
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
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["findings"][0]["kind"] == "timestamp"
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "It is 2026-03-01" in page


def test_the_same_log_makes_the_same_report(cold: Path) -> None:
    assert run(cold, "--json", "-", PYTHONHASHSEED="1").stdout == run(cold, "--json", "-", PYTHONHASHSEED="2").stdout


def test_lines_that_can_not_be_read_are_named(warm: Path) -> None:
    with warm.open("a") as log:
        log.write('{"model": "m", "messages": [\n\nnothing known\n{"messages": 3}\n')
    done = run(warm)
    assert done.returncode == 0
    assert "3 records could not be read:" in done.stdout
    for line in (41, 43, 44):
        assert f"line {line}:" in done.stdout


def test_several_logs_are_one(cold: Path, warm: Path) -> None:
    assert json.loads(run(cold, warm, "--json", "-").stdout)["requests"] == 80


def test_an_unusable_input_has_a_status_of_its_own(tmp_path: Path, warm: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "notes.txt").write_text("Nothing of use.\n")
    for log in ("empty.jsonl", "notes.txt", "missing.jsonl", "."):
        done = run(tmp_path / log)
        assert (done.returncode, done.stdout) == (2, ""), log
        assert "Traceback" not in done.stderr
    done = run(warm, "--html", tmp_path / "missing" / "report.html")
    assert done.returncode == 2
    assert "there is no directory" in done.stderr


def test_a_terminal_may_lack_a_character(cold: Path) -> None:
    done = run(cold, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")


def test_what_controls_a_terminal_is_made_visible(tmp_path: Path) -> None:
    log = write_log(tmp_path / "cold.jsonl", [f"\x1b[2J\u202eIt is 10:{n:02}:{n:02}. {RULES}" for n in range(30)])
    done = run(log)
    assert "\x1b" not in done.stdout
    assert "\u202e" not in done.stdout
    assert "\u2039U+001B\u203a" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_block_size": 0}, "--kv-block-size must be 1 or more, got 0"),
        ({"capacity_tokens": 15}, "--capacity-tokens must be --kv-block-size [(]16[)] or more, got 15"),
        ({"fail_above": 101}, "--fail-above must be a percentage from 0 to 100, got 101"),
        ({"fail_above": float("nan")}, "--fail-above must be a percentage from 0 to 100, got nan"),
        ({"html_file": Path("-")}, "--html must name a file, got -"),
        (
            {"json_file": Path("a"), "html_file": Path("a")},
            "--json and --html must name different files, got a for both",
        ),
        ({"json_file": Path("log")}, "must not name a log that is read, got log"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DoctorOptions(**{"logs": [Path("log")], **options})


def test_a_bad_option_is_a_usage_error(warm: Path) -> None:
    done = run(warm, "--fail-above", "200")
    assert done.returncode == 2
    assert "--fail-above must be a percentage" in done.stderr
