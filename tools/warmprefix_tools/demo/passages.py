"""Docstrings to context blocks of the size that retrievers are fed with."""

from __future__ import annotations

import re
from collections.abc import Iterable

from warmprefix.blocks import ContextBlock

__all__ = ["FEWEST_TOKENS", "passages"]

FEWEST_TOKENS = 60
"""Less makes no block of its own."""

_MOST_TOKENS = 270  # before a short remainder and a heading are added
_BLANK_LINES = re.compile(r"\n\s*\n")
_LONGEST_NAME = 36  # leaves room for a part's number in a label


def passages(name: str, heading: str, docstring: str) -> tuple[ContextBlock, ...]:
    r"""One block, or several that end where paragraphs end; none if there is too little text.

    Each can be found and read by itself: the first begins with the heading, the others with the name. The ids are
    short enough to be labels.

    >>> words = "Sixty tokens are some forty words. " * 20
    >>> [block.id for block in passages("json.dumps", "json.dumps(obj)", f"{words}\n\n{words}")]
    ['json.dumps', 'json.dumps:2']
    """
    bodies = _bodies(docstring)
    if not bodies or _tokens(heading) + _tokens(bodies[0]) < FEWEST_TOKENS:
        return ()
    label = _short(name)
    first = ContextBlock(f"{heading}\n\n{bodies[0]}", label)
    rest = enumerate(bodies[1:], start=2)
    return (first, *(ContextBlock(f"{name} (continued)\n\n{body}", f"{label}:{i}") for i, body in rest))


def _bodies(docstring: str) -> list[str]:
    pieces: list[str] = []
    for paragraph in _BLANK_LINES.split(docstring.strip()):
        if _tokens(paragraph) <= _MOST_TOKENS:
            pieces.append(paragraph)
        else:
            pieces += _packed(paragraph.split("\n"), "\n")
    bodies = _packed(pieces, "\n\n")
    if len(bodies) > 1 and _tokens(bodies[-1]) < FEWEST_TOKENS:
        bodies[-2:] = ["\n\n".join(bodies[-2:])]
    return bodies


def _packed(pieces: Iterable[str], joint: str) -> list[str]:
    """Join neighbours for as long as they fit."""
    packed: list[str] = []
    for piece in pieces:
        if packed and _tokens(packed[-1]) + _tokens(piece) <= _MOST_TOKENS:
            packed[-1] += joint + piece
        elif piece:
            packed.append(piece)
    return packed


def _tokens(text: str) -> int:
    return ContextBlock(text).tokens


def _short(name: str) -> str:
    """As much of the name's end as fits, cut at a dot.

    >>> _short("asyncio.selector_events.BaseSelectorEventLoop.sock_sendall")
    'BaseSelectorEventLoop.sock_sendall'
    """
    while len(name) > _LONGEST_NAME and "." in name:
        name = name.partition(".")[2]
    return name
