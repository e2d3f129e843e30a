"""Tokens that engines compute for one session of real agents: directly, and through the gateway.

    WARMPREFIX_CLIENTS=FOLDER python benchmarks/agent_clients.py [--only NAME ...] [--write]

`python run.py test --all clients` installs the agents. Each runs the same session of three turns: it reads a file of
4 kB, reads it again, shows it with `cat` and reads another one; is asked whether it is sure, and reads again; compares
both, shows one and reads the other. Its model is the emulator, which follows a script. The session runs once through
the gateway, between recorders. What the agent sent is then replayed in the same order, byte for byte with its headers,
to fresh engines: directly, through the gateway, and to three engines in turn and through the gateway. So these figures
are of the same requests. `plugin` is another run, with the plugin of this project installed: behind the gateway, but
for Hermes, whose plugin makes the references in the agent itself. `plugin_3` has the gateway and three engines in each
case. `differences` counts requests that, with references restored, are not what was
sent; `keeps_prefixes` is true if no prompt shares fewer messages with the one before than those that were sent.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from client_plugins import GATEWAY, PLUGGED
from client_programs import AGENTS, ANSWER, LAND, QUESTIONS, SEA, AgentProgram, Home, session_script
from client_wire import RecordedRequest, Recorder, RoundRobin, differences, keeps_prefixes, served
from common import print_table
from result_files import write_rows
from warmprefix_gateway import Gateway, GatewayOptions
from warmprefix_tools.emulator import EmulatorConfig, create_app

CONFIG = EmulatorConfig(kv_blocks=40_000, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
REPLICAS = 3
REFERENCE = "ord for word the"
"""Part of each reference, and of no file."""
_HOP_HEADERS = ("host", "content-length", "connection", "accept-encoding", "transfer-encoding")


def recorded_session(
    agent: AgentProgram, command: Path, *, has_plugin: bool = False
) -> tuple[list[RecordedRequest], list[RecordedRequest]]:
    """Run an agent's session; return its requests as the gateway got them, and as they arrived.

    With a plugin, the agent's base URL is the engine's, and the plugin knows the gateway.
    """
    home = Path(tempfile.gettempdir()) / "warmprefix-agent-clients" / agent.name.replace(" ", "-")
    shutil.rmtree(home, ignore_errors=True)
    one, other = home / "work" / "sea.txt", home / "work" / "land.txt"
    one.parent.mkdir(parents=True)
    one.write_text(SEA)
    other.write_text(LAND)
    script = home / "script.json"
    script.write_text(json.dumps(session_script(agent, one, other)))
    arrived = Recorder(create_app(replace(CONFIG, script=script)))
    with served(arrived) as upstream:
        sent = Recorder(Gateway(GatewayOptions((f"{upstream}/v1",))))
        with served(sent) as url:
            variables = {GATEWAY: url} if has_plugin else {}
            place = Home(home, f"{upstream if has_plugin else url}/v1", CONFIG.model, variables)
            agent.prepare(place)
            for turn, question in enumerate(QUESTIONS):
                printed = agent.ask(place, command, question, turn > 0)
                if ANSWER not in printed:
                    raise SystemExit(f"{agent.name} did not answer {question!r}: {printed[-500:]}")
    shutil.rmtree(home, ignore_errors=True)
    return sent.requests, arrived.requests


def computed(requests: Sequence[RecordedRequest], replicas: int, *, gateway: bool) -> tuple[int, int]:
    """Replay a session to fresh engines; return its prompt tokens, and those that were computed."""
    with ExitStack() as stack:
        apps: list[Any] = [create_app(CONFIG) for _ in range(replicas)]
        engines = [stack.enter_context(served(app)) for app in apps]
        front: Any = RoundRobin(apps)
        if gateway:
            front = Gateway(GatewayOptions(tuple(f"{engine}/v1" for engine in engines)))
        client = stack.enter_context(httpx.Client(base_url=stack.enter_context(served(front)), timeout=60))
        for request in requests:
            headers = [(name, value) for name, value in request.headers if name not in _HOP_HEADERS]
            client.post(request.path, content=request.content, headers=headers).raise_for_status()
        total = cached = 0
        for engine in engines:
            metrics = httpx.get(f"{engine}/metrics").text
            total += _counter(metrics, "prompt_tokens")
            cached += _counter(metrics, "prompt_tokens_cached")
        return total, total - cached


def _counter(metrics: str, name: str) -> int:
    found = re.search(rf"^vllm:{name}_total{{.*}} (\S+)$", metrics, re.MULTILINE)
    return 0 if found is None else int(float(found[1]))


def measured(agent: AgentProgram, command: Path) -> dict[str, object]:
    """Return the row of an agent."""
    sent, arrived = recorded_session(agent, command)
    tokens, direct = computed(sent, 1, gateway=False)
    arriving, through = computed(sent, 1, gateway=True)
    return {
        "client": agent.name,
        "prompts": len(sent),
        "prompt_tokens": tokens,
        "arrived_tokens": arriving,
        "direct": direct,
        "gateway": through,
        "saved_percent": round(100 * (1 - through / direct), 1),
        **_with_plugin(agent, command),
        "round_robin_3": computed(sent, REPLICAS, gateway=False)[1],
        "gateway_3": computed(sent, REPLICAS, gateway=True)[1],
        "references": max(json.dumps(request.body).count(REFERENCE) for request in arrived),
        "differences": differences(sent, arrived),
        "keeps_prefixes": keeps_prefixes(sent, arrived),
    }


def _with_plugin(agent: AgentProgram, command: Path) -> dict[str, object]:
    """Return what an agent with its plugin computes: behind the gateway, or alone if it works in the agent."""
    plugged = next((plugged for plugged in PLUGGED if plugged.program.name == agent.name), None)
    if plugged is None:
        return {"plugin": None, "plugin_3": None}
    sent, arrived = recorded_session(plugged.program, command, has_plugin=True)
    requests = sent if plugged.uses_gateway else arrived
    return {
        "plugin": computed(requests, 1, gateway=plugged.uses_gateway)[1],
        "plugin_3": computed(requests, REPLICAS, gateway=True)[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[agent.name for agent in AGENTS], help="run only these agents")
    parser.add_argument("--write", action="store_true", help="write the results")
    options = parser.parse_args()
    rows = []
    for agent in AGENTS:
        command = agent.command()
        if command is None:
            print(f"left out: {agent.name} is not installed")
        elif options.only is None or agent.name in options.only:
            rows.append(measured(agent, command))
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    if options.write:
        write_rows("agent_clients", rows, ["client"])


if __name__ == "__main__":
    main()
