"""`warmprefix state`: looks into shared state at the console."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from warmprefix.errors import MissingExtraError
from warmprefix.outputs import standard_output
from warmprefix.stores import Conversation, Forget
from warmprefix.stores.redis import RedisSeenStore
from warmprefix.stores.redis.keys import check_prefix
from warmprefix_tools.redis_admin.connection import connected
from warmprefix_tools.redis_admin.conversation import look
from warmprefix_tools.redis_admin.errors import StateError
from warmprefix_tools.redis_admin.export import record_as_json, survey_as_json
from warmprefix_tools.redis_admin.survey import take_survey
from warmprefix_tools.redis_admin.table import print_record, print_survey
from warmprefix_tools.redis_admin.wording import named
from warmprefix_tools.report.amounts import counted

try:
    from rich.console import Console
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

__all__ = ["run_forget", "run_inspect", "run_stats"]

_PLAIN_WIDTH = 100
_A_DAY = 86_400.0


def run_inspect(url: str | None, prefix: str, conversation: Conversation, *, as_json: bool) -> bool:
    """Show what is known of a conversation.

    Returns:
        Whether planners of this version know anything of it.

    Raises:
        OutputError: Standard output can't be written.
        StateError: There is no answer.
    """
    _check(prefix)
    with connected(url) as client:
        record = look(client, prefix, conversation)
    with standard_output():
        if as_json:
            _print_json(record_as_json(conversation, record))
        elif record is None:
            print(f"Nothing is known of {named(conversation)}.")  # noqa: T201
        else:
            print_record(conversation, record, _console())
    return record is not None and record.readable


def run_forget(url: str | None, prefix: str, conversation: Conversation) -> bool:
    """Have a conversation forgotten, and say how much that was. Returns and raises as `run_inspect` does."""
    _check(prefix)
    with connected(url) as client:
        record = look(client, prefix, conversation)
        ttl = _A_DAY if record is None or record.expires_seconds is None else record.expires_seconds
        RedisSeenStore(client, prefix=prefix, ttl=ttl).execute(Forget(conversation))
    with standard_output():
        if record is None:
            print(f"Nothing is known of {named(conversation)}, so nothing was forgotten.")  # noqa: T201
        elif not record.readable:
            print(f"Removed a record of {named(conversation)} that this version can't read.")  # noqa: T201
        else:
            turns, blocks, leases = record.turn, len(record.blocks), len(record.leases)
            print(  # noqa: T201
                f"Forgot {named(conversation)}: {counted(blocks, 'block')} of {counted(turns, 'turn')},"
                f" {counted(leases, 'plan')} in flight. What it is sent next, it is sent in full."
            )
    return record is not None


def run_stats(url: str | None, prefix: str, *, as_json: bool) -> None:
    """Show the servers, and all that lies there under the prefix. Raises as `run_inspect` does."""
    _check(prefix)
    with connected(url) as client:
        survey = take_survey(client, prefix)
    with standard_output():
        if as_json:
            _print_json(survey_as_json(survey))
        else:
            print_survey(survey, _console())


def _check(prefix: str) -> None:
    try:
        check_prefix(prefix)
    except ValueError as error:
        raise StateError(f"The {error}.") from error


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    return console


def _print_json(fields: Mapping[str, Any]) -> None:
    print(json.dumps(fields, indent=1))  # noqa: T201
