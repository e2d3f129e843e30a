"""Labels of conversations: what they cost, and what the references to them save."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from warmprefix.blocks import ContextBlock
from warmprefix.plan import ContextPlan

__all__ = ["LabelSavings"]

_FIRST_TOKENS = 32.0
"""Tokens that labels may cost before any conversation can have a second turn: those of the first request."""

_MOST_TOKENS = 2_048.0
"""Most tokens that earlier savings may pay for."""

_CAUTION = 0.6
"""Share of a block's tokens that a reference surely saves: estimates of its length are often too high."""

_LABEL_TOKENS, _REFERENCE_TOKENS, _SENTENCE_TOKENS = 8, 9, 16
"""Per label, per reference, and per sentence that lists references; with usual tokenizers."""

_MISSED_TO_TRY = 4
"""Labels are tried once references would have saved this many times their cost."""
_LEAST_CAUTIOUS, _MOST_CAUTIOUS = 1, 64
"""Factors of that: it doubles with each attempt until references pay for one."""

_MOST_REMEMBERED = 2_048


class LabelSavings:
    """Decides for one scope whether blocks that join a conversation get labels.

    Only a labelled block can become a reference in a later turn. Where no block returns, labels are a loss. So the
    first request has labels, and further ones as long as references have saved more tokens than the labels cost.
    Otherwise labels are tried again when enough blocks without labels return in their conversations, ever more rarely
    while no reference pays for an attempt. Not thread-safe.
    """

    def __init__(self) -> None:
        self._balance = _FIRST_TOKENS
        self._missed = 0.0
        """Tokens that references would have saved lately, less the labels of all blocks."""
        self._caution = _LEAST_CAUTIOUS
        self._unlabelled: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        """Blocks without a label in conversations whose history is not shown."""

    def pay(self, referred: Iterable[ContextBlock] = ()) -> bool:
        """Return True if labels pay, given the blocks that references of the plan in question replace."""
        return self._balance + _saved(referred) > 0

    def returned(self, conversation: str | None, blocks: Iterable[ContextBlock]) -> list[ContextBlock]:
        """Return the blocks that the conversation had lately without labels."""
        if conversation is None or not self._unlabelled:
            return []
        return [block for block in blocks if (conversation, block.fingerprint) in self._unlabelled]

    def omit(self, blocks: int, returned: Sequence[ContextBlock]) -> None:
        """Count a plan whose `blocks` blocks in full have no labels, some of which are in the conversation already."""
        labels = _LABEL_TOKENS * blocks
        gain = _saved(returned) - _LABEL_TOKENS * (blocks - len(returned))
        self._missed = max(self._missed + gain, 0.0)
        if blocks and self._missed > _MISSED_TO_TRY * self._caution * labels:
            self._missed, self._balance = 0.0, 1.0
            self._caution = min(2 * self._caution, _MOST_CAUTIOUS)

    def add(self, plan: ContextPlan) -> None:
        """Count a plan with placement `"tail"` that the model saw. O(blocks)."""
        gained = _CAUTION * plan.reference_tokens - plan.note_tokens
        self._balance = max(min(self._balance + gained, _MOST_TOKENS), -_MOST_TOKENS)
        if gained > 0:
            self._caution = _LEAST_CAUTIOUS
        if plan.conversation is None or not plan.tracked:
            return
        for planned in plan.blocks:
            if not planned.label:
                self._unlabelled[plan.conversation, planned.block.fingerprint] = None
                self._unlabelled.move_to_end((plan.conversation, planned.block.fingerprint))
        while len(self._unlabelled) > _MOST_REMEMBERED:
            self._unlabelled.popitem(last=False)


def _saved(blocks: Iterable[ContextBlock]) -> float:
    """Return the tokens that references to blocks save, less those of the references."""
    saved = [_CAUTION * block.tokens - _REFERENCE_TOKENS for block in blocks]
    return sum(saved) - _SENTENCE_TOKENS if saved else 0.0
