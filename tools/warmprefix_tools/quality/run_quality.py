"""Runs `warmprefix quality`: asks the questions, or reports on the answers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections.abc import Sequence
from datetime import date
from itertools import islice
from pathlib import Path

from warmprefix.errors import MissingExtraError
from warmprefix_openai.outputs import OutputError, check_writable, standard_output
from warmprefix_tools.choice_option import parse_choice
from warmprefix_tools.console import plain_table, progress_bar, report_console, write_json, write_text
from warmprefix_tools.option_checks import STDOUT
from warmprefix_tools.quality.answer_store import AnswerStore
from warmprefix_tools.quality.arms import SYSTEM, UNANSWERABLE, ArmPrompt, baseline_of, expanded_arms, prompts_of
from warmprefix_tools.quality.asking import ask_all, judge_all
from warmprefix_tools.quality.data_sets import DATA_SETS, cache_folder, data_set_questions
from warmprefix_tools.quality.made_up import LANGUAGES, MADE_UP, made_up_questions
from warmprefix_tools.quality.pace import RunPace
from warmprefix_tools.quality.page import quality_page
from warmprefix_tools.quality.paired import detectable_difference
from warmprefix_tools.quality.published import published
from warmprefix_tools.quality.quality_options import (
    QualityCompareOptions,
    QualityJudgeOptions,
    QualityOptions,
    QualityReportOptions,
)
from warmprefix_tools.quality.questions import (
    EvidenceQuestion,
    QuestionsError,
    read_questions,
    squad_questions,
    with_fewer_passages,
)
from warmprefix_tools.quality.remarks import interval, measure_cells, remarks
from warmprefix_tools.quality.results import NoAnswersError, QualityResults, compare_runs, results_of, verdict
from warmprefix_tools.quality.scores import MEASURES
from warmprefix_tools.quality.watch import FORECAST_QUESTIONS, RunWatch
from warmprefix_tools.report.amounts import change, points, rounded
from warmprefix_tools.report.visible import visible

try:
    from rich.console import Console
    from rich.table import Table
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

__all__ = ["run_quality", "run_quality_compare", "run_quality_judge", "run_quality_report"]

_TURNS = "turns"
_CHARACTERS_PER_TOKEN = 4
_FILE_NAME = re.compile(r"\S+\.[A-Za-z]\w{0,7}")


def run_quality(options: QualityOptions) -> None:
    """Ask all questions in all arms, and store the answers.

    Raises:
        ArmError: An arm can't be used.
        QuestionsError: The questions could not be read.
        StoreFileError: The file of answers can't be used, or belongs to another run.
        EndpointError: The endpoint does not answer.
    """
    console = Console(stderr=True, highlight=False)
    if options.data in DATA_SETS:
        data_set = DATA_SETS[options.data]
        console.print(f"Questions from {data_set.origin}. Licence: {data_set.licence}.")
    found = questions_of(options)
    if options.passages is not None:
        found = [with_fewer_passages(question, options.passages) for question in found]
    shown, questions = found[: options.examples], found[options.examples :]
    if not questions:
        raise QuestionsError(f"{options.data} has {len(found)} questions, and --examples takes them all")
    system = system_prompt(options.system, shown)
    if options.stop_when_certain:  # the first questions of a set are often about one text; any of them must do
        questions = random.Random(0).sample(questions, len(questions))  # noqa: S311
    arms = expanded_arms(options.arm_names, questions)
    prompts = list(prompts_of(arms, questions, system, parse_choice(options.choose)))
    if options.dry_run:
        for line in announcement(prompts, options, 0):
            console.print(line)
        return
    with AnswerStore(options.answers) as store:
        names = ("model", "data", "choose", "repeats", "max_tokens", "margin", "stop_when_certain")
        baselines = {arm: baseline_of(arm) for arm in arms}
        settings = {**{name: getattr(options, name) for name in names}, "arms": baselines, "system": system}
        store.begin(settings, questions)
        done = len(store.done())
        for line in announcement(prompts, options, done):
            console.print(line)
        stops = options.stop_when_certain
        watch = RunWatch(baselines, questions, options.margin / 100, repeats=options.repeats, stops=stops)
        with progress_bar("Asking ...", 8) as progress:
            total = len(prompts) * options.repeats
            task = progress.add_task("calls", total=total, completed=done)
            pace = RunPace(total - done, time.monotonic(), progress.console.is_terminal)
            has_forecast = False

            def show(remaining: int) -> None:
                nonlocal has_forecast
                progress.update(task, completed=total - remaining)
                if watch.answered >= FORECAST_QUESTIONS and not has_forecast:
                    has_forecast = True
                    progress.console.print(watch.forecast(), highlight=False)
                if (line := pace.line(remaining, time.monotonic())) is not None:
                    progress.console.print(line, highlight=False)

            asyncio.run(ask_all(prompts, store, options, watch, show, progress.console.print))
    if watch.is_certain:
        console.print(f"Stopped after {watch.answered:,} of {len(questions):,} questions: every arm is certain.")
    console.print(f"Next: warmprefix quality report {options.answers}")


def questions_of(options: QualityOptions) -> list[EvidenceQuestion]:
    """Return the questions that `options.data` names, as many as `options.limit`, behind the examples.

    Raises:
        QuestionsError: They could not be read.
    """
    path, count = Path(options.data), options.limit + options.examples
    if options.data in DATA_SETS:
        return list(islice(data_set_questions(DATA_SETS[options.data], cache_folder()), count))
    name, *parts = options.data.split(":")
    if name == MADE_UP:
        language = next((part for part in parts if part in LANGUAGES), "en")
        turns = _TURNS in parts
        if sorted(parts) not in (sorted([language] * (language in parts) + [_TURNS] * turns), []):
            raise QuestionsError(f"made-up questions must be of {_TURNS}; {', '.join(LANGUAGES)}, got {options.data!r}")
        return list(made_up_questions(count, language=language, turns=turns))
    if path.suffix != ".json":
        return list(islice(read_questions(path), count))
    try:
        return list(islice(squad_questions(path.read_bytes()), count))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise QuestionsError(f"{path} has no questions in SQuAD's format: {error!r}") from error


def system_prompt(given: str, examples: Sequence[EvidenceQuestion]) -> str:
    """Return the system prompt of a run: a text, the content of a file, or ours; with worked examples behind it.

    Raises:
        QuestionsError: The file could not be read.
    """
    text = given or SYSTEM
    try:
        if os.path.isfile(given):  # False for a long text, for which `Path.is_file` raises an error
            text = Path(given).read_text("utf-8").strip()
        elif _FILE_NAME.fullmatch(given):
            raise QuestionsError(f"the system prompt {given!r} looks like the name of a file, and there is none")
    except (OSError, ValueError) as error:
        raise QuestionsError(f"{given} could not be read: {error}") from error
    for example in examples:
        evidence = [text for at, text in enumerate(example.passages) if at in example.gold] or example.passages
        answer = example.answers[0] if example.answers else UNANSWERABLE
        text = "\n\n".join([text, "Example:", *evidence, f"{example.question}\n{answer}"])
    return text


def announcement(prompts: Sequence[ArmPrompt], options: QualityOptions, done: int) -> list[str]:
    """Return what a run will do, and what it can show."""
    arms = len({prompt.arm for prompt in prompts})
    questions, calls = len(prompts) // arms, len(prompts) * options.repeats
    characters = sum(len(str(message.get("content"))) for prompt in prompts for message in prompt.messages)
    tokens = options.repeats * characters // _CHARACTERS_PER_TOKEN
    few, many = (100 * detectable_difference(questions, share) for share in (0.02, 0.15))
    return [
        f"{questions} questions in {arms} arms: {calls:,} calls, about {rounded(tokens)} prompt tokens"
        + (f"; {done:,} calls are done." if done else "."),
        f"This finds a difference of {few:.1f} points if an arm changes 2% of the answers from right to wrong or back,"
        f" and of {many:.1f} points if it changes 15%, as small models do.",
    ]


def run_quality_judge(options: QualityJudgeOptions) -> None:
    """Ask a second model which answers are better, and store what it returns.

    Raises:
        StoreFileError: The file can't be used, or has the judgements of another model.
        EndpointError: The endpoint does not answer.
    """
    _check_exist(options.answers)
    console = Console(stderr=True, highlight=False)
    with AnswerStore(options.answers) as store, progress_bar("Judging ...", 8) as progress:
        task = progress.add_task("calls", total=None)
        asyncio.run(
            judge_all(
                store,
                options,
                lambda total, remaining: progress.update(task, total=total, completed=total - remaining),
            )
        )
    console.print(f"Next: warmprefix quality report {options.answers} --measure judge")


def run_quality_report(options: QualityReportOptions) -> bool:
    """Print the results of a run, and write the requested files.

    Returns:
        True if every arm of `options.check` is shown to be not worse than its baseline.

    Raises:
        StoreFileError: The file can't be used.
        NoAnswersError: It has no answers yet.
        OutputError: A file can't be written.
    """
    written = (options.json_file, options.html_file, options.publish_file)
    for file in (*written, options.annotations_file, options.positions_file):
        if file is not None and file != STDOUT:
            check_writable(file)
    _check_exist(options.answers)
    with AnswerStore(options.answers) as store:
        results = results_of(store, options.measure, None if options.margin is None else options.margin / 100)
        questions = store.questions()
    missing = set(options.checked_arms) - {arm.arm for arm in results.arms if arm.comparison is not None}
    if missing:
        raise NoAnswersError(f"{options.answers} has no comparison for {', '.join(sorted(missing))}")
    with standard_output():
        write_json(options.json_file, results.as_json())
        if options.publish_file is not None:
            write_json(options.publish_file, published(results, questions, date.today()))
        if options.html_file is not None:
            write_text(options.html_file, quality_page(results))
        console = report_console(options.json_file)
        console.print(result_table(results))
        console.print()
        console.print(measure_table(results))
        for line in remarks(results):
            console.print(line, markup=False)
        if options.annotations_file is not None:
            console.print(_saved_annotation(options.annotations_file, results))
        if options.positions_file is not None:
            console.print(_saved_positions(options.positions_file, results))
    not_worse = {arm.arm for arm in results.arms if arm.comparison and arm.comparison.is_not_worse(results.margin)}
    return set(options.checked_arms) <= not_worse


def _saved_annotation(path: Path, results: QualityResults) -> str:
    """Add the best annotation for the model to a file, and return what was done.

    Raises:
        OutputError: The file is no JSON object, or can't be written.
    """
    model = str(results.settings["model"])
    if results.annotate is None:
        return f"{path} stays as it is: no annotation is shown to be not worse for {visible(model)}."
    _add_to(path, model, results.annotate)
    return f"{path}: {visible(model)} gets {results.annotate}. Use it as ContextPlanner(annotations=json.load(...))."


def _saved_positions(path: Path, results: QualityResults) -> str:
    """Add the model's right answers by place to a file, and return what was done.

    Raises:
        OutputError: The file is no JSON object, or can't be written.
    """
    model, right = str(results.settings["model"]), results.position_profile
    if right is None:
        return (
            f"{path} stays as it is: the run does not show whether {visible(model)} reads some places better than "
            "others. It needs --arms positions, and perhaps more questions."
        )
    _add_to(path, model, right)
    found = "reads all places alike" if len(right) == 1 else f"is right in {', '.join(map(str, right))} %, by place"
    return f"{path}: {visible(model)} {found}. Use it as ContextPlanner(positions=json.load(...))."


def _add_to(path: Path, model: str, value: object) -> None:
    """Add what was found about a model to a file that has an entry for each.

    Raises:
        OutputError: The file is no JSON object, or can't be written.
    """
    try:
        stored = json.loads(path.read_text("utf-8")) if path.exists() and path.stat().st_size else {}
    except (OSError, ValueError) as error:
        raise OutputError(f"{path} could not be read: {error}") from error
    if not isinstance(stored, dict):
        raise OutputError(f"{path} must hold a JSON object, got {type(stored).__name__}")
    write_text(path, json.dumps({**stored, model: value}, indent=2, ensure_ascii=False) + "\n")


def run_quality_compare(options: QualityCompareOptions) -> None:
    """Print how each arm of a run differs from the same arm of an earlier one.

    Raises:
        StoreFileError: A file can't be used.
        NoAnswersError: The runs can't be compared.
    """
    _check_exist(options.earlier, options.later)
    with AnswerStore(options.earlier) as earlier, AnswerStore(options.later) as later:
        found = compare_runs(earlier, later, options.measure)
        models = [store.settings()["model"] for store in (earlier, later)]
    table = plain_table("arm", "questions", "points", "95% interval", "verdict", left=["verdict"], gap=1)
    for arm, compared in found.items():
        word = "open" if not compared.differs else "better" if compared.difference > 0 else "worse"
        table.add_row(arm, f"{compared.pairs:,}", points(compared.difference), interval(compared), word)
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
    heads = ("arm", "answers", results.measure, "against", "points", "95% interval", "at worst", "prefill", "verdict")
    table = plain_table(*heads, left=["against", "verdict"], gap=1)
    for arm in results.arms:
        compared = arm.comparison
        cells = [arm.arm, f"{arm.answers:,}", "" if arm.score is None else f"{100 * arm.score:.1f}"]
        if compared is None:
            table.add_row(*cells, "", "", "", "", "", "baseline")
        else:
            cells += [arm.baseline, points(compared.difference), interval(compared), points(compared.worst)]
            table.add_row(*cells, "" if arm.saved is None else change(-arm.saved), verdict(arm, results.margin))
    return table


def measure_table(results: QualityResults) -> Table:
    """Return all measures side by side as a table for a terminal, with differences, and the prompt tokens."""
    table = plain_table("arm", "words", *MEASURES, "cached", "computed")
    for arm in results.arms:
        cached = arm.cached_tokens
        tokens = ("", "") if cached is None else (rounded(cached), rounded(arm.prompt_tokens - cached))
        table.add_row(arm.arm, f"{arm.scores.words:.1f}", *measure_cells(arm), *tokens)
    return table
