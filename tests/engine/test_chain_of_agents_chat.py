"""A chain of agents with one real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from vllm_server import VllmServer
from warmprefix import ContextBlock, ContextPlanner

plugin: Any = pytest.importorskip("warmprefix_chain_of_agents", reason="runs in the chain's environment")

pytestmark = pytest.mark.vllm

FEW = {"max_tokens": 8, "extra_body": {"allowed_token_ids": [4626]}}
"""Answers of one word, "river": a single layer of a model may say nothing but line breaks."""


@pytest.fixture
def chain(server: VllmServer, planner: ContextPlanner) -> Iterator[Any]:
    with OpenAI(base_url=server.base_url, api_key="none", timeout=60.0) as client:
        workers = [plugin.Worker(name, client, server.model, options=FEW) for name in ("ann", "ben")]
        yield plugin.ChainOfAgents(
            workers, plugin.Manager(client, server.model, options=FEW), planner=planner, mode="map"
        )


def tokens(blocks: list[ContextBlock]) -> int:
    return sum(block.tokens for block in blocks)


def test_repeated_documents_are_cached(chain: Any, passages: list[ContextBlock]) -> None:
    listed = passages[:4]
    first = chain.run("What is it?", listed, tenant="acme")
    again = chain.run("And what is that?", listed[::-1], tenant="acme")
    assert not first.skipped
    assert not again.skipped
    gained = again.usage.cached_tokens - first.usage.cached_tokens
    assert gained > 0.6 * tokens(listed)  # only whole KV blocks of 32, and each document has its own end
    assert {block.id: report.agent for report in first.workers for block in report.blocks} == {
        block.id: report.agent for report in again.workers for block in report.blocks
    }
    other = chain.run("And what is that?", listed, tenant="other")
    assert other.usage.cached_tokens < again.usage.cached_tokens - 0.6 * tokens(listed)


def test_a_conversation_refers_to_documents_of_earlier_turns(chain: Any, passages: list[ContextBlock]) -> None:
    listed = passages[:4]
    chain.run("What is it?", listed, conversation="chat")
    again = chain.run("And what is that?", [*listed[::-1], passages[4]], conversation="chat")
    assert not again.skipped
    assert again.usage.cached_tokens > 0.8 * tokens(listed)


async def test_async_chains_and_streams(
    server: VllmServer, planner: ContextPlanner, passages: list[ContextBlock]
) -> None:
    async with AsyncOpenAI(base_url=server.base_url, api_key="none", timeout=60.0) as client:
        workers = [plugin.Worker(name, client, server.model, options=FEW) for name in ("ann", "ben")]
        chain = plugin.ChainOfAgents(workers, plugin.Manager(client, server.model, options=FEW), planner=planner)
        first = await chain.arun("What is it?", passages[:2])
        *_, again = [event async for event in chain.astream("And what is that?", passages[:2])]
    assert [report.error for report in again.workers] == [None, None]
    assert again.usage.cached_tokens > first.usage.cached_tokens + 0.6 * tokens(passages[:2])
