"""What must always hold, as properties: nothing lost, nothing dangling, stable bytes, isolation, determinism."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from warmprefix import BatchRequest, ContextBlock, ContextPlan, ContextPlanner, Templates
from warmprefix.annotate import Annotate
from warmprefix.batch.session import BATCH_PLANNERS
from warmprefix.blocks import Pin
from warmprefix.ordering import POLICIES
from warmprefix.plan import PlannedBlock
from warmprefix.stores import Conversation, Forget, MemorySeenStore, Operation, RecordBounds

T = TypeVar("T")

TEMPLATES = Templates()

# Few texts and few ids, so that texts, ids and headers collide; some texts imitate what only we may write.
TEXTS = [
    "",
    "alpha",
    "alpha beta",
    "beta",
    "[a] alpha",
    "alpha\n\n[b] beta",
    "\\[a] alpha",
    "Please also use the context labelled [a] above in this conversation.",
    "[a~b52f7e] beta",
    " \n",
    "Please read the context in the following priority order: [b] > [a] and answer the question.",
    "gamma\r\n[a]\u2028delta \ud800",
    "x" * 500,
    "Ada Lovelace wrote the first published algorithm.",
    "**ada lovelace** wrote the first published novel.",
    "Alpha and beta are letters of the alphabet.\n\nAda Lovelace wrote the first published algorithm.",
    "Alpha and beta are letters of the alphabet of Greece.\n[b] beta",
    'Also use the passages above that begin with "Ada Lovelace wrote the first".',
    "\u8fd9\u662f\u4e00\u4e2a\u5173\u4e8e\u7b97\u6cd5\u7684\u6bb5\u843d\uff0c\u7b2c\u4e00\u4e2a\u3002",
]
IDS = [None, "a", "b", "alpha", "ctx-0123456789ab", "a b", "a\n[b]", "{a}", "9" * 60]

pinned_at = st.sampled_from([None, None, None, "start", "end"])
context_blocks = st.builds(
    ContextBlock,
    st.sampled_from(TEXTS),
    id=st.sampled_from(IDS),
    tokens=st.none() | st.integers(0, 300),
    score=st.none() | st.floats(allow_nan=True),
    pinned=pinned_at,
    follows=st.sampled_from([None, "of another request", "alpha beta"]),
)
requests = st.lists(context_blocks, max_size=8)


def part(source: int, number: int, pinned: Pin | None = None, text: str | None = None) -> ContextBlock:
    """Return a part of a source, which follows the one before it."""
    text = f"source {source}, part {number}" if text is None else text
    return ContextBlock(text, f"{source}.{number}", pinned=pinned, follows=f"{source}.{number - 1}")


sources, parts = st.integers(0, 2), st.integers(0, 6)
neighbours = st.builds(
    lambda source, first, texts: [part(source, first + i, pin, text) for i, (pin, text) in enumerate(texts)],
    sources,
    parts,
    st.lists(st.tuples(pinned_at, st.sampled_from([None, None, None, "", "alpha"])), min_size=1, max_size=4),
)
in_runs = st.lists(neighbours | context_blocks.map(lambda block: [block]), max_size=6).map(
    lambda pieces: [block for piece in pieces for block in piece]
)
"""Requests with neighbours of a source, some of them repeated, without text, or pinned."""

kinds_of_annotation: st.SearchStrategy[Annotate] = st.sampled_from(["auto", "note", "labels", "both", "none"])


def assert_finds(history: Sequence[str], rendered: str, planned: PlannedBlock, is_whole: bool) -> None:
    """Check that a reader of the prompt finds the whole text by the quote, and if the record `is_whole` no other one.

    A reader looks at letters and digits, where a paragraph begins, and skips a label.
    """
    assert planned.reference is not None
    quote, text = planned.reference.opening, planned.block.text.replace("\\", "")
    (sentence,) = [line for line in rendered.split("\n") if line.startswith(TEMPLATES.again.partition("{")[0])]
    assert f'"{quote}"' in sentence
    found = []
    for message in [*history, rendered]:
        plain = message.replace("\\", "")
        for border in re.finditer(r"\A|\n\s*\n", plain):
            passage = re.sub(r"\A\s*(\[[\w.:/~-]+\] )?", "", plain[border.end() :])
            if letters(passage).startswith(letters(quote)):
                found.append(passage.startswith(text.strip()))
    assert any(found), f"dangling: {planned.reference}"
    assert not is_whole or all(found), f"two texts begin with {quote!r}"


def letters(text: str) -> str:
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKD", text))).casefold()


def assert_holds(
    history: Sequence[str], plan: ContextPlan, request: Sequence[ContextBlock], *, is_whole: bool = False
) -> None:
    """Check that each block with a text is in this prompt, in full or as a valid reference, under one label."""
    rendered = plan.render()
    prompt = [*history, rendered]
    evidence = [i for i, block in enumerate(request) if block.text.strip()]
    assert {planned.block for planned in plan.blocks} == {request[i] for i in evidence}
    assert len(plan.blocks) == len({request[i] for i in evidence})
    assert sorted(i for planned in plan.blocks for i in planned.positions) == evidence
    assert bool(rendered) == bool(evidence)
    unlabelled = [planned for planned in plan.blocks if not planned.label and planned.reference is None]
    for planned in plan.blocks:
        if planned.reference is not None and not planned.label:
            assert_finds(history, rendered, planned, is_whole)
    if plan.annotation in ("note", "none") and len(unlabelled) == len(plan.blocks):
        note = [] if plan.order_annotation is None else [plan.order_annotation]
        assert rendered == "\n\n".join(
            [*[TEMPLATES.escaped(planned.block.text, planned.names) for planned in plan.blocks], *note]
        )
    else:
        shown = [TEMPLATES.escaped(planned.block.text, planned.names) for planned in unlabelled]
        assert all(f"\n\n{text}\n\n" in f"\n\n{rendered}\n\n" for text in shown)
    labels = [planned.label for planned in plan.blocks if planned.label]
    assert len(set(labels)) == len(labels)
    for planned in [planned for planned in plan.blocks if planned.label]:
        text = planned.block.text
        places = {message: header_positions(message, planned.label) for message in prompt}
        holding = {
            message
            for message, starts in places.items()
            if any(TEMPLATES.matching_end(message, start, planned.label, text) is not None for start in starts)
        }
        if planned.reference is None:
            assert planned.render() in rendered
            assert rendered in holding
        else:
            assert planned.reference.label == planned.label
            assert f"[{planned.label}]" in rendered
            assert holding & set(history), f"dangling: {planned.reference}"
        for message, starts in places.items():
            for start in starts:
                found = TEMPLATES.matching_end(message, start, planned.label, text)
                assert found is not None, f"two texts are called {planned.label}"


def header_positions(message: str, label: str) -> list[int]:
    return [match.end() - len(label) - 3 for match in re.finditer(rf"(?:\A|\n)\[{re.escape(label)}\] ", message)]


# -- 1 and 2, where the planner keeps the record -------------------------------------------------------------------


class FlakyStore(MemorySeenStore):
    """Loses some answers: an operation fails before or after it is done."""

    def __init__(self, clock: Any) -> None:
        super().__init__(bounds=RecordBounds(ttl=1_000, lease_ttl=100), clock=clock)
        self.fault: Literal["none", "before", "after"] = "none"

    def execute(self, operation: Operation[T]) -> T:
        self._fail("before", operation)
        result = super().execute(operation)
        self._fail("after", operation)
        return result

    def _fail(self, when: str, operation: Operation[Any]) -> None:
        if self.fault == when and not isinstance(operation, Forget):
            raise TimeoutError(when)


@dataclass
class Chat:
    """An application's conversation as it is really sent; the planner does not see it."""

    name: str
    history: tuple[str, ...] = ()
    unrecorded: bool = False
    """True if the last turn of the history was answered but never committed."""


