"""Which session a request belongs to, and what became of its prompt tokens. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import gcd
from typing import Any, NamedTuple

from warmprefix.fair_lru import FairLru
from warmprefix_requests.prompts import PromptMessage, canonical_front, canonical_messages

__all__ = [
    "PromptParts",
    "Session",
    "SessionBook",
    "TokenFates",
    "front_parts",
    "prompt_parts",
    "session_key",
    "session_name",
]

_MAX_ENDS = 60_000
_MAX_PROMPTS = 8
_MAX_AT_ONE_END = 8
_MAX_BLOCK = 128
"""Tokens of the largest block of a cache that is recognised by its counts."""
_LEAST_RATE = 0.2
"""Tokens per character of a text that hardly any tokenizer goes below; references in place of texts do."""
_LEAST_ADDED = 64
"""Characters of an addition whose tokens per character are taken for those of messages."""
_MAX_PARTS, _MAX_PARTS_OF_ALL = 10_000, 1_000_000
"""Parts of one prompt, of which the last holds the rest, and of all in memory; each takes about 100 bytes."""
_PARTS_OF_SESSION = 25
"""Parts that take as much memory as a session without a prompt."""
_MAX_NAME = 256
_HEADERS = (
    *("x-session-id", "x-session-affinity", "x-claude-code-session-id", "session-id", "session_id", "thread-id"),
    *("x-litellm-session-id", "x-openwebui-chat-id"),
)
"""Headers that name the session; the first that is there counts."""
_FIELDS = ("prompt_cache_key", "session_id", "conversation_id", "user_session_id")


class PromptParts(NamedTuple):
    """A prompt as a chain of parts: what stands in front of the messages, then each message.

    Marks, ids and shapes do not count; see `canonical_messages`.
    """

    digests: tuple[bytes, ...]
    """For each part, a digest of it and all parts in front; the chain begins again at the first that is no instruction,
    so that a conversation is recognised behind changed instructions."""
    characters: tuple[int, ...]
    """Characters up to the end of each part."""
    turns: tuple[int, ...]
    """Messages of the model up to the end of each part."""
    head: str
    """A name for the instructions and tools in front."""
    begin: int
    """Index of the first part that is no instruction: sessions may share those in front."""
    user_texts: tuple[bytes, ...]
    """For each message of the user, a digest of its text and the texts of those in front."""

    @property
    def turn(self) -> int:
        """Number of the model's messages."""
        return self.turns[-1]

    def followed_by(self, messages: Iterable[PromptMessage]) -> PromptParts:
        """Return the parts with more messages behind them. O(parts + characters)."""
        digests, characters, turns = [*self.digests], [*self.characters], [*self.turns]
        total, turn, head, begin, user_texts = characters[-1], turns[-1], self.head, self.begin, [*self.user_texts]
        for message in messages:
            before = digests[-1]
            is_full = len(digests) > _MAX_PARTS  # the last part holds all the rest
            if begin == len(digests) and not is_full and message.role != "instructions":
                before = b""
            total += len(message.text)
            turn += message.role == "model"
            if is_full:
                del digests[-1], characters[-1], turns[-1]
            digests.append(_chained(before, message.text))
            characters.append(total)
            turns.append(turn)
            if begin == len(digests) - 1 and message.role == "instructions":
                begin, head = len(digests), digests[-1].hex()
            if message.role == "user" and len(user_texts) < _MAX_PARTS:
                user_texts.append(_chained(user_texts[-1] if user_texts else b"", message.user_text, b"user texts"))
        return PromptParts(tuple(digests), tuple(characters), tuple(turns), head, begin, tuple(user_texts))


