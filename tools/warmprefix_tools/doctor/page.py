"""The page of a report: causes that keep the cache cold, their cost, and examples from the log."""

from __future__ import annotations

from warmprefix_tools.doctor.findings import DoctorReport, ProfileReport
from warmprefix_tools.report.amounts import counted, percent, rounded
from warmprefix_tools.report.pages import render_page

__all__ = ["doctor_page", "profile_summary"]


def doctor_page(report: DoctorReport) -> str:
    """Return one self-contained HTML page; the same bytes for the same report."""
    tokens = report.prompt_tokens
    elsewhere = max(report.bound_tokens - report.repaired_hit_tokens, 0)
    parts = (
        ("found", "found in the cache", report.hit_tokens),
        ("order", "lost to the findings", report.lost_tokens),
        ("evicted", "came before, but in other places", elsewhere),
        ("new", "new", max(tokens - report.repaired_hit_tokens - elsewhere, 0)),
    )
    drawn = [part for part in parts if part[2]]
    return render_page(
        "doctor/page.html",
        title="What keeps the prefix cache cold",
        report=report,
        verdict=_verdict(report),
        in_profile="" if report.profile is None else profile_summary(report.profile),
        findings=(*report.findings, *(() if report.profile is None else report.profile.findings)),
        parts=parts,
        bar=[(class_, count / tokens, f"{name}: {count:,} tokens") for class_, name, count in drawn if tokens],
        bar_legend=[(class_, f"{name} {percent(count / tokens)}") for class_, name, count in drawn if tokens],
        highest_share=max((finding.share for finding in report.findings), default=0.0) or 1.0,
    )


def profile_summary(profile: ProfileReport) -> str:
    """Return in words how much of the report is about the cache of a profile."""
    return f"In the cache of {profile.name}: {counted(len(profile.findings), 'finding')}."


def _verdict(report: DoctorReport) -> str:
    if not report.requests:
        return "There was no request to examine."
    if not report.findings:
        return "No defect was found. Tokens that the cache misses are new, or came before in another order."
    causes = counted(len(report.findings), "cause")
    if not report.lost_tokens:
        return f"{causes} found, at no cost in tokens."
    keep = "It keeps" if len(report.findings) == 1 else "They keep"
    return (
        f"{causes} found. {keep} {rounded(report.lost_tokens)} tokens out of the cache,"
        f" {percent(report.lost_share)} of all prompt tokens."
    )
