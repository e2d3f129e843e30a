"""Properties of `RedisSeenStore` beyond the contract, on a server of each flavour."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis import exceptions

from redis_servers import Server
from redis_servers import wait_until as wait_until_so
from warmprefix.errors import MissingExtraError, StoreUnavailableError
from warmprefix.stores import (
    Abandon,
    AsyncSeenStore,
    Commit,
    Conversation,
    Forget,
    Prepare,
    PreparedTurn,
    SeenBlock,
    SeenStore,
    Snapshot,
)
from warmprefix_redis import RedisSeenStore
from warmprefix_redis.breaker import CircuitBreaker

CHAT = Conversation("acme", "chat")
OpenStore = Callable[..., RedisSeenStore]


def key(name: str) -> bytes:
    return name.encode().ljust(16, b"\xff")


def labelled(names: str) -> dict[bytes, str]:
    return {key(name): f"Doc_{name}" for name in names}


def sent(names: str) -> list[SeenBlock]:
    return [SeenBlock(key(name), f"Doc_{name}", 1, 100) for name in names]


def prepare(store: SeenStore, plan: str, names: str = "", conversation: Conversation = CHAT) -> PreparedTurn:
    return store.execute(Prepare(conversation, plan, labelled(names)))


def serve(store: SeenStore, plan: str, names: str, conversation: Conversation = CHAT) -> bool:
    prepare(store, plan, names, conversation)
    return store.execute(Commit(conversation, plan, sent(names)))


def names_of(keys: object) -> str:
    return "".join(sorted(name for name in "ABCDEFGH" if key(name) in keys))  # type: ignore[operator]


def state(store: SeenStore) -> Snapshot:
    snapshot = store.inspect(CHAT)
    assert snapshot is not None
    return snapshot


def only_key(admin: redis.Redis) -> bytes:
    (found,) = admin.keys("*")
    assert isinstance(found, bytes)
    return found


def test_store_implements_its_protocols(open_store: OpenStore) -> None:
    store = open_store()
    assert isinstance(store, SeenStore)
    assert isinstance(store, AsyncSeenStore)


# -- round trips ---------------------------------------------------------------------------------------------------


@pytest.fixture
def monitored(server: Server, admin: redis.Redis) -> Iterator[Callable[[], list[str]]]:
    """Return the commands that clients have sent since the last call."""
    with server.client() as client, client.monitor() as monitor:

        def commands() -> list[str]:
            admin.echo("that is all")
            found: list[str] = []
            received: Any = monitor.listen()
            for command in received:
                if command["client_type"] != "lua":
                    if command["command"] == "ECHO that is all":
                        return found
                    found.append(command["command"].split()[0])
            raise AssertionError("the monitor ended")

        yield commands


def test_each_operation_is_one_round_trip(open_store: OpenStore, monitored: Callable[[], list[str]]) -> None:
    store = open_store()
    serve(store, "p1", "AB")
    prepare(store, "p2", "C")
    store.execute(Abandon(CHAT, "p2"))
    store.execute(Forget(CHAT))
    monitored()
    prepare(store, "p3", "ABCDE")
    assert monitored() == ["EVALSHA"]
    store.execute(Commit(CHAT, "p3", sent("ABC")))
    assert monitored() == ["EVALSHA"]
    prepare(store, "p4")
    store.execute(Abandon(CHAT, "p4"))
    store.execute(Forget(CHAT))
    store.inspect(CHAT)
    assert monitored() == ["EVALSHA", "EVALSHA", "EVALSHA", "HGETALL"]


def test_flushed_scripts_are_resent(
    open_store: OpenStore, admin: redis.Redis, monitored: Callable[[], list[str]]
) -> None:
    store = open_store()
    serve(store, "p1", "A")
    operations: list[Callable[[], object]] = [
        lambda: prepare(store, "p2", "A"),
        lambda: store.execute(Commit(CHAT, "p2", sent("B"))),
        lambda: store.execute(Abandon(CHAT, "p3")),
        lambda: store.execute(Forget(CHAT)),
    ]
    for operation in operations:
        admin.script_flush()
        monitored()
        operation()
        assert monitored() == ["EVALSHA", "EVAL"]
        operation()
        assert monitored() == ["EVALSHA"]
    assert state(store).turn == 2


async def test_flushed_scripts_are_resent_to_tasks(open_store: OpenStore, admin: redis.Redis) -> None:
    store = open_store()
    try:
        for name in ("p1", "p2"):
            await store.aexecute(Prepare(CHAT, name, labelled("A")))
            admin.script_flush()
            await store.aexecute(Commit(CHAT, name, sent("A")))
            admin.script_flush()
        assert state(store).turn == 2
    finally:
        await store.aclose()


# -- what is stored ------------------------------------------------------------------------------------------------


def test_nothing_is_stored_but_digests_labels_and_numbers(open_store: OpenStore, admin: redis.Redis) -> None:
    store = open_store()
    conversation = Conversation("tenant-of-the-secret", "conversation-with-a-secret")
    proposed = {key("A"): "label-of-A"}
    store.execute(Prepare(conversation, "plan-1", proposed))
    store.execute(Commit(conversation, "plan-1", [SeenBlock(key("A"), "label-of-A", 1, 77)]))
    store.execute(Prepare(conversation, "plan-2", proposed))
    name = only_key(admin)
    fields: Any = admin.hgetall(name)
    assert set(fields) == {b"state", b"b" + key("A").hex().encode(), b"llabel-of-A"}
    assert not [part for part in (name, *fields, *fields.values()) if b"secret" in part]


@pytest.mark.parametrize("tenant", [None, "", "{", "}", "a}b{c", "\udc80", "x" * 500])
@pytest.mark.parametrize("id", ["", "{}", "}{", "a:b", "\x00", "\U0001f600"])
def test_no_id_breaks_the_key(open_store: OpenStore, admin: redis.Redis, tenant: str | None, id: str) -> None:
    store = open_store(prefix="wp:test")
    conversation = Conversation(tenant, id)
    serve(store, "p1", "A", conversation)
    name = only_key(admin).decode()
    start, _, rest = name.partition("{")
    digest, _, end = rest.partition("}")
    assert (start, end) == ("wp:test:", ":seen")
    assert len(digest) == 32
    assert set(digest) <= set("0123456789abcdef")


def test_every_write_renews_the_time_to_live(open_store: OpenStore, admin: redis.Redis) -> None:
    store = open_store(ttl=1_000)
    operations: list[Callable[[], Any]] = [
        lambda: prepare(store, "p1", "A"),
        lambda: store.execute(Commit(CHAT, "p1", sent("A"))),
        lambda: store.execute(Commit(CHAT, "p1", sent("A"))),
        lambda: prepare(store, "p1", "A"),
        lambda: prepare(store, "p2", "A"),
        lambda: store.execute(Abandon(CHAT, "p2")),
        lambda: store.execute(Abandon(CHAT, "p2")),
        lambda: store.execute(Abandon(CHAT, "never was")),
        lambda: store.execute(Commit(CHAT, "never was", sent("B"))),
        lambda: store.execute(Forget(CHAT)),
    ]
    for operation in operations:
        operation()
        name = only_key(admin)
        left = admin.pttl(name)
        assert isinstance(left, int)
        assert 990_000 < left <= 1_000_000
        admin.pexpire(name, 5_000)


def test_prefixes_are_separate(open_store: OpenStore, admin: redis.Redis) -> None:
    ours, theirs = open_store(prefix="wp"), open_store(prefix="wp*")
    serve(ours, "p1", "A")
    serve(theirs, "p1", "B")
    admin.set("wp:else", 1)
    theirs.clear()
    assert names_of(prepare(ours, "p2", "AB").seen) == "A"
    assert theirs.inspect(CHAT) is None
    ours.clear()
    assert admin.keys("*") == [b"wp:else"]


def test_clear_forgets_any_number_of_conversations(open_store: OpenStore, admin: redis.Redis) -> None:
    store = open_store()
    for i in range(1_201):
        prepare(store, "p1", "", Conversation(None, str(i)))
    store.clear()
    assert admin.dbsize() == 0


# -- what it can't read --------------------------------------------------------------------------------------------


def spoil_version(admin: redis.Redis, name: bytes) -> None:
    """Write the state as another version does, with another checksum."""
    state = admin.hget(name, "state")
    assert isinstance(state, bytes)
    admin.hset(name, "state", hashlib.sha1(b"2state" + state[8:]).hexdigest()[:8].encode() + state[8:])


def spoil_state(admin: redis.Redis, name: bytes) -> None:
    admin.hset(name, "state", b"garbage")


def lose_state(admin: redis.Redis, name: bytes) -> None:
    admin.hdel(name, "state")


def replace_by_string(admin: redis.Redis, name: bytes) -> None:
    admin.set(name, b"1")


def replace_by_list(admin: redis.Redis, name: bytes) -> None:
    admin.delete(name)
    admin.lpush(name, "state")


UNREADABLE = [spoil_version, spoil_state, lose_state, replace_by_string, replace_by_list]


@pytest.mark.parametrize("spoil", UNREADABLE)
def test_other_formats_are_treated_as_missing(
    open_store: OpenStore, admin: redis.Redis, spoil: Callable[[redis.Redis, bytes], None]
) -> None:
    store = open_store()

    def spoilt() -> None:
        admin.flushall()
        serve(store, "p1", "A")
        prepare(store, "p2", "B")
        spoil(admin, only_key(admin))

    spoilt()
    assert store.inspect(CHAT) is None
    assert not store.execute(Abandon(CHAT, "p2"))
    assert admin.dbsize() == 1, "the other version may still have use for it"
    assert not store.execute(Commit(CHAT, "p2", sent("B")))
    assert admin.dbsize() == 0, "it contradicts what the other version recorded"
    spoilt()
    store.execute(Forget(CHAT))
    assert admin.dbsize() == 0
    spoilt()
    assert prepare(store, "p3", "AB") == PreparedTurn(0, {}, frozenset(), damaged=True)
    assert store.execute(Commit(CHAT, "p3", sent("AB")))
    prepared = prepare(store, "p4", "AB")
    assert (names_of(prepared.seen), prepared.damaged) == ("AB", False)


# -- what may be taken back ----------------------------------------------------------------------------------------


def test_timed_out_plan_without_parallel_commits_keeps_its_lease(open_store: OpenStore, server: Server) -> None:
    store = open_store(lease_ttl=60)
    serve(store, "p1", "A")
    prepare(store, "slow", "B")
    server.jump(61)
    assert names_of(prepare(store, "p2", "A").seen) == "A"
    assert state(store).leases == ("slow", "p2")
    assert state(store).epoch == 0


def test_plan_beyond_the_bound_is_settled(open_store: OpenStore) -> None:
    store = open_store(max_leases=2)
    serve(store, "p1", "A")
    prepare(store, "slow", "B")
    serve(store, "p2", "C")
    prepare(store, "p3")
    assert names_of(prepare(store, "p4", "AC").seen) == "A"
    assert state(store).leases == ("p3", "p4")


# -- bounds --------------------------------------------------------------------------------------------------------


def numbered(numbers: range) -> list[SeenBlock]:
    return [SeenBlock(number.to_bytes(16, "big"), f"Doc_{number}", 1, 1) for number in numbers]


def commit(store: SeenStore, plan: str, blocks: list[SeenBlock]) -> bool:
    store.execute(Prepare(CHAT, plan, {}))
    return store.execute(Commit(CHAT, plan, blocks))


def labels_of(admin: redis.Redis) -> set[bytes]:
    fields: Any = admin.hkeys(only_key(admin))
    return {field for field in fields if field.startswith(b"l")}


def test_blocks_are_trimmed_an_eighth_above_the_bound(open_store: OpenStore) -> None:
    store = open_store(max_blocks=80)
    commit(store, "p1", numbered(range(80)))
    commit(store, "p2", numbered(range(80, 90)))
    assert len(state(store).blocks) == 90
    commit(store, "p3", numbered(range(90, 91)))
    assert [int.from_bytes(block.fingerprint, "big") for block in state(store).blocks] == list(range(11, 91))


def test_labels_are_bounded_too(open_store: OpenStore, admin: redis.Redis) -> None:
    store = open_store(max_blocks=5)
    for turn in range(100):
        commit(store, f"p{turn}", numbered(range(turn, turn + 1)))
    assert labels_of(admin) == {f"lDoc_{turn}".encode() for turn in range(80, 100)}


def test_label_is_kept_as_long_as_its_block(open_store: OpenStore, admin: redis.Redis, server: Server) -> None:
    """Turns that were sent and not recorded take labels too, and could push out those of the record."""
    store = open_store(max_blocks=2, lease_ttl=1, ttl=10_000)
    serve(store, "p1", "A")
    for turn in range(20):
        store.execute(Prepare(CHAT, f"late-{turn}", {}))
        server.jump(1)
        assert not store.execute(Commit(CHAT, f"late-{turn}", numbered(range(turn, turn + 1))))
    prepared = store.execute(Prepare(CHAT, "next", {key("A"): "Doc_A", key("B"): "Doc_A"}))
    assert set(prepared.seen) == {key("A")}
    assert prepared.taken == {"Doc_A"}
    assert len(labels_of(admin)) <= 8


def test_labels_of_two_recorded_blocks_are_kept_too(open_store: OpenStore, admin: redis.Redis) -> None:
    store = open_store(max_blocks=2)
    commit(store, "p1", [SeenBlock(key("A"), "x", 1, 1)])
    store.execute(Prepare(CHAT, "p2", {}))
    store.execute(Commit(CHAT, "p2", [SeenBlock(key("B"), "x", 1, 1)]))
    for turn in range(20):
        store.execute(Prepare(CHAT, f"t{turn}", {}))
        store.execute(Forget(CHAT))
        commit(store, f"u{turn}", [SeenBlock(key("A"), "x", 1, 1), SeenBlock(key("B"), "x", 1, 1)])
    assert store.execute(Prepare(CHAT, "p3", {key("C"): "x"})).taken == {"x"}


def test_block_sent_twice_counts_once(open_store: OpenStore, admin: redis.Redis) -> None:
    store = open_store(max_blocks=3)
    for turn in range(5):
        commit(store, f"p{turn}", [*sent("AB"), *sent("AB")])
    assert names_of({block.fingerprint for block in state(store).blocks}) == "AB"
    serve(store, "p9", "C")
    assert names_of({block.fingerprint for block in state(store).blocks}) == "ABC"


def test_conflict_keeps_counts_right(open_store: OpenStore) -> None:
    store = open_store(max_blocks=3)
    for turn in range(10):
        prepare(store, f"slow{turn}")
        serve(store, f"p{turn}", "ABC"[turn % 3])
        store.execute(Commit(CHAT, f"slow{turn}", sent("D")))
    assert state(store).blocks == ()
    serve(store, "p", "ABC")
    assert len(state(store).blocks) == 3


def test_requests_of_any_size(open_store: OpenStore) -> None:
    """Lua's stack holds fewer values than these."""
    store = open_store(max_blocks=20_000)
    blocks = numbered(range(9_001))
    proposed = {block.fingerprint: block.label for block in blocks}
    assert store.execute(Prepare(CHAT, "p1", proposed)) == PreparedTurn(0, {}, frozenset())
    assert store.execute(Commit(CHAT, "p1", blocks))
    prepare(store, "slow")
    assert dict(store.execute(Prepare(CHAT, "p2", proposed)).seen) == {block.fingerprint: block for block in blocks}
    assert commit(store, "p3", [])
    store.execute(Forget(CHAT))
    assert state(store).blocks == ()


