"""An ordering policy for memories, and its use on search results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

from warmprefix import Branch, Choice, ContextBlock, ContextPlan, ContextPlanner, Templates, fingerprint
from warmprefix.annotate import Annotate, check_annotate, has_bracket, has_labels
from warmprefix.ordering import BlockView, PrefixView
from warmprefix.planner import PlanOptions
from warmprefix_requests.choices import usable_choice
from warmprefix_requests.neighbours import PinRule, pin_of, with_kept_places

__all__ = ["ArrangedMemories", "Entry", "MemoryArranger", "SteadyOrder", "short_id", "text_of"]

Entry = dict[str, Any]
"""A memory as Mem0 returns it."""

_log = logging.getLogger("warmprefix")
_TEMPLATES = Templates()

_BRIEF_TOKENS, _BRIEF_TOKENS_IN_BRANCH = 16, 8
"""With usual tokenizers, label and reference take about as much as a shorter memory; labels in branches are short."""


class SteadyOrder:
    """Ordering policy for contexts that change little from turn to turn.

        planner = ContextPlanner(policy=SteadyOrder)

    Blocks that were in the last order come first, in that order; new ones follow in relevance order. One exception: if
    another resident path is predicted to hold more tokens, its blocks come first, followed by the other blocks of the
    last order. The first request stays in relevance order, and so does one whose order saves fewer tokens than its note
    takes; see `annotate` of `ContextReuseMemory`.
    """

    def __init__(self) -> None:
        self._last: tuple[bytes, ...] = ()

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        places = {block.fingerprint: i for i, block in enumerate(blocks)}
        kept = [places[key] for key in self._last if key in places]
        path = prefix.deepest_path(blocks)
        if sum(blocks[i].tokens for i in path) <= prefix.match_prefix([blocks[i] for i in kept]).tokens:
            path = []
        planned = list(dict.fromkeys([*path, *kept, *range(len(blocks))]))
        note = prefix.note_tokens(planned)
        if note:
            saved = prefix.match_prefix([blocks[i] for i in planned]).tokens - prefix.match_prefix(blocks).tokens
            if saved <= note:
                return range(len(blocks))
        return planned

    def observe(self, served: Sequence[BlockView]) -> None:
        self._last = tuple(block.fingerprint for block in served)


class ArrangedMemories(NamedTuple):
    """Memories in planned order."""

    entries: list[Entry]
    """Unchanged copies of all memories."""
    context: str
    """Texts of the memories for the prompt, each once."""
    order_annotation: str | None
    """Relevance-order note at the end of `context`, if there is one."""
    plan: ContextPlan | None = None
    """Plan of a conversation's turn, which the application commits or abandons; None if there is nothing to commit."""


class MemoryArranger:
    """Planner of search results: of their order in head placement, of their references in a conversation.

    Without a conversation, plans are committed at once, because a search does not learn whether the model answered. At
    worst a later search expects a prefix that the engine never saw.
    """

    def __init__(
        self,
        planner: ContextPlanner | None,
        annotate: Annotate = "none",
        order_locked: bool = False,
        pinned: PinRule[Entry] | None = None,
        choose: Choice | None = None,
    ) -> None:
        """Plan with `planner`, or with a new one that keeps the last order of each tenant.

        Raises:
            TypeError: `planner` is neither a ContextPlanner nor None, or `pinned` or `choose` has the wrong type.
            ValueError: `annotate` has another value, or `choose` can't work.
        """
        check_annotate(annotate)
        if planner is not None and not isinstance(planner, ContextPlanner):
            raise TypeError(f"planner must be a ContextPlanner or None, got {type(planner).__name__}")
        if not (pinned is None or isinstance(pinned, str) or callable(pinned)):
            raise TypeError(f"pinned must be a metadata key, a function or None, got {type(pinned).__name__}")
        if choose is not None:
            if not isinstance(choose, Choice):
                raise TypeError(f"choose must be a Choice or None, got {type(choose).__name__}")
            if order_locked:
                raise ValueError("choose must be None with order_locked=True: a locked order has nothing to exchange")
            if choose.scores != "similarity":
                raise ValueError(f"choose.scores must be 'similarity', as Mem0's scores are, got {choose.scores!r}")
        self.choose = choose
        self.planner = ContextPlanner(policy=SteadyOrder) if planner is None else planner
        self.annotate: Annotate = annotate
        self._order_locked = order_locked
        self._pinned = pinned
        self._failed_before = self._unscored_before = False

    def arrange(
        self,
        entries: Sequence[Entry],
        tenant: Callable[[], str],
        conversation: str | Branch | None = None,
        choose: Choice | None = None,
    ) -> ArrangedMemories:
        """Order the memories; if that fails, return them in the given order.

        Args:
            entries: Memories in relevance order.
            tenant: Returns the tenant of the memories. An error in it counts as a failure too.
            conversation: Conversation whose history keeps `context`; None for head placement.
            choose: Feed only `k` of them, and in a conversation the first ones; None to feed all.
        """
        try:
            entries, blocks, options = self._request(entries, tenant, conversation, choose)
            plan = self.planner.plan(blocks, **options)
            if conversation is None:
                self.planner.commit(plan)
            return _arranged(entries, plan)
        except Exception:
            return self._unplanned(entries if choose is None else entries[: choose.k])

    async def aarrange(
        self,
        entries: Sequence[Entry],
        tenant: Callable[[], str],
        conversation: str | Branch | None = None,
        choose: Choice | None = None,
    ) -> ArrangedMemories:
        """Do the same as `arrange`; searches of other tasks that are ready are considered."""
        try:
            entries, blocks, options = self._request(entries, tenant, conversation, choose)
            plan = await self.planner.aplan(blocks, **options)
            if conversation is None:
                await self.planner.acommit(plan)
            return _arranged(entries, plan)
        except Exception:
            return self._unplanned(entries if choose is None else entries[: choose.k])

    def _request(
        self,
        entries: Sequence[Entry],
        tenant: Callable[[], str],
        conversation: str | Branch | None,
        choose: Choice | None,
    ) -> tuple[Sequence[Entry], list[ContextBlock], PlanOptions]:
        """Return the memories that may be fed, their blocks and the options of their plan."""
        blocks = []
        scores = [None] * len(entries) if choose is None else _scores(entries)
        for entry, score in zip(entries, scores, strict=True):
            text = text_of(entry) or ""
            id = short_id(text) if isinstance(conversation, Branch) else _id_of(entry)
            pin = pin_of(self._pinned, entry, _metadata_of(entry))
            blocks.append(ContextBlock(text, id=id, score=score, pinned=pin))
        options: PlanOptions = {"tenant": tenant(), "annotate": self.annotate, "order_locked": self._order_locked}
        if choose is not None:
            usable = usable_choice(choose, blocks, entries)
            if usable.error is not None and conversation is None:
                level = logging.DEBUG if self._unscored_before else logging.WARNING
                self._unscored_before = True
                _log.log(level, "no choice, the first memories are fed: %s", usable.error)
            if usable.error is not None or conversation is not None:
                entries, blocks = entries[: usable.first], blocks[: usable.first]
            else:
                options["choose"] = usable.choice
        if conversation is not None:
            options |= {"placement": "tail", "conversation": conversation}
            if not self._order_locked:
                tokens = _BRIEF_TOKENS_IN_BRANCH if isinstance(conversation, Branch) else _BRIEF_TOKENS
                blocks = [block for block in blocks if block.pinned or not _is_brief(block, tokens)]
        return entries, blocks, options

    def _unplanned(self, entries: Sequence[Entry]) -> ArrangedMemories:
        """Log a failure, and return the memories in the order of Mem0: the one place that degrades."""
        level = logging.DEBUG if self._failed_before else logging.WARNING
        self._failed_before = True
        _log.log(level, "planning the order of memories failed", exc_info=True)
        texts = [text for entry in entries if (text := text_of(entry)) and not text.isspace()]
        return ArrangedMemories(list(map(copy, entries)), _as_escaped_list(texts), None)


