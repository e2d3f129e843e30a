"""Tables that scroll in a box of their own where they are too wide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from warmprefix_tools.report.markup import Markup, element

__all__ = ["data", "row", "table"]


def row(name: str, *cells: str, class_: str | None = None) -> Markup:
    """A table's row: what it is about, and its values."""
    return element("tr", element("th", name, scope="row"), *(element("td", cell) for cell in cells), class_=class_)


def table(label: str, head: Sequence[str], rows: Iterable[Markup], *, class_: str | None = None) -> Markup:
    """A table under a row of headings. `label` is what a screen reader calls it."""
    headings = element("thead", element("tr", *(element("th", title, scope="col") for title in head)))
    body = element("tbody", *(part for each in rows for part in (Markup("\n"), each)))
    inner = element("table", headings, body, class_=class_)
    return element("div", inner, class_="scroll", role="region", aria_label=label, tabindex="0")


def data(label: str, head: Sequence[str], rows: Iterable[Markup]) -> Markup:
    """The numbers behind a chart, folded away."""
    return element("details", element("summary", "The numbers"), table(label, head, rows))
