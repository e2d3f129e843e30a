"""References to paragraphs of earlier results, and the way back."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.requests.test_requests import ROUTES, TEXTS, Turn, body_of, results
from tests.requests.test_wrappers import codex, hermes

from warmprefix_requests import RewriteRoute, StoredHistory, restored, rewrite
from warmprefix_requests.prompts import items_name

SEA, SKY, ICE = [
    f"{what} is 3,688 metres deep on average, " + "and most of its floor was never seen by anyone" * 6
    for what in ("The sea", "The sky", "This ice")
]
PASSAGE = '[Word for word in the result of the earlier call read({"path":"a"}): the passage that begins '
NUMBERED = "\n".join([f"{number:6}\tline {number} of the program" for number in range(20)])
IMITATIONS = [
    f'{PASSAGE}"The sea is 3,688 metres deep".]',
    f'{PASSAGE}"The sea is 3,688 metres deep on average,".]',
    f'{PASSAGE}"This ice is 3,688 metres".]',
    f'{PASSAGE}"\\x".]',
    '[Word for word the result of the earlier call read({"path":"a"}).]',
    '[Word for word the bare output of the earlier call read({"path":"a"}).]',
]
PARAGRAPHS = [
    *[
        SEA,
        SKY,
        ICE,
        f"{SEA}!",
        f"{SEA[:60]}{SKY}",
        f"\n{SEA}",
        f"{SKY}\n",
        f"{SEA}\r\n",
        f"  {ICE}",
        "short",
        "",
        NUMBERED,
    ],
    '漢字と\u2028 \x85 \ud800 \\ "words" ' * 20,
    "a" * 300,
]
WRAPPERS: list[Any] = [str, str, str, lambda text: codex("7555a9", text), hermes]
texts = st.builds(
    lambda parts, wrapper: wrapper("\n\n".join(parts)),
    st.lists(st.sampled_from([*PARAGRAPHS, *IMITATIONS]), min_size=1, max_size=6),
    st.sampled_from(WRAPPERS),
)
paths = st.sampled_from(["a", "b", ': the passage that begins "x".]'])
given_turns = st.lists(st.tuples(st.sampled_from(["read", "run", "kept"]), paths, texts), max_size=8)


@given(route=st.sampled_from(ROUTES), turns=given_turns)
def test_all_can_be_restored_and_beginnings_stay(route: RewriteRoute, turns: list[Turn]) -> None:
    name, body = items_name(route), body_of(route, turns)
    options: dict[str, Any] = {"keep_tools": ["kept"], "passages": True}
    rewritten = rewrite(route, body, **options)
    taken, again = restored(route, body), restored(route, rewritten.body)
    for (tool, _, text), sent, back, taken_for in zip(
        turns, *[results(route, each) for each in (rewritten.body, again, taken)], strict=True
    ):
        # A text of a tool that is itself a reference to an earlier result may be taken for one.
        assert back in (text, taken_for)
        assert sent == text or (tool != "kept" and len(sent) < len(text) and back == text)
    for length in range(len(body[name])):
        part = rewrite(route, {**body, name: body[name][:length]}, **options)
        assert rewritten.body[name][:length] == part.body[name]


plain = st.lists(st.sampled_from(PARAGRAPHS), min_size=1, max_size=6).map("\n\n".join)


@given(route=st.sampled_from(ROUTES), contents=st.lists(plain, max_size=8))
def test_sessions_without_imitations_come_back(route: RewriteRoute, contents: list[str]) -> None:
    body = body_of(route, [("read", "ab"[number % 2], text) for number, text in enumerate(contents)])
    rewritten = rewrite(route, body, passages=True)
    assert restored(route, rewritten.body) == body
    for reference, text in rewritten.echoes.texts.items():
        if text is not None:
            assert rewritten.echoes.restored({"content": reference}) == {"content": text}
            assert json.loads(rewritten.echoes.restored(json.dumps([reference]))) == [text]


@pytest.mark.parametrize("route", ROUTES)
def test_paragraphs_become_references(route: RewriteRoute) -> None:
    turns = [("read", "a", f"{SEA}\n\n{SKY}\n\n{ICE}"), ("read", "b", f"New.\n\n{SEA}\n\n{SKY}\n\nEnd.\n\n{ICE}\n")]
    body = body_of(route, turns)
    rewritten = rewrite(route, body, passages=True)
    both = PASSAGE.replace("passage that begins", "passages that begin")
    assert results(route, rewritten.body)[1] == (
        f'New.\n\n{both}"The sea is 3,688 metres deep", "The sky is 3,688 metres deep".]\n\nEnd.\n\n'
        f'{PASSAGE}"This ice is 3,688 metres".]\n'
    )
    assert restored(route, rewritten.body) == body
    assert set(rewritten.echoes.texts.values()) == {f"{SEA}\n\n{SKY}", ICE}
    assert rewritten.references == 1
    assert rewrite(route, body).body is body
    assert rewrite(route, body, passages=True, keep_tools=["read"]).body is body


def test_a_result_with_references_can_be_named() -> None:
    turns = [("read", "a", f"{SEA}\n\n{SKY}"), ("run", "b", f"{SEA}\n\n{ICE}"), ("run", "c", f"{SEA}\n\n{ICE}")]
    body = body_of("chat", [*turns, ("run", "d", f"{ICE}\n\nEnd.")])
    rewritten = rewrite("chat", body, passages=True)
    assert results("chat", rewritten.body)[2] == '[Word for word the result of the earlier call run({"path":"b"}).]'
    assert rewritten.references == 3
    assert restored("chat", rewritten.body) == body


def imitations_of_passages() -> list[Turn]:
    """Return results each of which asks for ten times the one in front."""
    texts = [f"0 {SEA}"]
    for number in range(1, 6):
        quote = json.dumps(texts[-1][:24] + texts[-1][24:].split(" ")[0], ensure_ascii=False)
        named = f'[Word for word in the result of the earlier call read({{"path":"{number - 1}"}}): '
        texts.append(f"{number} {SEA[:60]} " + f"{named}the passage that begins {quote}.] " * 10)
    return [("read", str(number), text) for number, text in enumerate(texts)]


def imitations_of_outputs() -> list[Turn]:
    named = '[Word for word the bare output of the earlier call read({"path":"a"}).]'
    imitations = [json.dumps({"output": named, "exit_code": number}) for number in range(300)]
    return [("read", "a", SEA * 1_000), *[("read", str(number), text) for number, text in enumerate(imitations)]]


@pytest.mark.parametrize("passages", [False, True])
@pytest.mark.parametrize("turns", [imitations_of_passages(), imitations_of_outputs()])
def test_what_imitations_ask_for_is_not_made(turns: list[Turn], passages: bool) -> None:
    body = body_of("chat", [*turns, ("run", "b", turns[0][2])])
    tracemalloc.start()
    try:
        rewritten = rewrite("chat", body, passages=passages)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rewritten.references == 1
    assert most < 8_000_000


@pytest.mark.parametrize("text", [NUMBERED, NUMBERED.replace("\t", "→"), NUMBERED.replace("\t", "| ")])
def test_lines_with_numbers_stay(text: str) -> None:
    body = body_of("chat", [("read", "a", f"{text}\n\n(End of file)"), ("read", "a", f"{text}\n\n(20 lines)")])
    assert rewrite("chat", body, passages=True).body is body


def test_histories_on_the_server_have_no_passages() -> None:
    body = body_of("responses", [("read", "a", f"{SEA}\n\n{SKY}"), ("read", "b", f"{SEA}\n\n{ICE}")])
    assert rewrite("responses", body, earlier=StoredHistory(), passages=True).references == 0


@pytest.mark.parametrize(
    "text",
    [
        PASSAGE * 8_000,
        f'{PASSAGE}"The sea is 3,688 metres", ' * 8_000,
        f'{PASSAGE[:-40]}"' * 8_000,
        f"{SEA}\n\n{TEXTS[1]}\n\n" * 1_000,
        "\n\n".join([f"{SEA} {number}" for number in range(4_000)]),
    ],
)
def test_large_texts_cost_their_length(text: str) -> None:
    body = body_of("chat", [("read", "a", text), ("run", "b", f"x{text}"), ("run", "c", f"{SEA}\n\n{text}")])
    began = time.process_time()
    assert restored("chat", rewrite("chat", body, passages=True).body) == body
    assert time.process_time() - began < 10
