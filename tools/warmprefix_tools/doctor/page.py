"""The page of a report: what keeps the cache cold, what each cause costs, and where it is to be seen."""

from __future__ import annotations

from collections.abc import Iterator

from warmprefix_tools.doctor.findings import Divergence, DoctorReport, Finding, Place, SkippedRecord
from warmprefix_tools.report.amounts import counted, percent, rounded
from warmprefix_tools.report.bars import bars, fills, stack, swatch
from warmprefix_tools.report.document import document
from warmprefix_tools.report.excerpts import excerpt
from warmprefix_tools.report.markup import Markup, element, join, outside
from warmprefix_tools.report.tables import data, row, table

__all__ = ["doctor_page"]

_TITLE = "What keeps the prefix cache cold"


def doctor_page(report: DoctorReport) -> str:
    """One self-contained HTML page; the same bytes for the same report."""
    return document(
        _TITLE,
        fills(),
        _header(report),
        _overview(report),
        *(_finding(finding, number) for number, finding in enumerate(report.findings, 1)),
        _skipped(report),
        _footer(),
    )


def _header(report: DoctorReport) -> Markup:
    files = [part for name in report.files for part in (element("code", outside(name)), ", ")][:-1]
    sizes = f"KV blocks of {report.kv_block_size} tokens, " + (
        "no bound" if report.capacity_tokens is None else f"room for {report.capacity_tokens:,}"
    )
    return element(
        "header",
        element("h1", _TITLE),
        element(
            "p",
            f"{counted(report.requests, 'request')}, {counted(report.conversations, 'conversation')} of several turns,"
            f" {rounded(report.prompt_tokens)} prompt tokens, from ",
            *files,
            ".",
        ),
        element("p", f"Counted with a prefix cache of {sizes}, in the emulator's tokens.", class_="dim"),
    )


def _overview(report: DoctorReport) -> Markup:
    return element(
        "section",
        element("h2", "At a glance"),
        element("ul", *_tiles(report), class_="tiles"),
        element("p", _verdict(report), class_="lead"),
        *(element("p", "Mind: ", outside(note)) for note in report.notes),
        _prompt_tokens(report),
        _causes(report) if report.findings else None,
    )


def _tiles(report: DoctorReport) -> Iterator[Markup]:
    yield element("li", element("b", percent(report.hit_ratio)), element("span", "hit ratio as it is"))
    if report.findings:
        mended = element("span", "with all findings mended")
        yield element("li", element("b", percent(report.repaired_hit_ratio)), mended, class_="hero")
    yield element("li", element("b", percent(report.bound_ratio)), element("span", "came before, wherever it stood"))
    if report.reported_prompt_tokens:
        reported = (report.reported_cached_tokens or 0) / report.reported_prompt_tokens
        counted_of = f"hit ratio by the engine's own count, of {rounded(report.reported_prompt_tokens)} tokens"
        yield element("li", element("b", percent(reported)), element("span", counted_of))


def _verdict(report: DoctorReport) -> str:
    if not report.requests:
        return "There was no request to look at."
    if not report.findings:
        return "No defect was found. What the cache does not hold had not come before, or stood in another order."
    causes = counted(len(report.findings), "cause")
    if not report.lost_tokens:
        return f"{causes} found, at no cost in tokens."
    keep = "It keeps" if len(report.findings) == 1 else "They keep"
    return (
        f"{causes} found. {keep} {rounded(report.lost_tokens)} tokens out of the cache,"
        f" {percent(report.lost_share)} of all that was sent."
    )


def _prompt_tokens(report: DoctorReport) -> Markup | None:
    """One bar of all tokens: what became of them, and what could."""
    if not report.prompt_tokens:
        return None
    elsewhere = max(report.bound_tokens - report.repaired_hit_tokens, 0)
    parts = (
        ("found", "found in the cache", report.hit_tokens),
        ("order", "lost to the findings", report.lost_tokens),
        ("evicted", "came before, but in other places", elsewhere),
        ("new", "new", max(report.prompt_tokens - report.repaired_hit_tokens - elsewhere, 0)),
    )
    shown = [part for part in parts if part[2]]
    drawn = [(class_, n / report.prompt_tokens, f"{name}: {n:,} tokens") for class_, name, n in shown]
    legend = [element("li", swatch(class_), f"{name} {percent(n / report.prompt_tokens)}") for class_, name, n in shown]
    label = "All prompt tokens"
    rows = [row(name, f"{n:,}", percent(n / report.prompt_tokens)) for _, name, n in parts]
    return element(
        "figure",
        element("h3", label),
        stack(drawn),
        element("ul", *legend, class_="legend"),
        data(label, ("", "Tokens", "Share"), rows),
    )


def _causes(report: DoctorReport) -> Markup:
    """Chart and table in one: a row for each finding."""
    most = max(finding.share for finding in report.findings) or 1.0
    rows = [
        row(
            element("a", finding.title, href=f"#finding-{number}"),
            bars([finding.share / most], class_="hero"),
            percent(finding.share),
            rounded(finding.lost_tokens),
            f"{finding.requests:,}",
        )
        for number, finding in enumerate(report.findings, 1)
    ]
    label = "Causes, worst first"
    head = ("Cause", "", "Share", "Tokens", "Requests")
    return element("figure", element("h3", label), table(label, head, rows, class_="barred causes"))


def _finding(finding: Finding, number: int) -> Markup:
    cost = (
        f"{counted(finding.lost_tokens, 'token')} computed anew, {percent(finding.share)} of all;"
        f" {counted(finding.requests, 'request')} would find more"
        if finding.lost_tokens
        else f"Not a matter of speed; {counted(finding.requests, 'request')} concerned"
    )
    return element(
        "section",
        element("h2", f"{number}. {finding.title}"),
        element("p", cost, " (", element("code", finding.kind), ")", class_="dim"),
        element("p", finding.fix, class_="lead"),
        None if finding.divergence is None else _divergence(finding.divergence),
        id=f"finding-{number}",
    )


def _divergence(divergence: Divergence) -> Markup:
    could = divergence.could_share_tokens
    gain = f" Mended, they would share {could:,}." if could > divergence.shared_tokens else ""
    return element(
        "figure",
        element("h3", "For example"),
        element(
            "figcaption", f"These two prompts share their first {counted(divergence.shared_tokens, 'token')}.{gain}"
        ),
        element("dl", *_place(divergence.earlier), *_place(divergence.later)),
    )


def _place(place: Place) -> tuple[Markup, Markup]:
    source = join(element("code", outside(place.file)), f" line {place.line:,}")
    name = element("dt", element("b", f"Request {place.request:,}"), " ", outside(place.where), " in ", source)
    return name, element("dd", excerpt(place.snippet, place.mark))


def _skipped(report: DoctorReport) -> Markup | None:
    if not report.skipped_lines:
        return None
    rows = [_skipped_row(record) for record in report.skipped]
    first = "" if len(rows) == report.skipped_lines else f" The first {len(rows)}:"
    return element(
        "section",
        element("h2", "What could not be read"),
        element("p", f"{counted(report.skipped_lines, 'record')} of the log took no part in this.{first}"),
        table("What could not be read", ("File", "Line", "Why"), rows, class_="prose"),
    )


def _skipped_row(record: SkippedRecord) -> Markup:
    return row(outside(record.file), f"{record.line:,}", outside(record.reason))


def _footer() -> Markup:
    return element(
        "footer",
        element(
            "p",
            "Costs add up to what mending everything would save, by a model of the engine's prefix cache."
            " The excerpts are quoted from your log: mind whom you hand this page to.",
        ),
    )
