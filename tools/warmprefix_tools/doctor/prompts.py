"""The log as prompts: requests of messages, and messages of segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from warmprefix_tools.doctor.segments import Ids, SegmentPool

__all__ = ["PLAIN", "TOOLS", "Draft", "Log", "Message", "Request"]

TOOLS = "tools"
"""Role of the message that a chat template makes of the tools; it opens the prompt."""

PLAIN = "prompt"
"""Role of a prompt without messages, which no chat template touches."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One message of one or many requests; two are equal only if they are one object."""

    role: str
    ids: Ids
    origin: Message | None = None
    """The message that this one was made from segment by segment, if any: what stands at an index there has its
    counterpart at the same index here."""

    @property
    def source(self) -> Message:
        """Itself, or the message at the root of its origins."""
        return self if self.origin is None else self.origin

    def made_into(self, ids: Ids) -> Message:
        """Return the same message with other segments, index by index."""
        return self if ids is self.ids or ids == self.ids else Message(self.role, ids, self.source)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt that was sent, and what is known of who sent it."""

    file: str
    line: int
    messages: tuple[Message, ...]
    model: str | None = None
    salt: str | None = None
    tenant: str | None = None
    user: str | None = None
    session: str | None = None
    """The conversation, if the record names it."""
    reported_prompt_tokens: int | None = None
    reported_cached_tokens: int | None = None


@dataclass(slots=True)
class Draft:
    """The log, or a mended version of it: only what the engine would see."""

    prompts: list[tuple[Message, ...]]
    salts: list[str | None]
    kinds: frozenset[str] = frozenset()
    """Of the defects that are mended in it."""
    token_granular: frozenset[int] = frozenset()
    """Requests that are counted as if KV blocks had one token."""


@dataclass(slots=True)
class Log:
    """All requests, in the order in which they came, and the pool their messages are made of."""

    pool: SegmentPool = field(default_factory=SegmentPool)
    requests: list[Request] = field(default_factory=list)
    _messages: dict[bytes, Message] = field(default_factory=dict)

    def message(self, role: str, text: str) -> Message:
        """The message of this role and text: the same object each time."""
        return self._message(role, text, lambda: self.pool.ids(text))

    def tools(self, texts: Sequence[str]) -> Message:
        """The message that a list of tools becomes, each given as JSON; cut between the tools."""
        segments = [f" {text}," for text in texts]
        segments[0] = "[" + segments[0][1:]
        segments[-1] = segments[-1][:-1] + "]"
        return self._message(TOOLS, "".join(segments), lambda: self.pool.intern_all(segments))

    def _message(self, role: str, text: str, ids: Callable[[], Ids]) -> Message:
        key = blake2b(f"{role}\n{text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        message = self._messages.get(key)
        if message is None:
            message = self._messages[key] = Message(role, ids())
        return message

    def text(self, message: Message) -> str:
        """What the message says."""
        return self.pool.text(message.ids)

    def as_it_stands(self) -> Draft:
        """The version that was sent."""
        return Draft([request.messages for request in self.requests], [request.salt for request in self.requests])
