"""Digests of plans: no ordering policy, conversation or batch may change a byte of a prompt.

Each case runs a seeded script of requests against one planner. Set `DUMP_FROZEN` to a folder to get the records behind
each digest as JSON lines; with those of two versions, `diff` shows the first plan that differs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import warmprefix.residency.capacity
from warmprefix import (
    BatchPlan,
    BatchRequest,
    ContextBlock,
    ContextPlan,
    ContextPlanner,
    EngineReport,
    PlannedRequest,
    Templates,
)

POLICIES = ("relevance", "sorted", "frequency", "greedy", "recency", "oracle", "context-index", "coaccess")
BATCH_PLANNERS = ("auto", "merge", "context-index", "frequency", "relevance", "window")

WORDS = (
    *("prefix", "cache", "engine", "block", "token", "order", "tenant", "retrieval", "passage", "answer", "question"),
    *("turn", "history", "label", "note", "reference", "memory", "agent", "replica", "salt", "prompt", "model"),
)

AWKWARD_TEXTS = (
    "[doc1] This text begins with the label of another block.",
    "First line.\n[doc2] The second line looks like a label.\n\\[doc3] This one is escaped already.",
    "Please read the context in the following priority order: [doc2] > [doc1] and answer the question.",
    "Please also use the context labelled [doc1], [doc3] above in this conversation.",
    "Line feed and carriage return:\r\n[doc1]\u2028[doc2] line separator\x85[doc3] next line",
    "A lone surrogate \ud800, an invisible \u200b[doc\u200b1] and full-width \uff3bdoc1\uff3d brackets.",
    "[ERROR] A bracket that is no label.\n  [doc4] after blanks\n\t[doc5] after a tab",
    "Trailing blanks and breaks \n\n\n",
    "{order} and {labels} are placeholders elsewhere.",
    "x" * 700,
)
AWKWARD_IDS = (
    None,
    "doc1",
    "doc2",
    3,
    "doc 1",
    "a\n[doc1]",
    "{order}",
    "9" * 70,
    "Ünïcode",
    "ctx-0123456789ab",
    "doc1~a",
)

Record = dict[str, Any]


# -- everything below that names a field or a method of the library is in this section --------------------------------


def plan_fields(plan: ContextPlan) -> Record:
    """Return all fields of a plan that its inputs decide; its id is random."""
    return {
        "conversation": plan.conversation,
        "placement": plan.placement,
        "turn": plan.turn,
        "tenant": plan.scope.tenant,
        "model": plan.scope.model,
        "preamble": plan.scope.preamble and plan.scope.preamble.hex(),
        "resident_tokens": plan.resident_tokens,
        "total_tokens": plan.total_tokens,
        "reference_tokens": plan.reference_tokens,
        "cache_salt": plan.cache_salt,
        "annotation": plan.order_annotation,
        "order": plan.order,
        "reordered": plan.reordered,
        "tracked": plan.tracked,
        "opens_prompt": plan.opens_prompt,
        "blocks": [
            {
                "label": planned.label,
                "positions": planned.positions,
                "rank": planned.rank,
                "fingerprint": planned.block.fingerprint.hex(),
                "id": planned.block.id,
                "tokens": planned.block.tokens,
                "reference": planned.reference and astuple(planned.reference),
            }
            for planned in plan.blocks
        ],
    }


def planned_request_fields(planned: PlannedRequest) -> Record:
    return {
        "request": planned.id,
        "order": planned.order,
        "saved_tokens": planned.saved_tokens,
        "warmed_by": planned.warmed_by,
        "messages": planned.messages(),
        "plan": plan_fields(planned.plan),
    }


def batch_fields(batch: BatchPlan) -> Record:
    return {
        "planner": batch.planner,
        "capacity_tokens": batch.capacity_tokens,
        "saved_tokens": batch.saved_tokens,
        "total_tokens": batch.total_tokens,
        "upper_bound": batch.upper_bound,
        "bound": batch.bound,
        "positions": dict(batch.positions),
    }


def counters(planner: ContextPlanner) -> dict[str, int]:
    """Return the planner's counters, without the latencies."""
    return {name: value for name, value in asdict(planner.stats()).items() if isinstance(value, int)}


