"""Defects of order: passages and memories in changing order, and changing text in front of shared text."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_tools.doctor.conversations import leading
from warmprefix_tools.doctor.lists import ItemList
from warmprefix_tools.doctor.request_log import EMPTY, Ids, LogMessage, LogVersion, Prompt, common_length
from warmprefix_tools.doctor.survey import LogSurvey, SpotPair, items_spot
from warmprefix_tools.traces.trace import stand_in

__all__ = ["has_lists", "has_slots", "list_spot", "move_slots", "order_memories", "order_passages", "slot_spot"]

_MAX_NODES = 1 << 19


def _head(prompt: Prompt) -> Iterator[tuple[int, LogMessage]]:
    """Yield the messages whose order matters, with their indices: those up to the first answer."""
    first = leading(prompt)
    for at, message in enumerate(prompt):
        if at >= first and message.role in ("assistant", "tool", "function"):
            return
        yield at, message


def has_lists(survey: LogSurvey, *, memories: bool) -> bool:
    """Return whether any message has a list of memories, or another one."""
    return any(survey.lists_of(message, memories=memories) for message in survey.uses)


@dataclass(frozen=True, slots=True, eq=False)
class _Arrangement:
    """Order of a message's segments with its lists in another order."""

    order: Sequence[int]
    """For each place, the index of the segment that goes there."""
    starts: Sequence[int]
    """Places where an item starts."""
    before: Sequence[int]
    """Index of the segment that started an item at the same place before; its line feeds stay."""

    def apply(self, survey: LogSurvey, ids: Ids) -> Ids:
        """Return segments of the same message in this order, whatever their wording."""
        arranged = array("I", [ids[place] for place in self.order])
        segments = [arranged[start] for start in self.starts]
        for start, before, segment in zip(self.starts, self.before, segments, strict=True):
            arranged[start] = survey.with_space_of(ids[before], segment)
        return arranged


def _arrangement(message: LogMessage, orders: Iterable[tuple[ItemList, list[int]]]) -> _Arrangement:
    order = array("I", range(len(message.ids)))
    starts: list[int] = []
    before: list[int] = []
    for each, places in orders:
        at = each.start
        for old, place in zip(each.items, places, strict=True):
            item = each.items[place]
            size = item.end - item.start
            order[at : at + size] = array("I", range(item.start, item.end))
            starts.append(at)
            before.append(old.start)
            at += size
    return _Arrangement(order, array("I", starts), array("I", before))


def _order_lists(
    survey: LogSurvey,
    version: LogVersion,
    *,
    memories: bool,
    order: Callable[[int, LogMessage, ItemList], list[int]],
) -> None:
    """Order the lists of each request's head by `order`, once per message and conversation.

    `order` gets a request, a message and a list in it, and returns the items' places.
    """
    # These repairs decide which requests have which lists, and which requests can share them.
    other_repairs = version.kinds & {"history-truncated", "history-rewritten", "salt-split"}
    done = survey.memos.setdefault((memories, other_repairs), {})
    made: dict[tuple[_Arrangement, LogMessage], LogMessage] = {}
    for index, prompt in enumerate(version.prompts):
        changed = list(prompt)
        for at, message in _head(prompt):
            lists = survey.lists_of(message, memories=memories)
            if not lists:
                continue
            key = (survey.roots[index], message.source)
            arrangement = done.get(key)
            if arrangement is None:
                arrangement = done[key] = _arrangement(message, [(each, order(index, message, each)) for each in lists])
            new = made.get((arrangement, message))
            if new is None:
                new = made[arrangement, message] = message.with_ids(arrangement.apply(survey, message.ids))
            changed[at] = new
        version.prompts[index] = tuple(changed)


def order_passages(survey: LogSurvey, version: LogVersion) -> None:
    """Order passages as warmprefix does: with one planner, request by request."""
    planner = ContextPlanner(capacity_tokens=None, max_nodes=_MAX_NODES)

    def order(index: int, message: LogMessage, each: ItemList) -> list[int]:
        keys = survey.item_keys(each)
        scope = f"{survey.list_key(each)}"
        blocks = [
            ContextBlock(stand_in(key.hex()), tokens=survey.pool.count_tokens(message.ids[item.start : item.end]))
            for key, item in zip(keys, each.items, strict=True)
        ]
        plan = planner.plan(blocks, tenant=version.salts[index], model=scope, preamble=scope)
        planner.commit(plan)
        return [place for one in plan.blocks for place in one.positions]

    _order_lists(survey, version, memories=False, order=order)


