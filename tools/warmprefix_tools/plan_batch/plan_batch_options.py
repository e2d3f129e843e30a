"""Options of `warmprefix plan-batch`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from warmprefix import Choice
from warmprefix.batch import Device
from warmprefix.cache_profiles import CacheProfile
from warmprefix.errors import MissingExtraError
from warmprefix_baselines import BATCH_PLANNERS
from warmprefix_tools.choice_option import parse_choice
from warmprefix_tools.option_checks import check_files, check_least, check_range, output_files
from warmprefix_tools.replay.replay_options import (
    AnnotateOption,
    KOption,
    ProfileOption,
    TokenizerOption,
    named_profile,
    parse_capacities,
)

try:
    from typer import Argument, Option
except ImportError as exc:
    raise MissingExtraError("cli", "typer") from exc

__all__ = ["PlanBatchOptions"]

_MOST_SECONDS = 1e9


@dataclass(frozen=True, slots=True)
class PlanBatchOptions:
    """One run of the command.

    Raises:
        ValueError: A number is out of range, or the planner is unknown.
    """

    trace: Annotated[Path, Argument(metavar="TRACE", help="A JSONL file, gzipped or not.")]
    planner: Annotated[str, Option(metavar="NAME", help=f"Planner of the batch: {', '.join(BATCH_PLANNERS)}.")] = (
        BATCH_PLANNERS[0]
    )
    k: KOption = None
    choose: Annotated[
        str | None,
        Option(
            metavar="CHOICE",
            help="Choose among all candidates of a request, so that requests share more: fields of Choice, such as"
            " k=8,keep=3,extra=2. It needs scores in the trace.",
        ),
    ] = None
    limit: Annotated[int | None, Option(help="Requests to plan.", show_default="all")] = None
    capacity_tokens: Annotated[
        str, Option(metavar="SIZE", help="Cache size in tokens, such as 100000 or 500k, or unbounded.")
    ] = "unbounded"
    replicas: Annotated[
        int,
        Option(metavar="N", help="Replicas of the model, each with a cache of that size; the plan is cut for them."),
    ] = 1
    device: Annotated[
        Device, Option(help="Where distances and overlaps are computed; auto: on a CUDA device if it pays.")
    ] = "auto"
    annotate: AnnotateOption = "auto"
    profile: ProfileOption = None
    tokenizer: TokenizerOption = None
    time_budget: Annotated[
        float | None,
        Option(
            metavar="SECONDS",
            help="Time for search after the first plan, by auto and merge; with it, two plans may differ.",
            show_default="a number of steps",
        ),
    ] = None
    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Where to write the numbers too; - for standard output.")
    ] = None
    orders_out: Annotated[
        Path | None, Option(metavar="FILE", help="Where to write each order, in execution order.")
    ] = None

    def __post_init__(self) -> None:
        if self.planner not in BATCH_PLANNERS:
            raise ValueError(f"--planner must be one of {', '.join(BATCH_PLANNERS)}; got {self.planner!r}")
        check_least("-k", self.k, 1)
        if self.choice is not None and self.k is not None:
            raise ValueError("-k must be left out, because --choose has its own")
        check_least("--limit", self.limit, 1)
        check_least("--replicas", self.replicas, 1)
        check_range("--time-budget", self.time_budget, 0, _MOST_SECONDS)
        _ = self.capacity, self.cache_profile  # so that wrong values fail here
        check_files(self._outputs, [self.trace])

    @property
    def capacity(self) -> int | None:
        """Cache size in tokens; None for no bound.

        Raises:
            ValueError: `capacity_tokens` is neither `unbounded` nor a whole number from 1 on, or holds several.
        """
        if "," in self.capacity_tokens:
            raise ValueError(f"--capacity-tokens takes one size here, without commas; got {self.capacity_tokens!r}")
        (capacity,) = parse_capacities(self.capacity_tokens)
        return capacity

    @property
    def choice(self) -> Choice | None:
        """Which candidates may be fed; None without a choice.

        Raises:
            ValueError: A field is unknown, has another value, or `k` is missing.
        """
        if self.choose is None:
            return None
        choice = parse_choice(self.choose).of(None)
        if choice is None:
            raise ValueError(f"--choose must name k, the number of blocks that relevance feeds; got {self.choose!r}")
        return choice

    @property
    def cache_profile(self) -> CacheProfile | None:
        """The cache profile to count in addition.

        Raises:
            ValueError: The name is unknown.
        """
        return named_profile(self.profile)

    @property
    def files(self) -> list[Path]:
        """Files to write."""
        return output_files(self._outputs)

    @property
    def _outputs(self) -> dict[str, Path | None]:
        return {"--json": self.json_file, "--orders-out": self.orders_out}
