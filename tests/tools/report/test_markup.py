"""Text from outside can't become markup, nor turn the text around it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix_tools.report.document import document
from warmprefix_tools.report.markup import Markup, element, join, outside, visible

ANY_TEXT = st.text(st.characters(exclude_categories=[]))  # lone surrogates too


def test_an_element_and_its_attributes() -> None:
    assert element(
        "p", "a", None, element("b", "c"), class_="x y", aria_label="d", hidden=True, id=None, open=False
    ) == ('<p class="x y" aria-label="d" hidden>a<b>c</b></p>')
    assert element("rect", x=1, y=2.0, width=1 / 3) == '<rect x="1" y="2" width="0.33"></rect>'
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'
    assert join("<", Markup("<")) == "&lt;<"


@given(ANY_TEXT, ANY_TEXT)
def test_text_stays_text(outline: Callable[[str], Any], text: str, attribute: str) -> None:
    parsed = outline(element("p", outside(text), title=attribute))
    assert parsed.elements == [("p", {"title": visible(attribute)}), ("bdi", {})]
    assert "".join(parsed.texts) == visible(text)


@given(ANY_TEXT)
def test_what_is_visible_controls_nothing(text: str) -> None:
    seen = visible(text)
    seen.encode("utf-8")
    assert not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in seen)
    turning = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    assert not any(unicodedata.bidirectional(letter) in turning or letter in "\u200e\u200f\u061c" for letter in seen)


@pytest.mark.parametrize(
    "code", [*range(0x20), 0x7F, 0x85, 0x202E, 0x2066, 0x2069, 0x200F, 0x061C, 0xFEFF, 0xD800, 0xFFFE]
)
def test_each_character_that_controls_gets_a_sign(code: int) -> None:
    assert visible(f"a{chr(code)}b") not in (f"a{chr(code)}b", "ab")
    assert chr(code) not in visible(chr(code))


@pytest.mark.parametrize("text", ["plain", "Füße 東京 שלום", "👩‍👩‍👧", "a\u00a0b", "می‌خواهم"])
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert visible(text) == text


def test_a_page_that_is_not_ascii_says_what_it_is() -> None:
    assert document("ä", element("p", "é")).startswith(
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
    )
