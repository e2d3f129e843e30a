"""Predicted and reported cached tokens of a real engine, request by request, with a real tokenizer and template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, cast

import pytest
from openai import OpenAI

from engine_client import EngineClient
from engine_workload import EngineQuestion, counted, read
from redis_servers import wait_until
from vllm_server import BLOCK_SIZE, VllmServer
from warmprefix import ContextPlanner
from warmprefix.plan import ContextPlan
from warmprefix.residency import ServedPrompt
from warmprefix_kv_events import EngineTokenizer, KvEventFeed
from warmprefix_kv_events.spans import SpanFinder
from warmprefix_openai import EngineLink, messages_for

pytestmark = pytest.mark.vllm

PREAMBLE = "Answer the question from the passages."


@pytest.fixture(scope="module")
def asked(only_server: VllmServer) -> list[EngineQuestion]:
    """Return questions about Python's standard library, with six passages each."""
    return counted(read("stdlib", 150, 6), EngineClient(only_server.base_url, only_server.model).count_tokens)


@contextmanager
def planning(server: VllmServer, order: str, feed: KvEventFeed | None) -> Iterator[ContextPlanner]:
    options: dict[str, Any] = {} if order == "planned" else {"policy": "relevance"}
    with ContextPlanner(capacity_tokens=server.capacity_tokens, feed=feed, **options) as planner:
        yield planner


def has_applied(feed: KvEventFeed, plan: ContextPlan) -> bool:
    """Return True if a served prompt was found among the events, and the planner has its residency."""
    prompts = feed._receiver.index._prompts
    keys = tuple([planned.block.fingerprint for planned in plan.blocks])
    return any(keys == name[2] for name in prompts._prompts) and not (feed._served or feed._mapped or prompts._changed)


def predicted_tokens(plan: ContextPlan, ids: Sequence[int], tokenizer: EngineTokenizer) -> int:
    """Return the end, in the prompt's tokens, of the last block that the plan takes for resident; 0 without one."""
    held = [*accumulate(planned.block.tokens for planned in plan.blocks)]
    if not plan.resident_tokens:
        return 0
    texts = tuple([planned.render() for planned in plan.blocks])
    keys = tuple([planned.block.fingerprint for planned in plan.blocks])
    mapped = SpanFinder(tokenizer).map(ServedPrompt(plan.scope, None, keys, texts, ids))
    assert mapped is not None
    return mapped.ends[held.index(plan.resident_tokens)]


@pytest.mark.parametrize("order", ["relevance", "planned"])
@pytest.mark.parametrize("fed", [False, True], ids=["usage alone, before anything is evicted", "with the feed"])
def test_cached_tokens_are_predicted_within_a_kv_block(
    fed: bool, order: str, server: VllmServer, feed_options: dict[str, Any], asked: list[EngineQuestion]
) -> None:
    feed = KvEventFeed(**feed_options) if fed else None
    tokenizer = EngineTokenizer(server.base_url, server.model)
    hits = predicted_hits = served = 0
    with (
        planning(server, order, feed) as planner,
        EngineLink(planner, token_ids="vllm") as link,
        OpenAI(base_url=server.base_url, api_key="none", http_client=link.http_client(timeout=60.0)) as client,
    ):
        for question in asked:
            plan = planner.plan(question.blocks, preamble=PREAMBLE)
            messages: Any = messages_for(plan, question.question, preamble=PREAMBLE)
            with link.sending(plan):
                answer = client.chat.completions.create(model=server.model, messages=messages, max_tokens=1)
            usage = answer.usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            ids = cast(Any, answer).prompt_token_ids
            assert len(ids) == usage.prompt_tokens == len(tokenizer.of_request({"messages": messages}))
            served += usage.prompt_tokens
            if feed is None and served > server.capacity_tokens:
                break
            cached, predicted = usage.prompt_tokens_details.cached_tokens or 0, predicted_tokens(plan, ids, tokenizer)
            if predicted:  # else only the preamble and what passages begin with may be shared
                assert abs(predicted - cached) <= BLOCK_SIZE, question.number
            hits += cached
            predicted_hits += predicted
            if feed is not None:
                wait_until(partial(has_applied, feed, plan), "the prompt's events are applied")
        stats = planner.stats()
    assert 0 < predicted_hits <= hits + BLOCK_SIZE * len(asked)
    if fed:
        assert served > 3 * server.capacity_tokens, "too little was evicted for this to show much"
        assert stats.feed.connected
        assert stats.feed.gaps == stats.feed.malformed == stats.feed.unmapped == 0
