"""Changes to docstrings before the site shows them."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

from warmprefix_telemetry.exported_metrics import METRICS

COUNTS = {metric.field: metric.description for metric in METRICS if metric.field}
"""Descriptions of the fields of `PlannerStats`; those of `FeedStats` are below `feed.`."""
PREFIXES = {
    "warmprefix.telemetry.PlannerStats": "",
    "warmprefix.residency.feed_contract.FeedStats": "feed.",
}
SESSION = re.compile(r"^( *)>>> .*(?:\n\1.*\S.*)*", re.MULTILINE)
"""An example in a docstring: from its first prompt to the next empty line."""


class Examples(griffe.Extension):
    """Show examples as code; the parser of docstrings does so only below a heading."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Put examples into blocks of code."""
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = SESSION.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)


class FieldDescriptions(griffe.Extension):
    """Take the text of pydantic's `Field(description=...)`, and that of the metric that exports a count."""

    def on_attribute(self, *, attr: griffe.Attribute, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Add a docstring to an attribute that has none."""
        owner = attr.parent
        if attr.docstring is not None or owner is None:
            return
        prefix = PREFIXES.get(owner.path)
        text = _pydantic_text(attr) if prefix is None else COUNTS.get(prefix + attr.name)
        if text:
            attr.docstring = griffe.Docstring(text, parent=attr)


def _pydantic_text(attr: griffe.Attribute) -> str | None:
    if not isinstance(attr.value, griffe.ExprCall) or str(attr.value.function) != "Field":
        return None
    for argument in attr.value.arguments:
        if isinstance(argument, griffe.ExprKeyword) and argument.name == "description":
            return str(ast.literal_eval(str(argument.value)))
    return None
