"""The command `warmprefix record`, around a real application in a process of its own."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from warmprefix_tools.cli import app
from warmprefix_tools.traces.reader import read_trace

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")

APPLICATION = """
import sys
from warmprefix import ContextBlock, ContextPlanner

planner = ContextPlanner()
for n in range(4):
    blocks = [ContextBlock(f"All about {i}.", id=f"Doc_{i}") for i in range(n, n + 3)]
    with planner.planning(blocks, conversation="chat", placement="tail"):
        pass
print("arguments", *sys.argv[1:])
"""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "warmprefix_tools", "record", *map(str, arguments)]


class Finished(NamedTuple):
    """Outcome of a command; `stdout` is the application's."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Finished]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in this process, in the folder `cwd`; only the application is a process of its own."""

    def run_command(*arguments: object, cwd: Path | None = None) -> Finished:
        if cwd is not None:
            monkeypatch.chdir(cwd)
        capfd.readouterr()
        result = CliRunner().invoke(app, ["record", *map(str, arguments)], catch_exceptions=False)
        return Finished(result.exit_code, capfd.readouterr().out, result.stderr)

    return run_command


@pytest.fixture
def application(tmp_path: Path) -> Path:
    path = tmp_path / "app.py"
    path.write_text(APPLICATION)
    return path


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


@pytest.mark.parametrize("name", ["day.jsonl", "day.jsonl.gz"])
def test_record_needs_no_change_to_the_application(run: Run, tmp_path: Path, application: Path, name: str) -> None:
    done = run(name, "--", sys.executable, application, "--port", "80", "--", "x", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "arguments --port 80 -- x\n")
    assert done.stderr == f"Recorded 4 requests to {name}.\nNext: warmprefix replay {name}\n"
    trace = read_trace(tmp_path / name)
    assert trace.name == "day"
    assert [request.blocks for request in trace.requests] == [
        (f"Doc_{n}", f"Doc_{n + 1}", f"Doc_{n + 2}") for n in range(4)
    ]
    assert [request.turn for request in trace.requests] == [1, 2, 3, 4]
    again = run(name, "--", sys.executable, application, cwd=tmp_path)
    assert "Recorded 4 requests to day-2.jsonl" in again.stderr


def test_clicks_are_appended_when_the_recording_has_ended(run: Run, tmp_path: Path) -> None:
    done = run(
        "day.jsonl.gz",
        "--",
        *python(
            """
            from warmprefix import Choice, ContextBlock, ContextPlanner
            planner = ContextPlanner()
            for n in range(3):
                found = [ContextBlock(f"Passage {i}.", id=f"p{i}", score=-i) for i in range(n, n + 5)]
                with planner.planning(found, choose=Choice(2)) as plan:
                    print('{"request": "%s", "gold": ["p%d"]}' % (plan.id, n + 1))
            """
        ),
        cwd=tmp_path,
    )
    assert done.stderr.startswith("Recorded 3 requests to day.jsonl.gz.\n")
    with (tmp_path / "day.jsonl.gz").open("ab") as file:
        file.write(gzip.compress(done.stdout.encode()))
    requests = read_trace(tmp_path / "day.jsonl.gz").requests
    assert [(len(request.blocks), request.k, request.gold) for request in requests] == [
        (5, 2, (f"p{n + 1}",)) for n in range(3)
    ]