class Conversations(RuleBasedStateMachine):
    """Turns, retries, cancellations, crashes, truncation, forks, lost state and two workers, in any order."""

    chats = Bundle("chats")
    in_flight = Bundle("in_flight")

    @initialize(annotate=st.sampled_from(["auto", "both"]))
    def start(self, annotate: Annotate) -> None:
        self.now = 0.0
        self.store = FlakyStore(lambda: self.now)
        self.workers = [ContextPlanner(store=self.store, annotate=annotate) for _ in range(2)]
        self.chats_opened = 0

    @rule(target=chats)
    def open_chat(self) -> Chat:
        self.chats_opened += 1
        return Chat(f"chat-{self.chats_opened}")

    @rule(target=in_flight, chat=chats, request=requests, worker=st.integers(0, 1))
    def plan(self, chat: Chat, request: list[ContextBlock], worker: int) -> Any:
        request = of_worker(worker, request)
        plan = self.workers[worker].plan(request, conversation=chat.name, placement="tail")
        assert_holds(chat.history, plan, request)
        return chat, worker, plan, chat.history

    @rule(flight=consumes(in_flight), outcome=st.sampled_from(["both", "this", "other"]))
    def model_answers(self, flight: Any, outcome: str) -> None:
        chat, worker, plan, base = flight
        if chat.history == base or outcome == "this":
            chat.history = (*base, plan.render())
        elif outcome == "both":
            chat.history = (*chat.history, plan.render())
        elif chat.unrecorded:
            # Of two answers to one turn the application kept the other, whose commit will never come.
            self.workers[worker].abandon(plan)
            return
        chat.unrecorded = False
        self.workers[worker].commit(plan)

    @rule(flight=consumes(in_flight))
    def model_answers_and_the_worker_dies(self, flight: Any) -> None:
        chat, _, plan, base = flight
        if chat.history == base:
            chat.history = (*base, plan.render())
            chat.unrecorded = True

    @rule(flight=consumes(in_flight))
    def call_fails(self, flight: Any) -> None:
        _, worker, plan, _ = flight
        self.workers[worker].abandon(plan)

    @rule(flight=consumes(in_flight), request=requests)
    def call_is_retried(self, flight: Any, request: list[ContextBlock]) -> None:
        chat, worker, plan, base = flight
        self.workers[worker].abandon(plan)
        request = of_worker(worker, request)
        if chat.history == base:
            with self.workers[worker].planning(request, conversation=chat.name, placement="tail") as retry:
                assert_holds(chat.history, retry, request)
                chat.history = (*base, retry.render())

    @rule(chat=chats, keep=st.integers(0, 3), summary=st.booleans())
    def cut(self, chat: Chat, keep: int, summary: bool) -> None:
        chat.history = ("So far they spoke of alpha.",) if summary else chat.history[:keep]
        self.workers[0].forget(chat.name)

    @rule(target=chats, chat=chats, keep=st.integers(0, 3))
    def fork(self, chat: Chat, keep: int) -> Chat:
        self.chats_opened += 1
        return Chat(f"chat-{self.chats_opened}", chat.history[:keep])

    @rule(seconds=st.sampled_from([1, 99, 101, 1_001]))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def lose_the_store(self) -> None:
        self.store.clear()

    def teardown(self) -> None:
        for worker in getattr(self, "workers", []):
            worker.close()

    @rule(fault=st.sampled_from(["none", "none", "before", "after"]))
    def store_faults(self, fault: Literal["none", "before", "after"]) -> None:
        self.store.fault = fault

    @invariant()
    def the_record_holds_no_text(self) -> None:
        for chat in range(1, getattr(self, "chats_opened", 0) + 1):
            snapshot = self.store.inspect(Conversation(None, f"chat-{chat}"))
            assert snapshot is None or all(len(seen.label) <= 80 for seen in snapshot.blocks)


