"""Transcripts that coding agents keep: what was sent with each request follows from the lines before its answer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from warmprefix_requests.usage import token_usage
from warmprefix_tools.doctor.records import seconds
from warmprefix_tools.doctor.request_log import LogMessage, LogRequest

__all__ = ["TRANSCRIPTS", "AgentTranscript", "TranscriptFormat"]

Json = Mapping[str, Any]
Show = Callable[[Json], list[LogMessage]]
"""Returns the messages of a body."""


class AgentTranscript(Protocol):
    """A reader of the lines of one format, in their order. It leaves file and line of the requests open."""

    def take(self, record: Json, file: str) -> Iterator[LogRequest]:
        """Read a line, and yield the requests that are complete with it."""
        ...

    def end(self, file: str) -> Iterator[LogRequest]:
        """Yield the requests that are open at the end of a file."""
        ...


def _request(
    messages: list[LogMessage], model: object, session: str | None, usage: object, time: float | None
) -> LogRequest:
    tokens = token_usage(usage)
    return LogRequest(
        "",
        0,
        tuple(messages),
        model=model if isinstance(model, str) else None,
        session=session,
        reported_prompt_tokens=tokens.prompt_tokens,
        reported_cached_tokens=tokens.cached_tokens,
        seconds=time,
    )


@dataclass(slots=True, eq=False)
class _Thread:
    """Messages of one conversation so far, and the answer that is still being written, block by block."""

    history: list[LogMessage] = field(default_factory=list)
    answer: str | None = None
    blocks: list[Any] = field(default_factory=list)

    def end_answer(self, show: Show) -> None:
        """Add the answer to the history."""
        if self.blocks:
            self.history += show({"messages": [{"role": "assistant", "content": self.blocks}]})
        self.answer, self.blocks = None, []


class ClaudeTranscript:
    """Claude Code's transcripts: a line per content block, each with the usage of the whole answer.

    A line names its parent, so rewound conversations, side chains and what follows a compaction have histories of
    their own. Files of resumed sessions repeat lines; each answer counts once.
    """

    def __init__(self, show: Show) -> None:
        self._show = show
        self._places: dict[str, tuple[_Thread, int]] = {}
        """For each line by its uuid, the thread, and the messages that it has from there on."""
        self._latest: dict[Hashable, _Thread] = {}
        self._seen: set[str] = set()

    def take(self, record: Json, file: str) -> Iterator[LogRequest]:
        """Read a line, and yield a request if an answer begins with it."""
        session = record.get("sessionId", record.get("session_id"))
        chain = (file, str(session), str(record.get("agentId")), record.get("isSidechain") is True)
        thread, place = self._place(record, chain)
        message = record.get("message")
        if record.get("isVisibleInTranscriptOnly") or not isinstance(message, Mapping):
            pass  # titles, snapshots, notices and the like
        elif record["type"] == "user":
            content = message.get("content")
            if place < len(thread.history) and not _has_result(content):  # the user went back, and on from there
                thread = _Thread(thread.history[:place])
            thread.end_answer(self._show)
            thread.history += self._show({"messages": [{"role": "user", "content": content}]})
            place = len(thread.history)
        elif record["type"] == "assistant" and message.get("model") != "<synthetic>":
            key = str(message.get("id") or record.get("requestId") or record.get("uuid"))
            if thread.answer != key:
                thread.end_answer(self._show)
                if key not in self._seen and thread.history:
                    names = [str(name) for name in (session, record.get("agentId")) if name is not None]
                    time = seconds(record.get("timestamp"))
                    id_ = "/".join(names) or None
                    yield _request(thread.history, message.get("model"), id_, message.get("usage"), time)
                self._seen.add(key)
                thread.answer = key
            content = message.get("content")
            thread.blocks += content if isinstance(content, list) else [content]
            place = len(thread.history) + 1
        self._latest[chain] = thread
        if isinstance(record.get("uuid"), str):
            self._places[record["uuid"]] = thread, place

    def end(self, file: str) -> Iterator[LogRequest]:
        """Yield nothing: a request counts from its answer on."""
        return iter(())

    def _place(self, record: Json, chain: Hashable) -> tuple[_Thread, int]:
        """Return the thread of a line, and the number of messages in front of it."""
        parent = record.get("parentUuid", record)
        if isinstance(parent, str) and parent in self._places:
            return self._places[parent]
        begins = parent is None and (record.get("type") in ("user", "system"))
        thread = self._latest.get(chain)
        if thread is None or (begins and thread.history):
            thread = _Thread()
        return thread, len(thread.history) + bool(thread.blocks)


def _has_result(content: object) -> bool:
    return isinstance(content, list) and any(
        isinstance(block, Mapping) and block.get("type") == "tool_result" for block in content
    )


class CodexRollout:
    """Codex's rollouts: the items of its sessions, and the tokens of each request behind its answer."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._sessions: dict[str, _CodexSession] = {}

    def take(self, record: Json, file: str) -> Iterator[LogRequest]:
        """Read a line, and yield a request with the report of its tokens, or with the next answer."""
        session = self._sessions.setdefault(file, _CodexSession())
        kind, payload = record["type"], record["payload"]
        if kind == "session_meta" and session.id is None:
            session.id = str(payload.get("id"))
            base = payload.get("base_instructions") or payload.get("instructions")
            text = base.get("text") if isinstance(base, Mapping) else base
            session.system = self._show({"messages": [{"role": "system", "content": text}]}) if text else []
        elif kind == "turn_context":
            session.model = payload.get("model") or session.model
        elif kind == "compacted":
            kept = payload.get("replacement_history") or [{"role": "user", "content": payload.get("message") or ""}]
            session.history, session.asked = self._show({"messages": kept}), None
        elif kind == "response_item":
            if _is_answer(payload):
                if session.asked is not None and session.answered:
                    yield session.request(None)
                session.answered = False
                if session.asked is None:
                    session.asked = (len(session.history), seconds(record.get("timestamp")))
            else:
                session.answered = session.asked is not None
            session.history += self._show({"messages": [payload]})
        elif kind == "event_msg" and payload.get("type") == "token_count":
            info = payload.get("info")
            usage = info.get("last_token_usage") if isinstance(info, Mapping) else None
            if session.asked is not None and isinstance(usage, Mapping):
                yield session.request(usage)

    def end(self, file: str) -> Iterator[LogRequest]:
        """Yield the last request if its tokens were not reported."""
        session = self._sessions.pop(file, None)
        if session is not None and session.asked is not None:
            yield session.request(None)


