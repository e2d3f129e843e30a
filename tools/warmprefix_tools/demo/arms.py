"""The two ways to put retrieved blocks into a prompt that the demo compares."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from warmprefix.annotate import Templates
from warmprefix.blocks import ContextBlock
from warmprefix.labels import label_candidates
from warmprefix.plan import Placement
from warmprefix.planner import ContextPlanner
from warmprefix_tools.demo.prompts import Message

__all__ = ["Arm", "Context", "RelevanceOrder", "ShownBlock", "Warmprefix"]


@dataclass(frozen=True, slots=True)
class ShownBlock:
    """A context block as a prompt shows it."""

    label: str
    text: str
    is_reference: bool


@dataclass(frozen=True, slots=True)
class Context:
    """What an arm makes of one request's blocks."""

    blocks: tuple[ShownBlock, ...]
    order_annotation: str | None
    text: str
    cache_salt: str | None
    reference_tokens: int = 0
    planning_seconds: float | None = None


class Arm(Protocol):
    """Arranges contexts; within the block of `context`, the model is asked."""

    def context(
        self, blocks: Sequence[ContextBlock], history: Sequence[Message]
    ) -> AbstractAsyncContextManager[Context]:
        """The request's context; `history` is the conversation so far, as it will be sent."""
        ...


class RelevanceOrder:
    """Every block, labelled, in the retriever's order: what applications send without warmprefix."""

    def __init__(self, cache_salt: str) -> None:
        self._cache_salt = cache_salt
        self._templates = Templates()

    @asynccontextmanager
    async def context(self, blocks: Sequence[ContextBlock], history: Sequence[Message]) -> AsyncIterator[Context]:
        """All of the blocks, whatever the history holds."""
        labels = [next(label_candidates(block)) for block in blocks]
        shown = tuple(
            ShownBlock(label, self._templates.block(label, block.text), is_reference=False)
            for label, block in zip(labels, blocks, strict=True)
        )
        yield Context(shown, None, "\n\n".join(block.text for block in shown), self._cache_salt)


class Warmprefix:
    """The same blocks, through a planner of its own."""

    def __init__(
        self, placement: Placement, tenant: str, model: str, instructions: str, capacity_tokens: int | None
    ) -> None:
        self._planner = ContextPlanner(capacity_tokens=capacity_tokens)
        self._placement: Placement = placement
        self._tenant = tenant
        self._model = model
        self._instructions = instructions

    @asynccontextmanager
    async def context(self, blocks: Sequence[ContextBlock], history: Sequence[Message]) -> AsyncIterator[Context]:
        """The planned context: committed when the block ends, abandoned if it fails."""
        started = time.perf_counter()
        async with self._planner.aplanning(
            blocks,
            placement=self._placement,
            tenant=self._tenant,
            model=self._model,
            preamble=self._instructions,
            history=history if self._placement == "tail" else None,
        ) as plan:
            text = plan.render()
            seconds = time.perf_counter() - started
            shown = tuple(
                ShownBlock(planned.label, paragraph, planned.reference is not None)
                for planned, paragraph in zip(plan.blocks, plan.paragraphs(), strict=True)
            )
            yield Context(shown, plan.order_annotation, text, plan.cache_salt, plan.reference_tokens, seconds)
