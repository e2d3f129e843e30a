"""What the person at the keyboard reads."""

from __future__ import annotations

from collections.abc import Iterator

from warmprefix.errors import MissingExtraError
from warmprefix_tools.doctor.report import Divergence, Finding, Place, Report
from warmprefix_tools.report.amounts import counted, percent, rounded
from warmprefix_tools.report.visible import visible

try:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

__all__ = ["print_report"]

_TEXT_WIDTH = 100
_SKIPPED_SHOWN = 5
_CODES_SHOWN = 12


def print_report(report: Report, console: Console) -> None:
    """The state of things in a few lines, then each finding, worst first."""
    width = min(console.width, _TEXT_WIDTH)
    for line in _overview(report):
        console.print(Text(line), width=width)
    for number, finding in enumerate(report.findings, 1):
        console.print()
        _print_finding(number, finding, console, width)
    _print_skipped(report, console, width)


def _overview(report: Report) -> Iterator[str]:
    files = ", ".join(map(visible, report.files))
    yield (
        f"{counted(report.requests, 'request')} from {files}: {rounded(report.prompt_tokens)} prompt tokens,"
        f" {counted(report.conversations, 'conversation')} of several turns."
    )
    size = "without bound" if report.capacity_tokens is None else f"of {report.capacity_tokens:,} tokens"
    yield f"A prefix cache {size} would find {percent(report.hit_ratio)} of the tokens as things are."
    if report.reported_prompt_tokens:
        own = (report.reported_cached_tokens or 0) / report.reported_prompt_tokens
        yield f"By the engine's own count, where the log has it, it was {percent(own)}."
    if report.lost_tokens:
        yield f"With all that follows mended it would find {percent(report.mended_hit_ratio)}."
    if not report.findings:
        yield "No defect was found. What the cache does not hold had not come before, or stood in another order."
    for note in report.notes:
        yield f"Mind: {visible(note)}"


def _print_finding(number: int, finding: Finding, console: Console, width: int) -> None:
    console.print(Text(f"{number}. {finding.title}", style="bold"), Text(finding.kind, style="dim"), width=width)
    cost = (
        f"{percent(finding.share)} of all tokens: {counted(finding.lost_tokens, 'token')} computed anew,"
        f" {counted(finding.requests, 'request')} would find more"
        if finding.lost_tokens
        else f"No tokens lost; {counted(finding.requests, 'request')} concerned"
    )
    console.print(Padding(Text(f"{cost}."), (0, 0, 0, 3)), width=width)
    console.print(Padding(Text(finding.fix), (0, 0, 0, 3)), width=width)
    if finding.divergence is not None:
        _print_divergence(finding.divergence, console, width)


def _print_divergence(divergence: Divergence, console: Console, width: int) -> None:
    could = divergence.could_share_tokens
    gain = f", and would share {could:,} if mended" if could > divergence.shared_tokens else ""
    shared = f"For example, two requests that share their first {counted(divergence.shared_tokens, 'token')}{gain}:"
    console.print(Padding(Text(shared, style="dim"), (0, 0, 0, 3)), width=width)
    for place in (divergence.earlier, divergence.later):
        where = f"{visible(place.file)}, line {place.line}, {visible(place.where)}"
        console.print(Padding(Text(where, style="dim"), (0, 0, 0, 3)), width=width)
        console.print(Padding(_excerpt(place), (0, 0, 0, 5)), width=width)


def _excerpt(place: Place) -> Text:
    """The snippet with the part that differs highlighted; where that has more than ASCII, its code points behind it."""
    if place.mark is None:
        return Text(_one_line(place.snippet))
    start, end = place.mark
    part = place.snippet[start:end]
    shown = Text(_one_line(place.snippet[:start]))
    shown.append(f"\u00bb{_one_line(part)}\u00ab", style="bold reverse")
    shown.append(_one_line(place.snippet[end:]))
    if not part.isascii() and len(part) <= _CODES_SHOWN:
        shown.append("  " + " ".join(f"U+{ord(letter):04X}" for letter in part), style="dim")
    return shown


def _one_line(text: str) -> str:
    return visible(text.replace("\n", "\u21b5"))


def _print_skipped(report: Report, console: Console, width: int) -> None:
    if not report.skipped_lines:
        return
    console.print()
    console.print(Text(f"{counted(report.skipped_lines, 'record')} could not be read:"), width=width)
    for skipped in report.skipped[:_SKIPPED_SHOWN]:
        line = f"{visible(skipped.file)}, line {skipped.line}: {visible(skipped.reason)}"
        console.print(Padding(Text(line, style="dim"), (0, 0, 0, 3)), width=width)
    if report.skipped_lines > _SKIPPED_SHOWN:
        console.print(Padding(Text("...", style="dim"), (0, 0, 0, 3)), width=width)
