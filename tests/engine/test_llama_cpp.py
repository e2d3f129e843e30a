"""llama.cpp's own server with a real tokenizer and template: tokens, cache, references, streams and refusals.

Token counts come from the first layer of SmolLM2-135M-Instruct; answers come from all of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI, OpenAI

from engine_workload import EngineQuestion, read
from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix.residency import EngineReport
from warmprefix_gateway import GatewayOptions, GatewayServer
from warmprefix_openai import ChatAsker, EngineLink, chat_options, messages_for
from warmprefix_tools.caches import MarkedPrompt, SlotCache, serve
from warmprefix_tools.local import LocalModelError
from warmprefix_tools.local.llama_server import LocalModel

pytestmark = pytest.mark.slow

PREAMBLE = "Answer the question from the passages."
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM"
"""What the model's own template puts before a chat without a system prompt."""
ENDLESS = {"prompt": "Once", "ignore_eos": True, "n_predict": -1, "stream": True}
NO_SYSTEM = """{% for message in messages %}{% if message['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
"""A template like that of Gemma 2."""


@pytest.fixture(scope="module")
def questions() -> list[EngineQuestion]:
    return read("stdlib", 60, 5)


@pytest.fixture
def client(llama: LocalModel, link: EngineLink) -> Iterator[OpenAI]:
    with OpenAI(base_url=llama.base_url, api_key="none", max_retries=0, http_client=link.http_client()) as client:
        yield client


@pytest.fixture
def planner() -> Iterator[ContextPlanner]:
    with ContextPlanner() as planner:
        yield planner


def post(server: LocalModel, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()


def applied(server: LocalModel, messages: Sequence[Any]) -> str:
    """Return the prompt that the server makes of a chat."""
    prompt: str = post(server, "/apply-template", {"messages": messages})["prompt"]
    return prompt


def tokens_of(server: LocalModel, prompt: str) -> list[int]:
    body = {"content": prompt, "add_special": True, "parse_special": True}
    ids: list[int] = post(server, "/tokenize", body)["tokens"]
    return ids


def text_of(server: LocalModel, ids: Sequence[int]) -> str:
    text: str = post(server, "/detokenize", {"tokens": list(ids)})["content"]
    return text


def ask(server: LocalModel, messages: Sequence[Any], **options: Any) -> Any:
    body = {"model": server.model, "messages": messages, "max_tokens": 1, "temperature": 0, **options}
    return post(server, "/v1/chat/completions", body)


def usage_of(answer: Any) -> tuple[int, int]:
    """Return the tokens of the prompt, and those that were cached."""
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


# -- the prompt ------------------------------------------------------------------------------------------------------


def test_the_template_gets_the_prompt_as_planned(
    llama: LocalModel, planner: ContextPlanner, questions: list[EngineQuestion]
) -> None:
    for question in questions[:5]:
        with planner.planning(question.blocks, preamble=PREAMBLE) as plan:
            messages = messages_for(plan, question.question, preamble=PREAMBLE)
        prompt = applied(llama, messages)
        assert prompt == (
            f"<|im_start|>system\n{PREAMBLE}<|im_end|>\n<|im_start|>user\n{plan.render()}\n\n{question.question}"
            "<|im_end|>\n<|im_start|>assistant\n"
        )
        ids = tokens_of(llama, prompt)
        assert text_of(llama, ids) == prompt
        assert usage_of(ask(llama, messages))[0] == len(ids)


def test_without_a_system_prompt_the_template_adds_its_own(llama: LocalModel, questions: list[EngineQuestion]) -> None:
    """It is the same for all chats, so they share it as any preamble."""
    plan = ContextPlanner().plan(questions[0].blocks)
    prompt = applied(llama, messages_for(plan, "Why?"))
    assert prompt.startswith(f"<|im_start|>system\n{DEFAULT_SYSTEM}")
    ask(llama, messages_for(plan, "Why?"))
    _, cached = usage_of(ask(llama, [{"role": "user", "content": "Hi."}]))
    assert DEFAULT_SYSTEM in text_of(
        llama, tokens_of(llama, applied(llama, [{"role": "user", "content": "Hi."}]))[:cached]
    )


def test_a_template_without_a_system_role_keeps_preamble_and_context(
    one_layer: Path, questions: list[EngineQuestion]
) -> None:
    """The server puts the preamble in front of the first message, where the cache finds it too."""
    with LocalModel(one_layer, chat_template=NO_SYSTEM) as server, ContextPlanner() as planner:
        plan = planner.plan(questions[0].blocks, preamble=PREAMBLE)
        prompt = applied(server, messages_for(plan, "Why?", preamble=PREAMBLE))
        assert "system" not in prompt.partition(PREAMBLE)[0]
        assert prompt.index(PREAMBLE) < prompt.index(plan.render()) < prompt.index("Why?")
        total, cached = usage_of(ask(server, messages_for(plan, "Why?", preamble=PREAMBLE)))
        assert (total, cached) == (len(tokens_of(server, prompt)), 0)
        total, cached = usage_of(ask(server, messages_for(plan, "Why?", preamble=PREAMBLE)))
        assert cached == total - 1


# -- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planned", [False, True], ids=["relevance order", "planned"])
@pytest.mark.parametrize(("slots", "host_memory_mib"), [(1, 0), (4, 0), (1, 8_192), (4, 8_192)])
def test_each_prompt_finds_what_the_rule_predicts(
    one_layer: Path, questions: list[EngineQuestion], slots: int, host_memory_mib: int, planned: bool
) -> None:
    cache = SlotCache(slots, host_memory=host_memory_mib > 0)
    policy = {} if planned else {"policy": "relevance", "annotate": "none"}
    predicted, reported = [], []
    with (
        LocalModel(one_layer, slots=slots, host_memory_mib=host_memory_mib) as server,
        ContextPlanner(**policy) as planner,  # type: ignore[arg-type]
    ):
        for question in questions:
            plan = planner.plan(question.blocks, preamble=PREAMBLE)
            messages = messages_for(plan, question.question, preamble=PREAMBLE)
            predicted.append(serve(cache, MarkedPrompt(tokens_of(server, applied(server, messages)))).read)
            total, cached = usage_of(ask(server, messages))
            reported.append(cached)
            planner.commit(plan, report=EngineReport(cached, total))
    assert predicted == reported
    assert sum(reported) > 0


def test_the_planned_order_computes_less(one_layer: Path, questions: list[EngineQuestion]) -> None:
    computed = []
    for policy in ({"policy": "relevance", "annotate": "none"}, {}):
        with (
            LocalModel(one_layer) as server,
            ContextPlanner(**policy) as planner,  # type: ignore[arg-type]
            EngineLink(planner) as link,
            OpenAI(base_url=server.base_url, api_key="none", http_client=link.http_client()) as client,
        ):
            tokens = 0
            for question in questions:
                plan = planner.plan(question.blocks, preamble=PREAMBLE)
                answer = client.chat.completions.create(
                    model=server.model,
                    messages=messages_for(plan, question.question, preamble=PREAMBLE),
                    max_tokens=1,
                    extra_headers=link.headers(plan),
                )
                assert answer.usage is not None
                assert answer.usage.prompt_tokens_details is not None
                tokens += answer.usage.prompt_tokens - (answer.usage.prompt_tokens_details.cached_tokens or 0)
            computed.append(tokens)
            stats = planner.stats()
            assert (stats.commits, stats.reports, stats.open_plans) == (60, 60, 0)
    assert computed[1] < 0.9 * computed[0]


# -- references --------------------------------------------------------------------------------------------------------


def test_a_reference_names_text_that_stands_earlier_in_the_tokens(
    llama: LocalModel, planner: ContextPlanner, questions: list[EngineQuestion]
) -> None:
    """In the tokens of the prompt, each text is there that a reference quotes, and the engine had it cached."""
    blocks, more = questions[0].blocks, questions[-1].blocks[:2]
    history: list[Any] = [{"role": "system", "content": PREAMBLE}]
    referenced = 0
    for number, found in enumerate((blocks, [*blocks[1:3], *more], [more[0], *blocks[3:]])):
        plan = planner.plan(found, placement="tail", conversation="chat", history=history)
        messages = messages_for(plan, f"Question {number}?", history)
        ids = tokens_of(llama, applied(llama, messages))
        answer = ask(llama, messages)
        planner.commit(plan)
        before = len(tokens_of(llama, applied(llama, history).removesuffix("<|im_start|>assistant\n"))) if number else 0
        _, cached = usage_of(answer)
        assert cached >= before - 1, "the engine kept the history"
        for planned in plan.blocks:
            if (reference := planned.reference) is None:
                continue
            referenced += 1
            text = planned.block.text
            assert " ".join(text.split()).startswith(reference.opening)
            assert text_of(llama, ids[:before]).count(text) == 1, "the text stands in the tokens of the history"
            assert f'"{reference.opening}"' in text_of(llama, ids[before:]), "the new turn names it"
            assert text not in text_of(llama, ids[before:])
        history = [*messages, {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]
    assert referenced == 2 + 3


# -- answers -----------------------------------------------------------------------------------------------------------


def test_an_unchanged_prompt_has_an_unchanged_answer(weights: Path, questions: list[EngineQuestion]) -> None:
    """Two empty servers answer the same bytes with the same words; a slot that was used may round differently."""
    answers = []
    for _ in range(2):
        with LocalModel(weights) as server, ContextPlanner() as planner:
            texts = []
            for question in questions[:2]:  # each has an empty slot
                plan = planner.plan(question.blocks[:1], preamble=PREAMBLE)
                messages = messages_for(plan, question.question, preamble=PREAMBLE)
                texts.append(ask(server, messages, max_tokens=8)["choices"][0]["message"]["content"])
                planner.commit(plan)
            answers.append(texts)
    assert answers[0] == answers[1]
    assert all(any(letter.isalpha() for letter in text) for text in answers[0])


# -- the link ----------------------------------------------------------------------------------------------------------


def test_the_link_reads_usage(
    llama: LocalModel, planner: ContextPlanner, link: EngineLink, client: OpenAI, questions: list[EngineQuestion]
) -> None:
    reported: list[tuple[int, int | None]] = []
    for _ in range(2):
        plan = planner.plan(questions[0].blocks)
        answer = client.chat.completions.create(
            model=llama.model, messages=messages_for(plan, "Why?"), max_tokens=1, extra_headers=link.headers(plan)
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        reported.append((answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens))
    total = reported[0][0]
    assert reported == [(total, 0), (total, total - 1)]
    stats = planner.stats()
    assert (stats.commits, stats.reports, stats.open_plans) == (2, 2, 0)
    assert stats.reported_cached_tokens == total - 1


@pytest.fixture
async def asker(llama: LocalModel, link: EngineLink) -> AsyncIterator[ChatAsker]:
    async with AsyncOpenAI(
        base_url=llama.base_url, api_key="none", max_retries=0, http_client=link.async_http_client()
    ) as client:
        yield ChatAsker(client)


async def test_a_stream_ends_with_usage_and_has_a_first_token(
    llama: LocalModel, planner: ContextPlanner, link: EngineLink, asker: ChatAsker, questions: list[EngineQuestion]
) -> None:
    for number in range(2):
        plan = planner.plan(questions[0].blocks)
        options = chat_options(llama.model, messages_for(plan, "Why?"), {"max_tokens": 3, "temperature": 0}, None)
        with link.sending(plan):
            answer = await asker.ask(options)
        assert answer.ttft is not None
        assert answer.ttft > 0
        assert (answer.completion_tokens, answer.finish_reason) == (3, "length")
        assert answer.prompt_tokens is not None
        assert answer.cached_tokens == number * (answer.prompt_tokens - 1)
    assert (planner.stats().commits, planner.stats().reports) == (2, 2)


async def test_a_cancelled_answer_is_not_committed_and_frees_its_slot(
    one_layer: Path, planner: ContextPlanner, link: EngineLink, questions: list[EngineQuestion]
) -> None:
    with LocalModel(one_layer, slots=1) as server:
        async with AsyncOpenAI(
            base_url=server.base_url, api_key="none", max_retries=0, http_client=link.async_http_client()
        ) as client:
            asker = ChatAsker(client)
            plan = planner.plan(questions[0].blocks, placement="tail", conversation="chat")
            begun = asyncio.Event()
            endless = chat_options(server.model, messages_for(plan, "Why?"), {"extra_body": {"ignore_eos": True}}, None)
            with link.sending(plan):
                task = asyncio.create_task(asker.ask(endless, on_start=begun.set))
                await begun.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert (planner.stats().commits, planner.stats().open_plans) == (0, 0)
            again = planner.plan(questions[0].blocks, placement="tail", conversation="chat")
            assert not again.references
            with link.sending(again):
                answer = await asker.ask(
                    chat_options(server.model, messages_for(again, "Why?"), {"max_tokens": 1}, None)
                )
            assert answer.cached_tokens  # the only slot answers, and has kept the prompt
            assert planner.stats().commits == 1


def test_a_prompt_that_is_too_long_is_refused_and_not_learned(
    llama: LocalModel, planner: ContextPlanner, link: EngineLink, client: OpenAI
) -> None:
    plan = planner.plan([ContextBlock("word " * 3_000)])
    with pytest.raises(APIStatusError, match="exceeds the available context size"):
        client.chat.completions.create(
            model=llama.model, messages=messages_for(plan, "Why?"), max_tokens=1, extra_headers=link.headers(plan)
        )
    assert (planner.stats().commits, planner.stats().open_plans) == (0, 0)


# -- the gateway -------------------------------------------------------------------------------------------------------


def test_the_gateway_refuses_tenants_and_passes_others_on(llama: LocalModel, questions: list[EngineQuestion]) -> None:
    """llama.cpp has no salts, so tenants would find each other's prompts."""
    plan: ContextPlan = ContextPlanner().plan(questions[0].blocks)
    body = {"model": llama.model, "messages": messages_for(plan, "Why?"), "max_tokens": 1}
    with GatewayServer(GatewayOptions((llama.base_url,), port=0, tenant_header="x-tenant")) as gateway:
        refused = httpx.post(f"{gateway.base_url}/chat/completions", json=body, headers={"x-tenant": "acme"})
        assert refused.status_code == 400
        assert "does not keep tenants apart" in refused.text
    with GatewayServer(GatewayOptions((llama.base_url,), port=0)) as gateway:
        for number in range(2):
            answer = httpx.post(f"{gateway.base_url}/chat/completions", json=body, timeout=60)
            total, cached = usage_of(answer.json())
            assert cached == number * (total - 1), "the refused request did not reach the engine"


# -- the server's life -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("content", "template"), [(b"GGUF", ""), (None, "{{ broken")])
def test_a_server_that_cannot_start_gives_its_reason(
    one_layer: Path, tmp_path: Path, content: bytes | None, template: str
) -> None:
    model = one_layer
    if content is not None:
        model = tmp_path / "cut.gguf"
        model.write_bytes(content)
    with pytest.raises(LocalModelError, match=r"did not start \(status 1\): .+") as caught:
        LocalModel(model, chat_template=template)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_server_ends_with_the_process_that_started_it(one_layer: Path, number: int) -> None:
    """An answer breaks off, however the process ends."""
    code = f"""
from pathlib import Path
from warmprefix_tools.local.llama_server import LocalModel
with LocalModel(Path({str(one_layer)!r})) as server:
    print(server.url, flush=True)
    input()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        with httpx.stream("POST", f"{url}/completion", json=ENDLESS, timeout=60) as answer:
            chunks = answer.iter_bytes()
            next(chunks)
            process.send_signal(number)
            with pytest.raises(httpx.TransportError):
                for _ in chunks:
                    pass
    with pytest.raises((httpx.ConnectError, httpx.ReadError)):  # reset, if the process is just about to end
        httpx.get(f"{url}/health")
