"""docs/routing.md: its code runs, and its tables come from the benchmarks."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import pytest
from openai import OpenAI

import agent_restart
import agent_routing
import fleet
import real_routers
import replica_routing
from result_files import read_rows
from warmprefix import ContextBlock, ContextPlanner
from warmprefix_routing.hints import Router
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/routing.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_code_for_replicas_runs() -> None:
    instant = EmulatorConfig(prefill_rate=float("inf"), decode_rate=float("inf"), base_ttft_ms=0)
    routed, handed_over, *_ = CODE
    with ExitStack() as stack:
        servers = [stack.enter_context(EmulatorServer(instant)) for _ in range(3)]
        routed_to = stack.enter_context(EmulatorServer(instant))  # in place of another router
        application: dict[str, Any] = {
            "urls": [server.base_url for server in servers],
            "client": stack.enter_context(OpenAI(base_url=routed_to.base_url, api_key="none")),
            "model": instant.model,
            "question": "What is it?",
            "blocks": [ContextBlock(f"Passage {n}. " * 20, id=f"Doc_{n}") for n in range(3)],
        }
        exec(compile(routed, "routing.md", "exec"), application)
        for client in application["clients"].values():
            stack.callback(client.close)
        router, ask = application["router"], application["ask"]
        place = router.route(application["blocks"], preamble=application["PREAMBLE"])
        assert place.resident_tokens == sum(block.tokens for block in application["blocks"])
        router.abandon(place)
        servers[application["urls"].index(place.replica)].close()
        assert ask("And now?", application["blocks"], tenant="acme")
        assert ask("And then?", application["blocks"])
        assert place.replica not in router.load()
        assert router.stats().open_routes == 0
        exec(compile(handed_over, "routing.md", "exec"), application)
        assert application["answer"].choices[0].message.content


def test_the_code_for_agents_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(CODE[2], "routing.md", "exec"), {})
    printed = re.findall(r"'(d\d+)'", capsys.readouterr().out)
    assert sorted(printed) == sorted(f"d{number}" for number in range(12))


def test_the_tables_are_those_of_the_benchmarks() -> None:
    assert replica_routing.table(read_rows("replica_routing"), 4) in PAGE
    assert real_routers.table(read_rows("real_routers")) in PAGE
    assert fleet.table(read_rows("fleet"), "ragpulse_rag") in PAGE
    assert agent_routing.table(read_rows("agent_routing"), 15) in PAGE
    assert agent_restart.table(read_rows("agent_restart")) in PAGE


def test_the_cost_of_routing_is_that_of_the_benchmark() -> None:
    micros = [row["routers"]["ReplicaRouter"]["route_us_p50"] for row in read_rows("replica_routing")]
    cost = re.search(r"It costs (\d+) to (\d+) µs per request", PAGE)
    assert cost is not None
    assert int(cost[1]) == round(min(micros), -1)
    assert int(cost[2]) == round(max(micros), -1)


def test_the_simulated_fleet_agrees_with_engines() -> None:
    for row in read_rows("fleet_engines"):
        assert abs(row["engines_hit_percent"] - row["simulated_hit_percent"]) <= 2
        assert f"{row['engines_hit_percent']:.1f} %" in PAGE


def test_hints_use_a_header_that_the_published_routers_read() -> None:
    found = read_rows("real_routers_hints")
    read = {(row["router"], row["policy"].split()[0]): row["reads"] for row in found if row["reads"]}
    assert set(read) == {("sglang", "manual"), ("vllm", "consistent_hash"), ("vllm", "sticky_least_loaded")}
    plan = ContextPlanner().plan(["The sea is deep."], conversation="c", placement="tail")
    for (router, _), headers in read.items():
        assert set(real_routers.HINTS[router].for_plan(plan).headers) <= set(headers)


def test_every_router_is_in_the_table_of_hints() -> None:
    listed = re.findall(r"^\| `([\w-]+)` \| `x-", PAGE, re.MULTILINE | re.IGNORECASE)
    assert tuple(listed) == get_args(Router)
