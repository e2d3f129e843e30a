"""The fan-out in real graphs: every document is read by one agent, and what was read counts once."""

from __future__ import annotations

import operator
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain_core.documents import Document
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, RetryPolicy, Send, interrupt
from pydantic import BaseModel
from typing_extensions import TypedDict

from warmprefix import ContextBlock, ContextPlanner, EngineReport, MissingExtraError
from warmprefix.errors import NoAgentError
from warmprefix_chain_of_agents.documents import as_blocks
from warmprefix_chain_of_agents.langgraph import AgentDocuments, GraphFanOut
from warmprefix_routing import AgentBounds, AgentRouter

pytestmark = pytest.mark.filterwarnings("ignore:Core Pydantic V1 functionality:UserWarning")

AGENTS = ("ann", "ben", "cem")
TOKENS = 100


class State(TypedDict, total=False):
    question: str
    documents: list[Any]
    found: Annotated[list[dict[str, Any]], operator.add]


class Task(AgentDocuments):
    question: str


class Flaky:
    """A node that raises the first `failures` times that an agent is asked."""

    def __init__(self, fan_out: GraphFanOut, failures: int = 0, agents: tuple[str, ...] = AGENTS) -> None:
        self.fan_out = fan_out
        self.left = dict.fromkeys(agents, failures)
        self.asked = 0

    def __call__(self, task: Task) -> dict[str, Any]:
        with self.fan_out.planning(task) as plan:
            self.asked += 1
            if self.left.get(task["agent"], 0) > 0:
                self.left[task["agent"]] -= 1
                raise ConnectionError("unreachable")
            return {"found": [{**task, "texts": [planned.block.text for planned in plan.blocks]}]}


@pytest.fixture
def router() -> AgentRouter:
    """Forgets next to nothing of a load, so that loads can be added up."""
    return AgentRouter(AGENTS, bounds=AgentBounds(window_tokens=10**12))


def texts(count: int, start: int = 0) -> list[str]:
    return [f"Document {n}. ".ljust(TOKENS * 4, "x") for n in range(start, start + count)]


def config(thread: object = "chat-1", **configurable: Any) -> Any:
    return {"configurable": {"thread_id": thread, **configurable}}


def graph(fan_out: GraphFanOut, node: Any, checkpointer: Any = None, retries: int = 1) -> Any:
    policy = RetryPolicy(initial_interval=0.001, jitter=False, max_attempts=retries)
    builder: Any = StateGraph(State)
    builder.add_node("read", node, retry_policy=policy)
    builder.add_conditional_edges(START, fan_out, fan_out.destinations)
    builder.add_edge("read", END)
    return builder.compile(checkpointer=checkpointer)


def nothing(task: Task) -> dict[str, Any]:
    return {"found": [{**task}]}


def read_by(found: list[dict[str, Any]]) -> dict[str, str]:
    """Return the one reader of each text."""
    pairs = [(text, task["agent"]) for task in found for text in task["texts"]]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def check_counted_once(router: AgentRouter, documents: int) -> None:
    assert sum(router.load().values()) == pytest.approx(documents * TOKENS, rel=1e-6)
    assert router.stats().open == 0


# -- whole graphs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
async def test_a_document_that_comes_again_goes_to_who_read_it(router: AgentRouter, way: str) -> None:
    fan_out = GraphFanOut(router, "read", carry=["question"])
    app = graph(fan_out, Flaky(fan_out))

    async def ask(documents: list[str]) -> list[dict[str, Any]]:
        state = {"question": "Why?", "documents": documents}
        if way == "invoke":
            return list(app.invoke(state)["found"])
        if way == "ainvoke":
            return list((await app.ainvoke(state))["found"])
        if way == "stream":
            updates = list(app.stream(state, stream_mode="updates"))
        else:
            updates = [update async for update in app.astream(state, stream_mode="updates")]
        return [task for update in updates for task in update["read"]["found"]]

    first = read_by(await ask(texts(9)))
    again = await ask([*reversed(texts(9))])
    assert read_by(again) == first
    assert set(first) == {*texts(9)}
    assert {*first.values()} == {*AGENTS}
    assert {task["question"] for task in again} == {"Why?"}
    check_counted_once(router, 2 * 9)
    assert router.stats().held == 9
    assert fan_out.planner.stats().commits == 2 * len(AGENTS)


