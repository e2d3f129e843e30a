"""What prompts show of the relevance order, what that costs, and that an order must be worth it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import ContextBlock, ContextPlan, ContextPlanner, Templates
from warmprefix.annotate import Annotate
from warmprefix.batch import BatchRequest
from warmprefix.ordering import POLICIES, BlockView, PrefixView
from warmprefix.ordering.coaccess import CoAccessPolicy
from warmprefix.prefix.tree import PrefixTree
from warmprefix.quotes import quotes_of
from warmprefix.tokens import estimated_tokens

ANNOTATIONS: list[Annotate] = ["auto", "note", "labels", "both", "none"]
LONG_BLOCK, SHORT_BLOCK = 200, 20

# Without brackets, so that nothing is escaped. A note must not be confused with the last of them.
texts = st.sampled_from([*"abcdefgh", "ijz\n\nij", "Most: k, mo."])
blocks = st.builds(
    ContextBlock,
    texts,
    tokens=st.sampled_from([SHORT_BLOCK, LONG_BLOCK]),
    pinned=st.sampled_from([None, None, None, "start", "end"]),
)
requests = st.lists(st.lists(blocks, min_size=1, max_size=10), min_size=1, max_size=6)
annotation_names = st.sampled_from(ANNOTATIONS)
policies = st.sampled_from(sorted(POLICIES))
most_named = st.sampled_from([None, 1, 2, 3, 5])


def names_of(plan: ContextPlan) -> list[int]:
    """Return the places of the blocks that a plan's note names, from 0 on."""
    assert plan.order_annotation is not None
    if plan.annotation == "note":
        quotes = re.findall('"([^"]+)"', plan.order_annotation)
        holders = [[i for i, planned in enumerate(plan.blocks) if quote in planned.block.text] for quote in quotes]
        assert all(len(holder) == 1 for holder in holders)
        return [holder[0] for holder in holders]
    labels = [planned.label for planned in plan.blocks]
    return [labels.index(label) for label in re.findall(r"\[([^]]+)\]", plan.order_annotation)]


# -- the prompt ----------------------------------------------------------------------------------------------------


@given(requests, policies, annotation_names, most_named)
def test_notes_name_the_most_relevant_blocks_where_they_do_not_open_the_context(
    turns: list[list[ContextBlock]], policy: str, annotate: Annotate, named: int | None
) -> None:
    templates = Templates(most_named=named, most_quoted=named)
    planner = ContextPlanner(policy=policy, annotate=annotate, templates=templates)
    for request in turns:
        with planner.planning(request) as plan:
            ranks = [planned.rank for planned in plan.blocks]
            best = [ranks.index(rank) for rank in sorted(ranks)[:named]]
            if best == list(range(len(best))) or annotate in ("labels", "none"):
                assert plan.order_annotation is None
            else:
                assert names_of(plan) == best


@given(requests, policies, st.sampled_from(["auto", "note", "none"]))
def test_unlabelled_prompts_hold_the_very_texts(
    turns: list[list[ContextBlock]], policy: str, annotate: Annotate
) -> None:
    planner = ContextPlanner(policy=policy, annotate=annotate)
    for request in turns:
        with planner.planning(request) as plan:
            shown = "\n\n".join([planned.block.text for planned in plan.blocks])
            note = "" if plan.order_annotation is None else f"\n\n{plan.order_annotation}"
            assert plan.render() == shown + note
            if not plan.reordered:
                assert plan.render() == "\n\n".join(dict.fromkeys(block.text for block in request))
            if annotate == "none":
                assert plan.order_annotation is None


@pytest.mark.parametrize("words", range(28, 37))
def test_a_quote_ends_with_its_line_however_long_that_is(words: int) -> None:
    line = " ".join(f"word{i}" for i in range(words))
    assert quotes_of([f"{line}\n\nCLI\n\nOptions", line], 1) == ["CLI"]


@given(requests, policies, annotation_names, st.sampled_from(["head", "tail"]), most_named)
def test_note_tokens_are_those_of_all_that_is_written_besides_the_evidence(
    turns: list[list[ContextBlock]], policy: str, annotate: Annotate, placement: Any, named: int | None
) -> None:
    templates = Templates(most_named=named, most_quoted=named)
    planner = ContextPlanner(policy=policy, annotate=annotate, templates=templates, tokenizer=len)
    for request in turns:
        with planner.planning(request, conversation="chat", placement=placement) as plan:
            shown = [paragraph for paragraph in [*plan.paragraphs(), plan.order_annotation] if paragraph]
            evidence = sum([len(planned.block.text) for planned in plan.blocks if planned.reference is None])
            assert plan.note_tokens == sum(map(len, shown)) - evidence
    assert planner.stats().tokenizer_errors == 0


