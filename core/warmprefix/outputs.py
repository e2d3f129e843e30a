"""Files that a command writes: found to be writable before the work, and whole or not there after it."""

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
    """A file can't be written; the message says which and why, for the person at the keyboard."""


def check_writable(path: Path) -> None:
    """Raise an OutputError now rather than after the run."""
    file = _meant(path)
    problem = None
    if file.is_dir():
        problem = "it is a directory"
    elif not file.parent.is_dir():
        problem = f"there is no directory {file.parent}"
    elif not all(os.access(needed, os.W_OK) for needed in _needed(file)):
        problem = "permission denied"
    if problem is not None:
        raise OutputError(f"Cannot write {path}: {problem}.")


def _meant(path: Path) -> Path:
    """The file itself where a link leads to it; a device, such as /dev/stdout, as it is called."""
    return path if _is_device(path) else Path(os.path.realpath(path))


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _needed(file: Path) -> list[Path]:
    """What must be writable for `text_file`."""
    if not file.exists():
        return [file.parent]
    return [file, file.parent] if file.is_file() else [file]


@contextmanager
def text_file(path: Path) -> Iterator[Callable[[str], object]]:
    """Write to a file, gzipped if its name ends in `.gz`: the same text makes the same bytes.

    It comes into being, or takes the place of an older one, when the block ends without an exception.

    Raises:
        OutputError: It can't be written.
    """
    direct = _is_device(path)
    file = _meant(path)
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
    """For what is printed: a full disk is an OutputError, and a reader who leaves early is none."""
    try:
        yield
        if sys.stdout is not None:  # as it is where it was closed
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"Cannot write standard output: {error.strerror or error}.") from error


def _packed(raw: IO[bytes]) -> gzip.GzipFile:
    return gzip.GzipFile("", "wb", 6, raw, mtime=0)  # no name and no time: they would differ from run to run