@pytest.mark.parametrize("prefix", ["", "a{b", "a}b"])
def test_a_prefix_that_would_choose_the_slot_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match=r"^prefix must not be empty, nor have braces"):
        RedisSeenStore("redis://localhost", prefix=prefix)


def test_a_fingerprint_of_another_size_is_refused(open_store: OpenStore) -> None:
    with pytest.raises(ValueError, match=r"^fingerprint must be 16 bytes, got 15$"):
        open_store().execute(Prepare(CHAT, "p1", {b"x" * 15: "x"}))


# -- servers that refuse -------------------------------------------------------------------------------------------


@pytest.fixture
def full(admin: redis.Redis) -> Iterator[Callable[[bool], None]]:
    """Return a function that fills the server's memory, or empties it."""

    def fill(is_full: bool) -> None:
        admin.config_set("maxmemory", "1" if is_full else "0")

    admin.config_set("maxmemory-policy", "noeviction")
    yield fill
    fill(False)


def test_full_memory_rejects_additions_without_change(open_store: OpenStore, full: Callable[[bool], None]) -> None:
    store = open_store()
    serve(store, "p1", "A")
    prepare(store, "p2", "B")
    before = state(store)
    store.breaker = CircuitBreaker(0, 0)
    full(True)
    with pytest.raises(exceptions.ResponseError, match=r"OOM|maxmemory"):
        store.execute(Commit(CHAT, "p2", sent("B")))
    with pytest.raises(exceptions.ResponseError, match=r"OOM|maxmemory"):
        prepare(store, "p3", "A")
    with pytest.raises(exceptions.ResponseError, match=r"OOM|maxmemory"):
        prepare(store, "p3", "A", Conversation("acme", "new"))
    assert state(store) == before
    full(False)
    assert store.execute(Commit(CHAT, "p2", sent("B"))), "it is still to come"


