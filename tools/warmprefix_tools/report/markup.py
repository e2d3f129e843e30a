"""HTML that is balanced and escaped by construction."""

from __future__ import annotations

import html

__all__ = ["Markup", "element", "join", "outside", "visible"]

_VOID = {"link", "meta", "wbr"}

_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CODED = (*range(0x80, 0xA0), *_BIDI, 0x2028, 0x2029, 0xFEFF, *range(0xFFF9, 0xFFFC), *range(0xD800, 0xE000))
_LAST_TWO = (plane + code for plane in range(0, 0x110000, 0x10000) for code in (0xFFFE, 0xFFFF))
_VISIBLE = {code: f"\u2039U+{code:04X}\u203a" for code in (*range(0x20), 0x7F, *_CODED, *_LAST_TWO)}
"""Code points in words, in quotes that every font has; it is not every font that has control pictures."""


class Markup(str):
    """Text that is HTML already. Any other text is escaped where it is put into an element."""

    __slots__ = ()


def element(name: str, /, *children: str | None, **attributes: str | float | bool | None) -> Markup:
    """An element. Of an attribute's name, underscores become hyphens, and one at the end is dropped.

    Attributes that are None or False are left out.

    >>> print(element("p", "1 < 2 ", element("b", "yes"), class_="sum", aria_hidden="true"))
    <p class="sum" aria-hidden="true">1 &lt; 2 <b>yes</b></p>
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: str | None) -> Markup:
    """Several as one; what is not markup is escaped."""
    return Markup("".join(_escaped(child) for child in children if child is not None))


def outside(text: str) -> Markup:
    """A name or text from outside, kept apart from the direction of the text around it."""
    return element("bdi", text)


def visible(text: str) -> str:
    r"""The text with a visible sign for each character that controls: a terminal, a parser or the direction of reading.

    >>> visible("cpu\x00 \u202egnp.exe")
    'cpu‹U+0000› ‹U+202E›gnp.exe'
    """
    return text.translate(_VISIBLE)


def _escaped(child: str) -> str:
    return child if isinstance(child, Markup) else html.escape(visible(child))


def _attribute(key: str, value: str | float | bool) -> str:
    name = key.removesuffix("_").replace("_", "-")
    if isinstance(value, bool):
        return f" {name}" if value else ""
    text = value if isinstance(value, str) else f"{round(value, 2):.15g}"
    return f' {name}="{html.escape(visible(text))}"'
