"""Tokens that engines compute for one session of real agents: directly, and through the gateway.

    WARMPREFIX_CLIENTS=FOLDER python benchmarks/agent_clients.py [--only NAME ...] [--write]

`python run.py test --all clients` installs the agents. Each runs the same session of three turns: it reads a file of
4 kB, reads it again, shows it with `cat` and reads another one; is asked whether it is sure, and reads again; compares
both, shows one and reads the other. Its model is the emulator, which follows a script. The session runs once through
the gateway, between recorders. What the agent sent is then replayed in the same order, byte for byte with its headers,
to fresh engines: directly, through the gateway, and to three engines in turn and through the gateway. So all figures
of an agent are of the same requests. `differences` counts requests that, with references restored, are not what was
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
from pathlib import Path
from typing import Any

import httpx

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


def recorded_session(agent: AgentProgram, command: Path) -> tuple[list[RecordedRequest], list[RecordedRequest]]:
    """Run an agent's session through the gateway; return its requests as they were sent, and as they arrived."""
    home = Path(tempfile.gettempdir()) / "warmprefix-agent-clients" / agent.name.replace(" ", "-")
    shutil.rmtree(home, ignore_errors=True)
    one, other = home / "work" / "sea.txt", home / "work" / "land.txt"
    one.parent.mkdir(parents=True)
    one.write_text(SEA)
    other.write_text(LAND)
    script = home / "script.json"
    script.write_text(json.dumps(session_script(agent, one, other)))
    config = EmulatorConfig(
        kv_blocks=40_000, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf, script=script
    )
    arrived = Recorder(create_app(config))
    with served(arrived) as upstream:
        sent = Recorder(Gateway(GatewayOptions((f"{upstream}/v1",))))
        with served(sent) as url:
            place = Home(home, f"{url}/v1", config.model)
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
        "round_robin_3": computed(sent, REPLICAS, gateway=False)[1],
        "gateway_3": computed(sent, REPLICAS, gateway=True)[1],
        "references": max(json.dumps(request.body).count(REFERENCE) for request in arrived),
        "differences": differences(sent, arrived),
        "keeps_prefixes": keeps_prefixes(sent, arrived),
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
