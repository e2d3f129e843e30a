"""Options of `warmprefix demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from warmprefix.errors import MissingExtraError
from warmprefix_tools.option_checks import check_files, check_least

try:
    from typer import Option
except ImportError as exc:
    raise MissingExtraError("cli", "typer") from exc

__all__ = ["DEFAULT_PAGE", "DemoOptions"]

DEFAULT_PAGE = Path("warmprefix-demo.html")
"""The page if none is named. It replaces no file but an older page of the demo."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """One run of the command; the defaults take about a minute.

    Raises:
        ValueError: A number is out of range, or options of a real server come without its URL.
    """

    documents: Annotated[
        Path | None,
        Option(
            metavar="PATH",
            help="Folder of your own .txt, .md, .rst and .html files, or one file, to ask about.",
            show_default="Python's standard library",
        ),
    ] = None
    questions: Annotated[int, Option(help="Number of questions to ask.")] = 240
    endpoint: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1.",
            show_default="an emulator",
        ),
    ] = None
    model: Annotated[str | None, Option(help="The server's name for its model.", show_default="the first it lists")] = (
        None
    )
    api_key: Annotated[str | None, Option(envvar="WARMPREFIX_DEMO_API_KEY", help="API key of the server.")] = None
    html_file: Annotated[
        Path | None,
        Option("--html", metavar="FILE", help="Where to write the report as a page.", show_default=str(DEFAULT_PAGE)),
    ] = None

    def __post_init__(self) -> None:
        check_least("--questions", self.questions, 1)
        for name, value in (("--model", self.model), ("--api-key", self.api_key)):
            if value is not None and self.endpoint is None:
                raise ValueError(f"{name} must come with --endpoint, the URL of a real server; got none")
        check_files({"--html": self.html_file}, [] if self.documents is None else [self.documents])
