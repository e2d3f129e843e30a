"""The plugins that Hermes Agent and LiteLLM load: what they change in a request, and what they leave."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from warmprefix_plugins.hermes import HermesMiddleware, register
from warmprefix_plugins.litellm_callback import GatewayCallback
from warmprefix_requests import restored
from warmprefix_tools.emulator import EmulatorServer

ROOT = Path(__file__).parents[3]
SEA = "The sea is 3,688 metres deep on average. " * 20
KINDS = {"tool_request", "tool_execution", "llm_request", "llm_execution"}


def chat(calls: int) -> dict[str, Any]:
    """Return what Hermes 0.19 passes to its client: the body of a chat completion and options of the SDK."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are Hermes Agent."},
        {"role": "user", "content": "How deep is the sea?"},
    ]
    for number in range(calls):
        function = {"name": "terminal", "arguments": '{"command": "cat sea.txt"}'}
        call = {"id": f"call_{number}", "call_id": f"call_{number}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "terminal", "tool_call_id": f"call_{number}", "content": SEA},
        ]
    return {"model": "m", "messages": messages, "tools": [], "timeout": 1800.0, "extra_body": {"reasoning": {}}}


class Context:
    """The part of Hermes' `PluginContext` that plugins with middleware use."""

    def __init__(self) -> None:
        self.middleware: dict[str, Callable[..., Any]] = {}

    def register_middleware(self, kind: str, callback: Callable[..., Any]) -> None:
        self.middleware[kind] = callback


@pytest.fixture
def hermes(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[str] | None], None]:
    """Return a function that lets a Hermes with these kinds of middleware be there; None for one without any."""

    def install(kinds: set[str] | None) -> None:
        module = ModuleType("hermes_cli.middleware")
        if kinds is not None:
            module.VALID_MIDDLEWARE = kinds  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "hermes_cli", ModuleType("hermes_cli"))
        monkeypatch.setitem(sys.modules, "hermes_cli.middleware", module)

    return install


def test_hermes_finds_the_plugin_by_its_entry_point() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    ((name, value),) = re.findall(
        r'^\[project.entry-points."hermes_agent.plugins"\]\n(\w+) = "(.+)"$', project, re.MULTILINE
    )
    assert name == "warmprefix"  # what `hermes plugins enable` names
    assert EntryPoint(name, value, "hermes_agent.plugins").load().register is register


def test_hermes_finds_the_plugin_in_its_clone_of_this_repository() -> None:
    """It looks for the manifest one folder below, and has none of this project's dependencies."""
    assert "\nname: warmprefix\n" in (ROOT / "integrations" / "plugin.yaml").read_text()
    load = f"import runpy; print(runpy.run_path({str(ROOT / 'integrations' / '__init__.py')!r})['register'].__module__)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", load], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == register.__module__


def test_a_hermes_with_both_kinds_of_middleware_uses_the_plugin(hermes: Callable[[set[str] | None], None]) -> None:
    hermes(KINDS)
    context = Context()
    register(context)
    assert set(context.middleware) == {"llm_request", "tool_request"}
    result = context.middleware["llm_request"](request=chat(2), session_id="s", api_mode="chat_completions", turn_id=1)
    assert "Word for word" in result["request"]["messages"][-1]["content"]