def of_worker(worker: int, request: list[ContextBlock]) -> list[ContextBlock]:
    """Use ids per worker: two workers without a common record may give one id to two texts."""
    return [ContextBlock(b.text, b.id and f"w{worker}-{b.id}", b.tokens, b.score, b.pinned) for b in request]


Conversations.TestCase.settings = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestConversations = Conversations.TestCase


# -- 1 and 2, where the messages are visible -----------------------------------------------------------------------


class VisibleConversation(RuleBasedStateMachine):
    """The application changes its messages as it likes, without notice."""

    @initialize(annotate=st.sampled_from(["auto", "both"]))
    def start(self, annotate: Annotate) -> None:
        self.planners = [ContextPlanner(annotate=annotate), ContextPlanner(annotate=annotate)]
        self.history: list[str] = []

    @rule(request=requests, worker=st.integers(0, 1), outcome=st.sampled_from(["answer", "fail", "hang"]))
    def turn(self, request: list[ContextBlock], worker: int, outcome: str) -> None:
        planner = self.planners[worker]
        history = [{"role": "user", "content": text} for text in self.history]
        plan = planner.plan(request, conversation="chat", placement="tail", history=history)
        assert_holds(self.history, plan, request, is_whole=True)
        if outcome == "answer":
            self.history.append(plan.render())
            planner.commit(plan)
        elif outcome == "fail":
            planner.abandon(plan)

    @rule(request=requests)
    def turn_without_showing_the_history(self, request: list[ContextBlock]) -> None:
        # Shown histories void the record, so this can only ever refer to what such turns themselves have sent.
        plan = self.planners[0].plan(request, conversation="unshown", placement="tail", history=None)
        assert all(planned.reference is None for planned in plan.blocks)

    @rule(data=st.data())
    def drop_a_message(self, data: st.DataObject) -> None:
        if self.history:
            del self.history[data.draw(st.integers(0, len(self.history) - 1))]

    @rule(data=st.data())
    def cut_into_a_message(self, data: st.DataObject) -> None:
        if self.history:
            i = data.draw(st.integers(0, len(self.history) - 1))
            start, end = sorted(data.draw(st.tuples(st.integers(0, 600), st.integers(0, 600))))
            self.history[i] = self.history[i][:start] + self.history[i][end:]

    @rule()
    def summarise(self) -> None:
        self.history = ["[Summary] They spoke of [a] and of alpha."]

    @rule(text=st.sampled_from(TEXTS), label=st.sampled_from(["a", "b", "alpha"]))
    def user_types_what_looks_like_ours(self, text: str, label: str) -> None:
        self.history.append(f"[{label}] {text}")


