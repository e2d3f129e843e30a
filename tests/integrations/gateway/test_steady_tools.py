"""Tools in a steady order, tools behind the history, and sub-agents at their parent's upstream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import openai
import pytest
from tests.integrations.gateway.conftest import INSTANT, ScriptedUpstream, answer, chat_answer, metric, send

from warmprefix_gateway import GatewayServer
from warmprefix_requests import fork
from warmprefix_tools.emulator import EmulatorServer

Make = Callable[..., GatewayServer]
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
PLAIN = {"content-type": "application/json"}


def tools_of(names: str, *, chat: bool = True) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {"path": {"type": "string", "description": "A path. " * 20}}}
    if chat:
        return [{"type": "function", "function": {"name": name, "parameters": schema}} for name in names]
    return [{"name": name, "description": f"Use {name}.", "input_schema": schema} for name in names]


def talk(turns: int, about: str = "the sea", words: int = 40) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        question = f"Question {turn} about {about}: " + "why is it so deep? " * words
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": f"Because of {turn}."}]
    return messages[:-1]


def body_of(names: str, turns: int = 1, about: str = "the sea", **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": talk(turns, about), "tools": tools_of(names), **fields}).encode()


def sent_names(upstream: ScriptedUpstream) -> str:
    last = [request for request in upstream.requests if request.body][-1]
    return "".join([tool["function"]["name"] for tool in json.loads(last.body)["tools"]])


@pytest.fixture
def upstream() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream(answer(chat_answer())) as upstream:
        yield upstream


def ordered(gateway: GatewayServer, upstream: ScriptedUpstream, names: str, turns: int, **more: Any) -> str:
    headers = {"x-session-id": more.pop("session", "one")}
    assert send(gateway, "POST", CHAT, body_of(names, turns, **more), **headers).status == 200
    return sent_names(upstream)


def test_each_session_keeps_its_own_order(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, steady_tools="order")
    assert ordered(gateway, upstream, "ba", 1) == "ba"
    assert ordered(gateway, upstream, "abc", 2) == "bac"
    assert ordered(gateway, upstream, "ac", 3) == "ac"
    assert ordered(gateway, upstream, "abc", 4) == "bac"
    assert ordered(gateway, upstream, "abc", 1, session="two") == "abc"
    assert ordered(gateway, upstream, "abc", 1, about="a task of a sub-agent") == "abc"
    assert metric(gateway, "failures_total") == 0


def test_sessions_without_a_name_are_found_by_their_messages(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, steady_tools="keep")
    for names, turns, sent in (("ba", 1, "ba"), ("abc", 2, "bac"), ("c", 3, "bac")):
        assert send(gateway, "POST", CHAT, body_of(names, turns)).status == 200
        assert sent_names(upstream) == sent
    assert send(gateway, "POST", CHAT, body_of("c", 1)).status == 200  # another one with the same greeting
    assert sent_names(upstream) == "c"


def test_tenants_share_no_tools(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, steady_tools="keep", tenant_header="x-tenant")
    for tenant, names, sent in (("ann", "secret", "secrt"), ("ben", "ab", "ab"), ("ann", "ab", "secrtab")):
        body = body_of("".join(dict.fromkeys(names)), 2)
        headers = {"x-session-id": "one", "x-tenant": tenant, **PLAIN}
        assert send(gateway, "POST", CHAT, body, **headers).status == 200
        assert sent_names(upstream) == sent


@pytest.mark.parametrize("mode", ["order", "keep", "behind"])
def test_a_list_in_its_order_passes_byte_for_byte(upstream: ScriptedUpstream, gateway_of: Make, mode: str) -> None:
    gateway = gateway_of(upstream.base_url, steady_tools=mode)
    for body in (body_of("ab", 1), body_of("ab", 2), body_of("aa", 3), body_of("", 4), b'{"tools": 1, "messages": 2}'):
        assert send(gateway, "POST", CHAT, body, **{"x-session-id": "one"}).status == 200
        assert upstream.requests[-1].body == body
    assert metric(gateway, "failures_total") == 0


def test_only_the_list_is_written_again(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, steady_tools="order")
    ordered(gateway, upstream, "ab", 1)
    body = body_of("ba", 2).replace(b'"messages": ', b'"big": 1e400, "messages" :\n ')
    assert send(gateway, "POST", CHAT, body, **{"x-session-id": "one"}).status == 200
    last = upstream.requests[-1].body
    assert last[: body.index(b'"tools"')] == body[: body.index(b'"tools"')]
    assert sent_names(upstream) == "ab"


def test_sub_agents_go_to_the_upstream_of_their_parent(gateway_of: Make) -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(EmulatorServer(INSTANT)) for _ in range(3)]
        gateway = gateway_of(*[engine.base_url for engine in engines])
        client = stack.enter_context(openai.OpenAI(base_url=gateway.base_url, api_key="key"))
        parents = []
        for number in range(6):
            parent: dict[str, Any] = {"model": INSTANT.model, "messages": talk(3, f"topic {number}"), "max_tokens": 4}
            for turns in (1, 3, 5):
                part = {**parent, "messages": parent["messages"][:turns]}
                asked = client.chat.completions.create(**part, extra_headers={"x-session-id": f"p{number}"})
            parents.append((parent, asked.usage.prompt_tokens))
        for header in (True, False):
            for number, (parent, tokens) in enumerate(parents):
                for name in "ab":
                    child = fork("chat", parent, f"Look into matter {name} {header}.")
                    headers = {"x-session-id": f"p{number}-{name}-{header}"}
                    if header:
                        headers["x-parent-session-id"] = f"p{number}"
                    usage = client.chat.completions.create(**child, extra_headers=headers).usage
                    assert usage.prompt_tokens_details.cached_tokens > 0.95 * tokens - 16


# -- behind the history

BETA = "inline-tools-2026-09-15"


def read_shares(client: Any, lists: Sequence[str]) -> list[float]:
    """Return the share of each prompt of a session that the API read from its cache."""
    shares = []
    for turn, names in enumerate(lists, 1):
        tools: Any = tools_of(names, chat=False)
        messages: Any = talk(turn, words=400)
        messages[-1]["content"] = [
            {"type": "text", "text": messages[-1]["content"], "cache_control": {"type": "ephemeral"}}
        ]
        usage = client.messages.create(model=INSTANT.model, max_tokens=4, messages=messages, tools=tools).usage
        total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        shares.append(usage.cache_read_input_tokens / total)
    return shares


LISTS = ["ghi", "ghi", "aghi", "aghi", "abghi"]


def test_anthropic_gets_new_tools_behind_the_history(gateway_of: Make) -> None:
    anthropic = pytest.importorskip("anthropic")
    shares = {}
    for mode in ("off", "behind"):
        with EmulatorServer(replace(INSTANT, profile="anthropic")) as engine:
            gateway = gateway_of(engine.base_url, steady_tools=mode)
            with anthropic.Anthropic(base_url=gateway.url, api_key="key") as client:
                shares[mode] = read_shares(client, LISTS)
            assert metric(gateway, "failures_total") == 0
    assert min(shares["behind"][1:]) > 0.5
    assert shares["off"][2] < 0.1 < 0.5 < shares["behind"][2]


def test_the_beta_stands_behind_those_of_the_client(gateway_of: Make) -> None:
    with ScriptedUpstream(answer(json.dumps({"type": "message", "usage": {"input_tokens": 1}}).encode())) as upstream:
        gateway = gateway_of(upstream.base_url, steady_tools="behind")
        seen = []
        for turn, names in enumerate(["ab", "abc"], 1):
            body = {"model": "m", "max_tokens": 4, "messages": talk(turn), "tools": tools_of(names, chat=False)}
            headers = {"x-session-id": "one", "anthropic-beta": "one-2026,two-2026"}
            assert send(gateway, "POST", MESSAGES, json.dumps(body).encode(), **headers).status == 200
            seen.append([value for name, value in upstream.requests[-1].headers if name.lower() == "anthropic-beta"])
        assert seen == [["one-2026,two-2026"], [f"one-2026,two-2026,{BETA}"]]


def refusing(change: bytes) -> Any:
    """Return an API that takes no such change of tools."""

    async def handle(request: Any, writer: Any) -> None:
        is_refused = change in request.body
        handler = answer(b'{"type": "error"}', "400 Bad Request") if is_refused else answer(b'{"type": "message"}')
        await handler(request, writer)

    return handle


def test_an_api_that_refuses_gets_all_tools_in_front(gateway_of: Make) -> None:
    with ScriptedUpstream(refusing(b"tool_addition")) as upstream:
        gateway = gateway_of(upstream.base_url, steady_tools="behind")
        for turn, names in enumerate(["cb", "abc", "abc", "abc"], 1):
            body = {"model": "m", "max_tokens": 4, "messages": talk(turn), "tools": tools_of(names, chat=False)}
            content = json.dumps(body).encode()
            assert send(gateway, "POST", MESSAGES, content, **{"x-session-id": "one"}).status == 200
            last = upstream.requests[-1]
            assert [tool["name"] for tool in json.loads(last.body)["tools"]] == (
                ["c", "b", "a"] if turn > 1 else ["c", "b"]
            )
            assert last.header("anthropic-beta") is None
        assert metric(gateway, "retries_total", reason="field") == 2


def test_a_change_may_be_refused_after_others_were_taken(gateway_of: Make) -> None:
    with ScriptedUpstream(refusing(b"tool_removal")) as upstream:
        gateway = gateway_of(upstream.base_url, steady_tools="behind")
        for turn, names in enumerate(["ab", "abc", "abc", "bc", "bc", "b"], 1):
            body = {"model": "m", "max_tokens": 4, "messages": talk(turn), "tools": tools_of(names, chat=False)}
            content = json.dumps(body).encode()
            assert send(gateway, "POST", MESSAGES, content, **{"x-session-id": "one"}).status == 200
            assert (b"tool_addition" in upstream.requests[-1].body) == (turn in (2, 3))


def test_tools_that_are_gone_may_be_refused(gateway_of: Make) -> None:
    async def refuse(request: Any, writer: Any) -> None:
        is_refused = b'"x"' in request.body and b'"new"' in request.body
        handler = answer(b'{"error": "x"}', "400 Bad Request") if is_refused else answer(chat_answer())
        await handler(request, writer)

    with ScriptedUpstream(refuse) as upstream:
        gateway = gateway_of(upstream.base_url, steady_tools="keep")
        for turn, (model, names) in enumerate([("old", "xb"), ("old", "b"), ("new", "cb"), ("old", "cb")], 1):
            body = body_of(names, turn).replace(b'"m"', f'"{model}"'.encode())
            assert send(gateway, "POST", CHAT, body, **{"x-session-id": "one"}).status == 200
            assert sent_names(upstream) == ["xb", "xb", "cb", "xbc"][turn - 1]
