"""`ChainOfAgents`, the package, on the servers of `agent_http.py`: what it answers, and what the servers had cached."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from openai import AsyncOpenAI

from agent_http import AT_ONCE, KV_BLOCKS, MODEL, Questions, Servers, questions, servers
from warmprefix_chain_of_agents import ChainAnswer, ChainOfAgents, Manager, Worker
from warmprefix_openai import Retries
from warmprefix_routing import Agent, AgentRouter

__all__ = ["measure_chain"]


def measure_chain(count: int, agents: int) -> list[dict[str, Any]]:
    """As `measure_http`, in mode "map", each document in a prompt of its own; the manager has a server of its own."""
    asked = questions(count)
    rows: list[dict[str, Any]] = []
    for kill_at in (None, count // 2):
        with servers(agents + 1) as started:
            answers = asyncio.run(_ask_all(asked, started, kill_at))
        read = [report for answer in answers for report in answer.workers if report.error is None]
        prompt = sum(report.usage.prompt_tokens or 0 for report in read)
        cached = sum(report.usage.cached_tokens or 0 for report in read)
        rows.append(
            {
                "arm": "ChainOfAgents",
                "requests": count,
                "agents": agents,
                "killed": kill_at is not None,
                "documents": asked.workload.documents,
                "answered": sum(len(report.blocks) for report in read),
                "lost": sum(report.error is not None for answer in answers for report in answer.workers),
                "answers": sum(bool(answer.text) for answer in answers),
                "skipped": sum(len(answer.skipped) for answer in answers),
                "prompt_tokens": prompt,
                "prefilled_tokens": prompt - cached,
                "hit_percent": round(100 * cached / prompt, 2),
            }
        )
    return rows


async def _ask_all(asked: Questions, started: Servers, kill_at: int | None) -> list[ChainAnswer]:
    turn = asyncio.Semaphore(AT_ONCE)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncOpenAI(base_url=url, api_key="none")) for url in started.urls]
        *reading, answering = clients
        options = {"max_tokens": 2}
        workers = [Worker(f"agent-0-{i}", client, MODEL, options=options) for i, client in enumerate(reading)]
        # Those of `agent_arms.py`, by the same names, so that documents meet the same agents.
        router = AgentRouter([Agent(worker.name, (KV_BLOCKS - 1) * 16) for worker in workers])
        chain = ChainOfAgents(
            workers,
            Manager(answering, MODEL, options=options),
            router=router,
            mode="map",
            retries=Retries(0),
            recovery=1e9,
        )

        async def question(number: int) -> ChainAnswer:
            try:
                return await chain.arun(asked.asked[number], asked.workload.requests[number].blocks)
            finally:
                turn.release()

        tasks: list[asyncio.Task[ChainAnswer]] = []
        for request in asked.workload.requests:
            await turn.acquire()
            if request.number == kill_at:
                started.kill_first()
            tasks.append(asyncio.create_task(question(request.number)))
        return list(await asyncio.gather(*tasks))