@pytest.mark.parametrize("annotate", ANNOTATIONS)
@pytest.mark.parametrize("placement", ["head", "tail"])
def test_each_annotation_shows_its_parts(annotate: Annotate, placement: Any) -> None:
    planner = ContextPlanner(policy="sorted", annotate="none")
    request = [ContextBlock(f"Text {i}.", id=f"Doc_{i}") for i in range(6)]
    plan = planner.plan(request, placement=placement, annotate=annotate)  # overrides the planner's
    labelled = plan.render().startswith(f"[{plan.blocks[0].label}] Text ")
    assert plan.reordered
    assert labelled == (annotate in ("labels", "both"))
    assert (plan.order_annotation is not None) == (annotate in ("auto", "note", "both"))


def test_an_unknown_annotation_is_an_error() -> None:
    with pytest.raises(ValueError, match="annotate must be one of auto, note, labels, both, none, got 'all'"):
        ContextPlanner(annotate="all")  # type: ignore[arg-type]
    planner = ContextPlanner()
    with pytest.raises(ValueError, match="annotate must be one of auto, note, labels, both, none, got 'all'"):
        planner.plan(["a"], annotate="all")  # type: ignore[arg-type]
    assert planner.stats().plans == 0


# -- the tokenizer -------------------------------------------------------------------------------------------------


class Broken:
    """A tokenizer that fails, and counts its calls."""

    def __init__(self, result: object) -> None:
        self.result = result
        self.calls = 0

    def __call__(self, text: str) -> Any:
        self.calls += 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize("result", [ValueError("broken"), -1, 0, 10**9, 1.5, None, "3", True, {}])
def test_a_broken_tokenizer_is_counted_and_changes_nothing(result: object) -> None:
    tokenizer = Broken(result)
    planner, reference = ContextPlanner(tokenizer=tokenizer, annotate="both"), ContextPlanner(annotate="both")
    for names in ("abcde", "ebxya", "xyeba"):
        request = [ContextBlock(f"Text {name}.", id=name, tokens=100) for name in names]
        with planner.planning(request) as plan, reference.planning(request) as expected:
            assert plan.render() == expected.render()
            assert plan.note_tokens == expected.note_tokens > 0
    assert planner.stats().tokenizer_errors == tokenizer.calls > 0
    assert planner.stats().policy_errors == 0


def test_the_callers_tokenizer_counts() -> None:
    request = [ContextBlock(f"Text {i}.", id=f"Doc_{i}", tokens=100) for i in range(6)]
    for tokenizer in (lambda text: 7, lambda text: [0] * 7):
        planner = ContextPlanner(policy="sorted", tokenizer=tokenizer, annotate="both")
        assert planner.plan(request).note_tokens == 7 * 7
    note = ContextPlanner(policy="sorted").plan(request)
    assert note.order_annotation is not None
    assert note.note_tokens == estimated_tokens(note.order_annotation)


@pytest.mark.parametrize("tokenizer", ["gpt-4", b"x", 7, object()])
def test_what_cannot_count_is_an_error(tokenizer: object) -> None:
    with pytest.raises(TypeError, match="tokenizer must be None, a callable or an object with encode"):
        ContextPlanner(tokenizer=tokenizer)


def test_a_dearer_note_keeps_the_order() -> None:
    """The second request finds one block of 20 tokens if it is moved to the front: 1.5 for each token of a note."""
    for price, order in ((12, (4, 0, 1, 2, 3)), (14, (0, 1, 2, 3, 4))):
        planner = ContextPlanner(tokenizer=lambda text, price=price: price)
        request = [ContextBlock(f"text {i}", tokens=SHORT_BLOCK) for i in range(5)]
        planner.commit(planner.plan(request[4:]))
        assert planner.plan(request).order == order


# -- what an order earns -------------------------------------------------------------------------------------------

Trace = list[list[ContextBlock]]


def context(*names: object, tokens: int) -> list[ContextBlock]:
    return [ContextBlock(f"text {name}", tokens=tokens) for name in names]


def zipf(rng: random.Random, documents: int, size: int) -> Iterator[list[int]]:
    """Yield contexts of documents whose popularity falls with their rank."""
    weights = list(accumulate(1 / (i + 1) for i in range(documents)))
    while True:
        drawn = rng.choices(range(documents), cum_weights=weights, k=20 * size)
        yield list(dict.fromkeys(drawn))[:size]


def topics(rng: random.Random, size: int) -> Iterator[list[int]]:
    """Yield contexts of one of 40 topics, of which some are more popular."""
    while True:
        topic = int(rng.expovariate(0.12)) % 40
        yield [topic * 100 + i for i in rng.sample(range(size + 6), size)]


def one_shared(rng: random.Random, size: int) -> Iterator[list[int]]:
    """Yield new documents and one of 20 others among them."""
    fresh = 20
    while True:
        documents = list(range(fresh, fresh + size - 1))
        documents.insert(rng.randrange(size), rng.randrange(20))
        yield documents
        fresh += size


