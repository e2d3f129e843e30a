"""Lists of tools whose beginning stays from request to request. Pure: no I/O.

Engines and APIs put the tools in front of all messages. So a list in another order, with other bytes, or with one tool
more or less takes the cache of all that stands behind the first difference. Two APIs can add a tool behind the history:
Anthropic's Messages (https://platform.claude.com/docs/en/build-with-claude/mid-conversation-system-messages), and
OpenAI's Responses, by the input item `additional_tools`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from warmprefix.forks import fork_safe_lock
from warmprefix_requests.prompts import RewriteRoute, canonical_messages, hides_text, items_name

__all__ = ["INLINE_TOOLS", "SentTools", "SteadyMode", "SteadyTools", "ToolOrders", "steady_tools"]

SteadyMode = Literal["order", "keep", "behind"]
"""`order` keeps the order and the bytes of first sight, `keep` declares tools that are gone as well, and `behind` has
what changes behind the history, where the API can."""

INLINE_TOOLS = "inline-tools-2026-09-15"
"""Value of the header `anthropic-beta` for tools that a message of the Messages API defines or withdraws."""

_MARK = "cache_control"
_MAX_TOOLS = 512
"""Tools of one conversation that are remembered, with those that are gone."""
_MAX_DECLARED = 128
"""Tools of a request with those that are gone: OpenAI's API takes no more."""
_MAX_CHANGES = 64
_LABELS = ("name", "server_label", "mcp_server_name")
_FREE_CHOICES = ("auto", "none", "any", "required")

_MAX_CONVERSATIONS = 1_000

_Tool = Mapping[str, Any]
_T = TypeVar("_T")


class _ToolChange(NamedTuple):
    """Tools that came or went behind a history."""

    messages: int
    """Number of messages in front."""
    digest: bytes
    """Of these messages."""
    added: tuple[_Tool, ...]
    """Definitions that the conversation did not have so far."""
    again: tuple[str, ...]
    """Names of tools that were withdrawn and are offered again."""
    removed: tuple[str, ...]


class SentTools(NamedTuple):
    """What the requests of one conversation have declared."""

    seen: tuple[_Tool, ...] = ()
    """Each tool in its latest form, in the order of first sight, without cache marks."""
    front: tuple[_Tool, ...] = ()
    """With `behind`: the tools in front of the messages."""
    changes: tuple[_ToolChange, ...] = ()


