"""Retrieved context in prompts, sent in an order that the engine's cache may hold already. No I/O."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
from itertools import islice
from typing import Any, Literal, NamedTuple

from warmprefix import ContextBlock, ContextPlanner
from warmprefix.blocks import Pin
from warmprefix.cache_profiles import CacheProfile
from warmprefix.fair_lru import FairLru
from warmprefix.plan import ContextPlan
from warmprefix_requests import OutgoingRequest, Rewritten, with_texts

__all__ = ["TEMPLATES", "FoundContext", "Outcome", "Reordered", "Reorderer", "as_templates"]

_MAX_ORDERS = 20_000
_HEAD_CHARACTERS = 80
"""Length of the beginning of a block in which its position may stand."""

_MAX_BLOCKS = 1_000
"""Longer contexts keep their order."""

_TAG = re.compile(r"<(/?)(source|document|doc|passage|chunk|snippet|search_result|memory)\b[^<>]*>", re.IGNORECASE)
_RULE = f"\n{'-' * 21}\n"
_FRAME = f"Context information is below.{_RULE}"
_KEY = re.compile(r"[A-Za-z_][\w -]{0,60}: ")
_NUMBER = re.compile(r"\d+")
_LIST = re.compile(r"\[\s*(?=\{)")
_MAX_LISTS = 16
"""Beginnings of JSON lists that are looked at per text, so that a text costs its length."""
_COMMA = re.compile(r"\s*,\s*")
_TEXTS = ("text", "content", "page_content", "snippet", "memory")
"""Fields of which an object with retrieved text has one."""
_TIME = re.compile(r"\d{4}-\d\d-\d\d")
_TIMES = re.compile(r"time|date|start|offset|\bts$|_at$", re.IGNORECASE)
"""Names of fields with numbers that say when, or how far from a beginning; unlike scores, they rise or fall in time."""
_MEMORIES = re.compile(
    r"^(?:user |relevant )?memories:\n((?:- [^\n]*(?:\n|\Z)){2,})(?=\n|\Z)", re.IGNORECASE | re.MULTILINE
)
"""The list of Mem0's quickstart. It ends with an empty line, so that no line is one of a longer memory."""
_LINE = re.compile(r"[^\n]+")

Outcome = Literal["planned", "as before", "locked", "numbered", "duplicates", "late"]
"""What becomes of a context: its order is planned, or that of an earlier request. Or it stays, because the request asks
for that, because its blocks are numbered or not distinct, because it comes late in a conversation, or because the body
cannot be written again."""

_Span = tuple[int, int]
Template = Callable[[str], list[_Span]]
"""Finds the blocks of a context in a text."""


class PromptScope(NamedTuple):
    """The scope of a prompt, as arguments of `ContextPlanner.plan`."""

    tenant: str | None
    model: str | None
    preamble: str


class FoundContext(NamedTuple):
    """A context in a call."""

    number: int
    """Index of its message."""
    text: str
    """The text of that message."""
    spans: Sequence[_Span]
    """Where its blocks are in that text."""
    blocks: tuple[str, ...]
    scope: PromptScope
    key: bytes
    """A name for the tenant, the model, and all text up to the end of the message."""
    is_first: bool
    """True if no answer of the model stands before it."""
    fixed: Outcome | None
    """Why it keeps its order, whatever was planned before; None if it may get another one."""


class Reordered(NamedTuple):
    """A call whose context may have another order."""

    call: OutgoingRequest
    plan: ContextPlan | None = None
    """To be committed with the answer; None if the order is the one of an earlier request, or stays."""
    outcome: Outcome | None = None
    """None if no context was found."""
    context: tuple[str, ...] = ()
    """Blocks of the context in the client's order, if they are distinct and not numbered."""