def order_memories(survey: LogSurvey, version: LogVersion) -> None:
    """Order memories as they first came up in each owner's requests."""
    ranks: dict[Hashable, dict[bytes, int]] = {}

    def order(index: int, _: LogMessage, each: ItemList) -> list[int]:
        keys = survey.item_keys(each)
        owner = survey.owners[index] or survey.roots[index]
        rank = ranks.setdefault((owner, survey.list_key(each)), {})
        for key in keys:
            rank.setdefault(key, len(rank))
        return sorted(range(len(keys)), key=lambda place: rank[keys[place]])

    _order_lists(survey, version, memories=True, order=order)


def list_spot(survey: LogSurvey, later: int, earlier: int, *, memories: bool) -> SpotPair | None:
    """Return the first items that differ in two lists with common items."""

    def lists(request: int) -> Iterator[tuple[Hashable, tuple[int, ItemList]]]:
        for at, message in _head(survey.log.requests[request].messages):
            for each in survey.lists_of(message, memories=memories):
                yield survey.list_key(each), (at, each)

    old = dict(lists(earlier))
    for key, (at, each) in lists(later):
        if key not in old:
            continue
        old_at, other = old[key]
        keys, old_keys = survey.item_keys(each), survey.item_keys(other)
        first = common_length(keys, old_keys)
        if first < min(len(keys), len(old_keys)) and not set(keys).isdisjoint(old_keys):
            item, old_item = each.items[first], other.items[first]
            return (
                items_spot(survey, at, each.source, item.start, item.end),
                items_spot(survey, old_at, other.source, old_item.start, old_item.end),
            )
    return None


def has_slots(survey: LogSurvey, *, personal: bool) -> bool:
    """Return whether a slot holds text of the user, or other text."""
    return personal in survey.slots.personal.values()


def move_slots(survey: LogSurvey, version: LogVersion, *, personal: bool) -> None:
    """Move the text in slots to the end of the prompt; personal text only to that of its message where this helps."""
    for index, prompt in enumerate(version.prompts):
        messages = list(prompt)
        moved: dict[int, list[Ids]] = {}
        for at, run in survey.slots.runs(prompt):
            if survey.slots.is_personal(run.slot) == personal:
                target = at if personal and run.near else len(prompt) - 1
                moved.setdefault(target, []).append(messages[at].ids[run.start : run.end])
                ids = messages[at].ids[:]
                ids[run.start : run.end] = array("I", [EMPTY] * (run.end - run.start))
                messages[at] = messages[at].with_ids(ids)
        for at, pieces in moved.items():
            message = messages[at]
            ids = message.ids[:]
            for piece in pieces:
                ids += piece
            messages[at] = LogMessage(message.role, ids, message.source)
        if moved:
            version.prompts[index] = tuple(messages)


def slot_spot(survey: LogSurvey, later: int, earlier: int, *, personal: bool) -> SpotPair | None:
    """Return the first slot with different text in two requests."""
    messages, old_messages = survey.log.requests[later].messages, survey.log.requests[earlier].messages
    old = {run.slot: (at, run) for at, run in survey.slots.runs(old_messages)}
    for at, run in sorted(survey.slots.runs(messages), key=lambda found: (found[0], found[1].start)):
        if survey.slots.is_personal(run.slot) == personal and run.slot in old:
            old_at, old_run = old[run.slot]
            texts = [
                survey.pool.text(message.ids[each.start : each.end]).strip()
                for message, each in ((messages[at], run), (old_messages[old_at], old_run))
            ]
            if texts[0] != texts[1]:
                return (
                    items_spot(survey, at, messages[at], run.start, run.end),
                    items_spot(survey, old_at, old_messages[old_at], old_run.start, old_run.end),
                )
    return None
