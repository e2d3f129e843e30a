"""A log as prompts: requests of messages, and messages of segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from warmprefix_tools.doctor.segments import Ids, SegmentPool

__all__ = ["PLAIN", "TOOLS", "LogMessage", "LogRequest", "LogVersion", "Prompt", "RequestLog"]

TOOLS = "tools"
"""Role of the message that a chat template makes of the tools; it opens the prompt."""

PLAIN = "prompt"
"""Role of a prompt without messages, which no chat template changes."""


@dataclass(frozen=True, slots=True, eq=False)
class LogMessage:
    """One message of one or many requests, compared by identity."""

    role: str
    ids: Ids
    origin: LogMessage | None = None
    """Message that this one was made from segment by segment: equal indices are counterparts."""

    @property
    def source(self) -> LogMessage:
        """The message itself, or the one that it was made from."""
        return self if self.origin is None else self.origin

    def with_ids(self, ids: Ids) -> LogMessage:
        """Return the same message with other segments, index by index."""
        return self if ids is self.ids or ids == self.ids else LogMessage(self.role, ids, self.source)


Prompt = tuple[LogMessage, ...]


@dataclass(frozen=True, slots=True)
class LogRequest:
    """One prompt that was sent, and its sender as far as the record names it."""

    file: str
    line: int
    messages: Prompt
    model: str | None = None
    salt: str | None = None
    tenant: str | None = None
    user: str | None = None
    session: str | None = None
    """The conversation."""
    reported_prompt_tokens: int | None = None
    reported_cached_tokens: int | None = None

    @property
    def sender(self) -> str | None:
        """Tenant, user or session: whoever should have one cache salt. None if unknown."""
        return self.tenant or self.user or self.session


@dataclass(slots=True)
class LogVersion:
    """The log as it was sent or with repairs, reduced to what the engine sees."""

    prompts: list[Prompt]
    models: Sequence[str | None]
    salts: list[str | None]
    kinds: frozenset[str] = frozenset()
    """Defects that are repaired in it."""
    token_granular: frozenset[int] = frozenset()
    """Requests that are counted as if a KV block had one token."""


@dataclass(slots=True)
class RequestLog:
    """All requests in the order of arrival, and the pool of their segments."""

    pool: SegmentPool = field(default_factory=SegmentPool)
    requests: list[LogRequest] = field(default_factory=list)
    _messages: dict[bytes, LogMessage] = field(default_factory=dict)

    def message(self, role: str, text: str) -> LogMessage:
        """Return the message of this role and text: the same object each time."""
        return self._message(role, text, lambda: self.pool.ids(text))

    def tools(self, texts: Sequence[str]) -> LogMessage:
        """Return the message of a list of tools, each given as JSON; it is cut between the tools."""
        segments = [f" {text}," for text in texts]
        segments[0] = "[" + segments[0][1:]
        segments[-1] = segments[-1][:-1] + "]"
        return self._message(TOOLS, "".join(segments), lambda: self.pool.intern_all(segments))

    def _message(self, role: str, text: str, ids: Callable[[], Ids]) -> LogMessage:
        key = blake2b(f"{role}\n{text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        message = self._messages.get(key)
        if message is None:
            message = self._messages[key] = LogMessage(role, ids())
        return message

    def text(self, message: LogMessage) -> str:
        """Return the text of a message."""
        return self.pool.text(message.ids)

    def as_sent(self) -> LogVersion:
        """Return a new version without repairs."""
        requests = self.requests
        return LogVersion(
            [request.messages for request in requests],
            [request.model for request in requests],
            [request.salt for request in requests],
        )
