"""Files that a replay writes: found to be writable before the run, and whole or not there after it."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO

from warmprefix.replay.errors import ReplayError

__all__ = ["check_writable", "text_file"]


def check_writable(path: Path) -> None:
    """Raise a ReplayError now rather than after the run."""
    problem = None
    if path.is_dir():
        problem = "it is a directory"
    elif not path.parent.is_dir():
        problem = f"there is no directory {path.parent}"
    elif not all(os.access(needed, os.W_OK) for needed in _needed(path)):
        problem = "permission denied"
    if problem is not None:
        raise ReplayError(f"Cannot write {path}: {problem}.")


def _needed(path: Path) -> list[Path]:
    """What must be writable for `text_file`."""
    if not path.exists():
        return [path.parent]
    return [path, path.parent] if path.is_file() else [path]


@contextmanager
def text_file(path: Path) -> Iterator[Callable[[str], object]]:
    """Write to a file, gzipped if its name ends in `.gz`: the same text makes the same bytes.

    It comes into being, or takes the place of an older one, when the block ends without an exception.

    Raises:
        ReplayError: It can't be written.
    """
    direct = path.exists() and not path.is_file()  # such as /dev/stdout
    part = path if direct else path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as raw, _packed(raw) if path.suffix == ".gz" else nullcontext(raw) as data:
            yield lambda text: data.write(text.encode("utf-8"))
        if not direct:
            part.replace(path)
    except OSError as error:
        raise ReplayError(f"Cannot write {path}: {error.strerror or error}.") from error
    finally:
        if not direct:
            part.unlink(missing_ok=True)


def _packed(raw: IO[bytes]) -> gzip.GzipFile:
    return gzip.GzipFile("", "wb", 6, raw, mtime=0)  # no name and no time: they would differ from run to run
