"""Conversations in a log: which request continues which, and how the history changed between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from warmprefix_tools.doctor.request_log import PLAIN, TOOLS, LogMessage, LogRequest, Prompt

__all__ = ["Continuation", "HistoryChange", "HistoryStep", "find_continuations", "leading"]

HistoryChange = Literal["truncated", "rewritten"]

_DISTINCTIVE_BYTES = 32
"""Length of a message's key; a shorter message, such as "yes" or "go on", may belong to any conversation."""
_LEAST_SIMILARITY = 0.3
"""Share of segments that a message has in common with what it was before it was changed."""


@dataclass(frozen=True, slots=True)
class HistoryStep:
    """Some messages of the earlier request, and those that stand in their place."""

    change: HistoryChange | None
    """None: they are still there."""
    old: range
    new: range


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a request continues an earlier one of its conversation; indices leave the leading messages out."""

    earlier: int
    """The earlier request."""
    steps: tuple[HistoryStep, ...] = ()
    """Steps through all messages of the earlier request; empty if this is another branch of the conversation."""


def leading(messages: Sequence[LogMessage]) -> int:
    """Return how many messages stand in front of the conversation: tools and system instructions."""
    roles = (message.role in (TOOLS, "system", "developer") for message in messages)
    return next((count for count, leads in enumerate(roles) if not leads), len(messages))


def find_continuations(
    requests: Sequence[LogRequest],
    key_of: Callable[[LogMessage], bytes],
    similarity: Callable[[LogMessage, LogMessage], float],
) -> list[Continuation | None]:
    """Return how each request continues an earlier one; None if it opens its conversation or seems to.

    A request with a session continues the latest one of that session. Any other continues the latest request whose last
    message it contains, or with which it has an answer in common.

    Args:
        requests: Requests of the log.
        key_of: Equal for messages of equal text.
        similarity: How much of one message is in another, 0 to 1.
    """
    result: list[Continuation | None] = []
    latest: dict[Hashable, int] = {}
    turns: list[list[bytes]] = []
    bodies = [request.messages[leading(request.messages) :] for request in requests]
    for index, (request, messages) in enumerate(zip(requests, bodies, strict=True)):
        keys = [key_of(message) for message in messages]
        scope = (request.model, request.tenant, request.user)
        answers = [key for key, message in zip(keys, messages, strict=True) if message.role == "assistant"]
        if request.session is not None:
            earlier = latest.get((scope, "session", request.session))
        else:
            ends = ((scope, "end", key) for key in reversed(keys[:-1]))
            earlier = next((latest[end] for end in ends if end in latest), None)
            if earlier is not None and not _is_related(turns[earlier], keys):
                earlier = None
            if earlier is None:
                old_answers = ((scope, "answer", key) for key in reversed(answers))
                earlier = next((latest[answer] for answer in old_answers if answer in latest), None)
        if earlier is None:
            result.append(None)
        else:
            similar = _comparison(bodies[earlier], messages, similarity)
            result.append(Continuation(earlier, tuple(_steps(turns[earlier], keys, similar))))
        turns.append(keys)
        if request.session is not None:
            latest[scope, "session", request.session] = index
        if keys and messages[-1].role != PLAIN:
            latest[scope, "end", keys[-1]] = index
            latest.update(((scope, "answer", key), index) for key in answers)
    return result


def _comparison(
    old: Prompt, new: Prompt, similarity: Callable[[LogMessage, LogMessage], float]
) -> Callable[[int, int], bool]:
    return lambda i, j: similarity(old[i], new[j]) >= _LEAST_SIMILARITY


def _is_related(old: list[bytes], new: list[bytes]) -> bool:
    """Return whether one common message identifies a conversation: it was alone, it is long, or there are others."""
    return len(old) == 1 or len(old[-1]) > _DISTINCTIVE_BYTES or len(set(old) & set(new)) > 1


def _steps(old: list[bytes], new: list[bytes], similar: Callable[[int, int], bool]) -> Iterator[HistoryStep]:
    if new[: len(old)] == old:
        yield HistoryStep(None, range(len(old)), range(len(old)))
        return
    blocks = [block for block in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks() if block.size]
    if not blocks:
        return
    last = blocks[-1]
    missing = len(old) - last.a - last.size
    goes_on = last.b + last.size + missing
    if missing > 1 or goes_on >= len(new):
        return  # a turn was edited or asked again
    at_old = at_new = 0
    front_replaced = False
    for a, b, size in [*blocks, (len(old), goes_on, 0)]:
        for step in _gap(range(at_old, a), range(at_new, b), similar):
            # If other text replaced the front, such as a summary, it also replaced the messages missing behind it.
            replaced = front_replaced and step.change == "truncated"
            yield HistoryStep("rewritten", step.old, step.new) if replaced else step
            front_replaced = front_replaced or (step.change == "rewritten" and not at_new)
        if size:
            yield HistoryStep(None, range(a, a + size), range(b, b + size))
        at_old, at_new = a + size, b + size


def _gap(old: range, new: range, similar: Callable[[int, int], bool]) -> Iterator[HistoryStep]:
    """Yield the steps between two runs of unchanged messages."""
    if not old and not new:
        return
    if not new:
        yield HistoryStep("truncated", old, new)
    elif len(old) > len(new) and all(similar(i, j) for i, j in zip(old[-len(new) :], new, strict=True)):
        yield HistoryStep("truncated", old[: -len(new)], range(new.start, new.start))
        yield HistoryStep("rewritten", old[-len(new) :], new)
    else:
        yield HistoryStep("rewritten", old, new)
