"""From a log to a report: which defects matter, what each costs, and where each shows."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Set
from functools import partial
from operator import sub

from warmprefix.cache_profiles import CacheProfile
from warmprefix_tools.doctor.cache import seen_tokens, shared_tokens, simulate
from warmprefix_tools.doctor.checks import ADVICE, CHECKS, SALT_SHARED, SHORT_PROMPT, UNUSED_TOOLS, Kinds, Repairs
from warmprefix_tools.doctor.findings import Divergence, DoctorReport, Finding, Place, ProfileReport
from warmprefix_tools.doctor.log_reader import ReadLog
from warmprefix_tools.doctor.profile_checks import examine_profile
from warmprefix_tools.doctor.request_checks import shared_salt_spot
from warmprefix_tools.doctor.request_log import PLAIN, LogRequest, RequestLog
from warmprefix_tools.doctor.survey import LogSurvey, Spot, SpotPair
from warmprefix_tools.doctor.tool_set_checks import UnusedTools

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
_BEFORE, _WITHIN, _AFTER = 60, 100, 40
"""Characters of a snippet."""


def diagnose(
    read: ReadLog,
    kv_block_size: int = 16,
    capacity_tokens: int | None = None,
    profile: CacheProfile | None = None,
) -> DoctorReport:
    """Look for every defect, and charge each with its cost.

    A defect is a finding if its repair saves tokens that the repair of all others does not save. So harmless defects
    are left out, and of two repairs with the same effect, one is reported. The savings of all repairs together are
    divided in proportion to this. Takes O(defects x tokens of the log).

    Args:
        read: The log. Its pool grows.
        kv_block_size: Tokens of a KV block.
        capacity_tokens: Size of the prefix cache; None for no bound.
        profile: Where the cache can match, to examine the log for it as well.

    Raises:
        ValueError: The sizes are out of range.
    """
    if kv_block_size < 1:
        raise ValueError(f"kv_block_size must be 1 or more, got {kv_block_size}")
    if capacity_tokens is not None and capacity_tokens < kv_block_size:
        raise ValueError(f"capacity_tokens must be kv_block_size ({kv_block_size}) or more, got {capacity_tokens}")
    log = read.log
    survey = LogSurvey(log)
    repairs = Repairs(survey, kv_block_size, capacity_tokens)
    before = repairs.outcomes[Kinds()]
    survey.short_requests = frozenset(
        request for request, tokens in enumerate(before.prompt_tokens) if tokens <= kv_block_size
    )
    total = sum(before.prompt_tokens)
    kinds = _needed(repairs, Kinds(kind for kind, check in CHECKS.items() if check.applies(survey)), kv_block_size)
    charges = _charges(repairs, kinds)
    after = repairs.outcomes[kinds]
    findings = []
    for kind, lost in sorted(charges.items(), key=lambda charge: (-charge[1], charge[0])):
        gains = after.gains(repairs.outcomes[kinds - {kind}])
        helped = [request for request, gain in zip(log.requests, gains, strict=True) if gain > 0]
        findings.append(
            Finding(
                kind,
                *ADVICE[kind],
                lost_tokens=lost,
                share=lost / total,
                requests=len(helped),
                divergence=_costliest(survey, repairs, kinds, kind),
                cut_requests=sum(not log.cut.keys().isdisjoint(request.messages) for request in helped),
            )
        )
    shared = shared_salt_spot(survey)
    if shared is not None:
        concerned, later, earlier, spots = shared
        divergence = _divergence(survey, repairs, kinds, later, earlier, spots)
        findings.append(Finding(SALT_SHARED, *ADVICE[SALT_SHARED], 0, 0.0, concerned, divergence))
    unused = UnusedTools.of(survey, total)
    if unused is not None:
        findings.append(
            Finding(UNUSED_TOOLS, *ADVICE[UNUSED_TOOLS], 0, 0.0, unused.requests, None, detail=unused.detail)
        )
    in_profile: ProfileReport | None = None
    if profile is not None:
        shared_starts = simulate(log.as_sent(), log.pool, 1)
        in_profile = examine_profile(survey, profile, shared_starts, partial(_divergence, survey, repairs, kinds))
    hits = sum(before.hit_tokens)
    repaired_hits = hits + sum(charges.values())
    longer = map(sub, after.prompt_tokens, before.prompt_tokens)
    seen = seen_tokens(repairs.version(kinds), log.pool)
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
        capacity_tokens=capacity_tokens,
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


def _needed(repairs: Repairs, kinds: Kinds, block_size: int) -> Kinds:
    """Return the defects that cost tokens as long as they stay, the vaguest left out first."""
    least_saved = _LEAST_SHARE * sum(repairs.outcomes[Kinds()].prompt_tokens)
    for kind in CHECKS:
        if kind in kinds:
            gains = repairs.outcomes[kinds].gains(repairs.outcomes[kinds - {kind}])
            helped = sum(gain > 0 for gain in gains)
            least = 0.0 if kind == SHORT_PROMPT else _LEAST_BLOCKS * block_size * max(helped, 1)
            if sum(gains) < max(least_saved, least):
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


def _costliest(survey: LogSurvey, repairs: Repairs, kinds: Kinds, kind: str) -> Divergence | None:
    """Return the costliest instance of a defect among those that can be shown."""
    for later, earlier in _pairs(survey, repairs, kinds, kind):
        spots = CHECKS[kind].spot(survey, later, earlier)
        if spots is not None:
            return _divergence(survey, repairs, kinds, later, earlier, spots)
    return None


def _pairs(survey: LogSurvey, repairs: Repairs, kinds: Kinds, kind: str) -> Iterator[tuple[int, int]]:
    """Yield the requests that lose most, each with earlier ones that it could share tokens with."""
    after = repairs.outcomes[kinds]
    gains = after.gains(repairs.outcomes[kinds - {kind}])
    for later in heapq.nlargest(_MOST_PAIRS, range(len(gains)), key=gains.__getitem__):
        continuation = survey.continuations[later]
        likely = [after.donors[later], None if continuation is None else continuation.earlier]
        nearest = range(later - 1, max(later - _MOST_PAIRS, 0) - 1, -1)
        for earlier in dict.fromkeys(each for each in (*likely, *nearest) if each is not None):
            yield later, earlier


def _divergence(
    survey: LogSurvey, repairs: Repairs, kinds: Kinds, later: int, earlier: int, spots: SpotPair
) -> Divergence:
    pool = survey.pool
    return Divergence(
        earlier=_place(survey, earlier, spots[1]),
        later=_place(survey, later, spots[0]),
        shared_tokens=shared_tokens(survey.log.as_sent(), pool, later, earlier),
        could_share_tokens=shared_tokens(repairs.version(kinds), pool, later, earlier),
    )


def _place(survey: LogSurvey, request: int, spot: Spot) -> Place:
    entry = survey.log.requests[request]
    if spot.message is None:
        most = _BEFORE + _WITHIN + _AFTER
        text = spot.text if len(spot.text) <= most else f"{spot.text[:most]}…"
        return Place(request + 1, entry.file, entry.line, path=spot.path, snippet=text)
    message = entry.messages[spot.message]
    text = survey.log.text(message)
    start, within = max(spot.offset - _BEFORE, 0), min(spot.length, _WITHIN)
    end = min(spot.offset + within + _AFTER, len(text))
    front, back = "…" if start else "", "…" if end < len(text) else ""
    mark = len(front) + spot.offset - start
    in_messages = message.role != PLAIN and spot.message >= entry.front
    return Place(
        request + 1,
        entry.file,
        entry.line,
        message=spot.message - entry.front if in_messages else None,
        role=message.role if in_messages else None,
        path=None if in_messages or message.role == PLAIN else message.role,
        offset=spot.offset,
        snippet=f"{front}{text[start:end]}{back}",
        mark=(mark, mark + within),
    )
