"""The fan-out in real workflows: every document is read by one agent, and what was read counts once."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections import Counter
from typing import Any

import pytest

with warnings.catch_warnings():  # pytest ignores the below only once this file is read
    warnings.filterwarnings("ignore", "The 'validate_default' attribute")
    from llama_index.core.schema import NodeWithScore, TextNode
from workflows import Context, Workflow, step
from workflows.context.serializers import JsonSerializer
from workflows.errors import WorkflowCancelledByUser
from workflows.events import StartEvent, StopEvent

from warmprefix import ContextBlock, EngineReport
from warmprefix.errors import NoAgentError
from warmprefix_chain_of_agents.workflows import DocumentsAssigned, DocumentsRead, WorkflowFanOut
from warmprefix_routing import AgentBounds, AgentRouter

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'validate_default' attribute"),
    pytest.mark.filterwarnings("ignore:There is no current event loop:DeprecationWarning"),
]

AGENTS = ("ann", "ben", "cem")
TOKENS = 100


class Asked(StartEvent):
    question: str = "Why?"
    documents: list[Any]


class Twice:
    """Retries at once; what the framework brings for it differs between its versions."""

    def next(self, elapsed_time: float, attempts: int, error: Exception, **_: Any) -> float | None:
        return 0.001 if attempts <= 2 else None


class Found(DocumentsRead):
    texts: list[str]
    question: str
    by: str


class Team(Workflow):
    """Its first `failures` readings fail, each agent's."""

    def __init__(self, fan_out: WorkflowFanOut, failures: int = 0, **options: Any) -> None:
        super().__init__(timeout=30, **options)
        self.fan_out = fan_out
        self.left: dict[str, int] = dict.fromkeys(AGENTS, failures)
        self.attempts = 0
        self.most_at_once = self.at_once = 0
        self.handed: list[DocumentsAssigned] = []
        self.extra: list[Any] = []

    @step
    async def deal(self, ctx: Context, ev: Asked) -> DocumentsAssigned | StopEvent | None:
        documents = [*ev.documents, *self.extra]
        sent = self.fan_out.send(
            ctx, documents, conversation=ev.get("conversation"), tenant=ev.get("tenant"), question=ev.question
        )
        return None if sent else StopEvent(result=[])

    @step(num_workers=4, retry_policy=Twice())
    async def read(self, ctx: Context, ev: DocumentsAssigned) -> Found:
        self.handed.append(ev)
        async with self.fan_out.aplanning(ev) as plan:
            self.attempts += 1
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            await self.think()
            self.at_once -= 1
            if self.left[ev.agent] > 0:
                self.left[ev.agent] -= 1
                raise ConnectionError("unreachable")
            texts = [planned.block.text for planned in plan.blocks]
        return Found.after(ev, texts=texts, question=ev.question, by=ev.agent)

    async def think(self) -> None:
        await asyncio.sleep(0.01)

    @step
    async def join(self, ctx: Context, ev: Found) -> StopEvent | None:
        found = self.fan_out.collect(ctx, ev)
        return None if found is None else StopEvent(result=found)


@pytest.fixture
def router() -> AgentRouter:
    """Forgets next to nothing of a load, so that loads can be added up."""
    return AgentRouter(AGENTS, bounds=AgentBounds(window_tokens=10**12))


def texts(count: int, start: int = 0) -> list[str]:
    return [f"Document {n}. ".ljust(TOKENS * 4, "x") for n in range(start, start + count)]


def read_by(found: list[Found]) -> dict[str, str]:
    """Return the one reader of each text."""
    pairs = [(text, read.agent) for read in found for text in read.texts]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def check_counted_once(router: AgentRouter, documents: int, tenant: str | None = None) -> None:
    assert sum(router.load(tenant).values()) == pytest.approx(documents * TOKENS, rel=1e-6)
    assert router.stats().open == 0


async def test_a_document_that_comes_again_goes_to_who_read_it(router: AgentRouter) -> None:
    team = Team(WorkflowFanOut(router))
    first: Any = await team.run(documents=texts(9))
    again: Any = await team.run(documents=[*reversed(texts(9))])
    assert read_by(again) == read_by(first)
    assert {*read_by(first)} == {*texts(9)}
    assert {*read_by(first).values()} == {*AGENTS}
    assert [read.part for read in again] == [0, 1, 2]
    assert texts(9)[-1] in again[0].texts  # the most relevant one now
    assert {read.question for read in again} == {"Why?"}
    assert team.most_at_once > 1
    check_counted_once(router, 2 * 9)
    assert router.stats().held == 9
    assert team.fan_out.planner.stats().commits == 2 * len(AGENTS)


async def test_a_step_that_is_retried_counts_once(router: AgentRouter) -> None:
    team = Team(WorkflowFanOut(router), failures=2)
    found = await team.run(documents=texts(6), tenant="acme")
    assert {*read_by(found)} == {*texts(6)}
    assert team.attempts == 3 * len(AGENTS)
    check_counted_once(router, 6, "acme")
    assert team.fan_out.planner.stats().commits == len(AGENTS)
    await team.run(documents=texts(6), tenant="acme")
    assert router.stats().held == 6
    assert router.load() == {}


