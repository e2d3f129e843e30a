"""Replays a trace: every request through a planner, every prompt through the cache model."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from warmprefix.ordering import OrderingPolicy
from warmprefix.plan import Placement
from warmprefix_tools.replay.arrange import Arranged, Arranger, AsToday, Planned
from warmprefix_tools.replay.cache import CacheModel, Found
from warmprefix_tools.replay.prompts import Prompt, prompts_for
from warmprefix_tools.replay.results import Misses, Point, ReplayResult
from warmprefix_tools.replay.workload import Request, Workload

__all__ = ["Observe", "Replay"]

Observe = Callable[[Request, Arranged], object]
"""Is shown each request as it is served."""

_STRETCHES = 100


def _look_away(request: Request, arranged: Arranged) -> None:
    """Do nothing."""


class Replay:
    """One trace, to be run through any number of policies and caches. The same run gives the same counts, always."""

    def __init__(self, workload: Workload, placement: Placement = "head", answer_tokens: int = 0) -> None:
        """Prepare for runs.

        Args:
            workload: The trace.
            placement: Where context stands, as for `ContextPlanner.plan`.
            answer_tokens: With `tail`: the length of every answer, which traces do not tell. It stays in the history.

        Raises:
            ValueError: `answer_tokens` is negative.
        """
        if answer_tokens < 0:
            raise ValueError(f"answer_tokens must be 0 or more, got {answer_tokens}")
        self.workload = workload
        self.placement: Placement = placement
        self.answer_tokens = answer_tokens
        self._today: dict[int | None, _Run] = {}

    def run(
        self,
        policy: str | Callable[[], OrderingPolicy],
        capacity_tokens: int | None,
        *,
        name: str | None = None,
        observe: Observe = _look_away,
    ) -> ReplayResult:
        """Run a policy, in a `ContextPlanner` of its own, beside a cache of `capacity_tokens`.

        `relevance` stands for the application as it is: with placement `tail` it does not de-duplicate either.

        Raises:
            TypeError: `policy` is neither a name nor callable.
            ValueError: `policy` is an unknown name, or `capacity_tokens` is below 1.
        """
        planner = Planned(self.workload, policy, capacity_tokens, self.placement)
        known_as = policy if isinstance(policy, str) else getattr(policy, "__name__", "policy")
        result = self.run_arranger(planner, capacity_tokens, name=name or known_as, observe=observe)
        return replace(result, policy_errors=planner.policy_errors)

    def run_arranger(
        self, arranger: Arranger, capacity_tokens: int | None, *, name: str, observe: Observe = _look_away
    ) -> ReplayResult:
        """Run anything that arranges, fresh as it must be, under the same cache and the same accounts."""
        if capacity_tokens not in self._today:
            self._today[capacity_tokens] = self._serve(AsToday(), capacity_tokens, _look_away)
        today, run = self._today[capacity_tokens], self._serve(arranger, capacity_tokens, observe)
        saved, total = sum(run.saved), sum(run.totals)
        new = sum(request.new_tokens for request in self.workload.requests)
        evicted = run.ever_saved - saved
        prefilled = tuple(zip(_prefilled(run), _prefilled(today), strict=True))
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
            reordered_requests=run.reordered,
            referring_requests=run.referring,
            annotation_tokens=run.annotation_tokens,
            reference_tokens=run.reference_tokens,
            # New blocks and private pieces are found in no cache, so what is left of the misses is order's doing.
            misses=Misses(new, total - run.ever_saved - new - run.private_tokens, evicted, run.private_tokens),
            over_time=_stretches(run.saved, run.totals),
            plan_us_p50=_quantile(run.plan_seconds, 0.5) * 1e6,
            plan_us_p99=_quantile(run.plan_seconds, 0.99) * 1e6,
            commit_us_p50=_quantile(run.commit_seconds, 0.5) * 1e6,
            commit_us_p99=_quantile(run.commit_seconds, 0.99) * 1e6,
        )

    def _serve(self, arranger: Arranger, capacity_tokens: int | None, observe: Observe) -> _Run:
        requests = self.workload.requests
        cache = CacheModel(capacity_tokens, len(requests))
        prompts = prompts_for(self.workload, self.placement, self.answer_tokens)
        run = _Run()
        for request in requests:
            arranged = arranger.arrange(request)
            prompt = prompts.lay_out(request, arranged)
            run.add(request, arranged, prompt, cache.serve(prompt.keys, prompt.tokens))
            observe(request, arranged)
        return run


class _Run:
    """The account of one run; lists have one entry a request."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.totals: list[int] = []
        self.plan_seconds: list[float] = []
        self.commit_seconds: list[float] = []
        self.ever_saved = 0
        self.private_tokens = 0
        self.reference_tokens = 0
        self.annotation_tokens = 0
        self.reordered = 0
        self.referring = 0

    def add(self, request: Request, arranged: Arranged, prompt: Prompt, found: Found) -> None:
        self.saved.append(found.now)
        self.totals.append(prompt.total_tokens)
        self.plan_seconds.append(arranged.plan_seconds)
        self.commit_seconds.append(arranged.commit_seconds)
        self.ever_saved += found.ever
        self.private_tokens += prompt.private_tokens
        if arranged.order != request.relevance:
            self.reordered += 1
            self.annotation_tokens += request.annotation_tokens
        if arranged.references:
            self.referring += 1
            self.reference_tokens += sum([request.tokens[i] for i, _ in arranged.references])


def _prefilled(run: _Run) -> Iterator[int]:
    return map(operator.sub, run.totals, run.saved)


def _stretches(saved: Sequence[int], totals: Sequence[int]) -> tuple[Point, ...]:
    length = max(math.ceil(len(saved) / _STRETCHES), 1)
    return tuple(
        Point(min(start + length, len(saved)), sum(saved[start : start + length]), sum(totals[start : start + length]))
        for start in range(0, len(saved), length)
    )


def _quantile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of the values do not exceed; 0 of none."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)] if values else 0.0
