"""A replay's prompts in the cache of a profile: an engine that keeps checkpoints, or a hosted API."""

from __future__ import annotations

from itertools import count

from warmprefix.cache_profiles import CacheProfile
from warmprefix_tools.caches import CacheUse, MarkedPrompt, UnitTokens, serve, simulated_cache
from warmprefix_tools.replay.prompt_cache import ReplayPrompt
from warmprefix_tools.replay.workload import ReplayRequest, Workload

__all__ = ["ProfileCache", "check_profile"]

_KV_BLOCK = 16
_MOST_BLOCKS = 4_000_000


def check_profile(profile: CacheProfile) -> None:
    """Check that a replay can simulate a profile.

    Raises:
        ValueError: Its cache matches only at marks that the application has to set.
    """
    if profile.marks is not None and not profile.marks.automatic:
        raise ValueError(
            f"profile must be one that caches without marks, which a trace does not have, got {profile.name}"
        )


class ProfileCache:
    """Serves one prompt after another, and counts what the cache had of them.

    A prompt is the preamble, the pieces of `ReplayPrompt`, and an end that no other prompt has: the notes behind the
    context and the question, at least one token. Requests are so dense that nothing expires.

    Args:
        profile: One that `check_profile` accepts.
        capacity_tokens: Tokens that all layers of the engine together can hold; None for all prompts. Hosted APIs have
            no such bound.
        workload: The trace.
        preamble_tokens: Tokens in front of every context.
    """

    def __init__(
        self, profile: CacheProfile, capacity_tokens: int | None, workload: Workload, preamble_tokens: int
    ) -> None:
        block = profile.checkpoints.block if profile.checkpoints else max(profile.unit, _KV_BLOCK)
        if capacity_tokens is None:
            tokens = sum(2 * request.context_tokens + preamble_tokens + 8 * block for request in workload.requests)
        else:
            tokens = capacity_tokens
        self._cache = simulated_cache(profile, kv_blocks=min(tokens // block + 2, _MOST_BLOCKS), block_size=_KV_BLOCK)
        self._preamble_tokens = preamble_tokens
        self._units = UnitTokens()
        self._ends = count()
        self.read = self.uncached = 0
        self._written: list[int] = []

    def serve(self, request: ReplayRequest, prompt: ReplayPrompt) -> int:
        """Serve a prompt; return the tokens that the engine had to compute. O(tokens)."""
        written = prompt.written or [0] * len(prompt.tokens)
        pieces = [*zip(prompt.keys, map(sum, zip(prompt.tokens, written, strict=True)), strict=True)]
        in_prompt = prompt.total_tokens + sum(written)
        answer = [pieces.pop()] if pieces and sum([length for _, length in pieces]) > in_prompt else []
        end = max(prompt.note_tokens - sum(written) + request.source.query_tokens - prompt.question_tokens, 1)
        units = [("preamble", self._preamble_tokens), *pieces, (("end", next(self._ends)), end)]
        tokens = self._units.encode(units)
        ends = (self._preamble_tokens, len(tokens))
        marked = MarkedPrompt(tokens, request.source.scope, part_ends=ends, message_ends=(1,))
        try:
            use = serve(self._cache, marked, answer=self._units.encode(answer))
        except ValueError:  # longer than the cache
            use = CacheUse(0, (), len(tokens))
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
