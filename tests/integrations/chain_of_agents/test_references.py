"""Whatever happens: no prompt refers to a document that it does not hold, and nothing crosses tenants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from typing import Any, Literal, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_chain_of_agents import ChainOfAgents, ChainOfAgentsError, ChainProgress, InMemoryChats, Manager, Worker
from warmprefix_openai import Retries
from warmprefix_routing import AgentRouter

POOL = 8


class Turn(NamedTuple):
    """One question, or several at once."""

    documents: list[int]
    conversation: str | None
    tenant: str | None
    mode: Literal["chain", "map"]
    failures: list[int]
    """Requests that will fail, by engine."""
    leaves: bool
    """Whether the answer is not waited for."""
    dies: int | None
    """A worker that can't be reached meanwhile."""
    twice: bool


TURNS = st.lists(
    st.builds(
        Turn,
        documents=st.lists(st.integers(0, POOL - 1), min_size=1, max_size=5),
        conversation=st.sampled_from(["a", "b", None]),
        tenant=st.sampled_from(["acme", None]),
        mode=st.sampled_from(["map", "chain"]),
        failures=st.lists(st.integers(0, 3), min_size=3, max_size=3),
        leaves=st.booleans(),
        dies=st.sampled_from([None, None, None, 0, 1]),
        twice=st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


class World:
    """Two workers and a manager, asked by ever new chains that share a router, a planner and the agents' chats."""

    def __init__(self, engines: list[Any], clients: list[OpenAI], closed_port: OpenAI) -> None:
        for engine in engines:
            engine.bodies.clear()
        self.engines = engines
        self.router, self.planner, self.memory = AgentRouter(), ContextPlanner(), InMemoryChats()
        self._clients = clients
        self._closed_port = closed_port

    def chain(self, turn: Turn) -> ChainOfAgents:
        workers = [
            Worker(
                f"w{place}",
                self._closed_port if turn.dies == place else self._clients[place],
                self.engines[place].model,
            )
            for place in range(2)
        ]
        return ChainOfAgents(
            workers,
            Manager(self._clients[2], self.engines[2].model),
            router=self.router,
            planner=self.planner,
            memory=self.memory,
            mode=turn.mode,
            retries=Retries(count=1, longest=0.0),
            recovery=0.0,
            max_chat_tokens=900,
        )

    def ask(self, turn: Turn, question: str, asked: list[ContextBlock]) -> None:
        """Take a turn, and check its reports."""
        chain = self.chain(turn)
        with suppress(ChainOfAgentsError):
            if turn.leaves:
                steps = chain.stream(question, asked, conversation=turn.conversation, tenant=turn.tenant)
                with closing(steps):
                    next(
                        step for step in steps if isinstance(step, ChainProgress) and step.kind in ("read", "answering")
                    )
                return
            answer = chain.run(question, asked, conversation=turn.conversation, tenant=turn.tenant)
            read = [block.id for report in answer.workers if report.error is None for block in report.blocks]
            skipped = [block.id for block in answer.skipped]
            assert sorted([*read, *skipped], key=str) == sorted({block.id for block in asked}, key=str)


@settings(max_examples=settings().max_examples // 8)
@given(turns=TURNS)
def check(turns: list[Turn], start: Callable[[], World], pool: list[ContextBlock], dangling: Any) -> None:
    world = start()
    asked: dict[str | None, set[str]] = {"acme": set(), None: set()}
    for number, turn in enumerate(turns):
        question = f"Question {number} of {turn.tenant}?"
        asked[turn.tenant].add(question)
        for engine, failures in zip(world.engines, turn.failures, strict=True):
            engine.fail_next(failures)
        ask = partial(world.ask, turn, question, [pool[place] for place in turn.documents])
        at_once([ask] * (2 if turn.twice else 1))
        assert world.planner.stats().open_plans == world.router.stats().open == 0
    for engine in world.engines:
        for body in engine.bodies:
            assert dangling(body, pool) == []
            whole = "\n".join(message["content"] for message in body["messages"])
            others = asked[None if "cache_salt" in body else "acme"]
            assert not any(question in whole for question in others)


def at_once(calls: Sequence[Callable[[], None]]) -> None:
    with ThreadPoolExecutor() as threads:
        for called in [threads.submit(call) for call in calls]:
            called.result()


def test_references_never_dangle(
    start_engine: Any, closed_port: Any, connect: Any, documents: Any, dangling: Any
) -> None:
    engines = [start_engine() for _ in range(3)]
    clients = [connect(engine) for engine in engines]
    start = partial(World, engines, clients, connect(closed_port))
    check(start=start, pool=documents(POOL), dangling=dangling)
