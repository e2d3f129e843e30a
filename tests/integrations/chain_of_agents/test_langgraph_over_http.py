"""A graph whose agents are engines of their own: what each had cached, and what its prompts hold."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import pytest
from langchain_core.documents import Document
from langgraph.graph import END, START, StateGraph
from langgraph.types import RetryPolicy, Send
from openai import InternalServerError, OpenAI
from typing_extensions import TypedDict

from warmprefix import ContextBlock, ContextPlanner, EngineReport
from warmprefix_chain_of_agents.langgraph import AgentDocuments, GraphFanOut
from warmprefix_routing import AgentBounds, AgentRouter

pytestmark = pytest.mark.filterwarnings("ignore:Core Pydantic V1 functionality:UserWarning")

AGENTS = ("ann", "ben", "cem", "dan")
TURNS = 40
SYSTEM = "Summarise the facts in these documents about the question."


class State(TypedDict):
    question: str
    documents: list[Any]
    notes: Annotated[list[str], operator.add]


class Task(AgentDocuments):
    question: str


class Team:
    """An engine for each agent, and how they are asked."""

    def __init__(self, start_engine: Callable[[], Any]) -> None:
        self.engines = {name: start_engine() for name in AGENTS}
        self._clients = {
            name: OpenAI(base_url=engine.base_url, api_key="none", max_retries=0)
            for name, engine in self.engines.items()
        }

    def ask(self, agent: str, context: str, question: str) -> tuple[str, EngineReport]:
        messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{context}\n\n{question}"}]
        answer = self._clients[agent].chat.completions.create(model="warmprefix-emulator", messages=messages)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        report = EngineReport(
            answer.usage.prompt_tokens_details.cached_tokens, prompt_tokens=answer.usage.prompt_tokens
        )
        return str(answer.choices[0].message.content), report

    @property
    def prompts(self) -> list[str]:
        return [prompt for engine in self.engines.values() for prompt in engine.prompts]

    @property
    def computed(self) -> int:
        """Tokens that were not cached."""
        return sum(engine.prompt_tokens - engine.cached_tokens for engine in self.engines.values())

    @property
    def hit_ratio(self) -> float:
        cached = sum(engine.cached_tokens for engine in self.engines.values())
        return float(cached / sum(engine.prompt_tokens for engine in self.engines.values()))

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


@pytest.fixture
def team(start_engine: Callable[[], Any]) -> Iterator[Callable[[], Team]]:
    with ExitStack() as stack:

        def made() -> Team:
            new = Team(start_engine)
            stack.callback(new.close)
            return new

        yield made


def question(turn: Any) -> str:
    return f"{turn.question} ({turn.conversation}, turn {turn.turn})"


def compiled(edge: Any, node: Any) -> Any:
    builder = StateGraph(State)
    retries = RetryPolicy(initial_interval=0.001, jitter=False, retry_on=InternalServerError)
    builder.add_node("read", node, retry_policy=retries)
    builder.add_conditional_edges(START, edge, ["read"])
    builder.add_edge("read", END)
    return builder.compile()


def with_router(team: Team, fan_out: GraphFanOut) -> Any:
    def read(task: Task) -> dict[str, Any]:
        with fan_out.planning(task, preamble=SYSTEM) as plan:
            note, report = team.ask(task["agent"], plan.render(), task["question"])
            fan_out.commit(task, report=report, plan=plan)
            return {"notes": [note]}

    return compiled(fan_out, read)


def round_robin(team: Team) -> Any:
    """The same but for who reads what: the planner arranges these prompts too."""
    planner = ContextPlanner()

    def deal(state: State) -> list[Send]:
        dealt = {name: state["documents"][place :: len(AGENTS)] for place, name in enumerate(AGENTS)}
        return [
            Send("read", {"agent": name, "documents": documents, "question": state["question"]})
            for name, documents in dealt.items()
            if documents
        ]

    def read(task: Task) -> dict[str, Any]:
        blocks = [ContextBlock(document.page_content, id=document.id) for document in task["documents"]]
        with planner.planning(blocks, model=task["agent"], preamble=SYSTEM) as plan:
            return {"notes": [team.ask(task["agent"], plan.render(), task["question"])[0]]}

    return compiled(deal, read)


def state_of(turn: Any) -> dict[str, Any]:
    return {
        "question": question(turn),
        "documents": [Document(passage.text, id=passage.id) for passage in turn.passages],
    }


def check_nothing_lost(turns: Sequence[Any], prompts: Sequence[str]) -> None:
    """Each passage stands in full in one agent's prompt, and in no other's."""
    for turn in turns:
        asked = [prompt for prompt in prompts if prompt.endswith(question(turn))]
        for passage in turn.passages:
            shown = f"\n{passage.text}\n"
            assert sum(f"\n{prompt}\n".count(shown) for prompt in asked) == 1


def test_more_is_cached_than_with_round_robin(turns: Sequence[Any], team: Callable[[], Team]) -> None:
    asked = turns[:TURNS]
    routed, dealt = team(), team()
    router = AgentRouter(AGENTS)
    apps: Mapping[Team, Any] = {routed: with_router(routed, GraphFanOut(router, "read", carry=["question"]))}
    for each, app in {**apps, dealt: round_robin(dealt)}.items():
        for turn in asked:
            assert all(app.invoke(state_of(turn))["notes"])
        check_nothing_lost(asked, each.prompts)
    print(f"hit ratio: {dealt.hit_ratio:.3f} with round-robin, {routed.hit_ratio:.3f} with the router")  # noqa: T201
    print(f"computed tokens: {dealt.computed} with round-robin, {routed.computed} with the router")  # noqa: T201
    assert routed.hit_ratio > dealt.hit_ratio
    assert routed.computed < dealt.computed
    assert router.stats().held > 0
    assert router.stats().open == 0


async def test_failures_on_the_way_change_nothing_that_counts(turns: Sequence[Any], team: Callable[[], Team]) -> None:
    asked = turns[:10]
    loads: list[float] = []
    for failing in (False, True):
        each = team()
        router = AgentRouter(AGENTS, bounds=AgentBounds(window_tokens=10**12))
        fan_out = GraphFanOut(router, "read", carry=["question"])
        app = with_router(each, fan_out)
        for turn in asked:
            for engine in each.engines.values():
                engine.fail_next(2 if failing else 0)  # the third attempt is the last
            assert all((await app.ainvoke(state_of(turn), {"configurable": {"tenant": "acme"}}))["notes"])
            for engine in each.engines.values():
                engine.fail_next(0)
        check_nothing_lost(asked, each.prompts)
        loads.append(sum(router.load("acme").values()))
        assert router.stats().open == 0
        assert fan_out.planner.stats().commits == len(each.prompts)
        assert (sum(len(engine.bodies) for engine in each.engines.values()) > len(each.prompts)) is failing
    assert loads[1] == pytest.approx(loads[0], rel=1e-6)