def repeated(rng: random.Random, size: int) -> Iterator[list[int]]:
    """Yield 30 contexts again and again, in the same order of documents."""
    drawn = zipf(rng, 300, size)
    contexts = [next(drawn) for _ in range(30)]
    while True:
        yield rng.choice(contexts)


def without_overlap(rng: random.Random, size: int) -> Iterator[list[int]]:
    fresh = 0
    while True:
        yield rng.sample(range(fresh, fresh + size), size)
        fresh += size


TRAFFIC: dict[str, Callable[[random.Random], Iterator[list[int]]]] = {
    "few documents": lambda rng: zipf(rng, 60, 8),
    "many documents": lambda rng: zipf(rng, 2_000, 8),
    "topics": lambda rng: topics(rng, 8),
    "one shared": lambda rng: one_shared(rng, 8),
    "repeated": lambda rng: repeated(rng, 8),
    "no overlap": lambda rng: without_overlap(rng, 8),
}


def trace(traffic: str, tokens: int, seed: int, requests: int = 300) -> Trace:
    contexts = TRAFFIC[traffic](random.Random(f"{traffic} {seed}"))
    return [context(*next(contexts), tokens=tokens) for _ in range(requests)]


def prefilled(trace: Trace, capacity: int | None, **options: Any) -> tuple[int, int]:
    """Return the tokens that an engine computes: those of the context that it does not hold, and those of notes."""
    engine = PrefixTree[bytes](capacity)
    planner = ContextPlanner(capacity_tokens=capacity, **options)
    missed = notes = 0
    for request in trace:
        with planner.planning(request) as plan:
            tokens = [planned.block.tokens for planned in plan.blocks]
            held = engine.insert([planned.block.fingerprint for planned in plan.blocks], tokens)
            missed += sum(tokens) - held.tokens
            notes += plan.note_tokens
    return missed, notes


SHORT_REPETITIONS = [("repeated", SHORT_BLOCK, held, "auto") for held in (None, 100)]
LOCKED_IN = pytest.mark.xfail(
    reason="once a context was reordered, each repetition follows that path and pays a note", strict=True
)


@pytest.mark.parametrize(
    ("traffic", "tokens", "requests_held", "annotate"),
    [
        pytest.param(*case, marks=LOCKED_IN if case in SHORT_REPETITIONS else ())
        for case in product(TRAFFIC, [SHORT_BLOCK, LONG_BLOCK], [None, 100, 15], ["auto", "none"])
    ],
)
def test_no_traffic_costs_more_than_in_relevance_order(
    traffic: str, tokens: int, requests_held: int | None, annotate: Annotate
) -> None:
    capacity = None if requests_held is None else requests_held * tokens * 8
    requests = trace(traffic, tokens, seed=1)
    before, _ = prefilled(requests, capacity, policy="relevance")
    missed, notes = prefilled(requests, capacity, annotate=annotate)
    assert missed + notes <= before * 1.002
    if traffic == "no overlap":
        assert (missed, notes) == (before, 0)
    if traffic == "few documents":
        assert missed + notes < before * 0.9


class _FreeNotes(CoAccessPolicy):
    """The default policy where it does not ask for the price of a note."""

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        return super().order(blocks, replace(prefix, note_tokens=lambda order: 0))


def orders(trace: Trace, **options: Any) -> list[tuple[int, ...]]:
    planner = ContextPlanner(**options)
    found = []
    for request in trace:
        with planner.planning(request) as plan:
            found.append(plan.order)
    return found


@pytest.mark.parametrize("annotate", ["none", "labels"])
def test_without_a_note_nothing_is_priced(annotate: Annotate) -> None:
    requests = trace("many documents", SHORT_BLOCK, seed=2)
    free = orders(requests, annotate="both", policy=_FreeNotes)
    assert orders(requests, annotate=annotate) == free
    assert orders(requests, annotate="note") != free


# -- a choice for each model -------------------------------------------------------------------------------------------


def test_auto_stands_for_the_models_own_annotation() -> None:
    planner = ContextPlanner(annotations={"small": "labels"})
    labelled = planner.plan(["One.", "Two."], model="small")
    assert labelled.annotation == "labels"
    assert planner.plan(["One.", "Two."], model="small", annotate="note").annotation == "note"
    assert planner.plan(["One.", "Two."], model="large").annotation == "note"
    assert planner.plan(["One.", "Two."]).annotation == "note"
    batch = planner.plan_batch([BatchRequest("1", ["One.", "Two."])], model="small")
    assert batch.requests[0].plan.annotation == "labels"
    fixed = ContextPlanner(annotate="none", annotations={"small": "labels"})
    assert fixed.plan(["One.", "Two."], model="small").annotation == "none"


@pytest.mark.parametrize(("wrong", "error"), [({"small": "best"}, ValueError), ("labels", TypeError)])
def test_other_annotations_are_refused(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="annotat"):
        ContextPlanner(annotations=wrong)
