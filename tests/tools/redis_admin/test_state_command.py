"""`warmprefix state` against real servers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import redis

from redis_servers import Cluster, SentinelSetup, Server, free_port, wait_until
from warmprefix import ContextPlanner
from warmprefix.errors import MissingExtraError
from warmprefix.stores import Conversation, SeenBlock, TurnRecord
from warmprefix_redis import conversation_key, turn_key
from warmprefix_redis.settings import SharedSettings
from warmprefix_tools.redis_admin import state

Run = Callable[..., subprocess.CompletedProcess[str]]
Ask = Callable[..., Any]
Fill = Callable[..., Any]

CHAT = Conversation("acme", "chat-42")
ODD = [
    Conversation("acme", "{chat}"),
    Conversation("ac{me", "}:seen"),
    Conversation(None, "line\nbreak \x1b[31m"),
    Conversation("", "chat-42"),
    Conversation("päßchen \u202e", "会話 42"),
    Conversation("-", "--json"),
]


def named(conversation: Conversation) -> list[str]:
    tenant = [] if conversation.tenant is None else [f"--tenant={conversation.tenant}"]
    return [f"--conversation={conversation.id}", *tenant]


def as_json(block: SeenBlock) -> dict[str, object]:
    fields = {**block._asdict(), "fingerprint": block.fingerprint.hex()}
    return {name: value for name, value in fields.items() if name != "time" or value}


# -- inspect -----------------------------------------------------------------------------------------------------------


def test_a_conversation_is_shown(each_server: Server, fill: Fill, run: Run, ask: Ask) -> None:
    filled = fill(each_server.url)
    sent = filled.turns(CHAT)
    plan = filled.open(CHAT)
    done = run("inspect", *named(CHAT), WARMPREFIX_REDIS_URL=each_server.url)
    assert (done.returncode, done.stderr) == (0, "")
    words = " ".join(done.stdout.split())
    key = conversation_key("wp", CHAT)
    assert words.startswith(f'conversation "chat-42" of tenant "acme" key {key.decode()} usable True bytes ')
    assert re.search(r"expires in (23:59:|1 day, 0:00:00)\S* epoch 0 turn 2 ", words)
    assert f"blocks 6, of 600 tokens plans {plan} fingerprint label turn tokens {sent[-1].fingerprint.hex()}" in words
    assert "label 2.2‹U+2028›{x} 2 200" in words
    assert max(map(len, done.stdout.splitlines())) <= 100
    status, answer = ask("inspect", each_server.url, *named(CHAT))
    assert (status, answer["conversation"], answer["tenant"], answer["usable"]) == (0, "chat-42", "acme", True)
    assert (answer["epoch"], answer["turn"], answer["plans"]) == (0, 2, [plan])
    assert answer["blocks"] == [as_json(block) for block in sent]
    assert 86_000 < answer["expires_seconds"] <= 86_400
    with each_server.client() as client:
        assert answer["bytes"] == client.memory_usage(key, samples=0)


def test_a_turn_is_shown_and_forgotten(each_server: Server, fill: Fill, run: Run, ask: Ask) -> None:
    filled = fill(each_server.url)
    filled.turns(CHAT)  # the name of a conversation is no id of a turn
    turn = Conversation("acme", "resp_1 \u202e")
    blocks = tuple(SeenBlock(bytes([i]) * 16, f"doc-{i}", 1, 100, 1_800_000_000) for i in range(3))
    filled.write(turn, TurnRecord(2, blocks, ("doc-9",), partial=True))
    named_turn = ["--turn", turn.id, "--tenant", "acme"]
    done = run("inspect", *named_turn, "--url", each_server.url)
    assert (done.returncode, done.stderr) == (0, "")
    words = " ".join(done.stdout.split())
    assert words.startswith('turn "resp_1 ‹U+202E›" of tenant "acme" key wp:{')
    assert "turn 2 partial True other labels doc-9 blocks 3, of 300 tokens" in words
    status, answer = ask("inspect", each_server.url, *named_turn)
    assert (status, answer["turn_id"], answer["usable"], answer["turn"]) == (0, turn.id, True, 2)
    assert (answer["blocks"], answer["other_labels"]) == ([as_json(block) for block in blocks], ["doc-9"])
    assert 86_000 < answer["expires_seconds"] <= 86_400
    assert answer["bytes"] > 100
    stats = ask("stats", each_server.url)[1]
    assert (stats["conversations"], stats["turns"]) == (1, 1)
    done = run("forget", *named_turn, "--url", each_server.url)
    assert (done.returncode, done.stdout) == (
        0,
        'Forgot turn "resp_1 ‹U+202E›" of tenant "acme": 3 blocks of 2 turns.'
        " Turns that continued it have records of their own.\n",
    )
    assert run("forget", *named_turn, "--url", each_server.url).returncode == 1
    assert ask("stats", each_server.url)[1]["turns"] == 0
    assert ask("inspect", each_server.url, *named(CHAT))[0] == 0


def test_turn_that_cannot_be_read_is_reported_and_removed(server: Server, run: Run, ask: Ask) -> None:
    turn = Conversation("acme", "resp_1")
    for value in (b"", b"1 damaged", b"2 of a later version"):
        with server.client() as client:
            client.set(turn_key("wp", turn), value)
        status, answer = ask("inspect", server.url, "--turn", "resp_1", "--tenant", "acme")
        assert (status, answer["usable"]) == (1, False)
        done = run("forget", "--turn", "resp_1", "--tenant", "acme", "--url", server.url)
        assert done.stdout == 'Removed a record of turn "resp_1" of tenant "acme" that this version cannot read.\n'


@pytest.mark.parametrize("arguments", [[], ["--conversation", "a", "--turn", "b"]])
@pytest.mark.parametrize("command", ["inspect", "forget"])
def test_one_of_conversation_and_turn_must_be_given(run: Run, command: str, arguments: list[str]) -> None:
    done = run(command, *arguments, "--url", "redis://localhost")
    assert done.returncode == 2
    assert "give either --conversation or --turn" in done.stderr


def test_missing_conversation_sets_the_exit_status(server: Server, fill: Fill, run: Run, ask: Ask) -> None:
    fill(server.url).turns(CHAT)
    done = run("inspect", "--conversation", "chat-42", "--url", server.url)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == 'There is no state of conversation "chat-42" of no tenant.\n'
    for other in (Conversation(None, "chat-42"), Conversation("", "chat-42"), Conversation("acme", "chat-43")):
        assert ask("inspect", server.url, *named(other))[0] == 1
    assert ask("inspect", server.url, *named(CHAT), "--prefix", "other")[0] == 1


def test_unusual_names_work(server: Server, fill: Fill, run: Run) -> None:
    filled = fill(server.url)
    for blocks, conversation in enumerate(ODD, 1):
        filled.turns(conversation, blocks)
    for blocks, conversation in enumerate(ODD, 1):
        shown = run("inspect", *named(conversation), "--url", server.url)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert f"{2 * blocks}, of" in shown.stdout
        forgot = run("forget", *named(conversation), "--url", server.url)
        assert (forgot.returncode, forgot.stderr) == (0, "")
        assert f": {2 * blocks} blocks of 2 turns" in forgot.stdout
        assert len(forgot.stdout.splitlines()) == 1
        assert not set(shown.stdout + forgot.stdout) & {"\x1b", "\u202e", "\u2028"}
        left = [len(filled.inspect(each).blocks) for each in ODD]
        assert left == [0] * blocks + [2 * n for n in range(blocks + 1, len(ODD) + 1)]


def test_future_format_is_shown_and_can_be_removed(server: Server, run: Run, ask: Ask) -> None:
    key = conversation_key("wp", CHAT)
    with server.client() as client:
        client.hset(key, "m", b"\x07 whatever")
        done = run("inspect", *named(CHAT), "--url", server.url)
        assert (done.returncode, done.stderr) == (1, "")
        assert "usable False" in " ".join(done.stdout.split())
        status, answer = ask("inspect", server.url, *named(CHAT))
        assert (status, answer["usable"], answer["expires_seconds"]) == (1, False, None)
        client.delete(key)
        client.set(key, "something else")
        assert ask("inspect", server.url, *named(CHAT))[0] == 1
        done = run("forget", *named(CHAT), "--url", server.url)
        assert (done.returncode, done.stdout) == (
            0,
            'Removed a record of conversation "chat-42" of tenant "acme" that this version cannot read.\n',
        )
        assert not client.exists(key)


# -- forget ------------------------------------------------------------------------------------------------------------


def test_planners_resend_forgotten_blocks(server: Server, run: Run) -> None:
    with server.client() as client:
        wait_until(lambda: client.info("server")["uptime_in_seconds"] > 2, "planners trust the server")
    with ContextPlanner.from_url(settings=SharedSettings(redis_url=server.url, store_budget=10.0)) as planner:

        def references() -> int:
            with planner.planning(
                ["a", "b"], conversation="chat-42", placement="tail", tenant="acme", annotate="labels"
            ) as plan:
                return len(plan.references)

        assert [references(), references()] == [0, 2]
        done = run("forget", *named(CHAT), "--url", server.url)
        assert (done.returncode, done.stdout, done.stderr) == (
            0,
            'Forgot conversation "chat-42" of tenant "acme": 2 blocks of 2 turns, 0 plans in flight.'
            " Its next blocks are sent in full.\n",
            "",
        )
        assert [references(), references()] == [0, 2]


def test_forgetting_leaves_the_time_to_live_alone(server: Server, fill: Fill, run: Run, ask: Ask) -> None:
    fill(server.url).turns(CHAT)
    with server.client() as client:
        client.pexpire(conversation_key("wp", CHAT), 10_000_000)
        run("forget", *named(CHAT), "--url", server.url)
        assert 9_000 < ask("inspect", server.url, *named(CHAT))[1]["expires_seconds"] <= 10_000


def test_nothing_to_forget_sets_the_exit_status(each_server: Server, run: Run) -> None:
    done = run("forget", *named(CHAT), "--url", each_server.url)
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        'There is no state of conversation "chat-42" of tenant "acme", so nothing was forgotten.\n',
        "",
    )
    with each_server.client() as client:
        assert client.dbsize() == 0


# -- stats -------------------------------------------------------------------------------------------------------------


def test_state_is_counted(each_server: Server, fill: Fill, ask: Ask, run: Run) -> None:
    mine, other = fill(each_server.url), fill(each_server.url, "other")
    for i in range(30):
        mine.turns(Conversation("acme", f"{i}"), blocks=i)
        other.turns(Conversation("acme", f"{i}"), blocks=1)
    client: Any
    with each_server.client() as client:
        client.mset({f"wp:{i}": i for i in range(50)})
        client.xadd("wp:{" + "0" * 32 + "}:orders", {"o": "x"})
        client.hset(conversation_key("wp", CHAT), "m", b"\x07")
        before = set(client.keys())
        client.config_resetstat()
        status, answer = ask("stats", each_server.url)
        assert "cmdstat_keys" not in client.info("commandstats")
        assert set(client.keys()) == before
        size = sum(client.memory_usage(key, samples=0) for key in client.keys("wp:*:seen"))
        info = client.info()
    assert (status, answer["prefix"]) == (0, "wp")
    assert [answer[name] for name in ("conversations", "bytes", "streams", "estimated")] == [31, size, 1, False]
    (shown,) = answer["servers"]
    assert (shown["address"], shown["role"], shown["keys"]) == (each_server.address, "primary", 112)
    assert shown["flavour"] == ("valkey" if "valkey_version" in info else "redis")
    assert shown["version"] == info.get("valkey_version", info["redis_version"])
    assert (shown["eviction_policy"], shown["max_memory"], shown["warnings"]) == ("noeviction", None, [])
    done = run("stats", "--url", each_server.url)
    assert (done.returncode, done.stderr) == (0, "")
    words = " ".join(done.stdout.split())
    assert f"{shown['flavour']} {shown['version']} at {each_server.address} address" in words
    assert "max memory no limit" in words
    assert "conversations 31 turns 0 bytes" in words


def test_many_keys_are_estimated_from_a_sample(
    server: Server, fill: Fill, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(server.url).turns(CHAT, blocks=2)
    client: Any
    with server.client() as client:
        key = conversation_key("wp", CHAT)
        record, size = client.dump(key), client.memory_usage(key, samples=0)
        pipeline = client.pipeline(transaction=False)
        for i in range(20_000):
            pipeline.set(f"other:{i}", i)
            pipeline.restore(conversation_key("wp", Conversation(None, f"{i}")), 0, record)
        pipeline.execute()
    whole = ask("stats", server.url)[1]
    monkeypatch.setattr(state, "_MOST_KEYS", 5_000)
    part = ask("stats", server.url)[1]
    assert (whole["conversations"], whole["estimated"], part["estimated"]) == (20_001, True, True)
    assert part["conversations"] == pytest.approx(20_001, rel=0.2)
    for each in (whole, part):
        assert each["bytes"] == pytest.approx(each["conversations"] * size, rel=0.05)


def test_all_primaries_of_a_cluster_are_counted(cluster: Cluster, fill: Fill, ask: Ask, run: Run) -> None:
    filled = fill(cluster.url)
    conversations = [*ODD, *(Conversation("acme", f"{i}") for i in range(60))]
    for each in conversations:
        filled.turns(each, blocks=2)
    assert len({cluster.owner(conversation_key("wp", each)).port for each in conversations}) == 3
    status, answer = ask("stats", cluster.url)
    assert (status, answer["conversations"]) == (0, 66)
    assert {server["address"] for server in answer["servers"]} == {node.address for node in cluster.nodes}
    for each in ODD:
        status, answer = ask("inspect", cluster.url, *named(each))
        assert (status, len(answer["blocks"]), answer["bytes"] is None) == (0, 4, False)
    done = run("forget", *named(ODD[0]), "--url", cluster.url)
    assert (done.returncode, filled.inspect(ODD[0]).blocks) == (0, ())


def test_sentinels_are_asked_for_the_master(sentinels: SentinelSetup, fill: Fill, ask: Ask, run: Run) -> None:
    fill(sentinels.url).turns(CHAT)
    status, answer = ask("stats", sentinels.url)
    assert (status, answer["conversations"]) == (0, 1)
    (shown,) = answer["servers"]
    assert (shown["address"], shown["role"]) == (sentinels.master.address, "primary")
    assert run("inspect", *named(CHAT), "--url", sentinels.url).returncode == 0
    replica = next(server for server in sentinels.servers if server is not sentinels.master)
    with sentinels.master.client() as client:
        assert client.wait(1, 10_000) == 1, "the replica has the conversation"
    (warning,) = ask("stats", replica.url)[1]["servers"][0]["warnings"]
    assert warning.startswith("It is a replica")
    done = run("forget", *named(CHAT), "--url", replica.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"No answer from {replica.address}: ")
    assert "Warning: It is a replica" in run("stats", "--url", replica.url).stdout
    assert "read only replica" in done.stderr


@pytest.mark.parametrize(
    ("config", "warning"),
    [
        ({"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru"}, None),
        ({"maxmemory": "50mb", "maxmemory-policy": "noeviction"}, None),
        ({"maxmemory": "1kb", "maxmemory-policy": "noeviction"}, "% of maxmemory and evicts nothing (noeviction)"),
        ({"maxmemory": "50mb", "maxmemory-policy": "allkeys-random"}, "It evicts at random (allkeys-random)"),
    ],
    ids=str,
)
def test_unsuitable_eviction_policy_causes_a_warning(
    server: Server, ask: Ask, config: dict[str, str], warning: str | None
) -> None:
    client: Any
    with server.client() as client:
        before = {name: client.config_get(name)[name] for name in config}
        try:
            for name, value in config.items():
                client.config_set(name, value)
            (shown,) = ask("stats", server.url)[1]["servers"]
        finally:
            for name, value in before.items():
                client.config_set(name, value)
    assert [warning in answer for answer in shown["warnings"]] == ([] if warning is None else [True])
    assert shown["eviction_policy"] == config["maxmemory-policy"]


def test_failing_save_causes_a_warning(ask: Ask) -> None:
    with Server() as server, server.client() as client:
        (server.directory / "dump.rdb").mkdir()
        client.bgsave()
        wait_until(lambda: not client.info("persistence")["rdb_bgsave_in_progress"], "the save has failed")
        (shown,) = ask("stats", server.url)[1]["servers"]
    assert [warning[:36] for warning in shown["warnings"]] == ["Its last attempt to save failed; unt"]


# -- what goes wrong ---------------------------------------------------------------------------------------------------

SECRET = "correct horse/battery@staple?1"
QUOTED = "correct%20horse%2Fbattery%40staple%3F1"


def test_missing_server_is_reported_in_one_line(run: Run) -> None:
    address = f"127.0.0.1:{free_port()}"
    for scheme, path in (("redis", ""), ("redis+cluster", ""), ("redis+sentinel", "/service")):
        done = run("stats", "--url", f"{scheme}://:{QUOTED}@{address}{path}")
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("No answer from ")
        assert address in line
        assert "correct" not in line
    for command in ("inspect", "forget"):
        assert run(command, *named(CHAT), "--url", f"redis://{address}").returncode == 2


def test_missing_url_is_reported_in_one_line(run: Run) -> None:
    done = run("stats")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "There is no server to ask: give --url, or set WARMPREFIX_REDIS_URL.\n"


@pytest.mark.parametrize(
    "url",
    [
        "localhost:6379",
        f"http://:{SECRET}@localhost",
        f"redis://:{SECRET}@localhost:6379",
        f"redis://:{QUOTED}@localhost:{SECRET}",
        f"redis://localhost/{SECRET}",
        f"redis://localhost?db={SECRET}",
        f"redis+cluster://:{SECRET}@one,two",
        f"redis+sentinel://:{QUOTED}@one",
    ],
)
def test_invalid_url_is_never_quoted(run: Run, url: str) -> None:
    done = run("stats", "--url", url)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert not [word for word in ("correct", "horse", "battery", "staple") if word in line]


def test_a_password_is_needed_and_never_printed(run: Run) -> None:
    with Server(requirepass=f'"{SECRET}"') as server, redis.Redis(port=server.port, password=SECRET) as client:
        client.ping()
        url = f"redis://:{QUOTED}@{server.address}"
        for done in (run("stats", "--url", url), run("stats", "--json", WARMPREFIX_REDIS_URL=url)):
            assert (done.returncode, done.stderr) == (0, "")
            assert "correct" not in done.stdout
        for wrong in (f"redis://{server.address}", f"redis://:{QUOTED}x@{server.address}"):
            done = run("stats", "--url", wrong)
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr == (
                f"Refused by {server.address}: the URL's user or password is wrong, or it needs one.\n"
            )
    for command in ("stats", "inspect", "forget"):
        done = run(command, "--help", WARMPREFIX_REDIS_URL=url)
        assert done.returncode == 0
        assert "correct" not in done.stdout


def test_forbidden_command_is_reported_in_one_line(server: Server, run: Run) -> None:
    with server.client() as client:
        client.execute_command("ACL SETUSER limited on >x ~* -@all +ping")
        done = run("stats", "--url", f"redis://limited:x@{server.address}")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"No answer from {server.address}: .*no permissions.*\n", done.stderr)


def test_a_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['redis'] = None; from warmprefix_tools.__main__ import main; main()"
    command = [sys.executable, "-c", code, "state", "stats", "--url", "redis://localhost"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{MissingExtraError('redis', 'redis')}\n")


def test_the_prefix_comes_from_the_environment(server: Server, fill: Fill, run: Run) -> None:
    fill(server.url, "shop").turns(CHAT)
    settings = {"WARMPREFIX_REDIS_URL": server.url, "WARMPREFIX_KEY_PREFIX": "shop"}
    assert run("inspect", *named(CHAT), **settings).returncode == 0
    assert run("inspect", *named(CHAT), "--prefix", "wp", **settings).returncode == 1


def test_invalid_prefix_is_reported_in_one_line(server: Server, run: Run) -> None:
    done = run("stats", "--url", server.url, "--prefix", "{shop}")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"The prefix must not .*\{shop\}'\.\n", done.stderr)
