"""Hits of a prefix cache without bound, computed on segments.

The result is that of the emulator's `PrefixCache`, one request after another and without the answers. Prompts are kept
in the order of their tokens: a new one has most in common with one of its neighbours there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import islice

from warmprefix_tools.doctor.request_log import (
    PLAIN,
    TOKEN_BYTES,
    LogMessage,
    LogVersion,
    Memo,
    Prompt,
    SegmentPool,
    common_length,
)

__all__ = ["CacheOutcome", "prompt_tokens", "seen_tokens", "shared_tokens", "simulate"]

_RenderedPrompt = tuple[bytes, ...]
"""Tokens of each segment with text, chat template included. A segment's tokens are one object in all prompts."""


@dataclass(frozen=True, slots=True)
class CacheOutcome:
    """Hits of one version of a log, request by request."""

    prompt_tokens: list[int]
    hit_tokens: list[int]
    donors: list[int | None]
    """An earlier request that had what this one found."""

    def gains(self, before: CacheOutcome) -> list[int]:
        """Return the tokens per request that are no longer computed. Tokens added to a prompt do not count as gains."""
        sizes = zip(self.hit_tokens, before.hit_tokens, self.prompt_tokens, before.prompt_tokens, strict=True)
        return [hits - old_hits - max(tokens - old_tokens, 0) for hits, old_hits, tokens, old_tokens in sizes]


def simulate(version: LogVersion, pool: SegmentPool, block_size: int) -> CacheOutcome:
    """Run a version of the log through a cache of KV blocks that evicts nothing."""
    prompts: defaultdict[Hashable, list[_RenderedPrompt]] = defaultdict(list)
    requests: defaultdict[Hashable, list[int]] = defaultdict(list)
    totals, hits = [], []
    donors: list[int | None] = []
    for request, (scope, prompt) in enumerate(zip(version.scopes(), _rendered(version, pool), strict=True)):
        known, of_request = prompts[scope], requests[scope]
        at = bisect_left(known, prompt)
        found = max(
            ((_shared(prompt, known[i]), of_request[i]) for i in (at - 1, at) if 0 <= i < len(known)), default=None
        )
        if not (at < len(known) and known[at] == prompt):
            known.insert(at, prompt)
            of_request.insert(at, request)
        total = _count(prompt)
        totals.append(total)
        tokens, donor = found or (0, None)
        hits.append(max(min(tokens, total - 1), 0) // block_size * block_size)  # an engine computes the last token
        donors.append(donor if tokens else None)
    return CacheOutcome(totals, hits, donors)


def seen_tokens(version: LogVersion, pool: SegmentPool) -> list[int]:
    """Count per request the tokens of segments that an earlier request of its cache scope had, at any place."""
    seen_by_scope: defaultdict[Hashable, set[bytes]] = defaultdict(set)
    tokens = []
    for scope, prompt in zip(version.scopes(), _rendered(version, pool), strict=True):
        seen = seen_by_scope[scope]
        tokens.append(_count(filter(seen.__contains__, prompt)))
        seen.update(prompt)
    return tokens


def shared_tokens(version: LogVersion, pool: SegmentPool, one: int, other: int) -> int:
    """Return how many tokens two prompts of one version share at their start, chat template included."""
    if version.salts[one] != version.salts[other]:
        return 0
    pair = LogVersion([version.prompts[one], version.prompts[other]], [], [])
    first, second = _rendered(pair, pool, with_answer=False)
    return _shared(first, second)


def prompt_tokens(prompt: Prompt, pool: SegmentPool) -> bytes:
    """Return the tokens of one prompt, `TOKEN_BYTES` big-endian bytes each."""
    return b"".join(next(_rendered(LogVersion([prompt], [], []), pool)))


def _rendered(version: LogVersion, pool: SegmentPool, *, with_answer: bool = True) -> Iterator[_RenderedPrompt]:
    """Render each prompt with the chat template."""

    def render(message: LogMessage) -> list[bytes]:
        ids = list(message.ids)
        if message.role != PLAIN:
            ids = [pool.message_head(message.role), *ids, pool.message_end]
        return [*filter(None, map(pool.packed_tokens, ids))]

    messages = Memo[LogMessage, list[bytes]](render)
    head = pool.packed_tokens(pool.message_head("assistant"))
    for prompt in version.prompts:
        parts = [part for message in prompt for part in messages[message]]
        yield (*parts, head) if with_answer and prompt[-1].role != PLAIN else tuple(parts)


def _count(parts: Iterator[bytes] | _RenderedPrompt) -> int:
    return sum(map(len, parts)) // TOKEN_BYTES


def _shared(one: _RenderedPrompt, other: _RenderedPrompt) -> int:
    """Return the number of tokens that two prompts share at their start."""
    segments = common_length(one, other)
    size = sum(map(len, islice(one, segments)))
    if segments < min(len(one), len(other)):
        size += common_length(one[segments], other[segments]) // TOKEN_BYTES * TOKEN_BYTES
    return size // TOKEN_BYTES