class TokenFates(NamedTuple):
    """The uncached prompt tokens of a request, by the reason why they had to be computed."""

    first: int = 0
    """The session's first request."""
    new: int = 0
    """Not sent before in this session."""
    front: int = 0
    """In messages that were sent before, behind instructions or tools that have changed since; estimated."""
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
    fates: list[int] = field(default_factory=lambda: [0] * len(TokenFates._fields))
    prompts: list[_SentPrompt] = field(default_factory=list)
    """The latest prompts, one of each kind: sub-agents, titles and summaries have others than the conversation."""
    first_turn: int = 0
    """Messages of the model in the first prompt, such as examples: other sessions may begin with the same."""
    turn: int = 0
    """Messages of the model in the prompt that was asked last."""
    head: str = ""
    """Name of the instructions and tools in that prompt."""
    user_text: bytes = b""
    """Digest of the user's texts in that prompt."""
    end: bytes = b""
    """Digest of the whole conversation in that prompt."""
    parent: str | None = None
    """Key of the session whose prompt the first one begins with, such as that of the agent that started this one."""
    multiple: int = 0
    """Greatest common divisor of all reported counts of cached tokens."""
    is_named: bool = False
    """True if its requests name it."""
    is_answered: bool = False
    """True if another gateway has got an answer to one of its requests."""
    version: int = 0
    """Counts what gateways that share their sessions have written of this one."""
    upstream: str = ""
    """Upstream of its latest request, of all these gateways."""

    def has_head(self, head: str) -> bool:
        """Return True if one of the latest prompts has these instructions and tools."""
        return head == self.head or any(prompt.parts.head == head for prompt in self.prompts)

    def before(self, parts: PromptParts) -> _SentPrompt | None:
        """Return the prompt that a new one can continue; None for the first of its kind."""
        alike = [prompt for prompt in self.prompts if prompt.parts.head == parts.head]
        if alike:
            return max(reversed(alike), key=lambda prompt: _common(prompt.parts, parts))
        return max(reversed(self.prompts), key=_conversation_of(parts), default=None) if parts.turn else None

    def keep(self, sent: _SentPrompt) -> None:
        """Remember a prompt as the latest of its kind."""
        before = self.before(sent.parts)
        if before is not None and _conversation_of(sent.parts)(before):
            self.prompts.remove(before)
        elif len(self.prompts) >= _MAX_PROMPTS:
            del self.prompts[0]
        self.prompts.append(sent)


@dataclass(frozen=True, slots=True, eq=False)
class _SentPrompt:
    parts: PromptParts
    tokens: int | None
    """Its length, as the engine reported it."""
    rate: float
    """Tokens per character of its latest messages."""

    def held(self, parts: PromptParts) -> float:
        """Return how many tokens of a new prompt stand at the beginning of this one: exact if it continues this one."""
        shared = _common(self.parts, parts)
        if self.tokens is None or not shared:
            return 0.0
        end, total = self.parts.characters[shared - 1], self.parts.characters[-1]
        if 2 * end < total:
            return self.tokens * end / total
        return max(self.tokens - max(self.rate, _LEAST_RATE) * (total - end), 0.0)

    def moved(self, parts: PromptParts) -> int:
        """Return about how many tokens of this one's messages a new prompt has behind another head."""
        if self.tokens is None or self.parts.head == parts.head:
            return 0
        begin, end = self.parts.begin - 1, self.parts.begin - 1 + _conversation_of(parts)(self)
        texts = self.parts.characters
        return int(self.tokens * (texts[end] - texts[begin]) / max(texts[-1], 1))


