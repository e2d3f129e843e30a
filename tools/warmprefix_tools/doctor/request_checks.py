"""Defects of requests: changed histories, cache salts, and prompts that are too short."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from itertools import chain

from warmprefix_tools.doctor.conversations import Continuation, HistoryChange, leading
from warmprefix_tools.doctor.request_log import LogMessage, LogVersion, common_length
from warmprefix_tools.doctor.survey import LogSurvey, Spot, SpotPair

__all__ = [
    "count_short_prompts_by_token",
    "history_changes",
    "history_spot",
    "restore_histories",
    "salt_spot",
    "shared_salt_spot",
    "short_spot",
    "unite_salts",
]

_Restored = tuple[LogMessage, ...]
"""One message of a request, behind those that it lost; empty if it was replaced."""


def history_changes(survey: LogSurvey, change: HistoryChange) -> bool:
    """Return whether any history was changed like this."""
    return any(
        step.change == change
        for continuation in survey.continuations
        if continuation is not None
        for step in continuation.steps
    )


def restore_histories(survey: LogSurvey, version: LogVersion) -> None:
    """Give each request the history as its conversation had it, without the changes that are to be repaired."""
    repaired = {kind.removeprefix("history-") for kind in version.kinds}
    histories: list[list[_Restored]] = []
    for index, (prompt, continuation) in enumerate(zip(version.prompts, survey.continuations, strict=True)):
        start = leading(prompt)
        own = prompt[start:]
        if continuation is None:
            history: list[_Restored] = [(message,) for message in own]
        else:
            history = _restored(histories[continuation.earlier], own, continuation, repaired)
            version.prompts[index] = prompt[:start] + tuple(chain.from_iterable(history))
        histories.append(history)


def _restored(
    before: list[_Restored], own: tuple[LogMessage, ...], continuation: Continuation, repaired: set[str]
) -> list[_Restored]:
    history: list[_Restored] = []
    lost: _Restored = ()
    new = 0
    for step in continuation.steps:
        new = max(new, step.new.stop)
        if step.change == "truncated" or (step.change == "rewritten" and len(step.old) != len(step.new)):
            if step.change in repaired:
                lost += tuple(chain.from_iterable(before[i] for i in step.old))
                history += [()] * len(step.new)
            else:
                history += [(own[j],) for j in step.new]
        else:
            for i, j in zip(step.old, step.new, strict=True):
                keep_old = step.change is None or step.change in repaired
                history.append(lost + before[i][:-1] + (before[i][-1:] if keep_old else (own[j],)))
                lost = ()
    for message in own[new:]:
        history.append((*lost, message))
        lost = ()
    return history


def history_spot(survey: LogSurvey, later: int, earlier: int, *, change: HistoryChange) -> SpotPair | None:
    """Return the first messages of two turns that differ by this change."""
    continuation = survey.continuations[later]
    if continuation is None or continuation.earlier != earlier:
        return None
    step = next((step for step in continuation.steps if step.change == change), None)
    if step is None:
        return None
    places, texts = [], []
    for request, first in ((later, step.new.start), (earlier, step.old.start)):
        messages = survey.log.requests[request].messages
        places.append(min(leading(messages) + first, len(messages) - 1))
        texts.append(survey.log.text(messages[places[-1]]))
    start = common_length(*texts) if change == "rewritten" else 0
    one, other = (Spot(at, start, len(text) - start) for at, text in zip(places, texts, strict=True))
    return one, other


def unite_salts(survey: LogSurvey, version: LogVersion) -> None:
    """Give each sender its first salt; a log without senders in which hardly any salt recurs gets one for all."""
    senders = [request.sender for request in survey.log.requests]
    if not any(senders):
        salts = Counter(salt for salt in version.salts if salt is not None)
        if len(salts) * 2 <= sum(salts.values()) or len(salts) < 2:
            return
    first: dict[Hashable, str] = {}
    for sender, salt in zip(senders, version.salts, strict=True):
        if salt is not None:
            first.setdefault(sender, salt)
    version.salts = [first.get(sender, salt) for sender, salt in zip(senders, version.salts, strict=True)]


def salt_spot(survey: LogSurvey, later: int, earlier: int) -> SpotPair | None:
    """Return the salts of two requests of one sender, if they differ."""
    one, other = survey.log.requests[later], survey.log.requests[earlier]
    differ = one.salt != other.salt and one.sender == other.sender
    return (_salt_field(survey, later), _salt_field(survey, earlier)) if differ else None


def _salt_field(survey: LogSurvey, request: int) -> Spot:
    entry = survey.log.requests[request]
    salt = "no salt" if entry.salt is None else entry.salt
    return Spot(path="cache_salt", text=f"{salt} ({entry.sender or 'tenant unknown'})")


def shared_salt_spot(survey: LogSurvey) -> tuple[int, int, int, SpotPair] | None:
    """Find requests with a salt that another tenant used before.

    Returns:
        Their number; the first of them and the earlier request of the other tenant; the salts of both. None if there
        are no such requests.
    """
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
    return concerned, first[0], first[1], (_salt_field(survey, first[0]), _salt_field(survey, first[1]))


def count_short_prompts_by_token(survey: LogSurvey, version: LogVersion) -> None:
    """Count short prompts as if a KV block had one token."""
    version.token_granular = survey.short_requests


def short_spot(survey: LogSurvey, later: int, earlier: int) -> SpotPair | None:
    """Return the last messages of two requests, if the later one is short."""
    if later not in survey.short_requests:
        return None
    one, other = (Spot(len(survey.log.requests[request].messages) - 1) for request in (later, earlier))
    return one, other
