"""Memories into the planned order, nothing lost and nothing changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_mem0.steady import SteadyOrder

__all__ = ["Arranged", "Arranger", "Entry", "text_of"]

Entry = dict[str, Any]
"""A memory as Mem0 gives it."""

_log = logging.getLogger("warmprefix")


class Arranged(NamedTuple):
    """Memories in the order in which the prompt should have them."""

    entries: list[Entry]
    """Copies of all that came, unchanged."""
    context: str
    """Their texts for the prompt, each once."""
    order_annotation: str | None


class Arranger:
    """Plans the order of each search's memories, behind no history: a head placement.

    The plan is committed at once, since nobody tells here whether the model answered. At the worst a later search
    expects a prefix that the engine never saw.
    """

    def __init__(self, planner: ContextPlanner | None, annotate: bool = False) -> None:
        """Keep the last order of each tenant, for as long as the planner remembers the tenant.

        Raises:
            TypeError: `planner` is no ContextPlanner.
        """
        if planner is not None and not isinstance(planner, ContextPlanner):
            raise TypeError(f"planner must be a ContextPlanner or None, got {type(planner).__name__}")
        self.planner = ContextPlanner(policy=SteadyOrder) if planner is None else planner
        self.annotate = annotate
        self._failed_before = False

    def arrange(self, entries: Sequence[Entry], tenant: Callable[[], str]) -> Arranged:
        """Order the memories; as they came, if that fails.

        Args:
            entries: In relevance order.
            tenant: Tells whose they are. It may fail too.
        """
        try:
            return self._planned(entries, tenant())
        except Exception:
            self._failed()
            texts = [text for entry in entries if (text := text_of(entry)) and not text.isspace()]
            return Arranged(list(map(copy, entries)), _as_list(dict.fromkeys(texts)), None)

    def _planned(self, entries: Sequence[Entry], tenant: str) -> Arranged:
        with_text = [(i, text) for i, entry in enumerate(entries) if (text := text_of(entry)) is not None]
        blocks = [ContextBlock(text, id=_id_of(entries[i])) for i, text in with_text]
        with self.planner.planning(blocks, tenant=tenant) as plan:
            planned = [with_text[block.rank][0] for block in plan.blocks]
            # Behind them whatever is not a block of its own: a text that came before, or an entry without any.
            order = dict.fromkeys([*planned, *range(len(entries))])
            if self.annotate:
                context, note = plan.render(), plan.order_annotation
            else:
                context, note = _as_list(block.text for block in plan.blocks), None
            return Arranged([copy(entries[i]) for i in order], context, note)

    def _failed(self) -> None:
        """The one place where failing planning degrades to the order that Mem0 gave."""
        level = logging.DEBUG if self._failed_before else logging.WARNING
        self._failed_before = True
        _log.log(level, "planning the order of memories failed", exc_info=True)


def text_of(entry: object) -> str | None:
    """The memory itself. Mem0's hash is a digest of it, so it tells an updated memory from what it was before."""
    text = entry.get("memory") if isinstance(entry, Mapping) else None
    return text if isinstance(text, str) else None


def _id_of(entry: Entry) -> str | None:
    name = entry.get("id")
    return name if isinstance(name, str) else None


def _as_list(texts: Iterable[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)
