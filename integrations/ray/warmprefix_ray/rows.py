"""Rows of a dataset as requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from warmprefix.batch import BatchRequest
from warmprefix.blocks import ContextBlock
from warmprefix.errors import MissingExtraError

try:
    import pyarrow as pa
except ImportError as exc:
    raise MissingExtraError("ray", "pyarrow") from exc

__all__ = ["ROWS_AT_ONCE", "ReadRequest", "read_rows", "request_of_row"]

ROWS_AT_ONCE = 1_024
"""Rows of a table that are Python objects at the same time."""

ReadRequest = Callable[[Mapping[str, Any]], BatchRequest]
"""Function that makes a request from a row. It runs in Ray's workers."""


def request_of_row(row: Mapping[str, Any]) -> BatchRequest:
    """Return the request of a row with the columns `id` and `blocks`.

    `blocks` is a list of texts, or of structs with `text`, and optionally `id`, `tokens`, `score`, `pinned` and
    `follows`. The columns `question`, `tenant` and `order_locked` are optional.

    Raises:
        KeyError: A column is missing.
        TypeError: A value has a different type.
        ValueError: A value is out of range.
    """
    blocks = [block if isinstance(block, str) else _block(block) for block in row["blocks"]]
    return BatchRequest(
        row["id"],
        blocks,
        row.get("question") or "",
        tenant=row.get("tenant"),
        order_locked=bool(row.get("order_locked")),
    )


def _block(fields: Mapping[str, Any]) -> ContextBlock:
    if not isinstance(fields, Mapping):
        raise TypeError(f"a block must be a text or a struct with a text, got {type(fields).__name__}")
    names = ("id", "tokens", "score", "pinned", "follows")
    return ContextBlock(fields["text"], **{name: fields.get(name) for name in names})


def read_rows(table: pa.Table, read: ReadRequest) -> Iterator[BatchRequest | str]:
    """Yield each row's request, or the reason why the row has no request.

    Whatever `read` raises is such a reason: one bad row must not end a job of millions.
    """
    for batch in table.to_batches(max_chunksize=ROWS_AT_ONCE):
        for row in batch.to_pylist():
            yield _request_or_reason(row, read)


def _request_or_reason(row: Mapping[str, Any], read: ReadRequest) -> BatchRequest | str:
    try:
        request: object = read(row)
    except Exception as error:  # the caller's function may raise anything
        return f"{type(error).__name__}: {error}"
    if isinstance(request, BatchRequest):
        return request
    return f"TypeError: read must return a BatchRequest, got {type(request).__name__}"
