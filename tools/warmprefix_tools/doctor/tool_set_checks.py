"""Defects of sets of tools: definitions that change, tools that come late or go, and tools that nothing calls."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

from warmprefix_tools.doctor.request_log import TOOLS, LogMessage, LogVersion, Memo, Prompt
from warmprefix_tools.doctor.survey import LogSurvey, Spot, SpotPair
from warmprefix_tools.doctor.tool_checks import tool_name, tools_of

__all__ = ["UnusedTools", "changed_spot", "has_changed", "has_late", "keep_definitions", "late_spot", "unite_tools"]

_LEAST_SIMILARITY = 0.6
"""Share of words that two definitions of one tool have in common; others belong to different applications."""
_LEAST_CALLS = 20
"""Calls in a log before a tool without any counts as unused."""
_LEAST_SHARE = 0.05
"""Of all prompt tokens: unused tools below this are not worth a hint."""
_MAX_NAMES = 12
_CALLED = re.compile(r'"name": "([^"\\]+)"')


def _tools(prompt: Prompt) -> LogMessage | None:
    return prompt[0] if prompt and prompt[0].role == TOOLS else None


class _Definitions:
    """The first definition of each tool, in a conversation and among similar ones of the log."""

    def __init__(self) -> None:
        self._first: dict[Hashable, str] = {}
        self._similar: defaultdict[str, list[str]] = defaultdict(list)
        self._words = Memo[str, frozenset[str]](lambda text: frozenset(re.findall(r"\w+", text)))

    def kept(self, root: int, name: str, text: str) -> str:
        """Return the definition that a conversation would have kept for a tool."""
        key = (root, name)
        if key not in self._first:
            alike = (each for each in self._similar[name] if self._are_similar(each, text))
            found = next(alike, None)
            if found is None:
                self._similar[name].append(text)
            self._first[key] = text if found is None else found
        return self._first[key]

    def _are_similar(self, one: str, other: str) -> bool:
        words, others = self._words[one], self._words[other]
        return len(words & others) >= _LEAST_SIMILARITY * max(len(words), len(others), 1)


def keep_definitions(survey: LogSurvey, version: LogVersion) -> None:
    """Give each tool the definition that it had first, in its conversation or in one with a similar definition."""
    definitions = _Definitions()
    for index, prompt in enumerate(version.prompts):
        message = _tools(prompt)
        if message is not None:
            tools = _parsed(survey)[message]
            texts, kept = list(map(json.dumps, tools)), []
            for tool, text in zip(tools, texts, strict=True):
                first = definitions.kept(survey.roots[index], tool_name(tool), text)
                kept.append(text if first == text else json.dumps(_with_keys_of(json.loads(first), tool)))
            if kept != texts:
                version.prompts[index] = (survey.log.tools(kept), *prompt[1:])


def _with_keys_of(value: Any, other: Any) -> Any:
    """Return a value whose keys stand in the order of another one: their order is a defect of its own."""
    if isinstance(value, dict) and isinstance(other, dict):
        names = [*(name for name in other if name in value), *(name for name in value if name not in other)]
        return {name: _with_keys_of(value[name], other.get(name)) for name in names}
    if isinstance(value, list) and isinstance(other, list):
        rest = [None] * len(value)
        return [_with_keys_of(one, two) for one, two in zip(value, [*other, *rest], strict=False)]
    return value


def unite_tools(survey: LogSurvey, version: LogVersion) -> None:
    """Give each request all tools that its conversation ever has, in the order in which they came up."""
    of_conversation: defaultdict[int, dict[str, str]] = defaultdict(dict)
    for root, prompt in zip(survey.roots, version.prompts, strict=True):
        message = _tools(prompt)
        for tool in _parsed(survey)[message] if message is not None else ():
            of_conversation[root].setdefault(tool_name(tool), json.dumps(tool))
    for index, (root, prompt) in enumerate(zip(survey.roots, version.prompts, strict=True)):
        if of_conversation[root] and index in _concerned(survey):
            message = _tools(prompt)
            own = (
                {tool_name(tool): json.dumps(tool) for tool in _parsed(survey)[message]} if message is not None else {}
            )
            union = [own.get(name, text) for name, text in of_conversation[root].items()]
            version.prompts[index] = (survey.log.tools(union), *(prompt if message is None else prompt[1:]))


def _parsed(survey: LogSurvey) -> Memo[LogMessage, list[Any]]:
    memo: Memo[LogMessage, list[Any]] = survey.memos.setdefault("tools", Memo(partial(tools_of, survey)))  # type: ignore[assignment]
    return memo


def _names(survey: LogSurvey, request: int) -> list[str]:
    message = survey.tools_message(request)
    return [] if message is None else [tool_name(tool) for tool in _parsed(survey)[message]]


def _concerned(survey: LogSurvey) -> frozenset[int]:
    """Return the requests of conversations whose set of tools changes."""
    memo = survey.memos.setdefault("tool sets", {})
    if None not in memo:
        sets: defaultdict[int, set[frozenset[str]]] = defaultdict(set)
        for request, root in enumerate(survey.roots):
            sets[root].add(frozenset(_names(survey, request)))
        memo[None] = frozenset(request for request, root in enumerate(survey.roots) if len(sets[root]) > 1)
    found: frozenset[int] = memo[None]
    return found


def has_late(survey: LogSurvey) -> bool:
    """Return whether the set of tools changes within any conversation."""
    return bool(_concerned(survey))


def has_changed(survey: LogSurvey) -> bool:
    """Return whether any tool has several definitions."""
    first: dict[str, Any] = {}
    return any(
        first.setdefault(tool_name(tool), tool) != tool
        for message in survey.uses
        if message.role == TOOLS
        for tool in _parsed(survey)[message]
    )


def late_spot(survey: LogSurvey, later: int, earlier: int) -> SpotPair | None:
    """Return the tools that only one of two requests of a conversation has."""
    if survey.roots[later] != survey.roots[earlier]:
        return None
    names, others = _names(survey, later), _names(survey, earlier)
    if set(names) == set(others):
        return None
    more, less = ([name for name in one if name not in two] for one, two in ((names, others), (others, names)))
    one, other = (
        Spot(path="tools", text=f"{len(all_)} tools" + (f", with {', '.join(only)}" if only else ""))
        for all_, only in ((names, more), (others, less))
    )
    return one, other


def changed_spot(survey: LogSurvey, later: int, earlier: int) -> SpotPair | None:
    """Return the first tool whose definition differs between two requests."""
    one, other = (survey.tools_message(request) for request in (later, earlier))
    if one is None or other is None:
        return None
    old = {tool_name(tool): json.dumps(tool) for tool in _parsed(survey)[other]}
    for at, tool in enumerate(_parsed(survey)[one]):
        text = json.dumps(tool)
        before = old.get(tool_name(tool), text)
        if before != text:
            start = next((i for i, (a, b) in enumerate(zip(text, before, strict=False)) if a != b), 0)
            path, start = f"tools[{at}] ({tool_name(tool)})", max(start - 60, 0)
            return Spot(path=path, text=text[start:]), Spot(path=path, text=before[start:])
    return None


class UnusedTools(NamedTuple):
    """Tools that requests declare and no answer in the log calls."""

    names: tuple[str, ...]
    declared: int
    """Number of all tools."""
    requests: int
    """Requests with any of them."""
    tokens: int
    """Tokens of their definitions, over all requests."""

    @classmethod
    def of(cls, survey: LogSurvey, prompt_tokens: int) -> UnusedTools | None:
        """Return the unused tools of a log; None if it shows too few calls, or their definitions are short."""
        called: set[str] = set()
        calls = 0
        for message in survey.uses:
            if message.role == "assistant" and "<tool_call>" in (text := survey.log.text(message)):
                called.update(_CALLED.findall(text))
                calls += text.count("<tool_call>")
        if calls < _LEAST_CALLS:
            return None
        tokens, requests, declared = Counter[str](), 0, set()
        for message, uses in survey.uses.items():
            if message.role == TOOLS:
                names = [tool_name(tool) for tool in _parsed(survey)[message]]
                declared.update(names)
                texts = [survey.pool.texts[segment] for segment in message.ids]
                unused = [
                    (name, segment)
                    for name, segment, text in zip(names, message.ids, texts, strict=True)
                    if name not in called and f'"name": {json.dumps(name)}' in text  # the API calls its own by type
                ]
                requests += uses if unused else 0
                for name, segment in unused:
                    tokens[name] += uses * survey.pool.token_counts[segment]
        total = sum(tokens.values())
        if not called & declared or total < _LEAST_SHARE * prompt_tokens:
            return None
        return cls(tuple(sorted(tokens, key=lambda name: (-tokens[name], name))), len(declared), requests, total)

    @property
    def detail(self) -> str:
        """Number, cost and names of the tools."""
        names = ", ".join(self.names[:_MAX_NAMES]) + (", ..." if len(self.names) > _MAX_NAMES else "")
        per_request = self.tokens // max(self.requests, 1)
        return f"{len(self.names)} of {self.declared} tools, {per_request:,} tokens per prompt: {names}."
