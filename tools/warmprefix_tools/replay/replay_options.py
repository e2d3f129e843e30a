"""Options of `warmprefix replay`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from warmprefix.annotate import Annotate
from warmprefix.cache_profiles import CacheProfile, as_profile
from warmprefix.errors import MissingExtraError
from warmprefix.plan import Placement
from warmprefix_baselines import POLICIES
from warmprefix_requests.prices import with_prices
from warmprefix_tools.choice_option import ChoiceOption, parse_choice
from warmprefix_tools.option_checks import check_files, check_least, check_range, output_files
from warmprefix_tools.replay.arrange import KeepBy
from warmprefix_tools.replay.workload import DEFAULT_K

try:
    from typer import Argument, Option
except ImportError as exc:
    raise MissingExtraError("cli", "typer") from exc

__all__ = [
    "AnnotateOption",
    "KOption",
    "ProfileOption",
    "ReplayOptions",
    "TokenizerOption",
    "named_profile",
    "parse_capacities",
]

_MOST = 1e12  # keeps seconds and money finite
_CAPACITY = re.compile(r"([0-9][0-9_]*)(k|m|)")
_MULTIPLES = {"": 1, "k": 1_000, "m": 1_000_000}

ProfileOption = Annotated[
    str | None,
    Option(metavar="NAME", help="A cache profile, such as openai or vllm-checkpoints(528,16), to count in addition."),
]

KOption = Annotated[
    int | None, Option("-k", help="Blocks per request that count.", show_default=f"{DEFAULT_K}, or all if fewer")
]

AnnotateOption = Annotated[
    Annotate,
    Option(
        help="Text in prompts about the order: a note where it changed, labels of blocks, both, none; auto: a note."
    ),
]
TokenizerOption = Annotated[
    str | None,
    Option(
        metavar="FILE_OR_URL",
        help="A tokenizer.json, or an engine's address, to count labels and notes with.",
        show_default="an estimate",
    ),
]
_MOST_WAITING = 32
"""Waiting requests that a plan considers."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """One run of the command.

    Raises:
        ValueError: A number is out of range, or two options contradict each other.
    """

    traces: Annotated[list[Path], Argument(metavar="TRACE...", help="JSONL files, gzipped or not.")]
    policies: Annotated[str, Option(metavar="NAMES", help="Ordering policies, separated by commas, or all.")] = (
        "relevance,frequency,greedy,coaccess"
    )
    capacity_tokens: Annotated[
        str, Option(metavar="SIZES", help="Cache sizes in tokens, such as 100000 or 500k, or unbounded.")
    ] = "100000,unbounded"
    k: KOption = None
    choose: Annotated[
        str | None,
        Option(
            metavar="CHOICE",
            help="Also choose among all candidates of a request in view of the cache: fields of Choice, such as"
            " k=8,keep=3,within=0.2,extra=2; each request may have its own k.",
        ),
    ] = None
    limit: Annotated[int | None, Option(help="Requests of each trace to replay.", show_default="all")] = None
    placement: Annotated[Placement, Option(help="Place of the context: in front of the history, or behind it.")] = (
        "head"
    )
    annotate: AnnotateOption = "auto"
    tokenizer: TokenizerOption = None
    waiting: Annotated[int, Option(help="Requests that wait while one is planned: those that follow in the trace.")] = 0
    retention: Annotated[
        KeepBy, Option(help="How the cache is asked to keep what comes again: by touches, also with priorities.")
    ] = "none"
    profile: ProfileOption = None
    preamble_tokens: Annotated[int, Option(help="With --profile: tokens in front of every context.")] = 0
    answer_tokens: Annotated[int, Option(help="With tail: the length of the answers in the history.")] = 0
    prefill_rate: Annotated[
        float | None, Option(help="Uncached prompt tokens per second, for a column of times to first token.")
    ] = None
    price: Annotated[float | None, Option(help="Price per million uncached prompt tokens, for a column of costs.")] = (
        None
    )
    cached_price: Annotated[float | None, Option(help="Price per million cached ones.", show_default="nothing")] = None
    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Where to write the numbers too; - for standard output.")
    ] = None
    orders_out: Annotated[
        Path | None, Option(metavar="FILE", help="Where to write each served order, for a recount.")
    ] = None
    html: Annotated[Path | None, Option(metavar="FILE", help="Where to write a page of charts.")] = None

    def __post_init__(self) -> None:
        check_least("-k", self.k, 1)
        check_least("--limit", self.limit, 1)
        check_least("--answer-tokens", self.answer_tokens, 0)
        if self.answer_tokens and self.placement == "head":
            raise ValueError(
                "--answer-tokens needs --placement tail, because with head no history stands before the context;"
                f" got {self.answer_tokens} with {self.placement}"
            )
        check_range("--waiting", self.waiting, 0, _MOST_WAITING)
        check_range("--prefill-rate", self.prefill_rate, 1, _MOST)
        check_range("--price", self.price, 0, _MOST)
        check_range("--cached-price", self.cached_price, 0, _MOST)
        if self.cached_price is not None and self.price is None:
            raise ValueError(
                f"--cached-price needs --price too, the price of tokens that are not cached; got {self.cached_price:g}"
                " without it"
            )
        check_least("--preamble-tokens", self.preamble_tokens, 0)
        if self.preamble_tokens and self.profile is None:
            raise ValueError(f"--preamble-tokens needs --profile, got {self.preamble_tokens} without it")
        _ = self.policy_names, self.capacities, self.cache_profile, self.choice  # so that wrong names fail here
        check_files(self._outputs, self.traces)

    @property
    def policy_names(self) -> tuple[str, ...]:
        """Names of the policies, in the given order; `all` stands for every policy.

        Raises:
            ValueError: A name is unknown, or the list is empty.
        """
        names = [name.strip() for name in self.policies.split(",")]
        for name in names:
            if name != "all" and name not in POLICIES:
                raise ValueError(f"--policies takes all, or names of {', '.join(POLICIES)}; got {name!r}")
        return tuple(POLICIES) if "all" in names else tuple(dict.fromkeys(names))

    @property
    def capacities(self) -> tuple[int | None, ...]:
        """Cache sizes in tokens, in the given order; None for no bound."""
        return parse_capacities(self.capacity_tokens)

    @property
    def cache_profile(self) -> CacheProfile | None:
        """The cache profile with this name.

        Raises:
            ValueError: The name is unknown.
        """
        return named_profile(self.profile)

    @property
    def choice(self) -> ChoiceOption | None:
        """The choice; None without one.

        Raises:
            ValueError: It has an unknown field, or one with a wrong value.
        """
        return None if self.choose is None else parse_choice(self.choose)

    @property
    def files(self) -> list[Path]:
        """Files to write."""
        return output_files(self._outputs)

    @property
    def _outputs(self) -> dict[str, Path | None]:
        return {"--json": self.json_file, "--orders-out": self.orders_out, "--html": self.html}


def named_profile(name: str | None) -> CacheProfile | None:
    """Return the cache profile that the option `--profile` names, perhaps with the prices of a model; None without one.

    Raises:
        ValueError: The name or the model is unknown, or the cache is none of prefixes.
    """
    if name is None:
        return None
    profile, at, model = name.partition("@")
    try:
        found = with_prices(profile, model) if at else as_profile(profile)
        if found.separator is not None:
            raise ValueError(f"only prefix caches are simulated, got {name!r}")
        return found
    except ValueError as error:
        raise ValueError(f"--profile: {error}") from None


def parse_capacities(text: str) -> tuple[int | None, ...]:
    """Return the numbers of tokens in a list, in order; None for `unbounded`.

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