async def test_one_prompt_a_document(router: AgentRouter) -> None:
    team = Team(WorkflowFanOut(router, together=False), failures=1)
    documents = [*texts(5), texts(1)[0]]
    found: Any = await team.run(documents=documents)
    assert [read.texts for read in found] == [[text] for text in texts(5)]
    assert Counter(len(event.documents) for event in team.handed)[2] in (1, 2)  # twice, if it was retried
    check_counted_once(router, 5)


async def test_unread_documents_are_withdrawn(router: AgentRouter) -> None:
    team = Team(WorkflowFanOut(router), failures=9)
    with pytest.raises(Exception, match="unreachable"):
        await team.run(documents=texts(6))
    assert sum(router.load().values()) < 6 * TOKENS
    assert team.fan_out.planner.stats().commits == 0


async def test_no_documents(router: AgentRouter) -> None:
    assert await Team(WorkflowFanOut(router)).run(documents=[]) == []


async def test_no_agent_is_left(router: AgentRouter) -> None:
    for name in AGENTS:
        router.fail(name)
    with pytest.raises(NoAgentError):
        await Team(WorkflowFanOut(router)).run(documents=texts(1))


async def test_only_some_of_the_agents(router: AgentRouter) -> None:
    found = await Team(WorkflowFanOut(router, agents=["ann", "cem"])).run(documents=texts(8))
    assert {*read_by(found).values()} == {"ann", "cem"}


async def test_many_runs_at_once_keep_apart(router: AgentRouter) -> None:
    team = Team(WorkflowFanOut(router), failures=1)
    asked = [texts(6, start) for start in range(0, 24, 3)]
    answers = await asyncio.gather(*[team.run(documents=documents) for documents in asked])
    for documents, found in zip(asked, answers, strict=True):
        assert {*read_by(found)} == {*documents}
    check_counted_once(router, 6 * len(asked))


class Laws(DocumentsAssigned):
    question: str


class Cases(DocumentsAssigned):
    documents: list[TextNode]


class FoundLaws(DocumentsRead):
    texts: list[str]


class FoundCases(DocumentsRead):
    texts: list[str]


class Court(Workflow):
    """Two fan-outs in one workflow, each with events of its own."""

    def __init__(self, router: AgentRouter) -> None:
        super().__init__(timeout=30)
        self.laws, self.cases = WorkflowFanOut(router, Laws), WorkflowFanOut(router, Cases)

    @step
    async def deal(self, ctx: Context, ev: Asked) -> Laws | Cases | None:
        self.laws.send(ctx, texts(4), question=ev.question)
        self.cases.send(ctx, ev.documents)
        return None

    @step
    async def read_laws(self, ctx: Context, ev: Laws) -> FoundLaws:
        with self.laws.reading(ev) as blocks:
            return FoundLaws.after(ev, texts=[block.text for block in blocks])

    @step
    async def read_cases(self, ctx: Context, ev: Cases) -> FoundCases:
        with self.cases.reading(ev):
            return FoundCases.after(ev, texts=[node.get_content() for node in ev.documents])

    @step
    async def join_laws(self, ctx: Context, ev: FoundLaws) -> StopEvent | None:
        return await self.join(ctx, "laws", self.laws.collect(ctx, ev))

    @step
    async def join_cases(self, ctx: Context, ev: FoundCases) -> StopEvent | None:
        return await self.join(ctx, "cases", self.cases.collect(ctx, ev))

    async def join(self, ctx: Context, kind: str, found: Any) -> StopEvent | None:
        if found is None:
            return None
        mine = [text for read in found for text in read.texts]
        async with ctx.store.edit_state() as state:
            state[kind] = mine
            both = {**state}
        return StopEvent(result=both["laws"] + both["cases"]) if len(both) == 2 else None


async def test_two_fan_outs_in_one_workflow(router: AgentRouter) -> None:
    nodes = [TextNode(text=text) for text in texts(5, start=4)]
    found = await Court(router).run(documents=nodes)
    assert Counter(found) == Counter(texts(9))
    check_counted_once(router, 9)


# -- what an event holds, and what storing it leaves of it -------------------------------------------------------

LISTED = [
    "A text.",
    TextNode(text="A node.", id_="n1", metadata={"source": "a.txt"}),
    NodeWithScore(node=TextNode(text="A scored node.", id_="n2"), score=0.5),
    {"text": "A mapping."},
    ContextBlock("A block.", id="b1", tokens=3, pinned="end"),
]
TEXTS = {"A text.", "A node.", "A scored node.", "A mapping.", "A block."}


