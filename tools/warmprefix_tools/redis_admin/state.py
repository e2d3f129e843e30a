"""The commands of `warmprefix state`: what planners share through Redis, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import Any

from warmprefix import __version__
from warmprefix.errors import MissingExtraError
from warmprefix.stores import Conversation, Forget, ReadTurn, RecordBounds
from warmprefix_openai.outputs import standard_output
from warmprefix_redis import (
    URL_SCHEMES,
    RedisSeenStore,
    check_prefix,
    connect,
    conversation_key,
    parse_redis_url,
    turn_key,
)
from warmprefix_tools.redis_admin import StateError
from warmprefix_tools.report.amounts import counted
from warmprefix_tools.report.visible import visible

try:
    import redis.exceptions
    import redis.sentinel
except ImportError as error:
    raise MissingExtraError("redis", "redis") from error
try:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise MissingExtraError("cli", "rich") from error

__all__ = ["run_forget", "run_inspect", "run_stats"]

_DEFAULT_TTL_SECONDS = 86_400.0
_COMMAND_SECONDS = 5.0
_PLAIN_WIDTH = 100
_ROWS_SHOWN = 50
_MOST_KEYS = 200_000
_KEYS_PER_SCAN = 1_000
_MOST_SAMPLED = 1_000
_ALMOST_FULL = 0.8
_SIZES = ("bytes", "used_memory", "max_memory")

Fields = dict[str, Any]
"""Facts by name; docs/operations.md promises the names of JSON."""


def run_inspect(url: str | None, prefix: str, conversation: Conversation, *, is_turn: bool, as_json: bool) -> bool:
    """Print the state of a conversation or of a turn.

    Returns:
        True if planners of this version can read any.

    Raises:
        OutputError: Standard output cannot be written.
        StateError: The server gave no answer.
    """
    with _connected(url, prefix) as client:
        record = _record(client, prefix, conversation, is_turn)
    with standard_output():
        if as_json:
            kind = "turn_id" if is_turn else "conversation"
            about = {"warmprefix": __version__, kind: conversation.id, "tenant": conversation.tenant}
            print(json.dumps({**about, "usable": False, **(record or {})}, indent=1))  # noqa: T201
        elif record is None:
            print(f"There is no state of {_described(conversation, is_turn)}.")  # noqa: T201
        else:
            _print(_described(conversation, is_turn), record)
    return record is not None and bool(record["usable"])


def run_forget(url: str | None, prefix: str, conversation: Conversation, *, is_turn: bool) -> bool:
    """Forget a conversation or turn, and print how much that was; raises as `run_inspect`. True if it had a record."""
    with _connected(url, prefix) as client:
        record = _record(client, prefix, conversation, is_turn)
        ttl = (record or {}).get("expires_seconds") or _DEFAULT_TTL_SECONDS
        if is_turn:
            client.unlink(turn_key(prefix, conversation))
        else:
            RedisSeenStore(client, prefix=prefix, bounds=RecordBounds(ttl=ttl)).execute(Forget(conversation))
    with standard_output():
        if record is None:
            print(f"There is no state of {_described(conversation, is_turn)}, so nothing was forgotten.")  # noqa: T201
        elif not record["usable"]:
            print(f"Removed a record of {_described(conversation, is_turn)} that this version cannot read.")  # noqa: T201
        else:
            about = f"{counted(len(record['blocks']), 'block')} of {counted(record['turn'], 'turn')}"
            end = f", {counted(len(record.get('plans', ())), 'plan')} in flight. Its next blocks are sent in full."
            if is_turn:
                end = ". Turns that continued it have records of their own."
            print(f"Forgot {_described(conversation, is_turn)}: {about}{end}")  # noqa: T201
    return record is not None


def run_stats(url: str | None, prefix: str, *, as_json: bool) -> None:
    """Print the servers and all state under the prefix. Raises as `run_inspect` does."""
    with _connected(url, prefix) as client:
        nodes = _primaries(client)
        servers = [_server(node, address) for address, node in nodes]
        counts = [_counts(node, prefix) for _, node in nodes]
    sizes = [each["bytes"] for each in counts]
    state = {
        "prefix": prefix,
        "conversations": sum(each["conversations"] for each in counts),
        "turns": sum(each["turns"] for each in counts),
        "bytes": None if None in sizes else sum(sizes),
        "streams": sum(each["streams"] for each in counts),
        "estimated": any(each["estimated"] for each in counts),
    }
    with standard_output():
        if as_json:
            print(json.dumps({"warmprefix": __version__, **state, "servers": servers}, indent=1))  # noqa: T201
            return
        for server in servers:
            _print(f"{server['flavour']} {server['version']} at {visible(server['address'])}", server)
        _print("All state under the prefix", state)


# -- the data ----------------------------------------------------------------------------------------------------------


def _record(client: Any, prefix: str, conversation: Conversation, is_turn: bool) -> Fields | None:
    """Return what is stored of a conversation or a turn; None if nothing is."""
    key = (turn_key if is_turn else conversation_key)(prefix, conversation)
    if not client.exists(key):
        return None
    store = RedisSeenStore(client, prefix=prefix)
    found: Any = None
    try:
        found = store.execute(ReadTurn(conversation)) if is_turn else store.inspect(conversation)
    except redis.exceptions.ResponseError as error:
        if not str(error).startswith("WRONGTYPE"):
            raise
    if found is not None and is_turn and found.damaged:
        found = None
    record: Fields = {"key": key.decode(), "usable": found is not None, "bytes": None, "expires_seconds": None}
    if found is not None:
        blocks = [{**block._asdict(), "fingerprint": block.fingerprint.hex()} for block in found.blocks]
        if is_turn:
            record |= {"turn": found.turn, "partial": found.partial, "other_labels": list(found.others)}
            record |= {"blocks": blocks}
        else:
            blocks = [{name: block[name] for name in block if name != "time"} for block in blocks]  # it is unknown
            record |= {"epoch": found.epoch, "turn": found.turn, "blocks": blocks, "plans": list(found.leases)}
    try:
        left = client.pttl(key)
        record |= {"bytes": client.memory_usage(key, samples=0), "expires_seconds": left / 1_000 if left >= 0 else None}
    except redis.exceptions.NoPermissionError:  # planners do not need it
        pass
    return record


def _primaries(client: Any) -> list[tuple[str, Any]]:
    """Return the address and a client of each server that takes writes."""
    if hasattr(client, "get_primaries"):
        nodes = client.get_primaries()
        return [(f"{node.host}:{node.port}", client.get_redis_connection(node)) for node in nodes]
    return [(_address_of(client), client)]


def _address_of(client: Any) -> str:
    """Return the address of a client's one server; Sentinels are asked for the master's."""
    pool = client.connection_pool
    if hasattr(pool, "get_master_address"):
        host, port = pool.get_master_address()
        return f"{host}:{port}"
    options = pool.connection_kwargs
    return options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"


def _server(client: Any, address: str) -> Fields:
    info: Mapping[str, Any] = client.info()
    is_valkey = info.get("server_name") == "valkey" or "valkey_version" in info
    server = {
        "address": address,
        "flavour": "valkey" if is_valkey else "redis",
        "version": str(info["valkey_version" if is_valkey else "redis_version"]),
        "role": "primary" if info["role"] == "master" else "replica",
        "used_memory": int(info["used_memory"]),
        "max_memory": int(info["maxmemory"]) or None,
        "eviction_policy": str(info["maxmemory_policy"]),
        "evicted_keys": int(info["evicted_keys"]),
        "keys": int(client.dbsize()),
    }
    return {**server, "warnings": list(_warnings(info))}


def _warnings(info: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences, each with a problem and its solution."""
    policy, most = str(info["maxmemory_policy"]), int(info["maxmemory"])
    bound, solution = most, "evicts nothing (noeviction); when it is full, no turn is remembered"
    if not most:
        bound, solution = int(info.get("total_system_memory", 0)), "has no limit: set maxmemory"
    if info["role"] != "master":
        yield "It is a replica, which takes no writes: give planners the primary, the Sentinels or the Cluster."
    if tuple(map(int, str(info["redis_version"]).split(".")[:2])) < (6, 2):
        yield "It is older than Redis 6.2, the first version that works."
    if policy.endswith("-random"):
        yield (
            f"It evicts at random ({policy}), conversations in use as readily as finished ones:"
            " set maxmemory-policy to allkeys-lru or volatile-lru."
        )
    if (not most or policy == "noeviction") and bound and int(info["used_memory"]) >= _ALMOST_FULL * bound:
        what = "maxmemory" if most else "the machine's memory"
        yield f"It has used {int(info['used_memory']) / bound:.0%} of {what} and {solution}."
    if "err" in (info.get("rdb_last_bgsave_status"), info.get("aof_last_write_status")):
        yield "Its last attempt to save failed; until one works, it may refuse all writes. Look at its log."


