"""Agents of an application that restarts, or has several processes: routing and chats through a real server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from redis_servers import Server, wait_until
from warmprefix import Branch, ContextPlanner
from warmprefix_chain_of_agents import ChainOfAgents, InMemoryChats, Manager, Worker
from warmprefix_chain_of_agents.langgraph import AgentDocuments, GraphFanOut
from warmprefix_redis import SharedSettings
from warmprefix_routing import AgentRouter

pytestmark = pytest.mark.filterwarnings("ignore:Core Pydantic V1 functionality:UserWarning")

AGENTS = ("ann", "ben", "cem")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


class Shared(NamedTuple):
    """What a process of an application has of its own."""

    router: AgentRouter
    planner: ContextPlanner

    def close(self) -> None:
        wait_until(lambda: not self.router._sharing._queue, "all is sent")  # type: ignore[attr-defined]
        self.router.close()
        self.planner.close()


@pytest.fixture
def start_process(server: Server) -> Iterator[Callable[..., Shared]]:
    with ExitStack() as stack:

        def start(budget: float = 10.0) -> Shared:
            settings = SharedSettings(redis_url=server.url, store_budget=budget)
            router = stack.enter_context(AgentRouter.from_url(agents=AGENTS, settings=settings))
            planner = ContextPlanner.from_url(settings=settings)
            stack.callback(planner.close)
            return Shared(router, planner)

        yield start


# -- a chain -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conversation", [None, "chat"])
def test_a_restarted_chain_computes_as_much_as_one_that_never_ended(
    server: Server,
    start_engine: Any,
    connect: Any,
    documents: Any,
    start_process: Any,
    dangling: Any,
    conversation: str | None,
) -> None:
    pool = documents(12)
    questions = [[pool[(3 * turn + 5 * place) % 12] for place in range(4)] for turn in range(6)]

    def computed(restarts: bool) -> int:
        memory = InMemoryChats()  # stands for the application's database
        engines = {name: start_engine() for name in (*AGENTS, "manager")}
        clients = {name: connect(engine) for name, engine in engines.items()}
        workers = [Worker(name, clients[name], engines[name].model) for name in AGENTS]
        own, counted = start_process(), 0
        for turn, given in enumerate(questions):
            if restarts and turn:
                own.close()
                own = start_process()
            manager = Manager(clients["manager"], engines["manager"].model)
            chain = ChainOfAgents(workers, manager, router=own.router, planner=own.planner, mode="map", memory=memory)
            answer = chain.run(f"Question {turn}?", given, conversation=conversation, tenant="acme")
            usages: list[Any] = [report.usage for report in answer.workers]
            counted += sum([usage.prompt_tokens - usage.cached_tokens for usage in usages])
        own.close()
        for name in AGENTS:
            assert all(dangling(body, pool) == [] for body in engines[name].bodies)
        with server.client() as client:
            client.flushall()
        return counted

    assert computed(restarts=True) == computed(restarts=False)


# -- a graph whose agents' chats are known by their turns --------------------------------------------------------------


class State(TypedDict):
    documents: list[Any]
    chats: dict[str, Any]


class Task(AgentDocuments):
    chats: dict[str, Any]


class Chat(NamedTuple):
    """The chat of an agent, as the application keeps it; the planner never sees the text."""

    turn: str | None = None
    text: str = ""


class Application:
    """One process of an application whose agents keep chats."""

    def __init__(self, own: Shared) -> None:
        self.fan_out = GraphFanOut(own.router, "read", placement="tail", carry=["chats"], planner=own.planner)
        self.fails = False
        self.references = 0
        builder: Any = StateGraph(State)
        builder.add_node("read", self._read)
        builder.add_conditional_edges(START, self.fan_out, ["read"])
        builder.add_edge("read", END)
        self._graph = builder.compile()

    def ask(self, given: list[str], chats: dict[str, Chat], thread: str = "thread") -> dict[str, Chat]:
        """Return the chats after a turn."""
        self._after = dict(chats)
        self.references = 0
        self._graph.invoke({"documents": given, "chats": chats}, {"configurable": {"thread_id": thread}})
        return self._after

    def _read(self, task: Task) -> dict[str, Any]:
        chat = task["chats"].get(task["agent"], Chat())
        with self.fan_out.planning(task, conversation=Branch(after=chat.turn)) as plan:
            for planned in plan.blocks:
                if planned.reference is not None:
                    opening, text = planned.reference.opening, planned.block.text
                    assert text.startswith(opening)
                    assert chat.text.count(f"\n{opening}") == chat.text.count(f"\n{text}") > 0
            if self.fails:
                raise ConnectionError("the model did not answer")
            turn = uuid.uuid4().hex
            self.fan_out.planner.commit(plan, turn_id=turn)
        self.references += len(plan.references)
        self._after[task["agent"]] = Chat(turn, f"{chat.text}\n{plan.render()}")
        return {}


def test_chats_of_agents_are_known_by_their_turns_in_two_processes(documents: Any, start_process: Any) -> None:
    given = [document.text for document in documents(9)]
    one, two = Application(start_process()), Application(start_process())
    chats = one.ask(given[:6], {})
    sharing: Any = two.fan_out._router._sharing
    wait_until(lambda: sharing.stats().received or not sharing._streams, "the routing has arrived")
    kept = two.ask(given[:6], chats)
    assert two.references == 6, "each document goes to the agent whose chat has it"
    two.fails = True
    with pytest.raises(ConnectionError):
        two.ask(given[6:], kept)
    one.ask(given[6:], kept)
    assert one.references == 0, "no chat has what the model has not answered to"
    fork = one.ask(given, chats)
    assert one.references >= 6
    two.fails = False
    two.ask(given, fork)
    assert two.references == 9


def test_chats_without_a_server_are_read_in_full(server: Server, documents: Any, start_process: Any) -> None:
    given = [document.text for document in documents(4)]
    one = Application(start_process(budget=0.2))
    chats = one.ask(given, {})
    server.kill()
    lost = one.ask(given, chats)
    assert one.references == 0
    server.start()
    again = one.ask(given, lost)
    assert one.references == 0
    one.ask(given, again)


def test_the_shown_history_decides(documents: Any, start_process: Any) -> None:
    given = [document.text for document in documents(2)]
    fan_out = GraphFanOut(start_process().router, "read", placement="tail")
    send: Any = fan_out({"documents": given}, {"configurable": {"thread_id": "thread"}})[0]
    with fan_out.planning(send.arg, history=[], conversation=Branch(after="unknown")) as plan:
        assert not plan.references
    shown = [{"role": "user", "content": plan.render()}]
    with fan_out.planning(send.arg, history=shown, conversation=Branch(after="unknown")) as plan:
        assert len(plan.references) == len(send.arg["documents"])
    wrong: Any = "a name"
    with pytest.raises(TypeError, match="conversation must be a Branch or None, got str"):
        fan_out.planning(send.arg, conversation=wrong).__enter__()
