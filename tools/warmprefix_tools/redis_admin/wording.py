"""Numbers and names as people read them."""

from __future__ import annotations

from warmprefix.stores import Conversation
from warmprefix_tools.report.visible import visible

__all__ = ["in_bytes", "in_time", "named"]


def in_bytes(count: float) -> str:
    """In the unit that keeps the number short.

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
    """Two units at most.

    >>> [in_time(s) for s in (0.2, 59.6, 61, 3_600, 86_399, 200_000)]
    ['0 s', '1 min', '1 min 1 s', '1 h', '23 h 59 min', '2 d 7 h']
    """
    left = round(seconds)
    for size, unit, smaller, part in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if left >= size:
            rest = left % size // smaller
            return f"{left // size} {unit}{f' {rest} {part}' if rest else ''}"
    return f"{left} s"


def named(conversation: Conversation) -> str:
    r"""A conversation as a sentence has it, on one line.

    >>> print(named(Conversation("acme", "chat\n42")), named(Conversation(None, "a")), sep="; ")
    conversation "chat‹U+000A›42" of tenant "acme"; conversation "a" of no tenant
    """
    tenant = "no tenant" if conversation.tenant is None else f'tenant "{visible(conversation.tenant)}"'
    return f'conversation "{visible(conversation.id)}" of {tenant}'
