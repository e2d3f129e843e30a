"""A whole session: the prompts, and the numbers against a recount in the engine's cache."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from warmprefix import Templates
from warmprefix.plan import Placement
from warmprefix.quotes import opening
from warmprefix_tools.demo import servers
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.demo.demo_report import demo_page
from warmprefix_tools.demo.session import DemoResult, ServedTurn
from warmprefix_tools.emulator import ChatMessage, PrefixCache, render_chat
from warmprefix_tools.emulator.answers import compose_answer

both_placements = pytest.mark.parametrize("placement", ["head", "tail"])
both_arms = pytest.mark.parametrize("arm", [0, 1], ids=["relevance", "warmprefix"])


@both_placements
@both_arms
def test_every_prompt_contains_all_evidence(result: DemoResult, placement: Placement, arm: int) -> None:
    """With placement `tail`, references of warmprefix quote the first words of blocks; no prompt has labels."""
    for turn, served in zip(result.text.turns, result.runs[placement][arm], strict=True):
        holder = served.messages[0 if placement == "head" else -1]["content"]
        shown = {name: is_reference for name, _, is_reference in served.shown}
        assert len(shown) == len(turn.blocks)
        for block in turn.blocks:
            assert block.id is not None
            if shown[block.id]:
                assert (placement, arm) == ("tail", 1)
                assert f'"{opening(block.text)}"' in holder
                assert any(block.text in message["content"] for message in served.messages[:-1])
            else:
                assert block.text in holder
            assert f"[{block.id}]" not in holder
        assert turn.question.text in served.messages[-1]["content"]
        if arm == 0:
            assert "\n\n".join([block.text for block in turn.blocks]) in holder


def test_reordered_prompts_end_with_words_of_the_most_relevant_passage(result: DemoResult) -> None:
    before, behind = Templates().quotes.split("{quotes}")
    noted = 0
    for served in result.runs["head"][1]:
        assert served.plan is not None
        note, relevant = served.plan.order_annotation, served.turn.blocks[0]
        assert (note is not None) == (served.shown[0][0] != relevant.id)
        if note is not None:
            noted += 1
            assert served.messages[0]["content"].endswith(f"\n\n{note}")
            quote = note.removeprefix(before).removesuffix(behind).strip('"')
            assert [block for block in served.turn.blocks if quote in block.text] == [relevant]
    assert noted


@both_placements
@both_arms
def test_reported_hits_equal_an_independent_recount(result: DemoResult, placement: Placement, arm: int) -> None:
    cache = PrefixCache(servers.EMULATOR.kv_blocks)
    for served in result.runs[placement][arm]:
        prompt = render_chat([ChatMessage(message["role"], message["content"]) for message in served.messages])
        answer = compose_answer(prompt, 48)
        assert answer.text == served.answer.text
        sequence = cache.allocate(prompt, room_for=len(answer.token_ids) - 1)
        assert sequence is not None
        assert (served.answer.prompt_tokens, served.answer.cached_tokens) == (len(prompt), sequence.cached_tokens)
        cache.store(sequence)
        for token in answer.token_ids[:-1]:  # the last one is never fed back
            cache.append(sequence, token)
        cache.free(sequence)


@both_placements
@both_arms
def test_history_is_sent_again_unchanged(result: DemoResult, placement: Placement, arm: int) -> None:
    latest: dict[int, ServedTurn] = {}
    for served in result.runs[placement][arm]:
        before = latest.get(served.turn.question.conversation)
        if before is None:
            assert len(served.messages) == 2
        else:
            assert served.messages[1:-2] == before.messages[1:]
            assert served.messages[-2] == {"role": "assistant", "content": before.answer.text}
        latest[served.turn.question.conversation] = served


# -- the report --------------------------------------------------------------------------------------------------------


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page))


def totals(served: Sequence[ServedTurn]) -> Mapping[str, int]:
    prompt, cached = (
        sum(getattr(each.answer, f"{kind}_tokens") or 0 for each in served) for kind in ("prompt", "cached")
    )
    return {"prompt": prompt, "prefilled": prompt - cached}


def test_page_has_the_totals_and_prompts_numbered_as_their_notes_count(result: DemoResult) -> None:
    page = demo_page(result, DemoOptions())
    assert page == demo_page(result, DemoOptions())
    text = text_of(page).replace("\n\n", "\n")
    for before, after in (map(totals, arms) for arms in result.runs.values()):
        assert after["prefilled"] < before["prefilled"]
        assert f"prompt tokens{before['prompt']:,}{after['prompt']:,}" in text
        assert f"tokens prefilled (net){before['prefilled']:,}{after['prefilled']:,}" in text
    assert page.count("Hit ratio over time, by number of requests") == 2
    lists = re.findall(r'<ol class="prompt">(.*?)</ol>', page, re.DOTALL)
    assert len(lists) == 6
    for each in lists:
        names = [text_of(item) for item in re.findall(r"<li[^>]*>(.*?)</li>", each)]
        looks = [look for look in re.findall(r'<li class="(\w+)"', each) if look != "reference"]
        assert [name.partition(". ")[0] for name in names if name[0] != "("] == [str(n) for n in range(1, 11)]
        assert looks == sorted(looks, key=["found", "partly", "new"].index), "the cached part is a prefix"
    assert "(history, " in text
    assert "then: " in text


def test_server_without_counts_of_cached_tokens_gets_times_only(result: DemoResult) -> None:
    def silent(served: ServedTurn) -> ServedTurn:
        usage = {**served.answer.completion["usage"], "prompt_tokens_details": None}
        completion = {**served.answer.completion, "usage": usage}
        return replace(served, answer=replace(served.answer, completion=completion))

    runs = {place: (list(map(silent, one)), list(map(silent, other))) for place, (one, other) in result.runs.items()}
    text = text_of(demo_page(result._replace(runs=runs), DemoOptions(endpoint="http://engine:8000/v1")))
    assert "does not report cached tokens" in text
    assert "TTFT p50" in text
    assert not any(name in text for name in ("hit ratio", "tokens prefilled (net)", "Hit ratio over time"))
