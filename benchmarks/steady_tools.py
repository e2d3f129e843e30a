"""Cached share of sessions whose tools change, by `--steady-tools`, and of sub-agents that begin with their parent.

    python benchmarks/steady_tools.py [--vllm] [--write]

A session of 16 turns with the tools of up to four MCP servers, whose list the client sorts by name:

- `gained`: one server is there from the start, and one more from turns 5, 9 and 13 on;
- `flapping`: all are there, and one of them is gone in turns 5 and 6, 9 and 10, and 13 and 14;
- `shuffled`: all are there, in the order in which the servers answered at each turn;
- `written again`: the client connects again at turns 5, 9 and 13, and writes the keys of all definitions in reverse.

`best` is what a session could have at most: each token of its last prompt is computed once. The engines are emulated:
a server with tools in front, as chat templates have them, and the APIs of Anthropic and OpenAI, which can have them
behind the history. With `--vllm`, it is vLLM with a tiny model and a template that puts tools in front. Then eight
parents of eight turns start three sub-agents each: with a prompt of their own or with `fork`, on three engines at
random or through the gateway. Their share is of the parent's tokens. Printed, and written with `--write`.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai

from common import print_table
from result_files import write_rows
from vllm_server import VllmServer, engine_version
from warmprefix_gateway import GatewayOptions, GatewayServer
from warmprefix_requests import fork
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

CONFIG = EmulatorConfig(kv_blocks=40_000, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
TURNS, CHANGES = 16, (5, 9, 13)
SERVERS = {
    "files": "read_file write_file edit_file list_directory search_files move_file get_file_info directory_tree",
    "git": "git_status git_diff git_log git_show git_commit git_branch",
    "crm": "create_contact find_contact list_deals update_deal",
    "mail": "archive_mail draft_mail read_mail send_mail",
}
WORDS = ("order", "file", "path", "name", "value", "result", "search", "depth", "branch", "contact", "message", "field")


class Shape(NamedTuple):
    """Words of the parts of a session."""

    system: int
    turn: int
    tool: int


LARGE, SMALL = Shape(2_400, 420, 90), Shape(300, 60, 30)


def words(count: int, *seed: object) -> str:
    rng = random.Random(repr(seed))
    return " ".join(rng.choices(WORDS, k=count))


def tool(name: str, shape: Shape, api: str, *, is_reversed: bool = False) -> dict[str, Any]:
    properties = {field: {"type": "string", "description": words(8, name, field)} for field in ("path", "query")}
    schema = {"type": "object", "properties": properties, "required": ["path"]}
    inner: dict[str, Any] = {"name": name, "description": words(shape.tool, name)}
    if api == "messages":
        inner["input_schema"] = schema
    else:
        inner["parameters"] = schema
    inner = dict(reversed(inner.items())) if is_reversed else inner
    if api == "chat":
        return {"type": "function", "function": inner}
    return {"type": "function", **inner} if api == "responses" else inner


def tools_at(scenario: str, turn: int, shape: Shape, api: str) -> list[dict[str, Any]]:
    servers = list(SERVERS)
    since = sum(turn >= change for change in CHANGES)
    if scenario == "gained":
        servers = servers[: 1 + since]
    elif scenario == "flapping":
        servers = [name for name, begin in zip(servers, (99, *CHANGES), strict=True) if turn not in (begin, begin + 1)]
    names = sorted(name for server in servers for name in SERVERS[server].split())
    if scenario == "shuffled":
        random.Random(turn).shuffle(servers)
        names = [name for server in servers for name in SERVERS[server].split()]
    is_reversed = scenario == "written again" and since % 2 == 1
    return [tool(name, shape, api, is_reversed=is_reversed) for name in names]


def talk(turns: int, shape: Shape, *seed: object) -> list[dict[str, Any]]:
    """Return questions and short answers; the last question has none."""
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": words(shape.turn, turn, *seed)})
        messages.append({"role": "assistant", "content": words(20, "answer", turn, *seed)})
    return messages[:-1]


class Counts(NamedTuple):
    """Tokens of prompts."""

    prompt: int
    cached: int


def asked(api: str, client: Any, model: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Counts:
    """Send one request."""
    if api == "messages":
        usage = client.messages.create(model=model, max_tokens=1, extra_headers=headers, **body).usage
        cached = usage.cache_read_input_tokens or 0
        return Counts(usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0), cached)
    if api == "responses":
        usage = client.responses.create(
            model=model, max_output_tokens=1, store=False, extra_headers=headers, **body
        ).usage
        return Counts(usage.input_tokens, usage.input_tokens_details.cached_tokens)
    usage = client.chat.completions.create(model=model, max_tokens=1, extra_headers=headers, **body).usage
    details = usage.prompt_tokens_details
    return Counts(usage.prompt_tokens, (details and details.cached_tokens) or 0)


def body_of(api: str, system: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    if api == "messages":
        last = {"type": "text", "text": messages[-1]["content"], "cache_control": {"type": "ephemeral"}}
        return {"system": system, "messages": [*messages[:-1], {"role": "user", "content": [last]}], "tools": tools}
    if api == "responses":
        return {"instructions": system, "input": messages, "tools": tools}
    messages = [{"role": "system", "content": system}, *messages]
    return {"messages": messages, "tools": tools, "tool_choice": "none"}


def client_of(api: str, gateway: GatewayServer) -> Any:
    if api == "messages":
        return anthropic.Anthropic(base_url=gateway.url, api_key="none")
    return openai.OpenAI(base_url=gateway.base_url, api_key="none")


def session(api: str, client: Any, model: str, scenario: str, shape: Shape) -> tuple[Counts, int]:
    """Run a session; return its tokens, and those of its last prompt."""
    system, messages = words(shape.system, "system"), talk(TURNS, shape)
    counts = []
    for turn in range(1, TURNS + 1):
        tools = tools_at(scenario, turn, shape, api)
        body = body_of(api, system, messages[: 2 * turn - 1], tools)
        counts.append(asked(api, client, model, body, {"x-session-id": scenario}))
    return Counts(*map(sum, zip(*counts, strict=True))), counts[-1].prompt


def sub_agents(make: Callable[[int], list[Any]], model: str, shape: Shape, replicas: int) -> Iterator[dict[str, Any]]:
    """Yield how much of their parent's prompt the sub-agents' prompts find in the cache."""
    tools = tools_at("gained", 16, shape, "chat")
    for prompt in ("own", "fork"):
        for placement in ("random", "gateway")[replicas == 1 :]:
            rng = random.Random(1)
            with ExitStack() as stack:
                bases = [stack.enter_context(engine).base_url for engine in make(replicas)]
                if placement == "gateway":
                    gateway = GatewayServer(GatewayOptions(tuple(bases), port=0))
                    bases = [stack.enter_context(gateway).base_url]
                clients = [stack.enter_context(openai.OpenAI(base_url=base, api_key="none")) for base in bases]
                cached = total = 0
                for number in range(8):
                    messages = talk(8, shape, number)
                    name = f"parent {number}"
                    client = rng.choice(clients)
                    bodies = [
                        body_of("chat", words(shape.system, "system"), messages[: 2 * turn - 1], tools)
                        for turn in range(1, 9)
                    ]
                    body = bodies[-1]
                    parent = [asked("chat", client, model, each, {"x-session-id": name}) for each in bodies][-1]
                    for child in range(3):
                        task = words(30, "task", number, child)
                        own = body_of(
                            "chat", words(shape.system, "sub-agent"), [{"role": "user", "content": task}], tools
                        )
                        sent = fork("chat", body, task) if prompt == "fork" else own
                        headers = {"x-session-id": f"{name}.{child}", "x-parent-session-id": name}
                        cached += min(asked("chat", rng.choice(clients), model, sent, headers).cached, parent.prompt)
                        total += parent.prompt
            yield {
                "part": "sub-agents",
                "case": f"{prompt} prompt, {placement}" if replicas > 1 else f"{prompt} prompt",
                "replicas": replicas,
                "prompt_tokens": total,
                "cached_percent": round(100 * cached / total, 1),
            }


def vllm_engines(count: int) -> list[Any]:
    arguments = ["--chat-template", str(Path(__file__).parent / "engine" / "tools.jinja")]
    return [VllmServer(kv_blocks=2_000, longest=12_000, arguments=arguments) for _ in range(count)]


def emulators(count: int) -> list[Any]:
    return [EmulatorServer(CONFIG) for _ in range(count)]


def measured(use_vllm: bool) -> Iterator[dict[str, Any]]:
    model = CONFIG.model
    engine: Any = None
    if use_vllm:
        places = [("chat", "full-attention", engine_version())]
        shape = SMALL
    else:
        places = [("chat", "full-attention", "emulator"), ("messages", "anthropic", "emulated Anthropic API")]
        places.append(("responses", "openai", "emulated OpenAI API"))
        shape = LARGE
    for api, profile, name in places:
        with ExitStack() as stack:
            if use_vllm:
                engine = stack.enter_context(vllm_engines(1)[0])
                model = engine.model
            for scenario in ("gained", "flapping", "shuffled", "written again"):
                for mode in ("off", "order", "keep", "behind")[: 3 if api == "chat" else 4]:
                    with ExitStack() as run:
                        if use_vllm:
                            engine.reset_prefix_cache()
                        else:
                            engine = run.enter_context(EmulatorServer(replace(CONFIG, profile=profile)))
                        options = GatewayOptions((engine.base_url,), port=0, steady_tools=mode)  # type: ignore[arg-type]
                        gateway = run.enter_context(GatewayServer(options))
                        with client_of(api, gateway) as client:
                            counts, last = session(api, client, model, scenario, shape)
                    yield {
                        "part": "tools",
                        "engine": name,
                        "api": api,
                        "case": scenario,
                        "mode": mode,
                        "prompt_tokens": counts.prompt,
                        "cached_percent": round(100 * counts.cached / counts.prompt, 1),
                        "best_percent": round(100 * (1 - last / counts.prompt), 1),
                    }
    made, replicas = (vllm_engines, 1) if use_vllm else (emulators, 3)
    for row in sub_agents(made, model, shape, replicas):
        yield {**row, "engine": places[0][2], "api": "chat"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true", help="use a real engine")
    parser.add_argument("--write", action="store_true", help="write the results")
    options = parser.parse_args()
    fields = ("part", "engine", "api", "case", "mode", "replicas", "prompt_tokens", "cached_percent", "best_percent")
    rows = [{field: row[field] for field in fields if field in row} for row in measured(options.vllm)]
    print_table(list(fields), [[row.get(field, "") for field in fields] for row in rows])
    if options.write:
        write_rows("steady_tools", rows, ["part", "engine", "api", "case", "mode"])


if __name__ == "__main__":
    main()