class SteadyTools(NamedTuple):
    """The tools to send with a request."""

    tools: Sequence[_Tool]
    """The value of the field `tools`; the given list itself if it stays as it is."""
    sent: SentTools
    """What the conversation has declared with this request."""
    front: Sequence[_Tool] | None = None
    """The value of that field if the `insertions` are sent; None if nothing stands behind the history."""
    insertions: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    """Messages that declare the other tools, and the number of the body's messages in front of each."""

    def placed(self, route: RewriteRoute, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a body with the changes behind the history, in place of all tools in front. O(messages).

        A mark at the end of the last message stands at the end of a change behind it: what is computed there is kept.
        """
        if self.front is None:
            return body
        name = items_name(route)
        messages = list(body[name])
        at, newest = self.insertions[-1]
        if at == len(messages) and route == "messages":
            messages[-1], newest = _with_mark_moved(messages[-1], newest)
        for number, message in (*self.insertions[:-1], (at, newest))[::-1]:
            messages.insert(number, message)
        return {**body, "tools": list(self.front), name: messages}


def steady_tools(
    route: RewriteRoute, body: Mapping[str, Any], sent: SentTools | None, mode: SteadyMode = "order"
) -> SteadyTools | None:
    """Return the tools to send with a request of a conversation, so that the prompt's beginning stays.

    A tool stays where it was declared first, also if it was gone in between; a new one goes to the end. If a definition
    differs from the one sent before by the order of its keys alone, that one's bytes are sent. A definition that
    changed otherwise is sent as it is. A cache mark on the last tool stays on the last tool. A list is left alone if
    two of its tools have the same name, if one has neither name nor type or a number that no float holds, or if it is
    empty: requests for titles and summaries have no tools, and get none. O(tools), with `behind` O(characters) once a
    tool came or went.

    >>> def body(*names):
    ...     return {"messages": [], "tools": [{"type": "function", "function": {"name": name}} for name in names]}
    >>> first = steady_tools("chat", body("read", "write"), None)
    >>> second = steady_tools("chat", body("mail", "read", "write"), first.sent)
    >>> [tool["function"]["name"] for tool in second.tools]
    ['read', 'write', 'mail']

    Args:
        route: The shape of the body.
        body: As the application made it, with all messages. It is not changed.
        sent: The last result's `sent` of this conversation; None for its first request.
        mode: With `keep`, the application has to answer calls of tools that are gone, as it does with any unknown tool.
            Tools that are gone are not declared where `tool_choice` demands a call, nor if the API itself may run
            them, nor beyond 128 tools in all, which OpenAI's API refuses.

    Returns:
        None if the list is left alone.
    """
    tools: Any = body.get("tools")
    now = _by_name(tools)
    if now is None:
        return None
    try:
        given = json.dumps(tools, allow_nan=False)
    except ValueError:  # written again, it would be no JSON
        return None
    before = {} if sent is None else {_name(tool): tool for tool in sent.seen}
    bare = {name: _steady(_unmarked(tool), before.get(name)) for name, tool in now.items()}
    seen = {**before, **bare}
    if len(seen) > _MAX_TOOLS:
        seen = dict(bare)
    keeps = mode == "keep" and len(seen) <= _MAX_DECLARED and _choice(body) in (None, "auto", "none")
    declared = [tool for name, tool in seen.items() if name in now or (keeps and _is_function(tool))]
    listed = _marked(declared, now)
    same = json.dumps(listed) == given
    new = SentTools(tuple(seen.values())) if sent is None else sent._replace(seen=tuple(seen.values()))
    steady = SteadyTools(tools if same else listed, new)
    return _behind(route, body, now, declared, steady) if mode == "behind" and route != "chat" else steady


def _by_name(tools: object) -> dict[str, _Tool] | None:
    """Return tools by their names; None if these name no single tool each."""
    if not isinstance(tools, list | tuple) or not tools:
        return None
    found = {_name(tool): tool for tool in tools}
    if len(found) < len(tools) or "" in found:
        return None
    return found


def _name(tool: object) -> str:
    """Return what the model calls a tool, or else its type; empty if it has neither."""
    if not isinstance(tool, Mapping):
        return ""
    kind = tool.get("type")
    for holder in (tool, tool.get("function"), tool.get("custom")):
        labels = [holder.get(label) for label in _LABELS] if isinstance(holder, Mapping) else []
        if name := next((label for label in labels if isinstance(label, str) and label), None):
            return name
    return kind if isinstance(kind, str) and kind not in ("function", "custom") else ""


def _is_function(tool: _Tool) -> bool:
    """Return True if the application answers calls of a tool: others, such as web search, the API itself may run."""
    return tool.get("type") in (None, "function", "custom")


def _unmarked(tool: _Tool) -> _Tool:
    return {key: value for key, value in tool.items() if key != _MARK} if _MARK in tool else tool


def _steady(tool: _Tool, before: _Tool | None) -> _Tool:
    """Return the earlier form of a tool if it differs by the order of keys alone."""
    is_same = before is not None and json.dumps(tool, sort_keys=True) == json.dumps(before, sort_keys=True)
    return before if is_same and before is not None else tool


def _marked(declared: Sequence[_Tool], now: Mapping[str, _Tool]) -> list[_Tool]:
    """Return tools with the marks that they have now; the one on the last tool stays on the last that can have it."""
    marks = {name: tool[_MARK] for name, tool in now.items() if _MARK in tool}
    last = marks.pop(list(now)[-1], None)
    can_have = [_name(tool) for tool in declared if not tool.get("defer_loading")]
    if last is not None and can_have:
        marks[can_have[-1]] = last
    return [{**tool, _MARK: marks[name]} if (name := _name(tool)) in marks else tool for tool in declared]


def _choice(body: Mapping[str, Any]) -> object:
    """Return what `tool_choice` asks for; None without one."""
    choice = body.get("tool_choice")
    return choice.get("type") if isinstance(choice, Mapping) else choice


class ToolOrders(Generic[_T]):
    """The tools of a framework's latest 1,000 conversations, in the order in which each had them first.

    Thread-safe. A copy has no conversations, since tools may not be copied.
    """

    def __init__(self) -> None:
        self._declared: OrderedDict[Hashable, tuple[SentTools, dict[str, _T]]] = OrderedDict()
        self._lock = fork_safe_lock()

    def __reduce__(self) -> tuple[type[ToolOrders[_T]], tuple[()]]:
        return type(self), ()

    def ordered(
        self, conversation: Hashable, tools: Sequence[_T], body: Mapping[str, Any], mode: SteadyMode
    ) -> Sequence[_T]:
        """Return the tools to declare in place of those that `body` defines, one by one; see `steady_tools`."""
        now = dict(zip(map(_name, body["tools"]), tools, strict=True))
        with self._lock:
            before, kept = self._declared.get(conversation, (None, {}))
            steady = steady_tools("chat", body, before, mode)
            if steady is None:
                return tools
            same = {} if before is None else {_name(schema): schema for schema in before.seen}
            seen = {_name(schema): schema for schema in steady.sent.seen}
            kept = {name: kept[name] if schema is same.get(name) else now[name] for name, schema in seen.items()}
            self._declared[conversation] = steady.sent, kept
            self._declared.move_to_end(conversation)
            if len(self._declared) > _MAX_CONVERSATIONS:
                self._declared.popitem(last=False)
        return [kept[_name(schema)] for schema in steady.tools]


# -- behind the history ------------------------------------------------------------------------------------------------


def _behind(
    route: RewriteRoute, body: Mapping[str, Any], now: Mapping[str, _Tool], flat: Sequence[_Tool], steady: SteadyTools
) -> SteadyTools:
    """Return tools of which those that came or went stand behind the history, if they can."""
    messages, sent = body.get(items_name(route)), steady.sent
    if not isinstance(messages, list | tuple) or hides_text(body):
        return steady  # the API keeps the history, and what was inserted into it
    anew = steady._replace(sent=sent._replace(front=tuple(flat), changes=()))
    digests = _digests(route, body, {change.messages for change in sent.changes} | {len(messages)})
    if not sent.front or any(not _stands(route, messages, change, digests) for change in sent.changes):
        return anew
    front = [tool for tool in sent.front if not tool.get("defer_loading") or _name(tool) in now]
    defined = {_name(tool): tool for tool in front}
    offered = set(defined)
    for change in sent.changes:
        defined.update((_name(tool), tool) for tool in change.added)
        offered = offered.difference(change.removed).union(map(_name, change.added), change.again)
    new = [tool for tool in flat if json.dumps(defined.get(_name(tool))) != json.dumps(tool)]
    again = tuple([name for name in map(_name, flat) if name in defined.keys() - offered - set(map(_name, new))])
    removed = tuple([name for name in defined if name in offered and name not in now])
    front += [tool for tool in new if tool.get("defer_loading")]  # these are no part of the prompt's beginning
    added = tuple([tool for tool in new if not tool.get("defer_loading")])
    changes = sent.changes
    if added or again or removed:
        is_replaced = any(_name(tool) in defined for tool in added)
        if (
            not _can_change(route, added, front, replaces=bool(again or removed) or is_replaced)
            or len(changes) >= _MAX_CHANGES
        ):
            return anew
        if not _can_follow(route, messages):
            return steady
        changes = (*changes, _ToolChange(len(messages), digests[len(messages)], added, again, removed))
    if changes and _choice(body) not in (None, *_FREE_CHOICES):
        return steady  # it may name a tool that is not in the list
    placed = steady._replace(sent=sent._replace(front=tuple(front), changes=changes))
    if not changes:
        return placed
    insertions = tuple([(change.messages, _message_of(route, change)) for change in changes])
    marked = {name: tool for name, tool in now.items() if _MARK in tool or name == list(now)[-1]}
    return placed._replace(front=_marked(front, marked), insertions=insertions)


def _with_mark_moved(
    message: Mapping[str, Any], change: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return both with the mark on the message's last part on the change's last part."""
    parts = message.get("content")
    last = parts[-1] if isinstance(parts, list) and parts else None
    if not isinstance(last, Mapping) or _MARK not in last:
        return message, change
    blocks = change["content"]
    marked = {**blocks[-1], _MARK: last[_MARK]}
    return {**message, "content": [*message["content"][:-1], _unmarked(last)]}, {
        **change,
        "content": [*blocks[:-1], marked],
    }


def _digests(route: RewriteRoute, body: Mapping[str, Any], numbers: set[int]) -> dict[int, bytes]:
    """Return digests of the first messages of a body, by their number."""
    chain, found = blake2b(digest_size=16), dict[int, bytes]()
    for number, message in enumerate(canonical_messages(route, body), 1):
        chain.update(f"{len(message.text)}:{message.text}".encode("utf-8", "surrogatepass"))
        if number in numbers:
            found[number] = chain.digest()
    return found


def _stands(route: RewriteRoute, messages: Sequence[Any], change: _ToolChange, digests: Mapping[int, bytes]) -> bool:
    """Return True if a change still has the messages in front of it that it had, and may stand there."""
    if digests.get(change.messages) != change.digest:
        return False
    follows = messages[change.messages : change.messages + 1]
    return route == "responses" or not follows or _role(follows[0]) in ("assistant", "system")


def _can_follow(route: RewriteRoute, messages: Sequence[Any]) -> bool:
    """Return True if a system message may stand at the end: behind an answer to continue, it may not."""
    return bool(messages) and (route == "responses" or _role(messages[-1]) in ("user", "system"))


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, Mapping) else None


def _can_change(route: RewriteRoute, added: Sequence[_Tool], front: Sequence[_Tool], *, replaces: bool) -> bool:
    """Return True if the API has a message for these changes, and its front does not depend on them."""
    kinds = {tool.get("type", "custom") for tool in added}
    if route == "responses":
        return not replaces and kinds <= {"function", "custom"}
    return kinds <= {"custom"} and any(not tool.get("defer_loading") for tool in front)


def _message_of(route: RewriteRoute, change: _ToolChange) -> Mapping[str, Any]:
    if route == "responses":
        return {"type": "additional_tools", "role": "developer", "tools": list(change.added)}
    return {"role": "system", "content": list(_blocks(change))}


def _blocks(change: _ToolChange) -> Iterator[Mapping[str, Any]]:
    for kind, names in (("tool_removal", change.removed), ("tool_addition", change.again)):
        for name in names:
            yield {"type": kind, "tool": {"type": "tool_reference", "name": name}}
    for tool in change.added:
        yield {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}}
