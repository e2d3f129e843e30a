"""Sessions of a coding agent on real files, in the shape of each API, with cache marks that move."""

from __future__ import annotations

import copy
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal

from warmprefix_requests import RewriteRoute

MarkPattern = Literal["none", "newest", "last two", "every fourth", "sliding"]
_MAX_CHARACTERS = 12_000
_ACTS = {"read": 6, "range": 3, "numbered": 2, "cat": 2, "grep": 2, "edit": 3, "test": 2, "error": 1}
"""What an agent does, and how often."""

_MARKS = 4
"""Marks that an API takes per request."""


@cache
def files() -> dict[str, str]:
    """Return texts by their paths: modules of the standard library, and pages of this project."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-f]*.py"))
    pages = sorted(Path(__file__).parents[2].glob("docs/*.md"))
    return {str(path): path.read_text("utf-8")[:_MAX_CHARACTERS] for path in (*library, *pages)}


@dataclass
class Call:
    """A tool call and its result."""

    id: str
    name: str
    arguments: dict[str, Any]
    result: str
    failed: bool = False


@dataclass
class AgentSession:
    """What an agent does, turn by turn: it reads files, again and in parallel, edits them, and runs tests."""

    seed: int
    turns: list[tuple[str, list[Call]]] = field(default_factory=list)
    """For each turn the text of the assistant, and its calls."""

    def __post_init__(self) -> None:
        chance = Random(self.seed)
        names = chance.sample(sorted(files()), 5)
        self._texts = {name: files()[name] for name in names}
        self._tests = "\n".join([f"tests/test_{n}.py::test_{n} PASSED [{n:3} %]" for n in range(chance.randint(3, 60))])
        for turn in range(chance.randint(6, 18)):
            count = chance.choice([1, 1, 1, 2, 3])
            calls = [self._call(f"call_{self.seed}_{turn}_{at}", chance, names) for at in range(count)]
            self.turns.append((chance.choice(["", "Let me look.", f"Step {turn}: I check this."]), calls))

    def _call(self, id: str, chance: Random, names: list[str]) -> Call:
        name = chance.choice(names[: chance.randint(1, len(names))])
        lines = self._texts[name].splitlines()
        act = chance.choices(list(_ACTS), list(_ACTS.values()))[0]
        start = chance.choice([0, 0, 40])
        if act == "read":
            return Call(id, "read", {"path": name}, self._texts[name])
        if act == "range":
            return Call(id, "read", {"path": name, "offset": start, "limit": 60}, "\n".join(lines[start : start + 60]))
        if act == "numbered":
            numbered = "\n".join([f"{at:6}\t{line}" for at, line in enumerate(lines[:80], 1)])
            return Call(id, "view", {"path": name}, numbered)
        if act == "cat":
            return Call(id, "bash", {"command": f"cat {name}"}, self._texts[name])
        if act == "grep":
            found = [f"{name}:{at}:{line}" for at, line in enumerate(lines, 1) if "def " in line]
            return Call(id, "bash", {"command": f"grep -n 'def ' {name}"}, "\n".join(found) or "no match")
        if act == "test":
            return Call(id, "bash", {"command": "pytest -v"}, self._tests)
        if act == "error" or not lines:
            return Call(id, "read", {"path": f"{name}x"}, f"No such file: {name}x. " * 20, failed=True)
        old = lines[chance.randrange(len(lines))]
        self._texts[name] = self._texts[name].replace(old, f"{old}  # changed", 1)
        return Call(id, "edit", {"path": name, "old": old, "new": f"{old}  # changed"}, f"Changed {name}.")

    def requests(self, route: RewriteRoute, pattern: MarkPattern) -> Iterator[dict[str, Any]]:
        """Yield the bodies of all requests."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"Task {self.seed}: fix the bug."}]
        for text, calls in [("", []), *self.turns]:
            messages += _turn(route, text, calls)
            yield _marked(route, messages, pattern, len(messages))


def _turn(route: RewriteRoute, text: str, calls: list[Call]) -> list[dict[str, Any]]:
    if not calls:
        return []
    if route == "chat":
        made = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
            for c in calls
        ]
        results = [{"role": "tool", "tool_call_id": c.id, "content": c.result} for c in calls]
        return [{"role": "assistant", "content": text or None, "tool_calls": made}, *results]
    if route == "messages":
        uses = [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in calls]
        blocks: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": c.id, "content": c.result} for c in calls
        ]
        for block, call in zip(blocks, calls, strict=True):
            if call.failed:
                block["is_error"] = True
        return [
            {"role": "assistant", "content": [*([{"type": "text", "text": text}] if text else []), *uses]},
            {"role": "user", "content": blocks},
        ]
    items: list[dict[str, Any]] = [{"role": "assistant", "content": text}] if text else []
    items += [
        {"type": "function_call", "call_id": c.id, "name": c.name, "arguments": json.dumps(c.arguments)} for c in calls
    ]
    return items + [{"type": "function_call_output", "call_id": c.id, "output": c.result} for c in calls]


def _marked(route: RewriteRoute, messages: list[dict[str, Any]], pattern: MarkPattern, turn: int) -> dict[str, Any]:
    """Return a body with marks where a client sets them now; a string becomes a part where the API wants one."""
    body: dict[str, Any] = {"model": "m", "input" if route == "responses" else "messages": copy.deepcopy(messages)}
    sent = body["input" if route == "responses" else "messages"]
    inputs = [message for message in sent if message.get("role") in ("user", "tool") or "output" in message]
    chosen = {
        "none": [],
        "newest": inputs[-1:],
        "last two": inputs[-2:],
        "every fourth": inputs[3::4][-_MARKS:],
        "sliding": inputs[turn % 3 :: 3][-_MARKS:],
    }[pattern]
    for number, message in enumerate(chosen):
        if route == "responses":
            name = "output" if "output" in message else "content"
            part = {"type": "input_text", "text": message[name], "prompt_cache_breakpoint": {"mode": "explicit"}}
            message[name] = [part]
        elif isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}]
        elif number % 2:  # in the text of the last result
            last = message["content"][-1]
            last["content"] = [{"type": "text", "text": last["content"], "cache_control": {"type": "ephemeral"}}]
        else:
            message["content"][-1]["cache_control"] = {"type": "ephemeral"}
    return body
