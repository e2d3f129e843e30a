"""What a log loses in the cache of a profile: short prefixes, missed checkpoints, and missing marks."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from warmprefix.cache_profiles import CacheProfile
from warmprefix_tools.caches import MarkedPrompt, serve, simulated_cache
from warmprefix_tools.doctor.cache import CacheOutcome, prompt_tokens
from warmprefix_tools.doctor.findings import Divergence, Finding, ProfileReport
from warmprefix_tools.doctor.repairs import ADVICE
from warmprefix_tools.doctor.request_log import RequestLog

__all__ = ["PROFILE_KINDS", "examine_profile"]

PROFILE_KINDS = (
    *("cache-inert", "prefix-below-block", "prefix-below-minimum", "between-checkpoints"),
    "marks-missing",
)
_LEAST_SHARE = 0.005
"""Of all prompt tokens: what costs less is not worth a finding."""
_KV_BLOCK = 16
_MOST_BLOCKS = 4_000_000


def examine_profile(
    log: RequestLog, profile: CacheProfile, shared: CacheOutcome, example: Callable[[int, int], Divergence]
) -> ProfileReport:
    """Return the findings about a cache of this profile, worst first. O(tokens of the log).

    Args:
        log: The log.
        profile: What the cache can do.
        shared: For each request, the tokens that it has in common with an earlier one.
        example: Shows where a later and an earlier request differ.
    """
    total = sum(shared.prompt_tokens)
    findings: list[Finding] = []
    for kind, lost in _losses(log, profile, shared).items():
        tokens = sum(lost.values())
        if tokens >= _LEAST_SHARE * total and tokens:
            worst = max(lost, key=lost.__getitem__)
            donor = shared.donors[worst]
            divergence = None if donor is None else example(worst, donor)
            findings.append(Finding(kind, *ADVICE[kind], tokens, tokens / total, len(lost), divergence))
    return ProfileReport(profile.name, tuple(sorted(findings, key=lambda finding: -finding.lost_tokens)))


def _losses(log: RequestLog, profile: CacheProfile, shared: CacheOutcome) -> dict[str, dict[int, int]]:
    """Return the tokens that requests have in common with an earlier one and compute again, by kind of finding."""
    found = {request: tokens for request, tokens in enumerate(shared.hit_tokens) if tokens}
    if profile.checkpoints is None:
        least = profile.minimum_tokens
        unmarked = {request: tokens for request, tokens in found.items() if tokens >= least}
        unmarked = {request: tokens for request, tokens in unmarked.items() if not log.requests[request].marked}
        short = {request: tokens for request, tokens in found.items() if tokens < least}
        return {"prefix-below-minimum": short, "marks-missing": {} if profile.marks is None else unmarked}
    block = profile.checkpoints.block
    if max(shared.prompt_tokens) <= block:
        return {"cache-inert": found}
    missed = {}
    room = sum(2 * tokens + 8 * block for tokens in shared.prompt_tokens)
    cache = simulated_cache(profile, kv_blocks=min(room // block + 2, _MOST_BLOCKS), block_size=_KV_BLOCK)
    for number, request in enumerate(log.requests):
        tokens = array("I", prompt_tokens(request.messages, log.pool))
        use = serve(cache, MarkedPrompt(tokens, repr((request.model, request.salt))))
        if (lost := found.get(number, 0) // block * block - use.read) > 0:
            missed[number] = lost
    short = {request: tokens for request, tokens in found.items() if tokens < block}
    return {"prefix-below-block": short, "between-checkpoints": missed}
