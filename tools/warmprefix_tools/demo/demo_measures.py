"""The numbers of a run, the prompts that its report shows, and how much of each was cached."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from warmprefix.plan import Placement
from warmprefix_tools.demo.session import ArmRuns, DemoTurn, ServedTurn
from warmprefix_tools.emulator import ChatMessage, render_chat
from warmprefix_tools.retriever import content_words

__all__ = ["ArmSummary", "PromptExample", "pick_examples", "prompt_lines", "summarize_arm", "summarize_workload"]

_KV_BLOCK = 16  # tokens
_MESSAGE_END = 2  # tokens
_LAST_OF_ANSWER = 1 + _MESSAGE_END  # tokens that the engine did not compute when it gave the answer


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """Totals of one arm under one placement. Token counts are the engine's, None if it does not report them."""

    requests: int
    prompt_tokens: int | None
    cached_tokens: int | None
    ttft_p50: float
    """Seconds, planning included."""
    ttft_p95: float
    planning_p50: float | None
    reordered: int
    """Prompts whose blocks are in another order than the retriever's."""
    annotated: int
    """Prompts that have an order annotation."""
    note_tokens: int
    """Tokens of labels, notes and references that the prompts write, by the planner's own estimate."""
    references: int
    reference_tokens: int
    """Context tokens that references save, by the planner's own estimate."""

    @property
    def hit_ratio(self) -> float | None:
        """Share of the prompt tokens that were cached."""
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens

    @property
    def prefilled_tokens(self) -> int | None:
        """Prompt tokens that the engine had to compute."""
        if self.cached_tokens is None or self.prompt_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens


def summarize_arm(served: Sequence[ServedTurn]) -> ArmSummary:
    """Return the totals of an arm's requests, of which there must be at least one."""
    prompts = [each.answer.prompt_tokens for each in served if each.answer.prompt_tokens is not None]
    # vLLM omits the field from an answer without a hit: missing everywhere means not reported, else it means 0.
    cached = [each.answer.cached_tokens for each in served if each.answer.cached_tokens is not None]
    ttfts = [each.ttft for each in served]
    planning = [each.context.planning_seconds for each in served if each.context.planning_seconds is not None]
    return ArmSummary(
        requests=len(served),
        prompt_tokens=sum(prompts) if len(prompts) == len(served) else None,
        cached_tokens=sum(cached) if cached else None,
        ttft_p50=_quantile(ttfts, 0.5),
        ttft_p95=_quantile(ttfts, 0.95),
        planning_p50=_quantile(planning, 0.5) if planning else None,
        reordered=sum(each.context.reordered for each in served),
        annotated=sum(each.context.order_annotation is not None for each in served),
        note_tokens=sum(each.context.note_tokens for each in served),
        references=sum(block.is_reference for each in served for block in each.context.blocks),
        reference_tokens=sum(each.context.reference_tokens for each in served),
    )


def _quantile(values: Iterable[float], share: float) -> float:
    """Return the least value that at least `share` of the values do not exceed.

    >>> _quantile([4, 1, 3, 2], 0.5), _quantile([4, 1, 3, 2], 0.95)
    (2, 4)
    """
    ranked = sorted(values)
    return ranked[max(math.ceil(share * len(ranked)) - 1, 0)]


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    """Properties of the questions, and the overlap of their retrievals, whatever the order of blocks."""

    questions: int
    distinct_questions: int
    """By the words that the retriever sees."""
    users: int
    conversations: int
    distinct_blocks: int
    context_tokens: int
    """Of all requests together, by the planner's estimate."""
    seen_by_anyone: float
    """Mean share of a request's blocks that an earlier request had retrieved too."""
    seen_in_conversation: float
    """Mean share that the same conversation had retrieved before."""
    repeated_sets: float
    """Share of requests that retrieved exactly the blocks of an earlier one, in any order."""


