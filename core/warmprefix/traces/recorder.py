"""`TraceRecorder`: writes what a running application retrieves as a trace."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from types import TracebackType
from typing import Any, TextIO

from warmprefix.blocks import ContextBlock, as_blocks
from warmprefix.traces.format import MAX_TRACE_TOKENS, RECORDED_FIELD
from warmprefix.traces.names import BlockNames
from warmprefix.traces.sink import FileSink, Sink, StreamSink

__all__ = ["TraceRecorder"]

_log = logging.getLogger("warmprefix")


class TraceRecorder:
    """Writes requests to a trace file as they come: ids and lengths, no text unless asked.

    Fails open: if the trace can't be written, one warning is logged, recording ends, and `record` only counts. Each
    process writes a file of its own, a forked one included, and no existing file is touched: while `day.jsonl` is
    there, the trace goes to `day-2.jsonl`, and so on. The file is made when the first request comes.

    What a reader of the file learns: ids as they are, lengths, scores, times, and which requests belong together.
    Conversations are numbered; tenant, model and preamble are together one digest, with a key that is never written.
    A block without an id is named by its fingerprint, which can confirm a guess of its text.

    >>> import sys
    >>> with TraceRecorder(sys.stdout, name="day") as recorder:
    ...     recorder.record([ContextBlock("The sky is blue.", id="sky")])  # doctest: +ELLIPSIS
    {"name":"day",...}
    {"block":"sky","tokens":4}
    {"request":0,"conversation":null,"turn":0,"query_tokens":0,"blocks":["sky"],"scores":[],"t":0.0}
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | TextIO,
        *,
        name: str | None = None,
        text: bool = False,
        max_blocks: int = 65_536,
        max_conversations: int = 65_536,
    ) -> None:
        """Nothing is written yet.

        Args:
            target: A path, gzipped if it ends in `.gz`; or an open text stream, which you close. A forked process
                records nothing to its parent's stream.
            name: The trace's, in its header; the file's by default.
            text: Write each block's text too, once.
            max_blocks: Most texts that go by their ids; later ones go by fingerprint and length. Memory grows with it.
            max_conversations: Most conversations whose turns are counted; beyond it, the one that was quiet longest
                is a new one when it comes back.

        Raises:
            TypeError: `target` is neither a path nor a stream, or `name` is no string.
            ValueError: A bound is below 1.
        """
        for bound, value in (("max_blocks", max_blocks), ("max_conversations", max_conversations)):
            if value < 1:
                raise ValueError(f"{bound} must be 1 or more, got {value}")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a str or None, got {type(name).__name__}")
        self._path: str | None = None
        self._stream: TextIO | None = None
        if isinstance(target, str | os.PathLike):
            self._path = os.path.abspath(os.fspath(target))  # the application may change directory
        elif hasattr(target, "write") and hasattr(target, "flush"):
            self._stream = target
        else:
            raise TypeError(f"target must be a path or a text stream, got {type(target).__name__}")
        self._name = name
        self._text = text
        self._max_blocks = max_blocks
        self._max_conversations = max_conversations
        self._start()
        _recorders.add(self)

    def _start(self, over: bool = False) -> None:
        # Guards all below. Re-entrant, because a signal's handler may record or close in the middle of `record`.
        self._lock = threading.RLock()
        self._writing = False
        self._sink: Sink | None = None
        self._lines = _Lines(self._text, self._max_blocks, self._max_conversations)
        self._over = over
        self._requests = 0
        self._lost = 0

    @property
    def path(self) -> str | None:
        """The file that this process writes; None before its first request, and for a stream."""
        sink = self._sink
        return None if sink is None else sink.path

    @property
    def requests(self) -> int:
        """How many are in the trace of this process."""
        return self._requests

    @property
    def lost(self) -> int:
        """How many came when the trace could not be written or was closed, or from a signal's handler in `record`."""
        return self._lost

    def record(
        self,
        blocks: Iterable[ContextBlock | str],
        *,
        conversation: str | None = None,
        tenant: str | None = None,
        model: str | None = None,
        preamble: str | None = None,
        query_tokens: int = 0,
    ) -> None:
        """Write one request. It reaches the operating system before this returns.

        Args:
            blocks: What was retrieved, in relevance order. Of equal blocks the first counts.
            conversation: Names one message history.
            tenant: Whose request.
            model: The model that is asked.
            preamble: The text in front of the context, or anything that names it.
            query_tokens: Length of the question.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: `query_tokens` is negative or above a billion.
        """
        distinct: dict[bytes, ContextBlock] = {}
        for block in as_blocks(blocks):
            distinct.setdefault(block.fingerprint, block)
        for argument, value in (
            ("conversation", conversation),
            ("tenant", tenant),
            ("model", model),
            ("preamble", preamble),
        ):
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{argument} must be a str or None, got {type(value).__name__}")
        if isinstance(query_tokens, bool) or not isinstance(query_tokens, int):
            raise TypeError(f"query_tokens must be an int, got {type(query_tokens).__name__}")
        if not 0 <= query_tokens <= MAX_TRACE_TOKENS:
            raise ValueError(f"query_tokens must be from 0 to {MAX_TRACE_TOKENS}, got {query_tokens}")
        try:
            with self._lock:
                if self._over or self._writing:
                    self._lost += 1
                    return
                self._write(list(distinct.values()), conversation, (tenant, model, preamble), query_tokens)
        except Exception as error:
            _log.warning("trace recording ended: %s", error, exc_info=not isinstance(error, OSError))

    def close(self) -> None:
        """End the trace; requests that come later are not in it. Closing twice is harmless."""
        try:
            with self._lock:
                self._over = True
                if self._sink is not None and not self._writing:
                    self._sink.close()
        except OSError as error:
            _log.warning("trace recording ended: %s", error)

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write(
        self,
        blocks: Sequence[ContextBlock],
        conversation: str | None,
        scope: tuple[str | None, str | None, str | None],
        query_tokens: int,
    ) -> None:
        """The lock is held. Whatever is raised here, an interrupt included, ends the trace behind a whole line."""
        try:
            self._writing = True
            lines = self._lines.of(blocks, conversation, scope, query_tokens)
            if self._sink is None:
                self._sink = self._open()
                lines = f"{_header(self._name, self._sink.path)}{lines}"
            self._sink.write(lines)
        except BaseException:
            self._over = True
            self._lost += 1
            if self._sink is not None:
                self._sink.abandon()
            raise
        finally:
            self._writing = False
        self._requests += 1

    def _open(self) -> Sink:
        if self._stream is not None:
            return StreamSink(self._stream)
        assert self._path is not None
        sink = FileSink(self._path)
        weakref.finalize(self, sink.close)  # at the latest when the process ends
        return sink

    def _leave_to_parent(self) -> None:
        """In a forked process: begin anew, and leave the parent's trace alone."""
        if self._sink is not None:
            self._sink.abandon()
        self._start(over=self._stream is not None)


