"""docs/settings.md lists the settings, errors and metrics of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from pydantic import SecretStr

from warmprefix_gateway.metrics import GatewayMetrics
from warmprefix_redis.settings import SharedSettings
from warmprefix_tools.cli import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/settings.md").read_text("utf-8")


def table(heading: str) -> list[list[str]]:
    """Return the cells of the first table behind a heading, without its header."""
    lines = PAGE.partition(f"{heading}\n")[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_shared_settings_are_listed_with_their_defaults() -> None:
    special: dict[Any, str] = {None: "none", True: "`true`", SecretStr(""): "empty"}
    expected = [
        (f"`WARMPREFIX_{name.upper()}`", special.get(field.default, f"`{field.default}`"))
        for name, field in SharedSettings.model_fields.items()
    ]
    assert [(name, default) for name, default, _ in table("### Shared state")] == expected


def test_each_other_variable_of_the_code_is_listed(reference: ModuleType) -> None:
    listed = {name.strip("`") for name, *_ in (*table("### Shared state"), *table("### Elsewhere"))}
    read = set(variables_of_options(typer.main.get_command(app)))
    for source in reference.SOURCES:
        for path in (ROOT / source).glob("warmprefix*/**/*.py"):
            text = path.read_text("utf-8")
            read |= set(re.findall(r"(?:environ(?:\.get)?[(\[]|getenv\()\"(\w+)\"", text))
            read |= set(re.findall(r"^\w+_VARIABLE = \"(\w+)\"", text, re.MULTILINE))
    assert read <= listed
    assert listed - read == {f"WARMPREFIX_{name.upper()}" for name in SharedSettings.model_fields} - read


def variables_of_options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        if isinstance(parameter.envvar, str):
            yield parameter.envvar
    for each in getattr(command, "commands", {}).values():
        yield from variables_of_options(each)


def test_the_errors_of_the_core_and_the_integrations_are_listed(reference: ModuleType) -> None:
    bases: dict[str, list[str]] = {}
    for source in (source for source in reference.SOURCES if source not in ("tools", "kernels")):
        for path in (ROOT / source).glob("warmprefix*/**/*.py"):
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    bases[node.name] = [ast.unparse(base) for base in node.bases]
    errors = {name: family(name, bases) for name in bases if "WarmprefixError" in family(name, bases)}
    errors = {name: found for name, found in errors.items() if not name.startswith("_")}
    caught_inside = {"MalformedMessageError"}  # the feed counts it
    rows = {error.strip("`"): base.strip("`") for error, base, *_ in table("## Errors")}
    assert rows.keys() == errors.keys() - caught_inside
    assert [name for name, base in rows.items() if base not in errors[name]] == []


def family(name: str, bases: dict[str, list[str]]) -> set[str]:
    """Return the names of all base classes."""
    found = set(bases.get(name, ()))
    return found.union(*(family(base, bases) for base in found))


def test_the_metrics_of_the_gateway_are_listed() -> None:
    expected = []
    for metric in vars(GatewayMetrics()).values():
        for described in getattr(metric, "describe", list)():
            if described.name.startswith("warmprefix"):
                name = f"`{described.name}{'_total' if described.type == 'counter' else ''}`"
                labels = ", ".join(f"`{label}`" for label in metric._labelnames)
                expected.append([name, described.type, labels, described.documentation.removesuffix(".")])
    assert len(expected) > 10
    assert table("## Metrics") == expected
