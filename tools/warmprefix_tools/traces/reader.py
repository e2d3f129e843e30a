"""Reader of trace files, which checks every line."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from warmprefix.errors import MissingExtraError, TraceError
from warmprefix_telemetry.trace_format import MAX_TRACE_TOKENS, RECORDED_FIELD
from warmprefix_tools.inputs import InputError, opened
from warmprefix_tools.traces.trace import BlockId, Trace, TraceRequest

try:
    from pydantic import BaseModel, ConfigDict, Field, ValidationError
    from pydantic_core import ErrorDetails, from_json
except ImportError as exc:
    raise MissingExtraError("cli", "pydantic") from exc

__all__ = ["read_trace"]

_log = logging.getLogger("warmprefix")

_Tokens = Annotated[int, Field(ge=0, le=MAX_TRACE_TOKENS)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


def read_trace(path: str | os.PathLike[str], limit: int | None = None) -> Trace:
    """Return the trace in a JSONL file, gzipped or not, with any name.

    Every line read is checked. A file that ends in the middle of a line is an error, unless a recorder wrote it: then
    its process was killed, so the unfinished line is left out with a warning.

    Of two blocks with one text, the first stands for both.

    Args:
        path: The file.
        limit: Most requests to read; the rest of the file is not looked at, also for gold.

    Raises:
        TraceError: The file cannot be read or is no trace.
        ValueError: `limit` is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be 1 or more, got {limit}")
    shown = os.fspath(path)
    number = 0
    contents = _Contents(Path(shown))
    try:
        with opened(shown) as file:
            for number, line in enumerate(file.lines(), start=1):
                if line.isspace():
                    continue
                contents.add(line, number)
                if len(contents.requests) == limit:
                    break
        return contents.trace()
    except (InputError, _BadLineError) as error:
        place = error.line if isinstance(error, InputError) else number
        if error.unfinished and contents.recorded:
            _log.warning("%s, line %s: left out, because the recorder was stopped in the middle of it", shown, place)
            return contents.trace()
        raise TraceError(shown, place, str(error)) from error.__cause__


class _BadLineError(Exception):
    """A line is wrong; the message gives the reason, without the place."""

    def __init__(self, problem: str, *, unfinished: bool = False) -> None:
        super().__init__(problem)
        self.unfinished = unfinished
        """True if the file ends in the middle of a line."""


# -- contents of one line ------------------------------------------------------------------------------------------


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _HeaderLine(_Line):
    name: str | None = None
    k: Annotated[int, Field(ge=1)] | None = None


class _BlockLine(_Line):
    block: BlockId
    tokens: _Tokens
    text: str | None = None


class _ExchangeLine(_Line):
    request: dict[str, Any]
    context: list[Annotated[list[Any], Field(min_length=2, max_length=2)]] = []
    tenant: str | None = None
    session_id: str | None = None
    time: Annotated[_Finite, Field(ge=0)] | None = None


class _RequestLine(_Line):
    request: BlockId
    blocks: list[BlockId]
    conversation: BlockId | None = None
    turn: Annotated[int, Field(ge=0)] | None = None
    query_tokens: _Tokens = 0
    scores: list[_Finite] = []
    scope: str | None = None
    t: Annotated[_Finite, Field(ge=0)] | None = None
    k: Annotated[int, Field(ge=1)] | None = None
    gold: list[BlockId] = []


class _GoldLine(_Line):
    request: BlockId
    gold: list[BlockId]


_ALLOWED = {
    "name": "a string or null",
    "k": "an integer, 1 or more, or null",
    "block": "a string or an integer",
    "tokens": f"an integer from 0 to {MAX_TRACE_TOKENS}",
    "text": "a string or null",
    "gold": "a list of strings and integers",
    "request": "a string or an integer",
    "blocks": "a list of strings and integers",
    "conversation": "a string, an integer or null",
    "turn": "an integer, 0 or more, or null",
    "query_tokens": f"an integer from 0 to {MAX_TRACE_TOKENS}",
    "scores": "a list of finite numbers",
    "scope": "a string or null",
    "t": "seconds, a finite number, 0 or more, or null",
    "context": "a list of pairs of a block and its tokens",
    "tenant": "a string or null",
    "session_id": "a string or null",
    "time": "seconds, a finite number, 0 or more, or null",
}

