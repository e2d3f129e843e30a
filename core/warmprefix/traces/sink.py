"""Where a recorder writes: a fresh file, or a stream of the caller's."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
import zlib
from collections.abc import Iterator
from typing import Protocol, TextIO

__all__ = ["FileSink", "Sink", "StreamSink", "recorded_files"]

_GZIP = zlib.MAX_WBITS | 16


class Sink(Protocol):
    """Takes whole lines. Once a write has raised, or has been interrupted, only `abandon` may follow."""

    @property
    def path(self) -> str | None: ...
    def write(self, lines: str) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None:
        """Let go of it as it is: it holds all earlier writes."""
        ...


class FileSink:
    """A new file beside those that exist already, gzipped if its name ends in `.gz`.

    Each write reaches the operating system as a whole before it returns, so that a process may be killed at any time.
    A gzipped file is then one deflate stream that ends in a sync flush instead of gzip's own end. A write that fails
    in the middle, as on a full disk, is taken back.
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
        """End the file; harmless if it has ended."""
        if self._fd < 0:
            return
        try:
            if self._deflate is not None:
                self._append(self._deflate.flush())
        finally:
            self.abandon()

    def abandon(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BaseException:
            with contextlib.suppress(OSError):  # a pipe or a device: what went through it can't be taken back
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
    """The files that there are of those that recorders with this path make, in the order of their numbers."""
    folder, name = os.path.split(path)
    stem, extension = _parts(name)
    pattern = re.compile(f"{re.escape(stem)}(?:-([0-9]+))?{re.escape(extension)}")
    found = [(int(match[1] or 1), match[0]) for match in map(pattern.fullmatch, os.listdir(folder or ".")) if match]
    return [os.path.join(folder, name) for _, name in sorted(found)]


def _numbered(path: str) -> Iterator[str]:
    """The path itself, then the names that a recorder takes while the ones before are in use.

    >>> paths = _numbered("logs/day.jsonl.gz")
    >>> next(paths), next(paths), next(paths)
    ('logs/day.jsonl.gz', 'logs/day-2.jsonl.gz', 'logs/day-3.jsonl.gz')
    """
    yield path
    stem, extension = _parts(path)
    for number in itertools.count(2):
        yield f"{stem}-{number}{extension}"


def _parts(path: str) -> tuple[str, str]:
    """What stands before and behind the number."""
    plain = path.removesuffix(".gz")
    stem, _ = os.path.splitext(plain)
    return stem, path[len(stem) :]


def _create(path: str) -> tuple[int, str]:
    """Open a file that did not exist, so that no two processes ever write to one; or the device that `path` names."""
    flags = os.O_WRONLY | getattr(os, "O_BINARY", 0)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            return os.open(path, flags | getattr(os, "O_NONBLOCK", 0)), path
    for candidate in _numbered(path):
        with contextlib.suppress(FileExistsError):
            return os.open(candidate, flags | os.O_CREAT | os.O_EXCL, 0o666), candidate
    raise AssertionError("numbers never end")
