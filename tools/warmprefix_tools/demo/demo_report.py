"""The printed report of a run: tables, prompts and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import count, zip_longest
from typing import NamedTuple

from warmprefix.errors import MissingExtraError
from warmprefix.plan import Placement
from warmprefix_tools.demo.demo_measures import (
    ArmSummary,
    PromptExample,
    pick_examples,
    prompt_lines,
    summarize_arm,
    summarize_workload,
)
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.demo.documents import Documents
from warmprefix_tools.demo.session import DemoResult, ServedTurn
from warmprefix_tools.report.amounts import counted

try:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

__all__ = [
    "COLUMNS",
    "PLACEMENTS",
    "ComparisonRow",
    "comparison_rows",
    "made_up_questions",
    "notes",
    "print_report",
    "workload_summary",
]

PLACEMENTS: dict[Placement, str] = {
    "head": "head: context in the system prompt, built again each turn",
    "tail": "tail: context comes with each question and stays in the chat",
}
COLUMNS = ("relevance order", "warmprefix", "change")
_LINES_SHOWN = 5
_REFERENCE = "reference"
_STYLES = {"all": "green", "part": "yellow", "none": "default", "unknown": "default", _REFERENCE: "cyan"}
_MARKS = {"all": "\u25cf", "part": "\u25d0", "none": "\u25cb", "unknown": " ", _REFERENCE: "\u21a9"}
_ASCII_MARKS = {"all": "#", "part": "+", "none": "-", "unknown": " ", _REFERENCE: "^"}


def print_report(result: DemoResult, options: DemoOptions, console: Console) -> None:
    """Print the workload, a table per placement, up to three prompts, and notes."""
    _print_workload(result, options, console)
    for placement, (relevance, warmprefix) in result.runs.items():
        console.print()
        console.print(_comparison(PLACEMENTS[placement], summarize_arm(relevance), summarize_arm(warmprefix)))
    _print_examples(result, console)
    console.print()
    for note in notes(result):
        console.print(note)


def _print_workload(result: DemoResult, options: DemoOptions, console: Console) -> None:
    console.print(Text(workload_summary(result, options)))
    if result.documents is not None:
        console.print(Text(made_up_questions(result.documents)))


def workload_summary(result: DemoResult, options: DemoOptions) -> str:
    """Return in words what was asked, and how much the retrieved passages overlap."""
    workload = summarize_workload(result.turns)
    subject, passages = "this Python's standard library", "its docstrings' passages"
    documents = result.documents
    if documents is not None:
        subject = f"{counted(documents.files, 'file')} of {documents.name}"
        passages = f"their {counted(len(documents.passages), 'passage')}"
    return (
        f"{workload.questions} questions ({workload.distinct_questions} different) of {workload.users} users in"
        f" {workload.conversations} conversations about {subject}; BM25 finds the {options.k} best of {passages}."
        f" Of these, {workload.seen_by_anyone:.0%} were found for an earlier question too,"
        f" {workload.seen_in_conversation:.0%} in the same conversation."
    )


def made_up_questions(documents: Documents) -> str:
    """Return where the questions about a user's documents come from, and which files were left out."""
    return (
        "The questions are made up: each is a phrase of a passage, and some passages are asked about more often than"
        " others. Your users may ask otherwise. warmprefix record and warmprefix replay measure their real questions."
        + documents.remarks
    )


def _comparison(title: str, before: ArmSummary, after: ArmSummary) -> Table:
    table = Table(title=title, title_style="bold", title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("", min_width=30)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in comparison_rows(before, after):
        table.add_row(row.name, row.before, row.after, row.change, style="bold" if row.is_result else None)
    return table


class ComparisonRow(NamedTuple):
    """A line of the table that compares two arms."""

    name: str
    before: str
    after: str
    change: str = ""
    is_result: bool = False
    """True for the line to read first."""


def comparison_rows(before: ArmSummary, after: ArmSummary) -> list[ComparisonRow]:
    """Return the lines of the table, without those that the engine does not report or that would be empty."""
    rows: list[ComparisonRow] = []
    if before.hit_ratio is not None and after.hit_ratio is not None:
        points = 100 * (after.hit_ratio - before.hit_ratio)
        rows.append(
            ComparisonRow("hit ratio", f"{before.hit_ratio:.1%}", f"{after.hit_ratio:.1%}", f"{points:+.1f} points")
        )
    rows += _counts("prompt tokens", before.prompt_tokens, after.prompt_tokens)
    rows += _counts("tokens prefilled (net)", before.prefilled_tokens, after.prefilled_tokens, is_result=True)
    for name, old, new in (("p50", before.ttft_p50, after.ttft_p50), ("p95", before.ttft_p95, after.ttft_p95)):
        rows.append(ComparisonRow(f"TTFT {name}", f"{old * 1e3:.0f} ms", f"{new * 1e3:.0f} ms", _change(old, new)))
    if after.note_tokens:
        rows.append(ComparisonRow("labels, notes, references", "", f"{after.note_tokens:,} tokens"))
    if after.references:
        rows.append(ComparisonRow("context saved by references", "", f"{after.reference_tokens:,} tokens"))
    if after.planning_p50 is not None:
        rows.append(ComparisonRow("planning p50, within TTFT", "", f"{after.planning_p50 * 1e3:.2f} ms"))
    return rows


def _counts(name: str, before: int | None, after: int | None, is_result: bool = False) -> list[ComparisonRow]:
    if before is None or after is None:
        return []
    return [ComparisonRow(name, f"{before:,}", f"{after:,}", _change(before, after), is_result)]


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.0%}" if before else ""


