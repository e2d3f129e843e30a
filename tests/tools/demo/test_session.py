"""A whole session: the prompts, and the numbers against a recount in the engine's cache."""

from __future__ import annotations

import asyncio
import math

import pytest

from warmprefix import Templates
from warmprefix.plan import Placement
from warmprefix_tools.demo import DemoError
from warmprefix_tools.demo.arms import INSTRUCTIONS, relevance_arm
from warmprefix_tools.demo.client import ANSWER_TOKENS, ChatClient
from warmprefix_tools.demo.corpus import LibraryEntry
from warmprefix_tools.demo.demo_measures import summarize_arm
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.demo.session import DemoResult, ServedTurn, prepare_session, run_session, serve_turns
from warmprefix_tools.emulator import ChatMessage, EmulatorConfig, EmulatorServer, PrefixCache, render_chat
from warmprefix_tools.emulator.answers import compose_answer

PLACEMENTS: tuple[Placement, ...] = ("head", "tail")
ARMS = (0, 1)

INSTANT = EmulatorConfig(prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("arm", ARMS)
def test_every_prompt_contains_all_evidence(result: DemoResult, placement: Placement, arm: int) -> None:
    """With placement `tail`, warmprefix may label blocks, so that references can name them; no other prompt does."""
    templates = Templates()
    for turn, served in zip(result.turns, result.runs[placement][arm], strict=True):
        assert served.question is turn.question
        holder = served.messages[0 if placement == "head" else -1]["content"]
        shown = {block.label: block for block in served.context.blocks}
        assert len(shown) == len(turn.blocks)
        for block in turn.blocks:
            assert block.id is not None
            if shown[block.id].is_reference:
                assert block.id in templates.noted_labels(holder)
                labelled = f"[{block.id}] {block.text}"
                assert any(labelled in message["content"] for message in served.messages[:-1])
            else:
                is_labelled = f"[{block.id}] " in holder
                assert f"\n\n{f'[{block.id}] ' * is_labelled}{block.text}" in f"\n\n{holder}"
            assert f"[{block.id}]" not in holder or (placement, arm) == ("tail", 1)
        assert turn.question.text in served.messages[-1]["content"]


def test_prompts_without_warmprefix_are_the_retrieved_texts(result: DemoResult) -> None:
    for turn, served in zip(result.turns, result.runs["head"][0], strict=True):
        context = "\n\n".join([block.text for block in turn.blocks])
        assert served.messages[0]["content"] == f"{INSTRUCTIONS}\n\n{context}"
        assert (served.context.note_tokens, served.context.reordered) == (0, False)


def test_reordered_prompts_end_with_words_of_the_most_relevant_passage(result: DemoResult) -> None:
    before, behind = Templates().quotes.split("{quotes}")
    for turn, served in zip(result.turns, result.runs["head"][1], strict=True):
        shown = [block.label for block in served.context.blocks]
        note = served.context.order_annotation
        is_noted = shown[0] != str(turn.blocks[0].id)
        assert (note is not None) == is_noted
        if note is not None:
            assert served.messages[0]["content"].endswith(f"\n\n{note}")
            quote = note.removeprefix(before).removesuffix(behind).strip('"')
            assert [block for block in turn.blocks if quote in block.text] == [turn.blocks[0]]
        assert (served.context.note_tokens > 0) == is_noted
        assert served.context.reordered >= is_noted


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("arm", ARMS)
def test_reported_hits_equal_an_independent_recount(
    result: DemoResult, options: DemoOptions, placement: Placement, arm: int
) -> None:
    assert options.kv_blocks is not None
    cache = PrefixCache(options.kv_blocks)
    for served in result.runs[placement][arm]:
        prompt = render_chat([ChatMessage(message["role"], message["content"]) for message in served.messages])
        answer = compose_answer(prompt, ANSWER_TOKENS)
        assert answer.text == served.answer.text
        sequence = cache.allocate(prompt, room_for=len(answer.token_ids) - 1)
        assert sequence is not None
        assert (served.answer.prompt_tokens, served.answer.cached_tokens) == (len(prompt), sequence.cached_tokens)
        cache.store(sequence)
        for token in answer.token_ids[:-1]:  # the last one is never fed back
            cache.append(sequence, token)
        cache.free(sequence)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_warmprefix_leaves_less_to_prefill(result: DemoResult, placement: Placement) -> None:
    before, after = (summarize_arm(served).prefilled_tokens for served in result.runs[placement])
    assert before is not None
    assert after is not None
    assert after < before


def test_relevance_order_is_the_retrievers_without_references(result: DemoResult) -> None:
    for placement in PLACEMENTS:
        for turn, served in zip(result.turns, result.runs[placement][0], strict=True):
            assert [block.label for block in served.context.blocks] == [block.id for block in turn.blocks]
            assert not any(block.is_reference for block in served.context.blocks)
            assert served.context.order_annotation is None


def test_planner_reorders_at_the_head_and_refers_at_the_tail(result: DemoResult) -> None:
    head, tail = (summarize_arm(result.runs[placement][1]) for placement in PLACEMENTS)
    assert head.reordered > 0
    assert head.references == 0
    assert tail.references > 0
    assert tail.reference_tokens > 0


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("arm", ARMS)
def test_history_is_sent_again_unchanged(result: DemoResult, placement: Placement, arm: int) -> None:
    latest: dict[int, ServedTurn] = {}
    for served in result.runs[placement][arm]:
        before = latest.get(served.question.conversation)
        if before is None:
            assert len(served.messages) == 2
        else:
            assert served.messages[1:-2] == before.messages[1:]
            assert served.messages[-2] == {"role": "assistant", "content": before.answer.text}
        latest[served.question.conversation] = served


def test_arms_have_salts_of_their_own(result: DemoResult) -> None:
    salts = {served.context.cache_salt for arms in result.runs.values() for arm in arms for served in arm}
    assert len(salts) == 4
    assert None not in salts


def test_concurrent_requests_keep_the_order_of_each_conversation(result: DemoResult) -> None:
    async def run() -> list[ServedTurn]:
        with EmulatorServer(INSTANT) as server:
            client = ChatClient(server.base_url, INSTANT.model)
            try:
                return await serve_turns(result.turns, relevance_arm("salt"), "head", "Answer.", client, concurrency=8)
            finally:
                await client.close()

    served = asyncio.run(run())
    assert [each.question for each in served] == [turn.question for turn in result.turns]
    assert all(len(each.messages) == 2 * each.question.turn for each in served)


def test_runs_on_a_real_server_do_not_share_its_cache(
    entries: tuple[LibraryEntry, ...],
) -> None:
    with EmulatorServer(INSTANT) as server:
        options = DemoOptions(questions=6, endpoint=server.base_url)
        text = prepare_session(options, entries)
        runs = [asyncio.run(run_session(options, lambda name, steps: lambda: None, text)).runs for _ in range(2)]
    arms = [arm for run in runs for arms in run.values() for arm in arms]
    assert [arm[0].answer.cached_tokens for arm in arms] == [0] * 8
    assert sum(served.answer.cached_tokens or 0 for arm in arms for served in arm) > 0


@pytest.mark.parametrize("opening", [b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", b"220 ESMTP\r\n", b""])
async def test_answer_of_another_kind_of_server_is_a_one_line_error(opening: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(opening)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    client = ChatClient(url, "model")
    try:
        with pytest.raises(DemoError, match=url) as caught:
            await client.ask([{"role": "user", "content": "Hello."}], None)
        assert "\n" not in str(caught.value)
    finally:
        await client.close()
        server.close()
