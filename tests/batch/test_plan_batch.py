"""`ContextPlanner.plan_batch`, recounted with a list of prefixes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.without_siblings import own_names

from warmprefix import ContextBlock, ContextPlanner
from warmprefix.annotate import Annotate
from warmprefix.batch.plan import BatchPlan, BatchRequest, PlannedRequest
from warmprefix.batch.planners import Placed, Progress
from warmprefix.telemetry import PlannerStats
from warmprefix.traces import NoRecorder

LENGTHS = {"alpha": 3, "beta": 5, "gamma": 1, "delta": 0, "epsilon": 8, "zeta": 13}
"""Tokens of the texts; one is declared to have none."""

Path = tuple[bytes, ...]

blocks = st.builds(
    lambda text, id, pinned: ContextBlock(text, id=id, tokens=LENGTHS[text], pinned=pinned),
    st.sampled_from(sorted(LENGTHS)),
    st.sampled_from([None, "a", "b", "no label, this"]),
    st.sampled_from([None, None, None, None, "start", "end"]),
)
contexts = st.lists(blocks, max_size=6)
one_tenants = st.lists(st.tuples(contexts, st.just(None), st.sampled_from([False] * 5 + [True])), max_size=10)
many_tenants = st.lists(st.tuples(contexts, st.sampled_from([None, "t", "u"]), st.booleans()), max_size=10)
PLANNERS = own_names(["auto", "merge", "relevance"], ["frequency", "context-index"])
planner_names = st.sampled_from(PLANNERS)
capacities = st.none() | st.integers(1, 40)

Listed = Sequence[tuple[Sequence[ContextBlock], str | None, bool]]


def requests_of(listed: Listed) -> list[BatchRequest]:
    return [
        BatchRequest(f"q{i}", context, f"question {i}", tenant=tenant, order_locked=locked)
        for i, (context, tenant, locked) in enumerate(listed)
    ]


def block(text: str, tokens: int = 10, **options: Any) -> ContextBlock:
    return ContextBlock(text, tokens=tokens, **options)


def texts(planned: PlannedRequest) -> list[str]:
    return [each.text for each in planned.blocks]


class Cache:
    """Cached prefixes, the next to evict first, and the requests that computed them."""

    def __init__(self, capacity_tokens: int | None) -> None:
        self.capacity_tokens = capacity_tokens
        self.held: dict[Path, tuple[int, str | None]] = {}

    def serve(self, keys: Path, tokens: Sequence[int], by: str | None) -> tuple[int, str | None]:
        """Return the tokens found, and the request that computed the last of them."""
        found = next((end for end in range(len(keys), 0, -1) if keys[:end] in self.held), 0)
        warmed_by = self.held[keys[:found]][1] if found else None
        for end in range(len(keys), 0, -1):
            before = self.held.pop(keys[:end], None)
            self.held[keys[:end]] = before if before and end <= found else (tokens[end - 1], by)
        self.fit()
        return sum(tokens[:found]), warmed_by

    def fit(self) -> None:
        while self.capacity_tokens is not None and sum(t for t, _ in self.held.values()) > self.capacity_tokens:
            del self.held[next(iter(self.held))]


def check(plan: BatchPlan, requests: Sequence[BatchRequest], caches: Mapping[str | None, Cache] | None = None) -> None:
    """Check that a plan has exactly these requests, and that its savings are correct.

    Each tenant has a cache of its own, as if it had its own engine.
    """
    by_tenant = {request.tenant: Cache(plan.capacity_tokens) for request in requests} if caches is None else caches
    assert sorted(planned.id for planned in plan) == sorted(request.id for request in requests)
    assert list(plan.positions) == [request.id for request in requests]
    assert [planned.request for planned in plan.in_callers_order()] == list(requests)
    labels: dict[tuple[str | None, bytes], str] = {}
    for planned in plan:
        request = planned.request
        assert plan[request.id] is planned
        check_order(planned)
        for each in planned.blocks:
            assert labels.setdefault((request.tenant, each.block.fingerprint), each.label) == each.label
        assert planned.plan.blocks == planned.blocks
        assert planned.render() == planned.plan.render() == planned.render()
        assert planned.plan.resident_tokens == planned.saved_tokens
        keys = tuple(each.block.fingerprint for each in planned.blocks)
        found = by_tenant[request.tenant].serve(keys, [each.block.tokens for each in planned.blocks], request.id)
        assert (planned.saved_tokens, planned.warmed_by) == found
    for tenant in by_tenant:
        own = [label for (whose, _), label in labels.items() if whose == tenant]
        assert len(set(own)) == len(own) or set(own) == {""}
    assert plan.saved_tokens == sum(planned.saved_tokens for planned in plan)
    assert plan.total_tokens == sum(planned.total_tokens for planned in plan)
    assert plan.saved_tokens <= plan.upper_bound <= plan.total_tokens
    assert plan.hit_ratio == (plan.saved_tokens / plan.total_tokens if plan.total_tokens else 0)
    assert plan.seconds > 0


def net_tokens(batch: BatchPlan) -> int:
    return sum(planned.saved_tokens - planned.note_tokens for planned in batch)


def check_order(planned: PlannedRequest) -> None:
    """Check that all blocks come once, pinned in place, locked in relevance order."""
    listed = planned.request.blocks
    first: dict[bytes, int] = {}
    for i, each in enumerate(listed):
        first.setdefault(each.fingerprint, i)
    assert sorted(planned.order) == sorted(first.values())
    assert [each.block for each in planned.blocks] == [listed[i] for i in planned.order]
    assert sorted(i for each in planned.blocks for i in each.positions) == list(range(len(listed)))
    if planned.request.order_locked:
        assert list(planned.order) == sorted(first.values())
    else:
        pins = [listed[i].pinned for i in planned.order]
        assert pins == sorted(pins, key=["start", None, "end"].index)
        for pin in ("start", "end"):
            own = [i for i in planned.order if listed[i].pinned == pin]
            assert own == sorted(own)
    annotation, note = planned.plan.annotation, planned.order_annotation
    if annotation == "both":
        assert (note is not None) == (list(planned.order[:3]) != sorted(planned.order)[:3])
    elif annotation == "note" and note is not None:
        best = listed[min(planned.order)]
        quote = note.split('"')[1]
        assert planned.blocks[0].block != best
        assert [each.block for each in planned.blocks if quote in each.block.text] == [best]
    elif annotation == "note" and list(planned.order[:1]) != sorted(planned.order)[:1]:
        movable = [i for i in planned.order if listed[i].pinned is None]
        assert movable == sorted(movable), "an order that needs a note, which cannot be written"


# -- invariants ----------------------------------------------------------------------------------------------------


@given(one_tenants, planner_names, st.sampled_from(["auto", "both", "none"]), capacities)
def test_reported_savings_are_correct(
    listed: Listed, planner: str, annotate: Annotate, capacity_tokens: int | None
) -> None:
    requests = requests_of(listed)
    batch = ContextPlanner(annotate=annotate).plan_batch(requests, planner, capacity_tokens=capacity_tokens)
    check(batch, requests)
    if planner == "auto" and capacity_tokens is None:
        untouched = ContextPlanner(annotate=annotate).plan_batch(requests, "relevance")
        assert net_tokens(batch) >= net_tokens(untouched)


@given(many_tenants, planner_names, capacities)
def test_tenants_share_nothing(listed: Listed, planner: str, capacity_tokens: int | None) -> None:
    requests = requests_of(listed)
    plan = ContextPlanner().plan_batch(requests, planner, capacity_tokens=capacity_tokens)
    check(plan, requests)
    for tenant in {request.tenant for request in requests}:
        own = [request for request in requests if request.tenant == tenant]
        alone = ContextPlanner().plan_batch(own, planner, capacity_tokens=capacity_tokens)
        assert [(p.id, p.order, p.render(), p.warmed_by, p.cache_salt) for p in alone] == [
            (p.id, p.order, p.render(), p.warmed_by, p.cache_salt) for p in plan if p.request.tenant == tenant
        ]
    salts = {(planned.request.tenant, planned.cache_salt) for planned in plan}
    assert len(salts) == len({tenant for tenant, _ in salts}) == len({salt for _, salt in salts})
    assert all((tenant is None) == (salt is None) for tenant, salt in salts)


@given(one_tenants, one_tenants, planner_names, capacities)
def test_warm_planner_counts_resident_blocks(
    before: Listed, listed: Listed, planner: str, capacity_tokens: int | None
) -> None:
    warm = ContextPlanner(capacity_tokens=None)
    cache = Cache(None)
    for context, _, locked in before:
        plan = warm.plan(context, order_locked=locked)
        warm.commit(plan)
        keys = tuple(each.block.fingerprint for each in plan.blocks)
        cache.serve(keys, [each.block.tokens for each in plan.blocks], None)
    if not any(tokens for tokens, _ in cache.held.values()):
        cache.held.clear()  # the request that warms blocks without tokens does not matter
    cache.capacity_tokens = capacity_tokens
    cache.fit()
    requests = requests_of(listed)
    batch = warm.plan_batch(requests, planner, capacity_tokens=capacity_tokens)
    check(batch, requests, {None: cache})
    if capacity_tokens is None:
        cold = ContextPlanner().plan_batch(requests, planner)
        assert net_tokens(batch) >= net_tokens(cold)
        assert batch.upper_bound >= cold.upper_bound


@given(one_tenants, planner_names)
def test_same_requests_give_the_same_plan(listed: Listed, planner: str) -> None:
    requests = requests_of(listed)
    plans = [ContextPlanner().plan_batch(requests, planner) for _ in range(2)]
    assert [(p.request, p.order, p.render(), p.warmed_by) for p in plans[0]] == [
        (p.request, p.order, p.render(), p.warmed_by) for p in plans[1]
    ]


@given(one_tenants, planner_names)
def test_commits_are_learned_and_abandoned_plans_are_not(listed: Listed, planner: str) -> None:
    requests = requests_of(listed)
    learner, same = ContextPlanner(annotate="labels"), ContextPlanner(annotate="labels")  # no order costs a note
    batch = learner.plan_batch(requests, planner)
    for planned in batch:
        assert learner.abandon(planned.plan)
        assert not learner.commit(planned.plan)
    for context, _, _ in listed:
        assert learner.plan(context).blocks == same.plan(context).blocks
    batch = learner.plan_batch(requests, planner)
    assert all(learner.commit(planned.plan) for planned in batch)
    assert not any(learner.commit(planned.plan) or learner.abandon(planned.plan) for planned in batch)
    again = learner.plan_batch(requests, planner)
    for planned in batch:
        locked = learner.plan([each.block for each in planned.blocks], order_locked=True)
        assert locked.resident_tokens == planned.total_tokens
        assert [each.label for each in locked.blocks] == [each.label for each in planned.blocks]
    assert again.saved_tokens == again.total_tokens
    assert {planned.warmed_by for planned in again if planned.saved_tokens} <= {None}


@given(one_tenants, planner_names)
def test_labels_equal_those_of_plan(listed: Listed, planner: str) -> None:
    """Whichever plans first, and also for one text with several ids."""
    batches, singles = ContextPlanner(annotate="both"), ContextPlanner(annotate="both")
    requests = requests_of(listed)
    expected = {each.block.fingerprint: each.label for context, _, _ in listed for each in singles.plan(context).blocks}
    planned = batches.plan_batch(requests, planner)
    assert {each.block.fingerprint: each.label for request in planned for each in request.blocks} == expected
    for context, _, _ in listed:
        assert all(each.label == expected[each.block.fingerprint] for each in batches.plan(context).blocks)


@given(st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), max_size=8), planner_names)
def test_batch_without_shared_blocks_is_unchanged(shape: list[list[int]], planner: str) -> None:
    contexts = [[block(f"{i} {number}", id=f"{i}-{number}") for number in own] for i, own in enumerate(shape)]
    batch = ContextPlanner().plan_batch({str(i): context for i, context in enumerate(contexts)}, planner)
    assert [planned.id for planned in batch] == [str(i) for i in range(len(contexts))] or not all(contexts)
    assert (batch.saved_tokens, batch.upper_bound) == (0, 0)
    for i, context in enumerate(contexts):
        assert batch[str(i)].render() == ContextPlanner().plan(context).render()


# -- examples ------------------------------------------------------------------------------------------------------


def test_shared_blocks_come_first_and_their_requests_run_together() -> None:
    a, b, c, d = (block(text, tokens=100) for text in "abcd")
    batch = ContextPlanner().plan_batch({"1": [a, b], "2": [c], "3": [d, b]})
    assert [(planned.id, "".join(texts(planned)), planned.saved_tokens, planned.warmed_by) for planned in batch] == [
        ("1", "ba", 0, None),
        ("3", "bd", 100, "1"),
        ("2", "c", 0, None),
    ]
    assert batch["1"].order_annotation is not None
    assert batch["2"].order_annotation is None
    assert (batch.saved_tokens, batch.total_tokens, batch.upper_bound, batch.bound) == (
        100,
        500,
        100,
        "spanning forest",
    )
    assert (batch.planner, batch.device, len(batch)) == ("auto", "cpu", 3)


def test_auto_keeps_relevance_order_where_notes_cost_more_than_it_saves() -> None:
    a, b, c, d = (block(text, tokens=10) for text in "abcd")
    requests = {"1": [a, b], "2": [c], "3": [d, b]}
    kept = ContextPlanner().plan_batch(requests)
    assert ["".join(texts(planned)) for planned in kept] == ["ab", "c", "db"]
    assert net_tokens(kept) == 0 > net_tokens(ContextPlanner().plan_batch(requests, "merge"))
    assert ContextPlanner(annotate="none").plan_batch(requests).saved_tokens == 10


def test_a_group_that_saves_too_little_is_left_alone_and_others_are_not() -> None:
    a, b, d = (block(text, tokens=10) for text in "abd")
    e, f, g = (block(text, tokens=100) for text in "efg")
    batch = ContextPlanner().plan_batch({"1": [a, b], "2": [d, b], "3": [e, f], "4": [g, f]})
    assert sorted("".join(texts(planned)) for planned in batch) == ["ab", "db", "fe", "fg"]


def test_first_of_equal_texts_gives_the_label() -> None:
    requests = {"1": [block("same", id="first")], "2": [block("same", id="second")], "3": [block("same")]}
    batch = ContextPlanner(annotate="labels").plan_batch(requests)
    assert {each.label for planned in batch for each in planned.blocks} == {"first"}
    assert batch.saved_tokens == 20


def test_one_id_with_two_texts_is_two_blocks() -> None:
    planner = ContextPlanner(annotate="labels")
    batch = planner.plan_batch({"1": [block("one", id="x")], "2": [block("two", id="x")]})
    labels = [each.label for planned in batch for each in planned.blocks]
    assert len(set(labels)) == 2
    assert batch.saved_tokens == 0


def test_repeated_block_counts_once() -> None:
    a, b = block("a"), block("b")
    batch = ContextPlanner(annotate="none").plan_batch({"1": [a, b, a, a], "2": [b, b]})
    assert batch.total_tokens == 30
    assert batch["1"].order == (1, 0)
    assert [each.positions for each in batch["1"].blocks] == [(1,), (0, 2, 3)]


def test_pinned_and_moved_beginnings_are_shared() -> None:
    """Two requests pin `a` to the start, and a third is moved behind it."""
    a, b, c = (block(text) for text in "abc")
    first = block("a", pinned="start")
    batch = ContextPlanner(annotate="none").plan_batch(
        {"1": [b, first], "2": [c], "3": [first, c], "4": [b, a], "5": [a]}
    )
    assert batch.saved_tokens >= 30
    order = [planned.id for planned in batch]
    assert abs(order.index("1") - order.index("4")) <= 2
    assert batch.saved_tokens == sum(
        planned.saved_tokens
        for planned in ContextPlanner(annotate="none").plan_batch(
            [request.request for request in batch.in_callers_order()], capacity_tokens=20
        )
    )


def test_savings_count_only_blocks_that_fit_in_the_cache() -> None:
    contexts = {str(i): [block(f"own {i}", 60), block("shared by all", 50)] for i in range(4)}
    assert ContextPlanner().plan_batch(contexts, capacity_tokens=110).saved_tokens == 150
    assert ContextPlanner().plan_batch(contexts, capacity_tokens=49).saved_tokens == 0
    assert ContextPlanner().plan_batch(contexts, capacity_tokens=1).upper_bound == 0


def test_bound_includes_a_cached_pinned_end() -> None:
    a, b, last = block("a"), block("b"), block("last", 100, pinned="end")
    warm = ContextPlanner()
    warm.commit(warm.plan([a, b, last]))
    batch = warm.plan_batch({"1": [b, a, last], "2": [b]})
    assert batch.saved_tokens == batch["1"].total_tokens + batch["2"].saved_tokens == 120
    assert batch.upper_bound == 130


def test_models_and_preambles_share_nothing() -> None:
    planner = ContextPlanner()
    for planned in planner.plan_batch({"1": ["some text"]}, model="m", preamble="You are kind."):
        assert planner.commit(planned.plan)
    assert planner.plan_batch({"2": ["some text"]}, model="m", preamble="You are kind.").saved_tokens > 0
    assert planner.plan_batch({"2": ["some text"]}, model="other", preamble="You are kind.").saved_tokens == 0
    assert planner.plan_batch({"2": ["some text"]}, model="m").saved_tokens == 0
    messages = planner.plan_batch([BatchRequest(7, ["some text"], "Why?")], preamble="You are kind.")["7"].messages()
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[1]["content"].endswith("some text\n\nWhy?")


def test_custom_planner_is_used_and_checked() -> None:
    class Backwards:
        def arrange(self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], progress: Progress) -> list[Placed]:
            return [Placed(i, tuple(reversed(contexts[i]))) for i in reversed(range(len(contexts)))]

    batch = ContextPlanner().plan_batch({"1": ["a", "b"], "2": ["c", "b"]}, Backwards())
    assert [(planned.id, texts(planned)) for planned in batch] == [("2", ["b", "c"]), ("1", ["b", "a"])]
    assert batch.planner == "Backwards"


def test_progress_is_reported() -> None:
    steps: list[tuple[str, int, int]] = []
    requests = {str(i): [f"{j} text" for j in range(i % 3, i % 3 + 4)] for i in range(20)}
    ContextPlanner().plan_batch(requests, "merge", progress=lambda *step: steps.append(step))
    assert steps
    assert all(0 <= done <= total for _, done, total in steps)


@pytest.mark.parametrize("time_budget", [0, 0.05])
def test_time_budget_is_accepted(time_budget: float) -> None:
    requests = requests_of([([block(f"{(i * j) % 37}") for j in range(1, 9)], None, False) for i in range(60)])
    check(ContextPlanner().plan_batch(requests, time_budget=time_budget), requests)


# -- bad and extreme input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(
    "requests",
    [
        {},
        [],
        {"only": []},
        {"only": ["text"]},
        {"1": [], "2": []},
        {"1": [""], "2": ["x", " "]},
    ],
)
def test_tiny_batches(planner: str, requests: Any) -> None:
    batch = ContextPlanner().plan_batch(requests, planner)
    assert len(batch) == len(requests)
    assert batch.saved_tokens == 0
    in_full = [tuple(i for i, text in enumerate(context) if text.strip()) for context in dict(requests).values()]
    assert sorted(planned.order for planned in batch) == sorted(in_full)


@pytest.mark.sample(4)
@pytest.mark.parametrize("planner", [name for name in PLANNERS if name != "merge"])
@pytest.mark.parametrize(
    ("listed", "saved_tokens"),
    [
        pytest.param([[block(f"{i} {j}") for j in range(3)] for i in range(1_100)], 0, id="disjoint"),
        pytest.param(
            [[block(f"{i}"), block("pinned", pinned="start")] for i in range(5_000)], 49_990, id="one pinned block"
        ),
        pytest.param([[block("c"), block("a"), block("b")]] * 5_000, 149_970, id="all the same"),
        pytest.param([[]] * 1_100, 0, id="empty"),
    ],
)
def test_large_batches(planner: str, listed: list[list[ContextBlock]], saved_tokens: int) -> None:
    batch = ContextPlanner(max_open_plans=10).plan_batch({str(i): context for i, context in enumerate(listed)}, planner)
    assert len(batch) == len(listed)
    assert (batch.saved_tokens, batch.upper_bound) == (saved_tokens, saved_tokens)


@pytest.mark.slow
def test_one_shared_block_and_nested_contexts() -> None:
    shared = {str(i): [block(f"{i}"), block("in all")] for i in range(5_000)}
    batch = ContextPlanner(annotate="none").plan_batch(shared)
    assert batch.saved_tokens == batch.upper_bound == 49_990
    nested = {str(length): [block(f"{i}") for i in range(length)] for length in range(400)}
    batch = ContextPlanner(annotate="none").plan_batch(nested)
    assert batch.saved_tokens == batch.upper_bound == 10 * sum(range(399))


def test_huge_token_counts() -> None:
    batch = ContextPlanner().plan_batch({str(i): [block(f"{i}", 10**9), block("b", 10**18)] for i in range(50)})
    assert batch.saved_tokens == 49 * 10**18


def test_repeated_ids_are_named() -> None:
    requests = [BatchRequest(id, []) for id in ("a", "b", "a", "c", "b", "a")]
    planner = ContextPlanner()
    with pytest.raises(ValueError, match=r"got these repeated, with their places: 'a' \(0, 2, 5\), 'b' \(1, 4\)$"):
        planner.plan_batch(requests)
    with pytest.raises(ValueError, match=r"and 15 more$"):
        planner.plan_batch([BatchRequest(i % 20, []) for i in range(40)])
    with pytest.raises(ValueError, match=r"'1' \(0, 1\)$"):
        planner.plan_batch({1: ["a"], "1": ["b"]})  # type: ignore[arg-type]
    assert planner.stats() == PlannerStats()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"requests": "text"}, TypeError, "requests must be BatchRequests, or contexts by id, got one str"),
        ({"requests": 7}, TypeError, "requests must be BatchRequests, or contexts by id, got one int"),
        ({"requests": [["text"]]}, TypeError, r"requests\[0\] must be a BatchRequest, got list"),
        ({"requests": BatchRequest("a", [])}, TypeError, "requests must be .*, got one BatchRequest"),
        ({"requests": {"a": "text"}}, TypeError, "blocks must be a sequence of ContextBlock or str, got one str"),
        ({"requests": {None: []}}, TypeError, "id must be a str or an int, got NoneType"),
        ({"requests": {"": []}}, ValueError, "id must not be empty, got ''"),
        ({"planner": "best"}, ValueError, "planner must be one of auto, .*, got 'best'"),
        ({"planner": None}, TypeError, "planner must be a name or a BatchPlanner, got NoneType"),
        ({"capacity_tokens": 0}, ValueError, "capacity_tokens must be 1 or more, or None, got 0"),
        ({"time_budget": -1}, ValueError, "time_budget must be 0 seconds or more, or None, got -1"),
        ({"time_budget": float("nan")}, ValueError, "time_budget must be 0 seconds or more, or None, got nan"),
        ({"time_budget": float("inf")}, ValueError, "time_budget must be 0 seconds or more, or None, got inf"),
        ({"time_budget": "1"}, TypeError, "time_budget must be a number of seconds or None, got str"),
        ({"device": "tpu"}, ValueError, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"device": "tpu", "planner": "relevance"}, ValueError, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"model": 7}, TypeError, "model must be a str or None, got int"),
        ({"preamble": b"p"}, TypeError, "preamble must be a str or None, got bytes"),
    ],
)
def test_a_bad_batch_is_refused_and_leaves_no_trace(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    planner = ContextPlanner()
    given: dict[str, Any] = {"requests": {"a": ["text"]}, **arguments}
    with pytest.raises(error, match=f"^{message}$"):
        planner.plan_batch(given.pop("requests"), **given)
    assert planner.stats() == PlannerStats()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"id": True}, TypeError, "id must be a str or an int, got bool"),
        ({"id": 1.0}, TypeError, "id must be a str or an int, got float"),
        ({"question": None}, TypeError, "question must be a str, got NoneType"),
        ({"tenant": 7}, TypeError, "tenant must be a str or None, got int"),
        ({"blocks": [7]}, TypeError, r"blocks\[0\] must be a ContextBlock or a str, got int"),
    ],
)
def test_a_bad_request_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        BatchRequest(**{"id": "a", "blocks": [], **arguments})


def test_missing_id_raises_key_error() -> None:
    with pytest.raises(KeyError, match="absent"):
        ContextPlanner().plan_batch({"a": []})["absent"]


# -- state of the planner ------------------------------------------------------------------------------------------


def test_batches_are_counted_as_plans() -> None:
    planner = ContextPlanner()
    a, b, c = (block(text) for text in "abc")
    batch = planner.plan_batch({"1": [a, b], "2": [c, b], "3": [c]})
    stats = planner.stats()
    assert (stats.plans, stats.open_plans, stats.planned_tokens, stats.resident_tokens) == (
        3,
        3,
        50,
        batch.saved_tokens,
    )
    assert stats.reordered_plans == sum(planned.plan.reordered for planned in batch)
    planner.commit(batch["1"].plan, cached_tokens=4)
    planner.abandon(batch["2"].plan)
    planner.commit(batch["1"].plan)
    stats = planner.stats()
    assert (stats.commits, stats.abandons, stats.late_commits, stats.open_plans) == (1, 1, 1, 1)
    assert (stats.reports, stats.reported_cached_tokens) == (1, 4)
    planner.reset()
    assert planner.stats() == PlannerStats()
    assert not planner.commit(batch["3"].plan)


def test_number_of_open_batches_is_bounded() -> None:
    planner = ContextPlanner(max_open_plans=5)
    batches = [planner.plan_batch({str(i): [f"text {i}"] for i in range(3)}) for _ in range(4)]
    assert planner.stats().open_plans == 3
    assert not planner.commit(batches[2]["0"].plan)
    assert planner.commit(batches[3]["0"].plan)
    large = planner.plan_batch({str(i): [f"text {i}"] for i in range(50)})
    assert all(planner.commit(planned.plan) for planned in large), "the last batch's plans can all be committed"


def test_finished_batch_leaves_no_state() -> None:
    planner = ContextPlanner()
    for _ in range(100):
        planner.plan_batch({})
        for planned in planner.plan_batch({"1": ["a"], "2": ["b"]}):
            planner.commit(planned.plan)
    assert len(planner._state.open_plans) == 0


def test_batch_of_another_planner_is_not_committed() -> None:
    batch = ContextPlanner().plan_batch({"1": ["a"]})
    assert not ContextPlanner().commit(batch["1"].plan)


def test_recorder_receives_every_request() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.records: list[tuple[Sequence[ContextBlock], Mapping[str, object]]] = []

        def record(self, blocks: Sequence[ContextBlock], **options: object) -> None:
            self.records.append((tuple(blocks), options))
            if len(self.records) == 2:
                raise OSError

    recorder = Recorder()
    planner = ContextPlanner(recorder=recorder)
    a, b = block("a"), block("b")
    planner.plan_batch(
        [BatchRequest("1", [a, b], tenant="t"), BatchRequest("2", [b]), BatchRequest("3", [])], model="m"
    )
    shared = {"conversation": None, "model": "m", "preamble": None}
    assert recorder.records == [
        ((a, b), {**shared, "tenant": "t"}),
        ((b,), {**shared, "tenant": None}),
        ((), {**shared, "tenant": None}),
    ]
    assert planner.stats().recorder_errors == 1


# -- concurrency ---------------------------------------------------------------------------------------------------


@settings(max_examples=max(1, settings().max_examples // 60), suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1_000))
def test_batches_run_concurrently_with_batches_and_requests(seed: int) -> None:
    planner = ContextPlanner(capacity_tokens=2_000)
    requests = requests_of([([block(f"{(seed + i * j) % 41}") for j in range(1, 9)], None, False) for i in range(120)])
    failures: list[BaseException] = []
    over = threading.Event()

    def plan_batches() -> None:
        try:
            for _ in range(3):
                batch = planner.plan_batch(requests)
                for planned in batch:
                    check_order(planned)
                    assert planner.commit(planned.plan)
                assert batch.saved_tokens <= batch.upper_bound
        except BaseException as error:
            failures.append(error)

    def plan_others() -> None:
        try:
            i = 0
            while not over.is_set():
                with planner.planning(requests[i % len(requests)].blocks):
                    i += 1
                check_order_of_window(planner, requests[i % 100 : i % 100 + 10])
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=plan_batches) for _ in range(2)]
    others = threading.Thread(target=plan_others)
    for thread in (*workers, others):
        thread.start()
    for thread in workers:
        thread.join()
    over.set()
    others.join()
    assert failures == []
    assert planner.stats().policy_errors == 0


def check_order_of_window(planner: ContextPlanner, requests: Sequence[BatchRequest]) -> None:
    for planned in planner.plan_batch(requests, "window"):
        check_order(planned)
        planner.abandon(planned.plan)


def test_recorder_receives_each_block_once() -> None:
    records: list[list[str]] = []

    class Recorder(NoRecorder):
        def record(self, blocks: Sequence[ContextBlock], **options: str | int | None) -> None:
            records.append([block.text for block in blocks])

    ContextPlanner(recorder=Recorder()).plan_batch({"a": ["x", "y", "x"]})
    assert records == [["x", "y"]]