VisibleConversation.TestCase.settings = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestVisibleConversation = VisibleConversation.TestCase


# -- 1, whatever the options ---------------------------------------------------------------------------------------


@given(
    turns=st.lists(st.tuples(requests, st.sampled_from(["head", "tail"]), st.booleans()), max_size=6),
    policy=st.sampled_from(sorted(POLICIES)),
    conversation=st.sampled_from([None, "chat"]),
    annotate=kinds_of_annotation,
)
def test_every_block_stays_in_the_prompt(
    turns: list[Any], policy: str, conversation: str | None, annotate: Annotate
) -> None:
    planner = ContextPlanner(policy=policy, annotate=annotate)
    history: list[str] = []
    for request, placement, locked in turns:
        with planner.planning(request, conversation=conversation, placement=placement, order_locked=locked) as plan:
            assert_holds(history if placement == "tail" else [], plan, request)
        if placement == "tail":
            history.append(plan.render())


# -- 1, the order within a source ----------------------------------------------------------------------------------


def assert_runs_stay(planned: Sequence[PlannedBlock], request: Sequence[ContextBlock]) -> None:
    """Check that the new blocks of each run stand one behind the other, as in the request."""
    place = {block.block: i for i, block in enumerate(planned)}
    shown: set[ContextBlock] = set()
    run: list[ContextBlock] = []
    for i, block in enumerate(request):
        if not i or block.follows is None or block.follows != request[i - 1].id:
            run = []
        if block.text.strip() and block not in shown:
            shown.add(block)
            run.append(block)
            places = [place[member] for member in run]
            assert places == list(range(places[0], places[0] + len(run)))


