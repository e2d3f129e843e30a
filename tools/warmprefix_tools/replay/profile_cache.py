"""A replay's prompts in the cache of a profile: an engine that keeps checkpoints, or a hosted API."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate, count
from typing import Any

from warmprefix.cache_profiles import CacheProfile
from warmprefix_requests.marks import CacheUsage, MarkedPart, MarkPlanner
from warmprefix_tools.caches import CacheUse, Mark, MarkedPrompt, UnitTokens, serve, simulated_cache
from warmprefix_tools.replay.prompt_cache import ReplayPrompt
from warmprefix_tools.replay.workload import ReplayRequest

__all__ = ["ProfileCache"]

_KV_BLOCK = 16
_MOST_BLOCKS = 4_000_000


class ProfileCache:
    """Serves one prompt after another, and counts what the cache had of them.

    A prompt is the preamble, the pieces of `ReplayPrompt`, and an end that no other prompt has: the notes behind the
    context and the question, at least one token. Requests come at the trace's times; without these nothing expires.

    Args:
        profile: What the cache can do.
        capacity_tokens: Tokens that all layers of the engine together can hold; None for all prompts. Hosted APIs have
            no such bound.
        expected_tokens: Tokens of all contexts, to make room for where the capacity is None.
        requests: Number of prompts, for the same.
        preamble_tokens: Tokens in front of every context.
        plans_marks: Set the marks of a `MarkPlanner`, if the profile has marks. Otherwise there is only the mark that
            the API sets by itself.
    """

    def __init__(
        self,
        profile: CacheProfile,
        capacity_tokens: int | None,
        *,
        expected_tokens: int,
        requests: int,
        preamble_tokens: int = 0,
        plans_marks: bool,
    ) -> None:
        block = profile.checkpoints.block if profile.checkpoints else max(profile.unit, _KV_BLOCK)
        if capacity_tokens is None:
            tokens = 2 * expected_tokens + requests * (preamble_tokens + 8 * block)
        else:
            tokens = capacity_tokens
        self._cache = simulated_cache(profile, kv_blocks=min(tokens // block + 2, _MOST_BLOCKS), block_size=_KV_BLOCK)
        self._preamble_tokens = preamble_tokens
        self._now = 0.0
        self._marks: MarkPlanner | None = None
        if plans_marks and profile.marks is not None:
            self._marks = MarkPlanner(profile, count_tokens=len, clock=lambda: self._now)
        self._units = UnitTokens()
        self._ends = count()
        self.read = self.uncached = 0
        self._written: list[int] = []

    def serve(self, request: ReplayRequest, prompt: ReplayPrompt) -> int:
        """Serve a prompt of a replay; return the tokens that the engine had to compute. O(tokens)."""
        written = prompt.written or [0] * len(prompt.tokens)
        pieces = [*zip(prompt.keys, map(sum, zip(prompt.tokens, written, strict=True)), strict=True)]
        in_prompt = prompt.total_tokens + sum(written)
        answer = [pieces.pop()] if pieces and sum([length for _, length in pieces]) > in_prompt else []
        end = max(prompt.note_tokens - sum(written) + request.source.query_tokens - prompt.question_tokens, 1)
        return self.serve_pieces(pieces, end, request.source.scope, request.source.seconds or 0.0, answer)

    def serve_pieces(
        self,
        pieces: Sequence[tuple[Hashable, int]],
        end_tokens: int,
        scope: str | None,
        seconds: float = 0.0,
        answer: Sequence[tuple[Hashable, int]] = (),
    ) -> int:
        """Serve a prompt of pieces, each with its length in tokens, and an end that no other prompt has."""
        units = [("preamble", self._preamble_tokens), *pieces, (("end", next(self._ends)), end_tokens)]
        tokens = self._units.encode(units)
        ends = tuple(accumulate(length for _, length in units))
        last = len(units) - 1
        self._now = max(self._now, seconds)
        decision = None if self._marks is None else self._marks.decide(_parts(units), scope)
        marks = () if decision is None else tuple([Mark(*each) for each in decision.lifetimes.items()])
        marked = MarkedPrompt(tokens, scope, ends, marks, message_ends=(last,), automatic=decision is None)
        try:
            use = serve(self._cache, marked, self._now, answer=self._units.encode(answer))
        except ValueError:  # longer than the cache
            use = CacheUse(0, (), len(tokens))
        if self._marks is not None and decision is not None:
            self._marks.report(decision, CacheUsage(use.read, sum(use.written), use.uncached))
        self.read += use.read
        self.uncached += use.uncached
        self._written = [
            total + more
            for total, more in zip(self._written or [0] * len(use.written), use.written or (0,), strict=False)
        ]
        return use.tokens - use.read

    @property
    def use(self) -> CacheUse:
        """Sum over all prompts."""
        return CacheUse(self.read, tuple(self._written), self.uncached)


def _parts(units: Sequence[tuple[Any, int]]) -> list[MarkedPart]:
    """Return the parts of a prompt: the preamble, the pieces and the end."""
    first, *inner, last = [(repr(unit).encode(), length) for unit, length in units]
    pieces = [MarkedPart(unit, "inner", length, depth) for depth, (unit, length) in enumerate(inner)]
    return [MarkedPart(first[0], "system", first[1]), *pieces, MarkedPart(last[0], "end", last[1], len(inner))]
