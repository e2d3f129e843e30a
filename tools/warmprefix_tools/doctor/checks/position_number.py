"""Passages that are numbered by where they stand."""

from __future__ import annotations

from warmprefix_tools.doctor.checks.base import TextCheck
from warmprefix_tools.doctor.layout import without_number

__all__ = ["CHECK"]

CHECK = TextCheck(
    "position-number",
    "The same passage bears another number from request to request",
    "Label a passage by what it is, not by where it stands: by its document id or title. warmprefix does so:"
    " ContextBlock(text, id=...) is [id] in every prompt.",
    without_number,
    "headers",
)
