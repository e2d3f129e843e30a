"""The commands of `warmprefix state`: a connection, a look at the state, and a printed answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from warmprefix import __version__
from warmprefix.errors import MissingExtraError
from warmprefix.stores import Conversation, Forget
from warmprefix_openai.outputs import standard_output
from warmprefix_redis import URL_SCHEMES, RedisSeenStore, check_prefix, connect, parse_redis_url
from warmprefix_tools.redis_admin import StateError
from warmprefix_tools.redis_admin.conversation_record import ConversationRecord, read_record
from warmprefix_tools.redis_admin.printed_state import describe, new_console, print_record, print_survey
from warmprefix_tools.redis_admin.server_report import address_of
from warmprefix_tools.redis_admin.survey import Survey, take_survey
from warmprefix_tools.report.amounts import counted

try:
    import redis.exceptions
    import redis.sentinel
except ImportError as error:
    raise MissingExtraError("redis", "redis") from error

__all__ = ["run_forget", "run_inspect", "run_stats"]

_DEFAULT_TTL_SECONDS = 86_400.0
_COMMAND_SECONDS = 5.0


def run_inspect(url: str | None, prefix: str, conversation: Conversation, *, as_json: bool) -> bool:
    """Print a conversation's state.

    Returns:
        True if planners of this version can read any.

    Raises:
        OutputError: Standard output cannot be written.
        StateError: The server gave no answer.
    """
    with _connected(url, prefix) as client:
        record = read_record(client, prefix, conversation)
    with standard_output():
        if as_json:
            _print_json(_record_fields(conversation, record))
        elif record is None:
            print(f"There is no state of {describe(conversation)}.")  # noqa: T201
        else:
            print_record(conversation, record, new_console())
    return record is not None and record.readable


def run_forget(url: str | None, prefix: str, conversation: Conversation) -> bool:
    """Forget a conversation, and print how much that was. True if there was a record; raises as `run_inspect`."""
    with _connected(url, prefix) as client:
        record = read_record(client, prefix, conversation)
        ttl = _DEFAULT_TTL_SECONDS if record is None or record.expires_seconds is None else record.expires_seconds
        RedisSeenStore(client, prefix=prefix, ttl=ttl).execute(Forget(conversation))
    with standard_output():
        if record is None:
            print(f"There is no state of {describe(conversation)}, so nothing was forgotten.")  # noqa: T201
        elif not record.readable:
            print(f"Removed a record of {describe(conversation)} that this version cannot read.")  # noqa: T201
        else:
            print(  # noqa: T201
                f"Forgot {describe(conversation)}: {counted(len(record.blocks), 'block')} of"
                f" {counted(record.turn, 'turn')}, {counted(len(record.leases), 'plan')} in flight."
                " Its next blocks are sent in full."
            )
    return record is not None


def run_stats(url: str | None, prefix: str, *, as_json: bool) -> None:
    """Print the servers and all state under the prefix. Raises as `run_inspect` does."""
    with _connected(url, prefix) as client:
        survey = take_survey(client, prefix)
    with standard_output():
        if as_json:
            _print_json(_survey_fields(survey))
        else:
            print_survey(survey, new_console())


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
        opened = connect(target, _COMMAND_SECONDS, _COMMAND_SECONDS)
        try:
            where = place.get(target.kind) or address_of(opened[0])
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


# -- JSON, whose contract is docs/operations.md ------------------------------------------------------------------------


def _print_json(fields: Mapping[str, Any]) -> None:
    print(json.dumps(fields, indent=1))  # noqa: T201


def _record_fields(conversation: Conversation, record: ConversationRecord | None) -> dict[str, Any]:
    about = {"warmprefix": __version__, "conversation": conversation.id, "tenant": conversation.tenant}
    if record is None:
        return {**about, "usable": False}
    blocks = [{**block._asdict(), "fingerprint": block.fingerprint.hex()} for block in record.blocks]
    return {**about, "usable": record.readable, **asdict(record), "blocks": blocks}


def _survey_fields(survey: Survey) -> dict[str, Any]:
    fields = asdict(survey)
    for server_fields, server in zip(fields["servers"], survey.servers, strict=True):
        server_fields["warnings"] = list(server.warnings)
    return {"warmprefix": __version__, **fields}
