"""The trace format, and the lines that a recorder writes.

A trace file is JSONL, gzipped when its name ends in `.gz`: a header line, then a line for each block and a line for
each request, each block before the first request that names it.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from warmprefix.blocks import ContextBlock

__all__ = ["MAX_TRACE_TOKENS", "RECORDED_FIELD", "RequestLines", "RequestScope", "is_name"]

MAX_TRACE_TOKENS = 1_000_000_000
"""Greatest length in a trace: longer than any prompt, and small enough to add up anywhere."""

RECORDED_FIELD = "recorded"
"""Header field in which a recorder notes the date."""

_MAX_ID_CHARACTERS = 256
_GENERATED_NAME = re.compile(r"[0-9a-f]{32}~\d+")


class RequestScope(NamedTuple):
    """Requests that differ in any of these share nothing."""

    tenant: str | None
    model: str | None
    preamble: str | None


class RequestLines:
    """The lines of a trace that is being recorded. Not thread-safe.

    Each text has one name, and each name has one text and one length. The first `max_blocks` texts are remembered:
    each is named by its first id, or by its fingerprint if that id is missing, names another text, or is not valid
    (empty, longer than 256 characters, not encodable as UTF-8, or the text itself). Fingerprint and length name every
    later text, so that it has the same name and length if it returns after it was forgotten.
    """

    def __init__(self, *, text: bool, max_blocks: int, max_conversations: int) -> None:
        self._text = text
        self._max_blocks = max_blocks
        self._max_conversations = max_conversations
        self._names: dict[bytes, str] = {}
        self._owners: dict[str, bytes] = {}
        self._generated: OrderedDict[str, None] = OrderedDict()
        self._turns: OrderedDict[tuple[str | None, str], tuple[int, int]] = OrderedDict()
        self._conversations = self._requests = 0
        self._key = os.urandom(16)
        self._started: float | None = None

    def header(self, name: str | None, path: str | None) -> str:
        """Return the first line; without a `name`, the file at `path` names the trace."""
        if name is None:
            name = "recorded" if path is None else os.path.basename(path).removesuffix(".gz").removesuffix(".jsonl")
        fields = {
            "name": _encodable(name),
            "source": "recorded by warmprefix",
            RECORDED_FIELD: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "notes": "tokens: as the application gave them, or a quarter of the UTF-8 bytes",
        }
        return _json_line(fields)

    def add(
        self,
        blocks: Sequence[ContextBlock],
        conversation: str | None,
        scope: RequestScope,
        query_tokens: int,
        k: int | None = None,
        id: str | None = None,
    ) -> str:
        """Return the lines of one request: those of its new blocks, then its own; its number stands for no `id`."""
        now = time.monotonic()
        if self._started is None:
            self._started = now
        lines, names = [], []
        for block in blocks:
            name, tokens = self.name(block)
            names.append(name)
            if tokens is not None:
                text = {"text": _encodable(block.text)} if self._text else {}
                lines.append(_json_line({"block": name, "tokens": tokens, **text}))
        number, turn = (None, 0) if conversation is None else self._turn((scope.tenant, conversation))
        request: dict[str, Any] = {
            "request": self._requests if id is None else id,
            "conversation": number,
            "turn": turn,
            "query_tokens": query_tokens,
            "blocks": names,
            "scores": _scores(blocks),
            "t": round(now - self._started, 3),
        }
        if k is not None:
            request["k"] = k
        if any(part is not None for part in scope):
            request["scope"] = self._digest(scope)
        self._requests += 1
        return "".join([*lines, _json_line(request)])

    def name(self, block: ContextBlock) -> tuple[str, int | None]:
        """Return the block's name, and its length in tokens if it needs a line of its own first. O(1)."""
        name = self._names.get(block.fingerprint)
        if name is not None:
            return name, None
        tokens = min(block.tokens, MAX_TRACE_TOKENS)
        if len(self._names) < self._max_blocks:
            for name in _candidate_names(block):
                if name not in self._owners:
                    self._names[block.fingerprint] = name
                    self._owners[name] = block.fingerprint
                    return name, tokens
        name = f"{block.fingerprint.hex()}~{tokens}"
        is_new = name not in self._generated
        self._generated[name] = None
        self._generated.move_to_end(name)
        if len(self._generated) > self._max_blocks:
            self._generated.popitem(last=False)
        return name, tokens if is_new else None

    def _turn(self, conversation: tuple[str | None, str]) -> tuple[int, int]:
        """Return the number of the conversation, and of this turn in it."""
        number, turn = self._turns.pop(conversation, (self._conversations, 0))
        self._conversations += not turn
        self._turns[conversation] = number, turn + 1
        if len(self._turns) > self._max_conversations:
            self._turns.popitem(last=False)
        return number, turn + 1

    def _digest(self, scope: RequestScope) -> str:
        digest = blake2b(key=self._key, digest_size=8)
        for part in scope:
            data = b"" if part is None else part.encode("utf-8", "surrogatepass")
            # The length in front keeps ("ab", "c") apart from ("a", "bc"), and None from an empty string.
            digest.update(b"%d " % (-1 if part is None else len(data)) + data)
        return digest.hexdigest()


def _candidate_names(block: ContextBlock) -> list[str]:
    id, fingerprint = block.id, block.fingerprint.hex()
    if id is None or not is_name(id) or id == block.text or _GENERATED_NAME.fullmatch(id):
        return [fingerprint]
    return [id, fingerprint]


def is_name(id: str) -> bool:
    """Return True if a trace can hold this id: it is not empty, not too long, and UTF-8 can encode it."""
    return 0 < len(id) <= _MAX_ID_CHARACTERS and _encodable(id) == id


def _encodable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _json_line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


def _scores(blocks: Sequence[ContextBlock]) -> list[float]:
    """Return one score per block, or an empty list if any block lacks a finite one."""
    try:
        scores = [float(block.score) for block in blocks]  # type: ignore[arg-type]  # also NumPy's numbers
    except (TypeError, ValueError, OverflowError):  # among them the TypeError of None
        return []
    return scores if all(map(math.isfinite, scores)) else []
