"""Arms of `warmprefix quality` for memories and agents.

    cd benchmarks
    warmprefix quality run --endpoint URL --model M --answers FILE --data locomo \
        --arms quality_arms:steady_list,quality_arms:memory_chat
    warmprefix quality run --endpoint URL --model M --answers FILE --data hotpotqa --arms quality_arms:routed_chain

Memories are the passages of each turn. `memory_list` shows the latest ones as a list in the system prompt, in relevance
order, as Mem0's examples do; `steady_list` the same in a steady order; `memory_chat` next to the question of each turn.
In `dealt_chain` three workers read the passages in turn, one after the other, and a manager answers from the last
summary (Zhang et al. 2024, Algorithm 1); in `routed_chain` the router chooses which worker reads which passage.

`placed` is the arm `planned` by a planner that knows where the model reads best, from the file that the environment
variable WARMPREFIX_POSITIONS names; `warmprefix quality report --positions FILE` writes it.
"""

from __future__ import annotations

import json
import os
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_chain_of_agents import ChainOfAgents, Manager, Prompts, Worker
from warmprefix_chain_of_agents.prompts import Unit
from warmprefix_mem0 import MemoryChat, SteadyOrder
from warmprefix_openai import messages_for
from warmprefix_tools.quality.arms import SYSTEM as READING
from warmprefix_tools.quality.arms import compared_with

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from warmprefix_tools.quality.questions import EvidenceQuestion

SYSTEM = "Answer from what you remember, in as few words as possible. If you do not remember it, reply: unanswerable."
WORKERS = 3
SETTINGS = {"temperature": 0, "max_tokens": 256}

_planner = ContextPlanner(policy=SteadyOrder, annotate="none")


@compared_with("quality_arms:memory_list")
def memory_list(question: EvidenceQuestion) -> list[dict[str, Any]]:
    return _listed(question, list(question.passages))


@compared_with("quality_arms:memory_list")
def steady_list(question: EvidenceQuestion) -> list[dict[str, Any]]:
    for turn in question.earlier:
        _steady(question, turn.passages)
    return _listed(question, _steady(question, question.passages))


@compared_with("quality_arms:memory_list")
def memory_chat(question: EvidenceQuestion) -> list[dict[str, Any]]:
    chat = MemoryChat(SYSTEM)
    for turn in question.earlier:
        chat.commit(chat.ask(turn.question, turn.passages), turn.answer)
    return chat.ask(question.question, question.passages)


def _steady(question: EvidenceQuestion, memories: tuple[str, ...]) -> list[str]:
    owner = question.id.rpartition("-")[0]  # of LoCoMo's ids, the chat
    with _planner.planning([ContextBlock(text) for text in memories], tenant=owner) as plan:
        return [block.text for block in plan.blocks]


def _listed(question: EvidenceQuestion, memories: list[str]) -> list[dict[str, Any]]:
    system = "\n".join([SYSTEM, "Memories:", *[f"- {memory}" for memory in memories]])
    turns = [
        message
        for turn in question.earlier
        for message in (
            {"role": "user", "content": turn.question},
            {"role": "assistant", "content": turn.answer},
        )
    ]
    return [{"role": "system", "content": system}, *turns, {"role": "user", "content": question.question}]


def placed(question: EvidenceQuestion) -> list[dict[str, Any]]:
    blocks = [ContextBlock(text) for text in question.passages]
    with _placing_planner().planning(blocks, preamble=READING) as plan:
        return messages_for(plan, question.question, preamble=READING)


@cache
def _placing_planner() -> ContextPlanner:
    (right,) = json.loads(Path(os.environ["WARMPREFIX_POSITIONS"]).read_text("utf-8")).values()
    return ContextPlanner(annotate="none", positions={"*": right})


@compared_with("quality_arms:dealt_chain")
async def dealt_chain(question: EvidenceQuestion, client: AsyncOpenAI, model: str) -> str:
    prompts, unit = Prompts(), None
    planner = ContextPlanner(annotate="labels")
    for worker in range(min(WORKERS, len(question.passages))):
        blocks = [ContextBlock(text) for text in question.passages[worker::WORKERS]]
        plan = planner.plan(blocks, order_locked=True)
        text = await _answer(
            client, model, prompts.worker_role, prompts.for_worker(plan.render(), unit, question.question)
        )
        planner.abandon(plan)
        unit = text
    assert unit is not None
    return await _answer(
        client, model, prompts.manager_role, prompts.for_manager([Unit(unit, ())], 0, question.question)
    )


async def _answer(client: AsyncOpenAI, model: str, system: str, user: str) -> str:
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": system}, {"role": "user", "content": user}],
        temperature=0,
        max_tokens=256,
    )
    return answer.choices[0].message.content or ""


@compared_with("quality_arms:dealt_chain")
async def routed_chain(question: EvidenceQuestion, client: AsyncOpenAI, model: str) -> str:
    answer = await _chain(client, model).arun(question.question, [ContextBlock(text) for text in question.passages])
    return answer.text


@lru_cache(maxsize=1)
def _chain(client: AsyncOpenAI, model: str) -> ChainOfAgents:
    workers = [Worker(f"worker-{number}", client, model, options=SETTINGS) for number in range(WORKERS)]
    return ChainOfAgents(workers, Manager(client, model, options=SETTINGS))
