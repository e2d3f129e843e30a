"""From a log to a report: which defects matter, what each costs, and where each shows."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Set
from functools import partial
from operator import sub

from warmprefix.cache_profiles import CacheProfile
from warmprefix_tools.doctor.cache import seen_tokens, shared_tokens, simulate
from warmprefix_tools.doctor.divergences import divergence, salt_divergence
from warmprefix_tools.doctor.findings import Divergence, DoctorReport, Finding, ProfileReport
from warmprefix_tools.doctor.log_reader import ReadLog
from warmprefix_tools.doctor.profile_checks import examine_profile
from warmprefix_tools.doctor.repairs import ADVICE, SALT_SHARED, VAGUEST_FIRST, Kinds, Repairs
from warmprefix_tools.doctor.request_log import LogRequest, LogVersion, RequestLog
from warmprefix_tools.doctor.survey import LogSurvey

__all__ = ["diagnose"]

_LEAST_SHARE = 0.005
"""Of all prompt tokens: a repair that saves less is not worth a finding."""
_LEAST_BLOCKS = 1.5
"""KV blocks that a repair must save on average in the requests that it helps."""

_LEAST_LOST_TOKENS, _LEAST_LOST_SHARE = 512, 0.1
"""Of a history that the cache had: less is a matter of whole KV blocks."""
_SHORT_LIFE_SECONDS = 300
"""Shortest lifetime of hosted caches."""
_MOST_PAIRS = 40
"""Requests that are searched for a divergence, and earlier ones that each is compared with."""


def diagnose(read: ReadLog, kv_block_size: int = 16, profile: CacheProfile | None = None) -> DoctorReport:
    """Look for every defect, and charge each with its cost.

    A defect is a finding if its repair saves tokens that the repair of all others does not save. So harmless defects
    are left out, and of two repairs with the same effect, one is reported. The savings of all repairs together are
    divided in proportion to this. Takes O(defects x tokens of the log).

    Args:
        read: The log. Its pool grows.
        kv_block_size: Tokens of a KV block.
        profile: Where the cache can match, to examine the log for it as well.

    Raises:
        ValueError: The size is out of range.
    """
    if kv_block_size < 1:
        raise ValueError(f"kv_block_size must be 1 or more, got {kv_block_size}")
    log = read.log
    survey = LogSurvey(log)
    repairs = Repairs(survey, kv_block_size)
    before = repairs.outcomes[Kinds()]
    total = sum(before.prompt_tokens)
    kinds = _needed(repairs, Kinds(filter(repairs.changes, VAGUEST_FIRST)), kv_block_size)
    charges = _charges(repairs, kinds)
    after, repaired = repairs.outcomes[kinds], repairs.version(kinds)
    findings = []
    for kind, lost in sorted(charges.items(), key=lambda charge: (-charge[1], charge[0])):
        gains = after.gains(repairs.outcomes[kinds - {kind}])
        findings.append(
            Finding(
                kind,
                *ADVICE[kind],
                lost_tokens=lost,
                share=lost / total,
                requests=sum(gain > 0 for gain in gains),
                divergence=_example(survey, repairs, repaired, kind),
            )
        )
    sent = log.as_sent()
    shared_salts = _shared_salts(log)
    if shared_salts:
        later, earlier = shared_salts[0]
        example = salt_divergence(log, later, earlier, shared_tokens(sent, log.pool, later, earlier))
        findings.append(Finding(SALT_SHARED, *ADVICE[SALT_SHARED], 0, 0.0, len(shared_salts), example))
    in_profile: ProfileReport | None = None
    if profile is not None:
        in_profile = examine_profile(log, profile, simulate(sent, log.pool, 1), partial(divergence, survey, sent))
    hits = sum(before.hit_tokens)
    repaired_hits = hits + sum(charges.values())
    longer = map(sub, after.prompt_tokens, before.prompt_tokens)
    seen = seen_tokens(repaired, log.pool)
    bound = sum(max(tokens - max(more, 0), 0) for tokens, more in zip(seen, longer, strict=True))
    # vLLM and SGLang leave the count out where nothing was cached, even if they report it otherwise.
    reporting = {request.model for request in log.requests if request.reported_cached_tokens is not None}
    reported = [
        (request.reported_prompt_tokens, request.reported_cached_tokens or 0)
        for request in log.requests
        if request.reported_prompt_tokens is not None and request.model in reporting
    ]
    return DoctorReport(
        files=tuple(dict.fromkeys(request.file for request in log.requests)),
        requests=len(log.requests),
        conversations=sum(count > 1 for count in Counter(survey.roots).values()),
        prompt_tokens=total,
        hit_tokens=hits,
        repaired_hit_tokens=repaired_hits,
        bound_tokens=min(max(bound, repaired_hits), total),
        kv_block_size=kv_block_size,
        findings=tuple(findings),
        skipped=tuple(read.skipped),
        skipped_lines=read.skipped_lines,
        notes=(*read.notes, *_lost_turns(survey), *_unreported(log, reporting)),
        reported_prompt_tokens=sum(prompt for prompt, _ in reported) if reported else None,
        reported_cached_tokens=sum(cached for _, cached in reported) if reported else None,
        profile=in_profile,
    )


def _lost_turns(survey: LogSurvey) -> Iterator[str]:
    """Yield a note on turns whose history was in the cache before, by the engine's own counts, and was gone."""
    turns = lost = late = gone = 0
    for request, continuation in zip(survey.log.requests, survey.continuations, strict=True):
        if continuation is None or any(step.change is not None for step in continuation.steps):
            continue
        before = survey.log.requests[continuation.earlier]
        cached, tokens = request.reported_cached_tokens, before.reported_prompt_tokens
        if cached is None or tokens is None or not continuation.steps:
            continue
        turns += 1
        held = min(tokens, request.reported_prompt_tokens or tokens)
        if held - cached > max(_LEAST_LOST_TOKENS, _LEAST_LOST_SHARE * held):
            gone += 1
            lost += held - cached
            late += None not in (request.seconds, before.seconds) and _pause(before, request) > _SHORT_LIFE_SECONDS
    if gone:
        yield (
            f"By the engine's own count, {gone} of {turns} turns that only added to their conversation found less than"
            f" the turn before had: {lost:,} tokens were computed again. {late} of them came after more than"
            f" {_SHORT_LIFE_SECONDS // 60} minutes."
        )


