"""A planner with a feed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kv_publisher import KvPublisher, removed, stored
from warmprefix import ContextBlock, ContextPlanner
from warmprefix.residency import EngineReport
from warmprefix_kv_events.kv_feed import KvEventFeed


def test_events_of_a_hybrid_model_show_its_checkpoints(
    publisher: KvPublisher, until: Callable[[Callable[[], object]], None]
) -> None:
    blocks = [ContextBlock(f"passage {number} " * 4, id=f"p{number}") for number in range(3)]
    feed = KvEventFeed(publisher.endpoint, replay=publisher.replay_endpoint, tokenizer=lambda text: [*map(ord, text)])
    with ContextPlanner(feed=feed) as planner:
        publisher.wait_for_subscriber()
        plan = planner.plan(blocks)
        prompt = "You answer.\n\n" + plan.render() + "\n\nWhy?"
        tokens = [ord(character) for character in prompt]
        names = list(range(1, len(tokens) // 4 + 1))
        second = prompt.index(plan.blocks[1].render()) // 4 + 1
        states = stored([names[second]], None, tokens[: 4 * len(names)], 4, kv_cache_spec_kind="mamba")
        whole = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
        publisher.publish(states, stored(names, None, tokens[: 4 * len(names)], 4, **whole))
        until(lambda: feed.stats().kv_blocks == len(names))
        planner.commit(plan, report=EngineReport(cached_tokens=0, prompt_tokens=len(tokens), prompt_token_ids=tokens))
        until(lambda: planner.profile.name == "vllm-checkpoints(4)")

        def predicted() -> int:
            plan = planner.plan(blocks)
            planner.abandon(plan)
            return plan.resident_tokens

        tokens_of_two = sum(planned.block.tokens for planned in plan.blocks[:2])
        until(lambda: predicted() == tokens_of_two // 4 * 4)
        publisher.publish(removed(names[second]))
        until(lambda: predicted() == 0)


def test_blocks_that_the_engine_drops_are_not_resident(
    publisher: KvPublisher, until: Callable[[Callable[[], object]], None]
) -> None:
    blocks = [ContextBlock(f"passage {number} " * 4, id=f"p{number}") for number in range(3)]
    feed = KvEventFeed(publisher.endpoint, replay=publisher.replay_endpoint, tokenizer=lambda text: [*map(ord, text)])
    with ContextPlanner(feed=feed) as planner:
        publisher.wait_for_subscriber()
        plan = planner.plan(blocks)
        prompt = "You answer.\n\n" + plan.render() + "\n\nWhy?"
        tokens = [ord(character) for character in prompt]
        names = list(range(1, len(tokens) // 4 + 1))
        publisher.publish(stored(names, None, tokens[: 4 * len(names)], 4))
        until(lambda: feed.stats().kv_blocks == len(names))
        report: Any = EngineReport(cached_tokens=0, prompt_tokens=len(tokens), prompt_token_ids=tokens)
        planner.commit(plan, report=report)
        until(lambda: feed.stats().prompts == 1)
        whole = planner.plan(blocks)
        assert whole.resident_tokens == sum(block.tokens for block in blocks)
        planner.abandon(whole)
        last = prompt.index(plan.blocks[2].render()) // 4 + 1
        publisher.publish(removed(*reversed(names[last:])))

        def resident() -> int:
            plan = planner.plan(blocks)
            planner.abandon(plan)
            return plan.resident_tokens

        until(lambda: resident() == sum(planned.block.tokens for planned in plan.blocks[:2]))
        publisher.publish(stored(names[last:], names[last - 1], tokens[4 * last : 4 * len(names)], 4))
        until(lambda: resident() == sum(block.tokens for block in blocks))
        publisher.publish({"type": "AllBlocksCleared"})
        until(lambda: resident() == 0)
        assert planner.stats().feed == feed.stats()
