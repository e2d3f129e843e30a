"""From a log to a report: which defects matter, what each costs, and where each shows."""

from __future__ import annotations

from collections import Counter
from operator import sub

from warmprefix_tools.doctor.cache import seen_tokens
from warmprefix_tools.doctor.checks import (
    HISTORY_CHECKS,
    MESSAGE_CHECKS,
    SALT_SHARED,
    SHORT_PROMPT,
    TEXT_CHECKS,
    VAGUEST_FIRST,
    by_kind,
)
from warmprefix_tools.doctor.checks.salts import spot_of_shared
from warmprefix_tools.doctor.mending import Kinds, Mender
from warmprefix_tools.doctor.places import Places
from warmprefix_tools.doctor.readers import ReadLog
from warmprefix_tools.doctor.report import Finding, Report
from warmprefix_tools.doctor.survey import Survey

__all__ = ["diagnose"]

_LEAST_SHARE = 0.005
"""Of all prompt tokens: a mend that saves less is not worth a finding."""
_LEAST_BLOCKS = 1.5
"""KV blocks that it saves on average in the requests that it helps."""


def diagnose(read: ReadLog, kv_block_size: int = 16, capacity_tokens: int | None = None) -> Report:
    """Look for every defect there is, and charge each with what it costs.

    A defect is a finding if the log would save tokens without it that it does not save when all else is mended: so
    nothing is said of what does no harm, and of two mends that do the same, one is. What all of them save together is
    shared out in proportion to that.
    """
    log = read.log
    survey = Survey(log, TEXT_CHECKS)
    mender = Mender(survey, kv_block_size, capacity_tokens)
    before = mender.outcome(frozenset())
    survey.short_requests = frozenset(
        request for request, tokens in enumerate(before.prompt_tokens) if tokens <= kv_block_size
    )
    total = sum(before.prompt_tokens)
    kinds = _needed(mender, _candidates(survey), total, kv_block_size)
    charges = _charges(mender, kinds)
    after = mender.outcome(kinds)
    places = Places(survey, mender, kinds)
    findings = [
        Finding(
            kind,
            by_kind(kind).title,
            by_kind(kind).fix,
            lost_tokens=lost,
            share=lost / total,
            requests=sum(gain > 0 for gain in after.gains(mender.outcome(kinds - {kind}))),
            divergence=places.of(kind),
        )
        for kind, lost in sorted(charges.items(), key=lambda charge: (-charge[1], charge[0]))
    ]
    hits, saved = sum(before.hit_tokens), sum(charges.values())
    seen = seen_tokens(mender.mended(kinds), [request.model for request in log.requests], log.pool)
    longer = map(sub, after.prompt_tokens, before.prompt_tokens)
    bound = sum(max(tokens - max(more, 0), 0) for tokens, more in zip(seen, longer, strict=True))
    reported = [
        (request.reported_prompt_tokens, request.reported_cached_tokens)
        for request in log.requests
        if request.reported_prompt_tokens is not None and request.reported_cached_tokens is not None
    ]
    return Report(
        files=tuple(dict.fromkeys(request.file for request in log.requests)),
        requests=len(log.requests),
        conversations=sum(count > 1 for count in Counter(survey.roots).values()),
        prompt_tokens=total,
        hit_tokens=hits,
        mended_hit_tokens=hits + saved,
        bound_tokens=min(max(bound, hits + saved), total),
        kv_block_size=kv_block_size,
        capacity_tokens=capacity_tokens,
        findings=(*findings, *_shared_salts(survey, places)),
        skipped=tuple(read.skipped),
        skipped_lines=read.skipped_lines,
        notes=tuple(read.notes),
        reported_prompt_tokens=sum(prompt for prompt, _ in reported) if reported else None,
        reported_cached_tokens=sum(cached for _, cached in reported) if reported else None,
    )


def _candidates(survey: Survey) -> Kinds:
    """All that could be in this log; a text check only if two texts become one by it."""
    log = survey.log
    found = {check.kind for check in TEXT_CHECKS if survey.wording.merges(check.kind)}
    changes = {change for thread in survey.threads if thread is not None for change in thread.changes}
    found |= {check.kind for check in HISTORY_CHECKS if check.change in changes}
    found |= {check.kind for check in MESSAGE_CHECKS if any(a is not b for a, b in survey.mended(check).items())}
    if any(map(survey.memories, survey.uses)):
        found.add("memory-reranked")
    if any(map(survey.passages, survey.uses)):
        found.add("passage-order")
    personal = {
        survey.slots.is_personal(run.slot) for request in log.requests for _, run in survey.slots.runs(request.messages)
    }
    found |= {"user-text" if each else "variable-prefix" for each in personal}
    if any(request.salt for request in log.requests):
        found.add("salt-split")
    if survey.short_requests:
        found.add("short-prompt")
    return frozenset(found)


def _needed(mender: Mender, kinds: Kinds, total: int, block_size: int) -> Kinds:
    """The defects without whose mend tokens are lost, the vaguest left out first."""
    for kind in VAGUEST_FIRST:
        if kind in kinds:
            gains = mender.outcome(kinds).gains(mender.outcome(kinds - {kind}))
            helped = sum(gain > 0 for gain in gains)
            saved = sum(gains)
            least = 0.0 if kind == SHORT_PROMPT else _LEAST_BLOCKS * block_size * max(helped, 1)
            if saved < max(_LEAST_SHARE * total, least):
                kinds -= {kind}
    return kinds


def _charges(mender: Mender, kinds: Kinds) -> dict[str, int]:
    """What each defect costs: all that mending saves, shared out in proportion to what each costs with the others gone.

    Defects hide each other, so these do not add up by themselves: mended alone, the second may gain nothing.
    """
    saved = mender.gain(kinds)
    costs = {kind: saved - mender.gain(kinds - {kind}) for kind in kinds}
    worst_first = sorted(kinds, key=lambda kind: (-costs[kind], kind))
    if sum(costs.values()) <= 0:  # each hides all of the others
        costs = dict.fromkeys(kinds, 1)
    charges = {kind: saved * costs[kind] // sum(costs.values()) for kind in worst_first}
    if worst_first:
        charges[worst_first[0]] += saved - sum(charges.values())  # what the division left over
    return charges


def _shared_salts(survey: Survey, places: Places) -> list[Finding]:
    found = spot_of_shared(survey)
    if found is None:
        return []
    concerned, later, earlier, spots = found
    return [
        Finding(
            SALT_SHARED.kind,
            SALT_SHARED.title,
            SALT_SHARED.fix,
            lost_tokens=0,
            share=0.0,
            requests=concerned,
            divergence=places.divergence(later, earlier, spots),
        )
    ]
