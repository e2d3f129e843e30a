"""Commands as a user runs them, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from warmprefix_tools.demo.corpus import LibraryEntry, read_standard_library


class Finished(NamedTuple):
    """Outcome of a command."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(autouse=True)
def width_without_a_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print reports in their own width, also where a worker of pytest-xdist inherits COLUMNS."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session")
def entries() -> tuple[LibraryEntry, ...]:
    """Return the standard library's docstrings, read once for the tests of all commands."""
    return read_standard_library()


@pytest.fixture(scope="session")
def run() -> Callable[..., Finished]:
    """Run `warmprefix` with arguments, and environment variables as keywords; an exception fails the test."""
    from typer.testing import CliRunner

    from warmprefix_tools.cli import app

    def run_command(*arguments: object, **environment: str) -> Finished:
        result = CliRunner().invoke(app, list(map(str, arguments)), env=environment, catch_exceptions=False)
        return Finished(result.exit_code, result.stdout, result.stderr)

    return run_command


@pytest.fixture
def run_main(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finished]:
    """Run `warmprefix` through its entry point, which handles Ctrl-C and missing extras."""
    from warmprefix_tools.__main__ import main

    def run_entry_point(*arguments: object) -> Finished:
        monkeypatch.setattr("sys.argv", ["warmprefix", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return Finished(int(ended.value.code or 0), output.out, output.err)

    return run_entry_point
