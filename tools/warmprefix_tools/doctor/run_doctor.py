"""Runs `warmprefix doctor`: reads the logs, prints the report at the terminal, and writes the requested files."""

from __future__ import annotations

from collections.abc import Iterator

from warmprefix import MissingExtraError
from warmprefix_openai.outputs import check_writable, standard_output
from warmprefix_tools.console import chosen_width, report_console, write_json, write_text
from warmprefix_tools.doctor.diagnosis import diagnose
from warmprefix_tools.doctor.doctor_options import DoctorOptions
from warmprefix_tools.doctor.findings import DoctorReport, Finding, Place
from warmprefix_tools.doctor.log_reader import read_log
from warmprefix_tools.doctor.page import doctor_page, profile_summary
from warmprefix_tools.report.amounts import counted, percent, rounded
from warmprefix_tools.report.visible import visible

try:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

__all__ = ["print_report", "run_doctor"]

_WIDTH = 100
_MAX_SKIPPED = 5
_MAX_CODE_POINTS = 12


def run_doctor(options: DoctorOptions) -> bool:
    """Read the logs, print the report, and write the requested files.

    Returns:
        True if the findings cost no more than `options.fail_above` allows.

    Raises:
        DoctorError: No request could be read.
        OutputError: A file can't be written.
    """
    for file in options.outputs:
        check_writable(file)
    report = diagnose(read_log(options.logs), options.kv_block_size, options.cache_profile)
    with standard_output():
        write_json(options.json_file, report.as_json())
        if options.html_file is not None:
            write_text(options.html_file, doctor_page(report))
        print_report(report, report_console(options.json_file))
    return options.fail_above is None or 100 * report.lost_share <= options.fail_above


def print_report(report: DoctorReport, console: Console) -> None:
    """Print the totals in a few lines, then each finding, worst first."""
    width = chosen_width() or min(console.width, _WIDTH)
    for indent, line in _lines(report):
        console.print(Padding(line, (0, 0, 0, indent), expand=False) if indent else line, width=width)


_Lines = Iterator[tuple[int, Text]]
"""Indent and text of each line."""


def _lines(report: DoctorReport) -> _Lines:
    for line in _overview(report):
        yield 0, Text(line)
    for number, finding in enumerate(report.findings, 1):
        yield 0, Text()
        yield from _finding_lines(number, finding)
    if report.profile is not None:
        yield 0, Text()
        yield 0, Text(profile_summary(report.profile))
        for number, finding in enumerate(report.profile.findings, len(report.findings) + 1):
            yield 0, Text()
            yield from _finding_lines(number, finding)
    if report.skipped_lines:
        yield 0, Text()
        yield 0, Text(f"{counted(report.skipped_lines, 'record')} could not be read:")
        for each in report.skipped[:_MAX_SKIPPED]:
            yield 3, Text(f"{visible(each.file)}, line {each.line}: {visible(each.reason)}", style="dim")
        if report.skipped_lines > _MAX_SKIPPED:
            yield 3, Text("...", style="dim")


def _overview(report: DoctorReport) -> Iterator[str]:
    files = ", ".join(map(visible, report.files))
    yield (
        f"{counted(report.requests, 'request')} from {files}: {rounded(report.prompt_tokens)} prompt tokens,"
        f" {counted(report.conversations, 'conversation')} of several turns."
    )
    yield f"A prefix cache without bound would find {percent(report.hit_ratio)} of these tokens."
    if report.reported_prompt_tokens:
        own = (report.reported_cached_tokens or 0) / report.reported_prompt_tokens
        yield f"By the engine's own count, where the log contains it, the hit ratio was {percent(own)}."
    if report.lost_tokens:
        yield f"With all findings below fixed, it would find {percent(report.repaired_hit_ratio)}."
    if not report.findings:
        yield "No defect was found. Tokens that the cache misses are new, or came before in another order."
    for note in report.notes:
        yield f"Note: {visible(note)}"


def _finding_lines(number: int, finding: Finding) -> _Lines:
    yield 0, Text(f"{number}. {finding.title} ", style="bold").append(finding.kind, style="not bold dim")
    yield 3, Text(f"{finding.cost}.")
    yield 3, Text(finding.fix)
    divergence = finding.divergence
    if divergence is None:
        return
    could = divergence.could_share_tokens
    gain = f", and would share {could:,} if fixed" if could > divergence.shared_tokens else ""
    shared = counted(divergence.shared_tokens, "token")
    yield 3, Text(f"For example, two requests that share their first {shared}{gain}:", style="dim")
    for place in (divergence.earlier, divergence.later):
        yield 3, Text(f"{visible(place.file)}, line {place.line}, {visible(place.where)}", style="dim")
        yield 5, _excerpt(place)


def _excerpt(place: Place) -> Text:
    """Return the snippet with the part that differs highlighted, and with code points if that is not ASCII."""
    if place.mark is None:
        return Text(_one_line(place.snippet))
    start, end = place.mark
    part = place.snippet[start:end]
    shown = Text(_one_line(place.snippet[:start]))
    shown.append(f"\u00bb{_one_line(part)}\u00ab", style="bold reverse")
    shown.append(_one_line(place.snippet[end:]))
    if not part.isascii() and len(part) <= _MAX_CODE_POINTS:
        shown.append("  " + " ".join(f"U+{ord(letter):04X}" for letter in part), style="dim")
    return shown


def _one_line(text: str) -> str:
    return visible(text.replace("\n", "\u21b5"))
