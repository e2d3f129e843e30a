"""Cache salts that part what could be shared, or that let tenants share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import TYPE_CHECKING

from warmprefix_tools.doctor.checks.base import Check, DraftCheck, Spot, SpotPair
from warmprefix_tools.doctor.prompts import Draft

if TYPE_CHECKING:
    from warmprefix_tools.doctor.survey import Survey

__all__ = ["SHARED", "SPLIT", "spot_of_shared"]


def _owner(survey: Survey, request: int) -> Hashable:
    """Who should have one salt; None if nobody can tell."""
    entry = survey.log.requests[request]
    return entry.tenant or entry.user or entry.session


def _split(survey: Survey, draft: Draft) -> Draft:
    """Give each tenant the first salt that it had; a log of nameless requests that hardly ever share one, one."""
    requests = range(len(draft.salts))
    if not any(draft.salts):
        return draft
    owners = [_owner(survey, request) for request in requests]
    if not any(owners):
        salts = Counter(salt for salt in draft.salts if salt is not None)
        if len(salts) * 2 <= sum(salts.values()) or len(salts) < 2:
            return draft
    first: dict[Hashable, str | None] = {}
    for request in requests:
        if draft.salts[request] is not None:
            first.setdefault(owners[request], draft.salts[request])
    draft.salts = [first.get(owners[request], draft.salts[request]) for request in requests]
    return draft


def _spot(survey: Survey, later: int, earlier: int) -> SpotPair | None:
    one, other = survey.log.requests[later], survey.log.requests[earlier]
    if one.salt == other.salt or _owner(survey, later) != _owner(survey, earlier):
        return None
    return _field(survey, later), _field(survey, earlier)


def _field(survey: Survey, request: int) -> Spot:
    entry = survey.log.requests[request]
    salt = "no salt" if entry.salt is None else entry.salt
    return Spot(path="cache_salt", text=f"{salt} ({entry.tenant or entry.user or entry.session or 'tenant unknown'})")


def spot_of_shared(survey: Survey) -> tuple[int, int, int, SpotPair] | None:
    """How many requests have a salt that another tenant used before; the first of them, the other, and the places."""
    holders: dict[Hashable, dict[str, int]] = defaultdict(dict)
    concerned, first = 0, None
    for index, request in enumerate(survey.log.requests):
        if request.tenant is None:
            continue
        tenants = holders[request.model, request.salt]
        tenants.setdefault(request.tenant, index)
        others = [at for tenant, at in tenants.items() if tenant != request.tenant]
        if others:
            concerned += 1
            first = first or (index, others[0])
    if first is None:
        return None
    return concerned, first[0], first[1], (_field(survey, first[0]), _field(survey, first[1]))


SPLIT = DraftCheck(
    "salt-split",
    "One tenant's requests come with several cache salts",
    "Derive the salt from the tenant alone, with a key of yours: what two salts part is never shared."
    " ContextPlan.cache_salt is such a salt.",
    _split,
    _spot,
)

SHARED = Check(
    "salt-shared",
    "Several tenants share one cache salt, or have none",
    "Costs no tokens, but one tenant can time what another sent. If they must not, send a salt for each:"
    " extra_body={'cache_salt': plan.cache_salt}.",
)