def test_each_agent_has_its_node(router: AgentRouter) -> None:
    fan_out = GraphFanOut(router, {name: f"read_{name}" for name in AGENTS})
    builder: Any = StateGraph(State)
    for name in AGENTS:
        builder.add_node(f"read_{name}", lambda task, name=name: {"found": [{"node": name, "agent": task["agent"]}]})
    builder.add_conditional_edges(START, fan_out, fan_out.destinations)
    found = builder.compile().invoke({"documents": texts(9)})["found"]
    assert sorted(task["node"] for task in found) == sorted(AGENTS)
    assert all(task["node"] == task["agent"] for task in found)


def test_one_prompt_a_document(router: AgentRouter) -> None:
    fan_out = GraphFanOut(router, "read", together=False)
    node = Flaky(fan_out, failures=1)
    documents = [*texts(5), texts(1)[0]]
    found = graph(fan_out, node, retries=4).invoke({"documents": documents})["found"]
    assert sorted(len(task["documents"]) for task in found) == [1, 1, 1, 1, 2]
    assert {*read_by(found)} == {*texts(5)}
    check_counted_once(router, 5)


def test_what_a_document_is_stays_as_it_was(router: AgentRouter) -> None:
    fan_out = GraphFanOut(router, "read")
    listed = [
        "A text.",
        Document("A document.", id="d1", metadata={"source": "a.txt"}),
        Document("A document.", metadata={"source": "b.txt"}),  # the same text elsewhere is another document
        {"page_content": "A mapping.", "id": 7},
        ContextBlock("A block.", id="b1", tokens=3, score=0.5, pinned="end"),
    ]
    app = graph(fan_out, lambda task: {"found": [{**task}]})
    found = app.invoke({"documents": listed})["found"]
    documents = [document for task in found for document in task["documents"]]
    assert len(documents) == len(listed)
    assert all(any(document is original for document in documents) for original in listed[:-1])
    blocks = {block.text: block for block in as_blocks(documents)}
    block = blocks["A block."]
    assert (block.id, block.tokens, block.score, block.pinned) == ("b1", 3, 0.5, "end")
    assert {text: blocks[text].id for text in ("A document.", "A mapping.")} == {"A document.": None, "A mapping.": "7"}
    together = [task for task in found if listed[1] in task["documents"]]
    assert listed[2] in together[0]["documents"]


def test_no_documents(router: AgentRouter) -> None:
    assert graph(GraphFanOut(router, "read"), nothing).invoke({"documents": []})["documents"] == []
    fan_out = GraphFanOut(router, "read", otherwise="report")
    builder: Any = StateGraph(State)
    builder.add_node("read", nothing)
    builder.add_node("report", lambda _: {"found": [{"message": "nothing"}]})
    builder.add_conditional_edges(START, fan_out, fan_out.destinations)
    assert builder.compile().invoke({"documents": []})["found"] == [{"message": "nothing"}]