class SessionBook:
    """The sessions of the latest requests, each within its tenant, in fair shares. Not thread-safe.

    A session is named by a header or a field of the body. Otherwise, a request belongs to the session that it
    continues: whose conversation is the longest beginning of its own, or else whose texts of the user are, if the
    application changed the other messages. What no model has answered yet, such as a greeting, can begin many sessions,
    so it stands for the one that has not gone on from there. Instructions may change within a session. Sessions decide
    about routes and statistics, never about a text.

    The names of unnamed sessions begin with `origin`, so that several gateways give different ones.
    """

    def __init__(self, max_parts: int = _MAX_PARTS_OF_ALL, origin: str = "") -> None:
        self._sessions: FairLru[tuple[str | None, str], Session] = FairLru()
        self._ends: FairLru[tuple[str | None, bytes], tuple[str, ...]] = FairLru()
        """Sessions with a prompt that ended here, latest first."""
        self._max_parts = max_parts
        self._origin = origin
        self._number = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """Yield the sessions, latest first. O(sessions)."""
        return reversed(list(self._sessions.values()))

    def find(self, tenant: str | None, name: str | None, parts: PromptParts, parent: str | None = None) -> Session:
        """Return the session of a request, a new one if it has none. O(messages).

        `parent` names the session that started it, which counts if both have the same instructions and tools.
        """
        key = session_key(name) if name else self._continued(tenant, parts)
        if key is None:
            self._number += 1
            key = f"session {self._origin}{self._number}"
        begun = self._starter(tenant, name, parts, parent) if self._sessions.get((tenant, key)) is None else None
        session = self._known(tenant, key, parts.turn)
        session.is_named = bool(name)
        session.parent = session.parent or begun
        session.turn, session.head, session.end = parts.turn, parts.head, parts.digests[-1]
        session.user_text = parts.user_texts[-1] if parts.user_texts else b""
        self.end(session, parts)
        return session

    def _starter(self, tenant: str | None, name: str | None, parts: PromptParts, parent: str | None) -> str | None:
        """Return the key of the session that a new one begins with."""
        starter = self._sessions.get((tenant, session_key(parent))) if parent else None
        if starter is not None and starter.has_head(parts.head):
            return starter.key
        return self._continued(tenant, parts) if name else None

    def _known(self, tenant: str | None, key: str, first_turn: int) -> Session:
        session = self._sessions.use((tenant, key))
        if session is None:
            session = Session(key, tenant, first_turn=first_turn)
            self._put(session)
        return session

    def learn(self, tenant: str | None, key: str, first_turn: int, version: int, upstream: str) -> tuple[Session, bool]:
        """Return a session that another gateway has written, and whether that is news here."""
        session = self._known(tenant, key, first_turn)
        is_own = (version, upstream) == (session.version, session.upstream)
        return session, version >= session.version and not is_own

    def end(self, session: Session, parts: PromptParts) -> None:
        """Remember the end of a prompt of a session, by which a longer one finds it."""
        tenant, key = session.tenant, session.key
        # Some clients do not keep the last message of a prompt.
        for end in (*parts.digests[parts.begin :][-2:], *parts.user_texts[-1:]):
            others = [other for other in self._ends.get((tenant, end)) or () if other != key]
            self._ends.put((tenant, end), (key, *others[: _MAX_AT_ONE_END - 1]), tenant)
            self._ends.use((tenant, end))
            if len(self._ends) > _MAX_ENDS:
                self._ends.evict()

    def _continued(self, tenant: str | None, parts: PromptParts) -> str | None:
        for at in range(len(parts.digests) - 1, parts.begin - 1, -1):
            keys = self._ends.get((tenant, parts.digests[at]))
            if keys is None:
                continue
            turn = parts.turns[at]
            found = [
                session
                for session in self._named(tenant, keys)
                if turn > session.first_turn
                or turn == session.turn < parts.turn
                or (
                    at == len(parts.digests) - 1
                    and session.head == parts.head
                    and (turn or not (session.requests or session.is_answered))
                )  # a retry
            ]
            if found:
                # Sessions that begin alike may get the same answer: the one that waits for this request comes first.
                ends = parts.digests[max(at - 1, parts.begin) : at + 1]
                waiting = self._named(tenant, self._ends.get((tenant, ends[0])) or ())
                found += [session for session in waiting if session.end == ends[0]]
                return max(found, key=lambda session: (session.has_head(parts.head), session.end in ends)).key
        for digest in reversed(parts.user_texts[1:]):  # many sessions may have the first one
            found = [
                session
                for session in self._named(tenant, self._ends.get((tenant, digest)) or ())
                if session.user_text == digest and session.turn < parts.turn
            ]
            if found:
                return max(found, key=lambda session: (session.has_head(parts.head), session.turn)).key
        return None

    def _named(self, tenant: str | None, keys: Sequence[str]) -> Iterator[Session]:
        for key in keys:
            if (session := self._sessions.get((tenant, key))) is not None:
                yield session

    def _put(self, session: Session) -> None:
        parts = sum([len(prompt.parts.digests) for prompt in session.prompts])
        self._sessions.put((session.tenant, session.key), session, session.tenant, _PARTS_OF_SESSION + parts)
        while self._sessions.size > self._max_parts and len(self._sessions) > 1:
            self._sessions.evict()[1].prompts.clear()

    def keep(self, session: Session, parts: PromptParts, prompt_tokens: int | None = None, rate: float = 0.0) -> None:
        """Remember the latest prompt of a session, unless it was forgotten meanwhile."""
        if self._sessions.get((session.tenant, session.key)) is session:
            session.keep(_SentPrompt(parts, prompt_tokens, rate))
            self._put(session)

    def record(
        self,
        session: Session,
        parts: PromptParts,
        prompt_tokens: int,
        cached_tokens: int | None,
        *,
        is_behind: bool = False,
    ) -> TokenFates:
        """Record the answer to a request of a session, and return what became of its uncached tokens. O(messages).

        Without a report of cached tokens, no token has a fate. `is_behind` means that the upstream puts the history in
        front of the parts.
        """
        before = session.prompts[-1] if is_behind and session.prompts else session.before(parts)
        self.keep(session, parts, prompt_tokens, _rate(before, parts, prompt_tokens))
        session.prompt_tokens += prompt_tokens
        if cached_tokens is None:
            session.unreported_tokens += prompt_tokens
            return TokenFates()
        uncached = max(prompt_tokens - cached_tokens, 0)
        session.multiple = gcd(session.multiple, cached_tokens)
        if before is None:
            fates = TokenFates(first=uncached)
        else:
            # Caches hold whole blocks: the rest of the last one was never there.
            block = min(session.multiple & -session.multiple, _MAX_BLOCK) or 1
            before_tokens = (before.tokens or 0) if is_behind else before.held(parts)
            held = int(min(before_tokens, prompt_tokens)) // block * block
            lost = min(max(held - cached_tokens, 0), uncached)
            # The last message of a prompt may be replaced at each turn.
            messages = len(before.parts.digests) - before.parts.begin
            is_cut = not is_behind and _conversation_of(parts)(before) < messages - 1
            front = 0 if is_behind else min(before.moved(parts), uncached - lost)
            rest = uncached - lost - front
            fates = TokenFates(new=0 if is_cut else rest, front=front, cut=rest if is_cut else 0, lost=lost)
        session.cached_tokens += cached_tokens
        session.fates = [total + more for total, more in zip(session.fates, fates, strict=True)]
        return fates


