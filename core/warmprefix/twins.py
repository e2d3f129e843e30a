"""Twins and superseded versions: passages that say the same, or what a newer one says otherwise."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from warmprefix.blocks import ContextBlock

__all__ = ["newest_candidates", "twin_groups", "twin_key"]

_LEAST_WORDS = 12
"""Words of the shortest body with twins. What a shorter one says may depend on its header."""
_MOST_HEADER = 240
"""Characters of the longest header."""
_FIELD = re.compile(r"\w[\w .-]{0,40}: ")
"""The beginning of a line `name: value`."""
_VERSION = re.compile(
    r"""
    # Behind a name, a bracket, or a part of a path: it is no price, and no part of another number.
    [vV\d] (?: (?<=^.) | (?<=[\w)]\ .) | (?<=[Vv]ersion:\ .) | (?<=[/=@_(\[-].) | (?<=[^\W\d_]{2}\d) )
    (?! \d?\.\d\d?\.\d{4} | \d{3}\.\d+\.\d )                                                # no date
    (?: (?<=v)\d+(?:\.\d+){0,2} | (?<=[V\d])\d*(?:\.\d+){1,2} )
    (?: [-.]?(?:a|alpha|b|beta|rc|dev|post|x)\.?\d* )?
    # In front of the end, a sign that separates, or a part of a documentation: it is in no sentence and no amount.
    (?= \s*$ | \s*[])/>»›|·•:—–-] | \s[^\W_]+[/.:]\w
      | ,\s[^\W\d_] | \s(?!Inch|Lit|Ohm|Volt|Watt|Zoll)[^\W\d_a-z][a-z]{2}
      | \s(?:api|changelog|docs|documentation|guide|manual|reference|release)\b )
    """,
    re.VERBOSE,
)
_NAMED_VERSION = re.compile(r"/(?:latest|stable|dev)/")
_DOCUMENTATION = re.compile(r"(?i)\b(?:api|changelog|docs|documentation|manual|release|version)\b")
"""Words that make a number such as 4.2 a version; elsewhere it may be a price, a measure, or that of a section."""
_BEFORE_PART = re.compile(r"(?i)(?:^|\b(?:section|chapter|article|clause|paragraph|rule|part|appendix|table|figure) )$")
"""What stands in front of the number of a section, such as 3.2.1."""
_QUOTES = str.maketrans(dict.fromkeys("'`´‘’‚‛“”„‟＂", '"'))
_END = 96
"""Characters that usually hold the last three words."""


def twin_key(text: str) -> str | None:
    r"""Return what twins have in common: all words of their bodies, and their headers but for the version.

    White space and the style of quotation marks make no difference, but for the depth of indented lines, as of code;
    any other word or sign does. (Of passages that share nine tenths of their runs of five words, a third differ in a
    number, a negation or a name.) The header is the first line, or the lines `name: value` in front of a blank one.
    None for a body too short. O(length).

    >>> body = "Returns the length of the text in characters, and not in bytes, as every caller of it expects."
    >>> twin_key(f"Docs 4.1 > len()\n{body}") == twin_key(f"Docs 4.2 > len()\n{body}")
    True
    """
    lines = text.strip().split("\n")
    header = 0
    while header + 1 < len(lines) and _FIELD.match(lines[header]):
        header += 1
    if not header or lines[header].strip():
        header = 1
    title, body = "\n".join(lines[:header]), lines[header:]
    if len(" ".join(body).split()) < _LEAST_WORDS or len(title) > _MOST_HEADER:
        return None
    return "\n".join([*map(_without_version, lines[:header]), "", _outline(body).translate(_QUOTES)])


def _without_version(line: str) -> str:
    line = _NAMED_VERSION.sub("/\0/", " ".join(line.split()))
    is_documentation = _DOCUMENTATION.search(line) is not None

    def mark(found: re.Match[str]) -> str:
        version = found[0]
        is_part_number = version.count(".") < 2 or _BEFORE_PART.search(line[: found.start()])
        is_plain = version.replace(".", "").isdigit() and is_part_number
        is_part = line[found.start() - 1 : found.start()] == line[found.end() : found.end() + 1] == "/"
        return version if is_plain and not is_part and not is_documentation else "\0"

    return _VERSION.sub(mark, line)


def _outline(lines: Sequence[str]) -> str:
    """Return the words of lines, with a line break and the depth where that changes: code may depend on it."""
    indents, depth, parts = list[int](), 1, list[str]()
    for line in lines:
        if words := line.split():
            indent = len(line.expandtabs()) - len(line.expandtabs().lstrip())
            indents = [*[outer for outer in indents if outer < indent], indent]
            if len(indents) != depth:
                depth = len(indents)
                parts.append(f"\n{depth}")
            parts += words
    return " ".join(parts)


def twin_groups(
    blocks: Sequence[ContextBlock], key: Callable[[ContextBlock], Hashable | None] | None = None
) -> list[list[int]]:
    """Return the indices of each block and its twins, ascending, in the order of the first ones.

    Args:
        blocks: The blocks of one request.
        key: Returns what twins have in common; None for a block without twins. By default `twin_key` of the text.
    """
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    keys = _default_keys(blocks) if key is None else map(key, blocks)
    for i, common in enumerate(keys):
        groups[(i, None) if common is None else (None, common)].append(i)
    return list(groups.values())


def _default_keys(blocks: Sequence[ContextBlock]) -> list[str | None]:
    """Return the key of each block that ends as another one does; reading whole texts takes long, and most do not."""
    ends = [_last_words(block.text) for block in blocks]
    times = Counter(ends)
    return [twin_key(block.text) if times[end] > 1 else None for block, end in zip(blocks, ends, strict=True)]


def _last_words(text: str) -> str:
    end = text[-_END:].split()
    return " ".join((end if len(end) > 3 else text.split())[-3:]).translate(_QUOTES)


def newest_candidates(
    listed: Sequence[ContextBlock],
    positions: Sequence[tuple[int, ...]],
    version: Callable[[Any], tuple[Hashable, Any] | None],
) -> tuple[list[tuple[int, int]], dict[int, tuple[int, ...]]]:
    """Return the place and index of each candidate that is not superseded, and for each of the others its newer ones.

    The newest candidates of a source have the places of all its candidates, in relevance order: the best of these is
    how relevant the source is. A text is superseded only in every source and version that has it. May raise what
    `version` and the comparison of versions do.

    Args:
        listed: The request.
        positions: The places of each candidate in it.
        version: Returns the source and the version of a block; None if it has none.
    """
    found = [[version(listed[i]) for i in places] for places in positions]
    newest: dict[Hashable, Any] = {}
    members: dict[Hashable, list[int]] = {}
    for i, versions in enumerate(found):
        for source, value in filter(None, versions):
            newest[source] = max(newest.get(source, value), value)
            members.setdefault(source, []).append(i)
    superseded = {
        i
        for i, versions in enumerate(found)
        # The greatest one stays even where a comparison makes no sense, as with NaN.
        if all(each is not None and newest[each[0]] is not each[1] and newest[each[0]] > each[1] for each in versions)
    }
    place = [*range(len(positions))]
    newer: dict[int, tuple[int, ...]] = {}
    for own in members.values() if superseded else ():
        old = superseded.intersection(own)
        new = [i for i in dict.fromkeys(own) if i not in old]
        for best, i in zip(sorted({place[i] for i in own}), sorted(new, key=place.__getitem__), strict=False):
            place[i] = best
        newer |= {i: (*newer.get(i, ()), *new) for i in old}
    return sorted([(place[i], i) for i in range(len(positions)) if i not in superseded]), newer
