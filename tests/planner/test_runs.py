"""Runs: neighbouring blocks of one source that a plan moves as one."""

from __future__ import annotations

import re

import pytest
from tests.without_siblings import own_names

from warmprefix import BatchRequest, ContextBlock, ContextPlan, ContextPlanner, Templates
from warmprefix.blocks import Pin
from warmprefix.ordering import POLICIES


def part(name: str, follows: str | None = None, pinned: Pin | None = None, tokens: int = 100) -> ContextBlock:
    return ContextBlock(f"Everything about {name}.", name, tokens, pinned=pinned, follows=follows)


def parts(names: str, pinned: dict[str, Pin] | None = None) -> list[ContextBlock]:
    """Return a block per letter. A letter that stands behind its predecessor in the alphabet follows it."""
    return [part(name, chr(ord(name) - 1), (pinned or {}).get(name)) for name in names]


def names(plan: ContextPlan) -> str:
    return "".join([planned.block.id or "" for planned in plan.blocks])


def served(planner: ContextPlanner, names: str, **options: object) -> ContextPlan:
    with planner.planning(parts(names), **options) as plan:  # type: ignore[arg-type]
        return plan


def test_a_run_moves_as_one_behind_a_resident_path() -> None:
    planner = ContextPlanner()
    served(planner, "xmz")
    assert names(planner.plan(parts("abcmx"))) == "xmabc"


def test_a_resident_beginning_of_a_run_pays() -> None:
    planner = ContextPlanner()
    served(planner, "abx")
    plan = planner.plan(parts("mabc"))
    assert names(plan) == "abcm"
    assert plan.resident_tokens == 200


def test_a_resident_path_does_not_enter_a_run_in_its_middle() -> None:
    planner = ContextPlanner()
    served(planner, "bx")
    served(planner, "zm")
    plan = planner.plan(parts("xabz"))
    assert names(plan) == "zxab"
    assert plan.resident_tokens == 100


def test_a_path_in_flight_keeps_runs_too() -> None:
    planner = ContextPlanner()
    planner.plan(parts("zab"))
    planner.plan(parts("bx"))
    assert names(planner.plan(parts("xabz"))) == "zabx"


@pytest.mark.parametrize(
    ("request_", "planned"),
    [
        pytest.param("acx", "xac", id="a gap divides"),
        pytest.param("bax", "xba", id="relevance order is no reading order"),
        pytest.param("abaxb", "xab", id="repeated"),
    ],
)
def test_only_neighbours_of_the_request_form_a_run(request_: str, planned: str) -> None:
    planner = ContextPlanner()
    served(planner, "x")
    assert names(planner.plan(parts(request_))) == planned


def test_a_block_without_text_does_not_divide_its_run() -> None:
    planner = ContextPlanner()
    served(planner, "cmx")
    picture = ContextBlock("", "b", follows="a")
    assert names(planner.plan([part("a"), picture, part("c", "b"), part("x")])) == "acx"


def test_a_block_follows_an_id_a_number_a_block_or_its_fingerprint() -> None:
    first = ContextBlock("One.", id=1)
    for follows in ("1", 1, first, first.fingerprint):
        planner = ContextPlanner()
        with planner.planning([ContextBlock("Two."), ContextBlock("Three.")]):
            pass
        second = ContextBlock("Two.", follows=follows)
        plan = planner.plan([first, second, ContextBlock("Three.")])
        assert [planned.joined for planned in plan.blocks] == [False, True, False]


def test_a_circle_is_a_run_from_where_the_request_begins_it() -> None:
    planner = ContextPlanner()
    served(planner, "bax")
    circle = [part("a", "b"), part("b", "a")]
    assert names(planner.plan([*circle, part("x")])) == "abx"
    assert names(planner.plan([*circle[::-1], part("x")])) == "bax"


@pytest.mark.parametrize(
    ("pinned", "planned"),
    [
        ({"b": "start"}, "abcmx"),
        ({"b": "end"}, "xmabc"),
        ({"a": "end", "c": "start"}, "xmabc"),
        ({"c": "start", "m": "start"}, "mabcx"),
    ],
)
def test_a_run_is_kept_at_the_end_of_its_first_pinned_block(pinned: dict[str, Pin], planned: str) -> None:
    planner = ContextPlanner()
    request = [*parts("m", pinned), *parts("abc", pinned), part("x")]
    served(planner, "x")
    assert names(planner.plan(request)) == planned
    batch = planner.plan_batch([BatchRequest(0, request)])
    assert names(batch["0"].plan) == planned


def test_members_around_a_reference_keep_their_order() -> None:
    planner = ContextPlanner()
    history = [served(planner, "bx", conversation="chat", placement="tail", annotate="labels").render()]
    plan = planner.plan(parts("mabcx"), conversation="chat", placement="tail", annotate="labels")
    assert names(plan) == "mabcx"
    assert [planned.reference is not None for planned in plan.blocks] == [False, False, True, False, True]
    assert "Everything about b." in history[0]
    assert plan.render().index("about a.") < plan.render().index("[b") < plan.render().index("about c.")


def test_the_note_names_each_run_once_by_its_first_block() -> None:
    planner = ContextPlanner(annotate="both", templates=Templates(most_named=3))
    served(planner, "xuz")
    note = planner.plan(parts("abcefgux")).order_annotation
    assert note is not None
    assert re.findall(r"\[(\w)\]", note) == ["a", "e", "u"]
    assert planner.plan(parts("abcdefg")).order_annotation is None


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_profits_from_a_run_that_comes_again(policy: str) -> None:
    """Each policy that follows what is resident puts the run first again."""
    planner = ContextPlanner(policy=policy)
    for _ in range(3):
        served(planner, "abcm")
    plan = planner.plan(parts("zabc"))
    assert names(plan) in ("abcz", "zabc")
    if policy not in ("relevance", "sorted"):
        assert (names(plan), plan.resident_tokens) == ("abcz", 300)


@pytest.mark.parametrize("planner", own_names(["auto", "merge", "relevance"], ["frequency", "context-index"]))
def test_requests_of_a_batch_share_their_runs(planner: str) -> None:
    requests = [BatchRequest(name, parts(f"{name}abc")) for name in "xyz"]
    batch = ContextPlanner().plan_batch(requests, planner=planner)
    if planner == "relevance":
        assert batch.saved_tokens == 0
    else:
        assert {names(planned.plan) for planned in batch} == {"abcx", "abcy", "abcz"}
        assert batch.saved_tokens == batch.upper_bound == 600


def test_a_batch_and_a_window_continue_resident_runs() -> None:
    for name in ("auto", "window"):
        planner = ContextPlanner()
        served(planner, "abx")
        plan = planner.plan_batch([BatchRequest(i, parts(f"{i}abc")) for i in range(2)], name)
        assert {names(planned.plan)[:3] for planned in plan} == {"abc"}
        assert plan.saved_tokens == 200 + 300
