"""Every error for a wrong argument names the argument, the value or its type, and the values that are allowed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from warmprefix import BatchRequest, ContextBlock, ContextPlan, ContextPlanner
from warmprefix_openai import BatchRunner, ChatAsker, EngineLink, Retries, messages_for

SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none") as client:
        yield client


def plan(**options: Any) -> ContextPlan:
    return ContextPlanner().plan([ContextBlock("The sea is deep.", id="sea")], **options)


def link(**options: Any) -> EngineLink:
    return EngineLink(ContextPlanner(), **options)


def runner() -> BatchRunner:
    return BatchRunner(ContextPlanner().plan_batch([BatchRequest(1, ["text"], "Why?")]))


def run(**options: Any) -> object:
    client = openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none")
    return runner().run(**{"client": client, "model": "m", **options})


def write(**options: Any) -> object:
    return runner().write_jsonl(Path("never.jsonl"), "m", **options)


WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "plan of headers": (lambda: link().headers("p"), TypeError, "plan must be a ContextPlan, got str"),  # type: ignore[arg-type]
    "plan of sending": (lambda: link().sending(None), TypeError, "plan must be a ContextPlan, got NoneType"),  # type: ignore[arg-type]
    "token_ids": (lambda: link(token_ids="tgi"), ValueError, "token_ids must be 'vllm', 'sglang' or None, got 'tgi'"),
    "plan of messages": (lambda: messages_for(1, "Q?"), TypeError, "plan must be a ContextPlan, got int"),  # type: ignore[arg-type]
    "question": (lambda: messages_for(plan(), 1), TypeError, "question must be a str, got int"),  # type: ignore[arg-type]
    "preamble": (lambda: messages_for(plan(), "Q?", (), 1), TypeError, "preamble must be a str or None, got int"),  # type: ignore[arg-type]
    "second preamble": (
        lambda: messages_for(plan(), "Q?", [SYSTEM], "Be kind."),
        ValueError,
        "preamble must be None if the history begins with a system prompt, got 'Be kind.'",
    ),
    "history": (
        lambda: messages_for(plan(), "Q?", SYSTEM),  # type: ignore[arg-type]
        TypeError,
        "history must be a sequence of messages, got dict",
    ),
    "count": (lambda: Retries(count=-1), ValueError, "count must be 0 or more, got -1"),
    "kind of count": (lambda: Retries(count=1.5), TypeError, "count must be an int, got float"),  # type: ignore[arg-type]
    "true count": (lambda: Retries(count=True), TypeError, "count must be an int, got bool"),
    "longest": (lambda: Retries(longest=-1), ValueError, "longest must be finite, and 0 or more, got -1"),
    "client": (
        lambda: ChatAsker("http://"),  # type: ignore[arg-type]
        TypeError,
        "client must be an openai.OpenAI or openai.AsyncOpenAI, got str",
    ),
    "batch": (lambda: BatchRunner([]), TypeError, "batch must be a BatchPlan, got list"),  # type: ignore[arg-type]
    "concurrency": (lambda: run(concurrency=0), ValueError, "concurrency must be 1 or more, got 0"),
    "kind of concurrency": (lambda: run(concurrency=2.0), TypeError, "concurrency must be an int, got float"),
    "model": (lambda: run(model=None), TypeError, "model must be a str, got NoneType"),
    "timeout": (lambda: run(timeout=0), ValueError, "timeout must be above 0 or None, got 0"),
    "stream": (lambda: run(stream=True), ValueError, "stream must be left out, because every run streams, got True"),
    "retries": (lambda: run(retries="many"), TypeError, "count must be an int, got str"),
    "endpoint": (
        lambda: write(endpoint="/v1/responses"),
        ValueError,
        "endpoint must end with /chat/completions, because the requests are chats, got '/v1/responses'",
    ),
    "max_requests": (lambda: write(max_requests=0), ValueError, "max_requests must be 1 or more, or None, got 0"),
    "max_bytes": (lambda: write(max_bytes=-1), ValueError, "max_bytes must be 1 or more, or None, got -1"),
    "stream of a file": (lambda: write(stream=True), ValueError, "stream must be left out of a batch file, got True"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_an_error_names_the_argument_the_value_and_what_is_allowed(wrong: str) -> None:
    call, error, message = WRONG[wrong]
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message
    assert re.match(r"[a-z_ ]+ must .+, got \S", message)


async def test_a_blocking_client_needs_threads(client: openai.OpenAI) -> None:
    with pytest.raises(TypeError, match=r"^client must be an openai.AsyncOpenAI, got OpenAI$"):
        run(client=client)
    with ThreadPoolExecutor(1) as threads:
        assert ChatAsker(client, threads=threads)
