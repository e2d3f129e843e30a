"""The output of a tool inside its result, without what an agent puts around it. Pure: no I/O."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

__all__ = ["LEAST_CHARACTERS", "REFERENCE", "BareOutput", "bare_output", "plain_paragraphs"]

LEAST_CHARACTERS = 256
"""A shorter text never becomes a reference."""

REFERENCE = re.compile(r"\[(?:W|Ran again; w)ord for word the (result|bare output) of the earlier call (.+)\.\]")
"""A reference to all of a result, or to the output inside it; then the name of the call."""

_HEAD = re.compile(
    r"(?:(?:Chunk ID|Wall time|Exit code|Original token count|Total output lines): [^\n]*\n"
    r"|Process (?:exited with code|running with session ID) [^\n]*\n){1,8}Output:\n"
)
"""What Codex puts in front: an id, a time, and more that differs from call to call."""

_JSON_STRING = re.compile(r'"(?:output|content|text|stdout|result)"\s*:\s*(?=")')
"""The way to the output in JSON: Hermes, earlier releases of Codex, parts of MCP."""

_MAX_AROUND_CHARACTERS = 256
"""Characters of JSON in front of an output, and behind it; with more, it is one of several."""

_LINE_NUMBER = re.compile(r"\n *(\d{1,9})[\t|→]")
"""What Claude Code, Hermes and `cat -n` put in front of each line."""

_MAX_NUMBER_CHARACTERS = 16

_NUMBERED_LINE = re.compile(r"^[ \t]*\d+[\t|→:]", re.MULTILINE)

_read = json.JSONDecoder().raw_decode
_write = json.JSONEncoder(ensure_ascii=False).encode


class BareOutput(NamedTuple):
    """The output in a result. What stands in front of it and behind it may differ from call to call."""

    head: str
    """What stands in front, down to the last white space."""
    text: str
    """The output, without white space at its ends."""
    tail: str
    """What stands behind it."""
    is_json: bool = False
    """True if the output is written as a JSON string."""

    def with_text(self, text: str) -> str:
        """Return the result with another output in this place."""
        return "".join([self.head, _json_characters(text) if self.is_json else text, self.tail])


def bare_output(result: str) -> BareOutput:
    r"""Return the output in a result. A result with a reference in its place has the same head and tail. O(characters).

    The output of a result with numbered lines has no numbers, and `with_text` cannot return these: references may name
    such a result, but take no place in it.

    >>> bare_output("Wall time: 0.0000 seconds\nOutput:\nThe sea is deep.\n")
    BareOutput(head='Wall time: 0.0000 seconds\nOutput:\n', text='The sea is deep.', tail='\n', is_json=False)
    """
    head = _HEAD.match(result)
    begin = head.end() if head is not None else 0
    if result[begin : begin + 1] in ("{", "["):
        found = _in_json(result, begin)
        if found is not None:
            return found
    plain = _without_numbers(result[begin:])
    if plain is not None:
        return BareOutput("", plain, "")
    text = result[begin:].rstrip()
    end = begin + len(text)
    text = text.lstrip()
    return BareOutput(result[: end - len(text)], text, result[end:])


def _in_json(result: str, begin: int) -> BareOutput | None:
    """Return the first long string of a JSON text that has it in one of the known places."""
    if result.startswith(("[W", "[R"), begin) and REFERENCE.fullmatch(result[begin:].rstrip()):
        return None
    for name in _JSON_STRING.finditer(result, begin, begin + _MAX_AROUND_CHARACTERS):
        try:
            value, end = _read(result, name.end())
        except ValueError:
            return None
        plain = _without_numbers(value)
        if plain is not None and len(plain) >= LEAST_CHARACTERS and len(result) - end < _MAX_AROUND_CHARACTERS:
            return BareOutput("", plain, "")
        text = value.rstrip()
        trailing = value[len(text) :]
        text = text.lstrip()
        reference = REFERENCE.fullmatch(text)
        if len(text) >= LEAST_CHARACTERS or (reference is not None and reference[1] != "result"):
            if len(result) - end >= _MAX_AROUND_CHARACTERS:
                return None
            leading = value[: len(value) - len(text) - len(trailing)]
            head = result[: name.end() + 1] + _json_characters(leading)
            return BareOutput(head, text, _json_characters(trailing) + result[end - 1 :], is_json=True)
    return None


def _without_numbers(text: str) -> str | None:
    """Return a text without the numbers of its lines; None if it has none, or a table's first column."""
    first = _LINE_NUMBER.match(f"\n{text[:_MAX_NUMBER_CHARACTERS].lstrip()}")
    if first is None:
        return None
    text = "\n" + text.strip("\n")
    lines = text.count("\n")
    last = _LINE_NUMBER.match(text, text.rindex("\n"))
    if last is None or int(last[1]) != int(first[1]) + lines - 1:
        return None
    plain, numbers = _LINE_NUMBER.subn("\n", text)
    plain = plain.strip()
    return None if numbers < lines or REFERENCE.fullmatch(plain) else plain


def plain_paragraphs(text: str) -> list[str]:
    """Return the long paragraphs between blank lines that have no numbered lines. O(characters)."""
    paragraphs = [paragraph.strip("\r\n") for paragraph in text.split("\n\n")]
    return [each for each in paragraphs if len(each) >= LEAST_CHARACTERS and _NUMBERED_LINE.search(each) is None]


def _json_characters(text: str) -> str:
    return _write(text)[1:-1] if text else ""
