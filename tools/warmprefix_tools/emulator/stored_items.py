"""What the Responses API stores: responses for 30 days, each behind the one that it continues, and conversations.

The rules are those of https://developers.openai.com/api/docs/guides/conversation-state and of the API reference, as of
November 2026. The API does not say what a chain holds when one of its earlier responses was deleted or is too old;
users report that the model no longer sees that response and those before it, so the history begins behind it here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar
from uuid import uuid4

__all__ = ["MAX_STORED", "STORAGE_SECONDS", "ItemStore", "StoredConversation", "StoredResponse", "page_of", "with_ids"]

STORAGE_SECONDS = 30 * 24 * 3600.0
"""Time for which a response is stored; conversations stay."""

MAX_STORED = 16_384
"""Stored responses, and as many conversations; beyond it the oldest are forgotten, as if they had never been."""

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""How the ids of these kinds of items begin."""

Item = dict[str, Any]

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class StoredResponse:
    """A response that has ended, with the items that it added to the history."""

    body: Item
    """The response as the API returned it."""
    stored_at: float
    before: StoredResponse | None = None
    """The response that it continues."""
    prepended: tuple[Item, ...] = ()
    """Items of its conversation when it began; empty without a conversation."""
    given: tuple[Item, ...] = ()
    """Items of its own input."""
    state: str = "stored"
    """Or "deleted", or "forgotten" if there was no room."""

    def clear(self, state: str) -> None:
        """Drop the items; what continues this response still finds that it is gone."""
        self.state, self.body, self.before = state, {}, None
        self.prepended = self.given = ()


@dataclass(eq=False, slots=True)
class StoredConversation:
    """A list of items that responses and clients append to, and from which clients delete."""

    created_at: int
    metadata: Any = None
    items: list[Item] = field(default_factory=list)
    id: str = field(default_factory=lambda: f"conv_{uuid4().hex}")

    @property
    def body(self) -> Item:
        """The conversation as the API returns it."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata or {},
        }


class _Bounded(Generic[T]):
    """Things by owner and id, of which the oldest go."""

    def __init__(self, forget: Callable[[T], object]) -> None:
        self._things: OrderedDict[tuple[Hashable, str], T] = OrderedDict()
        self._forget = forget

    def put(self, owner: Hashable, name: str, thing: T) -> None:
        self._things[owner, name] = thing
        if len(self._things) > MAX_STORED:
            self._forget(self._things.popitem(last=False)[1])

    def get(self, owner: Hashable, name: str) -> T | None:
        return self._things.get((owner, name))

    def pop(self, owner: Hashable, name: str) -> T | None:
        return self._things.pop((owner, name), None)


class ItemStore:
    """Responses and conversations, each visible to its owner alone. Methods raise a KeyError for unknown ids."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._responses: _Bounded[StoredResponse] = _Bounded(lambda response: response.clear("forgotten"))
        self._conversations: _Bounded[StoredConversation] = _Bounded(lambda conversation: conversation.items.clear())

    def response(self, owner: Hashable, name: str) -> StoredResponse:
        """Return a stored response."""
        response = self._responses.get(owner, name)
        if response is None or self._is_old(response):
            raise KeyError(name)
        return response

    def put(
        self,
        owner: Hashable,
        body: Item,
        given: Iterable[Item],
        before: StoredResponse | None,
        prepended: Iterable[Item],
    ) -> None:
        """Store a response that has ended."""
        stored = StoredResponse(body, self._clock(), before, tuple(prepended), tuple(given))
        self._responses.put(owner, body["id"], stored)

    def delete(self, owner: Hashable, name: str) -> None:
        """Delete a response: the model sees neither its items nor those before them any more."""
        self.response(owner, name).clear("deleted")
        self._responses.pop(owner, name)

    def history(self, response: StoredResponse) -> list[Item]:
        """Return the items that a continuation of this response gets, in order.

        Raises:
            KeyError: A response of the chain had to go for lack of room, so what the API would show is unknown.
        """
        chain, link = list[StoredResponse](), response
        while True:
            if link.state == "forgotten":
                raise KeyError
            if link.state == "deleted" or self._is_old(link):
                break
            chain.append(link)
            if link.before is None:
                break
            link = link.before
        return [item for link in reversed(chain) for item in (*link.prepended, *link.given, *link.body["output"])]

    def input_items(self, response: StoredResponse) -> list[Item]:
        """Return all items that a response was generated from."""
        items = self.history(response)
        return items[: len(items) - len(response.body["output"])]

    def begin_conversation(self, owner: Hashable, conversation: StoredConversation) -> None:
        """Store a new conversation."""
        self._conversations.put(owner, conversation.id, conversation)

    def conversation(self, owner: Hashable, name: str) -> StoredConversation:
        """Return a conversation."""
        conversation = self._conversations.get(owner, name)
        if conversation is None:
            raise KeyError(name)
        return conversation

    def end_conversation(self, owner: Hashable, name: str) -> None:
        """Delete a conversation."""
        if self._conversations.pop(owner, name) is None:
            raise KeyError(name)

    def _is_old(self, response: StoredResponse) -> bool:
        return self._clock() - response.stored_at >= STORAGE_SECONDS


def with_ids(items: Iterable[Item]) -> list[Item]:
    """Return items as they are stored: in full form, with an id each."""
    return [_completed(item) for item in items]


def _completed(item: Item) -> Item:
    kind = item.get("type", "message")
    prefix = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}.get(
        kind, "item"
    )
    stored = {"id": f"{prefix}_{uuid4().hex}", "status": "completed", **item, "type": kind}
    if kind == "message" and isinstance(item.get("content"), str):
        text_type = "output_text" if item.get("role") == "assistant" else "input_text"
        extra: Item = {"annotations": []} if text_type == "output_text" else {}
        stored["content"] = [{"type": text_type, "text": item["content"], **extra}]
    return stored


def page_of(items: Sequence[Item], limit: int, order: str, after: str | None) -> Item:
    """Return one page of a list.

    Raises:
        KeyError: No item has the id `after`.
    """
    ordered = items if order == "asc" else items[::-1]
    begin = 0
    if after is not None:
        begin = next((place + 1 for place, item in enumerate(ordered) if item.get("id") == after), 0)
        if not begin:
            raise KeyError(after)
    page = list(islice(ordered, begin, begin + limit))
    return {
        "object": "list",
        "data": page,
        "first_id": page[0].get("id") if page else None,
        "last_id": page[-1].get("id") if page else None,
        "has_more": begin + len(page) < len(ordered),
    }
