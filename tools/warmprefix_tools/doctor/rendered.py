"""Prompts that were logged as text: vLLM's own log lines, and the markup of chat templates."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

__all__ = ["LoggedPrompt", "parse_line", "split_rendered"]

_LINE = re.compile(
    r"\b(?:Received request|Request) (?P<id>\S+?)(?: details)?: (?=prompt: |prompt_token_ids: |params: )"
)
_PROMPT = r"prompt: (?:None\b|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"))"
_FIRST = re.compile(_PROMPT, re.DOTALL)
_LAST = re.compile(rf", {_PROMPT}\.?\Z", re.DOTALL)
_TOKEN_IDS = re.compile(r"\bprompt_token_ids: \[(?P<ids>[\d, ]*)\]")

_MARKUPS = (
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<text>.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL),
    re.compile(
        r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<text>.*?)(?:<\|eot_id\|>|<\|eom_id\|>|\Z)",
        re.DOTALL,
    ),
    re.compile(r"<start_of_turn>(?P<role>\w+)\n(?P<text>.*?)(?:<end_of_turn>\n?|\Z)", re.DOTALL),
    re.compile(
        r"<\|(?P<role>system|user|assistant)\|>\n?(?P<text>.*?)(?:<\|end\|>\n?|</s>\n?|(?=<\|\w+\|>)|\Z)", re.DOTALL
    ),
)
_ROLES = {"model": "assistant", "ipython": "tool"}


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """Contents of one log line; neither text nor token ids if vLLM logs no prompts."""

    id: str
    text: str | None
    token_ids: tuple[int, ...] | None


def parse_line(line: str) -> LoggedPrompt | None:
    r"""Read a line of any vLLM since 0.4; None if it is about something else.

    >>> parse_line("INFO 02-14 05:41:15 logger.py:39] Received request cmpl-7: prompt: 'Hi\\n', params: None")
    LoggedPrompt(id='cmpl-7', text='Hi\n', token_ids=None)

    Raises:
        ValueError: The line ends within the prompt.
    """
    if "equest " not in line:
        return None
    found = _LINE.search(line)
    if found is None:
        return None
    # Prompts and parameters can contain any text, also the names of the other fields.
    prompt = _FIRST.match(line, found.end()) or _LAST.search(line, found.end())
    text, behind = None, found.end()
    if prompt is not None:
        behind = prompt.end()
        if prompt["text"] is not None:
            text = ast.literal_eval(prompt["text"])
    elif line.startswith("prompt: ", found.end()):
        raise ValueError("the line ends within the prompt")
    ids = _TOKEN_IDS.search(line, behind)
    token_ids = tuple(map(int, ids["ids"].split(","))) if ids is not None and ids["ids"].strip() else None
    return LoggedPrompt(found["id"], text, token_ids)


def split_rendered(prompt: str) -> list[tuple[str, str]] | None:
    r"""Return role and text of each message of a rendered prompt; None if its markup is unknown.

    >>> split_rendered("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    [('user', 'Hi')]
    """
    for markup in _MARKUPS:
        found = [(_ROLES.get(part["role"], part["role"]), part["text"]) for part in markup.finditer(prompt)]
        if found:
            return found[:-1] if found[-1] == ("assistant", "") else found  # the template opens the answer
    return None