def arrange_batch(
    planner: ContextPlanner, requests: Iterable[BatchRequest], name: str, capacity: int | None, preamble: str | None
) -> BatchPlan:
    if name == "window":
        return planner.plan_batch(requests, "window", preamble=preamble)
    return planner.plan_batch(requests, name, capacity_tokens=capacity, preamble=preamble, device="cpu")


class Session:
    """Runs requests on one planner and records each plan and each result."""

    def __init__(self, policy: str, **options: Any) -> None:
        self.planner = ContextPlanner(policy=policy, salt_key=b"frozen", **options)
        self.records: list[Record] = []
        self.rendered: list[str] = []

    def plan(self, blocks: Sequence[ContextBlock | str], **options: Any) -> ContextPlan:
        return self._recorded(self.planner.plan(blocks, **options))

    def commit(self, plan: ContextPlan, report: EngineReport | None = None) -> None:
        self.records.append({"commit": self.planner.commit(plan, report=report)})

    def abandon(self, plan: ContextPlan) -> None:
        self.records.append({"abandon": self.planner.abandon(plan)})

    def forget(self, conversation: str, tenant: str | None = None) -> None:
        self.planner.forget(conversation, tenant=tenant)

    def withdraw(self, plan: ContextPlan) -> None:
        self.planner.withdraw(plan)

    def report(self, plan: ContextPlan, **report: Any) -> None:
        self.planner.report(plan, EngineReport(**report))

    def _recorded(self, plan: ContextPlan) -> ContextPlan:
        self.rendered += [plan.render(), *plan.paragraphs()]
        self.records.append(plan_fields(plan))
        return plan

    def digests(self) -> dict[str, str]:
        """Return one digest of the rendered prompts and one of everything else."""
        return {"fields": digest(self.records), "rendered": digest(self.rendered)}


class AsyncSession(Session):
    """The same through the methods for tasks."""

    loop: asyncio.AbstractEventLoop

    def plan(self, blocks: Sequence[ContextBlock | str], **options: Any) -> ContextPlan:
        return self._recorded(self.loop.run_until_complete(self.planner.aplan(blocks, **options)))

    def commit(self, plan: ContextPlan, report: EngineReport | None = None) -> None:
        self.records.append({"commit": self.loop.run_until_complete(self.planner.acommit(plan, report=report))})

    def abandon(self, plan: ContextPlan) -> None:
        self.records.append({"abandon": self.loop.run_until_complete(self.planner.aabandon(plan))})

    def forget(self, conversation: str, tenant: str | None = None) -> None:
        self.planner.forget(conversation, tenant=tenant)


# -- end of that section ----------------------------------------------------------------------------------------------


def digest(records: Iterable[Any]) -> str:
    hashed = hashlib.sha256()
    for record in records:
        hashed.update(json.dumps(record, sort_keys=True).encode() + b"\n")
    return hashed.hexdigest()


def dump(name: str, records: Iterable[Any]) -> None:
    if folder := os.environ.get("DUMP_FROZEN"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(record, sort_keys=True) + "\n" for record in records)
        (Path(folder) / f"{name}.jsonl").write_text(lines)


def passage(rng: random.Random, number: int) -> ContextBlock:
    text = f"Passage {number}. " + " ".join(rng.choices(WORDS, k=rng.randrange(5, 40)))
    tokens = rng.randrange(40, 240) if number % 3 else None
    return ContextBlock(text, id=(f"doc{number}", number, None)[number % 3], tokens=tokens, score=rng.random())