def test_full_memory_allows_rollbacks(open_store: OpenStore, full: Callable[[bool], None], server: Server) -> None:
    store = open_store(lease_ttl=60, ttl=10_000)
    serve(store, "p1", "A")
    prepare(store, "p2", "B")
    serve(store, "p3", "C")
    prepare(store, "p4")
    full(True)
    assert not store.execute(Commit(CHAT, "p2", sent("B"))), "it was prepared in parallel to p3"
    assert names_of({block.fingerprint for block in state(store).blocks}) == "A"
    assert store.execute(Abandon(CHAT, "p4"))
    store.execute(Forget(CHAT))
    assert state(store).blocks == ()
    assert state(store).leases == ()


def test_full_memory_allows_settling_a_plan(
    open_store: OpenStore, full: Callable[[bool], None], server: Server
) -> None:
    store = open_store(lease_ttl=60, ttl=10_000)
    serve(store, "p1", "A")
    prepare(store, "slow")
    serve(store, "p2", "B")
    server.jump(61)
    full(True)
    assert names_of(prepare(store, "p3", "AB").seen) == "A"


def test_replica_raises_read_only_error(flavour: str) -> None:
    with (
        Server(flavour, repl_diskless_sync_delay="0") as master,
        Server(flavour, replicaof=f"127.0.0.1 {master.port}") as replica,
    ):
        store = RedisSeenStore(master.url, timeout=10)
        serve(store, "p1", "A")
        store.close()
        store = RedisSeenStore(replica.url, timeout=10)
        store.breaker = CircuitBreaker(0, 0)
        wait_until_so(lambda: store.inspect(CHAT) is not None, "it is replicated")
        for operation in (
            lambda: prepare(store, "p2", "A"),
            lambda: store.execute(Commit(CHAT, "p2", sent("A"))),
            lambda: store.execute(Abandon(CHAT, "p2")),
            lambda: store.execute(Forget(CHAT)),
        ):
            with pytest.raises(exceptions.ResponseError, match=r"READONLY|read only"):
                operation()
        store.close()