@pytest.mark.parametrize("kinds", [None, {"llm_request"}, {"tool_request"}, set()])
def test_another_hermes_works_on_with_one_warning(
    hermes: Callable[[set[str] | None], None], kinds: set[str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    hermes(kinds)
    context = Context()
    register(context)
    assert context.middleware == {}
    assert len(caplog.records) == 1
    register(object())
    assert len(caplog.records) == 2


def test_the_request_has_references_and_the_session_and_nothing_else_changes() -> None:
    request = chat(3)
    before = json.dumps(request)
    result = HermesMiddleware().on_request(request=request, session_id="20261126_7", api_mode="chat_completions")
    assert result is not None
    sent = result["request"]
    assert json.dumps(request) == before
    assert sent.pop("extra_headers") == {"x-session-id": "20261126_7", "x-warmprefix-application": "Hermes"}
    assert sum("Word for word" in f"{message['content']}" for message in sent["messages"]) == 2
    assert json.dumps(restored("chat", sent)) == before


def test_each_prompt_of_a_session_begins_with_the_one_before() -> None:
    middleware = HermesMiddleware()
    prompts = [middleware.on_request(request=chat(calls), session_id="s") for calls in range(6)]
    messages = [prompt["request"]["messages"] for prompt in prompts if prompt is not None]
    assert len(messages) == 6
    for earlier, later in pairwise(messages):
        assert json.dumps(later).startswith(json.dumps(earlier)[:-1])


def test_the_own_headers_of_a_request_stay() -> None:
    result = HermesMiddleware().on_request(
        request={**chat(0), "extra_headers": {"x-initiator": "user"}}, session_id="s"
    )
    assert result is not None
    assert result["request"]["extra_headers"]["x-initiator"] == "user"


@pytest.mark.parametrize(
    "changed",
    [{"session_id": ""}, {"api_mode": "bedrock_converse"}, {"api_mode": "codex_app_server"}],
)
def test_what_the_plugin_does_not_know_stays_as_it_is(changed: dict[str, str]) -> None:
    arguments: dict[str, Any] = {"request": chat(3), "session_id": "s", **changed}
    assert HermesMiddleware().on_request(**arguments) is None


def test_a_body_that_may_be_cut_elsewhere_has_no_reference() -> None:
    """OpenRouter's transforms are in what the SDK merges into the body."""
    request = {**chat(3), "extra_body": {"transforms": ["middle-out"]}}
    result = HermesMiddleware().on_request(request=request, session_id="s")
    assert result is not None
    assert result["request"]["messages"] == request["messages"]


def test_a_copied_reference_becomes_the_text_again_in_its_session_only() -> None:
    middleware = HermesMiddleware()
    result = middleware.on_request(request=chat(2), session_id="s")
    middleware.on_request(request=chat(0), session_id="s")  # a prompt of the session without a reference
    assert result is not None
    copied = {"path": "copy.txt", "content": result["request"]["messages"][-1]["content"]}
    restored_call = middleware.on_tool_call(args=copied, session_id="s", tool_name="write_file")
    assert restored_call is not None
    assert restored_call["args"] == {"path": "copy.txt", "content": SEA}
    assert middleware.on_tool_call(args=copied, session_id="other") is None
    assert middleware.on_tool_call(args={"path": "copy.txt"}, session_id="s") is None


def test_sessions_are_forgotten_oldest_first() -> None:
    middleware = HermesMiddleware()
    for number in range(300):
        middleware.on_request(request=chat(2), session_id=f"s{number}")
    result = middleware.on_request(request=chat(2), session_id="s299")
    assert result is not None
    copied = {"content": result["request"]["messages"][-1]["content"]}
    assert middleware.on_tool_call(args=copied, session_id="s0") is None
    assert middleware.on_tool_call(args=copied, session_id="s299") is not None


def headers_of(kwargs: dict[str, Any], gateway: str | None = None) -> dict[str, str] | None:
    result = asyncio.run(GatewayCallback(gateway).async_pre_call_deployment_hook(kwargs, None))
    return None if result is None else result["extra_headers"]


@pytest.mark.parametrize(
    "named",
    [
        {"litellm_session_id": "s"},
        {"metadata": {"session_id": "s"}},
        {"litellm_metadata": {"session_id": "s"}, "metadata": None},
    ],
)
def test_litellms_requests_to_the_gateway_name_the_session(named: dict[str, Any]) -> None:
    kwargs = {"model": "openai/m", "api_base": "http://127.0.0.1:8080/v1", "extra_headers": {"x": "y"}, **named}
    headers = {"x": "y", "x-session-id": "s", "x-warmprefix-application": "LiteLLM"}
    assert headers_of(kwargs) == headers
    assert kwargs["extra_headers"] == {"x": "y"}


def test_a_session_id_that_no_header_can_hold_is_left_out() -> None:
    for session_id in ("", "a\r\nx: y", "é", " a", "a ", " ", "a\n", "a" * 100_000):
        kwargs = {"api_base": "http://127.0.0.1:8080", "litellm_session_id": session_id}
        assert headers_of(kwargs) == {"x-warmprefix-application": "LiteLLM"}


def test_requests_to_others_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for kwargs in (
        {},
        {"api_base": None},
        {"api_base": "https://api.openai.com/v1"},
        {"api_base": "http://127.0.0.1:80801"},
    ):
        assert headers_of({**kwargs, "litellm_session_id": "s"}) is None
    monkeypatch.setenv("WARMPREFIX_GATEWAY", "http://gateway:9/")
    assert headers_of({"api_base": "http://127.0.0.1:8080/v1"}) is None
    assert headers_of({"api_base": "http://gateway:9/v1"}) is not None


@pytest.mark.parametrize(("is_there", "path"), [(True, ""), (True, "/answers-404"), (False, "")])
def test_a_failure_without_a_gateway_is_a_warning_until_it_answers(
    is_there: bool, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        gateway = f"http://127.0.0.1:{free.getsockname()[1]}"
    with EmulatorServer() if is_there else nullcontext() as engine:
        if engine is not None:
            gateway = engine.url + path
        callback = GatewayCallback(gateway)
        failed = {"litellm_params": {"api_base": f"{gateway}/v1/"}}
        elsewhere = {"litellm_params": {"api_base": "https://api.openai.com/v1"}}

        async def fail_and_recover() -> None:
            for kwargs in (elsewhere, failed, failed):
                await callback.async_log_failure_event(kwargs, response_obj=None, start_time=None, end_time=None)
            assert len(caplog.records) == (0 if is_there else 1)
            await callback.async_log_success_event(failed, response_obj=None, start_time=None, end_time=None)
            await callback.async_log_failure_event(failed, response_obj=None, start_time=None, end_time=None)

        asyncio.run(fail_and_recover())
    assert len([record for record in caplog.records if gateway in record.message]) == (0 if is_there else 2)
