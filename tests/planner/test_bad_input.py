"""Bad, odd and huge input: which is refused with which message, and which is served."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from warmprefix import BatchRequest, ContextBlock, ContextPlanner, EngineReport, Templates
from warmprefix.history import VisibleHistory
from warmprefix.ordering import CoAccessPolicy
from warmprefix.stores import MemorySeenStore
from warmprefix_redis.settings import SharedSettings
from warmprefix_requests import Transcript

BLOCK = ContextBlock("evidence", id="e")


# -- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"text": b"bytes"}, TypeError, "text must be a str, got bytes"),
        ({"text": None}, TypeError, "text must be a str, got NoneType"),
        ({"text": "t", "id": 1.5}, TypeError, "id must be a str, an int or None, got float"),
        ({"text": "t", "id": True}, TypeError, "id must be a str, an int or None, got bool"),
        ({"text": "t", "tokens": -1}, ValueError, "tokens must be 0 or more, got -1"),
        ({"text": "t", "tokens": 2.0}, TypeError, "tokens must be an int or None, got float"),
        ({"text": "t", "tokens": True}, TypeError, "tokens must be an int or None, got bool"),
        ({"text": "t", "pinned": "middle"}, ValueError, "pinned must be 'start', 'end' or None, got 'middle'"),
        ({"text": "t", "pinned": True}, ValueError, "pinned must be 'start', 'end' or None, got True"),
    ],
)
def test_a_bad_block_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        ContextBlock(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"blocks": "text"}, TypeError, "blocks must be a sequence of ContextBlock or str, got one str"),
        ({"blocks": BLOCK}, TypeError, "blocks must be a sequence of ContextBlock or str, got one ContextBlock"),
        ({"blocks": {"id": "text"}}, TypeError, "blocks must be a sequence of ContextBlock or str, got one dict"),
        ({"blocks": None}, TypeError, "blocks must be a sequence of ContextBlock or str, got one NoneType"),
        ({"blocks": [BLOCK, 7]}, TypeError, r"blocks\[1\] must be a ContextBlock or a str, got int"),
        ({"blocks": [None]}, TypeError, r"blocks\[0\] must be a ContextBlock or a str, got NoneType"),
        ({"placement": "middle"}, ValueError, "placement must be 'head' or 'tail', got 'middle'"),
        ({"placement": None}, ValueError, "placement must be 'head' or 'tail', got None"),
        ({"conversation": 42}, TypeError, "conversation must be a str or None, got int"),
        ({"conversation": ""}, ValueError, "conversation must be None or have at least one character, got ''"),
        ({"tenant": 42}, TypeError, "tenant must be a str or None, got int"),
        ({"model": b"m"}, TypeError, "model must be a str or None, got bytes"),
        ({"preamble": ["p"]}, TypeError, "preamble must be a str or None, got list"),
        ({"history": "Hello."}, TypeError, "history must be a sequence of messages, got one str"),
        ({"history": {"role": "user"}}, TypeError, "history must be a sequence of messages, got one dict"),
        ({"history": 7}, TypeError, "history must be a sequence of messages, got one int"),
        (
            {"history": [7]},
            TypeError,
            "history must contain only str, mappings and messages of the OpenAI SDK, got int",
        ),
    ],
)
def test_a_bad_request_is_refused_and_leaves_no_trace(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    planner = ContextPlanner()
    request: dict[str, Any] = {"blocks": [BLOCK], "conversation": "chat", "placement": "tail", **arguments}
    with pytest.raises(error, match=f"^{message}$"):
        planner.plan(request.pop("blocks"), **request)
    assert planner.stats() == ContextPlanner().stats()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy": "fastest"}, ValueError, "policy must be one of coaccess, .*, got 'fastest'"),
        ({"policy": CoAccessPolicy()}, TypeError, "policy must be a name or a callable .*, got CoAccessPolicy"),
        ({"capacity_tokens": 0}, ValueError, "capacity_tokens must be 1 or more, or None, got 0"),
        ({"capacity_tokens": "big"}, ValueError, "capacity_tokens must be 'auto', an int or None, got 'big'"),
        ({"max_labels": 1e3}, TypeError, "max_labels must be an int, got float"),
        ({"max_nodes": 0}, ValueError, "max_nodes must be 1 or more, got 0"),
        ({"max_scopes": 0}, ValueError, "max_scopes must be 1 or more, got 0"),
        ({"max_labels": -1}, ValueError, "max_labels must be 1 or more, got -1"),
        ({"max_open_plans": 0}, ValueError, "max_open_plans must be 1 or more, got 0"),
        ({"store": "redis://localhost"}, TypeError, "store must be a SeenStore or None, got str"),
        ({"templates": "{order}"}, TypeError, "templates must be Templates or None, got str"),
        ({"salt_key": "secret"}, TypeError, "salt_key must be bytes, got str"),
    ],
)
def test_a_bad_configuration_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        ContextPlanner(**arguments)


@pytest.mark.parametrize("cached_tokens", [-1, 1.5, True, "64", 10**400])
def test_a_bad_report_is_refused_and_the_plan_stays_open(cached_tokens: Any) -> None:
    planner = ContextPlanner()
    plan = planner.plan([BLOCK])
    with pytest.raises((TypeError, ValueError), match=r"^cached_tokens must be .*, got (-1|float|bool|str|10+)$"):
        planner.commit(plan, cached_tokens=cached_tokens)
    assert planner.commit(plan)


Call = Callable[[Any], object]
SEVEN: Any = 7

REFUSED: list[tuple[Call, str]] = [
    (lambda planner: planner.commit("plan"), "plan must be a ContextPlan, got str"),
    (lambda planner: planner.abandon("plan"), "plan must be a ContextPlan, got str"),
    (lambda planner: planner.withdraw("plan"), "plan must be a ContextPlan, got str"),
    (lambda planner: planner.report("plan", EngineReport()), "plan must be a ContextPlan, got str"),
    (lambda planner: planner.report(planner.plan([]), 7), "report must be an EngineReport or None, got int"),
    (lambda planner: planner.commit(planner.plan([]), report=7), "report must be an EngineReport or None, got int"),
    (
        lambda planner: planner.commit(planner.plan([]), 7, report=EngineReport()),
        "cached_tokens must be None if a report is given, got 7",
    ),
    (lambda planner: planner.forget(7), "conversation must be a str or None, got int"),
    (lambda planner: planner.forget("chat", tenant=7), "tenant must be a str or None, got int"),
    (lambda planner: planner.plan_batch({}, model=7), "model must be a str or None, got int"),
    (lambda planner: planner.plan_batch({}, capacity_tokens=0), "capacity_tokens must be 1 or more, or None, got 0"),
    (lambda planner: planner.plan_batch({}, "fastest"), "planner must be one of auto, .*, got 'fastest'"),
    (lambda planner: planner.plan_batch({}, device="tpu"), "device must be one of auto, .*, got 'tpu'"),
    (lambda planner: planner.plan_batch({}, time_budget=-1), "time_budget must be 0 seconds or more, or None, got -1"),
    (lambda planner: planner.plan_batch({}, "window", preamble=7), "preamble must be a str or None, got int"),
    (lambda planner: ContextPlanner.from_url(settings=SharedSettings()), "url must be given, or .* set; got None"),
    (lambda planner: Templates(order=SEVEN), "order must be a str, got int"),
    (lambda planner: Templates(location="{labels}"), "location must have words .* before {labels}, got '{labels}'"),
    (lambda planner: Templates().order_annotation("a"), "labels must be a sequence of str, got one str, 'a'"),
    (lambda planner: Transcript(separator=""), "separator must have at least one character, got ''"),
    (lambda planner: Transcript(min_tokens=-1), "min_tokens must be 0 or more, got -1"),
    (lambda planner: Transcript().call(None, SEVEN), "name must be a str, got int"),
    (lambda planner: Transcript().result(None, SEVEN), "text must be a str, got int"),
    (lambda planner: Transcript().result(None, "text", [SEVEN]), "passages must contain str only, got int"),
    (lambda planner: VisibleHistory("text"), "history must be a sequence of messages, got one str"),
]
"""Calls with one bad argument each, and the message, which names the argument, the value and what is allowed."""


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_refusal_names_the_argument_the_value_and_what_is_allowed(
    call: Call, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WARMPREFIX_REDIS_URL", raising=False)
    with pytest.raises((TypeError, ValueError), match=f"^{message}$"):
        call(ContextPlanner())


def test_a_plan_of_another_planner_is_not_committed() -> None:
    assert not ContextPlanner().commit(ContextPlanner().plan([BLOCK]))


@pytest.mark.parametrize("name", ["max_conversations", "max_entries"])
def test_bad_store_bounds_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be positive, got 0$"):
        MemorySeenStore(**{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "template", ["no placeholder", "{order} {order}", "{order!r}", "{other}", "{order", "{order}\n"]
)
def test_bad_templates_are_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"^order must "):
        Templates(order=template)


# -- served --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["head", "tail"])
def test_no_blocks_make_an_empty_plan(placement: Any) -> None:
    planner = ContextPlanner()
    with planner.planning([], conversation="chat", placement=placement) as plan:
        assert (plan.blocks, plan.render(), plan.order_annotation, plan.total_tokens) == ((), "", None, 0)


@pytest.mark.parametrize("way", ["plan", "auto", "window"])
def test_blank_texts_are_left_out_and_counted(way: str) -> None:
    planner = ContextPlanner()
    request: list[ContextBlock | str] = [
        ContextBlock("", id="empty"),
        ContextBlock("evidence", id="a"),
        " \n\t",
        "",
        ContextBlock("more", id="b"),
    ]
    if way == "plan":
        plan = planner.plan(request)
    else:
        batch = planner.plan_batch([BatchRequest("q", request), BatchRequest("blank", [""])], way)
        plan = batch.requests[batch.positions["q"]].plan
    assert [(planned.block.id, planned.positions) for planned in plan.blocks] == [("a", (1,)), ("b", (4,))]
    assert plan.render() == "evidence\n\nmore"
    assert planner.stats().blank_blocks == (3 if way == "plan" else 4)


def test_only_blank_texts_make_an_empty_plan() -> None:
    planner = ContextPlanner()
    with planner.planning(["", " "], conversation="chat", placement="tail") as plan:
        assert (plan.blocks, plan.render(), plan.total_tokens) == ((), "", 0)


def test_a_generator_of_strings_is_accepted() -> None:
    plan = ContextPlanner().plan(text for text in ("a", "b", "a"))
    assert [planned.text for planned in plan.blocks] == ["a", "b"]


def test_ten_megabytes_in_one_block() -> None:
    text = "[x] 0123456789ab\n" * 620_000
    planner = ContextPlanner(annotate="both")
    with planner.planning([ContextBlock(text, id="big")], conversation="chat", placement="tail") as plan:
        assert plan.render() == f"[{plan.blocks[0].label}] {text}"
    assert planner.plan([ContextBlock(text)], conversation="chat", placement="tail").references


def test_a_thousand_blocks() -> None:
    planner = ContextPlanner()
    request = [ContextBlock(f"text {i}", id=i) for i in range(1_000)]
    for blocks in (request, request[::-1], request[500:] + request[:500]):
        with planner.planning(blocks) as plan:
            assert sorted(plan.order) == list(range(1_000))


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\x00", "\u202eevil", "é", "e\u0301", "\ufeff", "🧑‍🔬" * 9])
def test_any_unicode_is_kept_as_it_is(text: str) -> None:
    planner = ContextPlanner(annotate="both")
    with planner.planning([ContextBlock(text, id="u")], conversation="chat", placement="tail") as plan:
        assert plan.render() == f"[{plan.blocks[0].label}] {text}"
    assert planner.plan([ContextBlock(text)], conversation="chat", placement="tail").references


def test_equal_looking_spellings_are_two_blocks() -> None:
    assert len(ContextPlanner().plan(["é", "e\u0301"]).blocks) == 2


@pytest.mark.parametrize(
    "bad", ["{label}", "a]b", "a\n[b]", "", " ", "a b", "x" * 41, "[a]", "é", "ctx-a", "a~b", "-a", "0" * 32, "\ud800"]
)
def test_an_unsafe_id_never_reaches_the_prompt(bad: str) -> None:
    plan = ContextPlanner(annotate="both").plan([ContextBlock("evidence", id=bad)])
    assert plan.blocks[0].label == "ctx-2f235f"
    assert plan.blocks[0].block.id == bad


@pytest.mark.parametrize("name", ["{a}", "a\nb", "\ud800", "x" * 10_000, "💬"])
def test_any_string_can_name_a_conversation_or_tenant(name: str) -> None:
    planner = ContextPlanner(annotate="both")
    with planner.planning([BLOCK], conversation=name, tenant=name, model=name, preamble=name, placement="tail") as plan:
        assert str(plan.cache_salt).isalnum()
    plan = planner.plan([BLOCK], conversation=name, tenant=name, placement="tail")
    assert plan.references
    assert not planner.plan([BLOCK], conversation=name + "x", tenant=name, placement="tail").references


def test_scores_may_be_anything() -> None:
    request = [ContextBlock(f"text {score}", score=score) for score in (math.nan, -math.inf, 0.5, None)]
    assert ContextPlanner().plan(request).order == (0, 1, 2, 3)


def test_blocks_of_zero_tokens_are_placed() -> None:
    planner = ContextPlanner(capacity_tokens=1)
    request = [ContextBlock(f"text {i}", tokens=0) for i in range(3)]
    for _ in range(3):
        with planner.planning(request) as plan:
            assert (len(plan.blocks), plan.total_tokens, plan.resident_tokens) == (3, 0, 0)


def test_a_request_larger_than_the_cache_is_served() -> None:
    planner = ContextPlanner(capacity_tokens=10)
    request = [ContextBlock(f"text {i}", tokens=100) for i in range(5)]
    for _ in range(3):
        with planner.planning(request) as plan:
            assert plan.resident_tokens <= 10


def test_ids_and_no_ids_mix() -> None:
    plan = ContextPlanner(annotate="both").plan(
        [ContextBlock("a", id="a"), ContextBlock("b"), "c", ContextBlock("d", id=4)]
    )
    assert [planned.label[:4] for planned in plan.blocks] == ["a", "ctx-", "ctx-", "4"]


def test_a_rendered_plan_survives_json() -> None:
    plan = ContextPlanner().plan([ContextBlock("\ud800 [x]\u2028", id="u")])
    assert json.loads(json.dumps({"content": plan.render()})) == {"content": plan.render()}