class Reorderer:
    """Orders the blocks of contexts that stand in a system prompt, or in a conversation's first message of the user.

    The text between the blocks stays where it is, and each block keeps its bytes. An order is kept for as long as the
    conversation sends the same context, so that its prompts keep their beginning. The first `pin_first` and the last
    `pin_last` blocks of each context stay where they are. Thread-safe.
    """

    def __init__(
        self,
        templates: Mapping[str, Template],
        pin_first: int = 0,
        pin_last: int = 0,
        profile: CacheProfile | str = "full-attention",
    ) -> None:
        self._pin_first = pin_first
        self._pin_last = pin_last
        self.planner = ContextPlanner(annotate="none", profile=profile)
        self._templates = templates
        self._lock = threading.Lock()
        self._orders: FairLru[bytes, tuple[int, ...]] = FairLru()

    def find(self, call: OutgoingRequest, tenant: str | None) -> FoundContext | None:
        """Return the first context of a call; None without one. O(bytes)."""
        messages = call.body.get("messages")
        if call.route != "chat" or not isinstance(messages, list):
            return None
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or not message.keys() <= {"role", "content", "name"}:  # a mark stays
                continue
            text, role = message.get("content"), message.get("role")
            if not isinstance(text, str) or role not in ("system", "developer", "user"):
                continue
            spans = self._blocks(text)
            blocks = tuple([text[begin:end] for begin, end in spans])
            if not 2 <= len(blocks) <= _MAX_BLOCKS or not all(map(str.strip, blocks)):
                continue
            fixed: Outcome | None = None
            if len(set(blocks)) < len(blocks):
                fixed = "duplicates"
            elif _are_numbered(blocks):
                fixed = "numbered"
            is_first = role != "user" or not any(
                isinstance(other, dict) and other.get("role") == "assistant" for other in messages
            )
            front = json.dumps([call.body.get("tools"), messages[:number], text[: spans[0][0]]]).encode()
            about = [tenant, call.body.get("model"), front.decode(), text]
            key = blake2b(json.dumps(about).encode(), digest_size=16).digest()
            model, preamble = call.body.get("model"), blake2b(front, digest_size=16).hexdigest()
            scope = PromptScope(tenant, model if isinstance(model, str) else None, preamble)
            return FoundContext(number, text, spans, blocks, scope, key, is_first, fixed)
        return None

    def announced(self, found: FoundContext | None) -> AbstractContextManager[object] | None:
        """Announce a context that is to be planned, so that plans made before consider it; None if it has its order."""
        if found is None or found.fixed is not None or not found.is_first:
            return None
        with self._lock:
            if self._orders.get(found.key) is not None:
                return None
        return self.planner.queued(found.blocks, **found.scope._asdict())

    def reordered(
        self,
        call: OutgoingRequest,
        tenant: str | None,
        found: FoundContext | None = None,
        *,
        order_locked: bool = False,
    ) -> Reordered:
        """Return a call with its context in the planned order; the planner learns a locked one. O(bytes).

        Args:
            call: The call.
            tenant: Its tenant.
            found: Its context, if `find` has returned it.
            order_locked: Keep the order.
        """
        found = found or self.find(call, tenant)
        if found is None or found.fixed is not None:
            return Reordered(call, outcome=None if found is None else found.fixed)
        return self._arranged(call, found, order_locked=order_locked)._replace(context=found.blocks)

    def abandon(self, reordered: Reordered | None) -> None:
        """Drop the plan of a request that was not answered; no effect after its commit."""
        if reordered is not None and reordered.plan is not None:
            self.planner.abandon(reordered.plan)

    def _blocks(self, text: str) -> list[_Span]:
        return next((spans for find in self._templates.values() if len(spans := _run(text, find(text))) > 1), [])

    def _arranged(self, call: OutgoingRequest, found: FoundContext, *, order_locked: bool) -> Reordered:
        messages: Sequence[Any] = call.body["messages"]
        number, text, spans = found.number, found.text, found.spans
        with self._lock:
            order = None if order_locked else self._orders.use(found.key)
        plan: ContextPlan | None = None
        outcome: Outcome = "locked" if order_locked else "planned" if order is None else "as before"
        if order is None:
            if not found.is_first:
                return Reordered(call, outcome="locked" if order_locked else "late")
            plan = self.planner.plan(
                [ContextBlock(block, pinned=self._pin(place, len(spans))) for place, block in enumerate(found.blocks)],
                order_locked=order_locked,
                **found.scope._asdict(),
            )
            numbers = {block: place for place, block in enumerate(found.blocks)}
            order = tuple([numbers[planned.block.text] for planned in plan.blocks])
        with self._lock:
            self._orders.put(found.key, order, found.scope.tenant)
            if len(self._orders) > _MAX_ORDERS:
                self._orders.evict()
        if list(order) == sorted(order):
            return Reordered(call, plan, outcome)
        pieces: list[str] = []
        done = 0
        for (begin, end), place in zip(spans, order, strict=True):
            pieces += (text[done:begin], text[slice(*spans[place])])
            done = end
        changed = "".join([*pieces, text[done:]])
        message = {**messages[number], "content": changed}
        body = {**call.body, "messages": [*messages[:number], message, *messages[number + 1 :]]}
        rewritten = Rewritten(body, texts={("messages", number, "content"): changed})
        return Reordered(with_texts(call, rewritten), plan, outcome)

    def _pin(self, place: int, blocks: int) -> Pin | None:
        return "start" if place < self._pin_first else "end" if place >= blocks - self._pin_last else None


# -- templates ---------------------------------------------------------------------------------------------------------


def as_templates(names: Iterable[str]) -> dict[str, Template]:
    """Return templates by name: one of `TEMPLATES`, or a pattern as `pattern:REGEX` that matches one block.

    Raises:
        ValueError: A name is unknown, or a pattern can't be used.
    """
    templates: dict[str, Template] = {}
    for name in names:
        if name in TEMPLATES:
            templates[name] = TEMPLATES[name]
        elif name.startswith("pattern:"):
            templates[name] = _by_pattern(name.removeprefix("pattern:"))
        else:
            raise ValueError(f"reorder must be {', '.join(TEMPLATES)} or pattern:REGEX, got {name!r}")
    return templates


