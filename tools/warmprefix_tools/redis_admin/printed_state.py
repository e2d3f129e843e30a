"""State as text for an operator at a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from warmprefix.errors import MissingExtraError
from warmprefix.stores import Conversation
from warmprefix_tools.redis_admin.conversation_record import ConversationRecord, OpenLease
from warmprefix_tools.redis_admin.server_report import ServerReport
from warmprefix_tools.redis_admin.survey import ConversationCounts, Survey
from warmprefix_tools.report.amounts import counted
from warmprefix_tools.report.visible import visible

try:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

__all__ = ["describe", "in_bytes", "in_time", "new_console", "print_record", "print_survey"]

_PLAIN_WIDTH = 100
_BLOCKS_SHOWN = 50
_STREAMS_SHOWN = 10
_DIGEST_SHOWN = 12


def new_console() -> Console:
    """Return a console on standard output, of a fixed width if that is not a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    return console


# -- a conversation ----------------------------------------------------------------------------------------------------


def print_record(conversation: Conversation, record: ConversationRecord, console: Console) -> None:
    """Print a conversation's counts, its blocks, newest first, and its plans in flight."""
    console.print(Text(describe(conversation), style="bold"))
    _print_rows(_facts(record), console)
    if record.blocks:
        _print_table(
            ("turn", "tokens", "label", "digest of the text"),
            (
                (str(block.turn), f"{block.tokens:,}", visible(block.label), block.fingerprint.hex()[:_DIGEST_SHOWN])
                for block in record.blocks[: -_BLOCKS_SHOWN - 1 : -1]
            ),
            console,
        )
        _print_rest(len(record.blocks) - _BLOCKS_SHOWN, "older block", console)
    if record.leases:
        _print_table(
            ("plan in flight", "made after turn", "lease"),
            ((visible(lease.plan), str(lease.turn), _time_of(lease)) for lease in record.leases),
            console,
        )


def _facts(record: ConversationRecord) -> list[tuple[str, str]]:
    size = "gone in the meantime" if record.bytes is None else in_bytes(record.bytes)
    expires = (
        "never" if record.expires_seconds is None else f"in {in_time(record.expires_seconds)}, unless it is used again"
    )
    if record.format is None:
        kind = "not one that any version writes; planners ignore it"
    elif not record.readable:
        kind = f"{record.format}, which this version does not read; its planners ignore it"
    else:
        kind = str(record.format)
    if not record.may_ask:
        size = expires = "unknown: the URL's user may not run MEMORY USAGE and PTTL"
    facts = [("key", record.key), ("format", kind), ("memory", size), ("expires", expires)]
    if record.readable:
        facts[1:1] = [
            ("turns", str(record.turn)),
            ("epoch", str(record.epoch)),
            ("blocks", f"{len(record.blocks):,}, of {sum(block.tokens for block in record.blocks):,} tokens"),
            ("plans in flight", f"{len(record.leases):,}"),
        ]
    return facts


def _time_of(lease: OpenLease) -> str:
    if lease.expires_seconds > 0:
        return f"{in_time(lease.expires_seconds)} left"
    return f"timed out {in_time(-lease.expires_seconds)} ago"


# -- everything --------------------------------------------------------------------------------------------------------


def print_survey(survey: Survey, console: Console) -> None:
    """Print each server's figures and warnings, then the totals of conversations and streams."""
    for server in survey.servers:
        console.print(Text(f"{server.flavour} {server.version} at {visible(server.address)}", style="bold"))
        _print_rows(_facts_of_server(server), console)
        for warning in server.warnings:
            console.print(Padding(Text(f"Warning: {warning}", style="yellow"), (0, 0, 0, 2)))
        console.print()
    console.print(Text(f"All state under the prefix {visible(survey.prefix)}", style="bold"))
    _print_rows(_facts_of_conversations(survey.conversations, survey.stream_count), console)
    if survey.streams:
        _print_table(
            ("stream of orders", "entries", "memory", "last written to"),
            (
                (
                    visible(stream.key),
                    f"{stream.entries:,}",
                    "?" if stream.bytes is None else in_bytes(stream.bytes),
                    "never" if stream.last_entry_seconds is None else f"{in_time(stream.last_entry_seconds)} ago",
                )
                for stream in survey.streams[:_STREAMS_SHOWN]
            ),
            console,
        )
        _print_rest(survey.stream_count - _STREAMS_SHOWN, "more stream", console)