def test_two_fan_outs_from_one_node_and_a_subgraph_around_them(router: AgentRouter) -> None:
    laws = GraphFanOut(router, "read_laws", documents="laws")
    cases = GraphFanOut(router, "read_cases", documents="cases", planner=laws.planner)

    class Library(State, total=False):
        laws: list[str]
        cases: list[str]

    inner: Any = StateGraph(Library)
    inner.add_node("read_laws", Flaky(laws, failures=1), retry_policy=RetryPolicy(initial_interval=0.001))
    inner.add_node("read_cases", Flaky(cases))
    for fan_out in (laws, cases):
        inner.add_conditional_edges(START, fan_out, fan_out.destinations)
    outer: Any = StateGraph(Library)
    outer.add_node("library", inner.compile())
    outer.add_edge(START, "library")
    app = outer.compile(checkpointer=InMemorySaver())
    result = app.invoke({"laws": texts(4), "cases": texts(5, start=4)}, config(tenant="acme"))
    assert {*read_by(result["found"])} == {*texts(9)}
    assert {task["tenant"] for task in result["found"]} == {"acme"}
    assert {task["conversation"] for task in result["found"]} == {"chat-1"}
    assert sum(router.load("acme").values()) == pytest.approx(9 * TOKENS)
    assert router.stats().open == 0


def test_a_graph_as_an_agents_node(router: AgentRouter) -> None:
    fan_out = GraphFanOut(router, "read", carry=["question"])

    class Found(TypedDict, total=False):
        found: Annotated[list[dict[str, Any]], operator.add]

    class Reading(Task, Found):
        pass

    inner: Any = StateGraph(Reading, output_schema=Found)
    inner.add_node("think", Flaky(fan_out))
    inner.add_edge(START, "think")
    found = graph(fan_out, inner.compile()).invoke({"question": "Why?", "documents": texts(6)})["found"]
    assert {*read_by(found)} == {*texts(6)}
    check_counted_once(router, 6)


# -- failures, and what LangGraph does about them ----------------------------------------------------------------


def test_a_node_that_is_retried_counts_once(router: AgentRouter) -> None:
    fan_out = GraphFanOut(router, "read")
    node = Flaky(fan_out, failures=2)
    found = graph(fan_out, node, retries=3).invoke({"documents": texts(6)})["found"]
    assert {*read_by(found)} == {*texts(6)}
    assert node.asked == 3 * len(AGENTS)
    check_counted_once(router, 6)
    assert not fan_out._open
    stats = fan_out.planner.stats()
    assert (stats.commits, stats.plans) == (len(AGENTS), 3 * len(AGENTS))
    graph(fan_out, node).invoke({"documents": texts(6)})
    assert router.stats().held == 6  # although the attempts before the last were taken back


def test_unread_documents_are_withdrawn(router: AgentRouter) -> None:
    fan_out = GraphFanOut(router, "read")
    with pytest.raises(ConnectionError):
        graph(fan_out, Flaky(fan_out, failures=9)).invoke({"documents": texts(6)})
    assert sum(router.load().values()) < 6 * TOKENS  # of those that LangGraph let begin
    for share in [*fan_out._open.values()]:
        assert None in share.values()
    assert fan_out.planner.stats().commits == 0


def test_a_resumed_graph_counts_once(router: AgentRouter) -> None:
    """One agent fails for good; resumed, only its node runs again."""
    fan_out = GraphFanOut(router, "read")
    node = Flaky(fan_out, failures=1, agents=AGENTS[:1])
    app = graph(fan_out, node, InMemorySaver())
    with pytest.raises(ConnectionError):
        app.invoke({"documents": texts(9)}, config())
    found = app.invoke(None, config())["found"]
    assert {*read_by(found)} == {*texts(9)}
    check_counted_once(router, 9)


def test_a_replayed_graph_counts_once(router: AgentRouter) -> None:
    """Time travel to where the agents had been sent their documents."""
    fan_out = GraphFanOut(router, "read")
    node = Flaky(fan_out)
    app = graph(fan_out, node, InMemorySaver())
    app.invoke({"documents": texts(9)}, config())
    sent = next(state for state in app.get_state_history(config()) if "read" in state.next)
    app.invoke(None, sent.config)
    assert node.asked == 2 * len(AGENTS)
    check_counted_once(router, 9)


