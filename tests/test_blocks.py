"""Context blocks: identity, length, and rejected arguments."""

from __future__ import annotations

import hashlib
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import ContextBlock, fingerprint

# Hypothesis leaves lone surrogates out unless asked.
texts = st.text(st.characters(exclude_categories=()) | st.characters(categories=["Cs"]), max_size=20)


@given(texts)
def test_the_fingerprint_is_blake2b_of_the_text(text: str) -> None:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    assert fingerprint(text) == ContextBlock(text).fingerprint == digest


def test_a_copy_with_another_text_has_another_fingerprint() -> None:
    original = ContextBlock("evidence", id="e", tokens=7, score=0.5)
    assert replace(original, follows="7").follows == replace(ContextBlock("x", follows=7), id="y").follows == "7"
    pinned = replace(original, pinned="end")
    assert (pinned.text, pinned.id, pinned.tokens, pinned.score, pinned.pinned) == ("evidence", "e", 7, 0.5, "end")
    assert replace(original, text="other") == ContextBlock("other")


@given(texts, texts)
def test_blocks_are_equal_when_their_texts_are(a: str, b: str) -> None:
    assert (ContextBlock(a) == ContextBlock(b)) == (a == b)
    assert (fingerprint(a) == fingerprint(b)) == (a == b)


def test_the_fingerprint_of_a_text_never_changes() -> None:
    """Stores keep fingerprints for longer than a process lives."""
    assert fingerprint("").hex() == "cae66941d9efbd404e4d88758ea67670"
    assert fingerprint("\ud800").hex() == "b4fe3de0239399efbfffc79686f435f9"


def test_texts_that_only_look_the_same_are_different_blocks() -> None:
    assert ContextBlock("é") != ContextBlock("e\u0301")
    assert ContextBlock("\U00010000") != ContextBlock("\ud800\udc00")
    assert ContextBlock("a\n") != ContextBlock("a\r\n")


def test_only_the_text_decides_identity() -> None:
    block = ContextBlock("evidence", id="a", tokens=7, score=0.5, pinned="start", follows="z")
    assert block == ContextBlock("evidence")
    assert hash(block) == hash(ContextBlock("evidence"))
    assert ContextBlock("one", id="a") != ContextBlock("two", id="a")
    assert (block == "evidence") is False  # type: ignore[comparison-overlap]


@given(texts)
def test_tokens_are_a_quarter_of_the_bytes_rounded_up(text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    assert 4 * (ContextBlock(text).tokens - 1) < size <= 4 * ContextBlock(text).tokens or size == 0
    assert ContextBlock("").tokens == 0


def test_a_given_number_of_tokens_is_used() -> None:
    class Index:
        def __index__(self) -> int:
            return 12

    assert ContextBlock("evidence", tokens=0).tokens == 0
    tokens = ContextBlock("evidence", tokens=Index()).tokens
    assert tokens == 12
    assert type(tokens) is int


def test_an_int_id_becomes_its_digits() -> None:
    assert ContextBlock("evidence", id=7).id == "7"
    assert ContextBlock("evidence", id=-7).id == "-7"
    assert ContextBlock("evidence", id="").id == ""
    assert ContextBlock("evidence").id is None


def test_scores_may_be_nan_or_infinite() -> None:
    assert ContextBlock("evidence", score=float("nan")) == ContextBlock("evidence", score=float("inf"))


def test_blocks_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        ContextBlock("evidence").text = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"text": None}, TypeError, "text must be a str, got NoneType"),
        ({"text": b"x"}, TypeError, "text must be a str, got bytes"),
        ({"id": 1.5}, TypeError, "id must be a str, an int or None, got float"),
        ({"id": True}, TypeError, "id must be a str, an int or None, got bool"),
        ({"id": b"a"}, TypeError, "id must be a str, an int or None, got bytes"),
        ({"tokens": 1.5}, TypeError, "tokens must be an int or None, got float"),
        ({"tokens": "3"}, TypeError, "tokens must be an int or None, got str"),
        ({"tokens": True}, TypeError, "tokens must be an int or None, got bool"),
        ({"tokens": -1}, ValueError, "tokens must be 0 or more, got -1"),
        ({"pinned": "middle"}, ValueError, "pinned must be 'start', 'end' or None, got 'middle'"),
        ({"pinned": ["start"]}, ValueError, r"pinned must be 'start', 'end' or None, got \['start'\]"),
        ({"pinned": ""}, ValueError, "pinned must be 'start', 'end' or None, got ''"),
        ({"follows": 1.5}, TypeError, "follows must be a str, an int or None, got float"),
        ({"follows": True}, TypeError, "follows must be a str, an int or None, got bool"),
        ({"id": 7, "follows": "7"}, ValueError, "follows must name another block, got '7', which is this block"),
        (
            {"follows": ContextBlock("evidence")},
            ValueError,
            "follows must name another block, got b'.*', which is this block",
        ),
    ],
)
def test_errors_name_the_argument(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        ContextBlock(**{"text": "evidence", **arguments})
