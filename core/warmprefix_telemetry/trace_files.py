"""The places that a recorder writes to: a new file, or a stream of the caller's."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
import zlib
from typing import TextIO

__all__ = ["StreamSink", "TraceFile", "recorded_files"]

_GZIP = zlib.MAX_WBITS | 16


class TraceFile:
    """A new file next to those that exist already, gzipped if its name ends in `.gz`.

    Each write reaches the operating system as a whole before it returns, so that a process may be killed at any time.
    A gzipped file is then one deflate stream that ends in a sync flush instead of gzip's own end. A write that fails
    in the middle, as on a full disk, is undone. Once a write has raised or was interrupted, only `abandon` may follow.
    """

    def __init__(self, path: str) -> None:
        self._fd, self.path = _create(path)
        self._size = 0
        self._deflate = zlib.compressobj(wbits=_GZIP) if path.endswith(".gz") else None

    def write(self, lines: str) -> None:
        data = lines.encode("utf-8")
        if self._deflate is not None:
            data = self._deflate.compress(data) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        self._append(data)

    def close(self) -> None:
        """End the file. Idempotent."""
        try:
            if self._fd >= 0 and self._deflate is not None:
                self._append(self._deflate.flush())
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file as it is: it holds all earlier writes."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BaseException:
            with contextlib.suppress(OSError):  # a pipe or a device takes nothing back
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)


class StreamSink:
    """A text stream that the caller opened, and closes."""

    path = None

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, lines: str) -> None:
        self._stream.write(lines)
        self._stream.flush()

    def close(self) -> None: ...
    def abandon(self) -> None: ...


def recorded_files(path: str) -> list[str]:
    """Return the existing files that recorders with this path created, in the order of their numbers."""
    folder, name = os.path.split(path)
    stem, extension = _split(name)
    pattern = re.compile(f"{re.escape(stem)}(?:-([0-9]+))?{re.escape(extension)}")
    found = [(int(match[1] or 1), match[0]) for match in map(pattern.fullmatch, os.listdir(folder or ".")) if match]
    return [os.path.join(folder, name) for _, name in sorted(found)]


def _create(path: str) -> tuple[int, str]:
    """Open a file that did not exist, so that no two processes write to one; or the device that `path` names.

    Only its owner can read it, because it may hold texts.
    """
    flags = os.O_WRONLY | getattr(os, "O_BINARY", 0)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            return os.open(path, flags | getattr(os, "O_NONBLOCK", 0)), path
    stem, extension = _split(path)
    for candidate in itertools.chain([path], (f"{stem}-{number}{extension}" for number in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            return os.open(candidate, flags | os.O_CREAT | os.O_EXCL, 0o600), candidate
    raise AssertionError("unreachable: the numbers never end")


def _split(path: str) -> tuple[str, str]:
    """Return the parts of the path before and after the number.

    >>> _split("logs/day.jsonl.gz")
    ('logs/day', '.jsonl.gz')
    """
    stem, _ = os.path.splitext(path.removesuffix(".gz"))
    return stem, path[len(stem) :]
