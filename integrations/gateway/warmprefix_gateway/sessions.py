"""Which session a request belongs to, and what became of its prompt tokens. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from warmprefix.fair_lru import FairLru

__all__ = ["PromptParts", "Session", "SessionBook", "TokenFates", "prompt_parts", "session_name"]

_MAX_ENDS = 60_000
_MAX_HEADS = 8
_MAX_PARTS, _MAX_PARTS_OF_ALL = 10_000, 1_000_000
"""Parts of one prompt, of which the last holds the rest, and of all in memory; each takes about 100 bytes."""
_PARTS_OF_SESSION = 25
"""Parts that take as much memory as a session without a prompt."""
_MAX_NAME = 256
_INSTRUCTIONS = ("system", "developer")
_FIELDS = ("prompt_cache_key", "session_id", "conversation_id", "user_session_id")


class PromptParts(NamedTuple):
    """A prompt as a chain of parts: what stands in front of the messages, then each message."""

    digests: tuple[bytes, ...]
    """For each part, a digest of it and all parts in front."""
    characters: tuple[int, ...]
    """Characters up to the end of each part."""
    head: str
    """A name for the instructions and tools in front."""
    begin: int
    """Index of the first part that is no instruction: sessions may share those in front."""


class TokenFates(NamedTuple):
    """The uncached prompt tokens of a request, by the reason why they had to be computed."""

    first: int = 0
    """The session's first request."""
    new: int = 0
    """Not sent before in this session."""
    cut: int = 0
    """Behind a place where the session's history was changed or cut."""
    lost: int = 0
    """Sent by the session's request before, in the same place, and no longer in the cache."""


@dataclass(slots=True)
class Session:
    """One conversation of an application."""

    key: str
    tenant: str | None
    application: str = ""
    requests: int = 0
    references: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    unreported_tokens: int = 0
    """Of the prompt tokens, those of answers that did not report how many were cached."""
    fates: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    prompts: dict[str, PromptParts] = field(default_factory=dict)
    """The latest prompt with each head: some clients give a session's title or summary another system prompt."""

    def latest(self, parts: PromptParts) -> PromptParts | None:
        """Return the prompt that a new one can continue; None for the first of its kind."""
        before = self.prompts.get(parts.head)
        is_opening = len(parts.digests) <= parts.begin + 1
        return before if before is not None or is_opening else next(reversed(self.prompts.values()), None)

    def keep(self, parts: PromptParts) -> None:
        """Remember a prompt as the latest with its head."""
        self.prompts.pop(parts.head, None)
        self.prompts[parts.head] = parts
        if len(self.prompts) > _MAX_HEADS:
            del self.prompts[next(iter(self.prompts))]