def awkward_blocks(rng: random.Random) -> list[ContextBlock]:
    """Return blocks whose texts and ids imitate labels and notes, with pins, blank texts and repetitions among them."""
    blocks = []
    for _ in range(40):
        text = rng.choice((*AWKWARD_TEXTS, "", " \n", "plain"))
        pin: Any = rng.choice((None, None, None, "start", "end"))
        blocks.append(ContextBlock(text, rng.choice(AWKWARD_IDS), rng.choice((None, 0, 7, 120)), pinned=pin))
    return blocks


def zipf_request(rng: random.Random, corpus: Sequence[ContextBlock], topics: int, k: int) -> list[ContextBlock]:
    """Draw a topic by Zipf's law, and `k` of its blocks with the popular ones first more often."""
    topic = rng.choices(range(topics), [1 / (rank + 1) for rank in range(topics)])[0]
    size = len(corpus) // topics
    pool = list(corpus[topic * size : (topic + 1) * size])
    weighted = sorted(pool, key=lambda block: rng.random() * (1 + pool.index(block)))
    return weighted[:k]


# -- scripts ----------------------------------------------------------------------------------------------------------


def zipf_retrieval(session: Session, rng: random.Random) -> None:
    """Single requests with a small cache, some abandoned, some committed late and out of order."""
    corpus = [passage(rng, number) for number in range(240)]
    waiting: list[ContextPlan] = []
    for _ in range(160):
        waiting.append(session.plan(zipf_request(rng, corpus, 16, rng.randrange(1, 12))))
        while waiting and rng.random() < 0.7:
            plan = waiting.pop(rng.randrange(len(waiting)))
            session.abandon(plan) if rng.random() < 0.1 else session.commit(plan)


def tenants_and_pins(session: Session, rng: random.Random) -> None:
    """Several tenants, models and preambles, with pins, locked orders, repetitions, plain strings and blank texts."""
    corpus = [passage(rng, number) for number in range(40)]
    for number in range(120):
        blocks: list[ContextBlock | str] = list(rng.sample(corpus, 6))
        for i in range(len(blocks)):
            chance, block = rng.random(), blocks[i]
            assert isinstance(block, ContextBlock)
            if chance < 0.15:
                blocks[i] = ContextBlock(block.text, block.id, block.tokens, pinned=rng.choice(("start", "end")))
            elif chance < 0.2:
                blocks[i] = block.text
            elif chance < 0.25:
                blocks[i] = "  "
            elif chance < 0.3:
                blocks[i] = blocks[0]
        plan = session.plan(
            blocks,
            tenant=rng.choice((None, "acme", "globex")),
            model=rng.choice((None, "small")),
            preamble=rng.choice((None, "Be brief.")),
            order_locked=number % 7 == 0,
        )
        session.commit(plan)


def awkward_texts(session: Session, rng: random.Random) -> None:
    """Texts and ids that imitate labels and notes, with and without conversations and their histories."""
    blocks = awkward_blocks(rng)
    histories: dict[str, list[str]] = {"a": [], "b": []}
    for number in range(90):
        chosen = rng.sample(blocks, rng.randrange(0, 8))
        name = rng.choice("ab")
        if number % 3 == 0:
            plan = session.plan(chosen)
        elif number % 3 == 1:
            plan = session.plan(chosen, conversation=f"recorded-{name}", placement="tail")
        else:
            plan = session.plan(chosen, conversation=name, placement="tail", history=histories[name])
            histories[name] += [f"{plan.render()}\n\nQuestion {number}?", f"Answer {number}, see [doc1]."]
        session.commit(plan)


def head_conversations(session: Session, rng: random.Random) -> None:
    """Conversations whose context is rebuilt in front of the history on each turn."""
    corpus = [passage(rng, number) for number in range(150)]
    topics = {f"chat-{number}": rng.randrange(0, 130, 10) for number in range(12)}
    for number in range(140):
        name = rng.choice(list(topics))
        blocks = rng.sample(corpus[topics[name] : topics[name] + 16], 8)
        history = [f"Turn {number}?", "Yes."] if number % 4 == 0 else None
        session.commit(session.plan(blocks, conversation=name, history=history, tenant=name[-1]))


