"""The properties of a tokenizer that a prefix cache needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from warmprefix_tools.emulator import encode, split

texts = st.text(st.characters(exclude_categories=())) | st.text("ab 1\n_.é中")  # the first has lone surrogates

PROSE = (
    "The engine keeps the keys and values of every token that it has processed. When a new request begins with "
    "the same tokens as an earlier one, those need not be computed again, and the first word of the answer comes "
    "sooner. Retrieved passages are rarely in the same order twice, however, so the saving is usually small."
)


@given(texts)
def test_pieces_join_to_the_text(text: str) -> None:
    assert "".join(split(text)) == text
    assert len(split(text)) == len(encode(text))


@given(texts, texts)
def test_prefix_of_a_text_has_a_prefix_of_its_tokens_except_the_last(text: str, more: str) -> None:
    prefix = encode(text)[:-1]
    assert encode(text + more)[: len(prefix)] == prefix


@given(texts, st.data())
def test_text_cut_between_tokens_has_the_tokens_before_the_cut(text: str, data: st.DataObject) -> None:
    pieces = split(text)
    count = data.draw(st.integers(0, len(pieces)))
    assert encode("".join(pieces[:count])) == encode(text)[:count]


def test_english_has_about_four_characters_per_token() -> None:
    assert 3.8 < len(PROSE) / len(encode(PROSE)) < 4.8


def test_ids_are_the_same_on_every_machine() -> None:
    assert encode("warm prefix\n中 \ud800") == [817094847, 1889714639, 852952723, 1439783563, 1676872728]
