"""vLLM's own request log: text lines with the rendered prompt as Python writes a string."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

__all__ = ["LoggedPrompt", "parse_line"]

_LINE = re.compile(
    r"\b(?:Received request|Request) (?P<id>\S+?)(?: details)?: (?=prompt: |prompt_token_ids: |params: )"
)
_PROMPT = r"prompt: (?:None\b|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"))"
_FIRST = re.compile(_PROMPT, re.DOTALL)
_LAST = re.compile(rf", {_PROMPT}\.?\Z", re.DOTALL)
_TOKEN_IDS = re.compile(r"\bprompt_token_ids: \[(?P<ids>[\d, ]*)\]")


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """What one line says; with neither text nor ids if vLLM was told to log no prompts."""

    id: str
    text: str | None
    token_ids: tuple[int, ...] | None


def parse_line(line: str) -> LoggedPrompt | None:
    r"""Read a line of any vLLM since 0.4; None if it is about something else.

    >>> parse_line("INFO 02-14 05:41:15 logger.py:39] Received request cmpl-7: prompt: 'Hi\\n', params: None")
    LoggedPrompt(id='cmpl-7', text='Hi\n', token_ids=None)

    Raises:
        ValueError: The line is cut off within the prompt.
    """
    if "equest " not in line:
        return None
    found = _LINE.search(line)
    if found is None:
        return None
    # A prompt may hold anything, and so may the parameters: the names of the other fields too.
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
