"""Recorders and their files with real processes and disks: killed, forked, interrupted, full."""

from __future__ import annotations

import gzip
import io
import logging
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from warmprefix.errors import TraceError
from warmprefix_telemetry.trace_files import recorded_files
from warmprefix_telemetry.trace_recorder import TraceRecorder
from warmprefix_tools.traces.reader import read_trace

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
EITHER_FORMAT = pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def requests(path: Path) -> int:
    return len(read_trace(path).requests)


# -- the file ------------------------------------------------------------------------------------------------------


def test_a_closed_gz_file_is_valid_gzip(tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "t.jsonl.gz") as recorder:
        recorder.record(["a"])
        recorder.record(["a"])
    assert gzip.decompress((tmp_path / "t.jsonl.gz").read_bytes()).count(b"\n") == 4


@posix
@EITHER_FORMAT
def test_only_its_owner_reads_a_file(tmp_path: Path, name: str) -> None:
    mask = os.umask(0o022)
    try:
        with TraceRecorder(tmp_path / name) as recorder:
            recorder.record(["a"])
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


@EITHER_FORMAT
def test_each_request_is_readable_before_the_next(tmp_path: Path, name: str) -> None:
    with TraceRecorder(tmp_path / name) as recorder:
        for n in range(5):
            recorder.record([f"text {n}"])
            assert requests(tmp_path / name) == n + 1


@EITHER_FORMAT
def test_existing_files_are_not_touched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"precious")
    recorders = [TraceRecorder(tmp_path / name) for _ in range(3)]
    for recorder in recorders:
        assert recorder.path is None
        recorder.record(["a"])
        recorder.close()
    stem, suffix = name.split(".", 1)
    expected = [
        str(tmp_path / file) for file in (name, f"{stem}-2.{suffix}", f"{stem}-3.{suffix}", f"{stem}-4.{suffix}")
    ]
    (tmp_path / f"{stem}-x.{suffix}").touch()
    assert recorded_files(str(tmp_path / name)) == expected
    assert [recorder.path for recorder in recorders] == expected[1:]
    assert (tmp_path / name).read_bytes() == b"precious"
    assert [requests(Path(path)) for path in expected[1:]] == [1, 1, 1]


