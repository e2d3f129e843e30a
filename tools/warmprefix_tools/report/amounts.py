"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["change", "counted", "duration", "percent", "points", "rounded", "whole_shares"]


def percent(share: float) -> str:
    """One decimal: a page compares orders that are less than a percent apart.

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
    """A difference of two shares, with a true minus sign.

    >>> points(0.171), points(-0.02), points(0.0001)
    ('+17.1', '−2.0', '±0.0')
    """
    return _signed(100 * difference)


def change(part: float) -> str:
    """How much more or less it is than before.

    >>> change(-0.137)
    '−13.7%'
    """
    return f"{_signed(100 * part)}%"


def _signed(number: float) -> str:
    size = f"{abs(number):.1f}"
    sign = "±" if size == "0.0" else "+" if number > 0 else "\u2212"
    return f"{sign}{size}"


def rounded(count: float) -> str:
    """A count in three digits at most, or two and a decimal point.

    >>> [rounded(n) for n in (0, 999, 1_000, 12_345, 999_499, 999_500, 1_251_000, 7_600_000_000)]
    ['0', '999', '1k', '12.3k', '999k', '1M', '1.25M', '7.6B']
    """
    value = float(count)
    for unit in ("", "k", "M"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1_000
    return f"{value:.3g}B" if abs(value) < 999.5 else f"{value:,.0f}B"


def counted(count: int, thing: str) -> str:
    """A number of things.

    >>> counted(1, "block"), counted(2_800, "request")
    ('1 block', '2,800 requests')
    """
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def duration(microseconds: float) -> str:
    r"""In the unit that keeps the number short, which no line break parts from it.

    >>> duration(0.53), duration(47.2), duration(1_250), duration(2_500_000)
    ('0.5\xa0µs', '47\xa0µs', '1.2\xa0ms', '2.5\xa0s')
    """
    for limit, unit, scale in ((1e3, "µs", 1.0), (1e6, "ms", 1e3), (float("inf"), "s", 1e6)):
        if microseconds < limit:
            value = microseconds / scale
            return f"{value:.1f}\u00a0{unit}" if value < 10 else f"{value:.0f}\u00a0{unit}"
    raise ValueError(f"not a duration: {microseconds}")