def test_an_interrupted_node_counts_once(router: AgentRouter) -> None:
    fan_out = GraphFanOut(router, "read")

    def node(task: Task) -> dict[str, Any]:
        with fan_out.reading(task) as blocks:
            if task["part"] == 0:
                interrupt("May I?")
            return {"found": [{**task, "texts": [block.text for block in blocks]}]}

    app = graph(fan_out, node, InMemorySaver())
    app.invoke({"documents": texts(9)}, config())
    found = app.invoke(Command(resume="Yes."), config())["found"]
    assert {*read_by(found)} == {*texts(9)}
    check_counted_once(router, 9)


LISTED = [
    *texts(4),
    Document("A document.", id="d1", metadata={"source": "a.txt"}),
    {"text": "A mapping."},
    ContextBlock("A block.", id="b1", tokens=3, pinned="end"),
]


@pytest.mark.filterwarnings("ignore:.*datetime adapter is deprecated:DeprecationWarning")
def test_a_graph_resumed_elsewhere_reads_the_same(router: AgentRouter, tmp_path: Path) -> None:
    """All that the second process has of the first is the file."""
    with SqliteSaver.from_conn_string(str(tmp_path / "graph.sqlite")) as saver:
        fan_out = GraphFanOut(router, "read")
        with pytest.raises(ConnectionError):
            graph(fan_out, Flaky(fan_out, failures=1), saver).invoke({"documents": LISTED}, config())
    with SqliteSaver.from_conn_string(str(tmp_path / "graph.sqlite")) as saver:
        other = AgentRouter(AGENTS)
        fan_out = GraphFanOut(other, "read")
        found = graph(fan_out, Flaky(fan_out), saver).invoke(None, config())["found"]
    assert {*read_by(found)} == {*texts(4), "A document.", "A mapping.", "A block."}
    restored = [document for task in found for document in task["documents"]]
    assert [document.metadata for document in restored if isinstance(document, Document)] == [{"source": "a.txt"}]
    assert other.stats().assignments == 0


def test_what_an_agent_could_not_read_goes_to_the_others(router: AgentRouter) -> None:
    fan_out = GraphFanOut(router, "read", carry=["question"])
    broken = router.assign(texts(1)).blocks[0].agent

    def node(task: Task) -> dict[str, Any]:
        found, left = [], [task]
        while left:
            task = left.pop()
            try:
                with fan_out.planning(task) as plan:
                    if task["agent"] == broken:
                        raise ConnectionError("unreachable")
                    found.append({**task, "texts": [planned.block.text for planned in plan.blocks]})
            except ConnectionError:
                router.fail(task["agent"])
                left += [send.arg for send in fan_out.reassign(task)]
        return {"found": found}

    found = graph(fan_out, node).invoke({"question": "Why?", "documents": texts(9)})["found"]
    read = read_by(found)
    assert {*read} == {*texts(9)}
    assert broken not in read.values()
    assert {task["question"] for task in found} == {"Why?"}
    assert router.stats().open == 1  # the share whose node failed
    assert router.stats().failures == 1


def test_no_agent_is_left(router: AgentRouter) -> None:
    for name in AGENTS:
        router.fail(name)
    with pytest.raises(NoAgentError):
        graph(GraphFanOut(router, "read"), nothing).invoke({"documents": texts(1)})


def test_an_agent_that_left_is_passed_over(router: AgentRouter) -> None:
    fan_out = GraphFanOut(router, dict.fromkeys(AGENTS, "read"))
    app = graph(fan_out, Flaky(fan_out))
    router.leave("ann")
    assert {*read_by(app.invoke({"documents": texts(9)})["found"]).values()} == {"ben", "cem"}
    (send,) = fan_out({"documents": texts(1)}, config())
    assert isinstance(send, Send)
    router.leave("cem" if send.arg["agent"] == "ben" else "ben")
    with pytest.raises(NoAgentError, match="no agent is left"):
        fan_out.reassign(send.arg)
    router.leave(send.arg["agent"])
    with pytest.raises(NoAgentError, match="no agent is left"):
        fan_out({"documents": texts(1)}, config())
    router.join("ann")
    (send,) = fan_out({"documents": texts(1)}, config())
    assert isinstance(send, Send)
    assert send.arg["agent"] == "ann"


