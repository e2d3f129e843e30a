"""Text from outside cannot become markup, nor turn the text around it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix_tools.report.pages import environment
from warmprefix_tools.report.visible import visible

ANY_TEXT = st.text(st.characters(exclude_categories=[]))  # lone surrogates too
OUTSIDE = '{% from "report/charts.html" import outside %}<p title="{{ attribute }}">{{ outside(text) }}</p>'
PAGE = '{% extends "report/base.html" %}{% block body %}<p>{{ text }}</p>{% endblock %}'


@given(ANY_TEXT, ANY_TEXT)
def test_text_stays_text(outline: Callable[[str], Any], text: str, attribute: str) -> None:
    parsed = outline(environment().from_string(OUTSIDE).render(text=text, attribute=attribute))
    assert parsed.elements == [("p", {"title": visible(attribute)}), ("bdi", {})]
    assert "".join(parsed.texts) == visible(text)


@given(ANY_TEXT)
def test_visible_text_controls_nothing(text: str) -> None:
    seen = visible(text)
    seen.encode("utf-8")
    assert not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in seen)
    turning = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    assert not any(unicodedata.bidirectional(letter) in turning or letter in "\u200e\u200f\u061c" for letter in seen)


@pytest.mark.parametrize(
    "code", [*range(0x20), 0x7F, 0x85, 0x202E, 0x2066, 0x2069, 0x200F, 0x061C, 0xFEFF, 0xD800, 0xFFFE]
)
def test_each_control_character_gets_a_sign(code: int) -> None:
    assert visible(f"a{chr(code)}b") not in (f"a{chr(code)}b", "ab")
    assert chr(code) not in visible(chr(code))


@pytest.mark.parametrize("text", ["plain", "Füße 東京 שלום", "👩‍👩‍👧", "a\u00a0b", "می‌خواهم"])
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert visible(text) == text


def test_page_declares_its_encoding_first() -> None:
    page = environment().from_string(PAGE).render(title="ä", text="é")
    assert page.startswith('<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">')
    assert "<title>ä</title>" in page
    assert "<p>é</p>" in page


def test_template_with_a_missing_value_fails() -> None:
    with pytest.raises(Exception, match="'text' is undefined"):
        environment().from_string(PAGE).render(title="t")
