"""Output that commands share: consoles, progress bars and JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from warmprefix.errors import MissingExtraError
from warmprefix_openai.outputs import text_file
from warmprefix_tools.option_checks import STDOUT

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

__all__ = ["chosen_width", "plain_table", "progress_bar", "report_console", "write_json", "write_text"]

_PLAIN_WIDTH = 200


def report_console(json_file: Path | None) -> Console:
    """Return the console for a report: standard error if `json_file` is `STDOUT`. COLUMNS sets its width."""
    console = Console(stderr=json_file == STDOUT, highlight=False, emoji=False)  # a model may be called "m:one:"
    if not console.is_terminal and chosen_width() is None:
        console.width = _PLAIN_WIDTH
    return console


def chosen_width() -> int | None:
    """Return the width that the environment variable COLUMNS asks for; None without one."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isascii() and columns.isdigit() and int(columns) else None


def plain_table(*headings: str, left: Collection[str] = (), gap: int = 2, title: str | None = None) -> Table:
    """Return a table without lines; the first column and those in `left` are aligned left, the others right."""
    table = Table(
        title=title, title_style="bold", title_justify="left", box=None, pad_edge=False, padding=(0, gap, 0, 0)
    )
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if not place or heading in left else "right", no_wrap=True)
    table.show_header = any(headings)
    return table


@contextmanager
def progress_bar(announcement: str, name_width: int) -> Iterator[Progress]:
    """Show a progress bar on standard error, or an announcement if it is no terminal."""
    console = Console(stderr=True, highlight=False)
    progress = Progress(
        TextColumn(f"{{task.description:<{name_width}}}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    if not console.is_terminal:
        console.print(announcement)
    with progress if console.is_terminal else nullcontext():
        yield progress


def write_json(file: Path | None, fields: dict[str, Any]) -> None:
    """Write fields as JSON to a file or standard output; nothing if `file` is None.

    Raises:
        OutputError: The file cannot be written.
    """
    if file is None:
        return
    text = json.dumps(fields, indent=1, allow_nan=False) + "\n"
    if file == STDOUT:
        print(text, end="")  # noqa: T201
    else:
        write_text(file, text)


def write_text(file: Path, text: str) -> None:
    """Write a text to a file, which appears whole or not at all.

    Raises:
        OutputError: The file cannot be written.
    """
    with text_file(file) as write:
        write(text)
