"""Every measured number in README.md and docs/ names its script and stands in that script's result file.

A section names its scripts as `benchmarks/NAME.py`; their result files are `benchmarks/results/NAME*.csv`. A section
without a script has those of the section around it. Each quantity of the text (a number with a unit) and each number
of a table's numeric cells must be in one of the files, rounded as it is shown. A comment makes exceptions. It holds up
to the end of its section:

    <!-- figures: NAME.csv | given: 20 ms, 5 % | derived: 1.7 = 20.4 / 12.0, 3 = 5.2 - 2.2 -->

The names are those of more result files, `models/` for the folder of published reports, or `none` if nothing in the
section is measured: settings, limits, examples. `given` lists quantities that the measurement was given. `derived`
calculates quantities from those in the files.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from result_files import RESULTS, read_rows

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNIT = r"%|ms|µs|ns|s|seconds?|minutes?|hours?|[kMG]B|points?|times|x"
QUANTITY = re.compile(
    rf"(?<![\w.,~/-])(?P<numbers>{NUMBER}(?:\s?(?:to|and|or|/|→|,)\s?{NUMBER})*)\s?(?P<unit>{UNIT})(?![\w/])"
)
CELL_NUMBER = re.compile(rf"({NUMBER})(?:\s?({UNIT})(?!\w))?")
NUMERIC_CELL = re.compile(rf"(?:{NUMBER}|{UNIT}|to|and|[\s*+(),;/→~±-])*")
COMMENT = re.compile(
    r"<!-- figures: (?P<files>[^|>]*?)\s*"
    r"(?:\| given: (?P<given>[^|>]*?)\s*)?"
    r"(?:\| derived: (?P<derived>[^|>]*?)\s*)?-->"
)
SCRIPT = re.compile(r"benchmarks/(\w+)\.py")
FACTORS = {
    "%": (1, 100),
    "points": (1, 100),
    "ns": (1, 1e3, 1e6, 1e9),
    "µs": (1, 1e3, 1e6),
    "ms": (1, 1e3, 1e-3),
    "s": (1, 1e-3, 1e-6),
    "minutes": (1, 1 / 60),
    "hours": (1, 1 / 60, 1 / 3600),
    "kB": (1, 1e-3, 1e3),
    "MB": (1, 1e-3, 1e-6, 1 / 1024, 1 / 1024**2),
    "GB": (1, 1e-3, 1e-6, 1e-9, 1 / 1024, 1 / 1024**2, 1 / 1024**3),
}
"""By which factors a number in a file may differ from the number shown with a unit."""
OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True)
class Shown:
    """A number as a page shows it."""

    text: str
    unit: str
    line: str

    @property
    def value(self) -> float:
        return float(self.text.replace(",", ""))

    def shows(self, value: float) -> bool:
        """Return whether this is the value, rounded to the digits shown."""
        decimals = len(self.text.partition(".")[2])
        tolerance = 0.5 * 10**-decimals + 1e-9
        complements = (value, 100 - value, 100 * (1 - value), 100 * (value - 1)) if self.unit in ("%", "points") else ()
        candidates = [*complements, *(value * factor for factor in FACTORS.get(self.unit, (1, 100)))]
        return any(abs(abs(candidate) - self.value) <= tolerance for candidate in candidates)


@dataclass
class Section:
    """The part of a page that has its own scripts and exceptions."""

    files: set[str] = field(default_factory=set)
    exempt: bool = False
    given: set[str] = field(default_factory=set)
    derived: list[tuple[str, str]] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)


def sections_of(text: str) -> Iterator[Section]:
    """Yield the sections of a page, each with the files of the sections around it."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    around: list[tuple[int, set[str]]] = []
    for part in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        level = len(part) - len(part.lstrip("#"))
        around = [(outer, files) for outer, files in around if outer < level]
        own = {file.stem for script in SCRIPT.findall(part) for file in RESULTS.glob(f"{script}*.csv")}
        section = Section(own or (around[-1][1] if around else set()))
        for block in re.split(r"\n\s*\n|(?<=-->)\n", part):
            comment = COMMENT.search(block)
            if comment is not None:
                named = set(re.findall(r"([\w-]+)(?:\.csv|/)", comment["files"]))
                files = set() if comment["files"] == "none" else named
                derived = [
                    (left.strip(), right.strip())
                    for left, _, right in (each.partition("=") for each in (comment["derived"] or "").split(", "))
                    if right
                ]
                given = {squeezed(each) for each in (comment["given"] or "").split(", ") if each.strip()}
                yield section
                section = Section(section.files | files, comment["files"] == "none", given, derived)
                block = COMMENT.sub("", block)
            section.blocks.append(block)
        around.append((level, section.files))
        yield section