def test_read_only_error_leads_to_the_new_master(flavour: str) -> None:
    with Server(flavour) as server, server.client() as client:
        store = RedisSeenStore(server.url, timeout=10)
        store.breaker = CircuitBreaker(0, 0)
        serve(store, "p1", "A")
        client.replicaof("127.0.0.1", "1")
        connected = client.info("stats")["total_connections_received"]
        for _ in range(3):
            with pytest.raises(exceptions.ResponseError, match=r"READONLY|read only"):
                prepare(store, "p2", "A")
        assert client.info("stats")["total_connections_received"] >= connected + 2
        store.close()


def test_missing_permission_is_raised(server: Server, admin: redis.Redis) -> None:
    admin.acl_setuser("half", enabled=True, nopass=True, commands=["+evalsha", "+eval", "+hmget"], keys=["wp:*"])
    store = RedisSeenStore(f"redis://half:x@{server.address}", timeout=10)
    with pytest.raises(exceptions.ResponseError, match=r"executing the script|ACL failure in script|permission"):
        prepare(store, "p1", "A")
    assert admin.dbsize() == 0
    store.close()


def test_execute_does_not_retry(listener: Callable[[], tuple[str, Callable[[], int]]]) -> None:
    """The caller has milliseconds, and decides what a failure means."""
    url, connections = listener()
    store = RedisSeenStore(url, timeout=5)
    with pytest.raises(exceptions.ConnectionError):
        prepare(store, "p1", "A")
    assert connections() == 1
    store.close()


