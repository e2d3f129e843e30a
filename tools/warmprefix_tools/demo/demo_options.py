"""Options of `warmprefix demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from warmprefix.errors import MissingExtraError
from warmprefix_tools.demo.questions import USERS
from warmprefix_tools.local.weights import DOWNLOAD_MB, MODEL
from warmprefix_tools.option_checks import check_files, check_least

try:
    from typer import Option
except ImportError as exc:
    raise MissingExtraError("cli", "typer") from exc

__all__ = ["DEFAULT_PAGE", "DemoOptions"]

DEFAULT_PAGE = Path("warmprefix-demo.html")
"""The page if none is named. It replaces no file but an older page of the demo."""

_QUESTIONS = 240
_MODEL_QUESTIONS = 24


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
    questions: Annotated[
        int | None,
        Option(help="Number of questions to ask.", show_default=f"{_QUESTIONS}; {_MODEL_QUESTIONS} with --model"),
    ] = None
    model: Annotated[
        bool,
        Option(
            "--model",
            help=f"Let {MODEL}, a small real model, answer on this machine, and show its answers and times. Downloads"
            f" {DOWNLOAD_MB} MB once; takes two or three minutes.",
        ),
    ] = False
    endpoint: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1.",
            show_default="an emulator",
        ),
    ] = None
    served_model: Annotated[
        str | None, Option(metavar="NAME", help="The server's name for its model.", show_default="the first it lists")
    ] = None
    api_key: Annotated[str | None, Option(envvar="WARMPREFIX_DEMO_API_KEY", help="API key of the server.")] = None
    html_file: Annotated[
        Path | None,
        Option("--html", metavar="FILE", help="Where to write the report as a page.", show_default=str(DEFAULT_PAGE)),
    ] = None
    json_file: Annotated[
        Path | None, Option("--json", metavar="FILE", help="Where to write the numbers too; - for standard output.")
    ] = None

    def __post_init__(self) -> None:
        check_least("--questions", self.questions, 1)
        for name, value in (("--served-model", self.served_model), ("--api-key", self.api_key)):
            if value is not None and self.endpoint is None:
                raise ValueError(f"{name} must come with --endpoint, the URL of a real server; got none")
        if self.model and self.endpoint is not None:
            raise ValueError("--model runs a model on this machine and --endpoint asks another server; give only one")
        outputs = {"--html": self.html_file, "--json": self.json_file}
        check_files(outputs, [] if self.documents is None else [self.documents])

    @property
    def number(self) -> int:
        """Number of questions to ask."""
        return self.questions or (_MODEL_QUESTIONS if self.model else _QUESTIONS)

    @property
    def passages(self) -> int:
        """Passages to retrieve for a question; fewer for the model on this machine, so that it is done in time."""
        return 4 if self.model else 10

    @property
    def users(self) -> int:
        """Number of users who ask; so few that their few questions share passages, as many questions of many do."""
        return 2 if self.model else USERS