def _print_examples(result: DemoResult, console: Console) -> None:
    marks = _ASCII_MARKS if console.options.ascii_only else _MARKS
    for i, example in enumerate(pick_examples(result.runs)):
        console.print()
        where = f"{example.title}, {example.placement}, turn {example.before.question.turn}"
        console.print(Text(where, style="bold"), Text("" if i else _legend(marks), style="dim"), sep="   ")
        console.print(_clipped(f"Q: {example.before.question.text}", console))
        console.print(_side_by_side(example, marks))
        annotation = example.after.context.order_annotation
        if annotation is not None:
            console.print(_clipped(f"  then: {annotation}", console), style="dim")


def _clipped(text: str, console: Console) -> Text:
    """Return one line of a text, cut at the console's width."""
    line = Text(text)
    if line.cell_len >= console.width:
        line.truncate(console.width - 4)
        line.append("...")
    return line


def _legend(marks: Mapping[str, str]) -> str:
    meanings = {"all": "cached", "part": "partly", "none": "prefilled", _REFERENCE: "reference"}
    return "  ".join(f"{marks[kind]} {meaning}" for kind, meaning in meanings.items())


def _side_by_side(example: PromptExample, marks: Mapping[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("  relevance order", min_width=36, no_wrap=True, overflow="crop")
    table.add_column("  warmprefix", no_wrap=True, overflow="crop")
    columns = (_cells(served, example.placement, marks) for served in (example.before, example.after))
    for left, right in zip_longest(*columns):
        table.add_row(left, right)
    return table


def _cells(served: ServedTurn, placement: Placement, marks: Mapping[str, str]) -> Iterator[Text]:
    lines = prompt_lines(served, placement)
    places = count(1)  # as a note counts the blocks
    for line in lines[:_LINES_SHOWN]:
        kind = _REFERENCE if line.is_reference else line.cached
        place = "" if line.is_history else f"{next(places)}. "
        yield Text(f"{marks[kind]} {place}{line.label}", style=_STYLES[kind])
    rest = Counter(_REFERENCE if line.is_reference else line.cached for line in lines[_LINES_SHOWN:])
    if rest:
        yield Text("  and " + ", ".join(f"{number} {marks[kind]}" for kind, number in rest.items()), style="dim")


def _orders(arm: ArmSummary) -> tuple[int, int, int]:
    return arm.reordered, arm.annotated, arm.requests


def notes(result: DemoResult) -> list[str]:
    """Return in words how the numbers came about, and what they leave open."""
    emulator = result.emulator
    arms = [summarize_arm(after) for _, after in result.runs.values()]
    reordered, annotated, requests = (sum(counts) for counts in zip(*map(_orders, arms), strict=True))
    written = []
    if emulator is not None:
        written.append(
            "Emulated: the engines, one for each column. No model runs; the cache follows vLLM's rules, with KV"
            f" blocks of {emulator.block_size} tokens and room for {emulator.capacity_tokens:,}. TTFT is modelled:"
            f" {emulator.base_ttft_ms:g} ms + uncached tokens / {emulator.prefill_rate:,.0f} per second, plus HTTP."
        )
    elif summarize_arm(next(iter(result.runs.values()))[0]).cached_tokens is None:
        written.append(
            "The server does not report cached tokens, so the tables show TTFT only."
            " vLLM reports them with --enable-prompt-tokens-details."
        )
    written.append(
        f"Order: changed in {reordered} of {requests} prompts; {annotated} have a note that names the most relevant"
        " passage. Whether answers stay as good is up to your model's use of that note. Measure it: warmprefix quality"
        " run."
    )
    if emulator is not None:
        written.append("Next, your engine: the same command with --endpoint http://localhost:8000/v1")
    return written
