"""Passages and memories in changing order."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_tools.doctor.checks.base import DraftCheck, Spot, SpotPair
from warmprefix_tools.doctor.conversations import leading
from warmprefix_tools.doctor.layout import Item, ItemList
from warmprefix_tools.doctor.prompts import Draft, Message
from warmprefix_tools.doctor.segments import Ids

if TYPE_CHECKING:
    from warmprefix_tools.doctor.survey import Survey

__all__ = ["MEMORIES", "PASSAGES"]

_NODES = 1 << 19


def head_of(prompt: tuple[Message, ...]) -> int:
    """How many messages an order could matter in: those up to the first question."""
    count = leading(prompt)
    while count < len(prompt) and prompt[count].role not in ("assistant", "tool", "function"):
        count += 1
    return count


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """A message's lists in another order: for each place, the segment that goes there."""

    order: Sequence[int]
    starts: Sequence[int]
    """Where each item starts now."""
    before: Sequence[int]
    """What started at its place before, whose line feeds stay."""

    def apply(self, survey: Survey, ids: Ids) -> Ids:
        """Return the same message in this order, whatever its wording."""
        arranged = array("I", [ids[place] for place in self.order])
        segments = [arranged[start] for start in self.starts]
        for start, before, segment in zip(self.starts, self.before, segments, strict=True):
            spaced = survey.with_space_of(ids[before], segment)
            if spaced != segment:
                arranged[start] = spaced
        return arranged


def _arrangement(message: Message, orders: Iterable[tuple[ItemList, list[int]]]) -> Arrangement:
    order = array("I", range(len(message.ids)))
    starts: list[int] = []
    places_before: list[int] = []
    for each, places in orders:
        at = each.start
        for before, place in zip(each.items, places, strict=True):
            item = each.items[place]
            size = item.end - item.start
            order[at : at + size] = array("I", range(item.start, item.end))
            starts.append(at)
            places_before.append(before.start)
            at += size
    return Arrangement(order, array("I", starts), array("I", places_before))


Arrange = Callable[[int, Message, tuple[ItemList, ...]], Arrangement]


def _arranged(
    survey: Survey, draft: Draft, memories: bool, known: dict[Hashable, Arrangement], arrange: Arrange
) -> Draft:
    """Bring the lists of each request's head into the order that `arrange` gives, once a message and conversation."""
    made: dict[tuple[Arrangement, Message], Message] = {}
    for index, prompt in enumerate(draft.prompts):
        changed = list(prompt)
        for at in range(head_of(prompt)):
            message = prompt[at]
            lists = (survey.memories if memories else survey.passages)(message)
            if not lists:
                continue
            key = (survey.roots[index], message.source)
            arrangement = known.get(key)
            if arrangement is None:
                arrangement = known[key] = arrange(index, message, lists)
            new = made.get((arrangement, message))
            if new is None:
                new = made[arrangement, message] = message.made_into(arrangement.apply(survey, message.ids))
            changed[at] = new
        draft.prompts[index] = tuple(changed)
    return draft


def _sharing(draft: Draft) -> frozenset[str]:
    """The mends that decide which requests have which lists, and share them with whom."""
    return draft.kinds & {"history-truncated", "history-rewritten", "salt-split"}


def _order_passages(survey: Survey, draft: Draft) -> Draft:
    """As warmprefix would have: one planner, and each request in its turn."""
    planner = ContextPlanner(capacity_tokens=None, max_nodes=_NODES)

    def arrange(index: int, message: Message, lists: tuple[ItemList, ...]) -> Arrangement:
        orders = []
        for each in lists:
            keys = survey.item_keys(each, message)
            places: dict[bytes, list[int]] = {}
            for place, key in enumerate(keys):
                places.setdefault(key, []).append(place)
            scope = f"{survey.list_key(each, message)}"
            ids = message.ids
            blocks = [
                ContextBlock(key.decode("latin-1"), tokens=survey.pool.count_tokens(ids[item.start : item.end]))
                for key, item in zip(keys, each.items, strict=True)
            ]
            plan = planner.plan(blocks, tenant=draft.salts[index], model=scope, preamble=scope)
            planner.commit(plan)
            orders.append((each, [place for one in plan.blocks for place in places[one.block.text.encode("latin-1")]]))
        return _arrangement(message, orders)

    return _arranged(survey, draft, False, survey.arrangements.setdefault(("passages", _sharing(draft)), {}), arrange)


def _order_memories(survey: Survey, draft: Draft) -> Draft:
    """In the order in which each owner's first came up."""
    ranks: dict[Hashable, dict[bytes, int]] = {}

    def arrange(index: int, message: Message, lists: tuple[ItemList, ...]) -> Arrangement:
        orders = []
        for each in lists:
            keys = survey.item_keys(each, message)
            owner = survey.owners[index] or survey.roots[index]
            known = ranks.setdefault((owner, survey.list_key(each, message)), {})
            for key in keys:
                known.setdefault(key, len(known))
            orders.append((each, sorted(range(len(keys)), key=lambda place: known[keys[place]])))
        return _arrangement(message, orders)

    return _arranged(survey, draft, True, survey.arrangements.setdefault(("memories", _sharing(draft)), {}), arrange)


def _spot_of(memories: bool) -> Callable[[Survey, int, int], SpotPair | None]:
    def spot(survey: Survey, later: int, earlier: int) -> SpotPair | None:
        old = dict(_lists(survey, earlier, memories))
        for key, (at, message, each) in _lists(survey, later, memories):
            if key not in old:
                continue
            old_at, old_message, other = old[key]
            keys, old_keys = survey.item_keys(each, message), survey.item_keys(other, old_message)
            if not set(keys) & set(old_keys):
                continue
            for item, old_item, one, two in zip(each.items, other.items, keys, old_keys, strict=False):
                if one != two:
                    return _at(survey, at, message, item), _at(survey, old_at, old_message, old_item)
        return None

    return spot


def _lists(survey: Survey, request: int, memories: bool) -> Iterator[tuple[Hashable, tuple[int, Message, ItemList]]]:
    messages = survey.log.requests[request].messages
    for at, message in enumerate(messages[: head_of(messages)]):
        for each in (survey.memories if memories else survey.passages)(message):
            yield survey.list_key(each, message), (at, message, each)


def _at(survey: Survey, at: int, message: Message, item: Item) -> Spot:
    before, text = survey.pool.text(message.ids[: item.start]), survey.pool.text(message.ids[item.start : item.end])
    return Spot(at, len(before) + len(text) - len(text.lstrip()), len(text.strip()))


PASSAGES = DraftCheck(
    "passage-order",
    "The same passages come in another order, or behind others, from request to request",
    "Order them for the prefix cache: ContextPlanner.plan(blocks) puts what is cached first and tells the model the"
    " order of relevance.",
    _order_passages,
    _spot_of(False),
)

MEMORIES = DraftCheck(
    "memory-reranked",
    "The same memories come in another order at each turn",
    "Keep the order in which a user's memories first came up and append new ones; ContextPlanner keeps orders too, if"
    " the memories are its blocks.",
    _order_memories,
    _spot_of(True),
)