def _rate(before: _SentPrompt | None, parts: PromptParts, prompt_tokens: int) -> float:
    """Return the tokens per character of what was added to a prompt, or else of all of it."""
    if before is None or before.tokens is None:
        return prompt_tokens / max(parts.characters[-1], 1)
    added = parts.characters[-1] - before.parts.characters[-1]
    if added >= _LEAST_ADDED and _common(before.parts, parts) == len(before.parts.digests):
        return max(prompt_tokens - before.tokens, 0) / added
    return before.rate


def session_key(name: str) -> str:
    """Return the key of the session with a name: the name, or a digest of a long one."""
    return name if len(name) <= _MAX_NAME else blake2b(name.encode("utf-8", "replace")).hexdigest()


def session_name(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """Return the session that a request names; None if it names none."""
    for name in _HEADERS:
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
    """Return the parts of a body's prompt. O(characters)."""
    return front_parts(body).followed_by(canonical_messages(route, body))


def front_parts(body: Mapping[str, Any]) -> PromptParts:
    """Return the part in front of the messages. O(characters)."""
    front = canonical_front(body)
    digest = _chained(b"", front)
    return PromptParts((digest,), (len(front),), (0,), digest.hex(), 1, ())


def _chained(before: bytes, text: str, kind: bytes = b"") -> bytes:
    """Return the digest of a text behind others."""
    content = text.encode("utf-8", "surrogatepass")
    return blake2b(content, digest_size=16, salt=before, person=kind).digest()


def _common(one: PromptParts, other: PromptParts) -> int:
    """Return how many parts two prompts share."""
    if one.head != other.head:
        return _shared(one.digests[: one.begin], other.digests[: other.begin])
    return one.begin + _shared(one.digests[one.begin :], other.digests[other.begin :])


def _conversation_of(parts: PromptParts) -> Callable[[_SentPrompt], int]:
    """Return a function that counts the messages which a sent prompt shares with this one, behind the instructions."""
    messages = parts.digests[parts.begin :]
    return lambda sent: _shared(sent.parts.digests[sent.parts.begin :], messages)


def _shared(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Return how many digests two chains share: a shared one means that all before it are."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
