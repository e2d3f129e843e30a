"""All defects in one table: what repairs a log of each, and the hits of the repaired log."""

from __future__ import annotations

import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from importlib import resources
from itertools import chain

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_tools.doctor.cache import CacheOutcome, simulate
from warmprefix_tools.doctor.conversations import Continuation, leading
from warmprefix_tools.doctor.lists import ItemList
from warmprefix_tools.doctor.request_log import EMPTY, Ids, LogMessage, LogVersion, Memo, Prompt
from warmprefix_tools.doctor.survey import LogSurvey
from warmprefix_tools.doctor.text_checks import TEXT_KINDS
from warmprefix_tools.doctor.tool_repairs import keep_definitions, sort_keys, sort_tools, unite_tools
from warmprefix_tools.traces.trace import stand_in

__all__ = ["ADVICE", "SALT_SHARED", "VAGUEST_FIRST", "Kinds", "Repairs"]

Kinds = frozenset[str]

SALT_SHARED = "salt-shared"
"""The one defect that costs no tokens, so there is no repair of it."""

VAGUEST_FIRST = (
    *("variable-prefix", "user-text", "passage-order", "memory-reranked", "history-rewritten", "history-truncated"),
    *("tools-late", "tools-changed", "passage-scores", "position-number", "random-id", "timestamp"),
    *("attribution-header", "unicode", "whitespace", "json-key-order", "tool-order", "salt-split"),
)
"""Defects that a repair shows: where two repairs do the same, the vaguer one is left out."""

_ADVICE_FILE = resources.files("warmprefix_tools.doctor") / "advice.json"
ADVICE: dict[str, tuple[str, str]] = {
    kind: (texts["title"], texts["fix"]) for kind, texts in json.loads(_ADVICE_FILE.read_text("utf-8")).items()
}
"""Title and fix of each kind of defect."""

_MAX_NODES = 1 << 19

_Restored = tuple[LogMessage, ...]
"""One message of a request, behind those that it lost; empty if it was replaced."""


