"""Recorders: they note each request that a planner plans, such as in a trace file."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, TextIO

from warmprefix.blocks import ContextBlock, as_blocks
from warmprefix.forks import fork_safe_lock, in_each_process
from warmprefix_telemetry.trace_files import StreamSink, TraceFile
from warmprefix_telemetry.trace_format import MAX_TRACE_TOKENS, RequestLines, RequestScope, is_name

__all__ = ["TraceRecorder", "environment_recorder"]

_log = logging.getLogger("warmprefix")


class TraceRecorder:
    """Writes requests to a trace file as they come: ids and lengths, no text unless asked.

    If the trace cannot be written, one warning is logged, recording ends, and `record` only counts. Each process
    writes its own file, a forked one included. The first request creates it, and existing files are never touched:
    while `day.jsonl` exists, the trace goes to `day-2.jsonl`, and so on.

    The file shows ids as they are, lengths, scores, times, and which requests belong together. Conversations are
    numbered; tenant, model and preamble are together one digest, with a key that is never written. A block without an
    id is named by its fingerprint, which can confirm a guess of its text.

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
        """Prepare a recorder; nothing is written yet.

        Args:
            target: A path, gzipped if it ends in `.gz`; or an open text stream, which you close. A forked process
                records nothing to its parent's stream.
            name: Name of the trace, in its header; by default the name of the file.
            text: Also write the text of each block, once.
            max_blocks: Most texts that keep their ids as names; fingerprint and length name later ones. Bounds memory.
            max_conversations: Most conversations whose turns are counted; beyond it, the one that was quiet longest
                counts as new when it comes back.
        """
        for bound, value in (("max_blocks", max_blocks), ("max_conversations", max_conversations)):
            if value < 1:
                raise ValueError(f"{bound} must be 1 or more, got {value}")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a str or None, got {name!r}")
        self._target: str | TextIO
        if isinstance(target, str | os.PathLike):
            self._target = os.path.abspath(os.fspath(target))  # the application may change directory
        elif hasattr(target, "write") and hasattr(target, "flush"):
            self._target = target
        else:
            raise TypeError(f"target must be a path or a text stream, got {target!r}")
        self._name = name
        self._new_lines = partial(RequestLines, text=text, max_blocks=max_blocks, max_conversations=max_conversations)
        self._process = os.getpid()
        self._sink: TraceFile | StreamSink | None = None
        # Guards what `_begin` sets. Re-entrant: a signal handler may record or close in the middle of `record`.
        self._lock = fork_safe_lock()
        in_each_process(self._begin)

    def _begin(self) -> None:
        self._writing = False
        if self._sink is not None:  # the parent's
            self._sink.abandon()
            self._sink = None
        self._lines = self._new_lines()
        self._ended = not isinstance(self._target, str) and os.getpid() != self._process
        self._requests = self._lost = 0

    @property
    def path(self) -> str | None:
        """File that this process writes; None before its first request, and for a stream."""
        sink = self._sink
        return None if sink is None else sink.path

    @property
    def requests(self) -> int:
        """Number of requests in the trace of this process."""
        return self._requests

    @property
    def lost(self) -> int:
        """Number of requests that came after the recording ended, or from a signal handler during `record`."""
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
        k: int | None = None,
        request: str | None = None,
    ) -> None:
        """Write one request. It reaches the operating system before this returns.

        Args:
            blocks: The retrieved blocks in relevance order. Of equal blocks the first counts.
            conversation: Names one message history.
            tenant: Names the tenant.
            model: Names the model.
            preamble: The text in front of the context, or a name for it.
            query_tokens: Length of the question, at most a billion.
            k: Blocks that the prompt holds, if the retriever returned more candidates.
            request: Your name of the request, in place of its number, to add clicks or citations later. Unique in
                the trace, and at most 256 characters.

        Raises:
            TypeError, ValueError: An argument has another type, or is out of range.
        """
        distinct: dict[bytes, ContextBlock] = {}
        for block in as_blocks(blocks):
            distinct.setdefault(block.fingerprint, block)
        scope = RequestScope(tenant, model, preamble)
        for argument, value in [("conversation", conversation), ("request", request), *scope._asdict().items()]:
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{argument} must be a str or None, got {value!r}")
        for argument, number, least in (("query_tokens", query_tokens, 0), ("k", 1 if k is None else k, 1)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{argument} must be an int, got {number!r}")
            if not least <= number <= MAX_TRACE_TOKENS:
                raise ValueError(f"{argument} must be from {least} to {MAX_TRACE_TOKENS}, got {number}")
        if request is not None and not is_name(request):
            raise ValueError(f"request must have 1 to 256 characters that UTF-8 can encode, got {request[:300]!r}")
        try:
            with self._lock:
                if self._ended or self._writing:
                    self._lost += 1
                    return
                self._write(list(distinct.values()), conversation, scope, query_tokens, k, request)
        except Exception as error:
            _log.warning("trace recording ended: %s", error, exc_info=not isinstance(error, OSError))

    def _write(self, *request: Any) -> None:
        """Write the request that has these arguments of `RequestLines.add`."""
        # The lock is held. Any exception here, an interrupt included, ends the trace after a whole line.
        try:
            self._writing = True
            lines = self._lines.add(*request)
            if self._sink is None:
                self._sink = self._open()
                lines = self._lines.header(self._name, self._sink.path) + lines
            self._sink.write(lines)
        except BaseException:
            self._ended = True
            self._lost += 1
            if self._sink is not None:
                self._sink.abandon()
            raise
        finally:
            self._writing = False
        self._requests += 1

    def _open(self) -> TraceFile | StreamSink:
        if not isinstance(self._target, str):
            return StreamSink(self._target)
        sink = TraceFile(self._target)
        weakref.finalize(self, sink.close)  # at the latest when the process ends
        return sink

    def close(self) -> None:
        """End the trace; later requests are not in it. Idempotent."""
        try:
            with self._lock:
                self._ended = True
                if self._sink is not None and not self._writing:
                    self._sink.close()
        except OSError as error:
            _log.warning("trace recording ended: %s", error)

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


_environment_recorders: dict[tuple[str, bool], TraceRecorder] = {}


def environment_recorder(path: str, text: bool) -> TraceRecorder | None:
    """Return the recorder of this process that writes to a path; None if that cannot be used, which is logged."""
    key = path, text
    if key not in _environment_recorders:
        try:
            _environment_recorders.setdefault(key, TraceRecorder(path, text=text))
        except OSError:  # such as a relative path in a directory that is gone
            _log.warning("cannot record to %s", path, exc_info=True)
            return None
    return _environment_recorders[key]