def test_an_agent_that_failed_meanwhile_may_still_answer(router: AgentRouter) -> None:
    fan_out = GraphFanOut(router, "read")

    def node(task: Task) -> dict[str, Any]:
        with fan_out.reading(task):
            router.fail(task["agent"])
        fan_out.abandon(task)
        with fan_out.reading(task) as blocks:
            return {"found": [{**task, "texts": [block.text for block in blocks]}]}

    assert {*read_by(graph(fan_out, node).invoke({"documents": texts(9)})["found"])} == {*texts(9)}
    assert router.load() == {}


# -- one call at a time ------------------------------------------------------------------------------------------


def payloads(sent: list[Any]) -> Iterator[Any]:
    for send in sent:
        assert isinstance(send, Send)
        yield send.arg


def test_the_engines_report_is_passed_on(router: AgentRouter) -> None:
    """The router believes a cold engine, and forgets what it thought to be there."""
    fan_out = GraphFanOut(router, "read")
    state = {"documents": texts(3)}
    for cached in (0, 0):
        for payload in payloads(fan_out(state, config())):
            with fan_out.planning(payload) as plan:
                assert fan_out.commit(payload, report=EngineReport(cached, prompt_tokens=TOKENS), plan=plan)
            assert not fan_out.commit(payload)
            assert not fan_out.abandon(payload)
    assert router.stats().stale > 0


def test_tenants_share_nothing(router: AgentRouter) -> None:
    by_config = GraphFanOut(router, "read")
    by_state = GraphFanOut(router, "read", tenant=lambda state, config: state["owner"])
    fixed = GraphFanOut(router, "read", tenant="acme")
    state = {"documents": texts(3), "owner": "umbrella"}
    for fan_out, tenant in ((by_config, "initech"), (by_state, "umbrella"), (fixed, "acme")):
        for payload in payloads(fan_out(state, config(tenant="initech"))):
            assert payload["tenant"] == tenant
            with fan_out.planning(payload) as plan:
                assert plan.scope.tenant == tenant
                assert plan.cache_salt is not None
        assert sum(router.load(tenant).values()) == pytest.approx(3 * TOKENS)
    assert router.stats().held == 0


def test_a_tenant_is_asked_for_once(router: AgentRouter) -> None:
    asked = iter(["acme", "umbrella"])
    for payload in payloads(GraphFanOut(router, "read", tenant=lambda *_: next(asked))({"documents": texts(3)}, {})):
        assert payload["tenant"] == "acme"
    assert next(asked) == "umbrella"


@pytest.mark.parametrize(("thread", "conversation"), [(0, "0"), ("", None), (None, None), ("chat", "chat")])
def test_what_the_state_has_is_carried_if_only_none(router: AgentRouter, thread: Any, conversation: str | None) -> None:
    fan_out = GraphFanOut(router, "read", carry=["question", "absent"])
    for payload in payloads(fan_out({"documents": texts(1), "question": None}, config(thread))):
        assert payload["question"] is None
        assert "absent" not in payload
        assert payload["conversation"] == conversation


def test_an_agents_chat_refers_only_to_its_own_messages(router: AgentRouter) -> None:
    fan_out = GraphFanOut(router, "read", placement="tail")
    chats: dict[str, list[dict[str, str]]] = {name: [] for name in AGENTS}
    for turn in range(3):
        for payload in payloads(fan_out({"documents": texts(6)}, config(7))):
            chat = chats[payload["agent"]]
            with fan_out.planning(payload, history=chat) as plan:
                assert len(plan.references) == (len(payload["documents"]) if turn else 0)
                chat.append({"role": "user", "content": plan.render()})
    for name, chat in chats.items():
        payload = {"agent": name, "documents": texts(6), "assignment": "x", "part": 0, "conversation": "7"}
        with fan_out.planning(payload) as plan:
            assert not plan.references  # because the chat was not shown
        shown = [text for text in texts(6) if text in chat[0]["content"]]
        with fan_out.planning(payload, history=chat) as plan:
            assert len(plan.references) == len(shown)