class Repairs:
    """Versions of the log with any set of defects repaired, and the hits of each."""

    def __init__(self, survey: LogSurvey, block_size: int) -> None:
        self._survey = survey
        self.outcomes = Memo[Kinds, CacheOutcome](lambda kinds: simulate(self.version(kinds), survey.pool, block_size))
        """Hits with these defects repaired."""
        self._last = (Kinds(), survey.log.as_sent())
        self._orders: defaultdict[Hashable, dict[Hashable, _Arrangement]] = defaultdict(dict)
        """Orders of lists that do not change from one version to the next."""
        self._repairs: tuple[tuple[Kinds, Callable[[LogVersion], None]], ...] = (
            (Kinds({"history-truncated", "history-rewritten"}), self._restore_histories),
            (Kinds({"tools-changed"}), partial(keep_definitions, survey)),
            (Kinds({"tools-late"}), partial(unite_tools, survey)),
            (Kinds({"tool-order"}), partial(_replace, Memo(partial(sort_tools, survey)))),
            (Kinds({"json-key-order"}), partial(_replace, Memo(partial(sort_keys, survey)))),
            (TEXT_KINDS, self._rewrite_texts),
            (Kinds({"memory-reranked"}), partial(self._order_lists, memories=True)),
            (Kinds({"passage-order"}), partial(self._order_lists, memories=False)),
            (Kinds({"user-text"}), partial(self._move_slots, personal=True)),
            (Kinds({"variable-prefix"}), partial(self._move_slots, personal=False)),
            (Kinds({"salt-split"}), self._unite_salts),
        )
        # In the order in which a log is repaired, in place: histories, then texts, then the order of their parts.

    def gain(self, kinds: Kinds) -> int:
        """Return the tokens that are saved without these defects."""
        return sum(self.outcomes[kinds].gains(self.outcomes[Kinds()]))

    def changes(self, kind: str) -> bool:
        """Return whether the repair of one defect changes the log at all."""
        if kind in TEXT_KINDS:
            messages = self._survey.uses
            return any(self._survey.rewritten(message, Kinds({kind})) is not message for message in messages)
        sent, repaired = self._survey.log.as_sent(), self.version(Kinds({kind}))
        return (sent.prompts, sent.salts) != (repaired.prompts, repaired.salts)

    def version(self, kinds: Kinds) -> LogVersion:
        """Return the log with these defects repaired; kept for the last set only, because a version is large."""
        if self._last[0] != kinds:
            version = self._survey.log.as_sent()
            version.kinds = kinds
            for repaired, repair in self._repairs:
                if repaired & kinds:
                    repair(version)
            self._last = (kinds, version)
        return self._last[1]

    def _rewrite_texts(self, version: LogVersion) -> None:
        kinds = version.kinds & TEXT_KINDS
        _replace(Memo(lambda message: self._survey.rewritten(message, kinds)), version)

    # -- histories and salts -------------------------------------------------------------------------------------------

    def _restore_histories(self, version: LogVersion) -> None:
        """Give each request the history as its conversation had it, without the changes that are to be repaired."""
        repaired = {kind.removeprefix("history-") for kind in version.kinds}
        histories: list[list[_Restored]] = []
        for index, (prompt, continuation) in enumerate(zip(version.prompts, self._survey.continuations, strict=True)):
            start = leading(prompt)
            own = prompt[start:]
            history: list[_Restored] = [(message,) for message in own]
            if continuation is not None:
                history = _restored(histories[continuation.earlier], own, continuation, repaired)
                version.prompts[index] = prompt[:start] + tuple(chain.from_iterable(history))
            histories.append(history)

    def _unite_salts(self, version: LogVersion) -> None:
        """Give each sender its first salt; a log without senders in which hardly any salt recurs gets one for all."""
        senders = [request.sender for request in self._survey.log.requests]
        if not any(senders):
            salts = Counter(salt for salt in version.salts if salt is not None)
            if len(salts) * 2 <= sum(salts.values()) or len(salts) < 2:
                return
        first: dict[Hashable, str] = {}
        for sender, salt in zip(senders, version.salts, strict=True):
            if salt is not None:
                first.setdefault(sender, salt)
        version.salts = [first.get(sender, salt) for sender, salt in zip(senders, version.salts, strict=True)]

    # -- lists ---------------------------------------------------------------------------------------------------------

    def _order_lists(self, version: LogVersion, *, memories: bool) -> None:
        """Order the lists of each request's head as warmprefix does, once per message and conversation.

        One planner orders all passages, request by request, and one the memories of each owner.
        """
        survey = self._survey
        # These repairs decide which requests have which lists, and which requests can share them.
        done = self._orders[memories, version.kinds & {"history-truncated", "history-rewritten", "salt-split"}]
        made: dict[tuple[_Arrangement, LogMessage], LogMessage] = {}
        planner = ContextPlanner(capacity_tokens=None, max_nodes=_MAX_NODES)

        def order(tenant: str | None, message: LogMessage, each: ItemList) -> list[int]:
            keys = survey.item_keys(each)
            scope = f"{survey.list_key(each)}"
            blocks = [
                ContextBlock(stand_in(key.hex()), tokens=survey.pool.count_tokens(message.ids[item.start : item.end]))
                for key, item in zip(keys, each.items, strict=True)
            ]
            plan = planner.plan(blocks, tenant=tenant, model=scope, preamble=scope)
            planner.commit(plan)
            return [place for one in plan.blocks for place in one.positions]

        for index, prompt in enumerate(version.prompts):
            changed = list(prompt)
            for at, message in _head(prompt):
                lists = survey.lists_of(message, memories=memories)
                if not lists:
                    continue
                root = survey.roots[index]
                key = (root, message.source)
                if key not in done:
                    tenant = survey.owners[index] or f"#{root}" if memories else version.salts[index]
                    done[key] = _Arrangement(message, [(each, order(tenant, message, each)) for each in lists])
                if (done[key], message) not in made:
                    made[done[key], message] = done[key].apply(survey, message)
                changed[at] = made[done[key], message]
            version.prompts[index] = tuple(changed)

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _move_slots(self, version: LogVersion, *, personal: bool) -> None:
        """Move the text in slots to the end of the prompt; personal text only to that of its message if this helps."""
        slots = self._survey.slots
        for index, prompt in enumerate(version.prompts):
            messages = list(prompt)
            moved: defaultdict[int, Ids] = defaultdict(lambda: array("I"))
            for at, run in slots.runs(prompt):
                if slots.is_personal(run.slot) == personal:
                    target = at if personal and run.near else len(prompt) - 1
                    ids = messages[at].ids[:]
                    moved[target] += ids[run.start : run.end]
                    ids[run.start : run.end] = array("I", [EMPTY] * (run.end - run.start))
                    messages[at] = messages[at].with_ids(ids)
            for at, ids in moved.items():
                messages[at] = messages[at].with_ids(messages[at].ids + ids)
            if moved:
                version.prompts[index] = tuple(messages)


def _replace(repaired: Memo[LogMessage, LogMessage], version: LogVersion) -> None:
    """Repair all messages of a version in place, each on its own."""
    version.prompts = [tuple([repaired[message] for message in prompt]) for prompt in version.prompts]


def _head(prompt: Prompt) -> Iterator[tuple[int, LogMessage]]:
    """Yield the messages whose order matters, with their indices: those up to the first answer."""
    first = leading(prompt)
    for at, message in enumerate(prompt):
        if at >= first and message.role in ("assistant", "tool", "function"):
            return
        yield at, message


class _Arrangement:
    """Order of a message's segments with its lists in another order."""

    def __init__(self, message: LogMessage, orders: list[tuple[ItemList, list[int]]]) -> None:
        self._order = array("I", range(len(message.ids)))
        """For each place, the index of the segment that goes there."""
        self._starts: list[tuple[int, int]] = []
        """Places where an item starts, and the index of the segment that started one before; its line feeds stay."""
        for each, places in orders:
            at = each.start
            for old, place in zip(each.items, places, strict=True):
                item = each.items[place]
                size = item.end - item.start
                self._order[at : at + size] = array("I", range(item.start, item.end))
                self._starts.append((at, old.start))
                at += size

    def apply(self, survey: LogSurvey, message: LogMessage) -> LogMessage:
        """Return a version of the same message in this order, whatever its wording."""
        ids = message.ids
        arranged = array("I", [ids[place] for place in self._order])
        for start, before in self._starts:
            arranged[start] = survey.with_space_of(ids[before], arranged[start])
        places = self._order if message.places is None else [message.places[place] for place in self._order]
        return message if arranged == ids else LogMessage(message.role, arranged, message.source, places)


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