class SessionBook:
    """The sessions of the latest requests, each within its tenant, in fair shares. Not thread-safe.

    A session is named by a header or a field of the body; otherwise a request belongs to the session whose earlier
    prompt is the longest beginning of its own. Sessions decide about routes and statistics, never about a text.
    """

    def __init__(self, max_parts: int = _MAX_PARTS_OF_ALL) -> None:
        self._sessions: FairLru[tuple[str | None, str], Session] = FairLru()
        self._ends: FairLru[tuple[str | None, bytes], str] = FairLru()
        self._max_parts = max_parts
        self._number = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """Yield the sessions, latest first. O(sessions)."""
        return reversed(list(self._sessions.values()))

    def find(self, tenant: str | None, name: str | None, parts: PromptParts) -> Session:
        """Return the session of a request, a new one if it has none. O(messages)."""
        key = name if name is None or len(name) <= _MAX_NAME else blake2b(name.encode("utf-8", "replace")).hexdigest()
        key = key or self._continued(tenant, parts)
        if key is None:
            self._number += 1
            key = f"session {self._number}"
        session = self._sessions.use((tenant, key))
        if session is None:
            session = Session(key, tenant)
            self._put(session)
        for end in parts.digests[parts.begin :][-2:]:  # some clients do not keep the last message of a prompt
            self._ends.put((tenant, end), key, tenant)
            self._ends.use((tenant, end))
            if len(self._ends) > _MAX_ENDS:
                self._ends.evict()
        return session

    def _continued(self, tenant: str | None, parts: PromptParts) -> str | None:
        found = (self._ends.get((tenant, digest)) for digest in reversed(parts.digests[parts.begin :]))
        return next((key for key in found if key is not None), None)

    def _put(self, session: Session) -> None:
        parts = sum([len(parts.digests) for parts in session.prompts.values()])
        self._sessions.put((session.tenant, session.key), session, session.tenant, _PARTS_OF_SESSION + parts)
        while self._sessions.size > self._max_parts and len(self._sessions) > 1:
            self._sessions.evict()[1].prompts.clear()

    def keep(self, session: Session, parts: PromptParts) -> None:
        """Remember the latest prompt of a session, unless it was forgotten meanwhile."""
        if self._sessions.get((session.tenant, session.key)) is session:
            session.keep(parts)
            self._put(session)

    def record(self, session: Session, parts: PromptParts, prompt_tokens: int, cached_tokens: int | None) -> TokenFates:
        """Record the answer to a request of a session, and return what became of its uncached tokens. O(messages).

        Without a report of cached tokens, nothing is known of the others either: no token has a fate.
        """
        before = session.latest(parts)
        self.keep(session, parts)
        session.prompt_tokens += prompt_tokens
        if cached_tokens is None:
            session.unreported_tokens += prompt_tokens
            return TokenFates()
        uncached = max(prompt_tokens - cached_tokens, 0)
        if before is None:
            fates = TokenFates(first=uncached)
        else:
            total = max(parts.characters[-1], 1) if parts.characters else 1
            shared = _common(before.digests, parts.digests)
            end = parts.characters[shared - 1] if shared else 0
            held = min(prompt_tokens * end // total, prompt_tokens)
            lost = min(max(held - cached_tokens, 0), uncached)
            is_cut = shared < len(before.digests) - 1  # the last message of a prompt may be replaced at each turn
            rest = uncached - lost
            fates = TokenFates(lost=lost, cut=rest) if is_cut else TokenFates(lost=lost, new=rest)
        session.cached_tokens += cached_tokens
        session.fates = [total + more for total, more in zip(session.fates, fates, strict=True)]
        return fates


def session_name(headers: Mapping[str, str], body: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the session that a request names; None if it names none."""
    for name in names:
        if headers.get(name):
            return f"{headers[name]}"
    metadata = body.get("metadata")
    for holder in (body, metadata if isinstance(metadata, Mapping) else {}):
        for name in _FIELDS:
            value = holder.get(name)
            if isinstance(value, str) and value:
                return value
    return None


def prompt_parts(route: str, body: Mapping[str, Any]) -> PromptParts:
    """Return the parts of a body's prompt. O(characters).

    Ids of items are left out: they may change from request to request, and no engine shows them to the model.
    """
    front = [body[name] for name in ("tools", "system", "instructions") if body.get(name)]
    given = body.get("input" if route == "responses" else "prompt" if route == "completions" else "messages")
    messages = given if isinstance(given, list) else [given]
    if len(messages) > _MAX_PARTS:
        messages = [*messages[: _MAX_PARTS - 1], messages[_MAX_PARTS - 1 :]]
    chain = blake2b(digest_size=16)
    digests: list[bytes] = []
    characters: list[int] = []
    total = 0
    for part in (front, *messages):
        text = _written(part) if part else ""
        total += len(text)
        chain.update(b"%d:" % total)
        chain.update(text.encode("utf-8", "surrogatepass"))
        digests.append(chain.digest())
        characters.append(total)
    roles = [part.get("role") if isinstance(part, Mapping) else None for part in messages]
    begin = 1 + next((at for at, role in enumerate(roles) if role not in _INSTRUCTIONS), len(roles))
    return PromptParts(tuple(digests), tuple(characters), digests[begin - 1].hex(), begin)


def _written(part: object) -> str:
    if isinstance(part, Mapping):
        content = part.get("content")
        if isinstance(content, str) and part.keys() <= {"role", "content", "name", "tool_call_id", "id"}:
            return f"{part.get('role')}\n{content}"
        part = {name: value for name, value in part.items() if name != "id"}
    return repr(part)


def _common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Return how many parts two prompts share; their digests form chains, so a shared one means that all before are."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
