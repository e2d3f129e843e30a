"""A filter function for Open WebUI, which calls `request` before it asks the model, and `stream` for each piece."""

from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel, Field

from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix.forks import fork_safe_lock
from warmprefix_plugins.citations import Citations, steady_numbers

__all__ = ["SourceFilter"]

_LOG = logging.getLogger(__name__)
_MOST_ANSWERS, _MOST_CHARACTERS = 10_000, 32_000_000
"""Answers on their way at one time, and of their prompts' sources; the oldest is forgotten first, and then shows the
numbers that the model writes."""
_TEXTS = ("content", "reasoning_content", "reasoning")
"""Fields of a piece of an answer that a page shows."""
_PLACES = ("item_id", "output_index", "content_index", "summary_index")
_LAST_EVENTS = ("response.completed", "response.incomplete")


class _Source(NamedTuple):
    """A passage in a prompt."""

    number: int
    """What Open WebUI calls its document: 1 for the first that it found."""
    name: str
    """What tells its document from others."""
    begin: int
    body: int
    """Where its text goes on behind that number."""
    end: int


class _TextPlace(NamedTuple):
    """A text of a message, in the object that holds it."""

    holder: Any
    key: str
    front: object
    """What stands in front of it in the prompt."""
    opens_history: bool
    """True if no answer stands in front of it."""


@dataclass(slots=True, eq=False)
class _Answer:
    """An answer that is on its way."""

    plan: ContextPlan
    before: str
    after: str
    """What took the place of `before` in the prompt."""
    citations: Citations
    committed: bool = False

    @property
    def characters(self) -> int:
        return len(self.before) + len(self.after)