@given(
    turns=st.lists(st.tuples(in_runs, st.sampled_from(["head", "tail"]), st.booleans()), max_size=6),
    policy=st.sampled_from(sorted(POLICIES)),
    conversation=st.sampled_from([None, "chat"]),
    annotate=kinds_of_annotation,
)
def test_runs_stay_together_and_in_order(
    turns: list[Any], policy: str, conversation: str | None, annotate: Annotate
) -> None:
    planner = ContextPlanner(policy=policy, annotate=annotate)
    history: list[str] = []
    for request, placement, locked in turns:
        with planner.planning(request, conversation=conversation, placement=placement, order_locked=locked) as plan:
            assert_runs_stay(plan.blocks, request)
            assert_holds(history if placement == "tail" else [], plan, request)
        if placement == "tail":
            history.append(plan.render())


@given(
    served=st.lists(in_runs, max_size=3),
    batch=st.lists(in_runs, max_size=6),
    planner=st.sampled_from([*BATCH_PLANNERS, "window"]),
    capacity=st.sampled_from([None, 20, 200]),
)
def test_runs_stay_together_in_batches(
    served: list[Any], batch: list[list[ContextBlock]], planner: str, capacity: int | None
) -> None:
    online = ContextPlanner()
    for request in served:
        with online.planning(request):
            pass
    requests = [BatchRequest(i, request) for i, request in enumerate(batch)]
    if planner == "window":
        plan = online.plan_batch(requests, "window")
    else:
        plan = online.plan_batch(requests, planner=planner, capacity_tokens=capacity)
    assert plan.saved_tokens <= plan.upper_bound
    for planned in plan:
        assert_runs_stay(planned.blocks, planned.request.blocks)
        assert_holds([], planned.plan, planned.request.blocks)


# -- 3: byte stability ---------------------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 2)
@given(turns=st.lists(requests, max_size=8), policy=st.sampled_from(sorted(POLICIES)), annotate=kinds_of_annotation)
def test_a_block_renders_to_the_same_bytes_in_every_request(
    turns: list[list[ContextBlock]], policy: str, annotate: Annotate
) -> None:
    """Unless its text seems to show a label of that very prompt."""
    planner = ContextPlanner(policy=policy, annotate=annotate)
    rendered: dict[ContextBlock, str] = {}
    for request in turns:
        with planner.planning(request) as plan:
            labels = [f"[{planned.label}]" for planned in plan.blocks if planned.label]
            for planned in plan.blocks:
                if not any(label in planned.block.text for label in labels):
                    assert rendered.setdefault(planned.block, planned.render()) == planned.render()


@pytest.mark.parametrize(("annotate", "shown"), [("auto", "evidence"), ("both", "[e] evidence")])
def test_scores_ranks_and_positions_stay_out_of_the_prompt(annotate: Annotate, shown: str) -> None:
    def prompt(score: float, rank: int) -> str:
        filler = [ContextBlock(f"filler {i}") for i in range(rank)]
        plan = ContextPlanner(annotate=annotate).plan([*filler, ContextBlock("evidence", id="e", score=score)])
        return plan.blocks[-1].render()

    assert prompt(0.9, 0) == prompt(0.1, 7) == shown


@given(turns=st.lists(requests | in_runs, max_size=8), policy=st.sampled_from(sorted(POLICIES)))
def test_a_note_quotes_the_most_relevant_block_alone(turns: list[list[ContextBlock]], policy: str) -> None:
    planner = ContextPlanner(policy=policy)
    for request in turns:
        with planner.planning(request) as plan:
            first_of_runs = [planned for planned in plan.blocks if not planned.joined]
            best = min(first_of_runs, key=lambda planned: planned.rank, default=None)
            if plan.order_annotation is None:
                assert best is None or plan.blocks[0] == best or is_as_without_policy(plan, request)
            else:
                assert plan.blocks[0] != best
                quote = plan.order_annotation.split('"')[1]
                assert [planned for planned in plan.blocks if quote.lower() in planned.block.text.lower()] == [best]


def is_as_without_policy(plan: ContextPlan, request: list[ContextBlock]) -> bool:
    """Return True if only pins changed the order."""
    return plan.order == ContextPlanner(policy="relevance").plan(request).order


