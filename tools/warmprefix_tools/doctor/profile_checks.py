"""What a log loses in the cache of a profile: short prefixes, missed checkpoints, and marks that do not pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from warmprefix.cache_profiles import CacheProfile
from warmprefix_tools.doctor.cache import CacheOutcome
from warmprefix_tools.doctor.checks import ADVICE
from warmprefix_tools.doctor.findings import Divergence, Finding, ProfileReport
from warmprefix_tools.doctor.profile_use import LogInProfile, ServedLog
from warmprefix_tools.doctor.request_log import common_length
from warmprefix_tools.doctor.survey import LogSurvey, Spot, SpotPair

__all__ = ["PROFILE_KINDS", "examine_profile"]

PROFILE_KINDS = (
    *("cache-inert", "prefix-below-block", "prefix-below-minimum", "between-checkpoints"),
    *("marks-missing", "marks-misplaced", "mark-behind-volatile", "marks-refused"),
)
_LEAST_SHARE = 0.005
"""Of all prompt tokens: what costs less is not worth a finding."""


def examine_profile(
    survey: LogSurvey,
    profile: CacheProfile,
    shared: CacheOutcome,
    divergence: Callable[[int, int, SpotPair], Divergence],
) -> ProfileReport:
    """Return what a cache of this profile had of the log, and the findings about it, worst first.

    O(tokens of the log), twice with marks.

    Args:
        survey: The log.
        profile: What the cache can do.
        shared: For each request, the tokens that it has in common with an earlier one.
        divergence: Makes an example of a later and an earlier request and their spots.
    """
    total = sum(shared.prompt_tokens)
    cache = LogInProfile(survey.log, profile)
    served = cache.serve()
    planned = cache.serve(plans_marks=True) if profile.marks is not None else None
    losses = _losses_to_checkpoints(profile, shared, served) if planned is None else {}
    cost = served.total.cost(profile)
    if planned is not None:
        losses["prefix-below-minimum"] = _short_prefixes(profile.minimum_tokens, shared)
        helped = {
            request: round(gain)
            for request, (before, after) in enumerate(zip(served.uses, planned.uses, strict=True))
            if request not in served.refused and (gain := before.cost(profile) - after.cost(profile))
        }
        losses[_kind_of_marks(cache, survey)] = helped
    findings: list[Finding] = []
    for kind, lost in losses.items():
        tokens = sum(lost.values())
        if tokens >= _LEAST_SHARE * total:
            example = _example(survey, lost, shared, divergence)
            requests = sum(saved > 0 for saved in lost.values())
            findings.append(Finding(kind, *ADVICE[kind], tokens, tokens / total, requests, example))
    if served.refused:
        findings.append(Finding("marks-refused", *ADVICE["marks-refused"], 0, 0.0, len(served.refused), None))
    use = served.total
    return ProfileReport(
        profile.name,
        use.read,
        sum(use.written),
        use.uncached,
        cost / total,
        None if profile.token_price is None else total * profile.token_price,
        None if planned is None else planned.total.cost(profile) / total,
        tuple(sorted(findings, key=lambda finding: -finding.lost_tokens)),
    )


def _losses_to_checkpoints(profile: CacheProfile, shared: CacheOutcome, served: ServedLog) -> dict[str, dict[int, int]]:
    """Return the tokens that each request has in common with an earlier one and computes again, by kind of finding."""
    if profile.checkpoints is None:
        return {"prefix-below-minimum": _short_prefixes(profile.minimum_tokens, shared)}
    block = profile.checkpoints.block
    if max(shared.prompt_tokens) <= block:
        return {"cache-inert": {request: tokens for request, tokens in enumerate(shared.hit_tokens) if tokens}}
    missed = {
        request: lost
        for request, (tokens, use) in enumerate(zip(shared.hit_tokens, served.uses, strict=True))
        if (lost := tokens // block * block - use.read) > 0
    }
    return {"prefix-below-block": _short_prefixes(block, shared), "between-checkpoints": missed}


def _short_prefixes(least: int, shared: CacheOutcome) -> dict[int, int]:
    return {request: tokens for request, tokens in enumerate(shared.hit_tokens) if 0 < tokens < least}


def _kind_of_marks(cache: LogInProfile, survey: LogSurvey) -> str:
    """Return the kind of finding for marks that cost more than they need to."""
    marked = sum(bool(request.marks) for request in survey.log.requests)
    if 2 * marked < len(survey.log.requests):
        return "marks-missing"
    return "mark-behind-volatile" if 2 * len(cache.unread_marks()) > marked else "marks-misplaced"


def _example(
    survey: LogSurvey,
    lost: dict[int, int],
    shared: CacheOutcome,
    divergence: Callable[[int, int, SpotPair], Divergence],
) -> Divergence | None:
    """Return where the request that loses most leaves the earlier one that it has most in common with."""
    donors: Sequence[int | None] = shared.donors
    for later in sorted(lost, key=lambda request: -lost[request]):
        earlier = donors[later]
        if earlier is not None:
            return divergence(later, earlier, _first_difference(survey, later, earlier))
    return None


def _first_difference(survey: LogSurvey, later: int, earlier: int) -> SpotPair:
    prompts = [survey.log.requests[request].messages for request in (later, earlier)]
    at = min(common_length(*prompts), *(len(prompt) - 1 for prompt in prompts))
    texts = [survey.log.text(prompt[at]) for prompt in prompts]
    start = common_length(*texts)
    one, other = (Spot(at, start, len(text) - start) for text in texts)
    return one, other