def _is_brief(block: ContextBlock, tokens: int) -> bool:
    """Return True for one plain line of fewer tokens, for which no label pays; a conversation shows it each time."""
    return block.tokens < tokens and block.text.isprintable() and not has_bracket(block.text)


def _arranged(entries: Sequence[Entry], plan: ContextPlan) -> ArrangedMemories:
    """Return copies of the entries; `plan` comes from their blocks, in a conversation without the brief ones."""
    note = plan.order_annotation
    if plan.placement == "tail":
        planned = {block.block.text for block in plan.blocks}
        brief = [text for entry in entries if (text := text_of(entry)) and text not in planned and text.strip()]
        context = "\n\n".join(filter(None, [plan.render(), _as_escaped_list(brief)]))
        return ArrangedMemories(list(map(copy, entries)), context, note, plan)
    order = [block.rank for block in plan.blocks]
    if plan.entered is None:  # else the plan has all memories that are fed
        order += sorted([place for block in plan.blocks for place in block.positions[1:]])  # repeated texts
        placed = set(order)
        order = with_kept_places(order, [place for place in range(len(entries)) if place not in placed])
    if has_labels(plan.annotation):
        context = plan.render()
    else:
        context = _as_list(block.render() for block in plan.blocks) + ("" if note is None else f"\n\n{note}")
    return ArrangedMemories([copy(entries[i]) for i in order], context, note)


def _scores(entries: Sequence[Entry]) -> list[Any]:
    """Return the scores that the memories are sorted by: those of a reranker, if it has scored all of them."""
    reranked = [entry.get("rerank_score") for entry in entries]
    return [entry.get("score") for entry in entries] if None in reranked else reranked


def text_of(entry: object) -> str | None:
    """Return the text of a memory; None if it has none.

    The text identifies a memory: an updated memory keeps its id and gets another text.
    """
    text = entry.get("memory") if isinstance(entry, Mapping) else None
    return text if isinstance(text, str) else None


def short_id(text: str) -> str:
    """Return an id for a memory's text: a digest, as in a default label, but half as long, as each repeat shows it."""
    return f"m{fingerprint(text).hex()[:4]}"


def _metadata_of(entry: Entry) -> Mapping[str, Any]:
    metadata = entry.get("metadata") if isinstance(entry, Mapping) else None
    return metadata if isinstance(metadata, Mapping) else {}


def _id_of(entry: Entry) -> str | None:
    name = entry.get("id") if isinstance(entry, Mapping) else None
    return name if isinstance(name, str) else None


def _as_list(texts: Iterable[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)


def _as_escaped_list(texts: Iterable[str]) -> str:
    return _as_list(map(_TEMPLATES.escaped, dict.fromkeys(texts)))