def summarize_workload(turns: Sequence[DemoTurn]) -> WorkloadSummary:
    """Return the properties of a workload from its turns in order of arrival."""
    seen: set[bytes] = set()
    seen_sets: set[frozenset[bytes]] = set()
    by_conversation: defaultdict[int, set[bytes]] = defaultdict(set)
    by_anyone: list[float] = []
    in_conversation: list[float] = []
    repeated = 0
    for turn in turns:
        blocks = frozenset(block.fingerprint for block in turn.blocks)
        own = by_conversation[turn.question.conversation]
        by_anyone.append(len(blocks & seen) / max(len(blocks), 1))
        in_conversation.append(len(blocks & own) / max(len(blocks), 1))
        repeated += blocks in seen_sets
        seen |= blocks
        own |= blocks
        seen_sets.add(blocks)
    return WorkloadSummary(
        questions=len(turns),
        distinct_questions=len({frozenset(content_words(turn.question.query)) for turn in turns}),
        users=len({turn.question.user for turn in turns}),
        conversations=len(by_conversation),
        distinct_blocks=len(seen),
        context_tokens=sum(block.tokens for turn in turns for block in turn.blocks),
        seen_by_anyone=sum(by_anyone) / len(turns),
        seen_in_conversation=sum(in_conversation) / len(turns),
        repeated_sets=repeated / len(turns),
    )


# -- example prompts -------------------------------------------------------------------------------------------------


class PromptExample(NamedTuple):
    """The requests of both arms for one question."""

    title: str
    placement: Placement
    before: ServedTurn
    after: ServedTurn


class PromptLine(NamedTuple):
    """A context block in its place in a prompt, or the history before all blocks."""

    label: str
    is_reference: bool
    cached: Literal["all", "part", "none", "unknown"]
    is_history: bool = False


def pick_examples(runs: ArmRuns) -> list[PromptExample]:
    """Return a typical reordered prompt, a typical one with references, and the one that gained least.

    The reordered one has a note if any has one. Typical is the median of the saved tokens over all such prompts. A kind
    without prompts has no example.
    """
    pairs = [
        PromptExample("", placement, before, after)
        for placement, (relevance, warmprefix) in runs.items()
        for before, after in zip(relevance, warmprefix, strict=True)
    ]
    first = [pair for pair in pairs if pair.placement == pairs[0].placement]
    reordered = [pair for pair in first if pair.after.context.reordered]
    noted = [pair for pair in reordered if pair.after.context.order_annotation is not None]
    referring = [pair for pair in pairs if pair.after.context.reference_tokens]
    kinds = (
        ("A typical prompt with another order", noted or reordered, 0.5),
        ("A typical prompt with references", referring, 0.5),
        ("The prompt that gained least", first, 0.0),
    )
    return [
        sorted(group, key=_saved)[int(share * len(group))]._replace(title=title)
        for title, group, share in kinds
        if group
    ]


def _saved(pair: PromptExample) -> int:
    """Return the number of tokens that warmprefix's prompt saved the engine."""
    before, after = pair.before.answer, pair.after.answer
    if before.prompt_tokens is None or after.prompt_tokens is None:
        return 0
    return before.prompt_tokens - (before.cached_tokens or 0) - after.prompt_tokens + (after.cached_tokens or 0)


def prompt_lines(served: ServedTurn, placement: Placement) -> list[PromptLine]:
    """Return the context of one prompt from its beginning, with how much of each block was cached.

    The engine reports how many tokens of the whole prompt it found. The emulator's tokenizer places their end in the
    text, which is an estimate for another engine.
    """
    messages = [ChatMessage(message["role"], message["content"]) for message in served.messages]
    place = 0 if placement == "head" else len(messages) - 1
    before, holder = messages[:place], messages[place]
    answer = served.answer
    cached: float | None = None
    if answer.cached_tokens is not None and answer.prompt_tokens:
        cached = answer.cached_tokens * len(render_chat(messages)) / answer.prompt_tokens

    def line(label: str, is_reference: bool, start: int, end: int) -> PromptLine:
        # Less than a KV block counts as nothing, because it cannot be cached alone.
        if cached is None:
            return PromptLine(label, is_reference, "unknown")
        if end - cached < _KV_BLOCK:
            return PromptLine(label, is_reference, "all")
        return PromptLine(label, is_reference, "part" if cached - start >= _KV_BLOCK else "none")

    def tokens_before(position: int) -> int:
        cut = ChatMessage(holder.role, holder.text[:position])
        return len(render_chat([*before, cut], add_generation_prompt=False)) - _MESSAGE_END

    lines: list[PromptLine] = []
    if len(before) > 1:
        end = len(render_chat(before, add_generation_prompt=False))
        history = line(f"(history, {end:,} tokens)", False, 0, end - _LAST_OF_ANSWER)
        lines.append(history._replace(is_history=True))
    offset = 0
    for block in served.context.blocks:
        start = holder.text.index(block.text, offset)
        offset = start + len(block.text)
        lines.append(line(block.label, block.is_reference, tokens_before(start), tokens_before(offset)))
    return lines
