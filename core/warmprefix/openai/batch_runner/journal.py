"""The journal of a run: what has been answered, in a file that outlives the process.

A JSONL file: a header that says which batch it is of, then a line for every request that finished. A line reaches the
operating system before its result is handed out, so a killed process loses nothing but what was in flight. It is
forced to the disk when the run ends, in whatever way; a power cut before that can lose lines at the end, whose requests
are sent again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Mapping
from typing import Any

from warmprefix.batch.plan import PlannedRequest
from warmprefix.errors import BatchFileError
from warmprefix.openai.batch_runner.locking import lock
from warmprefix.openai.batch_runner.results import BatchResult

__all__ = ["Journal"]

_VERSION = 1
"""Raised with the file's format, and with whatever `PlannedRequest.messages` writes around what it is given."""


class Journal:
    """Keeps results in the file alone: in memory there is only where each of them stands, some 200 bytes."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        requests: Mapping[str, PlannedRequest],
        *,
        model: str,
        options: str,
        asked: str,
    ) -> None:
        """Open it, or begin it if there is none, and keep every other run out of it.

        Args:
            path: Of the file.
            requests: Those of the batch, by id.
            model: Who is asked.
            options: The digest of what every request is sent with.
            asked: The digest of all requests.

        Raises:
            BatchFileError: It is another batch's, or of another version, or in use, or damaged elsewhere than in its
                last line, or can't be read or written.
        """
        self.path = os.fspath(path)
        self._requests = requests
        self._lines: dict[str, tuple[int, int]] = {}
        self._size = 0
        header = {"warmprefix_journal": _VERSION, "model": model, "options": options, "requests": asked}
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            self._file = os.fdopen(descriptor, "r+b", buffering=0)
            with contextlib.ExitStack() as unless_read:
                unless_read.callback(self._file.close)
                if not lock(descriptor):
                    raise self._problem("another run is using it")
                self.answered: Collection[str] = self._read({**header, "count": len(requests)})
                unless_read.pop_all()
        except OSError as error:
            raise self._problem(f"it can't be opened: {error.strerror}") from error

    def put(self, result: BatchResult) -> None:
        """Write a result's line."""
        line: dict[str, Any] = {"id": result.id, "attempts": result.attempts}
        if result.error is None:
            line |= {"ttft": result.ttft, "completion": result.completion}
        else:
            line["error"] = result.error
        self._lines[result.id] = self._append(line)

    def take(self, id: str) -> BatchResult:
        """Read a result back."""
        start, length = self._lines[id]
        self._file.seek(start)
        line = json.loads(self._file.read(length))
        return BatchResult(
            self._requests[id], line.get("completion"), line.get("error"), line["attempts"], line.get("ttft")
        )

    def close(self) -> None:
        """Force it to the disk and let others in. Closing twice is harmless."""
        if not self._file.closed:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                raise self._problem(f"it can't be forced to the disk: {error.strerror}") from error
            finally:
                self._file.close()

    def _read(self, header: Mapping[str, Any]) -> set[str]:
        """Find what was answered, and cut off a line whose writing was cut off."""
        answered: set[str] = set()
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            first = lines.readline()
            if not first.endswith(b"\n"):
                if not _encoded(header).startswith(first):
                    raise self._problem("it is no journal of a batch", 1)
                self._file.truncate(0)
                self._append(header)
                return answered
            self._check_header(first, header)
            self._size = len(first)
            for number, line in enumerate(lines, start=2):
                if not line.endswith(b"\n"):
                    break
                self._check_line(number, line, answered)
                self._size += len(line)
        self._file.truncate(self._size)
        return answered

    def _check_header(self, line: bytes, expected: Mapping[str, Any]) -> None:
        found = self._parsed(1, line, "it is no journal of a batch")
        if "warmprefix_journal" not in found:
            raise self._problem("it is no journal of a batch", 1)
        version = found["warmprefix_journal"]
        if version != _VERSION:
            raise self._problem(f"it is of version {version!r}; this warmprefix knows version {_VERSION}", 1)
        if found.get("model") != expected["model"]:
            raise self._problem(f"it is of another run: of model {found.get('model')!r}, not {expected['model']!r}", 1)
        if found.get("options") != expected["options"]:
            raise self._problem("it is of another run: with other request options", 1)
        if found.get("requests") != expected["requests"]:
            raise self._problem(
                f"it is of another batch: of {found.get('count')} requests, not these {expected['count']}", 1
            )

    def _check_line(self, number: int, line: bytes, answered: set[str]) -> None:
        found = self._parsed(number, line, "it is damaged")
        id = found.get("id")
        if not isinstance(id, str) or id not in self._requests:
            raise self._problem(f"no request of this batch is called {id!r}", number)
        if id in answered:
            raise self._problem(f"request {id!r} was answered in an earlier line already", number)
        if not isinstance(found.get("attempts"), int) or ("completion" in found) == ("error" in found):
            raise self._problem("it is damaged", number)
        if "completion" in found:
            answered.add(id)
            self._lines[id] = (self._size, len(line))

    def _parsed(self, number: int, line: bytes, problem: str) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except ValueError as error:
            raise self._problem(problem, number) from error
        if not isinstance(found, dict):
            raise self._problem(problem, number)
        return found

    def _append(self, line: Mapping[str, Any]) -> tuple[int, int]:
        """Write a whole line, or none; returns where it starts and its length."""
        data, start = _encoded(line), self._size
        rest = memoryview(data)
        try:
            self._file.seek(start)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(start)
            raise self._problem(f"it can't be written: {error.strerror}") from error
        self._size += len(data)
        return start, len(data)

    def _problem(self, problem: str, line: int | None = None) -> BatchFileError:
        return BatchFileError(self.path, line, problem)


def _encoded(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n"
