"""Runs `warmprefix quality`: asks the questions, or reports on the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import cast

from warmprefix.errors import MissingExtraError
from warmprefix.outputs import check_writable, standard_output
from warmprefix_tools.console import progress_bar, report_console, write_json, write_text
from warmprefix_tools.option_checks import STDOUT
from warmprefix_tools.quality.answer_store import AnswerStore
from warmprefix_tools.quality.arms import ArmPrompt, prompts_of
from warmprefix_tools.quality.asking import ask_all
from warmprefix_tools.quality.page import quality_page
from warmprefix_tools.quality.paired import detectable_difference
from warmprefix_tools.quality.quality_options import QualityCompareOptions, QualityOptions, QualityReportOptions
from warmprefix_tools.quality.questions import (
    EvidenceQuestion,
    QuestionsError,
    made_up_questions,
    read_questions,
    read_squad,
)
from warmprefix_tools.quality.results import NoAnswersError, QualityResults, compare_runs, remarks, results_of, verdict
from warmprefix_tools.quality.scores import Measure
from warmprefix_tools.report.amounts import points, rounded
from warmprefix_tools.report.visible import visible

try:
    from rich.console import Console
    from rich.table import Table
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

__all__ = ["run_quality", "run_quality_compare", "run_quality_report"]

_MADE_UP = "made-up"
_CHARACTERS_PER_TOKEN = 4


def run_quality(options: QualityOptions) -> None:
    """Ask all questions in all arms, and store the answers.

    Raises:
        QuestionsError: The questions could not be read.
        StoreFileError: The file of answers can't be used, or belongs to another run.
        EndpointError: The endpoint does not answer.
    """
    questions = questions_of(options)
    prompts = list(prompts_of(options.arm_names, questions, options.seed))
    console = Console(stderr=True, highlight=False)
    with AnswerStore(options.answers) as store:
        names = ("model", "data", "repeats", "max_tokens", "seed")
        store.begin({**{name: getattr(options, name) for name in names}, "arms": options.arm_names}, questions)
        done = len(store.done())
        for line in announcement(prompts, options.repeats, done):
            console.print(line)
        with progress_bar("Asking ...", 8) as progress:
            total = len(prompts) * options.repeats
            task = progress.add_task("calls", total=total, completed=done)
            asyncio.run(
                ask_all(prompts, store, options, lambda remaining: progress.update(task, completed=total - remaining))
            )
    console.print(f"Next: warmprefix quality report {options.answers}")


def questions_of(options: QualityOptions) -> list[EvidenceQuestion]:
    """Return the questions that `options.data` names, as many as `options.limit`."""
    name, _, language = options.data.partition(":")
    if options.data.endswith(".json"):
        return list(islice(read_squad(Path(options.data)), options.limit))
    if name != _MADE_UP:
        return list(islice(read_questions(Path(options.data)), options.limit))
    try:
        return list(made_up_questions(options.limit, language=language or "en", seed=options.seed))
    except ValueError as error:
        raise QuestionsError(str(error)) from error


def announcement(prompts: Sequence[ArmPrompt], repeats: int, done: int) -> list[str]:
    """Return what a run will do, and what it can show."""
    arms = len({prompt.arm for prompt in prompts})
    questions = len(prompts) // arms
    characters = sum(len(str(message["content"])) for prompt in prompts for message in prompt.messages)
    tokens = repeats * characters // _CHARACTERS_PER_TOKEN
    few, many = (100 * detectable_difference(questions, share) for share in (0.02, 0.1))
    return [
        f"{questions} questions in {arms} arms: {len(prompts) * repeats:,} calls, about {rounded(tokens)} prompt tokens"
        + (f"; {done:,} calls are done." if done else "."),
        f"This finds a difference of {few:.1f} points if an arm changes 2% of the answers from right to wrong or back,"
        f" and of {many:.1f} points if it changes 10%.",
    ]


def run_quality_report(options: QualityReportOptions) -> bool:
    """Print the results of a run, and write the requested files.

    Returns:
        True if every arm of `options.check` is shown to be not worse than its baseline.

    Raises:
        StoreFileError: The file can't be used.
        NoAnswersError: It has no answers yet.
        OutputError: A file can't be written.
    """
    for file in (options.json_file, options.html_file):
        if file is not None and file != STDOUT:
            check_writable(file)
    _check_exist(options.answers)
    with AnswerStore(options.answers) as store:
        results = results_of(store, cast("Measure", options.measure), options.margin / 100)
    missing = set(options.checked_arms) - {arm.arm for arm in results.arms if arm.comparison is not None}
    if missing:
        raise NoAnswersError(f"{options.answers} has no comparison for {', '.join(sorted(missing))}")
    with standard_output():
        write_json(options.json_file, results.as_json())
        if options.html_file is not None:
            write_text(options.html_file, quality_page(results))
        console = report_console(options.json_file)
        console.print(result_table(results))
        for line in remarks(results):
            console.print(line)
    not_worse = {arm.arm for arm in results.arms if arm.comparison and arm.comparison.is_not_worse(results.margin)}
    return set(options.checked_arms) <= not_worse


def run_quality_compare(options: QualityCompareOptions) -> None:
    """Print how each arm of a run differs from the same arm of an earlier one.

    Raises:
        StoreFileError: A file can't be used.
        NoAnswersError: The runs can't be compared.
    """
    _check_exist(options.earlier, options.later)
    with AnswerStore(options.earlier) as earlier, AnswerStore(options.later) as later:
        found = compare_runs(earlier, later, cast("Measure", options.measure))
        models = [store.settings()["model"] for store in (earlier, later)]
    table = Table(box=None, pad_edge=False)
    for name in ("arm", "questions", "points", "95% interval", "verdict"):
        table.add_column(name, justify="left" if name in ("arm", "verdict") else "right", no_wrap=True)
    for arm, compared in found.items():
        interval = f"{points(compared.low)} to {points(compared.high)}"
        word = "open" if not compared.differs else "better" if compared.difference > 0 else "worse"
        table.add_row(arm, f"{compared.pairs:,}", points(compared.difference), interval, word)
    console = report_console(None)
    with standard_output():
        console.print(f"{visible(models[1])}, against {visible(models[0])}:")
        console.print(table)


def _check_exist(*files: Path) -> None:
    for file in files:
        if not file.exists():
            raise QuestionsError(f"{file} does not exist")


def result_table(results: QualityResults) -> Table:
    """Return the arms as a table for a terminal."""
    table = Table(box=None, pad_edge=False)
    for name in ("arm", "answers", results.measure, "against", "points", "95% interval", "verdict"):
        table.add_column(name, justify="left" if name in ("arm", "against", "verdict") else "right", no_wrap=True)
    for arm in results.arms:
        compared = arm.comparison
        cells = [arm.arm, f"{arm.answers:,}", f"{100 * getattr(arm.scores, results.measure):.1f}"]
        if compared is None:
            table.add_row(*cells, "", "", "", "baseline")
        else:
            interval = f"{points(compared.low)} to {points(compared.high)}"
            table.add_row(*cells, arm.baseline, points(compared.difference), interval, verdict(arm, results.margin))
    return table
