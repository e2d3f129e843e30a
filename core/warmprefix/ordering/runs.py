"""Runs of blocks that stay together, which policies and batch planners order as single blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from warmprefix.ordering.policies import BlockView, PrefixView

__all__ = ["Runs", "runs_of"]


class _RunAsBlock(NamedTuple):
    """A run, as a policy sees it. Contexts share it from its first block on, so it has that block's identity."""

    fingerprint: bytes
    tokens: int


class Runs:
    """The runs of a request, each in place of its blocks."""

    def __init__(self, blocks: Sequence[BlockView], joined: Collection[int]) -> None:
        """Divide `blocks` in front of each that is not `joined` to the one before it."""
        self._places = runs_of(len(blocks), joined)
        self._blocks = {blocks[run[0]].fingerprint: [blocks[i] for i in run] for run in self._places}
        self.units: Sequence[BlockView] = [
            _RunAsBlock(first, sum([block.tokens for block in run])) for first, run in self._blocks.items()
        ]
        """One block per run, in relevance order: a run ranks by its first block."""

    def blocks_in(self, order: Sequence[int]) -> list[int]:
        """Return the indices of the blocks, for an order of the runs."""
        return [i for run in order for i in self._places[run]]

    def view(self, view: PrefixView) -> PrefixView:
        """Return the same view for runs."""
        return replace(view, runs=self._blocks, note_tokens=lambda order: view.note_tokens(self.blocks_in(order)))


def runs_of(blocks: int, joined: Collection[int]) -> list[range]:
    """Return the runs of some blocks, as ranges of indices."""
    starts = [i for i in range(blocks) if i not in joined]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], blocks], strict=True)]
