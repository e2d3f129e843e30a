"""Labels: stable, unambiguous, safe to print, bounded."""

from __future__ import annotations

import re

from hypothesis import assume, given
from hypothesis import strategies as st

from warmprefix import ContextBlock
from warmprefix.labels import LABEL_CHARACTERS, LabelRegistry, content_label, label_candidates

LABEL = re.compile(rf"[{LABEL_CHARACTERS}]{{1,64}}")

# Few texts and ids, so that they collide.
texts = st.sampled_from(["one", "two", "three", "four", ""])
ids = st.none() | st.sampled_from(["a", "b", "ctx-1", "x~y", "a b", "a]", "Doc_1\n", "", "z" * 40, "z" * 41])
blocks = st.builds(ContextBlock, texts, ids)


def candidates(text: str, id: str | None = None) -> list[str]:
    return list(label_candidates(ContextBlock(text, id)))


def test_a_short_safe_id_is_the_label() -> None:
    names = ("Doc_1", "7", "a/b.c:d-e_f", "https://example.org/x", "z" * 40)
    not_quite_digests = ("2026-11-21", "deadbeef", "0" * 19, "0" * 20 + "z")
    for safe in names + not_quite_digests:
        assert candidates("one", safe)[0] == safe


def test_any_other_id_is_not_used() -> None:
    unsafe = [
        "",
        " ",
        "a b",
        "a]",
        "[a",
        "a\n",
        "\na",
        "é",
        "١",
        "-a",
        ".a",
        "_a",
        "a~b",
        "ctx-a",
        "3f2504e0-4f89-11d3-9a0c-0305e82c3301",
        "3F2504E04F8911D39A0C0305E82C3301",
        "0" * 20,
        "z" * 41,
        "a\u200b",
        "\ud800",
    ]
    for id in unsafe:
        assert candidates("one", id) == candidates("one")


@given(st.text(), st.none() | st.text() | st.from_regex(r"\A[a-z0-9~-]{1,45}\Z"))
def test_every_candidate_is_a_label(text: str, id: str | None) -> None:
    assert all(LABEL.fullmatch(label) for label in candidates(text, id))


@given(blocks)
def test_the_last_candidate_holds_the_whole_fingerprint(block: ContextBlock) -> None:
    *_, last = label_candidates(block)
    assert last == content_label(block) == f"ctx-{block.fingerprint.hex()}"


@given(st.text(), st.none() | st.text(), st.text(), st.booleans())
def test_no_id_can_imitate_a_derived_label(text: str, id: str | None, other: str, safe: bool) -> None:
    assume(text != other)
    *_, shortest, short, whole = candidates(text, "Doc_1" if safe else id)
    for derived in {*candidates(text, "Doc_1" if safe else id)[1:], shortest, short, whole}:
        assert derived not in candidates(other, derived)


@given(st.lists(blocks, max_size=30))
def test_a_label_is_stable_and_names_one_text(requested: list[ContextBlock]) -> None:
    registry = LabelRegistry()
    names: dict[ContextBlock, str] = {}
    for block in requested:
        [label] = registry.labels([block])
        assert names.setdefault(block, label) == label
        same = [other for other in requested if other == block]
        assert label in {candidate for other in same for candidate in label_candidates(other)}
    assert len(set(names.values())) == len(names) == len(registry)
    assert registry.labels(requested) == [names[block] for block in requested]


def test_the_first_id_that_comes_with_a_text_names_it() -> None:
    registry = LabelRegistry()
    assert registry.labels([ContextBlock("one", "a"), ContextBlock("one", "b"), ContextBlock("one")]) == ["a"] * 3


def test_one_id_for_two_texts_names_the_first_of_them() -> None:
    registry = LabelRegistry()
    first, second = registry.labels([ContextBlock("one", "a"), ContextBlock("two", "a")])
    assert first == "a"
    assert second == f"a~{ContextBlock('two').fingerprint.hex()[:6]}"


def test_a_block_used_again_keeps_its_label_longer() -> None:
    registry = LabelRegistry(max_labels=2)
    for text in ("one", "two", "one", "three"):
        registry.labels([ContextBlock(text, id=text)])
    assert registry.labels([ContextBlock("another", id="two")]) == ["two"], "forgotten, so free"
    assert registry.labels([ContextBlock("yet another", id="three")]) != ["three"]


def test_an_interrupt_while_choosing_a_label_does_not_change_it() -> None:
    registry = LabelRegistry(max_labels=1)
    registry._owners["one"] = ContextBlock("one").fingerprint
    assert registry.labels([ContextBlock("one", id="one")]) == ["one"]
    assert registry.labels([ContextBlock("two", id="one")]) != ["one"]


def test_labels_do_not_depend_on_the_place_in_the_request() -> None:
    request = [ContextBlock(text, id) for text, id in (("one", "a"), ("two", "b"), ("three", None))]
    registry = LabelRegistry()
    assert registry.labels(request) == registry.labels(request[::-1])[::-1]


@given(st.lists(blocks, max_size=30), st.integers(1, 4))
def test_the_registry_is_bounded_and_forgets_the_least_recently_used_block(
    requested: list[ContextBlock], max_labels: int
) -> None:
    registry = LabelRegistry(max_labels)
    recent: dict[ContextBlock, str] = {}
    for block in requested:
        remembered = recent.pop(block, None)
        [label] = registry.labels([block])
        assert remembered in (None, label)
        recent[block] = label
        if len(recent) > max_labels:
            del recent[next(iter(recent))]
        assert len(registry) == len(recent)
        assert len(set(recent.values())) == len(recent)