def _facts_of_server(server: ServerReport) -> list[tuple[str, str]]:
    replicas = f" with {counted(server.replicas, 'replica')}" if server.replicas else ""
    bound = "without a limit" if server.max_memory is None else f"of {in_bytes(server.max_memory)}"
    return [
        ("role", f"{server.role}{replicas}, {server.mode}, up for {in_time(server.uptime_seconds)}"),
        ("memory", f"{in_bytes(server.used_memory)} {bound}"),
        ("eviction", f"{server.eviction_policy}, {counted(server.evicted_keys, 'key')} evicted so far"),
        ("persistence", server.persistence),
        ("keys", f"{server.keys:,}, of this application or any other"),
    ]


def _facts_of_conversations(found: ConversationCounts, streams: int) -> list[tuple[str, str]]:
    about = "about " if found.estimated else ""
    facts = [
        ("conversations", f"{about}{found.count:,}"),
        ("memory", "unknown: the URL's user may not run MEMORY USAGE"),
        ("blocks", f"{about}{found.blocks:,}"),
        ("plans in flight", f"{about}{found.open_leases:,}"),
        ("order streams", f"{about}{streams:,}"),
    ]
    if found.bytes is not None:
        each = f", {in_bytes(found.bytes / found.count)} each" if found.count else ""
        facts[1] = ("memory", f"{about}{in_bytes(found.bytes)}{each}")
    if found.unreadable:
        facts.append(("another format", f"{about}{counted(found.unreadable, 'conversation')}, ignored"))
    if found.estimated:
        facts.append(("", f"estimated from {counted(found.sampled, 'conversation')}"))
    return facts


# -- layout ------------------------------------------------------------------------------------------------------------


def _print_rows(rows: Sequence[tuple[str, str]], console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    console.print(table)


def _print_table(heads: Sequence[str], rows: Iterable[Sequence[str]], console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for head in heads:
        is_number = head in ("turn", "tokens", "entries", "memory")
        table.add_column(head, justify="right" if is_number else "left", overflow="fold", header_style="dim")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print()
    console.print(table)


def _print_rest(count: int, thing: str, console: Console) -> None:
    if count > 0:
        console.print(
            Padding(
                Text(f"and {counted(count, thing)}; --json has {'them' if count > 1 else 'it'}", style="dim"), (0, 2)
            )
        )


def in_bytes(count: float) -> str:
    """Return a size in the unit that keeps the number short.

    >>> [in_bytes(n) for n in (0, 999, 1_000, 12_345, 2_500_000_000)]
    ['0 B', '999 B', '1 kB', '12.3 kB', '2.5 GB']
    """
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1_000
    return f"{value:,.3g} TB" if value < 999.5 else f"{value:,.0f} TB"


def in_time(seconds: float) -> str:
    """Return a duration in two units at most.

    >>> [in_time(s) for s in (0.2, 59.6, 61, 3_600, 86_399, 200_000)]
    ['0 s', '1 min', '1 min 1 s', '1 h', '23 h 59 min', '2 d 7 h']
    """
    left = round(seconds)
    for size, unit, smaller, part in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if left >= size:
            rest = left % size // smaller
            return f"{left // size} {unit}{f' {rest} {part}' if rest else ''}"
    return f"{left} s"


def describe(conversation: Conversation) -> str:
    r"""Return a conversation's name for a sentence, on one line.

    >>> print(describe(Conversation("acme", "chat\n42")), describe(Conversation(None, "a")), sep="; ")
    conversation "chat‹U+000A›42" of tenant "acme"; conversation "a" of no tenant
    """
    tenant = "no tenant" if conversation.tenant is None else f'tenant "{visible(conversation.tenant)}"'
    return f'conversation "{visible(conversation.id)}" of {tenant}'
