"""Candidates of which some are fed: validation, positions, and what is fed in place of what."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from warmprefix import BatchRequest, Choice, ContextBlock, ContextPlan, ContextPlanner
from warmprefix.choice import within_noise


def candidates(names: str, scores: Sequence[float] | None = None, tokens: int = 100) -> list[ContextBlock]:
    """Return one candidate per letter, by default with scores that fall by 1."""
    falling = scores or [float(len(names) - i) for i in range(len(names))]
    return [
        ContextBlock(f"passage {name}", id=name, tokens=tokens, score=s) for name, s in zip(names, falling, strict=True)
    ]


def fed(plan: ContextPlan) -> str:
    return "".join([str(planned.block.id) for planned in plan.blocks])


def serve(planner: ContextPlanner, *contexts: str, **options: Any) -> None:
    """Serve contexts of exactly these passages, with choice on."""
    for names in contexts:
        with planner.planning(candidates(names), choose=Choice(k=len(names)), **options):
            pass


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"k": 0}, "k must be 1 or more"),
        ({"k": 2, "keep": 3}, "keep must be at most k, which is 2, got 3"),
        ({"k": 2, "keep": -1}, "keep must be 0 or more"),
        ({"k": 2, "extra": -1}, "extra must be 0 or more"),
        ({"k": 2, "within": -0.1}, "within must be from 0"),
        ({"k": 2, "within": math.nan}, "within must be from 0"),
        ({"k": 2, "most": 1.1}, "most must be from 0 to 1"),
        ({"k": 2, "scores": "cosine"}, "scores must be 'similarity' or 'distance', got 'cosine'"),
    ],
)
def test_a_choice_checks_its_values(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Choice(**options)


@pytest.mark.parametrize("options", [{"k": 2.0}, {"k": True}, {"k": 2, "keep": "1"}, {"k": 2, "within": "0.1"}])
def test_a_choice_checks_its_types(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Choice(**options)


@pytest.mark.parametrize("score", [None, math.nan, math.inf, -math.inf, "0.5", True])
def test_a_score_that_is_no_number_is_named_by_its_position(score: Any) -> None:
    blocks = [*candidates("ab", [2.0, 1.0]), ContextBlock("c", score=score)]
    with pytest.raises(ValueError, match="candidate 2 must have a finite score to choose by"):
        ContextPlanner().plan(blocks, choose=Choice(k=2))


def test_unsorted_candidates_are_named_by_their_position() -> None:
    planner = ContextPlanner()
    blank = ContextBlock(" ")
    with pytest.raises(ValueError, match=r"descending scores, but candidate 3 has 2\.5 behind 2\.0"):
        planner.plan([blank, *candidates("abc", [3.0, 2.0, 2.5])], choose=Choice(k=2))
    with pytest.raises(ValueError, match="ascending scores, but candidate 1"):
        planner.plan(candidates("ab", [0.2, 0.1]), choose=Choice(k=2, scores="distance"))


def test_a_locked_order_and_other_values_are_refused() -> None:
    planner = ContextPlanner()
    with pytest.raises(ValueError, match="choose must be None with order_locked=True"):
        planner.plan(candidates("abc"), choose=Choice(k=2), order_locked=True)
    with pytest.raises(TypeError, match="choose must be a Choice or None, got int"):
        planner.plan(candidates("abc"), choose=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scores", "kind"),
    [([9, 5, 1, 0], "similarity"), ([-1, -5, -9, -10], "similarity"), ([0.1, 0.5, 0.9, 1.0], "distance"),
     ([1e308, 0.0, -1e308, -1.25e308], "similarity")],
)  # fmt: skip
def test_losses_mean_the_same_for_every_scale(scores: Sequence[float], kind: Any) -> None:
    assert Choice(k=3, scores=kind).losses(scores) == pytest.approx([-1, -0.5, 0, 0.125])


def test_without_a_spread_only_equal_scores_are_near() -> None:
    assert Choice(k=2).losses([1, 1, 1, 0.9]) == [0, 0, 0, math.inf]
    assert Choice(k=1).losses([3, 3, 2]) == [0, 0, math.inf]
    assert Choice(k=2).losses([]) == []


def test_the_noise_of_a_retriever_is_where_two_runs_disagree() -> None:
    first = {"a": 9, "b": 7, "c": 5, "d": 4.8, "e": 4}
    assert within_noise([(first, first)], k=3) == 0
    assert within_noise([(first, {key: score / 10 + 3 for key, score in first.items()})], k=3) == pytest.approx(0)
    assert within_noise([(first, first | {"d": 5, "c": 4.8, "x": 1})], k=3) == pytest.approx(0.05)
    assert within_noise([], k=3) == within_noise([({}, {}), ({"a": 1}, {"b": 1})], k=3) == 0
    with pytest.raises(ValueError, match="finite score"):
        within_noise([(first, first | {"c": math.nan})], k=3)


# -- what is fed ------------------------------------------------------------------------------------------------------


def test_without_a_resident_path_the_first_are_fed_with_the_same_bytes() -> None:
    alone, chosen = ContextPlanner(annotate="both"), ContextPlanner(annotate="both")
    serve(alone, "wxyz")
    serve(chosen, "wxyz")
    expected = alone.plan(candidates("abcd"))
    plan = chosen.plan(candidates("abcdefgh"), choose=Choice(k=4, within=9, extra=3))
    assert plan.render() == expected.render()
    assert [(out.block.id, out.position, out.reason, out.instead) for out in plan.left_out] == [
        (name, 4 + i, "rank", None) for i, name in enumerate("efgh")
    ]
    assert plan.entered == ()
    assert (expected.left_out, expected.entered) == ((), None)


def test_a_resident_candidate_has_the_place_of_the_last() -> None:
    planner = ContextPlanner()
    serve(planner, "xd", "abcf")
    plan = planner.plan(candidates("abcdef", [9, 8, 7, 5, 4.9, 4.8]), choose=Choice(k=4))
    assert fed(plan) == "abcf"
    assert [block.positions for block in plan.blocks] == [(0,), (1,), (2,), (5,)]
    assert [(out.block.id, out.position, out.reason, out.instead) for out in plan.left_out] == [
        ("d", 3, "exchanged", 5),
        ("e", 4, "rank", None),
    ]
    assert plan.entered == (5,)
    assert plan.resident_tokens == 400


def test_the_first_ones_are_kept() -> None:
    for keep, expected in ((4, "abcd"), (None, "abce"), (0, "abef")):
        planner = ContextPlanner()
        serve(planner, "xabcd", "ef")
        plan = planner.plan(candidates("abcdef", [9, 6, 6, 6, 6, 6]), choose=Choice(k=4, keep=keep))
        assert "".join(sorted(fed(plan))) == expected


def test_a_candidate_beyond_the_tolerance_is_not_fed() -> None:
    for within, expected in ((0.2, "abcd"), (0.23, "abcf")):
        planner = ContextPlanner()
        serve(planner, "xd", "abcf")
        with planner.planning(candidates("abcdef", [9, 8, 7, 5, 4.9, 4.1]), choose=Choice(k=4, within=within)) as plan:
            assert fed(plan) == expected


def test_a_candidate_far_above_the_last_does_not_leave() -> None:
    for third, expected in ((6.0, "abcd"), (5.3, "abdf")):
        planner = ContextPlanner()
        serve(planner, "xc", "abdf")
        scores = [9, 8, third, 5, 4.9, 4.8]
        plan = planner.plan(candidates("abcdef", scores), choose=Choice(k=4, keep=2))
        assert "".join(sorted(fed(plan))) == expected


def test_extra_candidates_are_fed_besides_the_first_ones() -> None:
    planner = ContextPlanner()
    serve(planner, "fabcdx")
    plan = planner.plan(candidates("abcdef", [9, 8, 7, 5, 5, 5]), choose=Choice(k=4, extra=1))
    assert fed(plan) == "fabcd"
    assert plan.entered == (5,)
    assert [(out.block.id, out.reason) for out in plan.left_out] == [("e", "rank")]


def test_extra_candidates_at_the_end_of_a_path_stand_behind_half_of_the_others() -> None:
    for served, expected in (("abfx", "abfcd"), ("afx", "abcd")):
        planner = ContextPlanner()
        serve(planner, served)
        plan = planner.plan(candidates("abcdef", [9, 8, 7, 5, 5, 5]), choose=Choice(k=4, extra=1))
        assert fed(plan) == expected


def test_a_passage_that_was_never_fed_is_not_left_out() -> None:
    planner = ContextPlanner()
    serve(planner, "abcf")
    for expected in ("abcd", "abcd"):
        with planner.planning(candidates("abcdef", [9, 8, 7, 5, 4.9, 4.8]), choose=Choice(k=4)) as plan:
            assert fed(plan) == expected
    serve(planner, "abcf")


def test_fewer_candidates_than_places_are_all_fed() -> None:
    plan = ContextPlanner().plan(candidates("ab"), choose=Choice(k=8))
    assert (fed(plan), plan.left_out) == ("ab", ())
    assert ContextPlanner().plan([], choose=Choice(k=8)).blocks == ()


def test_blank_and_equal_candidates_count_once() -> None:
    a, b, c = candidates("abc")
    plan = ContextPlanner().plan([a, ContextBlock(""), a, b, c], choose=Choice(k=2))
    assert [block.positions for block in plan.blocks] == [(0, 2), (3,)]
    assert [(out.position, out.reason) for out in plan.left_out] == [(4, "rank")]


def test_a_later_turn_of_a_conversation_feeds_the_first_ones() -> None:
    planner = ContextPlanner()
    serve(planner, "xd", "abcf")
    blocks = candidates("abcdef", [9, 8, 7, 5, 4.9, 4.8])
    options: dict[str, Any] = {"placement": "tail", "choose": Choice(k=4)}
    assert fed(planner.plan(blocks, history=[], **options)) == "abcf"
    assert fed(planner.plan(blocks, history=[{"role": "user", "content": "Hello"}], **options)) == "abcd"
    first = planner.plan(blocks, conversation="c", **options)
    assert fed(first) == "abcf"
    assert planner.commit(first)
    later = planner.plan(blocks, conversation="c", **options)
    assert fed(later) == "abcd"
    assert later.left_out[0][2:] == ("rank", None)


def test_requests_of_one_burst_find_the_paths_in_flight() -> None:
    planner = ContextPlanner()
    serve(planner, "xd")

    async def burst() -> tuple[ContextPlan, ContextPlan]:
        return await asyncio.gather(
            planner.aplan(candidates("abcf")),
            planner.aplan(candidates("abcdef", [9, 8, 7, 5, 4.9, 4.8]), choose=Choice(k=4)),
        )

    assert [fed(plan) for plan in asyncio.run(burst())] == ["abcf", "abcf"]
    assert planner.stats().queued_requests == 0


@pytest.mark.parametrize("pin", [None, "start"])
def test_a_repetition_holds_a_run_together(pin: Any) -> None:
    """`c` follows the second `a`, behind which only `b` is shown for the first time."""
    a, b = ContextBlock("a", score=3), ContextBlock("b", score=2)
    again = ContextBlock("a", score=3, follows=b)
    request = [a, b, again, ContextBlock("c", score=1, follows=again, pinned=pin)]
    plan = ContextPlanner().plan(request)
    assert plan.order == ((1, 3, 0) if pin else (0, 1, 3))
    chosen = ContextPlanner().plan(request, choose=Choice(k=3))
    assert chosen.blocks == plan.blocks
    batch = ContextPlanner().plan_batch([BatchRequest("only", request)], choose=Choice(k=3))
    assert batch.requests[0].plan.blocks == plan.blocks


def test_a_passage_seldom_enters_by_choice() -> None:
    planner = ContextPlanner(capacity_tokens=400)
    entered = 0
    for _ in range(300):
        serve(planner, "abcf")
        with planner.planning(candidates("abcdef", [9, 8, 7, 5, 4.9, 4.8]), choose=Choice(k=4, most=0.05)) as plan:
            entered += plan.entered == (5,)
    assert 0 < entered < 0.05 * (600 + 150)


def test_no_passage_enters_if_none_may() -> None:
    planner = ContextPlanner()
    serve(planner, "abcf", "d")
    plan = planner.plan(candidates("abcdef", [9, 8, 7, 5, 4.9, 4.8]), choose=Choice(k=4, extra=1, most=0))
    assert fed(plan) == "abcd"


def test_another_tenant_never_changes_what_is_fed() -> None:
    alone, shared = ContextPlanner(capacity_tokens=1_000), ContextPlanner(capacity_tokens=1_000)
    for planner in (alone, shared):
        for i in range(40):
            if planner is shared:
                with planner.planning(candidates("ghijklmnop"), tenant="other"):
                    pass
            names = "abcfde" if i % 2 else "abcdef"
            blocks = candidates(names, [9, 8, 7, 5, 4.9, 4.8])
            plan = planner.plan(blocks, tenant="own", choose=Choice(k=4, most=1))
            planner.commit(plan, 0 if planner is shared else 400)
            assert (fed(plan)[:3], len(plan.blocks)) == ("abc", 4)
            if i > 1:
                assert fed(plan) in ("abcd", "abcf")


def test_a_tenant_chooses_from_what_requests_without_a_choice_leave() -> None:
    planner = ContextPlanner(capacity_tokens=4_000)
    serve(planner, "d", tenant="own")
    with planner.planning(candidates("abcf"), tenant="own"):
        pass
    plan = planner.plan(candidates("abcdef", [9, 8, 7, 5, 4.9, 4.8]), tenant="own", choose=Choice(k=4))
    assert fed(plan) == "abcf"
    assert plan.resident_tokens == 400


def test_a_plan_ends_one_announcement() -> None:
    planner = ContextPlanner(capacity_tokens=400)
    serve(planner, "d", "abcf")
    planner.queued(candidates("abcf"))  # another request, with the blocks that this one is fed
    planner.queued(candidates("abcd"))
    plan = planner.plan(candidates("abcdef", [9, 8, 7, 5, 4.9, 4.8]), choose=Choice(k=4))
    assert fed(plan) == "abcf"
    assert planner.stats().queued_requests == 1