async def test_what_a_document_is_stays_as_it_was(router: AgentRouter) -> None:
    team = Team(WorkflowFanOut(router))
    found = await team.run(documents=LISTED)
    assert {*read_by(found)} == TEXTS
    handed = [document for event in team.handed for document in event.documents]
    assert len(handed) == len(LISTED)
    assert all(any(document is original for document in handed) for original in LISTED[1:3])
    assert router.stats().open == 0


async def test_a_workflow_restored_elsewhere_reads_the_same(router: AgentRouter) -> None:
    """All that the second process has of the first is JSON."""
    reading = asyncio.Event()

    class Slow(Team):
        async def think(self) -> None:
            reading.set()
            await asyncio.Event().wait()

    slow = Slow(WorkflowFanOut(router))
    slow.extra = LISTED[-1:]  # which an event of the workflow's own could not hold and be stored
    handler = slow.run(documents=LISTED[:-1])
    await reading.wait()
    assert handler.ctx is not None
    stored = json.dumps(handler.ctx.to_dict(serializer=JsonSerializer()))
    await handler.cancel_run()
    with pytest.raises(WorkflowCancelledByUser):
        await handler
    assert sum(router.load().values()) == 0  # what was being read was taken back

    other = AgentRouter(AGENTS)
    team = Team(WorkflowFanOut(other))
    context: Context[Any] = Context.from_dict(team, json.loads(stored), serializer=JsonSerializer())
    found = await team.run(ctx=context)
    assert {*read_by(found)} == TEXTS
    assert other.stats().assignments == 0


def test_an_event_of_ones_own_gives_nodes_back() -> None:
    node = TextNode(text="A node.", id_="n1", metadata={"source": "a.txt"})
    event = Cases(agent="ann", documents=[node], assignment="x", part=0, parts=1)
    stored = JsonSerializer().serialize(event)
    assert JsonSerializer().deserialize(stored).documents == [node]


# -- one call at a time ------------------------------------------------------------------------------------------


class Recording:
    """In a context's place where nothing but the events matters."""

    def __init__(self) -> None:
        self.sent: list[DocumentsAssigned] = []

    def send_event(self, message: DocumentsAssigned) -> None:
        self.sent.append(message)


def sent(fan_out: WorkflowFanOut, documents: Any, **options: Any) -> list[DocumentsAssigned]:
    context: Any = Recording()
    assert fan_out.send(context, documents, **options) == len(context.sent)
    return list(context.sent)


def test_the_engines_report_is_passed_on(router: AgentRouter) -> None:
    fan_out = WorkflowFanOut(router)
    for _ in range(2):
        for event in sent(fan_out, texts(3)):
            with fan_out.planning(event) as plan:
                assert fan_out.commit(event, report=EngineReport(0, prompt_tokens=TOKENS), plan=plan)
            assert not fan_out.abandon(event)
    assert router.stats().stale > 0


def test_an_agents_chat_refers_only_to_its_own_messages(router: AgentRouter) -> None:
    fan_out = WorkflowFanOut(router, placement="tail")
    chats: dict[str, list[dict[str, str]]] = {name: [] for name in AGENTS}
    for turn in range(3):
        for event in sent(fan_out, texts(6), conversation="chat-1"):
            with fan_out.planning(event, history=chats[event.agent]) as plan:
                assert len(plan.references) == (len(event.documents) if turn else 0)
                chats[event.agent].append({"role": "user", "content": plan.render()})
    assert router.stats().held == 12


def test_what_an_agent_could_not_read_goes_to_the_others(router: AgentRouter) -> None:
    fan_out = WorkflowFanOut(router, Laws)
    first, *others = sent(fan_out, texts(9), question="Why?", colour="red")
    router.fail(first.agent)
    moved = fan_out.reassign(first)
    assert first.agent not in {event.agent for event in moved}
    assert Counter(document for event in moved for document in event.documents) == Counter(first.documents)
    for event in [*others, *moved]:
        assert isinstance(event, Laws)
        assert (event.question, event.colour) == ("Why?", "red")
        with fan_out.reading(event):
            pass
    check_counted_once(router, 9)
    for name in {event.agent for event in others}:
        router.fail(name)
    with pytest.raises(NoAgentError):
        fan_out.reassign(others[0])


def test_mistakes_are_named(router: AgentRouter) -> None:
    wrong: Any = StartEvent
    with pytest.raises(TypeError, match="event must be a class of DocumentsAssigned"):
        WorkflowFanOut(router, wrong)
    with pytest.raises(TypeError, match="agents must be names or None, got one str, 'ann'"):
        WorkflowFanOut(router, agents="ann")
    for one in ("one text", TextNode(text="one node"), NodeWithScore(node=TextNode(text="one node")), None):
        with pytest.raises(TypeError, match="documents must be a sequence of documents"):
            sent(WorkflowFanOut(router), one)
    with pytest.raises(TypeError, match=r"documents\[1\] must be a text, a block, a document or a node, got int"):
        sent(WorkflowFanOut(router), ["a", 1])
