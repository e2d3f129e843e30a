"""An emulated engine over HTTP, whose cache a test can empty without the planner."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from warmprefix import ContextBlock, ContextPlan, ContextPlanner, EngineReport
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

PREAMBLE = "You answer from the context, and from nothing else. " * 6
WORDS = ["river", "stone", "lamp", "paper", "engine", "window", "garden", "copper", "signal", "market", "harbor"]


@pytest.fixture
def corpus() -> list[ContextBlock]:
    """Sixty passages of some 80 to 160 tokens."""
    random_words = random.Random(5)
    return [
        ContextBlock(" ".join(random_words.choices(WORDS, k=random_words.randint(60, 120))), id=f"p{i}")
        for i in range(60)
    ]


@dataclass
class Engine:
    """An emulator and its client."""

    server: EmulatorServer
    client: openai.OpenAI

    def ask(self, plan: ContextPlan, question: str = "Why?", preamble: str = PREAMBLE) -> EngineReport:
        """Send a plan's prompt, and return the report that a transport would."""
        content = f"{plan.render()}\n\n{question}"
        extra = {} if plan.cache_salt is None else {"cache_salt": plan.cache_salt}
        usage = self.client.chat.completions.create(
            model=self.server.config.model,
            messages=[{"role": "system", "content": preamble}, {"role": "user", "content": content}],
            max_tokens=1,
            extra_body=extra,
        ).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        ends, at = [], 0
        for planned in plan.blocks:
            at = content.index(planned.render(), at) + len(planned.render())
            ends.append((len(preamble) + at) / (len(preamble) + len(content)))
        return EngineReport(usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens, block_ends=ends)

    def empty(self) -> None:
        """Fill the whole cache with other prompts."""
        for i in range(4):
            words = " ".join(f"{random.Random(i).random()}" for _ in range(600))
            self.client.chat.completions.create(
                model=self.server.config.model, messages=[{"role": "user", "content": f"{i} {words}"}], max_tokens=1
            )


@pytest.fixture
def open_engine() -> Iterator[Callable[[int], Engine]]:
    """Return a function that starts an engine with a number of KV blocks of 16 tokens."""
    opened: list[Any] = []

    def start(kv_blocks: int) -> Engine:
        instant = EmulatorConfig(kv_blocks=kv_blocks, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
        server = EmulatorServer(instant)
        server.__enter__()
        opened.append(server)
        client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)
        opened.append(client)
        return Engine(server, client)

    yield start
    for each in reversed(opened):
        each.__exit__(None, None, None)


@pytest.fixture
def serve() -> Callable[[ContextPlanner, Engine, Sequence[ContextBlock]], tuple[ContextPlan, EngineReport]]:
    """Return a function that plans, sends and commits one request with the engine's report."""

    def serve(
        planner: ContextPlanner, engine: Engine, blocks: Sequence[ContextBlock]
    ) -> tuple[ContextPlan, EngineReport]:
        plan = planner.plan(blocks, preamble=PREAMBLE)
        report = engine.ask(plan)
        assert planner.commit(plan, report=report)
        return plan, report

    return serve
