"""Labels of conversations: what they cost, and what the references to them save."""

from __future__ import annotations

from warmprefix.plan import ContextPlan

__all__ = ["LabelSavings"]

_ALLOWANCE = 0.002
"""Share of the context that labels may cost without a saving, so that a later use of references is noticed."""

_FIRST_TOKENS = 1_024.0
"""Tokens that labels may cost before any conversation can have a second turn."""

_MOST_TOKENS = 16_384.0
"""Most tokens that earlier savings may pay for."""


class LabelSavings:
    """Decides for one scope whether blocks that join a conversation get labels.

    Only a labelled block can become a reference in a later turn. Where no block returns, labels are a loss. So they are
    written as long as references have saved more tokens than the labels cost, allowance included: all that labels ever
    lose is the allowance and the tokens of the start. Not thread-safe.
    """

    def __init__(self) -> None:
        self._balance = _FIRST_TOKENS

    def pay(self) -> bool:
        """Return True if labels pay."""
        return self._balance > 0

    def add(self, plan: ContextPlan) -> None:
        """Count a plan with tail placement that the model saw. O(blocks)."""
        sent = plan.total_tokens - plan.reference_tokens
        gained = plan.reference_tokens - plan.note_tokens + _ALLOWANCE * sent
        self._balance = min(self._balance + gained, _MOST_TOKENS)