def test_without_requests_no_file_is_created(tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "t.jsonl"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_relative_path_is_resolved_when_the_recorder_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    recorder = TraceRecorder("t.jsonl")
    monkeypatch.chdir("elsewhere")
    recorder.record(["a"])
    recorder.close()
    assert requests(tmp_path / "t.jsonl") == 1


@EITHER_FORMAT
def test_requests_after_close_are_only_counted(tmp_path: Path, name: str) -> None:
    recorder = TraceRecorder(tmp_path / name)
    recorder.record(["a"])
    recorder.close()
    recorder.close()
    recorder.record(["a"])
    assert (recorder.requests, recorder.lost, requests(tmp_path / name)) == (1, 1, 1)


@EITHER_FORMAT
def test_an_unclosed_recorder_is_closed_at_exit(tmp_path: Path, name: str) -> None:
    run(
        "import sys, warmprefix_telemetry.trace_recorder as t; r = t.TraceRecorder(sys.argv[1]); r.record(['a'])",
        tmp_path / name,
    )
    data = (tmp_path / name).read_bytes()
    assert (gzip.decompress(data) if name.endswith(".gz") else data).count(b"\n") == 3


# -- failures -----------------------------------------------------------------------------------------------


@posix
@EITHER_FORMAT
def test_a_killed_process_leaves_every_recorded_request(tmp_path: Path, name: str) -> None:
    script = """
        import sys, warmprefix, warmprefix_telemetry.trace_recorder
        planner = warmprefix.ContextPlanner(recorder=warmprefix_telemetry.trace_recorder.TraceRecorder(sys.argv[1]))
        n = 0
        while True:
            planner.plan([f"text {n} {i}" for i in range(n % 40)], conversation=str(n % 7))
            n += 1
            print(n, flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / name)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = "".join(process.stdout.readline() for _ in range(500))
        process.kill()
        printed += process.stdout.read()
    assert process.returncode == -signal.SIGKILL
    last = int(printed.split()[-1])
    assert requests(tmp_path / name) in (last, last + 1)


@EITHER_FORMAT
def test_a_partly_written_request_is_skipped_with_a_warning(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A process can be killed in the middle of a write; every earlier request stays readable."""
    ends: list[int] = []
    with TraceRecorder(tmp_path / "whole" / name) as recorder:
        (tmp_path / "whole").mkdir()
        for n in range(4):
            recorder.record([f"text {n} é {i}" for i in range(3)], conversation="é")
            ends.append((tmp_path / "whole" / name).stat().st_size)
        data = (tmp_path / "whole" / name).read_bytes()
    for cut in range(ends[0], ends[-1]):
        (tmp_path / name).write_bytes(data[:cut])
        caplog.clear()
        read = requests(tmp_path / name)
        assert sum(end <= cut for end in ends) <= read <= sum(end <= cut + 9 for end in ends)  # all but a line's end
        assert (cut in ends) <= (not caplog.records)
        assert all(f"{tmp_path / name}, line " in record.getMessage() for record in caplog.records)
    (tmp_path / name).write_bytes(data[: ends[0] // 2])
    with pytest.raises(TraceError):
        read_trace(tmp_path / name)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_only_ends_the_recording(caplog: pytest.LogCaptureFixture) -> None:
    recorder = TraceRecorder("/dev/full")
    for _ in range(3):
        recorder.record(["a"])
    recorder.close()
    assert (recorder.requests, recorder.lost) == (0, 3)
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert warning.getMessage() == "trace recording ended: [Errno 28] No space left on device"
    assert not warning.exc_info


@posix
@EITHER_FORMAT
def test_a_disk_that_fills_up_leaves_whole_requests(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The size limit cuts a line in the middle; the recorder removes the partial line."""
    done = run(
        """
        import resource, sys, warmprefix, warmprefix_telemetry.trace_recorder
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_001, 10_001))
        recorder = warmprefix_telemetry.trace_recorder.TraceRecorder(sys.argv[1])
        for n in range(1000):
            recorder.record([f"text {n} {i}" for i in range(7)])
        recorder.close()
        print(recorder.requests, recorder.lost)
        """,
        tmp_path / name,
    )
    recorded, lost = map(int, done.stdout.split())
    assert done.returncode == 0
    assert done.stderr == "trace recording ended: [Errno 27] File too large\n"
    assert recorded > 10
    assert recorded + lost == 1000
    assert requests(tmp_path / name) == recorded
    assert not caplog.records


@pytest.mark.parametrize("path", ["absent/t.jsonl", "file/t.jsonl", "."])
def test_a_path_that_cannot_be_written_ends_the_recording(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    recorder = TraceRecorder(tmp_path / path)
    recorder.record(["a"])
    recorder.record(["a"])
    assert (recorder.requests, recorder.lost, recorder.path) == (0, 2, None)
    assert len(caplog.records) == 1


def test_a_stream_that_fails_ends_the_recording(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    recorder = TraceRecorder(stream)
    recorder.record(["a"])
    stream.close()
    recorder.record(["a"])
    recorder.record(["a"])
    assert (recorder.requests, recorder.lost) == (1, 2)
    assert [record.getMessage() for record in caplog.records] == ["trace recording ended: I/O operation on closed file"]


class Interrupted(io.StringIO):
    """A stream whose writer is interrupted in the middle of the third request."""

    writes = 0

    def write(self, lines: str) -> int:
        self.writes += 1
        if self.writes == 3:
            super().write(lines[:5])
            raise KeyboardInterrupt
        return super().write(lines)


def test_an_interrupt_reaches_the_caller_and_ends_the_recording() -> None:
    recorder = TraceRecorder(Interrupted())
    recorder.record(["a"])
    recorder.record(["a"])
    with pytest.raises(KeyboardInterrupt):
        recorder.record(["a"])
    recorder.record(["a"])
    assert (recorder.requests, recorder.lost) == (2, 2)


@posix
@EITHER_FORMAT
def test_an_interrupt_while_writing_leaves_a_whole_file(tmp_path: Path, name: str) -> None:
    """A timer's signal raises exceptions at arbitrary places in `record`."""
    script = """
        import signal, sys, warmprefix, warmprefix_telemetry.trace_recorder
        class Alarm(BaseException): pass
        def ring(number, frame): raise Alarm
        signal.signal(signal.SIGALRM, ring)
        recorders = []
        for n in range(60):
            recorder = warmprefix_telemetry.trace_recorder.TraceRecorder(sys.argv[1])
            recorders.append(recorder)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + n * 0.0001)
                for i in range(20_000):
                    recorder.record([f"text {i}"], conversation="c")
            except Alarm:
                pass
            recorder.record(["afterwards"])
            recorder.close()
        print(*[f"{r.path} {r.requests}" for r in recorders if r.path and r.requests], sep="\\n")
    """
    done = run(script, tmp_path / name)
    assert (done.returncode, done.stderr) == (0, "")
    written = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
    assert written
    for path, count in written:
        assert requests(Path(path)) in (int(count), int(count) + 1)  # interrupted between writing and counting


# -- processes -----------------------------------------------------------------------------------------------------


@posix
@EITHER_FORMAT
def test_a_forked_process_writes_its_own_file(tmp_path: Path, name: str) -> None:
    done = run(
        """
        import os, sys, warmprefix, warmprefix_telemetry.trace_recorder
        recorder = warmprefix_telemetry.trace_recorder.TraceRecorder(sys.argv[1])
        recorder.record(["before"])
        child = os.fork()
        if child == 0:
            assert (recorder.path, recorder.requests) == (None, 0)
            for n in range(3):
                recorder.record([f"child {n}"])
            sys.exit(0)  # not os._exit: exit handlers must not touch the parent's file
        os.waitpid(child, 0)
        recorder.record(["after"])
        print(recorder.requests)
        """,
        tmp_path / name,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
    parents, childs = recorded_files(str(tmp_path / name))
    assert (requests(Path(parents)), requests(Path(childs))) == (2, 3)


@posix
def test_a_process_forked_while_another_thread_records_does_not_wait_for_it(tmp_path: Path) -> None:
    done = run(
        """
        import os, sys, warmprefix, warmprefix_telemetry.trace_recorder
        recorder = warmprefix_telemetry.trace_recorder.TraceRecorder(sys.argv[1])
        recorder._lock.acquire()  # as by a thread that the child does not have
        child = os.fork()
        if child == 0:
            recorder.record(["child"])
            sys.exit(0)
        recorder._lock.release()
        print(os.waitpid(child, 0)[1])
        """,
        tmp_path / "t.jsonl",
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert requests(tmp_path / "t.jsonl") == 1


@posix
def test_a_forked_process_writes_nothing_to_its_parents_stream() -> None:
    done = run(
        """
        import os, sys, warmprefix, warmprefix_telemetry.trace_recorder
        recorder = warmprefix_telemetry.trace_recorder.TraceRecorder(sys.stdout)
        recorder.record(["parent"])
        child = os.fork()
        if child == 0:
            recorder.record(["child"])
            assert recorder.lost == 1
            sys.exit(0)
        sys.exit(os.waitpid(child, 0)[1])
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 3


def test_concurrent_processes_each_write_their_own_file(tmp_path: Path) -> None:
    script = """
        import sys, time, warmprefix, warmprefix_telemetry.trace_recorder
        recorder = warmprefix_telemetry.trace_recorder.TraceRecorder(sys.argv[1])
        time.sleep(max(0, float(sys.argv[2]) - time.time()))
        for n in range(50):
            recorder.record([f"text {n}"])
    """
    together = time.time() + 1
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "t.jsonl"), str(together)]
    for process in [subprocess.Popen(command) for _ in range(4)]:
        assert process.wait(timeout=60) == 0
    files = recorded_files(str(tmp_path / "t.jsonl"))
    assert [requests(Path(path)) for path in files] == [50, 50, 50, 50]
