"""Numbers as people read them, and as SVG takes them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "change",
    "counted",
    "decimal",
    "duration",
    "grouped",
    "listed",
    "percent",
    "points",
    "rounded",
    "whole_shares",
    "width",
]


def percent(share: float) -> str:
    """Return a share in percent with one decimal; orders often differ by less than 1.

    >>> percent(0.4081)
    '40.8%'
    """
    return f"{share:.1%}"


def whole_shares(counts: Sequence[int]) -> list[str]:
    """Return each count's share of their sum, in whole percent that add up to 100.

    Largest remainder: every share is rounded down, then those cut the most get the missing percent.

    >>> whole_shares([1, 1, 1]), whole_shares([199, 1, 0])
    (['34%', '33%', '33%'], ['100%', '0%', '0%'])

    Raises:
        ZeroDivisionError: The sum is 0.
    """
    total = sum(counts)
    shares = [100 * count // total for count in counts]
    most_cut = sorted(range(len(counts)), key=lambda i: -(100 * counts[i] % total))
    for i in most_cut[: 100 - sum(shares)]:
        shares[i] += 1
    return [f"{share}%" for share in shares]


def points(difference: float) -> str:
    """Return a difference of two shares in percentage points, with a true minus sign.

    >>> points(0.171), points(-0.02), points(0.0001)
    ('+17.1', '−2.0', '±0.0')
    """
    size = f"{abs(100 * difference):.1f}"
    sign = "±" if size == "0.0" else "+" if difference > 0 else "\u2212"
    return f"{sign}{size}"


def change(part: float) -> str:
    """Return a relative change in percent.

    >>> change(-0.137)
    '−13.7%'
    """
    return f"{points(part)}%"


def rounded(count: float) -> str:
    """Return a count in three digits at most, or two and a decimal point.

    >>> [rounded(n) for n in (0, 999, 1_000, 12_345, 999_499, 999_500, 1_251_000, 7_600_000_000)]
    ['0', '999', '1k', '12.3k', '999k', '1M', '1.25M', '7.6B']
    """
    value = float(count)
    for unit in ("", "k", "M"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1_000
    return f"{value:.3g}B" if abs(value) < 999.5 else f"{value:,.0f}B"


def grouped(count: int) -> str:
    """Return a whole number with commas between groups of three digits."""
    return f"{count:,}"


def counted(count: int, thing: str) -> str:
    """Return a number of things.

    >>> counted(1, "block"), counted(2_800, "request")
    ('1 block', '2,800 requests')
    """
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence lists them.

    >>> listed(["one", "two", "three"]), listed(["one"])
    ('one, two and three', 'one')
    """
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def duration(microseconds: float) -> str:
    r"""Return a time in the unit that keeps it short, with a non-breaking space.

    >>> duration(0.53), duration(47.2), duration(1_250), duration(2_500_000)
    ('0.5\xa0µs', '47\xa0µs', '1.2\xa0ms', '2.5\xa0s')
    """
    unit, scale = ("µs", 1.0) if microseconds < 1e3 else ("ms", 1e3) if microseconds < 1e6 else ("s", 1e6)
    value = microseconds / scale
    return f"{value:.1f}\u00a0{unit}" if value < 10 else f"{value:.0f}\u00a0{unit}"


def decimal(number: float) -> str:
    """Return a coordinate, with two decimals at most."""
    return f"{round(number, 2):.15g}"


def width(share: float) -> str:
    """Return a share of a width as SVG takes it.

    >>> width(0.12345)
    '12.35%'
    """
    return f"{decimal(100 * share)}%"
