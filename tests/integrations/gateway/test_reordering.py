"""Contexts in another order: every byte is still there, and nothing else is touched."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.integrations.gateway.conftest import INSTANT, ScriptedUpstream, metric, send

from redis_servers import wait_until
from warmprefix_gateway import GatewayOptions, GatewayServer
from warmprefix_gateway.reordering import Reordered, Reorderer, as_templates
from warmprefix_requests import read_call
from warmprefix_tools.emulator import EmulatorServer

Make = Callable[..., GatewayServer]
CHAT = "/v1/chat/completions"
NAMES = ["north", "south", "east", "west", "up", "down"]
TEXTS = {name: f"The sea in the {name} is deep, and its floor is sand there. " * 12 for name in NAMES}
FORMATS: Mapping[str, Callable[[Sequence[str]], str]] = {
    "tags": lambda names: (
        "Use these.\n<context>\n"
        + "\n".join([f'<source name="{name}.pdf">{TEXTS[name]}</source>' for name in names])
        + "\n</context>\nWhy?"
    ),
    "llamaindex": lambda names: (
        "Context information is below.\n---------------------\n"
        + "\n\n".join([f"file_path: {name}.md\n\n{TEXTS[name]}" for name in names])
        + "\n---------------------\nGiven the context information, answer the query.\nQuery: Why?\nAnswer: "
    ),
    "json": lambda names: (
        "Use these.\n" + json.dumps({"hits": [{"text": TEXTS[name], "file": name} for name in names]}) + "\nWhy?"
    ),
    "mem0": lambda names: (
        "Use these.\nUser Memories:\n" + "\n".join([f"- {TEXTS[name]}" for name in names]) + "\n\nWhy?"
    ),
    r"pattern:## \w+\n[^#]+(?<=\. )": lambda names: (
        "\n\n".join([f"## {name}\n{TEXTS[name]}" for name in names]) + "\n\nWhy?"
    ),
}


def body_of(*texts: str, answers: Sequence[str] = (), **fields: Any) -> bytes:
    """Return a body with these texts of the user, and answers between them."""
    messages = [{"role": "system", "content": "Be brief."}]
    for number, text in enumerate(texts):
        messages.append({"role": "user", "content": text})
        messages += [{"role": "assistant", "content": answer} for answer in answers[number : number + 1]]
    return json.dumps({"model": INSTANT.model, "max_tokens": 2, "messages": messages, **fields}).encode()


def reordered(reorderer: Reorderer, body: bytes, tenant: str | None = None) -> Reordered:
    call = read_call("POST", CHAT, {}, body)
    assert call is not None
    return reorderer.reordered(call, tenant)


def text_of(body: bytes) -> str:
    return str(json.loads(body)["messages"][1]["content"])


@pytest.mark.parametrize("name", FORMATS)
def test_reordering_finds_more_in_the_cache(emulators: list[EmulatorServer], gateway_of: Make, name: str) -> None:
    rng = random.Random(1)
    requests = [FORMATS[name](rng.sample(NAMES, 4)) for _ in range(30)]
    plain, gateway = gateway_of(emulators[0].base_url), gateway_of(emulators[1].base_url, reorder=(name,))
    for request in requests:
        for each in (plain, gateway):
            assert send(each, "POST", CHAT, body_of(request)).status == 200
    assert metric(gateway, "cached_tokens_total") > 1.2 * metric(plain, "cached_tokens_total")
    assert metric(gateway, "contexts_total", order="planned") > 20
    assert metric(gateway, "failures_total") == 0


@given(
    name=st.sampled_from(list(FORMATS)),
    requests=st.lists(st.permutations(NAMES).map(lambda names: names[:4]), min_size=2, max_size=8),
)
def test_only_the_order_changes(name: str, requests: list[list[str]]) -> None:
    reorderer = Reorderer(as_templates([name]))
    for names in requests:
        text = FORMATS[name](names)
        result = reordered(reorderer, body_of(text))
        sent = text_of(result.call.content)
        order = sorted(names, key=lambda each: sent.index(TEXTS[each]))
        assert sent == FORMATS[name](order)
        assert result.call.content == body_of(sent)
        assert json.loads(result.call.content) == result.call.body
        if result.plan is not None:
            reorderer.planner.commit(result.plan)


def other_order(reorderer: Reorderer) -> tuple[str, str]:
    """Return a context, and the other order in which it is sent."""
    for names in (NAMES[:4], NAMES[:4], [NAMES[3], NAMES[0], NAMES[1], NAMES[5]]):
        result = reordered(reorderer, body_of(FORMATS["tags"](names)))
        if result.plan is not None:
            reorderer.planner.commit(result.plan)
    given_text, sent = FORMATS["tags"](names), text_of(result.call.content)
    assert sent != given_text
    return given_text, sent


def test_a_message_with_a_mark_stays() -> None:
    reorderer = Reorderer(as_templates(["tags"]))
    given_text, _ = other_order(reorderer)
    body = json.loads(body_of(given_text))
    body["messages"][1]["cache_control"] = {"type": "ephemeral"}
    assert reordered(reorderer, json.dumps(body).encode()).outcome is None


def test_later_turns_repeat_the_order() -> None:
    reorderer = Reorderer(as_templates(["tags"]))
    given_text, sent = other_order(reorderer)
    later = body_of(given_text, FORMATS["tags"](NAMES), answers=["Because."])
    result = reordered(reorderer, later)
    assert (text_of(result.call.content), result.outcome, result.plan) == (sent, "as before", None)
    assert json.loads(result.call.content)["messages"][2:] == json.loads(later)["messages"][2:]
    assert reordered(reorderer, later, tenant="acme").outcome == "late"
    assert reordered(Reorderer(as_templates(["tags"])), later).call.content == later


def test_a_request_may_keep_its_order(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, reorder=("tags",))
    first, second = FORMATS["tags"](NAMES[:2]), FORMATS["tags"]([NAMES[2], NAMES[1], NAMES[0]])
    for headers in ({}, {"x-warmprefix-order": "keep"}, {"X-Warmprefix-Order": "keep"}):
        assert send(gateway, "POST", CHAT, body_of(first)).status == 200
        assert send(gateway, "POST", CHAT, body_of(second), **headers).status == 200
        last = [request for request in upstream.requests if request.body][-1]  # not a look at the engine
        assert (text_of(last.body) == second) is bool(headers)
        assert last.header("x-warmprefix-order") is None
    assert metric(gateway, "contexts_total", order="locked") == 2


def test_a_locked_order_is_learned_and_kept_in_later_turns() -> None:
    reorderer = Reorderer(as_templates(["tags"]))
    given_text, _ = other_order(reorderer)
    other = Reorderer(as_templates(["tags"]))
    call = read_call("POST", CHAT, {}, body_of(given_text))
    assert call is not None
    locked = other.reordered(call, None, order_locked=True)
    assert (locked.call.content, locked.outcome) == (call.content, "locked")
    assert locked.plan is not None
    other.planner.commit(locked.plan)
    assert other.planner.stats().tree_nodes == 1
    later = body_of(given_text, "And why?", answers=["Because."])
    assert reordered(other, later)[1:3] == (None, "as before")
    assert reordered(other, later).call.content == later
    call = read_call("POST", CHAT, {}, body_of(FORMATS["tags"](NAMES), "And why?", answers=["Because."]))
    assert call is not None
    assert other.reordered(call, None, order_locked=True)[:3] == (call, None, "locked")


@pytest.mark.parametrize(("first", "last"), [(1, 0), (0, 1), (1, 1), (2, 2), (9, 9), (0, 4)])
def test_pinned_blocks_stay_where_they_are(first: int, last: int) -> None:
    reorderer = Reorderer(as_templates(["tags"]), pin_first=first, pin_last=last)
    rng = random.Random(1)
    moved = 0
    for _ in range(30):
        names = rng.sample(NAMES, 5)
        result = reordered(reorderer, body_of(FORMATS["tags"](names)))
        sent = text_of(result.call.content)
        order = sorted(names, key=lambda each: sent.index(TEXTS[each]))
        assert order[:first] == names[:first]
        assert order[5 - min(last, 5) :] == names[5 - min(last, 5) :]
        moved += order != names
        assert result.plan is not None
        reorderer.planner.commit(result.plan)
    assert (moved > 0) is (first + last < 4)


@pytest.mark.parametrize("name", ["pin_first", "pin_last"])
def test_negative_pins_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be 0 or more, got -1"):
        GatewayOptions(("http://127.0.0.1:1/v1",), **{name: -1})  # type: ignore[arg-type]


@pytest.mark.parametrize("head", ['<source id="{}">', "<source>[{}] ", '<source name="a"> Document {}: '])
@pytest.mark.parametrize("first", [0, 1, 7])
def test_numbered_blocks_keep_their_order(head: str, first: int) -> None:
    reorderer = Reorderer(as_templates(["tags"]))
    for names in (NAMES[:3], NAMES[::-1][:4]):
        blocks = [f"{head.format(first + n)}{TEXTS[name]}</source>" for n, name in enumerate(names)]
        body = body_of("\n".join(blocks))
        assert reordered(reorderer, body) == Reordered(reordered(reorderer, body).call, None, "numbered")
        assert reordered(reorderer, body).call.content == body


@pytest.mark.parametrize(
    "fields",
    [
        lambda number: {"rank": number},
        lambda number: {"score": 0.5, "index": str(number + 7)},
        lambda number: {"created_at": f"2026-11-{10 + number}T08:00:00Z"},
        lambda number: {"date": f"2026-11-{29 - number}"},
        lambda number: {"user": "U7", "ts": f"{1755517523 + 61 * number}.000{number * number}"},
        lambda number: {"by": "ann", "time": 1175714200 - 99 * number},
        lambda number: {"start": 3.5 * number, "duration": 3.4},
        lambda number: {"metadata": {"source": "sea.pdf", "page": number + 3}},
        lambda number: {"metadata": {"created_at": f"2026-11-{10 + number}T08:00:00Z"}},
    ],
)
def test_objects_in_sequence_keep_their_order(fields: Callable[[int], dict[str, Any]]) -> None:
    for names in (NAMES[:3], NAMES[::-1][:4]):
        objects = [{"text": TEXTS[name], **fields(number)} for number, name in enumerate(names)]
        result = reordered(Reorderer(as_templates(["json"])), body_of(json.dumps(objects)))
        assert (result.outcome, result.plan) == ("numbered", None)


@pytest.mark.parametrize("fields", [{"score": 0.9}, {"distance": 2}, {"metadata": {"page": 9, "n": 10**400}}])
def test_objects_with_scores_are_ordered(fields: dict[str, Any]) -> None:
    objects = [{"text": TEXTS[name], **fields, "rank": 1 / (n + 1)} for n, name in enumerate(NAMES)]
    assert reordered(Reorderer(as_templates(["json"])), body_of(json.dumps(objects))).outcome == "planned"


def test_objects_change_places_and_keep_their_bytes() -> None:
    (find,) = as_templates(["json"]).values()
    objects = ['{"memory" : "a\\u0062", "n": 1e2}', '{"memory":"c", "memory": "d"}', '{"snippet": "[{]"}']
    text = "Results: [1, 2] [ " + " ,\n".join(objects) + " ] and [{}]"
    assert [text[begin:end] for begin, end in find(text)] == objects


def test_the_prompts_of_mem0_have_no_list_of_memories() -> None:
    prompts = pytest.importorskip("mem0.configs.prompts")
    (find,) = as_templates(["mem0"]).values()
    texts = [text for text in vars(prompts).values() if isinstance(text, str) and len(text) > 200]
    assert len(texts) > 3
    assert [find(text) for text in texts] == [[] for _ in texts]


@pytest.mark.parametrize(
    "text",
    [
        "<doc>" * 200_000,
        '[{"a":' * 200_000,
        '[{"text":"' * 100_000,
        "[" + '{"text": "a"},' * 100_000,
        "Memories:\n" * 100_000,
        "Memories:\n" + "- a\n" * 200_000 + "b",
        "<doc " * 200_000,
        "Context information is below.\n---------------------\n" * 20_000,
        "\n".join([f"<doc>{number} {number * number}</doc>" for number in range(0, 90_000, 7)]),
    ],
)
def test_a_long_text_costs_its_length(text: str) -> None:
    began = time.process_time()
    result = reordered(Reorderer(as_templates(["tags", "llamaindex", "json", "mem0"])), body_of(text))
    assert (result.call.content, result.plan) == (body_of(text), None)
    assert time.process_time() - began < 2


def test_elements_inside_another_one_belong_to_it() -> None:
    document = "<document><source>{0}.pdf</source>{0} is deep. " + "The sea. " * 30 + "</document>"
    text = "\n".join([document.format(name) for name in NAMES[:3]])
    (find,) = as_templates(["tags"]).values()
    assert [text[begin:end] for begin, end in find(text)] == text.split("\n")


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (FORMATS["tags"](["north", "south", "north"]), "duplicates"),
        (FORMATS["tags"](["north"]), None),
        ("<source>a</source>, and <source>b</source>", None),
        ("<li>a</li>\n<li>b</li>", None),
        ("no context", None),
        (FORMATS["llamaindex"](NAMES), None),
    ],
)
def test_other_texts_stay(text: str, outcome: str | None) -> None:
    result = reordered(Reorderer(as_templates(["tags"])), body_of(text))
    assert (result.call.content, result.outcome, result.plan) == (body_of(text), outcome, None)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([{"role": "user", "content": TEXTS[name]} for name in NAMES]),
        json.dumps([{"type": "text", "text": TEXTS[name]} for name in NAMES]),
        json.dumps([{"text": TEXTS[name]} for name in NAMES[:3]] + [{"no": "text"}]),
        json.dumps([{"text": TEXTS[name]} for name in NAMES[:3]] + [None]),
        json.dumps([{"text": TEXTS[name]} for name in NAMES])[:-1],
        json.dumps([{"text": 5}, {"content": ["a"]}]),
        "User Memories:\n- a\n- b\nwhich goes on",
        "Your memories:\n- a\n- b",
        "User Memories:\n- a",
        "User Memories:\n\n- a\n- b",
    ],
)
def test_other_lists_stay(text: str) -> None:
    result = reordered(Reorderer(as_templates(["json", "mem0"])), body_of(text))
    assert (result.call.content, result.outcome, result.plan) == (body_of(text), None, None)


def test_lists_in_results_of_tools_stay() -> None:
    """They stand behind a question of their own, so no order of them is ever found in a cache."""
    reorderer = Reorderer(as_templates(["json"]))
    function = {"name": "search", "arguments": "{}"}
    call = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "1", "content": json.dumps([{"text": TEXTS[name]} for name in NAMES])}
    body = json.dumps({"messages": [{"role": "user", "content": "Why?"}, call, result]}).encode()
    assert reordered(reorderer, body) == Reordered(reordered(reorderer, body).call)


def test_no_context_is_reordered_for_an_engine_that_reuses_displaced_text(
    upstream: ScriptedUpstream, gateway_of: Make
) -> None:
    gateway = gateway_of(upstream.base_url, reorder=("tags",), profile="blend")
    bodies = [body_of(FORMATS["tags"](order)) for order in (NAMES[:3], NAMES[2::-1], NAMES[:3])]
    for body in bodies:
        assert send(gateway, "POST", CHAT, body).status == 200
    assert [prompt.body for prompt in upstream.prompts] == bodies


def test_the_plan_of_a_failed_request_is_abandoned(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of("http://127.0.0.1:1", reorder=("tags",))
    assert send(gateway, "POST", CHAT, body_of(FORMATS["tags"](NAMES))).status in (502, 503)
    planner = gateway.gateway._office.reorderer.planner  # type: ignore[union-attr]
    wait_until(lambda: planner.stats().abandons, "the request ends after its answer")
    assert (planner.stats().abandons, planner.stats().commits) == (1, 0)


def test_a_failure_here_leaves_the_salt(
    upstream: ScriptedUpstream, gateway_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(Reorderer, "reordered", fail)
    gateway = gateway_of(upstream.base_url, reorder=("tags",), tenant_header="x-tenant")
    assert send(gateway, "POST", CHAT, body_of(FORMATS["tags"](NAMES)), x_tenant="acme").status == 200
    sent = json.loads(upstream.prompts[0].body)
    assert sent.pop("cache_salt")
    assert sent == json.loads(body_of(FORMATS["tags"](NAMES)))
    assert metric(gateway, "failures_total") == 1


@pytest.mark.parametrize("name", ["lists", "pattern:(", "pattern:a*", ""])
def test_unknown_formats_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="reorder"):
        GatewayOptions(("http://127.0.0.1:1",), reorder=(name,))


def open_plans(gateway: GatewayServer) -> int:
    reorderer = gateway.gateway._office.reorderer
    assert reorderer is not None
    return len(reorderer.planner._state.open_plans)


def test_a_request_that_is_not_sent_leaves_no_plan(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, reorder=("tags",), tenant_header="x-tenant")
    body = body_of(FORMATS["tags"](NAMES), cache_salt="x", temperature=0.25).replace(b"0.25", b"0.250")
    reply = send(gateway, "POST", CHAT, body, x_tenant="acme")
    assert reply.status == 400
    assert "cannot be replaced" in reply.json["error"]["message"]
    assert open_plans(gateway) == 0
    assert send(gateway, "POST", CHAT, body_of(FORMATS["tags"](NAMES)), x_tenant="acme").status == 200
    wait_until(lambda: open_plans(gateway) == 0, "the request ends after its answer")
