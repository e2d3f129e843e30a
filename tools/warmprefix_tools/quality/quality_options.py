"""The options of `warmprefix quality`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

from warmprefix_tools.option_checks import check_files, check_least
from warmprefix_tools.quality.arms import ARMS
from warmprefix_tools.quality.scores import Measure

try:
    from typer import Argument, Option
except ImportError as exc:
    from warmprefix.errors import MissingExtraError

    raise MissingExtraError("cli", "typer") from exc

__all__ = ["QualityCompareOptions", "QualityOptions", "QualityReportOptions"]

_DEFAULT_ARMS = "relevance,planned,note,labels,shuffled,full-again,references"


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """One run: what is asked, of which model."""

    endpoint: Annotated[str, Option(metavar="URL", help="Base URL of the model, as http://vllm:8000/v1.")]
    model: Annotated[str, Option(help="Name of the model.")]
    answers: Annotated[Path, Option(metavar="FILE", help="File of the answers; a run that was stopped goes on.")]
    data: Annotated[
        str,
        Option(
            metavar="DATA",
            help="File of questions, or made-up ones: made-up, made-up:de, :es, :zh.",
        ),
    ] = "made-up"
    arms: Annotated[str, Option(metavar="NAMES", help=f"With commas, from {', '.join(ARMS)}.")] = _DEFAULT_ARMS
    limit: Annotated[int, Option(help="Most questions.")] = 500
    repeats: Annotated[int, Option(help="Calls per question and arm; 2 or more measure the model's own noise.")] = 1
    at_once: Annotated[int, Option(help="Calls at one time.")] = 8
    max_tokens: Annotated[int, Option(help="Most tokens of an answer.")] = 64
    timeout_seconds: Annotated[float, Option("--timeout", help="Seconds for one answer.")] = 120.0
    seed: Annotated[int, Option(help="Seed of random orders, and of the model.")] = 0
    api_key: Annotated[str, Option(envvar="OPENAI_API_KEY", show_default=False, help="Key of the endpoint.")] = "none"

    def __post_init__(self) -> None:
        unknown = [arm for arm in self.arm_names if arm not in ARMS]
        if unknown or not self.arm_names:
            raise ValueError(f"arms must be some of {', '.join(ARMS)}, got {self.arms!r}")
        for name in ("limit", "repeats", "at_once", "max_tokens"):
            check_least(name, getattr(self, name), 1)
        if not self.timeout_seconds > 0:
            raise ValueError(f"timeout must be above 0, got {self.timeout_seconds}")

    @property
    def arm_names(self) -> list[str]:
        """The arms, each once."""
        return list(dict.fromkeys(filter(None, map(str.strip, self.arms.split(",")))))


@dataclass(frozen=True, slots=True)
class QualityReportOptions:
    """A report on the answers of one run."""

    answers: Annotated[Path, Argument(metavar="FILE", help="File of the answers.")]
    measure: Annotated[str, Option(help=f"Score to compare: {', '.join(get_args(Measure))}.")] = "f1"
    margin: Annotated[float, Option(help="Points that an arm may be worse.")] = 1.0
    json_file: Annotated[Path | None, Option("--json", metavar="FILE", help="Write the report as JSON; or -.")] = None
    html_file: Annotated[Path | None, Option("--html", metavar="FILE", help="Write the report as a page.")] = None
    check: Annotated[
        str, Option(metavar="NAMES", help="Exit with status 1 unless these arms are not worse than the baseline.")
    ] = ""

    def __post_init__(self) -> None:
        _check_measure(self.measure)
        if not 0 < self.margin < 100:
            raise ValueError(f"margin must be above 0 and below 100 points, got {self.margin}")
        check_files({"--json": self.json_file, "--html": self.html_file}, [self.answers])

    @property
    def checked_arms(self) -> list[str]:
        """The arms that must not be worse."""
        return list(filter(None, map(str.strip, self.check.split(","))))


@dataclass(frozen=True, slots=True)
class QualityCompareOptions:
    """A comparison of two runs with the same questions."""

    earlier: Annotated[Path, Argument(metavar="EARLIER", help="File of the answers to compare with.")]
    later: Annotated[Path, Argument(metavar="LATER", help="File of the other answers.")]
    measure: Annotated[str, Option(help=f"Score to compare: {', '.join(get_args(Measure))}.")] = "f1"

    def __post_init__(self) -> None:
        _check_measure(self.measure)


def _check_measure(measure: str) -> None:
    if measure not in get_args(Measure):
        raise ValueError(f"measure must be one of {', '.join(get_args(Measure))}, got {measure!r}")
