"""The claims of docs/operations.md."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redis_servers import Cluster, SentinelSetup, Server, wait_until
from result_files import read_rows
from warmprefix import Branch, ContextPlanner, PlannerStats
from warmprefix.stores import Conversation, SeenBlock, TurnRecord
from warmprefix_gateway import GatewayOptions, GatewayServer
from warmprefix_redis import URL_SCHEMES, RedisValues, parse_redis_url
from warmprefix_redis.settings import SharedSettings
from warmprefix_tools.emulator import EmulatorServer

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/operations.md").read_text()


def section(title: str) -> str:
    """Return the text under a heading of the second level."""
    return re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:][TITLES.index(title)]


TITLES = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)


def test_the_code_runs(server: Server) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    documents = pytest.importorskip("langchain_core.documents")
    runnables = pytest.importorskip("langchain_core.runnables")
    sea = documents.Document("The sea is deep.", id="sea")
    names: dict[str, Any] = {"your_retriever": runnables.RunnableLambda(lambda _: [sea])}
    exec(compile(code.replace("redis://localhost:6379/0", server.url), "operations.md", "exec"), names)
    assert [document.page_content.endswith(" The sea is deep.") for document in names["found"]] == [True]


def test_every_kind_of_url_can_be_used(server: Server, cluster: Cluster, sentinels: SentinelSetup) -> None:
    shown = re.findall(r"^\| `(\w+[^`]*://[^`]*)` \|", PAGE, re.MULTILINE)
    assert [url.partition("://")[0] for url in shown] == ["redis", "unix", "redis+sentinel", "redis+cluster"]
    for url in shown:
        parse_redis_url(url)
        parse_redis_url(url.replace("redis", "rediss", 1) if "unix" not in url else url)
    for scheme in URL_SCHEMES:
        assert scheme.replace("rediss", "redis") in {url.partition("://")[0] + "://" for url in shown}
    for url in (server.url, cluster.url, sentinels.url):
        with ContextPlanner.from_url(settings=SharedSettings(redis_url=url, store_budget=10.0)) as planner:
            with planner.planning(["a"], conversation="chat", placement="tail"):
                pass
            assert planner.stats().store_errors == 0


def test_documented_sizes_match_the_measurement() -> None:
    text = section("What a turn costs")
    rows = [row.split(" | ") for row in re.findall(r"^\| ([^|]+ \| \d.*) \|$", text, re.MULTILINE)]
    measured = read_rows("redis_state_memory")
    servers = list(dict.fromkeys(row["server"] for row in measured))
    sizes: dict[tuple[str, str], list[int]] = {}
    for row in measured:
        sizes.setdefault((row["conversation"], f"{row['blocks']:,}"), []).append(row["bytes"])
    assert f"| conversation | blocks | bytes, {' | '.join(servers)} |" in text
    conversations = [[*what, *(f"{size:,}" for size in found)] for what, found in sizes.items()]
    turns = read_rows("redis_state_turns")
    branches = [
        [
            name,
            f"{row['blocks']:,}",
            *(f"{each[which]:,}" for which in ("last", "all") for each in turns if each["branch"] == name),
        ]
        for name, row in {row["branch"]: row for row in turns}.items()
    ]
    assert rows == conversations + branches


def test_documented_load_matches_the_measurement() -> None:
    load = read_rows("redis_state_load")
    assert "about 2,500 turns per second for a minute" in section("What a turn costs")
    assert max(round(row["turns/s"], -2) for row in load) == 2_500


def test_documented_fields_exist() -> None:
    fields = {field.name for field in dataclasses.fields(PlannerStats)}
    shown = set(
        re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?`) \|", section("Metrics to watch"), re.MULTILINE)))
    )
    assert len(shown) > 6
    assert shown <= fields


def test_json_has_the_documented_keys(server: Server, fill: Callable[..., Any], ask: Callable[..., Any]) -> None:
    filled = fill(server.url)
    filled.turns(Conversation("acme", "chat-42"))
    filled.open(Conversation("acme", "chat-42"))
    with ContextPlanner.from_url(server.url) as planner:
        with planner.planning(["a"]):
            pass
        wait_until(lambda: planner.stats().published_orders, "an order is shared")
    promised = {
        command: set(re.findall(r"`(\w+)`", text))
        for command, text in re.findall(r"^- `(inspect|stats)`: (`.*?)(?=^- |\Z|^## )", PAGE, re.DOTALL | re.MULTILINE)
    }
    inspected = ask("inspect", server.url, "--conversation", "chat-42", "--tenant", "acme")[1]
    unknown = ask("inspect", server.url, "--conversation", "chat-42")[1]
    block = SeenBlock(b"f" * 16, "label", 1, 10)
    filled.write(Conversation("acme", "resp_1"), TurnRecord(1, (block,)))
    turn = ask("inspect", server.url, "--turn", "resp_1", "--tenant", "acme")[1]
    assert promised["inspect"] == (keys(inspected) | keys(turn)) - {"warmprefix"}
    assert keys(unknown) < keys(inspected)
    assert promised["stats"] == keys(ask("stats", server.url)[1]) - {"warmprefix"}


def keys(value: object) -> set[str]:
    """Return all keys, on every level."""
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


async def keep_value(url: str) -> None:
    values = RedisValues(url, timeout=10)
    await values.put(b"the name of a value", b"which the gateway has sealed")
    await values.aclose()


def ask_through_a_gateway(server: Server, text: str) -> None:
    with EmulatorServer() as engine:
        options = GatewayOptions((engine.base_url,), port=0, redis_url=server.url, salt_key=b"secret")
        with GatewayServer(options) as gateway:
            body = {"model": engine.config.model, "max_tokens": 1, "messages": [{"role": "user", "content": text * 40}]}
            sent = urllib.request.Request(
                f"{gateway.base_url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(sent) as answer:
                assert answer.status == 200
            with server.client() as client:
                wait_until(lambda: client.keys("*:sessions"), "the session is shared")
                wait_until(lambda: client.keys("*:load"), "the load is shared")


def test_stored_data_matches_the_documentation(server: Server) -> None:
    secret = "The text, which must not be stored."
    with ContextPlanner.from_url(settings=SharedSettings(redis_url=server.url, store_budget=10.0)) as planner:
        names = {"tenant": "the-tenant", "model": "the-model", "preamble": "the-preamble"}
        with planner.planning([secret], conversation="the-conversation", placement="tail", **names):  # type: ignore[arg-type]
            pass
        begun = planner.plan([secret], conversation=Branch(None), placement="tail", **names)  # type: ignore[arg-type]
        assert planner.commit(begun, turn_id="the-turn")
        with planner.planning([secret], **names):  # type: ignore[arg-type]
            pass
        wait_until(lambda: planner.stats().published_orders, "an order is shared")
        asyncio.run(keep_value(server.url))
        ask_through_a_gateway(server, secret)
        client: Any
        with server.client() as client:
            found = {key: client.type(key) for key in client.keys("*")}
            assert all(client.pttl(key) > 0 for key in found)
            stored = repr([*found, *(client.dump(key) for key in found)])
    rows = re.findall(r"^\| `wp:(\{DIGEST\}:\w+)` \| (\w+) \|", PAGE, re.MULTILINE)
    digested = {(re.sub(r"\{[0-9a-f]{32}\}", "{DIGEST}", key.decode()), kind.decode()) for key, kind in found.items()}
    assert digested == {(f"wp:{name}", kind) for name, kind in rows}
    for word in ("text", "tenant", "model", "preamble", "conversation"):
        assert word not in stored


PREFORK = """
import os, sys
from warmprefix import ContextPlanner
from warmprefix_redis.settings import SharedSettings
from warmprefix_tools.emulator import EmulatorServer

