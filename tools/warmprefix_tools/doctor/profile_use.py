"""A log in the cache of a profile: an engine that keeps checkpoints, or a hosted API."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Literal

from warmprefix.cache_profiles import CacheProfile
from warmprefix_requests.marks import CacheUsage, MarkedPart, MarkPlanner
from warmprefix_tools.caches import CacheUse, Mark, MarkedPrompt, MarksRefusedError, serve, simulated_cache
from warmprefix_tools.doctor.request_log import PLAIN, TOOLS, Ids, LogMessage, LogRequest, Memo, RequestLog

__all__ = ["LogInProfile", "ServedLog"]

_KV_BLOCK = 16
_MOST_BLOCKS = 4_000_000
_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class ServedLog:
    """What the cache had of each request."""

    uses: list[CacheUse]
    refused: list[int]
    """Requests whose marks are against the rules of the API; all of their tokens count as uncached."""

    @property
    def total(self) -> CacheUse:
        """Sum over all requests."""
        lifetimes = max(len(use.written) for use in self.uses)
        written = [sum(use.written[at] for use in self.uses if at < len(use.written)) for at in range(lifetimes)]
        return CacheUse(sum(use.read for use in self.uses), tuple(written), sum(use.uncached for use in self.uses))


@dataclass(frozen=True, slots=True)
class _Sent:
    """One request as the cache sees it."""

    prompt: MarkedPrompt
    parts: list[MarkedPart]
    scope: Hashable


class LogInProfile:
    """Serves a log to a simulated cache of a profile, one request after another and without the answers.

    Requests come at the times that the log has; without these nothing expires. The cache has room for all of it.
    """

    def __init__(self, log: RequestLog, profile: CacheProfile) -> None:
        self.profile = profile
        self._log = log
        self._pool = log.pool
        self._tokens = Memo[LogMessage, Ids](self._tokens_of)
        self._ends = Memo[tuple[LogMessage, tuple[int, ...]], list[int]](lambda key: self._token_ends(*key))

    def serve(self, *, plans_marks: bool = False) -> ServedLog:
        """Return what the cache had of each request. O(tokens of the log).

        With `plans_marks` the requests have the marks of a `MarkPlanner` instead of their own.
        """
        block = self.profile.checkpoints.block if self.profile.checkpoints else max(self.profile.unit, _KV_BLOCK)
        room = sum(2 * len(sent.prompt.tokens) + 8 * block for sent in self._all_sent())
        cache = simulated_cache(self.profile, kv_blocks=min(room // block + 2, _MOST_BLOCKS), block_size=_KV_BLOCK)
        now = 0.0
        marks = MarkPlanner(self.profile, count_tokens=len, clock=lambda: now) if plans_marks else None
        served = ServedLog([], [])
        for number, (request, sent) in enumerate(zip(self._log.requests, self._all_sent(), strict=True)):
            now = max(now, request.seconds or 0.0)
            prompt = sent.prompt
            decision = None if marks is None else marks.decide(sent.parts, sent.scope)
            if decision is not None:
                planned = tuple([Mark(*each) for each in sorted(decision.lifetimes.items())])
                prompt = replace(prompt, marks=planned, automatic=False)
            try:
                use = serve(cache, prompt, now)
            except MarksRefusedError:
                served.refused.append(number)
                use = CacheUse(0, (), len(prompt.tokens))
            if marks is not None and decision is not None:
                marks.report(decision, CacheUsage(use.read, sum(use.written), use.uncached))
            served.uses.append(use)
        return served

    def unread_marks(self) -> list[int]:
        """Return the requests whose marked prefixes no other request has. O(tokens of the log)."""
        marked: list[list[bytes]] = []
        counts: Counter[bytes] = Counter()
        for sent in self._all_sent():
            digest = blake2b(repr(sent.scope).encode(), digest_size=16)
            prefixes: list[bytes] = []
            for part in sent.parts:
                digest.update(part.content)
                prefixes.append(digest.digest())
            counts.update(set(prefixes))
            marked.append([prefixes[mark.part] for mark in sent.prompt.marks])
        return [number for number, keys in enumerate(marked) if keys and all(counts[key] == 1 for key in keys)]

    def _all_sent(self) -> Iterator[_Sent]:
        return map(self._sent, self._log.requests)

    def _sent(self, request: LogRequest) -> _Sent:
        tokens: Ids = array("I")
        parts: list[MarkedPart] = []
        ends: list[int] = []
        marks: dict[int, Mark] = {}
        message_ends: list[int] = []
        lifetimes = {(mark.message, mark.end): mark.lifetime for mark in request.marks}
        for at, message in enumerate(request.messages):
            start = before = len(tokens)
            tokens.extend(self._tokens[message])
            characters = request.part_ends[at] if at < len(request.part_ends) else (0,)
            inner = [start + end for end in self._ends[message, characters]]
            inner[-1] = len(tokens)  # with the tokens that close the message
            for depth, (end, character) in enumerate(zip(inner, characters, strict=True)):
                kind = _kind(message.role, is_last=end is inner[-1], is_newest=message is request.messages[-1])
                content = f"{message.role}\n".encode() + tokens[before:end].tobytes()
                parts.append(MarkedPart(content, kind, end - before, depth, self._can_have_mark(message.role)))
                ends.append(end)
                before = end
                if (at, character) in lifetimes:
                    marks[len(parts) - 1] = Mark(len(parts) - 1, lifetimes[at, character])
            if message.role not in (*_SYSTEM, TOOLS, "assistant"):
                message_ends.append(len(parts) - 1)
        if request.messages[-1].role != PLAIN:
            tokens.extend(self._packed(self._pool.message_head("assistant")))
        scope = (request.model, request.salt, request.tenant)
        prompt = MarkedPrompt(tokens, repr(scope), tuple(ends), tuple(marks.values()), tuple(message_ends))
        return _Sent(prompt, parts, scope)

    def _can_have_mark(self, role: str) -> bool:
        rules = self.profile.marks
        return rules is None or ("system" if role in _SYSTEM else role) not in rules.refused_on

    def _tokens_of(self, message: LogMessage) -> Ids:
        pool = self._pool
        segments = list(message.ids)
        if message.role != PLAIN:
            segments = [pool.message_head(message.role), *segments, pool.message_end]
        tokens: Ids = array("I")
        for segment in segments:
            tokens.extend(self._packed(segment))
        return tokens

    def _packed(self, segment: int) -> Ids:
        return array("I", self._pool.packed_tokens(segment))

    def _token_ends(self, message: LogMessage, ends: tuple[int, ...]) -> list[int]:
        """Return the tokens of a message up to the end of each part; a part ends where a segment does."""
        pool = self._pool
        head = 0 if message.role == PLAIN else pool.token_counts[pool.message_head(message.role)]
        characters = accumulate([len(pool.texts[segment]) for segment in message.ids])
        tokens = accumulate([pool.token_counts[segment] for segment in message.ids], initial=head)
        before = [*zip(characters, tokens, strict=False)]  # each segment's last character, and the tokens before it
        found: list[int] = []
        position, total = 0, head
        for end in ends:
            while position < len(before) and before[position][0] <= end:
                total = before[position][1] + pool.token_counts[message.ids[position]]
                position += 1
            found.append(total)
        return found


def _kind(role: str, *, is_last: bool, is_newest: bool) -> Literal["tools", "system", "inner", "past", "end"]:
    if role == TOOLS:
        return "tools"
    if role in _SYSTEM:
        return "system"
    if not is_last:
        return "inner"
    return "end" if is_newest else "past"
