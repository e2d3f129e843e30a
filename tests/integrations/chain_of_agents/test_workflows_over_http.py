"""A workflow whose agents are engines of their own: what each had cached, and what its prompts hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from openai import AsyncOpenAI, InternalServerError
from workflows import Context, Workflow, step
from workflows.events import StartEvent, StopEvent

from warmprefix import ContextBlock, EngineReport
from warmprefix_chain_of_agents.workflows import DocumentsAssigned, DocumentsRead, WorkflowFanOut
from warmprefix_routing import AgentBounds, AgentRouter

AGENTS = ("ann", "ben", "cem", "dan")
TURNS = 40
SYSTEM = "Summarise the facts in these documents about the question."


class Asked(StartEvent):
    question: str
    passages: list[Any]


class Task(DocumentsAssigned):
    question: str


class Note(DocumentsRead):
    text: str


class ThreeTimes:
    def next(self, elapsed_time: float, attempts: int, error: Exception, **_: Any) -> float | None:
        return 0.001 if attempts < 3 and isinstance(error, InternalServerError) else None


class Team(Workflow):
    """An engine for each agent, and either the router or round-robin assigns documents; all else is the same."""

    def __init__(self, fan_out: WorkflowFanOut, start_engine: Callable[[], Any], routed: bool = True) -> None:
        super().__init__(timeout=60)
        self.fan_out = fan_out
        self.routed = routed
        self.engines = {name: start_engine() for name in AGENTS}

    @step
    async def deal(self, ctx: Context, ev: Asked) -> Task | None:
        if self.routed:
            self.fan_out.send(ctx, ev.passages, tenant="acme", question=ev.question)
            return None
        for part, name in enumerate(AGENTS):
            documents = ev.passages[part :: len(AGENTS)]
            task = Task(
                agent=name,
                documents=documents,
                assignment=ev.question,
                part=part,
                parts=len(AGENTS),
                tenant="acme",
                question=ev.question,
            )
            ctx.send_event(task)
        return None

    @step(num_workers=4, retry_policy=ThreeTimes())
    async def read(self, ctx: Context, ev: Task) -> Note:
        engine = self.engines[ev.agent]
        async with (
            AsyncOpenAI(base_url=engine.base_url, api_key="none", max_retries=0) as client,
            self.fan_out.aplanning(ev, preamble=SYSTEM) as plan,
        ):
            messages: Any = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"{plan.render()}\n\n{ev.question}"},
            ]
            answer = await client.chat.completions.create(
                model=engine.model, messages=messages, extra_body={"cache_salt": plan.cache_salt}
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            self.fan_out.commit(ev, report=EngineReport(answer.usage.prompt_tokens_details.cached_tokens), plan=plan)
        return Note.after(ev, text=answer.choices[0].message.content)

    @step
    async def join(self, ctx: Context, ev: Note) -> StopEvent | None:
        notes = self.fan_out.collect(ctx, ev)
        return None if notes is None else StopEvent(result=[note.text for note in notes])

    def prompts(self) -> list[str]:
        return [prompt for engine in self.engines.values() for prompt in engine.prompts]

    def computed(self) -> int:
        """Tokens that were not cached."""
        return sum(engine.prompt_tokens - engine.cached_tokens for engine in self.engines.values())

    def hit_ratio(self) -> float:
        cached = sum(engine.cached_tokens for engine in self.engines.values())
        return float(cached / sum(engine.prompt_tokens for engine in self.engines.values()))


def question(turn: Any) -> str:
    return f"{turn.question} ({turn.conversation}, turn {turn.turn})"


def passages(turn: Any) -> list[dict[str, str]]:
    return [{"text": passage.text, "id": passage.id} for passage in turn.passages]


def check_nothing_lost(turns: Sequence[Any], prompts: Sequence[str]) -> None:
    """Each passage stands in full in one agent's prompt, and in no other's."""
    for turn in turns:
        asked = [prompt for prompt in prompts if prompt.endswith(question(turn))]
        for passage in turn.passages:
            shown = f"\n{passage.text}\n"
            assert sum(f"\n{prompt}\n".count(shown) for prompt in asked) == 1


async def test_more_is_cached_than_with_round_robin(turns: Sequence[Any], start_engine: Callable[[], Any]) -> None:
    router = AgentRouter(AGENTS)
    routed = Team(WorkflowFanOut(router, Task), start_engine)
    dealt = Team(WorkflowFanOut(AgentRouter(AGENTS), Task), start_engine, routed=False)
    for team in (routed, dealt):
        for turn in turns[:TURNS]:
            assert all(await team.run(question=question(turn), passages=passages(turn)))
        check_nothing_lost(turns[:TURNS], team.prompts())
    print(f"hit ratio: {dealt.hit_ratio():.3f} with round-robin, {routed.hit_ratio():.3f} with the router")  # noqa: T201
    print(f"computed tokens: {dealt.computed()} with round-robin, {routed.computed()} with the router")  # noqa: T201
    assert routed.hit_ratio() > dealt.hit_ratio()
    assert routed.computed() < dealt.computed()
    assert router.stats().held > 0
    assert router.stats().open == 0


async def test_failures_on_the_way_change_nothing_that_counts(
    turns: Sequence[Any], start_engine: Callable[[], Any]
) -> None:
    router = AgentRouter(AGENTS, bounds=AgentBounds(window_tokens=10**12))
    team = Team(WorkflowFanOut(router, Task), start_engine)
    given = 0
    for turn in turns[:10]:
        for engine in team.engines.values():
            engine.fail_next(2)  # the third attempt is the last
        assert all(await team.run(question=question(turn), passages=passages(turn)))
        given += sum(ContextBlock(text).tokens for text in {passage.text for passage in turn.passages})
        for engine in team.engines.values():
            engine.fail_next(0)
    check_nothing_lost(turns[:10], team.prompts())
    assert sum(len(engine.bodies) for engine in team.engines.values()) == 3 * len(team.prompts())
    assert sum(router.load("acme").values()) == pytest.approx(given, rel=1e-6)
    assert router.stats().open == 0
    assert team.fan_out.planner.stats().commits == len(team.prompts())
