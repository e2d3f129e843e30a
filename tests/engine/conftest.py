"""Real engines. vLLM on the CPU runs for all tests of a session, and each test finds it with an empty prefix cache.

llama.cpp's own server starts in a second, so each test has one of its own. It serves SmolLM2-135M-Instruct, or the
first layer of it: what is cached depends on tokens, not on weights.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from openai import OpenAI

from common import zipf_requests
from engine_client import EngineClient
from vllm_server import FOLDER, EngineUnavailableError, VllmServer
from warmprefix import ContextBlock, ContextPlanner
from warmprefix.plan import ContextPlan
from warmprefix_kv_events.spans import EngineTokenizer
from warmprefix_openai import EngineLink, messages_for
from warmprefix_tools.local import LocalModelError
from warmprefix_tools.local.llama_server import LocalModel
from warmprefix_tools.local.weights import fetch_weights

KV_BLOCKS = 1_024
"""Of 32 tokens each: room for some 40 prompts of these tests, so that long runs evict."""
MODEL = "smollm2-1"
"""The tokenizer and the chat template of a real model, and its first layer: counts do not depend on the others."""
PREAMBLE = "You answer from the context."
QUESTION = "What is in it?"
WORDS = (
    *("river", "stone", "window", "garden", "letter", "morning", "winter", "bridge", "market", "harbour", "candle"),
    *("mountain", "forest", "shadow", "silver", "copper", "engine", "signal", "number", "paper", "travel", "answer"),
)

Serve = Callable[..., tuple[ContextPlan, int]]


@pytest.fixture(scope="session")
def weights() -> Path:
    """Return the small real model, downloaded once."""
    pytest.importorskip("xllamacpp", reason="llama.cpp's server is in the extra `local`, where there is a build of it")
    try:
        return fetch_weights(lambda line: sys.stderr.write(f"{line}\n"))
    except LocalModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def one_layer(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the first layer of the small real model."""
    pytest.importorskip("gguf")
    from gguf_layers import first_layers

    return first_layers(weights, tmp_path_factory.mktemp("model") / "one-layer.gguf")


@pytest.fixture
def llama(one_layer: Path) -> Iterator[LocalModel]:
    """Return llama.cpp's server with one layer, four slots and host memory, as it comes."""
    with LocalModel(one_layer) as server:
        yield server


@pytest.fixture(scope="session")
def only_server() -> Iterator[VllmServer]:
    if FOLDER not in os.environ:
        pytest.skip(f"{FOLDER} must be set to a folder with vLLM, or to install it in")
    try:
        server = VllmServer(MODEL, kv_blocks=KV_BLOCKS, arguments=["--trust-request-chat-template"])
    except EngineUnavailableError as error:
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture
def server(only_server: VllmServer) -> VllmServer:
    if not only_server.is_running:  # a failed test had killed it
        only_server.restart()
    only_server.reset_prefix_cache()
    return only_server


@pytest.fixture
def planner(server: VllmServer) -> Iterator[ContextPlanner]:
    with ContextPlanner(capacity_tokens=server.capacity_tokens) as planner:
        yield planner


@pytest.fixture
def link(planner: ContextPlanner) -> Iterator[EngineLink]:
    with EngineLink(planner) as link:
        yield link


@pytest.fixture(scope="session")
def passages(only_server: VllmServer) -> list[ContextBlock]:
    """Return passages of 60 to 150 tokens each, by the engine's own count."""
    engine = EngineClient(only_server.base_url, only_server.model)
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(50, 140))) for _ in range(120)]
    return [
        ContextBlock(text, id=number, tokens=engine.count_tokens(f"[{number}] {text}\n\n"))
        for number, text in enumerate(texts)
    ]


@pytest.fixture
def feed_options(server: VllmServer) -> dict[str, Any]:
    """Return the arguments of a `KvEventFeed` for the server."""
    tokenizer = EngineTokenizer(server.base_url, server.model)
    return {"endpoint": server.kv_events, "replay": server.kv_replay, "tokenizer": tokenizer}


@pytest.fixture(scope="session")
def requests() -> list[list[int]]:
    """Return requests of six passage numbers each, of recurring topics."""
    return list(zipf_requests(300, k=6, topics=12, per_topic=10))


@pytest.fixture
def serving(
    server: VllmServer, passages: list[ContextBlock]
) -> Callable[[ContextPlanner], AbstractContextManager[Serve]]:
    """Return a context manager of a function that sends the passages with these numbers.

    The function returns the plan and the cached tokens that the engine reported.
    """

    @contextmanager
    def opened(planner: ContextPlanner) -> Iterator[Serve]:
        with (
            EngineLink(planner, token_ids="vllm") as link,
            OpenAI(
                base_url=server.base_url, api_key="none", max_retries=0, http_client=link.http_client(timeout=60.0)
            ) as client,
        ):

            def serve(numbers: list[int], tenant: str | None = None) -> tuple[ContextPlan, int]:
                plan = planner.plan([passages[n] for n in numbers], tenant=tenant, preamble=PREAMBLE)
                answer = client.chat.completions.create(
                    model=server.model,
                    messages=cast(Any, messages_for(plan, QUESTION, preamble=PREAMBLE)),
                    max_tokens=1,
                    extra_headers=link.headers(plan),
                )
                assert answer.usage is not None
                details = answer.usage.prompt_tokens_details
                assert details is not None
                return plan, details.cached_tokens or 0

            yield serve

    return opened
