"""docs/reproduce.md: it lists each result file and its script, and its commands and numbers of traces are right."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from result_files import RESULTS, read_rows
from trace_sources import SOURCES

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
PAGE = (ROOT / "docs/reproduce.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Claim:
    """A row of the page."""

    script: str
    options: tuple[str, ...]
    page: str
    repeatable: str


def claims() -> Iterator[Claim]:
    row = re.compile(r"^\| [^|]+ \| `(\w+\.py[^`|]*)` \| [^|]* \| \[[^]]+\]\(([^)#]+)[^)]*\) \|(?: ([^|]+) \|)?$")
    for line in PAGE.splitlines():
        if found := row.match(line):
            script, *options = shlex.split(found[1])
            yield Claim(script, tuple(options), found[2], found[3] or "all")


CLAIMS = list(claims())


def script_of(result: str) -> str:
    """Return the script that writes a result file: the one with the longest name that the file's begins with."""
    return max((f"{script.stem}.py" for script in BENCHMARKS.glob("*.py") if result.startswith(script.stem)), key=len)


def test_each_row_with_a_command_is_read() -> None:
    assert len(CLAIMS) == len(re.findall(r"^\| [^|]+ \| `\w+\.py", PAGE, re.MULTILINE))


def test_each_result_file_is_on_the_page() -> None:
    names = [file.stem for file in RESULTS.glob("*.csv") if file.stem != "runs"]
    assert {script_of(name) for name in names} == {claim.script for claim in CLAIMS}


def test_each_script_that_writes_results_is_on_the_page() -> None:
    writers = {
        script.name
        for script in BENCHMARKS.glob("*.py")
        if re.search(r"^ +write_(?:results|rows)\(", script.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert writers == {claim.script for claim in CLAIMS}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.script)
def test_each_row_names_a_page_that_names_the_script(claim: Claim) -> None:
    assert f"benchmarks/{claim.script}" in (ROOT / "docs" / claim.page).read_text(encoding="utf-8")


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.options], ids=lambda claim: claim.script)
def test_the_options_of_each_command_exist(claim: Claim) -> None:
    command = [sys.executable, str(BENCHMARKS / claim.script), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for option in claim.options:
        if option.startswith("--"):
            assert re.search(rf"{option}\b", shown), option


@pytest.mark.parametrize(
    "claim",
    [claim for claim in CLAIMS if " of " in claim.repeatable and claim.repeatable[0].isdigit()],
    ids=lambda claim: claim.script,
)
def test_the_numbers_of_traces_are_those_of_the_result_file(claim: Claim) -> None:
    names = [file.stem for file in RESULTS.glob("*.csv") if file.stem != "runs"]
    rows = [row for name in names if script_of(name) == claim.script for row in read_rows(name)]
    traces = {row["trace"].partition(", ")[0] for row in rows if "trace" in row} - {"mean"}
    fetched = traces & set(SOURCES)
    assert claim.repeatable == f"{len(fetched)} of {len(traces)} traces"
