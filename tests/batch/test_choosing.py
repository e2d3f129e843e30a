"""Choosing in a batch: every request is fed candidates of its own, and the batch never computes more by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.without_siblings import own_names

from warmprefix import BatchPlan, BatchRequest, Choice, ContextBlock, ContextPlanner, PlannedRequest
from warmprefix.batch import Placed, Progress

PLANNERS = own_names(["auto", "merge", "relevance", "window"], ["frequency", "context-index"])
LETTERS = "abcdefghij"

choices = st.builds(
    lambda k, keep, within, extra, most: Choice(k, keep=None if keep is None else min(keep, k), within=within,
        extra=extra, most=most),
    st.integers(1, 5), st.none() | st.integers(0, 3), st.sampled_from([0, 0.2, 1, 10]), st.integers(0, 2),
    st.sampled_from([0.02, 0.1, 1]),
)  # fmt: skip
contexts = st.lists(st.tuples(st.sampled_from([*LETTERS, " "]), st.integers(0, 9)), max_size=9)
batches = st.lists(contexts, max_size=9)
planner_names = st.sampled_from(PLANNERS)

Listed = Sequence[Sequence[tuple[str, int]]]


def block(letter: str, score: Any, **options: Any) -> ContextBlock:
    return ContextBlock(letter, tokens=100 * (1 + ord(letter[0]) % 7), score=score, **options)


def requests_of(listed: Listed, tenant: str | None = None) -> list[BatchRequest]:
    """Return requests; of equal candidates, the first one has the best score."""
    return [
        BatchRequest(
            f"{tenant}{i}",
            [block(letter, score) for letter, score in sorted(context, key=lambda each: -each[1])],
            tenant=tenant,
        )
        for i, context in enumerate(listed)
    ]


def evidence(request: BatchRequest) -> list[ContextBlock]:
    return list({each.fingerprint: each for each in reversed(request.blocks) if not each.is_blank}.values())[::-1]


def first_candidates(requests: Sequence[BatchRequest], k: int) -> list[BatchRequest]:
    distinct = [[*dict.fromkeys(request.blocks[i] for i in places_of(request))] for request in requests]
    return [
        BatchRequest(request.id, blocks[:k], request.question, tenant=request.tenant)
        for request, blocks in zip(requests, distinct, strict=True)
    ]


def places_of(request: BatchRequest) -> list[int]:
    """Return the first places of the distinct candidates."""
    first: dict[bytes, int] = {}
    for i, each in enumerate(request.blocks):
        if not each.is_blank:
            first.setdefault(each.fingerprint, i)
    return list(first.values())


def computed(batch: BatchPlan) -> int:
    return batch.total_tokens - batch.saved_tokens + sum(planned.note_tokens for planned in batch)


def shown(batch: BatchPlan) -> list[Any]:
    return [(planned.id, planned.order, planned.render(), planned.saved_tokens, planned.warmed_by) for planned in batch]


def texts(planned: PlannedRequest) -> str:
    return "".join(each.text for each in planned.blocks)


def check(planned: PlannedRequest, choice: Choice) -> None:
    """Check what a request is fed, and what its plan says of the rest."""
    request, places = planned.request, places_of(planned.request)
    fed, first = {*planned.order}, places[: choice.k]
    assert len(fed) == len(planned.order)
    assert fed <= {*places}
    assert {*first[: choice.kept]} <= fed
    assert len(first) <= len(fed) <= len(first) + choice.extra
    entered = sorted(fed - {*first})
    assert planned.entered == tuple(entered)
    if entered:
        worst, best = request.blocks[first[-1]].score, request.blocks[first[0]].score
        assert worst is not None
        assert best is not None
        for place in entered:
            score = request.blocks[place].score
            assert score is not None
            assert abs(worst - score) <= choice.within * abs(best - worst) + 1e-9
    assert [each.block for each in planned.blocks] == [request.blocks[place] for place in planned.order]
    for each, place in zip(planned.blocks, planned.order, strict=True):
        assert each.positions == tuple(i for i, other in enumerate(request.blocks) if other == request.blocks[place])
    assert sorted([*[out.position for out in planned.left_out], *fed]) == sorted(places)
    for out in planned.left_out:
        assert out.block is request.blocks[out.position]
        assert (out.reason == "exchanged") == (out.position in first) == (out.instead is not None)
        assert out.instead is None or out.instead in entered
    assert planned.plan.left_out == planned.left_out
    assert planned.plan.entered == planned.entered
    assert planned.render() == planned.plan.render()


# -- invariants ----------------------------------------------------------------------------------------------------


@given(batches, choices, planner_names, st.sampled_from([None, 500]))
def test_requests_are_fed_their_own_candidates(
    listed: Listed, choice: Choice, planner: str, capacity_tokens: int | None
) -> None:
    requests = requests_of(listed)
    batch = ContextPlanner().plan_batch(requests, planner, capacity_tokens=capacity_tokens, choose=choice)
    assert [planned.request for planned in batch.in_callers_order()] == requests
    entered, fed_to = (
        Counter[ContextBlock](),
        Counter(each.block.fingerprint for planned in batch for each in planned.blocks),
    )
    for planned in batch:
        check(planned, choice)
        entered.update(planned.request.blocks[place] for place in planned.entered or ())
        assert all(fed_to[out.block.fingerprint] >= 5 for out in planned.left_out if out.reason == "exchanged")
    assert max(entered.values(), default=0) <= choice.most * (len(requests) + 50)
    assert batch.saved_tokens <= batch.upper_bound <= batch.total_tokens


@given(batches, choices, planner_names, st.sampled_from([None, 500]), st.booleans())
def test_choice_never_computes_more(
    listed: Listed, choice: Choice, planner: str, capacity_tokens: int | None, is_warm: bool
) -> None:
    requests = requests_of(listed)
    computing: list[int] = []
    for own, choose in ((requests, choice), (first_candidates(requests, choice.k), None)):
        engine = ContextPlanner()
        if is_warm:
            for request in requests[::2]:
                engine.commit(engine.plan(request.blocks[::-2]))
        computing.append(computed(engine.plan_batch(own, planner, capacity_tokens=capacity_tokens, choose=choose)))
    assert computing[0] <= computing[1]


@given(batches, choices, planner_names)
def test_same_candidates_give_the_same_plan(listed: Listed, choice: Choice, planner: str) -> None:
    requests = requests_of(listed)
    plans = [ContextPlanner().plan_batch(requests, planner, choose=choice) for _ in range(2)]
    assert shown(plans[0]) == shown(plans[1])


@given(batches, batches, choices, planner_names)
def test_other_tenants_change_nothing(listed: Listed, others: Listed, choice: Choice, planner: str) -> None:
    own, other = requests_of(listed, "own"), requests_of(others, "other")
    alone = ContextPlanner(salt_key=b"1" * 32).plan_batch(own, planner, choose=choice)
    shared = ContextPlanner(salt_key=b"1" * 32, capacity_tokens=1_000)
    for planned in shared.plan_batch(other, choose=choice):
        shared.commit(planned.plan)
    together = shared.plan_batch([*other, *own], planner, choose=choice)
    assert [each for each in shown(together) if each[0].startswith("own")] == shown(alone)


@given(batches, st.integers(1, 5), planner_names)
def test_without_candidates_in_reach_the_first_ones_are_planned(listed: Listed, k: int, planner: str) -> None:
    requests = requests_of([[(letter, -100 * i) for i, (letter, _) in enumerate(own)] for own in listed])
    first = ContextPlanner(annotate="both").plan_batch(first_candidates(requests, k), planner)
    chosen = ContextPlanner(annotate="both").plan_batch(requests, planner, choose=Choice(k, keep=0, within=0))
    assert [(planned.id, planned.render(), planned.saved_tokens) for planned in chosen] == [
        (planned.id, planned.render(), planned.saved_tokens) for planned in first
    ]


# -- examples ------------------------------------------------------------------------------------------------------


def requests_with_a_choice(others: int = 5, entering: float = 4.9, **options: Any) -> list[BatchRequest]:
    """Return requests. The first one may be fed what the second one is, because five `others` are fed `f`."""
    return [
        BatchRequest("1", [block("a", 9), block("g", 8), block("f", 5, **options), block("c", entering)]),
        BatchRequest("2", [block("c", 9), block("a", 8), block("g", 7)]),
        *[BatchRequest(f"{i}", [block("f", 9), block("e", 8), block("b", 7)]) for i in range(3, 3 + others)],
    ]


def fed(requests: Sequence[BatchRequest], choice: Choice) -> dict[str, str]:
    batch = ContextPlanner().plan_batch(requests, choose=choice)
    for planned in batch:
        check(planned, choice)
    return {planned.id: "".join(sorted(texts(planned))) for planned in batch.in_callers_order()}


FIRST = {"1": "afg", "2": "acg"} | dict.fromkeys("34567", "bef")


def test_candidate_that_another_request_is_fed_enters() -> None:
    choice = Choice(3, keep=2)
    assert fed(requests_with_a_choice(), choice) == FIRST | {"1": "acg"}
    planned = ContextPlanner().plan_batch(requests_with_a_choice(), choose=choice)["1"]
    assert planned.entered == (3,)
    assert [(each.block.text, each.position, each.reason, each.instead) for each in planned.left_out] == [
        ("f", 2, "exchanged", 3)
    ]


def test_passage_that_few_others_are_fed_does_not_leave() -> None:
    assert fed(requests_with_a_choice(others=4), Choice(3, keep=2)) == {id: FIRST[id] for id in "123456"}


def test_exchange_that_saves_little_is_not_made() -> None:
    requests = [
        BatchRequest(request.id, [replace(each, tokens=200) if each.text == "f" else each for each in request.blocks])
        for request in requests_with_a_choice()
    ]
    assert fed(requests, Choice(3, keep=2)) == FIRST


def test_passage_far_above_rank_k_does_not_leave() -> None:
    requests = requests_with_a_choice()
    requests[0] = BatchRequest("1", [block("a", 9), block("g", 8), block("f", 7.9), block("j", 5), block("c", 4.9)])
    assert fed(requests, Choice(4, keep=2))["1"] == "afgj"


def test_candidate_beyond_tolerance_does_not_enter() -> None:
    assert fed(requests_with_a_choice(), Choice(3, keep=2, within=0)) == FIRST
    assert fed(requests_with_a_choice(entering=4.55), Choice(3, keep=2)) == FIRST  # half of it in batches
    assert fed(requests_with_a_choice(entering=4.65), Choice(3, keep=2)) == FIRST | {"1": "acg"}


def test_first_candidates_are_kept() -> None:
    assert fed(requests_with_a_choice(), Choice(3)) == FIRST


def test_brake_keeps_a_candidate_out() -> None:
    assert fed(requests_with_a_choice(), Choice(3, keep=2, most=0.01)) == FIRST


def test_candidate_that_costs_nothing_is_added() -> None:
    requests = [
        BatchRequest("1", [block("a", 9), block("b", 5), block("c", 4.9), block("d", 4.8)]),
        BatchRequest("2", [block("a", 9), block("c", 5)]),
    ]
    first, added = (ContextPlanner().plan_batch(requests, choose=Choice(2, keep=2, extra=extra)) for extra in (0, 1))
    assert [texts(planned) for planned in first] == ["ab", "ac"]
    assert {planned.id: texts(planned) for planned in added} == {"1": "acb", "2": "ac"}
    assert computed(added) == computed(first)
    assert added["1"].entered == (2,)
    assert [(each.position, each.reason, each.instead) for each in added["1"].left_out] == [(3, "rank", None)]


@pytest.mark.parametrize("options", [{"pinned": "end"}, {"follows": ContextBlock("g")}])
def test_pinned_candidates_and_runs_are_not_exchanged(options: dict[str, Any]) -> None:
    assert fed(requests_with_a_choice(**options), Choice(3, keep=2)) == FIRST


def test_twin_that_another_request_is_fed_is_fed() -> None:
    words = " ".join(f"word{i}" for i in range(200))
    old, new = (ContextBlock(f"Version {i}.0\n{words}", score=9 - i / 10) for i in (1, 2))
    requests = [
        BatchRequest("1", [old, new, block("a", 5)]),
        BatchRequest("2", [new, block("b", 5)]),
    ]
    batch = ContextPlanner().plan_batch(requests, choose=Choice(3, twins=True))
    assert {planned.id: {each.block for each in planned.blocks} for planned in batch} == {
        "1": {new, requests[0].blocks[2]},
        "2": {*requests[1].blocks},
    }
    assert [(each.position, each.reason, each.instead) for each in batch["1"].left_out] == [(0, "twin", 1)]
    assert batch.saved_tokens == new.tokens
    alone = ContextPlanner().plan_batch(requests[:1], choose=Choice(3, twins=True))
    assert [each.block for each in alone["1"].blocks] == [old, requests[0].blocks[2]]


def test_superseded_versions_are_not_fed() -> None:
    requests = [BatchRequest("1", [block("a", 9), block("b", 8), block("c", 7)])]
    choice = Choice(3, version=lambda each: ("source", each.text) if each.text in "ab" else None)
    planned = ContextPlanner().plan_batch(requests, choose=choice)["1"]
    assert texts(planned) == "bc"
    assert [(each.position, each.reason, each.instead) for each in planned.left_out] == [(0, "superseded", 1)]


def test_note_names_the_newest_version_of_the_best_candidate() -> None:
    """The newest version has the place of the oldest one, whatever its own place among the candidates."""
    names = ("old", "sea", "sky", "new")
    blocks = [ContextBlock(" ".join([f"{name}{i}" for i in range(9)]), score=9 - i) for i, name in enumerate(names)]
    versions = {blocks[0]: ("source", 1), blocks[3]: ("source", 2)}
    requests = [BatchRequest("1", blocks)]
    for planner in (Backwards(), "relevance"):
        planned = ContextPlanner().plan_batch(requests, planner, choose=Choice(4, version=versions.get))["1"]
        best, note = planned.blocks[0].block, planned.order_annotation
        assert {each.block for each in planned.blocks} == {*blocks[1:]}
        assert best == blocks[3] if note is None else best != blocks[3] and '"new0' in note


class Backwards:
    """A planner of another package."""

    def arrange(self, contexts: Sequence[Sequence[int]], tokens: Sequence[int], progress: Progress) -> list[Placed]:
        order = sorted(range(len(contexts)), key=lambda i: sorted(contexts[i])[::-1])
        return [Placed(i, tuple(sorted(contexts[i])[::-1])) for i in order]


def test_foreign_planner_plans_the_chosen_candidates() -> None:
    choice = Choice(3, keep=2)
    batch = ContextPlanner().plan_batch(requests_with_a_choice(), Backwards(), choose=choice)
    for planned in batch:
        check(planned, choice)
    assert {planned.id: "".join(sorted(texts(planned))) for planned in batch} == FIRST | {"1": "acg"}


def test_commits_count_chosen_candidates() -> None:
    requests = [BatchRequest(i, [block("a", 9), block("b", 5), block("c", 4.9)]) for i in range(3)]
    requests.append(BatchRequest("x", [block("c", 9), block("a", 5)]))
    planner = ContextPlanner()
    batch = planner.plan_batch(requests, choose=Choice(2, keep=1))
    assert all(planner.commit(planned.plan) for planned in batch)
    again = planner.plan_batch(requests, choose=Choice(2, keep=1))
    assert [planned.total_tokens - planned.saved_tokens for planned in again] == [0] * 4


def test_window_feeds_what_the_cache_holds() -> None:
    planner, choice = ContextPlanner(), Choice(3, keep=2)
    for request in requests_with_a_choice()[1:]:
        planner.commit(planner.plan(request.blocks, choose=choice))
    request = requests_with_a_choice()[0]
    alone = planner.plan(request.blocks, choose=choice)
    planner.abandon(alone)
    assert alone.entered == (3,)
    window = planner.plan_batch([request], "window", choose=choice)
    assert window["1"].plan.blocks == alone.blocks
    assert texts(planner.plan_batch([request], choose=choice)["1"]).count("c") == 0  # a batch shares it with none


class Recorder:
    def __init__(self) -> None:
        self.recorded: list[tuple[str, Any, Any]] = []

    def record(self, blocks: Sequence[ContextBlock], *, k: Any = None, request: Any = None, **_: Any) -> None:
        self.recorded.append(("".join(each.text for each in blocks), k, request))


def test_all_candidates_are_recorded_in_the_callers_order() -> None:
    recorder = Recorder()
    requests = [BatchRequest(i, [block("a", 9), block(" ", 8), block(letter, 5)]) for i, letter in enumerate("bcb")]
    batch = ContextPlanner(recorder=recorder).plan_batch(requests, choose=Choice(1))
    ids = [batch[str(i)].plan_id for i in range(3)]
    assert recorder.recorded == [("ab", 1, ids[0]), ("ac", 1, ids[1]), ("ab", 1, ids[2])]


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([3, None], "request 'q': candidate 1 must have a finite score to choose by, got None"),
        ([3, float("nan")], "request 'q': candidate 1 must have a finite score to choose by, got nan"),
        ([float("inf"), 1], "request 'q': candidate 0 must have a finite score to choose by, got inf"),
        ([1, 1, 2], "request 'q': candidates must come with descending scores, but candidate 2 has 2 behind 1"),
    ],
)
def test_scores_by_which_nothing_can_be_chosen_are_refused(scores: list[Any], message: str) -> None:
    requests = [
        BatchRequest("fine", [block("a", 1)]),
        BatchRequest("q", [block(letter, score) for letter, score in zip(LETTERS, scores, strict=False)]),
    ]
    planner = ContextPlanner()
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(")):
        planner.plan_batch(requests, choose=Choice(1))
    assert planner.stats().plans == 0


def test_bad_choices_are_refused() -> None:
    anything: Any = 3
    with pytest.raises(TypeError, match="choose must be a Choice or None, got int"):
        ContextPlanner().plan_batch({"q": ["a"]}, choose=anything)
    with pytest.raises(ValueError, match="request 'q': candidate 0 must have a finite score to choose by, got None"):
        ContextPlanner().plan_batch({"q": ["a"]}, choose=Choice(1))
    with pytest.raises(ValueError, match="request 'q': choose must be None with order_locked=True"):
        ContextPlanner().plan_batch([BatchRequest("q", [block("a", 1)], order_locked=True)], choose=Choice(1))
    assert len(ContextPlanner().plan_batch([], choose=Choice(1))) == 0
    assert ContextPlanner().plan_batch({"q": []}, choose=Choice(1))["q"].left_out == ()


@given(contexts.filter(bool), st.sampled_from([1e308, -1e308, 5e-324]))
def test_any_finite_scores_will_do(context: Sequence[tuple[str, int]], factor: float) -> None:
    blocks = [block(letter, score / 9 * factor) for letter, score in context]
    blocks.sort(key=lambda each: -(each.score or 0))
    requests = [BatchRequest(i, blocks) for i in range(3)]
    for planned in ContextPlanner().plan_batch(requests, choose=Choice(2, scores="similarity", within=1)):
        assert len(planned.order) == min(2, len(places_of(planned.request)))


def test_choice_of_distances() -> None:
    requests = [
        BatchRequest(request.id, [block(each.text, 9 - (each.score or 0)) for each in request.blocks])
        for request in requests_with_a_choice()
    ]
    assert fed(requests, Choice(3, keep=2, scores="distance")) == FIRST | {"1": "acg"}