def _by_pattern(text: str) -> Template:
    try:
        pattern = re.compile(text, re.DOTALL)
    except re.error as error:
        raise ValueError(f"reorder has no regular expression in {text!r}: {error}") from error
    if pattern.fullmatch("") is not None:
        raise ValueError(f"reorder must not match an empty text, got {text!r}")
    return lambda prompt: [found.span() for found in pattern.finditer(prompt)]


def _tagged(text: str) -> list[_Span]:
    """Find elements with these names; those inside another one belong to it."""
    spans: list[_Span] = []
    begin, name = 0, ""
    for tag in _TAG.finditer(text):
        if not name and not tag[1]:
            begin, name = tag.start(), tag[2].lower()
        elif tag[1] and tag[2].lower() == name:
            spans.append((begin, tag.end()))
            name = ""
    return spans


def _framed(text: str) -> list[_Span]:
    """Find the nodes in LlamaIndex's frame, each of which begins with its first metadata key."""
    frame = text.find(_FRAME)
    begin = frame + len(_FRAME)
    end = text.find(_RULE, begin)
    key = _KEY.match(text, begin, end) if min(frame, end) >= 0 else None
    if key is None:
        return []
    begins = [begin]
    separator = f"\n\n{key[0]}"
    at = text.find(separator, begin, end)
    while at >= 0:
        begins.append(at + 2)
        at = text.find(separator, begins[-1], end)
    return list(zip(begins, [*[start - 2 for start in begins[1:]], end], strict=True))


def _listed(text: str) -> list[_Span]:
    """Find the objects of the first JSON list in which each has a text; a list of messages is none."""
    decode = json.JSONDecoder().raw_decode
    end = 0
    for begin in islice(_LIST.finditer(text), _MAX_LISTS):
        if begin.start() < end:  # inside the list before
            continue
        spans: list[_Span] = []
        at: re.Match[str] | None = begin
        try:
            while at is not None:
                found, end = decode(text, at.end())
                if not isinstance(found, dict) or "role" in found or found.get("type") == "text":
                    break
                if not any(isinstance(found.get(name), str) for name in _TEXTS):
                    break
                spans.append((at.end(), end))
                at = _COMMA.match(text, end)
            else:
                if len(spans) > 1 and text[end:].lstrip()[:1] == "]":
                    return spans
        except (ValueError, RecursionError):
            continue
    return []


def _remembered(text: str) -> list[_Span]:
    """Find the memories in a list as Mem0's quickstart writes it."""
    found = _MEMORIES.search(text)
    return [] if found is None else [line.span() for line in _LINE.finditer(text, *found.span(1))]


TEMPLATES: Mapping[str, Template] = {"tags": _tagged, "llamaindex": _framed, "json": _listed, "mem0": _remembered}


def _run(text: str, spans: Sequence[_Span]) -> list[_Span]:
    """Return the longest run of blocks between which the same white space stands, with or without a comma."""
    best: list[_Span] = []
    run: list[_Span] = []
    gap: str | None = None
    for span in spans:
        between = text[run[-1][1] : span[0]] if run else ""
        if run and between.strip() in ("", ",") and between == (between if gap is None else gap):
            gap = between
            run.append(span)
        else:
            run, gap = [span], None
        best = run if len(run) > len(best) else best
    return best


def _are_numbered(blocks: Sequence[str]) -> bool:
    """Return True if the beginnings of the blocks count up, or fields of JSON do: in another order they would not."""
    if all(block.startswith("{") for block in blocks) and _are_in_sequence(blocks):
        return True
    counts = [[int(number[:9]) for number in _NUMBER.findall(block[:_HEAD_CHARACTERS])] for block in blocks]
    return any(
        all(number == first[0] + place for place, number in enumerate(first)) for first in zip(*counts, strict=False)
    )


def _are_in_sequence(blocks: Sequence[str]) -> bool:
    """Return True if a field of all these JSON objects, or of objects in them, is in a sequence."""
    try:
        objects = [_fields(json.loads(block)) for block in blocks]
    except (ValueError, RecursionError):
        return False
    return any(_is_sequence(name, [str(each.get(name)) for each in objects]) for name in objects[0])


def _fields(found: Mapping[str, Any]) -> dict[str, Any]:
    inner = {name: value for name, value in found.items() if isinstance(value, dict)}
    return {**found, **{f"{name}.{key}": each for name, value in inner.items() for key, each in value.items()}}


def _is_sequence(name: str, values: Sequence[str]) -> bool:
    """Return True if the values of a field count up, or are times that rise or fall."""
    if all(map(_TIME.match, values)):
        return sorted(set(values)) in (values, values[::-1])
    try:
        numbers = list(map(float, values))
    except ValueError:
        return False
    rising = sorted(set(numbers))
    if _TIMES.search(name):
        return rising in (numbers, numbers[::-1])
    return rising == numbers == [numbers[0] + place for place in range(len(numbers))]
