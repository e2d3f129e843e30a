"""Open WebUI's filter, on messages with sources as `get_source_context` of Open WebUI 0.12 writes them."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

pytest.importorskip("pydantic")

from warmprefix import ContextPlanner
from warmprefix_plugins.citations import Citations, steady_numbers
from warmprefix_plugins.open_webui import SourceFilter

TASK = 'Cite with [id] **only when the <source> tag includes an id** (e.g., <source id="1">).\n\n<context>\n'
PASSAGES = [
    (f"page{i % 7}.md", f"Passage {i}: the sea is {i * 37 + 100} metres deep [note], or so.") for i in range(40)
]


def source_of(name: str, *texts: str) -> dict[str, Any]:
    about = {"id": "kb-1", "name": "docs", "type": "collection"}
    return {"source": about, "document": list(texts), "metadata": [{"source": name, "name": name}] * len(texts)}


def shown(sources: Sequence[Mapping[str, Any]]) -> str:
    numbers: dict[str, int] = {}
    text = ""
    for source in sources:
        for document, metadata in zip(source["document"], source["metadata"], strict=True):
            number = numbers.setdefault(metadata["source"], len(numbers) + 1)
            text += (
                f'<source id="{number}" name="docs" resource-type="collection" resource-id="kb-1">{document}</source>\n'
            )
    return text.strip()


def request(sources: Sequence[Mapping[str, Any]], question: str = "How deep?", **fields: Any) -> dict[str, Any]:
    text = f"{TASK}{shown(sources)}\n</context>\n{question}"
    return {"model": "m", "stream": True, "messages": [{"role": "user", "content": text}], **fields}


def about(sources: Sequence[Mapping[str, Any]], message: str = "a") -> dict[str, Any]:
    return {"chat_id": "c", "message_id": message, "sources": list(sources)}


def read(prompt: str) -> list[tuple[int, str]]:
    """Return the number and the text of each source, as a model reads them."""
    found = re.findall(
        r'<source id="(\d+)" name="docs" resource-type="collection" resource-id="kb-1">(.*?)</source>', prompt
    )
    return [(int(number), text) for number, text in found]


def pieces(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(0, 12))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def streamed(filters: SourceFilter, text: str, metadata: Mapping[str, Any], rng: random.Random) -> str:
    events: list[dict[str, Any]] = [
        {"choices": [{"delta": {"content": piece}, "finish_reason": None}]} for piece in pieces(text, rng)
    ]
    events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    shown = [filters.stream(event, __metadata__=metadata)["choices"][0]["delta"].get("content", "") for event in events]
    return "".join(shown)


def test_every_passage_stays_and_its_citation_finds_it_again() -> None:
    rng = random.Random(3)
    filters = SourceFilter()
    reordered = 0
    for number in range(400):
        drawn = rng.sample(PASSAGES, rng.randint(2, 9))
        sources = [source_of(name, text) for name, text in drawn]
        metadata = about(sources, str(number))
        body = filters.request(request(sources), __metadata__=metadata)
        prompt = body["messages"][0]["content"]
        seen = read(prompt)
        assert sorted(text for _, text in seen) == sorted(text for _, text in drawn)
        reordered += [text for _, text in seen] != [text for _, text in drawn]
        numbers = {name: place for place, name in enumerate(dict.fromkeys(name for name, _ in drawn), 1)}
        names = {text: name for name, text in drawn}
        cited, text = rng.choice(seen)
        answer = f"As [{cited}] says, a[4] is [note] of 2024 [2024][{cited}, {cited}]: [{cited}"
        expected = numbers[names[text]]
        assert streamed(filters, answer, metadata, rng) == (
            f"As [{expected}] says, a[4] is [note] of 2024 [2024][{expected}, {expected}]: [{cited}"
        )
    assert reordered > 100


@pytest.mark.parametrize("end", [{"delta": None}, {}, {"delta": {}}])
def test_no_text_is_lost_at_the_end_whatever_its_piece_looks_like(end: dict[str, Any]) -> None:
    filters, sources = SourceFilter(), [source_of(*PASSAGES[0]), source_of(*PASSAGES[1])]
    metadata = about(sources)
    filters.request(request(sources), __metadata__=metadata)
    event: dict[str, Any] = {"choices": [{"delta": {"content": "So it is [40"}, "finish_reason": None}]}
    assert filters.stream(event, __metadata__=metadata)["choices"][0]["delta"] == {"content": "So it is "}
    event = {"choices": [{**end, "finish_reason": "stop"}]}
    assert filters.stream(event, __metadata__=metadata)["choices"][0]["delta"] == {"content": "[40"}


@pytest.mark.parametrize("unfinished", [{"finish_reason": None}, {"finish_reason": ""}, {}])
def test_a_citation_is_read_across_pieces_whatever_an_engine_says_of_unfinished_ones(
    unfinished: dict[str, Any],
) -> None:
    filters, sources = SourceFilter(), [source_of(*PASSAGES[0]), source_of(*PASSAGES[1])]
    metadata = about(sources)
    prompt = filters.request(request(sources), __metadata__=metadata)["messages"][0]["content"]
    [number] = [number for number, text in read(prompt) if text == PASSAGES[1][1]]
    text = ""
    for piece in (f"[{number // 100}", f"{number % 100:02}", "]."):
        event = {"choices": [{"delta": {"content": piece}, **unfinished}]}
        text += filters.stream(event, __metadata__=metadata)["choices"][0]["delta"]["content"]
    assert text == "[2]."


@pytest.mark.parametrize("last", ["response.completed", "response.incomplete"])
def test_citations_of_the_responses_api_are_read_across_pieces_and_in_whole_texts(last: str) -> None:
    filters, sources = SourceFilter(), [source_of(*PASSAGES[0]), source_of(*PASSAGES[1])]
    metadata = about(sources)
    prompt = filters.request(request(sources), __metadata__=metadata)["messages"][0]["content"]
    [number] = [number for number, text in read(prompt) if text == PASSAGES[1][1]]
    answer = f"So [{number}], or [{number}"
    place = {"item_id": "m", "output_index": 0, "content_index": 0}
    item = {"id": "m", "type": "message", "content": [{"type": "output_text", "text": answer, "annotations": []}]}
    streamed = [{"type": "response.output_text.delta", **place, "delta": piece} for piece in answer]
    streamed.append({"type": "response.output_text.done", **place, "text": answer})
    streamed.append({"type": "response.output_item.done", "output_index": 0, "item": copy.deepcopy(item)})
    streamed.append({"type": last, "response": {"id": "r", "output": [item], "text": {"format": {"type": "text"}}}})
    *pieces, text, done, whole = [filters.stream(event, __metadata__=metadata) for event in streamed]
    shown = f"So [2], or [{number}"
    assert f"{''.join([piece['delta'] for piece in pieces])}[{number}" == text["text"] == shown
    assert done["item"]["content"][0]["text"] == whole["response"]["output"][0]["content"][0]["text"] == shown
    assert filters.planner.stats().commits == 1
    again = {"type": "response.output_text.delta", **place, "delta": "Yes"}  # the next answer behind a call of a tool
    assert filters.stream(again, __metadata__=metadata)["delta"] == "Yes"


def test_a_list_of_many_citations_is_read_across_pieces() -> None:
    citations = Citations({number: number - 3_999 for number in range(4_000, 4_030)})
    pieces = ["[", *[f"{number}, " for number in range(4_000, 4_029)], "4029", "]"]
    assert "".join(map(citations.shown, pieces)) == f"[{', '.join(map(str, range(1, 31)))}]"


def test_the_texts_of_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmprefix_plugins.open_webui._MOST_CHARACTERS", 3_000)
    filters, sources = SourceFilter(), [source_of("a.md", "a" * 400), source_of("b.md", "b" * 400)]
    for number in range(9):
        filters.request(request(sources), __metadata__=about(sources, str(number)))
    assert [key[1] for key in filters._answers] == ["8"]
    assert filters._characters == sum(answer.characters for answer in filters._answers.values()) < 3_000


def test_a_document_has_one_number_in_every_prompt() -> None:
    filters = SourceFilter()
    seen = set()
    for number, (first, second) in enumerate([(0, 1), (1, 0), (2, 1), (1, 3)]):
        sources = [source_of(*PASSAGES[first]), source_of(*PASSAGES[second])]
        body = filters.request(request(sources), __metadata__=about(sources, str(number)))
        seen |= {cited for cited, text in read(body["messages"][0]["content"]) if text == PASSAGES[1][1]}
    assert len(seen) == 1


def test_the_best_passage_is_named_where_it_is_not_the_first() -> None:
    filters = SourceFilter(ContextPlanner(policy="sorted"))
    for number in range(20):
        sources = [source_of(*passage) for passage in random.Random(number).sample(PASSAGES, 4)]
        prompt = filters.request(request(sources), __metadata__=about(sources, str(number)))["messages"][0]["content"]
        best = sources[0]["document"][0]
        note = re.search(r'\nMost relevant above: the passage with "(.+)"\.\n</context>', prompt)
        assert note is None if read(prompt)[0][1] == best else note is not None and note[1] in best


@pytest.mark.parametrize(
    "change",
    [
        {"stream": False},
        {"messages": [{"role": "user", "content": "How deep?"}]},
        {"messages": None},
        {"messages": [{"role": "user"}, {"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": ["text"]},
    ],
)
def test_other_requests_stay_as_they_are(change: dict[str, Any]) -> None:
    sources = [source_of(*PASSAGES[0]), source_of(*PASSAGES[1])]
    body = request(sources, **change)
    before = copy.deepcopy(body)
    assert SourceFilter().request(body, __metadata__=about(sources)) == before


@pytest.mark.parametrize(
    "metadata", [None, {}, {"message_id": "a"}, {"message_id": "a", "sources": [{}, {"document": 7}]}]
)
def test_without_the_sources_nothing_changes(metadata: Any) -> None:
    body = request([source_of(*PASSAGES[0]), source_of(*PASSAGES[1])])
    before = copy.deepcopy(body)
    filters = SourceFilter()
    assert filters.request(body, __metadata__=metadata) == before
    event = {"choices": [{"delta": {"content": "[4359]"}, "finish_reason": None}]}
    assert filters.stream(copy.deepcopy(event), __metadata__=metadata) == event


def test_later_turns_and_other_places_stay_as_they_are() -> None:
    """Behind the history of a chat, no other prompt begins like this one."""
    sources = [source_of(*PASSAGES[0]), source_of(*PASSAGES[1])]
    body = request(sources)
    body["messages"] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, *body["messages"]]
    before = copy.deepcopy(body)
    assert SourceFilter().request(body, __metadata__=about(sources)) == before


@pytest.mark.parametrize("has_picture", [False, True])
def test_after_a_tool_call_the_prompt_begins_as_before(has_picture: bool) -> None:
    sources = [source_of(*passage) for passage in PASSAGES[:5]]
    filters, metadata = SourceFilter(ContextPlanner(policy="sorted")), about(sources)
    first = filters.request(request(sources), __metadata__=metadata)["messages"]
    call: list[dict[str, Any]] = [{"role": "assistant", "tool_calls": []}, {"role": "tool", "content": "42"}]
    if has_picture:
        call.append({"role": "user", "content": [{"type": "text", "text": "Here are the images"}]})
    body = request(sources)
    body["messages"] += call
    assert filters.request(body, __metadata__=metadata)["messages"] == [*first, *call]


@pytest.mark.parametrize("text", ["</source>", '<source id="1" name="docs">', "</context>", "[query]", '">', ""])
def test_passages_that_look_like_tags_are_kept(text: str) -> None:
    """If the places of passages cannot be told with certainty, the prompt stays as it is."""
    sources = [source_of("a.md", f"one {text} two"), source_of("b.md", text), source_of("c.md", f"{text} three")]
    body = SourceFilter(ContextPlanner(policy="sorted")).request(request(sources), __metadata__=about(sources))
    prompt = body["messages"][0]["content"]
    for document in (f"one {text} two", f"{text} three"):
        assert prompt.count(f">{document}</source>") == 1


def test_users_are_told_apart_if_that_is_set() -> None:
    filters = SourceFilter()
    filters.valves = SourceFilter.Valves(separate_users=True)
    sources = [source_of(*passage) for passage in PASSAGES[:4]]
    for user in ("ann", "ben"):
        metadata = about(sources, user)
        filters.request(request(sources), __metadata__=metadata, __user__={"id": user})
        streamed(filters, "Yes.", metadata, random.Random(1))
    turned = sources[::-1]
    body = filters.request(request(turned), __metadata__=about(turned, "eve"), __user__={"id": "eve"})
    assert [text for _, text in read(body["messages"][0]["content"])] == [each["document"][0] for each in turned]


def test_numbers_do_not_stand_in_the_prompt() -> None:
    [number] = steady_numbers(["a.md"], "")
    assert steady_numbers(["a.md"], f"It is [{number}].") == [number + 1]
    assert len(set(steady_numbers([f"{i}.md" for i in range(2_000)], ""))) == 2_000


def test_a_prompt_with_all_numbers_stays_as_it_is() -> None:
    """A table that is sent as a whole may have them."""
    table = "\n".join(map(str, range(10_000)))
    sources = [source_of("a.md", table), source_of("b.md", "b")]
    body = request(sources)
    before = copy.deepcopy(body)
    assert SourceFilter().request(body, __metadata__=about(sources)) == before


@pytest.mark.parametrize("between", [",", ", ", ",  ", ",\n", "; "])
def test_citations_of_several_sources_are_read_as_open_webui_reads_them(between: str) -> None:
    citations = Citations({4000: 1, 4001: 2})
    text = f"[4000{between}4001]"
    assert "".join(map(citations.shown, text)) == "[1, 2]"


def test_an_answer_that_never_ends_is_bounded() -> None:
    citations = Citations({4000: 1})
    assert citations.shown("[" + "4000," * 10_000)
