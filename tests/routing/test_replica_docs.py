"""docs/replicas.md: its code runs, and its tables come from the benchmark."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

from openai import OpenAI

import fleet
import real_routers
from replica_routing import table
from warmprefix import ContextBlock, ContextPlanner
from warmprefix.routing.hints import Router
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/replicas.md").read_text()


def test_the_pages_code_runs() -> None:
    instant = EmulatorConfig(prefill_rate=float("inf"), decode_rate=float("inf"), base_ttft_ms=0)
    routed, handed_over = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
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
        exec(compile(routed, "replicas.md", "exec"), application)
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
        exec(compile(handed_over, "replicas.md", "exec"), application)
        assert application["answer"].choices[0].message.content


def test_the_measurements_are_those_of_the_benchmark() -> None:
    measured = json.loads((ROOT / "benchmarks/results/replica_routing.json").read_text())["results"]
    for replicas in (4, 8):
        assert table(measured, replicas) in PAGE
    micros = [row["routers"]["ReplicaRouter"]["route_us_p50"] for row in measured]
    cost = re.search(r"It costs (\d+) to (\d+) µs per request", PAGE)
    assert cost is not None
    assert int(cost[1]) == round(min(micros), -1)
    assert int(cost[2]) == round(max(micros), -1)


def test_the_published_routers_are_those_of_the_benchmark() -> None:
    measured = json.loads((ROOT / "benchmarks/results/real_routers.json").read_text())["results"]
    assert real_routers.table(measured) in PAGE


def test_the_fleets_are_those_of_the_benchmark() -> None:
    page = (ROOT / "docs/scaling.md").read_text()
    measured = json.loads((ROOT / "benchmarks/results/fleet.json").read_text())["results"]
    for stream in ("ragpulse_rag", "generated_topics"):
        assert fleet.table(measured, stream) in page
    checked = json.loads((ROOT / "benchmarks/results/fleet_engines.json").read_text())["results"]
    for row in checked:
        assert abs(row["engines_hit_percent"] - row["simulated_hit_percent"]) <= 2
        assert f"{row['engines_hit_percent']:.1f} %" in page


def test_hints_use_a_header_that_the_published_routers_read() -> None:
    found = json.loads((ROOT / "benchmarks/results/real_routers_hints.json").read_text())["results"]
    read = {(row["router"], row["policy"].split()[0]): row["reads"] for row in found if row["reads"]}
    assert set(read) == {("sglang", "manual"), ("vllm", "consistent_hash"), ("vllm", "sticky_least_loaded")}
    plan = ContextPlanner().plan(["The sea is deep."], conversation="c", placement="tail")
    for (router, _), headers in read.items():
        assert set(real_routers.HINTS[router].for_plan(plan).headers) <= set(headers)


def test_every_router_is_in_the_table_of_hints() -> None:
    listed = re.findall(r"^\| `([\w-]+)` \| `x-", PAGE, re.MULTILINE | re.IGNORECASE)
    assert tuple(listed) == get_args(Router)