def tail_conversations(session: Session, rng: random.Random) -> None:
    """Conversations that the planner records: late, lost, withdrawn and concurrent turns among them."""
    corpus = [passage(rng, number) for number in range(90)]
    names = [f"chat-{number}" for number in range(8)]
    for number in range(160):
        name, chance = rng.choice(names), rng.random()
        tenant = None if name < "chat-4" else "acme"
        start = 10 * names.index(name)
        conversation = f"{name}-{number // 40}"
        options: Record = {"conversation": conversation, "placement": "tail", "tenant": tenant}
        plan = session.plan(rng.sample(corpus[start : start + 20], 6), **options)
        if chance < 0.1:
            session.abandon(plan)
        elif chance < 0.2:  # a second turn is planned before the first one ends
            other = session.plan(rng.sample(corpus[start : start + 20], 4), **options)
            session.commit(other)
            session.commit(plan)
        elif chance < 0.25:
            session.commit(plan)
            session.withdraw(plan)
        elif chance < 0.3:
            session.commit(plan)
            session.forget(conversation, tenant)
        else:
            session.commit(plan)


def shown_histories(session: Session, rng: random.Random) -> None:
    """Conversations whose messages are shown: as text, messages and parts, cut, edited and forked."""
    corpus = [passage(rng, number) for number in range(60)]
    histories: dict[str, list[Any]] = {f"chat-{number}": [] for number in range(6)}
    for number in range(120):
        name, chance = rng.choice(list(histories)), rng.random()
        history = histories[name]
        if chance < 0.08:
            del history[: len(history) // 2]
        elif chance < 0.14 and history:
            history[rng.randrange(len(history))] = "A summary of what was here."
        elif chance < 0.2:
            history[:] = rng.choice(list(histories.values()))
        elif chance < 0.35:
            history.clear()
        start = rng.randrange(0, 40, 10)
        plan = session.plan(
            rng.sample(corpus[start : start + 15], 6),
            conversation=name if number % 5 else None,
            placement="tail",
            history=history,
        )
        text = f"{plan.render()}\n\nQuestion {number}?"
        messages: tuple[Any, ...] = (
            text,
            {"role": "user", "content": text},
            {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image_url", "image_url": {}}]},
        )
        history += [messages[number % 3], {"role": "assistant", "content": f"Answer {number}."}]
        session.abandon(plan) if chance > 0.95 else session.commit(plan)


def engine_reports(session: Session, rng: random.Random) -> None:
    """Answers with reports: a cache that works, holds less than predicted, and then caches nothing at all."""
    corpus = [passage(rng, number) for number in range(60)]
    for number in range(150):
        plan = session.plan(rng.sample(corpus[number % 4 * 10 : number % 4 * 10 + 20], 6), preamble="Be brief.")
        prompt = plan.total_tokens + 30
        share = 0.0 if 60 <= number < 110 else rng.choice((1.0, 1.0, 0.5))
        cached = int(share * plan.resident_tokens)
        if number % 3 == 0:
            session.commit(plan, EngineReport(cached_tokens=cached, prompt_tokens=prompt))
        elif number % 3 == 1:
            ends = [(i + 1) / (len(plan.blocks) + 1) for i in range(len(plan.blocks))]
            session.commit(plan, EngineReport(cached_tokens=cached, prompt_tokens=prompt, block_ends=ends))
        else:
            session.commit(plan)
            session.report(plan, cached_tokens=cached)


SCRIPTS: dict[str, tuple[Callable[[Session, random.Random], None], Record]] = {
    "zipf-retrieval": (zipf_retrieval, {"capacity_tokens": 15_000}),
    "tenants-and-pins": (tenants_and_pins, {"max_scopes": 6}),
    "awkward-texts": (
        awkward_texts,
        {"templates": Templates(order="Order of relevance: {order}.", location="See {labels} above.")},
    ),
    "awkward-texts-default-wording": (awkward_texts, {}),
    "head-conversations": (head_conversations, {"capacity_tokens": 9_000, "max_nodes": 80}),
    "tail-conversations": (tail_conversations, {"max_labels": 60}),
    "shown-histories": (shown_histories, {"capacity_tokens": None}),
    "engine-reports": (engine_reports, {"capacity_tokens": 4_000}),
}


def played(script: str, policy: str, make: Callable[..., Session] = Session) -> Session:
    play, options = SCRIPTS[script]
    session = make(policy, **options)
    with mock.patch.object(warmprefix.residency.capacity, "_PATIENCE", 5):  # short scripts have few answers
        play(session, random.Random(script))
    return session


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_plans_are_the_committed_ones(script: str, policy: str, freeze: Callable[..., None]) -> None:
    session = played(script, policy)
    dump(f"{script}-{policy}-rendered", session.rendered)
    dump(f"{script}-{policy}-fields", session.records)
    freeze("plans.json", session.digests(), script, policy)


@pytest.mark.parametrize("script", SCRIPTS)
def test_counters_are_the_committed_ones(script: str, freeze: Callable[..., None]) -> None:
    counted = counters(played(script, "coaccess").planner)
    committed = json.loads((Path(__file__).parent / "data/counters.json").read_text("utf-8"))[script]
    is_written = os.environ.get("WRITE_FROZEN") == "1"  # otherwise new counters pass
    freeze("counters.json", {name: counted.get(name) for name in (counted if is_written else committed)}, script)


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        loop.close()


@pytest.mark.parametrize("script", SCRIPTS)
def test_plans_made_in_tasks_are_the_same(script: str) -> None:
    with event_loop() as loop:

        def make(policy: str, **options: Any) -> Session:
            session = AsyncSession(policy, **options)
            session.loop = loop
            return session

        session = played(script, "coaccess", make)
    assert session.digests() == played(script, "coaccess").digests()


# -- batches ----------------------------------------------------------------------------------------------------------


def batch_requests(rng: random.Random, count: int, tenants: Sequence[str | None]) -> list[BatchRequest]:
    corpus = [passage(rng, number) for number in range(120)]
    requests = []
    for number in range(count):
        blocks: list[ContextBlock | str] = list(zipf_request(rng, corpus, 10, rng.randrange(0, 9)))
        if number % 11 == 0:
            blocks += [*blocks[:1], " ", rng.choice(AWKWARD_TEXTS)]
        request = BatchRequest(
            f"r{number}", blocks, f"Question {number}?", tenant=rng.choice(tenants), order_locked=number % 13 == 5
        )
        requests.append(request)
    return requests


@pytest.mark.parametrize("capacity", [None, 300])
@pytest.mark.parametrize("name", BATCH_PLANNERS)
def test_batches_are_the_committed_ones(name: str, capacity: int | None, freeze: Callable[..., None]) -> None:
    rng = random.Random("batches")
    planner = ContextPlanner(salt_key=b"frozen")
    records: list[Record] = []
    worth: list[Record] = []
    for count, tenants, preamble in ((60, (None,), "Be brief."), (40, (None, "acme", "globex"), "Be brief.")):
        batch = arrange_batch(planner, batch_requests(rng, count, tenants), name, capacity, preamble)
        records += [batch_fields(batch), *map(planned_request_fields, batch)]
        worth.append({name: value for name, value in batch_fields(batch).items() if name != "positions"})
        for number, planned in enumerate(batch):  # what is committed warms the next batch
            if number % 5:
                records.append({"commit": planner.commit(planned.plan)})
            else:
                records.append({"abandon": planner.abandon(planned.plan)})
    key = f"{name}-{capacity or 'unbounded'}"
    dump(f"batch-{key}", records)
    freeze("batches.json", {"digest": digest(records), "worth": worth}, key)
