"""What `warmprefix replay` can be told."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from warmprefix.ordering import POLICIES
from warmprefix.plan import Placement

__all__ = ["CAPACITIES", "POLICY_NAMES", "STDOUT", "ReplayOptions", "parse_capacities", "parse_policies"]

POLICY_NAMES = "relevance,frequency,greedy,coaccess"
CAPACITIES = "100000,unbounded"
STDOUT = Path("-")

_MOST = 1e12  # seconds and money stay finite
_CAPACITY = re.compile(r"([0-9][0-9_]*)(k|m|)")
_MULTIPLES = {"": 1, "k": 1_000, "m": 1_000_000}


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """One run of the command.

    Raises:
        ValueError: A number is out of range, or two options contradict each other.
    """

    traces: tuple[Path, ...]
    policies: tuple[str, ...]
    capacities: tuple[int | None, ...]
    """Tokens; None for no bound."""
    k: int | None = None
    limit: int | None = None
    placement: Placement = "head"
    answer_tokens: int = 0
    prefill_rate: float | None = None
    """Tokens a second."""
    price: float | None = None
    """Of a million prefilled tokens."""
    cached_price: float | None = None
    """Of a million tokens found in the cache; None for nothing."""
    json_file: Path | None = None
    """`STDOUT` for standard output, where nothing else is written then."""
    orders_file: Path | None = None
    html_file: Path | None = None

    def __post_init__(self) -> None:
        for name, number in (("-k", self.k), ("--limit", self.limit)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be 1 or more, got {number}")
        if self.answer_tokens < 0:
            raise ValueError(f"--answer-tokens must be 0 or more, got {self.answer_tokens}")
        if self.answer_tokens and self.placement == "head":
            raise ValueError("--answer-tokens is for --placement tail: with head, no history stands before the context")
        if self.prefill_rate is not None and not 1 <= self.prefill_rate <= _MOST:
            raise ValueError(f"--prefill-rate must be from 1 to {_MOST:,.0f}, got {self.prefill_rate:g}")
        for name, price in (("--price", self.price), ("--cached-price", self.cached_price)):
            if price is not None and not 0 <= price <= _MOST:
                raise ValueError(f"{name} must be from 0 to {_MOST:,.0f}, got {price:g}")
        if self.cached_price is not None and self.price is None:
            raise ValueError("--cached-price needs --price too: what a token costs that is not cached")
        for name, file in (("--orders-out", self.orders_file), ("--html", self.html_file)):
            if file == STDOUT:
                raise ValueError(f"{name} needs the name of a file; only --json takes - for standard output")
        outputs = [os.path.realpath(file) for file in self.outputs]
        if len(set(outputs)) < len(outputs):
            raise ValueError("--json, --orders-out and --html must name different files")
        for trace in self.traces:
            if os.path.realpath(trace) in outputs:
                raise ValueError(f"{trace} is to be read, so --json, --orders-out and --html can't be written there")

    @property
    def outputs(self) -> list[Path]:
        """The files that are written."""
        files = (self.json_file, self.orders_file, self.html_file)
        return [file for file in files if file is not None and file != STDOUT]


def parse_policies(text: str) -> tuple[str, ...]:
    """Names, in the order given; `all` for every one.

    >>> parse_policies("relevance,coaccess,relevance")
    ('relevance', 'coaccess')

    Raises:
        ValueError: A name is unknown, or there is none.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name != "all" and name not in POLICIES:
            raise ValueError(f"--policies takes all, or names of {', '.join(POLICIES)}; got {name!r}")
    return tuple(POLICIES) if "all" in names else tuple(dict.fromkeys(names))


def parse_capacities(text: str) -> tuple[int | None, ...]:
    """Numbers of tokens, in the order given; None for `unbounded`.

    >>> parse_capacities("500k,100000,unbounded")
    (500000, 100000, None)

    Raises:
        ValueError: One is neither `unbounded` nor a whole number from 1 on.
    """
    return tuple(dict.fromkeys(_capacity(name.strip()) for name in text.split(",")))


def _capacity(name: str) -> int | None:
    if name == "unbounded":
        return None
    number = _CAPACITY.fullmatch(name.lower())
    tokens = int(number[1].replace("_", "")) * _MULTIPLES[number[2]] if number else 0
    if not tokens:
        raise ValueError(
            f"--capacity-tokens takes unbounded, or whole numbers from 1 on such as 100000 or 500k; got {name!r}"
        )
    return tokens