_LineT = TypeVar("_LineT", bound=_Line)


def _validated(kind: type[_LineT], fields: dict[str, Any]) -> _LineT:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _BadLineError(_problem(error.errors(include_url=False)[0])) from None


def _problem(details: ErrorDetails) -> str:
    name, *inside = details["loc"]
    allowed = _ALLOWED[str(name)]
    if details["type"] == "missing":
        return f"{name} is missing; it must be {allowed}"
    place = f" at place {inside[0]}" if inside and isinstance(inside[0], int) else ""
    return f"{name} must be {allowed}, got {_shown(details['input'])}{place}"


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


# -- contents of the lines together -----------------------------------------------------------------------------------


class _Contents:
    """Contents of the lines read so far."""

    def __init__(self, path: Path) -> None:
        self.requests: list[TraceRequest] = []
        self._path = path
        self._fields: dict[str, Any] | None = None
        self._is_of_gateway: bool | None = None
        """True for what `warmprefix serve --record` writes; None before the first line."""
        self._header = _HeaderLine()
        self._began: float | None = None
        """Time of the first request of a gateway."""
        self._declared: dict[BlockId, int] = {}
        self._declared_on: dict[BlockId, int] = {}
        self._requested_on: dict[BlockId, int] = {}
        self._texts: dict[BlockId, str] = {}
        self._with_text: dict[str, BlockId] = {}
        """The first block of each text."""
        self._gold: dict[BlockId, list[BlockId]] = {}
        """Gold of each request, also of what follows it."""
        self._turns: Counter[BlockId] = Counter()

    def add(self, line: bytes, number: int) -> None:
        fields = _json_object(line)
        is_block, is_request = "block" in fields, "request" in fields
        if isinstance(fields.get("request"), dict) and self._is_of_gateway is not False:
            self._is_of_gateway = True
            self._add_exchange(fields, number)
        elif self._is_of_gateway:
            raise _BadLineError("no request of a gateway, as the lines above are")
        elif self._fields is None:
            if is_block or is_request:
                raise _BadLineError(
                    f'a {"block" if is_block else "request"} line, but a trace begins with a header: {{"name": ...}}'
                )
            self._fields, self._header = fields, _validated(_HeaderLine, fields)
            self._is_of_gateway = False
        elif is_request and not is_block and "gold" in fields and "blocks" not in fields:
            later = _validated(_GoldLine, fields)
            self._gold.setdefault(later.request, []).extend(later.gold)
        elif is_request and not is_block:
            self._add_request(_validated(_RequestLine, fields), number)
        elif is_block and not is_request:
            self._add_block(_validated(_BlockLine, fields), number)
        else:
            raise _BadLineError(_unknown_kind(fields))

    def _add_exchange(self, fields: dict[str, Any], number: int) -> None:
        """Add a request of a gateway, if it had a context."""
        exchange = _validated(_ExchangeLine, fields)
        for block, tokens in exchange.context:
            self._add_block(_validated(_BlockLine, {"block": block, "tokens": tokens}), number)
        if exchange.context:
            if self._began is None:
                self._began = exchange.time
            line = {
                "request": number,
                "blocks": [block for block, _ in exchange.context],
                "conversation": exchange.session_id,
                "scope": json.dumps([exchange.tenant, exchange.request.get("model")]),
                "t": None if exchange.time is None else max(exchange.time - (self._began or 0.0), 0.0),
            }
            self._add_request(_validated(_RequestLine, line), number)

    def _add_block(self, line: _BlockLine, number: int) -> None:
        declared = self._declared.setdefault(line.block, line.tokens)
        first = self._declared_on.setdefault(line.block, number)
        if declared != line.tokens:
            raise _BadLineError(
                f"block {_shown(line.block)} has {line.tokens} tokens here and {declared} on line {first};"
                " a block has one length"
            )
        if line.text and not line.text.isspace():
            if self._texts.setdefault(line.block, line.text) != line.text:
                raise _BadLineError(f"block {_shown(line.block)} has another text above; a block has one text")
            self._with_text.setdefault(line.text, line.block)

    def _add_request(self, line: _RequestLine, number: int) -> None:
        blocks = tuple(line.blocks)
        if len(set(blocks)) != len(blocks):
            twice = next(block for i, block in enumerate(blocks) if block in blocks[:i])
            raise _BadLineError(f"block {_shown(twice)} comes twice in blocks; a request names a block once")
        declared = self._declared
        for block in blocks:
            if block not in declared:
                raise _BadLineError(
                    f"block {_shown(block)} is in blocks, but no line above declares it:"
                    f' {{"block": {_shown(block)}, "tokens": ...}}'
                )
        if line.scores and len(line.scores) != len(blocks):
            raise _BadLineError(
                f"{len(line.scores)} scores for {len(blocks)} blocks; there must be one per block, or none"
            )
        first = self._requested_on.setdefault(line.request, number)
        if first != number:
            raise _BadLineError(f"request {_shown(line.request)} stands on line {first} too; each has its own id")
        if line.gold:
            self._gold.setdefault(line.request, []).extend(line.gold)
        places: dict[BlockId, int] = {}
        for place, block in enumerate(blocks):
            places.setdefault(self._first_name(block), place)
        turn = line.turn
        if line.conversation is not None:
            self._turns[line.conversation] += 1
            turn = self._turns[line.conversation] if turn is None else turn
        self.requests.append(
            TraceRequest(
                request=line.request,
                blocks=tuple(places),
                conversation=line.conversation,
                turn=turn or 0,
                query_tokens=line.query_tokens,
                scores=tuple([line.scores[place] for place in places.values()]) if line.scores else (),
                scope=line.scope,
                seconds=line.t,
                k=line.k,
            )
        )

    def _first_name(self, block: BlockId) -> BlockId:
        """Return the first block with the same text."""
        return self._with_text[self._texts[block]] if block in self._texts else block

    @property
    def recorded(self) -> bool:
        """True if a recorder wrote the file, by its header, and it holds a request."""
        is_recorded = self._is_of_gateway or (self._fields is not None and RECORDED_FIELD in self._fields)
        return is_recorded and bool(self.requests)

    def trace(self) -> Trace:
        if self._is_of_gateway and not self.requests:
            raise InputError(
                "requests of a gateway without retrieved contexts;"
                " `warmprefix serve --reorder tags --record FILE` finds them",
                None,
            )
        if self._fields is None and not self._is_of_gateway:
            raise InputError("empty; a trace begins with a header line", None)
        if not self.requests:
            raise InputError('no request in it; a trace has lines like {"request": 0, "blocks": [...]}', None)
        requests = [
            replace(request, gold=tuple(dict.fromkeys(map(self._first_name, self._gold[request.request]))))
            if request.request in self._gold
            else request
            for request in self.requests
        ]
        named = {block for request in requests for block in request.blocks}
        return Trace(
            name=self._header.name or _stem(self._path),
            requests=tuple(requests),
            tokens={block: self._declared[block] for request in requests for block in request.blocks},
            k=self._header.k,
            header=self._fields or {},
            texts={block: text for block, text in self._texts.items() if block in named},
        )


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        fields = from_json(line, allow_inf_nan=False)
    except ValueError as error:
        raise _BadLineError(_json_problem(line, error), unfinished=not line.endswith(b"\n")) from None
    if not isinstance(fields, dict):
        raise _BadLineError(f"each line must be a JSON object, got {_shown(fields)}")
    return fields


def _json_problem(line: bytes, error: ValueError) -> str:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as undecodable:
        return f"not UTF-8: byte 0x{line[undecodable.start]:02x} at column {undecodable.start + 1}"
    # jiter counts lines and columns in its input, which is one line.
    reason = str(error).replace(" at line 1 column", " at column")
    if not line.endswith(b"\n"):
        reason += ", where the file ends"
    return f"not JSON: {reason}; got {_shown(text.strip())}"


def _unknown_kind(fields: dict[str, Any]) -> str:
    if "block" in fields:
        return 'both "block" and "request" in one line; a line declares a block or is a request'
    if "query" in fields:
        return (
            "a query with its text, but no blocks: this is a bundle of texts, not a trace; in a trace,"
            ' {"request": 0, "blocks": [...]} holds what a retriever returned'
        )
    return f'neither "block" nor "request" in {_shown(sorted(fields))}; only the first line is a header'


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl") or path.name
