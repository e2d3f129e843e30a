"""The numbers of a run: what one arm cost, and how much of the retrieved text was not new."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from warmprefix_tools.demo.runner import Served, Turn
from warmprefix_tools.demo.words import content_words

__all__ = ["ArmSummary", "WorkloadSummary", "quantile", "summarize_arm", "summarize_workload"]


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """Totals of one arm under one placement. Token counts are the engine's, None where it does not report them."""

    requests: int
    prompt_tokens: int | None
    cached_tokens: int | None
    ttft_p50: float
    """Seconds, planning included."""
    ttft_p95: float
    planning_p50: float | None
    reordered: int
    """Prompts that have an order annotation."""
    references: int
    reference_tokens: int
    """Context tokens that the references spare, by the planner's own estimate."""

    @property
    def hit_ratio(self) -> float | None:
        """Share of the prompt tokens that the cache held."""
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens

    @property
    def prefilled_tokens(self) -> int | None:
        """Prompt tokens that the engine had to compute."""
        if self.cached_tokens is None or self.prompt_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens


def summarize_arm(served: Sequence[Served]) -> ArmSummary:
    """Add up what an arm's requests cost; there must be one at least."""
    prompts = [each.answer.prompt_tokens for each in served if each.answer.prompt_tokens is not None]
    # vLLM leaves the field out of an answer without a hit: missing everywhere, it isn't reported; else it is 0.
    cached = [each.answer.cached_tokens for each in served if each.answer.cached_tokens is not None]
    ttfts = [each.ttft for each in served]
    planning = [each.context.planning_seconds for each in served if each.context.planning_seconds is not None]
    return ArmSummary(
        requests=len(served),
        prompt_tokens=sum(prompts) if len(prompts) == len(served) else None,
        cached_tokens=sum(cached) if cached else None,
        ttft_p50=quantile(ttfts, 0.5),
        ttft_p95=quantile(ttfts, 0.95),
        planning_p50=quantile(planning, 0.5) if planning else None,
        reordered=sum(each.context.order_annotation is not None for each in served),
        references=sum(block.is_reference for each in served for block in each.context.blocks),
        reference_tokens=sum(each.context.reference_tokens for each in served),
    )


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    """What the questions are, and how much their retrievals overlap: nothing here depends on any order."""

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
    """Share of requests that retrieved exactly the blocks of an earlier one, in whatever order."""


def summarize_workload(turns: Sequence[Turn]) -> WorkloadSummary:
    """Look at the retrievals in order of arrival."""
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
        seen_by_anyone=_mean(by_anyone),
        seen_in_conversation=_mean(in_conversation),
        repeated_sets=repeated / max(len(turns), 1),
    )


def quantile(values: Iterable[float], share: float) -> float:
    """The least value that `share` of the values do not exceed.

    >>> quantile([4, 1, 3, 2], 0.5), quantile([4, 1, 3, 2], 0.95)
    (2, 4)
    """
    ranked = sorted(values)
    return ranked[max(math.ceil(share * len(ranked)) - 1, 0)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