async def test_aexecute_does_not_retry(listener: Callable[[], tuple[str, Callable[[], int]]]) -> None:
    url, connections = listener()
    store = RedisSeenStore(url, timeout=5)
    with pytest.raises(exceptions.ConnectionError):
        await store.aexecute(Prepare(CHAT, "p1", labelled("A")))
    assert connections() == 1
    await store.aclose()


def test_hanging_server_costs_the_timeout(flavour: str) -> None:
    with Server(flavour) as server:
        store = RedisSeenStore(server.url, timeout=0.2)
        serve(store, "p1", "A")
        store.breaker = CircuitBreaker(0, 0)
        server.pause()
        with pytest.raises(exceptions.TimeoutError):
            prepare(store, "p2", "A")
        server.resume()
        assert names_of(prepare(store, "p3", "A").seen) == "A", "no answer is taken for another's"
        store.close()


def test_a_call_inside_of_a_call_is_refused(open_store: OpenStore) -> None:
    """The garbage collector may abandon a plan while redis-py holds a lock that is not re-entrant."""
    store = open_store()
    refused: list[StoreUnavailableError] = []

    class Labels(dict[bytes, str]):
        def items(self) -> Any:
            try:
                store.execute(Abandon(CHAT, "other"))
            except StoreUnavailableError as error:
                refused.append(error)
            return super().items()

    prepared = store.execute(Prepare(CHAT, "p1", Labels(labelled("A"))))
    assert prepared == PreparedTurn(0, {}, frozenset())
    assert len(refused) == 2, "where the request is written, and where the answer is read"
    assert store.execute(Abandon(CHAT, "p1"))


