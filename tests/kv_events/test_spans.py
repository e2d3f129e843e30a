"""The ends of paragraphs in the tokens of a prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix.plan import Scope
from warmprefix.residency import ServedPrompt
from warmprefix_kv_events.prompt_tree import pack_tokens
from warmprefix_kv_events.spans import SpanFinder

SCOPE = Scope(None, None, None)


class Words:
    """Tokenizes as byte-pair encoders do: words with the space before them, marks with the line breaks after them."""

    def __init__(self) -> None:
        self.complete: dict[str, int] = {}
        self.calls: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.calls.append(text)
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        parts = re.findall(r" ?\w+|[^\w\s]+\n*|\s+", text)
        return [self.complete.setdefault(part, len(self.complete)) for part in parts]


def served(words: Words, texts: Sequence[str], before: str = "You answer.\n", after: str = "\n\nWhy?") -> ServedPrompt:
    tokens = words.encode(before + "\n\n".join(texts) + after)
    return ServedPrompt(SCOPE, None, tuple(text.encode() for text in texts), tuple(texts), tokens)


def test_punctuation_may_merge_with_line_breaks() -> None:
    words = Words()
    texts = ("[a] The sky is blue.", "[b] The sea is deep!")
    prompt = served(words, texts)
    mapped = SpanFinder(words).map(prompt)
    assert mapped is not None
    firsts = [len(words.encode("You answer.\n")), len(words.encode("You answer.\n" + texts[0] + "\n\n"))]
    assert mapped.ends == (firsts[1], len(words.encode("You answer.\n" + "\n\n".join(texts) + "\n\n")))
    assert not callable(prompt.token_ids)
    assert mapped.tokens == pack_tokens(prompt.token_ids[: mapped.ends[-1]])
    on_demand = replace(prompt, token_ids=partial(list, prompt.token_ids))
    assert SpanFinder(words).map(on_demand) == mapped
    assert (mapped.scope, mapped.cache_salt, mapped.keys) == (prompt.scope, prompt.cache_salt, prompt.keys)


def test_a_paragraph_is_tokenized_once_while_there_is_room() -> None:
    words = Words()
    finder = SpanFinder(words, max_tokens=20)
    texts = ("[a] The sky is blue.", "[b] The sea is deep.")
    for _ in range(3):
        assert finder.map(served(words, texts)) is not None
    assert words.calls == list(texts)
    assert finder.map(served(words, ("[c] " + "so " * 12 + "on.",))) is not None
    assert finder.map(served(words, texts)) is not None
    assert words.calls == [texts[0], texts[1], "[c] " + "so " * 12 + "on.", *texts]


@pytest.mark.parametrize("texts", [("[a] The sky is blue.", "missing words here only"), (), ("", "x")])
def test_missing_paragraphs_are_not_found(texts: tuple[str, ...]) -> None:
    words = Words()
    prompt = served(words, ("[a] The sky is blue.",))
    assert SpanFinder(words).map(ServedPrompt(SCOPE, None, (b"k",) * len(texts), texts, prompt.token_ids)) is None


def test_paragraphs_are_found_only_in_order() -> None:
    words = Words()
    prompt = served(words, ("[a] The sky is blue.", "[b] The sea is deep."))
    turned = ServedPrompt(SCOPE, None, prompt.keys[::-1], prompt.paragraphs[::-1], prompt.token_ids)
    assert SpanFinder(words).map(turned) is None


def test_equal_paragraphs_are_found_one_after_the_other() -> None:
    words = Words()
    texts = ("[a] one two three four.", "[a] one two three four.")
    mapped = SpanFinder(words).map(served(words, texts))
    assert mapped is not None
    assert mapped.ends[0] < mapped.ends[1]


def test_a_match_must_be_aligned_to_tokens() -> None:
    """The bytes of the ids occur, but not at the start of a token."""
    tokens = [0x01000000, 0x02000000, 0x03000000, 0]
    finder = SpanFinder(lambda text: [1, 2, 3])
    assert finder.map(ServedPrompt(SCOPE, None, (b"k",), ("x",), [0, *tokens])) is None


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=12), min_size=1, max_size=5),
    st.lists(st.integers(4, 6), max_size=5),
)
def test_ends_are_in_order_and_inside_the_prompt(paragraphs: list[list[int]], before: list[int]) -> None:
    texts = tuple("".join(map(str, paragraph)) for paragraph in paragraphs)
    tokens = [*before, *(token for paragraph in paragraphs for token in [*paragraph, 9])]
    finder = SpanFinder(lambda text: [int(character) for character in text])
    mapped = finder.map(ServedPrompt(SCOPE, None, tuple(map(str.encode, texts)), texts, tokens))
    assert mapped is not None
    position = len(before)
    for paragraph, end in zip(paragraphs, mapped.ends, strict=True):
        position += len(paragraph) + 1
        assert end == position - 1


def test_bounds_are_checked() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        SpanFinder(Words(), max_tokens=0)