def squeezed(quantity: str) -> str:
    return "".join(quantity.split())


def shown_in(block: str) -> Iterator[Shown]:
    """Yield the quantities of a text or a table, and those of the table's numeric cells behind the first."""
    lines = block.strip().splitlines()
    if len(lines) <= 2 or not all(line.startswith("|") for line in lines):
        yield from quantities_in(without_code(" ".join(lines)))
        return
    for line in lines[2:]:
        first, *cells = without_code(line).strip("|").split("|")
        for cell in cells:
            if NUMERIC_CELL.fullmatch(cell):
                for number, unit in CELL_NUMBER.findall(cell):
                    yield Shown(number.rstrip(","), singular(unit), f"{first} |{cell}|")
            else:
                yield from quantities_in(cell)


def quantities_in(text: str) -> Iterator[Shown]:
    for found in QUANTITY.finditer(text):
        for number in re.findall(NUMBER, found["numbers"]):
            yield Shown(
                number.rstrip(","), singular(found["unit"]), text[max(0, found.start() - 40) : found.end() + 20]
            )


def without_code(text: str) -> str:
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "`", text)


def singular(unit: str) -> str:
    return {"second": "s", "seconds": "s", "point": "points", "minute": "minutes", "hour": "hours"}.get(unit, unit)


def numbers_in(value: Any) -> Iterator[float]:
    """Yield all numbers of a result file, at any depth."""
    if isinstance(value, bool):
        return
    if isinstance(value, (int, float)):
        yield float(value)
    elif isinstance(value, dict):
        for each in value.values():
            yield from numbers_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from numbers_in(each)


def calculated(expression: str, values: Sequence[float]) -> float:
    """Return the value of an arithmetic expression whose numbers are all in the files."""

    def value_of(node: ast.AST) -> float:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
        assert isinstance(node, ast.Constant), expression
        text = ast.get_source_segment(expression, node) or ""
        number = Shown(text.replace("_", ""), "", expression)
        assert text in ("1", "100") or any(map(number.shows, values)), f"{text} in {expression} is not in the files"
        return number.value

    return value_of(ast.parse(expression, mode="eval").body)


def unfounded(page: Path, text: str) -> Iterator[str]:
    """Yield each number of a page that has no script, or is not in its result files."""
    for section in sections_of(text):
        if section.exempt:
            continue
        values = sorted({n for name in section.files for n in numbers_in(read_rows(name))})
        derived = {left for left, right in section.derived if Shown(left, "", "").shows(calculated(right, values))}
        for shown in (each for block in section.blocks for each in shown_in(block)):
            quantity = f"{shown.text}{shown.unit}"
            if quantity in section.given or shown.text in section.given or shown.text in derived:
                continue
            if not section.files:
                yield f"{page.name}: {shown.text} {shown.unit} names no script: {shown.line}"
            elif not any(map(shown.shows, values)):
                yield f"{page.name}: {shown.text} {shown.unit} is not in {sorted(section.files)}: {shown.line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_measured_numbers_are_those_of_the_result_files(page: Path) -> None:
    assert list(unfounded(page, page.read_text(encoding="utf-8"))) == []


def test_every_result_file_has_a_script_and_every_named_script_exists() -> None:
    scripts = {script.stem for script in (ROOT / "benchmarks").glob("*.py")}
    for file in RESULTS.glob("*.csv"):
        assert file.stem == "runs" or any(file.stem.startswith(script) for script in scripts), file.name
    for page in PAGES:
        for name in SCRIPT.findall(page.read_text(encoding="utf-8")):
            assert name in scripts, f"{page.name} names benchmarks/{name}.py"


@pytest.mark.parametrize(
    "text",
    [
        "It takes 5 ms.",  # no script
        "It takes 123,457 ms (`benchmarks/memory.py`).",
        "<!-- figures: memory.csv | given: 5 ms -->\nIt takes 123,457 to 5 ms.",
        "<!-- figures: none -->\n\nAt most 5 ms.\n\n## Next\n\nIt takes 5 ms.",
        "`benchmarks/memory.py`\n\n| a | b |\n|---|---|\n| 123,457 | 765,432.1 |",
    ],
)
def test_a_number_without_foundation_is_found(text: str) -> None:
    assert len(list(unfounded(ROOT / "page.md", text))) == 1


def test_a_wrong_calculation_is_found() -> None:
    with pytest.raises(AssertionError):
        calculated("123457.8 / 2", [1.0, 2.0])
    assert calculated("(3 - 1) * 100", [3.0]) == 200
