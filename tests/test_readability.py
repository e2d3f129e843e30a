"""No sentence of README.md, a page of docs/ or an example's README has more than 30 words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]
MOST_WORDS = 30
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|vs|et al|Alg|Eq|No)\.")


def sentences_of(text: str) -> Iterator[str]:
    """Yield the sentences of a page: of its paragraphs, list items, headings and table cells."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(`+).+?\1", "code", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<[^>]+>", "", text)
    text = ABBREVIATION.sub("abbreviation", text)
    # Each heading, list item and table cell is a text of its own.
    text = re.sub(r"^ *(?:[-*] |\d+\. |#+ |> ?)", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^\|.*\|$", lambda row: row[0].replace("|", "\n\n"), text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?])[)\"*]*\s+", " ".join(paragraph.split())):
            if sentence:
                yield sentence


def words_in(sentence: str) -> int:
    return sum(any(character.isalnum() for character in word) for word in sentence.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_sentence_is_too_long(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [sentence for sentence in sentences_of(text) if words_in(sentence) > MOST_WORDS] == []


def test_a_long_sentence_is_found_wherever_it_stands() -> None:
    long = "word " * 31 + "end."
    for text in (long, f"Short. {long}", f"- item\n- {long}", f"| a | {long} |\n", f"# {long}", f"**{long}** More."):
        assert [words_in(sentence) > MOST_WORDS for sentence in sentences_of(text)].count(True) == 1
    assert len(list(sentences_of("See e.g. `a. b` here. Next (one). Last."))) == 3
