"""What a replay's tokens mean in seconds and money. Estimates: the replay knows tokens only."""

from __future__ import annotations

from dataclasses import dataclass

from warmprefix_tools.replay.result import ReplayResult

__all__ = ["Estimates"]


@dataclass(frozen=True, slots=True)
class Estimates:
    """An engine's speed and prices; None where they are not known.

    Order annotations count as prefilled. The preamble, and with placement `head` the history and the question, are
    left out: they cost the same today.
    """

    prefill_rate: float | None = None
    """Tokens a second."""
    price: float | None = None
    """Of a million prefilled tokens."""
    cached_price: float = 0.0
    """Of a million tokens found in the cache."""

    def ttft_seconds(self, result: ReplayResult) -> float | None:
        """The mean share of a request's time to first token that its prefill has, on an idle engine."""
        return self._seconds(result.prefilled_tokens + result.annotation_tokens, result.requests)

    def ttft_seconds_today(self, result: ReplayResult) -> float | None:
        """The same if nothing is ordered and nothing de-duplicated."""
        return self._seconds(result.today_prefilled_tokens, result.requests)

    def cost(self, result: ReplayResult) -> float | None:
        """Of all prompts together."""
        return self._cost(result.prefilled_tokens + result.annotation_tokens, result.saved_tokens)

    def cost_today(self, result: ReplayResult) -> float | None:
        """The same if nothing is ordered and nothing de-duplicated."""
        return self._cost(result.today_prefilled_tokens, result.today_saved_tokens)

    def _seconds(self, tokens: int, requests: int) -> float | None:
        return None if self.prefill_rate is None else tokens / self.prefill_rate / max(requests, 1)

    def _cost(self, prefilled: int, cached: int) -> float | None:
        return None if self.price is None else (prefilled * self.price + cached * self.cached_price) / 1e6
