"""LangChain's chat model with `EngineLink` and our retriever, with a real engine."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_server import VllmServer
from warmprefix import ContextBlock, ContextPlanner
from warmprefix_openai import EngineLink, messages_for

output_parsers = pytest.importorskip("langchain_core.output_parsers", reason="runs in LangChain's environment")
langchain_openai = pytest.importorskip("langchain_openai", reason="runs in LangChain's environment")

pytestmark = pytest.mark.vllm


def chat(server: VllmServer, **clients: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        model=server.model, base_url=server.base_url, api_key="none", max_tokens=4, max_retries=0, **clients
    )


def test_invoke_and_stream(
    server: VllmServer, planner: ContextPlanner, link: EngineLink, passages: list[ContextBlock]
) -> None:
    with link.http_client(timeout=60.0) as http_client:
        model = chat(server, http_client=http_client)
        plan = planner.plan(passages[:6], tenant="acme")
        with link.sending(plan):
            model.invoke(messages_for(plan, "What is it?"))
        plan = planner.plan(passages[5::-1], tenant="acme")
        with link.sending(plan):
            answer = None
            for chunk in model.stream(messages_for(plan, "What is it?")):
                answer = chunk if answer is None else answer + chunk
    assert answer is not None
    stats = planner.stats()
    assert (stats.commits, stats.reports, stats.open_plans) == (2, 2, 0)
    assert stats.reported_cached_tokens > 0.8 * sum(block.tokens for block in passages[:6])


async def test_async_chains(
    server: VllmServer, planner: ContextPlanner, link: EngineLink, passages: list[ContextBlock]
) -> None:
    async with link.async_http_client(timeout=60.0) as http_client:
        chain = chat(server, http_async_client=http_client) | output_parsers.StrOutputParser()
        for _ in range(2):
            plan = await planner.aplan(passages[:6])
            async with link.sending(plan):
                assert isinstance(await chain.ainvoke(messages_for(plan, "What is it?")), str)
    stats = planner.stats()
    assert (stats.commits, stats.reports, stats.open_plans) == (2, 2, 0)
    assert stats.reported_cached_tokens > 0


def test_our_retriever_reuses_cached_documents(
    server: VllmServer, planner: ContextPlanner, passages: list[ContextBlock]
) -> None:
    documents = pytest.importorskip("langchain_core.documents")
    runnables = pytest.importorskip("langchain_core.runnables")
    plugin = pytest.importorskip("warmprefix_langchain")
    listed = [documents.Document(block.text, id=str(block.id)) for block in passages[:6]]
    found = {"First?": listed, "Second?": listed[::-1]}
    retriever = plugin.ContextReuseRetriever(retriever=runnables.RunnableLambda(found.__getitem__), planner=planner)
    cached = []
    for question in found:
        context = "\n\n".join(document.page_content for document in retriever.invoke(question))
        answer = chat(server).invoke([("system", "Answer."), ("human", f"{context}\n\n{question}")])
        cached.append(answer.response_metadata["token_usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert cached[1] > 0.8 * sum(block.tokens for block in passages[:6])