@dataclass(slots=True)
class _CodexSession:
    id: str | None = None
    model: object = None
    system: list[LogMessage] = field(default_factory=list)
    history: list[LogMessage] = field(default_factory=list)
    asked: tuple[int, float | None] | None = None
    """Number of messages in front of the answer that is being read, and its time."""
    answered: bool = False
    """True if something was sent behind that answer."""

    def request(self, usage: Json | None) -> LogRequest:
        """Return the request whose answer was read."""
        assert self.asked is not None
        end, time = self.asked
        self.asked, self.answered = None, False
        return _request([*self.system, *self.history[:end]], self.model, self.id, usage, time)


def _is_answer(item: Json) -> bool:
    return item.get("role") == "assistant" or ("role" not in item and not str(item.get("type")).endswith("_output"))


class TranscriptFormat(NamedTuple):
    """A format of transcripts."""

    name: str
    recognise: Callable[[Json], object]
    reader: Callable[[Show], AgentTranscript]
    missing: str
    """Parts of each prompt that the transcripts lack."""


_CLAUDE_LINES = ("user", "assistant", "system", "summary", "progress", "attachment", "file-history-snapshot")
_CODEX_LINES = ("session_meta", "turn_context", "response_item", "event_msg", "compacted")

TRANSCRIPTS = (
    TranscriptFormat(
        "Claude Code",
        lambda record: (
            record.get("type") in (*_CLAUDE_LINES, "queue-operation")
            and not record.keys().isdisjoint(("uuid", "leafUuid", "sessionId", "session_id", "messageId"))
        ),
        ClaudeTranscript,
        "the system prompt and the tools",
    ),
    TranscriptFormat(
        "Codex",
        lambda record: record.get("type") in _CODEX_LINES and isinstance(record.get("payload"), Mapping),
        CodexRollout,
        "the tools",
    ),
)