planner = ContextPlanner.from_url(settings=SharedSettings(store_budget=10.0))

def works(conversation):
    found = []
    for _ in range(20):
        where = {"conversation": conversation, "placement": "tail", "tenant": "acme"}
        with planner.planning(["a", "b"], annotate="labels", **where) as plan:
            found.append(len(plan.references))
    return found == [0] + 19 * [2] and planner.stats().store_errors == 0

fine = "before" not in sys.argv or works("parent, before")
children = []
for number in range(2):
    child = os.fork()
    if child == 0:
        fine = works(f"child {number}")
        planner.close()
        os._exit(0 if fine else 1)
    children.append(child)
statuses = [os.waitpid(child, 0)[1] for child in children]
fine = works("parent, after") and fine
planner.close()
print(fine, statuses)
"""


@pytest.mark.parametrize("used", ["before", "after"])
def test_a_planner_made_before_a_fork_serves_all_processes(server: Server, used: str) -> None:
    with server.client() as client:
        wait_until(lambda: client.info("server")["uptime_in_seconds"] > 2, "planners trust the server")
    command = [sys.executable, "-c", PREFORK, used]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "WARMPREFIX_REDIS_URL": server.url}
    )
    assert (done.stdout, done.stderr) == ("True [0, 0]\n", "")