class SourceFilter:
    """Sends the sources of a retrieval in an order that the engine's prefix cache may hold already.

    Open WebUI numbers documents by the order in which a search finds them, so the same passage has another number in
    every prompt, and no cache finds it. Here, the model gets a number that belongs to the document, and the planner's
    order; citations in its answer become Open WebUI's own numbers again, so that they point to the same documents as
    before. Only prompts change in which each passage stands exactly where Open WebUI puts it, in a system prompt or in
    the first question of a chat, and whose answer is streamed. If anything fails, the prompt stays as it is. An order
    is learned by all users; with the valve `separate_users`, by each user alone.
    """

    class Valves(BaseModel):
        """Settings that an administrator sees."""

        priority: int = Field(default=100, description="Filters with a lower number run first.")
        separate_users: bool = Field(default=False, description="Learn from the chats of each user alone.")

    def __init__(self, planner: ContextPlanner | None = None) -> None:
        """Make a filter.

        Args:
            planner: Decides on orders; None for one of this process, or, if the environment has `WARMPREFIX_REDIS_URL`,
                for one that shares what it learns with other workers.
        """
        self.valves = self.Valves()
        if planner is None:
            planner = ContextPlanner.from_url() if "WARMPREFIX_REDIS_URL" in os.environ else ContextPlanner()
        self.planner = planner
        self._answers: OrderedDict[tuple[str, str], _Answer] = OrderedDict()
        self._characters = 0
        """Of all answers."""
        self._lock = fork_safe_lock()
        self._has_warned = False

    def request(
        self,
        body: dict[str, Any],
        __metadata__: Mapping[str, Any] | None = None,
        __user__: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the request, perhaps with its sources in another order."""
        try:
            self._arrange(body, __metadata__ or {}, __user__ or {})
        except Exception:
            self._warn()
        return body

    def stream(self, event: dict[str, Any], __metadata__: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return a piece of an answer, with citations by Open WebUI's numbers."""
        try:
            answer = self._answers.get(_key(__metadata__ or {}))
            if answer is not None:
                self._show(event, answer)
        except Exception:
            self._warn()
        return event

    def _arrange(self, body: dict[str, Any], metadata: Mapping[str, Any], user: Mapping[str, Any]) -> None:
        key = _key(metadata)
        if not key[1] or body.get("stream") is not True:  # no way to find the citations of its answer
            return
        with self._lock:
            known = self._answers.get(key)
        if known is not None:  # a call of a tool is answered: the prompt goes on
            for place in _places(body, every=True):  # pictures of a tool stand in a later message of the user
                text = place.holder[place.key]
                if known.before in text:
                    place.holder[place.key] = text.replace(known.before, known.after, 1)
                    return
            return
        for place in _places(body):
            text = place.holder[place.key]
            sources = _sources(text, metadata.get("sources") or ())
            if len(sources) > 1:
                break
        else:
            return
        if not place.opens_history:
            return
        names = list(dict.fromkeys([source.name for source in sources]))
        steady = dict(zip(names, steady_numbers(names, json.dumps(body.get("messages"), default=str)), strict=True))
        model = body.get("model")
        plan = self.planner.plan(
            [ContextBlock(f'<source id="{steady[each.name]}"{text[each.body : each.end]}') for each in sources],
            tenant=str(user.get("id")) if self.valves.separate_users else None,
            model=model if isinstance(model, str) else None,
            preamble=json.dumps([body.get("tools"), place.front, text[: sources[0].begin]], default=str),
        )
        before = text[sources[0].begin : sources[-1].end]
        after = "\n".join([*[planned.render() for planned in plan.blocks], *filter(None, [plan.order_annotation])])
        citations = Citations({steady[source.name]: source.number for source in sources})
        self._keep(key, _Answer(plan, before, after, citations))
        place.holder[place.key] = text[: sources[0].begin] + after + text[sources[-1].end :]

    def _keep(self, key: tuple[str, str], answer: _Answer) -> None:
        forgotten: list[_Answer] = []
        with self._lock:
            self._answers[key] = answer
            self._characters += answer.characters
            while len(self._answers) > 1 and (
                len(self._answers) > _MOST_ANSWERS or self._characters > _MOST_CHARACTERS
            ):
                forgotten.append(self._answers.popitem(last=False)[1])
                self._characters -= forgotten[-1].characters
        for oldest in forgotten:
            if not oldest.committed:
                self.planner.abandon(oldest.plan)

    def _show(self, event: dict[str, Any], answer: _Answer) -> None:
        kind = event.get("type")
        if isinstance(kind, str) and kind.startswith("response."):
            _show_output(kind, event, answer.citations)
            self._end(answer, ended=kind in _LAST_EVENTS)
            return
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            delta, ended = choice.get("delta"), bool(choice.get("finish_reason"))
            if ended and delta is None:  # what was kept back needs a place
                delta = choice["delta"] = {}
            if isinstance(delta, dict):
                for field in _TEXTS:
                    text = delta.get(field)
                    if isinstance(text, str) or ended:
                        shown = answer.citations.shown(text or "", field, ended=ended)
                        if shown or field in delta:
                            delta[field] = shown
            self._end(answer, ended=ended)

    def _end(self, answer: _Answer, *, ended: bool) -> None:
        if ended and not answer.committed:
            answer.committed = True
            self.planner.commit(answer.plan)

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning("a prompt or an answer stays as it is; later failures are not logged", exc_info=True)


def _show_output(kind: str, event: dict[str, Any], citations: Citations) -> None:
    """Change an event of the Responses API: a piece of a text, or the whole text behind its pieces."""
    field = str([kind.rpartition(".")[0], *map(event.get, _PLACES)])
    if kind.endswith("text.delta"):
        event["delta"] = citations.shown(event["delta"], field)
        return
    citations.shown("", field, ended=True)  # the whole text has what was kept back
    waiting: list[Any] = [event]
    while waiting:
        holder = waiting.pop()
        for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if isinstance(value, str) and key == "text":
                holder[key] = citations.shown(value, ended=True)
            elif isinstance(value, dict | list):
                waiting.append(value)


def _key(metadata: Mapping[str, Any]) -> tuple[str, str]:
    return str(metadata.get("chat_id") or ""), str(metadata.get("message_id") or "")


def _places(body: Mapping[str, Any], *, every: bool = False) -> Iterator[_TextPlace]:
    """Yield the texts in which Open WebUI puts sources: the system prompts, and the last message of the user.

    Args:
        body: The request.
        every: Yield those of every message.
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        return
    last = max([n for n, message in enumerate(messages) if message.get("role") == "user"], default=-1)
    for number, message in enumerate(messages):
        if every or message.get("role") == "system" or number == last:
            opens = not any(other.get("role") == "assistant" for other in messages[:number])
            content = message.get("content")
            if isinstance(content, str):
                yield _TextPlace(message, "content", messages[:number], opens)
            for at, part in enumerate(content if isinstance(content, list) else ()):
                if isinstance(part.get("text"), str):
                    yield _TextPlace(part, "text", [messages[:number], content[:at]], opens)


def _sources(text: str, given: Sequence[Mapping[str, Any]]) -> list[_Source]:
    """Return the passages of a retrieval in a text, if all stand there one after the other as Open WebUI shows them."""
    numbers: dict[str, int] = {}
    passages: list[tuple[str, str]] = []
    for source in given:
        about = source.get("source") or {}
        for document, metadata in zip(source.get("document") or (), source.get("metadata") or (), strict=False):
            name = str((metadata or {}).get("source") or about.get("id") or "N/A")
            numbers.setdefault(name, len(numbers) + 1)
            passages.append((name, document))
    begin = text.find('<source id="1"')
    while passages and begin >= 0:
        found = _run(text, begin, passages, numbers)
        if len(found) == len(passages):
            return found
        begin = text.find('<source id="1"', begin + 1)
    return []


def _run(text: str, at: int, passages: Sequence[tuple[str, str]], numbers: Mapping[str, int]) -> list[_Source]:
    found: list[_Source] = []
    for name, document in passages:
        head, tail = f'<source id="{numbers[name]}"', f">{document}</source>"
        close = text.find(tail, at + len(head)) if text.startswith(head, at) else -1
        attributes = text[at + len(head) : close]
        if close < 0 or "\n" in attributes or "<source" in attributes:  # such as the example in Open WebUI's template
            break
        found.append(_Source(numbers[name], name, at, at + len(head), close + len(tail)))
        at = found[-1].end + 1
    return found
