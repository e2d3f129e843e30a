"""A planned batch as files for `vllm run-batch` and OpenAI's Batch API, and the answers from theirs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

from warmprefix.batch import BatchPlan
from warmprefix.errors import BatchFileError
from warmprefix_openai.batch_runner.journal import BatchResult

__all__ = ["file_ends", "numbered", "read_answers"]


def file_ends(
    sizes: Sequence[int], costs: Sequence[int], max_requests: int | None, max_bytes: int | None
) -> Iterator[int]:
    """Yield the end of each file: between the requests that share least, and not before the file is half full.

    Sizes are in bytes. A request's cost is the number of tokens that it shares with earlier ones, which a new file
    loses.
    """
    start, total = 0, len(sizes)
    while True:
        end, bytes_taken = start, 0
        while (
            end < total
            and (max_requests is None or end - start < max_requests)
            and (max_bytes is None or bytes_taken + sizes[end] <= max_bytes)
        ):
            bytes_taken += sizes[end]
            end += 1
        if end == total:
            yield end
            return
        half_full = start + (end - start + 1) // 2
        end = min(range(end, half_full - 1, -1), key=costs.__getitem__)
        yield end
        start = end


def numbered(path: Path, number: int) -> Path:
    """Return the path itself for the first file, then `night-2.jsonl` and so on."""
    if number == 1:
        return path
    plain = path.name.removesuffix(".gz")
    stem, extension = os.path.splitext(plain)
    return path.with_name(f"{stem}-{number}{extension}{path.name[len(plain) :]}")


def read_answers(batch: BatchPlan, paths: Sequence[str | os.PathLike[str]]) -> Iterator[BatchResult]:
    """Read the answers of a batch from files; `BatchRunner.read_jsonl` documents it."""
    found: dict[str, _Place] = {}
    names = [os.fspath(path) for path in paths]
    for name in names:
        with _opened(name) as file:
            start = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    place = _Place(name, start, number)
                    id = _result(place, line)["custom_id"]
                    if id not in batch.positions:
                        raise BatchFileError(name, number, f"no request of this batch is called {id!r}")
                    if id in found:
                        raise BatchFileError(
                            name,
                            number,
                            f"request {id!r} had a line before, in {found[id].path}, line {found[id].line}",
                        )
                    found[id] = place
                start += len(line)
    return _in_callers_order(batch, found, f"no line in {', '.join(names) or 'no file'}")


class _Place(NamedTuple):
    """The place of a result in a file."""

    path: str
    start: int
    """In bytes."""
    line: int


def _in_callers_order(batch: BatchPlan, found: Mapping[str, _Place], missing: str) -> Iterator[BatchResult]:
    with ExitStack() as stack:
        files = {path: stack.enter_context(_opened(path)) for path in {place.path for place in found.values()}}
        for planned in batch.in_callers_order():
            place = found.get(planned.id)
            if place is None:
                yield BatchResult(planned, None, missing, 0, None)
                continue
            file = files[place.path]
            file.seek(place.start)
            result = _result(place, file.readline())
            response = result.get("response") or {}
            answer, error = response.get("body"), result.get("error")
            if error is None and response.get("status_code") == 200 and answer and answer.get("choices"):
                yield BatchResult(planned, answer, None, 0, None)
            else:
                reason = _reason(response.get("status_code"), error or answer)
                yield BatchResult(planned, None, reason, 0, None)


def _opened(path: str) -> IO[bytes]:
    try:
        return open(path, "rb")
    except OSError as error:
        raise BatchFileError(path, None, f"it can't be read: {error.strerror}") from error


def _result(place: _Place, line: bytes) -> dict[str, Any]:
    try:
        result = json.loads(line)
    except ValueError as error:
        raise BatchFileError(place.path, place.line, "it is no JSON") from error
    if not isinstance(result, dict) or not isinstance(result.get("custom_id"), str):
        raise BatchFileError(place.path, place.line, "it is no result of a batch: it has no custom_id")
    return result


def _reason(status: object, error: object) -> str:
    """Return a line's reason for a failure, which services write in several shapes."""
    while isinstance(error, Mapping):
        error = error.get("message") or error.get("error") or json.dumps(dict(error))
    return f"status {status}: {error}"
