"""LlamaIndex's chat model with `EngineLink` and our postprocessor, with a real engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from vllm_server import VllmServer
from warmprefix import ContextBlock, ContextPlanner
from warmprefix.plan import ContextPlan
from warmprefix_openai import EngineLink, messages_for

llms = pytest.importorskip("llama_index.core.llms", reason="runs in LlamaIndex's environment")
openai_like = pytest.importorskip("llama_index.llms.openai_like", reason="runs in LlamaIndex's environment")

pytestmark = pytest.mark.vllm


def chat(server: VllmServer, **clients: Any) -> Any:
    return openai_like.OpenAILike(
        model=server.model,
        api_base=server.base_url,
        api_key="none",
        is_chat_model=True,
        context_window=8_192,
        max_tokens=4,
        max_retries=0,
        **clients,
    )


def messages(plan: ContextPlan) -> Sequence[Any]:
    return [llms.ChatMessage(**message) for message in messages_for(plan, "What is it?")]


def test_chat_and_stream_chat(
    server: VllmServer, planner: ContextPlanner, link: EngineLink, passages: list[ContextBlock]
) -> None:
    with link.http_client(timeout=60.0) as http_client:
        model = chat(server, http_client=http_client)
        plan = planner.plan(passages[:6], tenant="acme")
        with link.sending(plan):
            model.chat(messages(plan))
        plan = planner.plan(passages[5::-1], tenant="acme")
        with link.sending(plan):
            for _ in model.stream_chat(messages(plan)):
                pass
    stats = planner.stats()
    assert (stats.commits, stats.reports, stats.open_plans) == (2, 2, 0)
    assert stats.reported_cached_tokens > 0.8 * sum(block.tokens for block in passages[:6])


async def test_tasks(
    server: VllmServer, planner: ContextPlanner, link: EngineLink, passages: list[ContextBlock]
) -> None:
    async with link.async_http_client(timeout=60.0) as http_client:
        model = chat(server, async_http_client=http_client)
        for _ in range(2):
            plan = await planner.aplan(passages[:6])
            async with link.sending(plan):
                await model.achat(messages(plan))
    stats = planner.stats()
    assert (stats.commits, stats.reports, stats.open_plans) == (2, 2, 0)
    assert stats.reported_cached_tokens > 0


def test_our_postprocessor_reuses_cached_nodes(
    server: VllmServer, planner: ContextPlanner, link: EngineLink, passages: list[ContextBlock]
) -> None:
    schema = pytest.importorskip("llama_index.core.schema")
    plugin = pytest.importorskip("warmprefix_llamaindex")
    listed = [
        schema.NodeWithScore(node=schema.TextNode(text=block.text, id_=f"p{block.id}"), score=1.0)
        for block in passages[:6]
    ]
    postprocessor = plugin.ContextReusePostprocessor(planner=planner)
    cached = []
    with link.http_client(timeout=60.0) as http_client:
        model = chat(server, http_client=http_client)
        for question, found in (("First?", listed), ("Second?", listed[::-1])):
            nodes = postprocessor.postprocess_nodes(found, query_str=question)
            context = "\n\n".join(node.get_content() for node in nodes)
            answer = model.chat([llms.ChatMessage(role="user", content=f"{context}\n\n{question}")])
            cached.append(answer.raw.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert cached[1] > 0.8 * sum(block.tokens for block in passages[:6])
