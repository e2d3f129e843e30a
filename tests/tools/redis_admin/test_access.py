"""The access rules of docs/operations.md: enough, and nothing too much."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import RedisClusterException

from redis_servers import Cluster, SentinelSetup, Server, wait_until
from warmprefix import ContextPlanner, Scope, StoreError
from warmprefix.order_sharing import LearnedOrder
from warmprefix.stores import (
    Abandon,
    Commit,
    Conversation,
    Forget,
    Prepare,
    ReadTurn,
    SeenBlock,
    TurnRecord,
    WriteTurn,
)
from warmprefix_redis import RedisSeenStore, RedisValues, conversation_key, turn_key
from warmprefix_redis.order_codec import stream_key
from warmprefix_redis.order_sharing import RedisOrderSharing
from warmprefix_redis.settings import SharedSettings

PAGE = (Path(__file__).parents[3] / "docs/operations.md").read_text()
(RULE,) = re.findall(r"^ACL SETUSER (warmprefix .*)$", PAGE, re.MULTILINE)
COMMANDS = re.findall(r"\+\S+", RULE)
ADDED = {
    row: re.findall(r"\+[a-z|]+", cell.replace("\\|", "|"))
    for row, cell in re.findall(r"^\| (`?[a-zA-Z].*) \| `(\+.*)` \|$", PAGE, re.MULTILINE)
}
STATS, INSPECT = "`warmprefix state stats`", "`warmprefix state inspect`, with memory and expiry"
RESET = (
    "`planner.reset()`, which clears all conversations; "
    "it sees the names of all keys, including those of other applications"
)
CLUSTER, SENTINELS = "a Cluster", "Sentinels, which have their own users"
CHAT = Conversation("acme", "chat-42")
ADA, CHARLES = (
    f"{name} of the nineteenth century. " * 8
    for name in ("Ada Lovelace, a mathematician", "Charles Babbage, an inventor")
)
SCOPE = Scope("acme", None, None)

Admin = Any


def test_the_page_has_the_rules() -> None:
    assert set(ADDED) == {RESET, CLUSTER, STATS, INSPECT, SENTINELS}
    assert len(COMMANDS) > 10


class User:
    """The user of the page, on one server or on several."""

    def __init__(self, *admins: Admin) -> None:
        self._admins = admins
        self.password = secrets.token_hex(8)

    def may(self, *commands: str) -> None:
        """Permit these commands, with the rest of the documented rule."""
        words = [word for word in RULE.split() if not word.startswith("+")]
        rule = [word.replace("PASSWORD", self.password) for word in words]
        for admin in self._admins:
            admin.execute_command("ACL SETUSER", *rule, *commands)

    def url(self, url: str) -> str:
        return url.replace("://", f"://warmprefix:{self.password}@")


@pytest.fixture
def admin(each_server: Server) -> Iterator[Admin]:
    with each_server.client() as client:
        yield client
        client.acl_deluser("warmprefix")


@pytest.fixture
def user(admin: Admin) -> User:
    user = User(admin)
    user.may(*COMMANDS)
    return user


def test_a_planner_needs_no_more(each_server: Server, admin: Admin, user: User, ask: Callable[..., Any]) -> None:
    wait_until(lambda: admin.info("server")["uptime_in_seconds"] > 2, "planners trust the server")
    url = user.url(each_server.url)
    admin.script_flush()
    admin.acl_log_reset()
    patient = SharedSettings(redis_url=url, store_budget=10.0)
    with ContextPlanner.from_url(settings=patient) as one, ContextPlanner.from_url(settings=patient) as other:
        for planner, expected in ((one, 0), (other, 2), (one, 2)):
            with planner.planning([ADA, CHARLES], conversation="chat-42", placement="tail", tenant="acme") as plan:
                assert len(plan.references) == expected
        assert one.abandon(other.plan(["c"], conversation="chat-42", placement="tail", tenant="acme")) is False
        for planner in (one, other):
            planner.plan([], tenant="acme")
        with one.planning(["a", "b"], tenant="acme"):
            pass
        wait_until(lambda: other.stats().shared_orders > 0, "orders are shared")
        status, answer = ask("inspect", url, "--conversation", "chat-42", "--tenant", "acme")
        assert (status, len(answer["blocks"]), answer["bytes"]) == (0, 2, None)
        one.forget("chat-42", tenant="acme")
        assert not other.plan(["a"], conversation="chat-42", placement="tail", tenant="acme").references
        with pytest.raises(StoreError):
            one.reset()
        for planner in (one, other):
            stats = planner.stats()
            assert (stats.store_errors, stats.sharing_errors) == (0, 0)
    refused = {(entry["reason"], entry["object"].partition("|")[0]) for entry in admin.acl_log()}
    assert refused <= {("command", "client"), ("command", "scan"), ("command", "pttl"), ("command", "memory")}


async def test_values_of_gateways_need_no_more(each_server: Server, user: User) -> None:
    values = RedisValues(user.url(each_server.url), timeout=10)
    await values.put(b"name", b"value")
    await values.put(b"other", b"value", only_present=True)
    assert [await values.get(name, renew=True) for name in (b"name", b"other")] == [b"value", None]
    await values.delete(b"name")
    assert await values.get(b"name") is None
    assert not values.breaker.is_open
    await values.aclose()


def test_state_commands_need_no_more(
    each_server: Server, user: User, fill: Callable[..., Any], run: Callable[..., Any]
) -> None:
    fill(each_server.url).turns(CHAT)
    url = user.url(each_server.url)
    shown = run("inspect", "--conversation", CHAT.id, "--tenant", CHAT.tenant, "--url", url)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "bytes unknown" in " ".join(shown.stdout.split())
    forgot = run("forget", "--conversation", CHAT.id, "--tenant", CHAT.tenant, "--url", url)
    assert (forgot.returncode, forgot.stderr) == (0, "")


def test_other_keys_are_out_of_reach(each_server: Server, user: User) -> None:
    store = RedisSeenStore(user.url(each_server.url), prefix="other", timeout=10)
    with pytest.raises(redis.RedisError, match=r"(?i)no permissions|permission"):
        store.execute(Prepare(CHAT, "plan", {}))
    store.close()


@pytest.mark.parametrize("dropped", COMMANDS)
def test_every_permission_is_needed(each_server: Server, admin: Admin, user: User, dropped: str) -> None:
    url = user.url(each_server.url)
    user.may(*(command for command in COMMANDS if command != dropped))
    assert not (store_works(url, admin) and sharing_works(url, admin))


def test_all_of_them_together_are_enough(each_server: Server, admin: Admin, user: User) -> None:
    url = user.url(each_server.url)
    assert store_works(url, admin)
    assert sharing_works(url, admin)


def store_works(url: str, admin: Admin) -> bool:
    """Return whether every operation works, on every path through its script."""
    admin.script_flush()
    future, block = Conversation("acme", "of another version"), SeenBlock(b"f" * 16, "label", 1, 10)
    admin.hset(conversation_key("wp", future), "m", b"\x07")
    store = RedisSeenStore(url, timeout=10)
    try:
        for plan in ("a", "b", "c"):
            store.execute(Prepare(CHAT, plan, {block.fingerprint: block.label}))
        assert store.execute(Commit(CHAT, "a", [block]))
        assert not store.execute(Commit(CHAT, "b", [block]))
        assert store.execute(Abandon(CHAT, "c"))
        assert store.inspect(CHAT)
        store.execute(Forget(CHAT))
        assert store.execute(Prepare(future, "d", {})).turn == 0
        admin.delete(turn_key("wp", CHAT))
        assert store.execute(WriteTurn(CHAT, TurnRecord(1, (block,))))
        assert not store.execute(WriteTurn(CHAT, TurnRecord(1)))
        assert store.execute(ReadTurn(CHAT)) is None
    except redis.RedisError:
        return False
    finally:
        store.close()
    return True


def sharing_works(url: str, admin: Admin) -> bool:
    """Return whether orders reach an early and a late follower, also after a failure."""
    received: list[LearnedOrder] = []
    teller, reader, late = (RedisOrderSharing(url, newest_first=first) for first in (False, False, True))
    sharings = (teller, reader, late)

    def errors() -> int:
        return max(sharing.stats().errors for sharing in sharings)

    def comes(count: int, most_errors: int) -> bool:
        wait_until(lambda: len(received) >= count or errors() > most_errors, "an order comes, or an error")
        return errors() <= most_errors

    try:
        reader.follow(SCOPE, received.extend)
        teller.publish(SCOPE, order(1))
        if not comes(1, most_errors=0):
            return False
        late.follow(SCOPE, received.extend)
        if not comes(2, most_errors=0):
            return False
        admin.execute_command("ACL SETUSER warmprefix off")
        admin.client_kill_filter(_type="normal", skipme=True)
        teller.publish(SCOPE, order(2))
        wait_until(lambda: all(sharing.stats().errors for sharing in sharings), "all have failed")
        wait_until(lambda: teller.stats().dropped == 1, "what was on its way is lost")
        failed = errors()
        admin.execute_command("ACL SETUSER warmprefix on")
        teller.publish(SCOPE, order(3))
        return comes(4, most_errors=failed + 2) and bool(admin.pttl(stream_key("wp", SCOPE)) > 0)
    finally:
        for sharing in sharings:
            sharing.close()


def order(number: int) -> LearnedOrder:
    return LearnedOrder([bytes([number]) * 16], [10], [0])


# -- what more there is to allow ---------------------------------------------------------------------------------------


def test_reset_needs_the_documented_permissions(each_server: Server, user: User) -> None:
    assert ADDED[RESET] == ["+scan"]
    user.may(*COMMANDS, *ADDED[RESET])
    store = RedisSeenStore(user.url(each_server.url), timeout=10)
    store.execute(Prepare(CHAT, "plan", {}))
    store.clear()
    assert store.inspect(CHAT) is None
    store.close()


@pytest.mark.parametrize("dropped", [None, *ADDED[STATS]])
def test_stats_need_the_documented_permissions(
    each_server: Server, user: User, fill: Callable[..., Any], run: Callable[..., Any], dropped: str | None
) -> None:
    fill(each_server.url).turns(CHAT)
    sharing = RedisOrderSharing(each_server.url)
    sharing.publish(SCOPE, order(1))
    sharing.close()
    user.may(*COMMANDS, *(command for command in ADDED[STATS] if command != dropped))
    done = run("stats", "--url", user.url(each_server.url))
    whole = done.returncode == 0 and "unknown" not in done.stdout
    assert whole == (dropped is None), done.stdout + done.stderr


@pytest.mark.parametrize("dropped", [None, *ADDED[INSPECT]])
def test_inspect_needs_the_documented_permissions(
    each_server: Server, user: User, fill: Callable[..., Any], ask: Callable[..., Any], dropped: str | None
) -> None:
    fill(each_server.url).turns(CHAT)
    user.may(*COMMANDS, *(command for command in ADDED[INSPECT] if command != dropped))
    status, answer = ask("inspect", user.url(each_server.url), "--conversation", CHAT.id, "--tenant", CHAT.tenant)
    assert (status, answer["bytes"] is not None) == (0, dropped is None)


@pytest.mark.parametrize("dropped", [None, *ADDED[CLUSTER]])
def test_cluster_needs_the_documented_permissions(cluster: Cluster, dropped: str | None) -> None:
    admins: list[Admin] = [node.client() for node in cluster.nodes]
    user = User(*admins)
    try:
        user.may(*COMMANDS, *(command for command in ADDED[CLUSTER] if command != dropped))
        assert cluster_works(cluster, user.url(cluster.url), admins) == (dropped is None)
    finally:
        for admin in admins:
            admin.acl_deluser("warmprefix")
            admin.close()


def cluster_works(cluster: Cluster, url: str, admins: list[Admin]) -> bool:
    """Return whether a store works, also for a slot that is being moved."""
    slot = admins[0].execute_command("CLUSTER KEYSLOT", conversation_key("wp", CHAT))
    owner = cluster.nodes.index(cluster.owner(conversation_key("wp", CHAT)))
    source, target = admins[owner], admins[owner - 1]
    source_id, target_id = (admin.execute_command("CLUSTER MYID") for admin in (source, target))
    target.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source_id)
    source.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target_id)
    try:
        store = RedisSeenStore(url, timeout=10)
        try:
            store.execute(Prepare(CHAT, "plan", {}))
            return store.execute(Abandon(CHAT, "plan"))
        finally:
            store.close()
    except (redis.RedisError, RedisClusterException):
        return False
    finally:
        target.execute_command("FLUSHALL")
        for admin in (source, target):
            admin.execute_command("CLUSTER SETSLOT", slot, "STABLE")


@pytest.mark.parametrize("dropped", [None, *ADDED[SENTINELS]])
def test_sentinels_need_the_documented_permissions(sentinels: SentinelSetup, dropped: str | None) -> None:
    (sentinel,) = sentinels.sentinels
    with sentinel.client() as admin:
        allowed = [command for command in ADDED[SENTINELS] if command != dropped]
        admin.execute_command("ACL SETUSER", "planner", "reset", "on", ">x", *allowed)
        url = f"{sentinels.url}?sentinel_username=planner&sentinel_password=x"
        store = RedisSeenStore(url, timeout=10)
        try:
            store.execute(Prepare(CHAT, "plan", {}))
            assert dropped is None
        except redis.RedisError:
            assert dropped is not None
        finally:
            store.close()
            admin.execute_command("ACL DELUSER", "planner")
