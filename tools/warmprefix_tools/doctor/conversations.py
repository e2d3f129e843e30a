"""Which request carries on which, and what became of the history on the way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import Literal

from warmprefix_tools.doctor.prompts import PLAIN, TOOLS, Message, Request

__all__ = ["Change", "Step", "Thread", "leading", "threads"]

Change = Literal["truncated", "rewritten"]

_TELLING = 32
"""Bytes of a message's key: a shorter one, such as of "yes" or "go on", may be anybody's."""
_ALIKE = 0.3
"""Share of segments that a message has in common with what it was before it was changed."""


@dataclass(frozen=True, slots=True)
class Step:
    """What became of some messages of the earlier request: where they were, and where they or their likes are."""

    change: Change | None
    """None: they are still there."""
    old: range
    new: range


@dataclass(frozen=True, slots=True)
class Thread:
    """How a request follows the one before it in its conversation; indices leave the leading messages out."""

    earlier: int
    """The request before."""
    steps: tuple[Step, ...] = ()
    """Through all messages of the earlier one; empty if this is another branch of the conversation."""

    @property
    def changes(self) -> frozenset[Change]:
        """What happened to the history, if anything."""
        return frozenset(step.change for step in self.steps if step.change is not None)


def leading(messages: Sequence[Message]) -> int:
    """How many messages stand in front of the conversation: tools, and instructions of the system."""
    count = 0
    while count < len(messages) and messages[count].role in (TOOLS, "system", "developer"):
        count += 1
    return count


def threads(
    requests: Sequence[Request], key_of: Callable[[Message], bytes], alike: Callable[[Message, Message], float]
) -> list[Thread | None]:
    """The thread of each request; None if it opens its conversation, or none can be seen.

    By the record's session where it names one. Else a request follows the latest one whose last message it holds, or
    with which it has an answer in common.

    Args:
        requests: The log's.
        key_of: Equal for messages that say the same.
        alike: How much of one message is in another, 0 to 1.
    """
    result: list[Thread | None] = []
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
            if earlier is not None and not _related(turns[earlier], keys):
                earlier = None
            if earlier is None:
                had = ((scope, "answer", key) for key in reversed(answers))
                earlier = next((latest[answer] for answer in had if answer in latest), None)
        if earlier is None:
            result.append(None)
        else:
            similar = partial(_alike, alike, bodies[earlier], messages)
            result.append(Thread(earlier, tuple(_steps(turns[earlier], keys, similar))))
        turns.append(keys)
        if request.session is not None:
            latest[scope, "session", request.session] = index
        if keys and messages[-1].role != PLAIN:
            latest[scope, "end", keys[-1]] = index
            latest.update(((scope, "answer", key), index) for key in answers)
    return result


def _alike(
    alike: Callable[[Message, Message], float], old: Sequence[Message], new: Sequence[Message], i: int, j: int
) -> float:
    return alike(old[i], new[j])


def _related(old: list[bytes], new: list[bytes]) -> bool:
    """Whether one common message is telling enough: it was alone, it is long, or it has company."""
    return len(old) == 1 or len(old[-1]) > _TELLING or len(set(old) & set(new)) > 1


def _steps(old: list[bytes], new: list[bytes], alike: Callable[[int, int], float]) -> Iterator[Step]:
    if new[: len(old)] == old:
        yield Step(None, range(len(old)), range(len(old)))
        return
    blocks = [block for block in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks() if block.size]
    if not blocks:
        return
    last = blocks[-1]
    missing = len(old) - last.a - last.size
    goes_on = last.b + last.size + missing
    if missing > 1 or goes_on >= len(new):
        return  # it was edited or asked again
    at_old = at_new = 0
    summed_up = False
    for a, b, size in [*blocks, (len(old), goes_on, 0)]:
        for step in _gap(range(at_old, a), range(at_new, b), alike):
            # Where something else took the place of the front, what is gone behind it went into that.
            yield Step("rewritten", step.old, step.new) if summed_up and step.change == "truncated" else step
            summed_up = summed_up or (step.change == "rewritten" and not at_new)
        if size:
            yield Step(None, range(a, a + size), range(b, b + size))
        at_old, at_new = a + size, b + size


def _gap(old: range, new: range, alike: Callable[[int, int], float]) -> Iterator[Step]:
    """What became of messages that are not there as they were."""
    if not old and not new:
        return
    if not new:
        yield Step("truncated", old, new)
    elif len(old) > len(new) and all(alike(i, j) >= _ALIKE for i, j in zip(old[-len(new) :], new, strict=True)):
        yield Step("truncated", old[: -len(new)], range(new.start, new.start))
        yield Step("rewritten", old[-len(new) :], new)
    else:
        yield Step("rewritten", old, new)
