"""The options of `warmprefix quality`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from warmprefix_tools.choice_option import parse_choice
from warmprefix_tools.option_checks import check_files, check_least
from warmprefix_tools.quality.arms import ARM_NAMES, check_arm
from warmprefix_tools.quality.data_sets import DATA_SETS
from warmprefix_tools.quality.scores import JUDGE, MEASURES, scorer_named

try:
    from typer import Argument, Option
except ImportError as exc:
    from warmprefix.errors import MissingExtraError

    raise MissingExtraError("cli", "typer") from exc

__all__ = ["EndpointOptions", "QualityCompareOptions", "QualityJudgeOptions", "QualityOptions", "QualityReportOptions"]

_MEASURE_HELP = f"Score to compare: {', '.join([*MEASURES, JUDGE])}, or a function as module:name."
_DEFAULT_ARMS = "relevance,planned,note,labels,shuffled,full-again,references"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """A model, and how to call it."""

    endpoint: Annotated[str, Option(metavar="URL", help="Base URL of the model, as http://vllm:8000/v1.")]
    model: Annotated[str, Option(help="Name of the model.")]
    api_key: Annotated[str, Option(envvar="OPENAI_API_KEY", show_default=False, help="Key of the endpoint.")] = "none"
    at_once: Annotated[int, Option(help="Calls at the same time; 1 for an engine that keeps one prompt per slot.")] = 8

    def __post_init__(self) -> None:
        check_least("at_once", self.at_once, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityOptions(EndpointOptions):
    """One run: what is asked, of which model."""

    answers: Annotated[Path, Option(metavar="FILE", help="File of the answers; a run that was stopped goes on.")]
    data: Annotated[
        str,
        Option(
            metavar="DATA",
            help=f"File of questions; made-up, made-up:turns, made-up:de ...; or one of {', '.join(DATA_SETS)}.",
        ),
    ] = "made-up"
    arms: Annotated[str, Option(metavar="NAMES", help=f"With commas, from {ARM_NAMES}.")] = _DEFAULT_ARMS
    limit: Annotated[int, Option(help="Most questions.")] = 500
    passages: Annotated[int | None, Option(help="Most passages of a question; those with the answer stay.")] = None
    choose: Annotated[
        str,
        Option(metavar="FIELDS", help="For the arms chosen, extra and chance: fields of Choice, as keep=5,within=0.1."),
    ] = ""
    repeats: Annotated[int, Option(help="Calls per question and arm; 2 or more measure the model's own noise.")] = 1
    max_tokens: Annotated[int, Option(help="Most tokens of an answer.")] = 64
    margin: Annotated[float, Option(help="Points that an arm may be worse.")] = 1.0
    stop_when_certain: Annotated[
        bool,
        Option("--stop-when-certain", help="Stop when each arm is shown to be better, worse or not worse."),
    ] = False
    system: Annotated[
        str, Option(metavar="TEXT|FILE", show_default=False, help="System prompt in place of the command's own.")
    ] = ""
    examples: Annotated[int, Option(help="Questions to show with their answers in the system prompt, not asked.")] = 0
    dry_run: Annotated[bool, Option("--dry-run", help="Only announce what a run would do.")] = False

    def __post_init__(self) -> None:
        EndpointOptions.__post_init__(self)
        if not self.arm_names:
            raise ValueError(f"arms must be some of {ARM_NAMES}, got {self.arms!r}")
        for arm in self.arm_names:
            check_arm(arm)
        if given := {"k", "scores"} & parse_choice(self.choose).fields.keys():
            raise ValueError(f"--choose can't set {' or '.join(sorted(given))}: the questions decide")
        for name in ("limit", "repeats", "max_tokens"):
            check_least(name, getattr(self, name), 1)
        _check_margin(self.margin)
        check_least("examples", self.examples, 0)
        check_least("passages", self.passages, 1)

    @property
    def arm_names(self) -> list[str]:
        """The arms, each once."""
        return list(dict.fromkeys(filter(None, map(str.strip, self.arms.split(",")))))


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityJudgeOptions(EndpointOptions):
    """A judgement of the answers of one run by a second model."""

    answers: Annotated[Path, Argument(metavar="FILE", help="File of the answers.")]


@dataclass(frozen=True, slots=True)
class QualityReportOptions:
    """A report on the answers of one run."""

    answers: Annotated[Path, Argument(metavar="FILE", help="File of the answers.")]
    measure: Annotated[str, Option(help=_MEASURE_HELP)] = next(iter(MEASURES))
    margin: Annotated[float | None, Option(help="Points that an arm may be worse; those of the run by default.")] = None
    json_file: Annotated[Path | None, Option("--json", metavar="FILE", help="Write the report as JSON; or -.")] = None
    html_file: Annotated[Path | None, Option("--html", metavar="FILE", help="Write the report as a page.")] = None
    annotations_file: Annotated[
        Path | None,
        Option("--annotations", metavar="FILE", help="Add the best annotation for this model to a JSON file."),
    ] = None
    positions_file: Annotated[
        Path | None,
        Option("--positions", metavar="FILE", help="Add this model's right answers by place to a JSON file."),
    ] = None
    publish_file: Annotated[
        Path | None, Option("--publish", metavar="FILE", help="Write the numbers, without any text, to publish them.")
    ] = None
    check: Annotated[
        str, Option(metavar="NAMES", help="Exit with status 1 unless these arms are not worse than the baseline.")
    ] = ""

    def __post_init__(self) -> None:
        if self.measure != JUDGE:
            scorer_named(self.measure)
        if self.margin is not None:
            _check_margin(self.margin)
        files = {"--json": self.json_file, "--html": self.html_file, "--publish": self.publish_file}
        files |= {"--annotations": self.annotations_file, "--positions": self.positions_file}
        check_files(files, [self.answers])

    @property
    def checked_arms(self) -> list[str]:
        """The arms that must not be worse."""
        return list(filter(None, map(str.strip, self.check.split(","))))


@dataclass(frozen=True, slots=True)
class QualityCompareOptions:
    """A comparison of two runs with the same questions."""

    earlier: Annotated[Path, Argument(metavar="EARLIER", help="File of the answers to compare with.")]
    later: Annotated[Path, Argument(metavar="LATER", help="File of the other answers.")]
    measure: Annotated[str, Option(help=_MEASURE_HELP)] = next(iter(MEASURES))

    def __post_init__(self) -> None:
        scorer_named(self.measure)


def _check_margin(points: float) -> None:
    if not 0 < points < 100:
        raise ValueError(f"margin must be above 0 and below 100 points, got {points}")