@pytest.mark.parametrize("asked", [False, True])
def test_texts_are_written_only_with_the_option(
    run: Run, tmp_path: Path, application: Path, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMPREFIX_RECORD_TEXT", "1")  # the command's own option decides
    run(*(["--text"] if asked else []), tmp_path / "t.jsonl", "--", sys.executable, application)
    assert ("All about 2." in (tmp_path / "t.jsonl").read_text()) is asked


def test_an_application_may_change_directory_and_start_processes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    done = run(
        "t.jsonl",
        "--",
        *python(
            """
            import os, subprocess, sys, warmprefix
            os.chdir("elsewhere")
            planner = "import warmprefix; warmprefix.ContextPlanner().plan(['a'])"
            subprocess.run([sys.executable, "-c", planner], check=True)
            warmprefix.ContextPlanner().plan(["a", "b"])
            """
        ),
        cwd=tmp_path,
    )
    assert done.stderr.splitlines() == [
        "Recorded 1 request to t.jsonl.",
        "Recorded 1 request to t-2.jsonl.",
        "Next: warmprefix replay t.jsonl t-2.jsonl",
    ]


def test_record_reports_an_application_that_plans_nothing(run: Run, tmp_path: Path) -> None:
    done = run(tmp_path / "t.jsonl", "--", *python("print('hello')"))
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert done.stderr.startswith("No request was recorded: no ContextPlanner planned one")
    assert "docs/record.md" in done.stderr
    assert not (tmp_path / "t.jsonl").exists()


def test_record_reports_a_trace_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    done = run(tmp_path / "t.jsonl", "--", *python(f"open({str(tmp_path / 't.jsonl')!r}, 'w').write('junk')"))
    assert done.returncode == 0
    assert re.fullmatch(r".*t\.jsonl, line 1: not JSON: .*\n", done.stderr)


@pytest.mark.parametrize("status", [0, 1, 2, 77])
def test_record_exits_with_the_status_of_the_application(run: Run, tmp_path: Path, status: int) -> None:
    assert run(tmp_path / "t.jsonl", "--", *python(f"raise SystemExit({status})")).returncode == status


@posix
def test_a_program_that_cannot_start_exits_with_the_status_of_shells(run: Run, tmp_path: Path) -> None:
    absent = run(tmp_path / "t.jsonl", "--", "no-such-program", "-x")
    assert (absent.returncode, absent.stderr) == (127, "no-such-program: No such file or directory\n")
    (tmp_path / "notes.txt").write_text("no program")
    refused = run(tmp_path / "t.jsonl", "--", tmp_path / "notes.txt")
    assert (refused.returncode, refused.stderr) == (126, f"{tmp_path / 'notes.txt'}: Permission denied\n")


def test_record_runs_nothing_if_the_folder_of_the_trace_is_missing(run: Run, tmp_path: Path) -> None:
    done = run(tmp_path / "absent" / "t.jsonl", "--", *python("print('hello')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{tmp_path / 'absent' / 't.jsonl'}: no file can be made in {tmp_path / 'absent'}\n"


@pytest.mark.parametrize("place", [".", "program/t.jsonl"])
def test_record_runs_nothing_if_the_path_is_a_folder_or_inside_a_file(run: Run, tmp_path: Path, place: str) -> None:
    (tmp_path / "program").touch(0o755)
    done = run(tmp_path / place, "--", *python("print('hello')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{tmp_path / place}: ")
    assert "Traceback" not in done.stderr


def test_file_names_cannot_control_the_terminal(run: Run, tmp_path: Path) -> None:
    done = run(
        tmp_path / "t\x1b[31m.jsonl", "--", *python("import warmprefix; warmprefix.ContextPlanner().plan(['a'])")
    )
    assert "Recorded 1 request to " in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize("arguments", [[], ["t.jsonl"], ["t.jsonl", "--"], ["t.jsonl", "--txt", "--", "true"]])
def test_a_wrong_command_line_prints_the_usage_with_status_2(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "Usage" in done.stderr
    assert "Traceback" not in done.stderr


EXITS_ON_SIGNAL = """
    import signal, sys, time, warmprefix
    planner = warmprefix.ContextPlanner()
    def leave(number, frame):
        planner.plan(["the last"])
        print("leaving", flush=True)
        sys.exit(5)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), leave)
    planner.plan(["the first"])
    print("ready", flush=True)
    while True:
        time.sleep(0.02)
"""


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_record_forwards_signals_and_the_application_decides_how_to_exit(
    tmp_path: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        command(tmp_path / "t.jsonl.gz", "--", *python(EXITS_ON_SIGNAL)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (5, "leaving\n")
    assert errors.startswith("Recorded 2 requests to ")


@posix
def test_an_application_killed_by_a_signal_exits_with_the_status_of_shells(run: Run, tmp_path: Path) -> None:
    done = run(
        tmp_path / "t.jsonl.gz",
        "--",
        *python("import os, warmprefix; warmprefix.ContextPlanner().plan(['a']); os.kill(os.getpid(), 9)"),
    )
    assert done.returncode == 128 + 9
    assert done.stderr.startswith("Recorded 1 request to ")


@posix
@pytest.mark.parametrize(("leaves", "times"), [(False, 1), (True, 0)])
def test_ctrl_c_reaches_the_application_once(tmp_path: Path, leaves: bool, times: int) -> None:
    """The terminal sends it, the command does not repeat it; an application that left the terminal gets none."""
    counting = f"""
        import os, signal, time
        if {leaves}:
            os.setsid()
        seen = []
        signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
        print("ready", flush=True)
        time.sleep(1.5)
        print("seen", len(seen), flush=True)
    """
    terminal = python("import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))")
    with subprocess.Popen(
        [*terminal, *command(tmp_path / "t.jsonl", "--", *python(counting))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        output = b""
        while b"ready" not in output and (more := process.stdout.read(1000)):
            output += more
        process.stdin.write(b"\x03")
        while more := process.stdout.read(1000):
            output += more
    assert process.returncode == 0
    assert f"seen {times}\r\n".encode() in output
