"""Excerpts show every character, even invisible ones."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix_tools.report.pages import environment

ANY_TEXT = st.text(st.characters(exclude_categories=[]), max_size=12)
ALIKE = st.text(st.sampled_from("e\u0301\u00e9 \u00a0\u200b\t\n\r·→∅‹›U+0A\u0430a\ufe0f\ufb01fi"), max_size=6)


def excerpt(text: str, mark: tuple[int, int] | None) -> str:
    template = '{% from "report/charts.html" import excerpt %}{{ excerpt(text, mark) }}'
    return environment().from_string(template).render(text=text, mark=mark)


def shown(text: str, mark: tuple[int, int] | None, outline: Callable[[str], Any]) -> str:
    return "".join(outline(excerpt(text, mark)).texts)


@pytest.mark.parametrize(
    ("text", "mark", "expected"),
    [
        ("plain text", None, "plain text"),
        ("at 09:14", (3, 8), "at 09:14"),
        ("one\ntwo\t\x00", None, "one↵\ntwo→‹U+0000›"),
        ("a  b", (1, 3), "a··b"),
        ("ab", (1, 1), "a∅b"),
        ("a\u00a0b\u200b", (1, 2), "a‹U+00A0›b‹U+200B›marked: U+00A0"),
        ("cafe\u0301", (3, 5), "cafe\u0301marked: U+0065 U+0301"),
        ("\u202eabc\ud800", None, "‹U+202E›abc‹U+D800›"),
    ],
)
def test_what_is_shown(text: str, mark: tuple[int, int] | None, expected: str, outline: Callable[[str], Any]) -> None:
    assert shown(text, mark, outline) == expected


@given(st.one_of(ALIKE, ANY_TEXT), st.one_of(ALIKE, ANY_TEXT))
def test_marked_parts_that_differ_look_different(outline: Callable[[str], Any], one: str, other: str) -> None:
    looks = [unicodedata.normalize("NFKC", shown(f"<{part}>", (1, 1 + len(part)), outline)) for part in (one, other)]
    assert (looks[0] == looks[1]) == (one == other)


@given(ANY_TEXT, ANY_TEXT, ANY_TEXT)
def test_just_the_slice_is_marked_and_nothing_is_lost(
    outline: Callable[[str], Any], before: str, part: str, after: str
) -> None:
    page = outline(excerpt(before + part + after, (len(before), len(before + part))))
    assert [name for name, _ in page.elements if name != "span"] == ["code", "mark"]
    text = "".join(page.texts)
    seen = [letter for letter in before + part + after if unicodedata.category(letter)[0] in "LNP"]
    assert [letter for letter in seen if letter in text] == seen