def test_unread_shares_are_withdrawn(router: AgentRouter) -> None:
    fan_out = GraphFanOut(router, "read", max_open=2)
    for start in (0, 3, 6):
        fan_out({"documents": texts(3, start)}, config())
    assert sum(router.load().values()) == pytest.approx(2 * 3 * TOKENS)
    assert router.stats().open == 2


@pytest.mark.parametrize(
    "documents", [None, "one text", {"text": "one mapping"}, Document("one document"), 7, [None], [b"x"]]
)
def test_what_is_no_list_of_documents_is_refused(router: AgentRouter, documents: Any) -> None:
    with pytest.raises(TypeError, match="documents"):
        GraphFanOut(router, "read")({"documents": documents}, config())


def test_mistakes_are_named(router: AgentRouter) -> None:
    wrong: Any = "router"
    with pytest.raises(TypeError, match="router must be an AgentRouter, got str"):
        GraphFanOut(wrong, "read")
    with pytest.raises(TypeError, match="planner must be"):
        GraphFanOut(router, "read", planner=wrong)
    with pytest.raises(TypeError, match="carry must be keys of the state, got one str, 'question'"):
        GraphFanOut(router, "read", carry="question")
    with pytest.raises(ValueError, match="carry must not name keys of AgentDocuments, got agent, part"):
        GraphFanOut(router, "read", carry=["question", "part", "agent"])
    with pytest.raises(ValueError, match="placement must be"):
        GraphFanOut(router, "read", placement=wrong)
    with pytest.raises(ValueError, match=r"together must be True with placement='tail', .* got False"):
        GraphFanOut(router, "read", placement="tail", together=False)
    with pytest.raises(ValueError, match="max_open must be 1 or more, got 0"):
        GraphFanOut(router, "read", max_open=0)
    with pytest.raises(ValueError, match="agents must be registered, got 'zoe'"):
        GraphFanOut(router, {"zoe": "read"})({"documents": texts(1)}, config())


def test_a_planner_may_be_shared(router: AgentRouter) -> None:
    planner = ContextPlanner()
    assert GraphFanOut(router, "read", planner=planner).planner is planner


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [("langgraph", "langgraph.types", "langchain"), ("workflows", "workflows", "llamaindex")],
)
def test_without_the_framework_the_error_names_the_command(module: str, missing: str, extra: str) -> None:
    lines = [
        "import sys",
        f"sys.modules[{missing!r}] = None",
        "import warmprefix_chain_of_agents",
        "from warmprefix import MissingExtraError",
        "try:",
        f"    import warmprefix_chain_of_agents.{module}",
        "except MissingExtraError as error:",
        "    print(error)",
    ]
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str(MissingExtraError(extra, module))


@pytest.mark.parametrize("kind", ["dataclass", "pydantic"])
def test_a_state_may_be_an_object(router: AgentRouter, kind: str) -> None:
    class Model(BaseModel):
        documents: list[str]
        found: Annotated[list[dict[str, Any]], operator.add] = []

    @dataclass
    class Data:
        documents: list[str]
        found: Annotated[list[dict[str, Any]], operator.add] = field(default_factory=list)

    builder: Any = StateGraph(Model if kind == "pydantic" else Data)
    fan_out = GraphFanOut(router, "read", carry=["absent"])
    builder.add_node("read", Flaky(fan_out))
    builder.add_conditional_edges(START, fan_out, fan_out.destinations)
    found = builder.compile().invoke({"documents": texts(6)})["found"]
    assert {*read_by(found)} == {*texts(6)}
    check_counted_once(router, 6)
