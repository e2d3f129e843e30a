"""Files that a command writes: checked before the work, and after it either complete or absent."""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO

from warmprefix.errors import WarmprefixError

__all__ = ["OutputError", "check_writable", "standard_output", "text_file"]


class OutputError(WarmprefixError):
    """A file can't be written; the message names the file and the reason, for the person at the keyboard."""


def check_writable(path: Path) -> None:
    """Raise an `OutputError` if the file can't be written, before the work rather than after it."""
    file = _target(path)
    problem = None
    if file.is_dir():
        problem = "it is a directory"
    elif not file.parent.is_dir():
        problem = f"there is no directory {file.parent}"
    elif not all(os.access(needed, os.W_OK) for needed in _needed(file)):
        problem = "permission denied"
    if problem is not None:
        raise OutputError(f"Cannot write {path}: {problem}.")


def _target(path: Path) -> Path:
    """Return the file that a link leads to; a device, such as /dev/stdout, under its own name."""
    return path if _is_device(path) else Path(os.path.realpath(path))


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _needed(file: Path) -> list[Path]:
    """Return the paths that must be writable for `text_file`."""
    if not file.exists():
        return [file.parent]
    return [file, file.parent] if file.is_file() else [file]


@contextmanager
def text_file(path: Path) -> Iterator[Callable[[str], object]]:
    """Write to a file, gzipped if its name ends in `.gz`: the same text gives the same bytes.

    The file appears, or replaces an older one, when the block ends without an exception.

    Raises:
        OutputError: It can't be written.
    """
    direct = _is_device(path)
    file = _target(path)
    part = file if direct else file.with_name(f"{file.name}.part")
    try:
        with part.open("wb") as raw, _packed(raw) if path.suffix == ".gz" else nullcontext(raw) as data:
            yield lambda text: data.write(text.encode("utf-8"))
        if not direct:
            part.replace(file)
    except OSError as error:
        raise OutputError(f"Cannot write {path}: {error.strerror or error}.") from error
    finally:
        if not direct:
            part.unlink(missing_ok=True)


@contextmanager
def standard_output() -> Iterator[None]:
    """Turn a failure of printing, such as a full disk, into an `OutputError`; a reader may leave early."""
    try:
        yield
        if sys.stdout is not None:  # None if it was closed
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"Cannot write standard output: {error.strerror or error}.") from error


def _packed(raw: IO[bytes]) -> gzip.GzipFile:
    return gzip.GzipFile("", "wb", 6, raw, mtime=0)  # no name and no time, because they differ between runs