class _Lines:
    """The lines that each request adds. Not thread-safe."""

    def __init__(self, text: bool, max_blocks: int, max_conversations: int) -> None:
        self._text = text
        self._names = BlockNames(max_blocks)
        self._turns: OrderedDict[tuple[str | None, str], list[int]] = OrderedDict()
        self._max_conversations = max_conversations
        self._conversations = 0
        self._key = os.urandom(16)
        self._requests = 0
        self._started: float | None = None

    def of(
        self,
        blocks: Sequence[ContextBlock],
        conversation: str | None,
        scope: tuple[str | None, str | None, str | None],
        query_tokens: int,
    ) -> str:
        now = time.monotonic()
        if self._started is None:
            self._started = now
        lines: list[str] = []
        names: list[str] = []
        for block in blocks:
            name, tokens = self._names.name(block)
            names.append(name)
            if tokens is not None:
                lines.append(self._block_line(name, tokens, block.text))
        number, turn = (None, 0) if conversation is None else self._turn((scope[0], conversation))
        request: dict[str, Any] = {
            "request": self._requests,
            "conversation": number,
            "turn": turn,
            "query_tokens": query_tokens,
            "blocks": names,
            "scores": _scores(blocks),
            "t": round(now - self._started, 3),
        }
        if scope != (None, None, None):
            request["scope"] = self._digest(scope)
        self._requests += 1
        lines.append(_json_line(request))
        return "".join(lines)

    def _block_line(self, name: str, tokens: int, text: str) -> str:
        line: dict[str, Any] = {"block": name, "tokens": tokens}
        if self._text:
            line["text"] = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate is in no UTF-8 file
        return _json_line(line)

    def _turn(self, conversation: tuple[str | None, str]) -> tuple[int, int]:
        """The conversation's number, and which of its turns this is."""
        known = self._turns.get(conversation)
        if known is None:
            known = self._turns[conversation] = [self._conversations, 0]
            self._conversations += 1
            if len(self._turns) > self._max_conversations:
                self._turns.popitem(last=False)
        else:
            self._turns.move_to_end(conversation)
        known[1] += 1
        return known[0], known[1]

    def _digest(self, scope: Sequence[str | None]) -> str:
        digest = blake2b(key=self._key, digest_size=8)
        for part in scope:
            data = b"" if part is None else part.encode("utf-8", "surrogatepass")
            digest.update(b"%d " % (-1 if part is None else len(data)) + data)
        return digest.hexdigest()


def _header(name: str | None, path: str | None) -> str:
    if name is None:
        name = "recorded" if path is None else os.path.basename(path).removesuffix(".gz").removesuffix(".jsonl")
    return _json_line(
        {
            "name": name.encode("utf-8", "replace").decode("utf-8"),
            "source": "recorded by warmprefix",
            RECORDED_FIELD: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "notes": "tokens: as the application gave them, or a quarter of the UTF-8 bytes",
        }
    )


def _json_line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


def _scores(blocks: Sequence[ContextBlock]) -> list[float]:
    """One a block, or none if any has none that a trace may hold."""
    scores: list[float] = []
    for block in blocks:
        if block.score is None:
            return []
        try:
            score = float(block.score)  # NumPy's too
        except (TypeError, ValueError, OverflowError):
            return []
        if not math.isfinite(score):
            return []
        scores.append(score)
    return scores


_recorders: weakref.WeakSet[TraceRecorder] = weakref.WeakSet()


def _after_fork() -> None:
    for recorder in _recorders:
        recorder._leave_to_parent()  # noqa: SLF001


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