# -- servers that come back with less ------------------------------------------------------------------------------


def test_a_record_of_another_server_counts_as_forgotten(flavour: str) -> None:
    """Also that of this server before a restart: a forget may be missing in the copy that it read."""
    with Server(flavour, appendonly="no") as server:
        store = RedisSeenStore(server.url, timeout=10)
        serve(store, "p1", "A")
        prepare(store, "open", "H")
        with server.client() as client:
            client.save()
        store.execute(Forget(CHAT))
        server.kill()
        server.restart()
        store.breaker = CircuitBreaker(0, 0)
        with contextlib.suppress(
            exceptions.ConnectionError
        ):  # the client may notice only now that its connection is gone
            prepare(store, "p2", "A")
        assert names_of(prepare(store, "p3", "A").seen) == ""
        assert store.execute(Commit(CHAT, "p3", sent("B")))
        assert names_of(prepare(store, "p4", "B").contested) == "B", "the plan from before may still be committed"
        assert not store.execute(Commit(CHAT, "open", sent("H")))
        assert names_of(prepare(store, "p5", "ABH").seen) == ""
        store.close()


def test_a_replica_that_was_made_the_master_trusts_no_older_record(flavour: str) -> None:
    with (
        Server(flavour, repl_diskless_sync_delay="0") as master,
        Server(flavour, replicaof=f"127.0.0.1 {master.port}") as replica,
        replica.client() as client,
    ):
        wait_until_so(lambda: client.info("replication")["master_link_status"] == "up", "replication")
        store = RedisSeenStore(master.url, timeout=10)
        serve(store, "p1", "A")
        master.wait_for_replicas()
        client.replicaof("NO", "ONE")
        promoted = RedisSeenStore(replica.url, timeout=10)
        assert state(promoted).blocks != ()
        assert names_of(prepare(promoted, "p2", "A").seen) == ""
        for opened in (store, promoted):
            opened.close()


# -- without redis-py ----------------------------------------------------------------------------------------------


def test_without_redis_the_extra_is_named() -> None:
    program = """
import sys
sys.modules["redis"] = None
from warmprefix.errors import MissingExtraError, StoreUnavailableError
try:
    from warmprefix_redis import RedisSeenStore
except MissingExtraError as error:
    print(error)
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == f"{MissingExtraError('redis', 'redis')}\n"


def test_import_without_redis_store_does_not_import_redis() -> None:
    program = "import sys, warmprefix, warmprefix.stores; assert 'redis' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