def _pause(before: LogRequest, after: LogRequest) -> float:
    return (after.seconds or 0.0) - (before.seconds or 0.0)


def _unreported(log: RequestLog, reporting: Set[str | None]) -> Iterator[str]:
    answers = sum(each.reported_prompt_tokens is not None and each.model not in reporting for each in log.requests)
    if answers:
        yield (
            f"{answers:,} answers report their prompt tokens and no cached ones, which is not 0. vLLM reports them with"
            " --enable-prompt-tokens-details, SGLang with --enable-cache-report."
        )


def _shared_salts(log: RequestLog) -> list[tuple[int, int]]:
    """Return the requests with a salt that another tenant used before, each with an earlier request of that tenant."""
    holders: defaultdict[Hashable, dict[str, int]] = defaultdict(dict)
    shared = []
    for index, request in enumerate(log.requests):
        if request.tenant is not None:
            tenants = holders[request.model, request.salt]
            tenants.setdefault(request.tenant, index)
            others = [at for tenant, at in tenants.items() if tenant != request.tenant]
            shared += [(index, others[0])] if others else []
    return shared


def _needed(repairs: Repairs, kinds: Kinds, block_size: int) -> Kinds:
    """Return the defects that cost tokens as long as they stay, the vaguest left out first."""
    least_saved = _LEAST_SHARE * sum(repairs.outcomes[Kinds()].prompt_tokens)
    for kind in VAGUEST_FIRST:
        if kind in kinds:
            gains = repairs.outcomes[kinds].gains(repairs.outcomes[kinds - {kind}])
            helped = sum(gain > 0 for gain in gains)
            if sum(gains) < max(least_saved, _LEAST_BLOCKS * block_size * max(helped, 1)):
                kinds -= {kind}
    return kinds


def _charges(repairs: Repairs, kinds: Kinds) -> dict[str, int]:
    """Divide the savings of all repairs in proportion to what each defect costs if only it stays.

    Defects hide each other, so these costs do not add up: repaired alone, the second may gain nothing.
    """
    saved = repairs.gain(kinds)
    costs = {kind: saved - repairs.gain(kinds - {kind}) for kind in kinds}
    worst_first = sorted(kinds, key=lambda kind: (-costs[kind], kind))
    if sum(costs.values()) <= 0:  # each hides all of the others
        costs = dict.fromkeys(kinds, 1)
    charges = {kind: saved * costs[kind] // sum(costs.values()) for kind in worst_first}
    if worst_first:
        charges[worst_first[0]] += saved - sum(charges.values())  # the remainder of the divisions
    return charges


def _example(survey: LogSurvey, repairs: Repairs, repaired: LogVersion, kind: str) -> Divergence | None:
    """Return the costliest instance of a defect: two requests that share more tokens without it."""
    kinds = repaired.kinds
    after = repairs.outcomes[kinds]
    gains = after.gains(repairs.outcomes[kinds - {kind}])
    defective = repairs.version(kinds - {kind})
    for later in heapq.nlargest(_MOST_PAIRS, range(len(gains)), key=gains.__getitem__):
        continuation = survey.continuations[later]
        likely = [after.donors[later], None if continuation is None else continuation.earlier]
        nearest = range(later - 1, max(later - _MOST_PAIRS, 0) - 1, -1)
        for earlier in dict.fromkeys(each for each in (*likely, *nearest) if each is not None):
            could_share = shared_tokens(repaired, survey.pool, later, earlier)
            if could_share > shared_tokens(defective, survey.pool, later, earlier):
                return divergence(survey, defective, later, earlier, could_share)
    return None