def _counts(client: Any, prefix: str) -> Fields:
    """Count the state on one server; of more than 200,000 keys, or 1,000 records, the rest is estimated.

    SCAN returns keys in the order of their hashes, so those that come first are a fair sample.
    """
    start = prefix.encode() + b":{"
    keys = list(islice(client.scan_iter(count=_KEYS_PER_SCAN), _MOST_KEYS))
    ours = {key for key in keys if key.startswith(start)}
    turns = [key for key in ours if key.endswith(b"}:turn")]
    found = sorted([*turns, *[key for key in ours if key.endswith(b"}:seen")]])
    sampled = found[:_MOST_SAMPLED]
    share = max(len(keys) / max(client.dbsize(), 1), 0.0) if len(keys) == _MOST_KEYS else 1.0
    pipeline = client.pipeline(transaction=False)
    for key in sampled:
        pipeline.execute_command("MEMORY USAGE", key, "SAMPLES", 0)
    answers: list[Any] = pipeline.execute(raise_on_error=False)
    sizes = [size for size in answers if isinstance(size, int)]  # others are gone, or on another node
    count = round(len(found) / share)
    forbidden = any(isinstance(answer, redis.exceptions.NoPermissionError) for answer in answers)
    return {
        "conversations": round((len(found) - len(turns)) / share),
        "turns": round(len(turns) / share),
        "bytes": None if forbidden else round(sum(sizes) * count / max(len(sizes), 1)),
        "streams": round(sum(key.endswith(b"}:orders") for key in ours) / share),
        "estimated": len(sampled) < count,
    }


