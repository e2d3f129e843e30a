"""Replay of a trace: requests through an arranger, prompts through the cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from warmprefix.annotate import Annotate, Templates
from warmprefix.cache_profiles import CacheProfile
from warmprefix.ordering import OrderingPolicy
from warmprefix.plan import Placement
from warmprefix.tokens import TokenCounter
from warmprefix_tools.caches import CacheUse
from warmprefix_tools.replay.arrange import (
    TOUCH_REST,
    ArrangeOptions,
    ContextOrder,
    KeepBy,
    Places,
    PlannerArranger,
    RelevanceArranger,
    RequestArranger,
    first_places,
)
from warmprefix_tools.replay.evidence import ChanceControl, EvidenceTally
from warmprefix_tools.replay.profile_cache import ProfileCache
from warmprefix_tools.replay.prompt_cache import CachedPieces, CacheModel, ReplayPrompt, prompt_layout
from warmprefix_tools.replay.results import DEFAULT_POLICY, TODAY, ChoiceResult, Misses, Point, ReplayResult
from warmprefix_tools.replay.workload import ReplayRequest, Workload

__all__ = ["Observe", "Replay"]

Observe = Callable[[ReplayRequest, ContextOrder], object]
"""Receives each request with its order once it is served."""

_STRETCHES = 100
_ANSWER_TOKENS = 1
"""Of a touch."""


def _ignore(request: ReplayRequest, order: ContextOrder) -> None:
    """Do nothing."""


class Replay:
    """One trace, to be run with policies and caches; equal runs give equal counts."""

    def __init__(
        self,
        workload: Workload,
        placement: Placement = "head",
        answer_tokens: int = 0,
        *,
        annotate: Annotate = "auto",
        templates: Templates | None = None,
        tokenizer: TokenCounter | None = None,
        waiting: int = 0,
        retention: KeepBy = "none",
        profile: CacheProfile | None = None,
        preamble_tokens: int = 0,
    ) -> None:
        """Prepare for runs.

        Args:
            workload: The trace.
            placement: Place of the context, as for `ContextPlanner.plan`.
            answer_tokens: With `tail`: the length of every answer, which stays in the history. Traces do not have it.
            annotate, templates, tokenizer: As for `ContextPlanner`.
            waiting: Number of requests of the same scope that wait while one is planned; see `ContextPlanner.queued`.
            retention: How the cache is asked to keep what is expected back. With `priorities` it evicts by them.
            profile: A cache to serve the same prompts from too, next to one that matches everywhere.
            preamble_tokens: Tokens in front of every context, for that cache.

        Raises:
            ValueError: A number of tokens is negative.
        """
        if preamble_tokens < 0:
            raise ValueError(f"preamble_tokens must be 0 or more, got {preamble_tokens}")
        if answer_tokens < 0:
            raise ValueError(f"answer_tokens must be 0 or more, got {answer_tokens}")
        self.workload = workload
        self.placement: Placement = placement
        self.answer_tokens = answer_tokens
        self.profile = profile
        self._preamble_tokens = preamble_tokens
        self._options = ArrangeOptions(placement, annotate, templates, tokenizer, waiting, retention)
        self._today: dict[int | None, _Tally] = {}

    def run(
        self,
        policy: str | Callable[[], OrderingPolicy],
        capacity_tokens: int | None,
        *,
        name: str | None = None,
        observe: Observe = _ignore,
        places: Places | None = first_places,
    ) -> ReplayResult:
        """Run a policy in a `ContextPlanner` of its own, with a cache of that capacity.

        `relevance` stands for the application as it is: it neither de-duplicates nor writes labels. The planner
        receives the blocks at `places`; for None it chooses among all candidates.

        Raises:
            TypeError: `policy` is neither a name nor callable.
            ValueError: `policy` is an unknown name, or `capacity_tokens` is below 1.
        """
        planner = PlannerArranger(self.workload, policy, capacity_tokens, self._options, places=places)
        policy_name = policy if isinstance(policy, str) else getattr(policy, "__name__", "policy")
        result = self.run_arranger(
            planner, capacity_tokens, name=name or policy_name, observe=observe, plans_marks=policy != "relevance"
        )
        return replace(result, policy_errors=planner.policy_errors, tokenizer_errors=planner.tokenizer_errors)

    def run_choice(
        self,
        capacity_tokens: int | None,
        *,
        policy: str = DEFAULT_POLICY,
        first: ReplayResult | None = None,
        observe: Callable[[str], Observe] = lambda name: _ignore,
    ) -> ChoiceResult:
        """Run a policy with what relevance feeds, with what the planner chooses, and with as much drawn by lot.

        Args:
            capacity_tokens: Size of the cache.
            policy: The policy.
            first: The result of the policy with what relevance feeds, if there is one.
            observe: Returns the observer of the run with a name: `first`, `chosen` or `chance`.

        Raises:
            ValueError: The workload has no choice.
        """
        if self.workload.choose is None:
            raise ValueError("workload must have a choice, got none")
        chance, seen = ChanceControl(), observe("chosen")

        def draw(request: ReplayRequest, order: ContextOrder) -> None:
            chance.observe(request, order)
            seen(request, order)

        first = first or self.run(policy, capacity_tokens, name="first", observe=observe("first"))
        chosen = self.run(policy, capacity_tokens, name="chosen", observe=draw, places=None)
        drawn = self.run(policy, capacity_tokens, name="chance", observe=observe("chance"), places=chance.places)
        assert chosen.evidence is not None
        assert drawn.evidence is not None
        same = {
            name: getattr(chosen.evidence, name) for name in ("exchanged", "extra", "twins", "superseded", "gold_twins")
        }
        return ChoiceResult(
            relevance=self.run_arranger(RelevanceArranger(), capacity_tokens, name=TODAY, plans_marks=False),
            first=first,
            chosen=chosen,
            chance=replace(drawn, evidence=replace(drawn.evidence, **same)),
            candidates=self.workload.candidates,
            errors=tuple(self.workload.errors),
        )

    def run_arranger(
        self,
        arranger: RequestArranger,
        capacity_tokens: int | None,
        *,
        name: str,
        observe: Observe = _ignore,
        plans_marks: bool = True,
    ) -> ReplayResult:
        """Run an arranger without a past, with the same cache and the same counts.

        `plans_marks` is False for an application that sets no cache marks of its own.
        """
        if capacity_tokens not in self._today:
            self._today[capacity_tokens] = self._serve(RelevanceArranger(), capacity_tokens, _ignore, plans_marks=False)
        today = self._today[capacity_tokens]
        run = self._serve(arranger, capacity_tokens, observe, plans_marks=plans_marks)
        saved, total = sum(run.saved), sum(run.totals)
        new = run.new_tokens
        evicted = run.ever_saved - saved
        prefilled = tuple(zip(run.prefilled, today.prefilled, strict=True))
        return ReplayResult(
            trace=self.workload.name,
            policy=name,
            capacity_tokens=capacity_tokens,
            k=self.workload.k,
            placement=self.placement,
            requests=len(self.workload.requests),
            saved_tokens=saved,
            total_tokens=total,
            today_saved_tokens=sum(today.saved),
            today_total_tokens=sum(today.totals),
            gained_requests=sum(ours < theirs for ours, theirs in prefilled),
            lost_requests=sum(ours > theirs for ours, theirs in prefilled),
            worst_request_change=max(
                [ours / theirs - 1 for ours, theirs in prefilled if ours > theirs > 0], default=0.0
            ),
            reordered_requests=run.reordered,
            untouched_requests=run.untouched,
            referring_requests=run.referring,
            reference_tokens=run.reference_tokens,
            note_tokens=run.note_tokens,
            saved_note_tokens=run.saved_note_tokens,
            # No cache holds new blocks and questions, so all other misses come from the order.
            misses=Misses(new, total - run.ever_saved - new - run.question_tokens, evicted, run.question_tokens),
            over_time=_stretches(run.saved, run.totals),
            plan_us_p50=_quantile(run.plan_seconds, 0.5) * 1e6,
            plan_us_p99=_quantile(run.plan_seconds, 0.99) * 1e6,
            commit_us_p50=_quantile(run.commit_seconds, 0.5) * 1e6,
            commit_us_p99=_quantile(run.commit_seconds, 0.99) * 1e6,
            touches=run.touches,
            touch_tokens=run.touch_tokens,
            profile_use=run.profile_use,
            today_profile_use=today.profile_use,
            evidence=None if run.evidence is None else run.evidence.evidence(today.distinct),
        )

    def _serve(
        self, arranger: RequestArranger, capacity_tokens: int | None, observe: Observe, *, plans_marks: bool
    ) -> _Tally:
        requests = self.workload.requests
        cache = CacheModel(capacity_tokens)
        layout = prompt_layout(self.workload, self.placement, self.answer_tokens)
        other = None
        if self.profile is not None:
            other = ProfileCache(
                self.profile,
                capacity_tokens,
                expected_tokens=sum(request.context_tokens for request in requests),
                requests=len(requests),
                preamble_tokens=self._preamble_tokens,
                plans_marks=plans_marks,
            )
        tally = _Tally(None if self.workload.choose is None else EvidenceTally())
        sent: dict[str, ReplayPrompt] = {}
        for number, request in enumerate(requests):
            order = arranger.arrange(request)
            prompt = sent[order.plan_id] = layout.lay_out(request, order)
            # Each request has its number as its priority, so that an older one counts less.
            tally.add(request, order, prompt, cache.serve(prompt, number))
            if isinstance(arranger, PlannerArranger):
                for touch in arranger.touches():
                    found = cache.touch(sent[touch.plan_id], touch.blocks, number + touch.priority)
                    arranger.touched(touch, found)
                    tally.add_touch(touch.tokens - found)
            if other is not None:
                other.serve(request, prompt)
            observe(request, order)
        tally.profile_use = None if other is None else other.use
        return tally


class _Tally:
    """Counts of one run; lists have one entry per request."""

    def __init__(self, evidence: EvidenceTally | None) -> None:
        self.evidence = evidence
        """What is fed, if there are candidates to choose from."""
        self.saved: list[int] = []
        self.totals: list[int] = []
        self.prefilled: list[int] = []
        """Note tokens included."""
        self.plan_seconds: list[float] = []
        self.commit_seconds: list[float] = []
        self.profile_use: CacheUse | None = None
        self._keys: set[int] = set()
        self.new_tokens = 0
        """Tokens of blocks that no earlier request of the scope had. No order can save them."""
        self.ever_saved = 0
        self.question_tokens = 0
        self.reference_tokens = 0
        self.note_tokens = 0
        self.saved_note_tokens = 0
        self.reordered = 0
        self.referring = 0
        self.untouched = 0
        self.touches = 0
        self.touch_tokens = 0

    def add_touch(self, missing_tokens: int) -> None:
        self.touches += 1
        self.touch_tokens += missing_tokens + TOUCH_REST + _ANSWER_TOKENS

    @property
    def distinct(self) -> int:
        """Number of different blocks that were fed."""
        return len(self._keys)

    def add(self, request: ReplayRequest, order: ContextOrder, prompt: ReplayPrompt, cached: CachedPieces) -> None:
        if self.evidence is not None:
            self.evidence.add(request, order)
        saved, saved_note_tokens = sum(prompt.tokens[: cached.now]), sum(prompt.written[: cached.now])
        self.saved.append(saved)
        self.totals.append(prompt.total_tokens)
        self.prefilled.append(prompt.total_tokens - saved + prompt.note_tokens - saved_note_tokens)
        self.plan_seconds.append(order.plan_seconds)
        self.commit_seconds.append(order.commit_seconds)
        for i in order.order:
            if request.keys[i] not in self._keys:
                self._keys.add(request.keys[i])
                self.new_tokens += request.tokens[i]
        self.ever_saved += sum(prompt.tokens[: cached.ever])
        self.question_tokens += prompt.question_tokens
        self.note_tokens += prompt.note_tokens
        self.saved_note_tokens += saved_note_tokens
        self.reordered += order.order != request.relevance
        self.referring += bool(order.references)
        self.reference_tokens += sum([request.tokens[i] for i in order.references])
        self.untouched += order.order == request.relevance and not order.references and not prompt.note_tokens


def _stretches(saved: Sequence[int], totals: Sequence[int]) -> tuple[Point, ...]:
    length = max(math.ceil(len(saved) / _STRETCHES), 1)
    return tuple(
        Point(min(start + length, len(saved)), sum(saved[start : start + length]), sum(totals[start : start + length]))
        for start in range(0, len(saved), length)
    )


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the least value that `share` of the values do not exceed; 0 if empty."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)] if values else 0.0