# -- 4: no change unless it pays -----------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 2)
@given(earlier=st.lists(requests, max_size=8), fresh=st.integers(0, 12))
def test_prompt_is_unchanged_without_evidence_of_reuse(earlier: list[list[ContextBlock]], fresh: int) -> None:
    planner, untouched = ContextPlanner(), ContextPlanner(policy="relevance")
    for request in earlier:
        with planner.planning(request):
            pass
    request = [ContextBlock(f"never seen before, {i}") for i in range(fresh)]
    plan = planner.plan(request)
    assert plan.render() == untouched.plan(request).render()
    assert plan.order_annotation is None


@settings(max_examples=settings().max_examples // 2)
@given(turns=st.lists(requests | in_runs, max_size=8), policy=st.sampled_from(sorted(POLICIES)))
def test_order_annotation_appears_exactly_if_the_order_changed(turns: list[list[ContextBlock]], policy: str) -> None:
    planner = ContextPlanner(policy=policy, templates=Templates(most_quoted=None))
    for request in turns:
        with planner.planning(request) as plan:
            if plan.order_annotation is None:  # a block that stands inside another one cannot be quoted
                assert is_as_without_policy(plan, request)
            else:
                assert plan.reordered


# -- 6: bounded ----------------------------------------------------------------------------------------------------


def test_no_text_is_retained() -> None:
    text = "evidence " * 100
    planner = ContextPlanner()
    before = sys.getrefcount(text)
    for turn in range(3):
        with planner.planning([ContextBlock(text, id="e")], conversation="chat", placement="tail", tenant="acme"):
            pass
        with planner.planning([ContextBlock(text), ContextBlock(f"other {turn}")]):
            pass
        planner.plan([ContextBlock(text)])
    assert sys.getrefcount(text) == before


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_state_stops_growing_at_its_bounds(policy: str) -> None:
    planner = ContextPlanner(policy=policy, capacity_tokens=2_000, max_nodes=50, max_labels=40, max_scopes=3)
    rng = random.Random(0)
    for i in range(2_000):
        request = [ContextBlock(f"text {rng.randrange(500)}", tokens=50) for _ in range(5)]
        with planner.planning(request, tenant=f"tenant {i % 5}"):
            pass
    stats = planner.stats()
    assert stats.scopes == 3
    assert stats.tree_nodes <= 150


# -- 7: isolation --------------------------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 3)
@given(
    turns=st.lists(st.tuples(st.sampled_from(["acme", "other", None]), requests), max_size=12),
    policy=st.sampled_from(sorted(POLICIES)),
    placement=st.sampled_from(["head", "tail"]),
)
def test_a_tenants_prompts_do_not_depend_on_other_tenants(turns: list[Any], policy: str, placement: Any) -> None:
    def prompts(tenants: set[str | None]) -> list[str]:
        planner = ContextPlanner(policy=policy)
        rendered: list[str] = []
        for tenant, request in turns:
            if tenant in tenants:
                with planner.planning(request, conversation="c", placement=placement, tenant=tenant) as plan:
                    if tenant == "acme":
                        rendered.append(plan.render())
        return rendered

    assert prompts({"acme"}) == prompts({"acme", "other", None})


# -- 9: determinism ------------------------------------------------------------------------------------------------

REPLAY = """
import hashlib, random, sys
from warmprefix import ContextBlock, ContextPlanner
rng, digest = random.Random(7), hashlib.sha256()
for policy in sys.argv[1:]:
    planner = ContextPlanner(policy=policy, capacity_tokens=3_000)
    for i in range(300):
        request = [ContextBlock(f"text {rng.randrange(60)}", tokens=rng.randrange(200)) for _ in range(8)]
        with planner.planning(request, tenant=str(i % 2), conversation=str(i % 9), placement="tail") as plan:
            digest.update(plan.render().encode())
print(digest.hexdigest())
"""


def test_the_same_requests_give_the_same_bytes_in_every_process() -> None:
    def replay(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", REPLAY, *sorted(POLICIES)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert replay("1") == replay("2")