# -- text --------------------------------------------------------------------------------------------------------------


def _described(conversation: Conversation, is_turn: bool = False) -> str:
    r"""Return a conversation's name for a sentence, on one line.

    >>> print(_described(Conversation("acme", "chat\n42")), _described(Conversation(None, "a")), sep="; ")
    conversation "chat‹U+000A›42" of tenant "acme"; conversation "a" of no tenant
    """
    tenant = "no tenant" if conversation.tenant is None else f'tenant "{visible(conversation.tenant)}"'
    return f'{"turn" if is_turn else "conversation"} "{visible(conversation.id)}" of {tenant}'


def _print(title: str, fields: Fields) -> None:
    """Print facts, a line each, then a table of blocks and a line per warning."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    console.print(Text(title, style="bold"))
    facts = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in fields.items():
        if name != "warnings":
            facts.add_row(name.replace("_", " ").removesuffix(" seconds"), Text(_shown(name, value)))
    console.print(facts)
    blocks: Sequence[Mapping[str, object]] = fields.get("blocks", ())
    if blocks:
        table = Table(*blocks[0], box=None, pad_edge=False, padding=(0, 2, 0, 2))
        for block in blocks[: -_ROWS_SHOWN - 1 : -1]:  # newest first
            table.add_row(*[Text(visible(str(value))) for value in block.values()])
        console.print(table)
    for warning in fields.get("warnings", ()):
        console.print(Text(f"Warning: {warning}", style="yellow"))


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "no limit" if name == "max_memory" else "unknown"
    if name in _SIZES:
        return decimal(value)
    if name.endswith("seconds"):
        return f"in {timedelta(seconds=round(value))}"
    if name == "blocks":
        return f"{len(value):,}, of {sum(block['tokens'] for block in value):,} tokens"
    if isinstance(value, list):
        return ", ".join(map(visible, value)) or "none"
    return visible(str(value)) if isinstance(value, bool | str) else f"{value:,}"


# -- the connection ----------------------------------------------------------------------------------------------------


@contextmanager
def _connected(url: str | None, prefix: str) -> Iterator[Any]:
    """Yield a client of one server, of the master that Sentinels name, or of a Cluster.

    Every failure in the block becomes a StateError, which shows hosts and never the URL, because that may hold a
    password.
    """
    try:
        check_prefix(prefix)
    except ValueError as error:
        raise StateError(f"The {error}.") from error
    if not url:
        raise StateError("There is no server to ask: give --url, or set WARMPREFIX_REDIS_URL.")
    try:
        target = parse_redis_url(url)
    except ValueError as error:  # its message may quote a part of the URL
        raise StateError(
            f"The URL can't be used: it begins with one of {', '.join(URL_SCHEMES)}, or with valkey in place of redis."
            " Then come user:password@ if there are any (percent-encode everything but letters and digits), the hosts,"
            " and behind a slash a Sentinel's service or the number of a database."
        ) from error
    hosts = ", ".join(f"{host}:{port}" for host, port in target.nodes)
    place = {"cluster": f"the Cluster at {hosts}", "sentinel": f"{target.service}, for the Sentinels at {hosts}"}
    where = place.get(target.kind, "the server")
    try:
        opened = connect(target, _COMMAND_SECONDS)
        try:
            where = place.get(target.kind) or _address_of(opened[0])
            yield opened[0]
        finally:
            for client in opened:
                client.close()
    except redis.AuthenticationError as error:
        raise StateError(f"Refused by {where}: the URL's user or password is wrong, or it needs one.") from error
    except redis.sentinel.MasterNotFoundError as error:  # its message is the driver's description of its clients
        raise StateError(f"No answer from {where}: no Sentinel is there, or none has a master by that name.") from error
    except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise StateError(f"No answer from {where}: {reason}.") from error
