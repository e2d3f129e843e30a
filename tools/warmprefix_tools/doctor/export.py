"""A report for other programs. docs/doctor.md is its contract."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from warmprefix import __version__
from warmprefix_tools.doctor.report import Report

__all__ = ["as_json"]


def as_json(report: Report) -> dict[str, Any]:
    """The report whole, with the shares that follow from it."""
    fields = asdict(report)
    findings = fields.pop("findings")
    return {
        "warmprefix": __version__,
        **fields,
        "capacity_tokens": "unbounded" if report.capacity_tokens is None else report.capacity_tokens,
        "hit_ratio": report.hit_ratio,
        "mended_hit_ratio": report.mended_hit_ratio,
        "bound_ratio": report.bound_ratio,
        "lost_tokens": report.lost_tokens,
        "lost_share": report.lost_share,
        "findings": findings,
    }
