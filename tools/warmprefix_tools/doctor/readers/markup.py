"""Rendered prompts back into messages, for the chat templates that are most in use."""

from __future__ import annotations

import re

__all__ = ["split_rendered"]

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


def split_rendered(prompt: str) -> list[tuple[str, str]] | None:
    r"""Role and text of each message; None if the markup is none of the known ones.

    >>> split_rendered("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    [('user', 'Hi')]
    """
    for markup in _MARKUPS:
        found = [(_ROLES.get(part["role"], part["role"]), part["text"]) for part in markup.finditer(prompt)]
        if found:
            opened = found[-1] == ("assistant", "")
            return found[:-1] if opened else found
    return None
