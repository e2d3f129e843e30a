"""Prompts as a real model reads them: its chat template, references in its tokens, primes, and its own answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import pytest
from openai import OpenAI

from vllm_server import BLOCK_SIZE, VllmServer
from warmprefix import ContextBlock, ContextPlanner
from warmprefix_kv_events import EngineTokenizer
from warmprefix_openai import EngineLink, messages_for

pytestmark = pytest.mark.vllm

OWN_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What the template says if the chat has no system prompt."""
FACTS = (
    "The lighthouse of Ostrava Bay was built in 1862. Its keeper, Anna Brook, painted the tower red and white.",
    "The market in Hill Street opens at six in the morning. Fish is sold on the northern side, bread on the other.",
    "The harbour master keeps a list of all boats. A boat that is not on it has to leave before the evening.",
    "Rain fell on eleven days in April. The river rose to four metres, and the old bridge was closed for a week.",
)
BLOCKS = [ContextBlock(f"{text} {text}", id=f"note-{number}") for number, text in enumerate(FACTS)]


@pytest.fixture
def client(server: VllmServer, link: EngineLink) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.base_url, api_key="none", http_client=link.http_client(timeout=300.0)) as client:
        yield client


@pytest.fixture
def read_by_model(server: VllmServer, client: OpenAI) -> Callable[[Sequence[int]], str]:
    """Return a function that turns tokens into the text that they stand for."""

    def text_of(tokens: Sequence[int]) -> str:
        body = {"model": server.model, "tokens": [*tokens]}
        answer = client.post(f"{server.url}/detokenize", body=body, cast_to=dict[str, str])
        return answer["prompt"]

    return text_of


@pytest.mark.parametrize("preamble", [None, "Be brief. Ünïcode, 1234."])
def test_the_models_own_template_wraps_the_prompt(
    preamble: str | None, server: VllmServer, planner: ContextPlanner, read_by_model: Callable[[Sequence[int]], str]
) -> None:
    messages = messages_for(planner.plan(BLOCKS, preamble=preamble), "Who painted the tower?", preamble=preamble)
    tokens = EngineTokenizer(server.base_url, server.model).of_request({"messages": messages})
    turns = "".join([f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages])
    own = "" if preamble else f"<|im_start|>system\n{OWN_SYSTEM}<|im_end|>\n"
    assert read_by_model(tokens) == f"{own}{turns}<|im_start|>assistant\n"


def test_a_reference_names_what_the_models_tokens_hold(
    server: VllmServer,
    planner: ContextPlanner,
    link: EngineLink,
    client: OpenAI,
    read_by_model: Callable[[Sequence[int]], str],
) -> None:
    history: list[Any] = [{"role": "system", "content": "Answer from the notes."}]
    prompts: list[list[int]] = []
    cached: list[int] = []
    for numbers, question in (((0, 1, 2), "Who painted the tower?"), ((1, 3, 0), "When does the market open?")):
        plan = planner.plan([BLOCKS[n] for n in numbers], conversation="chat", placement="tail", history=history)
        messages = messages_for(plan, question, history)
        with link.sending(plan):
            answer: Any = client.chat.completions.create(
                model=server.model,
                messages=messages,
                max_tokens=4,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
        prompts.append(answer.prompt_token_ids)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        history = [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]
    assert len(plan.references) == 2
    shown = read_by_model(prompts[1])
    for planned in plan.blocks:
        assert shown.count(planned.block.text) == 1, "a block is lost, or repeated"
        if planned.reference is not None:
            place = shown.index(planned.block.text)
            assert shown.index(f'"{planned.reference.opening}"') > place, "the reference stands in front of the text"
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*prompts, strict=False)))
    assert shared > len(prompts[0]) - BLOCK_SIZE, "the first turn is no prefix of the second"
    assert cached[1] == shared // BLOCK_SIZE * BLOCK_SIZE


def test_a_prime_is_found_by_the_chat_behind_it(server: VllmServer) -> None:
    profile = f"vllm-checkpoints({BLOCK_SIZE})"
    with (
        ContextPlanner(profile=profile) as planner,
        EngineLink(planner, primes=1) as link,
        OpenAI(base_url=server.base_url, api_key="none", http_client=link.http_client(timeout=60.0)) as client,
    ):
        cached = []
        for last in (3, 2):
            plan = planner.plan([*BLOCKS[:last], *BLOCKS[last + 1 :], BLOCKS[last]], preamble="Be brief.")
            messages: Any = messages_for(plan, "Who painted the tower?", preamble="Be brief.")
            with link.sending(plan):
                answer = client.chat.completions.create(model=server.model, messages=messages, max_tokens=1)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        primes = link.prime_stats()
    assert primes.sent >= 1
    assert (primes.failed, primes.inexact) == (0, 0)
    assert cached[0] >= BLOCK_SIZE, "the first chat did not find its prime"


def test_the_whole_model_answers_an_unchanged_prompt_alike() -> None:
    """Cold, from the cache, and behind other prompts that share its beginning."""
    with (
        VllmServer("smollm2", kv_blocks=256) as server,
        OpenAI(base_url=server.base_url, api_key="none", timeout=300.0) as client,
        ContextPlanner() as planner,
    ):

        def answer(blocks: Sequence[ContextBlock], question: str) -> tuple[str, int]:
            plan = planner.plan(blocks, preamble="Answer in one sentence.")
            planner.commit(plan)
            call: Any = client.chat.completions.create(
                model=server.model,
                messages=messages_for(plan, question, preamble="Answer in one sentence."),
                max_tokens=16,
                temperature=0,
            )
            return call.choices[0].message.content, call.usage.prompt_tokens_details.cached_tokens or 0

        questions = ["When was the lighthouse built?", "What is the capital of France?"]
        cold = [answer(BLOCKS[:2], question) for question in questions]
        answer([*BLOCKS[:2], BLOCKS[3]], questions[0])
        warm = [answer(BLOCKS[:2], question) for question in questions]
    assert [text for text, _ in cold] == [text for text, _ in warm]
    assert "Paris" in cold[1][0]
    assert cold[0][1] == 0
    assert all(cached >= 3 * BLOCK_SIZE for _, cached in warm)
