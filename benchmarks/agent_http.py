"""The agents of `agent_routing.py` as servers: emulated engines over HTTP, asked about real text; one is killed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx

from agent_arms import ARMS, Arm, Part
from agent_engines import simulate
from agent_workloads import AgentRequest, AgentWorkload
from warmprefix_tools.demo.corpus import read_standard_library
from warmprefix_tools.demo.questions import ask
from warmprefix_tools.emulator import ChatMessage, EmulatorConfig, render_chat
from warmprefix_tools.retriever import Bm25Retriever

__all__ = ["Servers", "measure_http", "questions"]

KV_BLOCKS = 8_192
PASSAGES = 10
AT_ONCE = 4
ROLE = (
    "You are one of several agents who together read a text that is too long for one of them. Rely on the documents"
    " that you are given, and on nothing else."
)
TASK = "Write a summary that includes the evidence for answering the question. Others will answer from it."
MODEL = EmulatorConfig().model


class Servers:
    """Engines of `count` agents. The first has its own process, to be killed; the others share two, or one if few."""

    def __init__(self, count: int) -> None:
        half = (count - 1) // 2
        sizes = (1, half, count - 1 - half) if count > 6 else (1, count - 1)
        script = Path(__file__).parent / "agent_servers.py"
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(size), str(KV_BLOCKS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for size in sizes
        ]
        self.urls: list[str] = []
        for process in self._processes:
            assert process.stdout is not None
            self.urls += json.loads(process.stdout.readline())

    def kill_first(self) -> None:
        self._processes[0].kill()
        self._processes[0].wait()

    def close(self) -> None:
        for process in self._processes:
            process.kill()  # a graceful end takes longer than the questions of a test
            process.communicate()


@contextmanager
def servers(count: int) -> Iterator[Servers]:
    started = Servers(count)
    try:
        yield started
    finally:
        started.close()


@dataclass(frozen=True)
class Questions:
    """A workload of which there is text."""

    workload: AgentWorkload
    asked: Sequence[str]

    def messages(self, part: Part) -> list[dict[str, str]]:
        """Return a chat with the documents before everything that changes from question to question."""
        documents = "\n\n".join(block.text for block in part.blocks)
        question = self.asked[part.request.number]
        return [
            {"role": "system", "content": ROLE},
            {"role": "user", "content": f"{documents}\n\nQuestion: {question}\n\n{TASK}"},
        ]

    def tokens(self, part: Part) -> list[int]:
        """Return the prompt as the emulator makes it."""
        return render_chat([ChatMessage(message["role"], message["content"]) for message in self.messages(part)])


@lru_cache(maxsize=1)
def questions(count: int) -> Questions:
    """Follow-up questions on the Python standard library's documentation, from several readers in turn."""
    entries = read_standard_library()
    retriever = Bm25Retriever([block for entry in entries for block in entry.blocks])
    asked = list(ask(entries, count, seed=0))
    requests = tuple(
        AgentRequest(number, tuple(retriever.retrieve(one.query, PASSAGES)), 0, f"c{one.conversation}")
        for number, one in enumerate(asked)
    )
    return Questions(AgentWorkload("standard library", requests), [one.text for one in asked])


@dataclass
class Answered:
    """What the servers reported."""

    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    lost: int = 0
    """Prompts that had to go to another agent."""


async def ask_all(asked: Questions, arm: Arm, agents: Servers, kill_at: int | None) -> Answered:
    """Put every question to the agents, a few at a time, and follow up on what a dead agent did not answer."""
    outcome = Answered()
    turn = asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:

        async def read(part: Part) -> Part | None:
            """Return the part if its agent can't be reached."""
            body = {"model": MODEL, "messages": asked.messages(part), "max_tokens": 2}
            try:
                answer = await client.post(f"{agents.urls[part.agent]}/chat/completions", json=body)
            except httpx.TransportError:
                return part
            usage: dict[str, Any] = answer.raise_for_status().json()["usage"]
            part.prompt = range(usage["prompt_tokens"])
            part.cached = usage["prompt_tokens_details"]["cached_tokens"]
            outcome.prompts += 1
            outcome.prompt_tokens += len(part.prompt)
            outcome.cached_tokens += part.cached
            arm.answered(part)
            return None

        async def question(request: AgentRequest) -> None:
            try:
                parts = arm.give(request)
                while parts:
                    lost = [part for part in await asyncio.gather(*map(read, parts)) if part is not None]
                    outcome.lost += len(lost)
                    for agent in {part.agent for part in lost}.intersection(arm.live):
                        arm.fail(agent)
                    parts = arm.again(lost)
            finally:
                turn.release()

        tasks: list[asyncio.Task[None]] = []
        for request in asked.workload.requests:
            await turn.acquire()
            if request.number == kill_at:
                agents.kill_first()
            tasks.append(asyncio.create_task(question(request)))
        await asyncio.gather(*tasks)
    return outcome


def measure_http(count: int, agents: int) -> list[dict[str, Any]]:
    """Return cached tokens as servers report them, and as the simulation finds them for the same prompts."""
    asked = questions(count)
    capacity = (KV_BLOCKS - 1) * 16
    rows: list[dict[str, Any]] = []
    for name in ("round robin", "AgentRouter"):
        for kill_at in (None, count // 2):
            with servers(agents) as started:
                arm = ARMS[name](agents, 0, capacity)
                reported = asyncio.run(ask_all(asked, arm, started, kill_at))
            row: dict[str, Any] = {
                "arm": name,
                "requests": count,
                "agents": agents,
                "killed": kill_at is not None,
                "documents": asked.workload.documents,
                "answered": reported.prompts,
                "lost": reported.lost,
                "prompt_tokens": reported.prompt_tokens,
                "prefilled_tokens": reported.prompt_tokens - reported.cached_tokens,
                "hit_percent": round(100 * reported.cached_tokens / reported.prompt_tokens, 2),
            }
            if kill_at is None:
                run = simulate(
                    asked.workload, ARMS[name](agents, 0, capacity), capacity, "backlog", 0, prompts=asked.tokens
                )
                row["simulated_hit_percent"] = round(100 * run.cached_tokens / run.prompt_tokens, 2)
            rows.append(row)
    return rows
