"""Each package stays within its row of budget.toml; run as a script, this prints the rows as they are measured."""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    path.name: path
    for folder in ("core", "kernels", "integrations/*", "tools")
    for path in sorted(ROOT.glob(f"{folder}/warmprefix*"))
    if (path / "__init__.py").exists()
}
TEXT = (ROOT / "budget.toml").read_text(encoding="utf-8")
BUDGET: dict[str, dict[str, Any]] = import_module("tomllib").loads(TEXT)  # from Python 3.11 on
UNUSED_SHARE = 0.05
"""Most of a row's nodes that may be unused, so that what was saved is not spent again unnoticed."""


class Use(NamedTuple):
    """What a package takes of its row."""

    nodes: int
    """Nodes of the syntax trees of all modules."""
    names: int
    """Public names: those in the `__all__` of the package and of its rooms."""
    options: int
    """Arguments with a default of the public functions, constructors and data classes."""
    imports: list[str]
    """Packages of this repository that it imports."""


def use_of(package: str) -> Use:
    trees = trees_of(package)
    names = public_names(package)
    return Use(
        nodes=sum(sum(1 for _ in ast.walk(tree)) for tree in trees.values()),
        names=len(names),
        options=sum(
            options_of(node)
            for tree in trees.values()
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name in names
        ),
        imports=sorted(imported_packages(package) - {package}),
    )


@cache
def trees_of(package: str) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGES[package].rglob("*.py"))}


def public_names(package: str) -> set[str]:
    return {
        element.value
        for path, tree in trees_of(package).items()
        if path.name == "__init__.py" or path.parent == PACKAGES[package]
        for node in tree.body
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets)
        for element in getattr(node.value, "elts", [])
        if isinstance(element, ast.Constant) and isinstance(element.value, str)
    }


def options_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """Return the number of arguments with a default of a function, or of a class's constructor."""
    if isinstance(node, ast.ClassDef):
        constructors = [member for member in node.body if getattr(member, "name", "") == "__init__"]
        if not constructors:
            fields = [member for member in node.body if isinstance(member, ast.AnnAssign)]
            return sum(
                field.value is not None and not getattr(field.target, "id", "_").startswith("_") for field in fields
            )
        return sum(options_of(each) for each in constructors if isinstance(each, ast.FunctionDef))
    return len(node.args.defaults) + sum(default is not None for default in node.args.kw_defaults)


def imported_packages(package: str) -> set[str]:
    modules = [
        name
        for tree in trees_of(package).values()
        for node in ast.walk(tree)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    ]
    return {module.partition(".")[0] for module in modules} & PACKAGES.keys()


def test_each_package_has_a_row() -> None:
    assert list(BUDGET) == list(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_stays_within_its_row(package: str) -> None:
    row, use = BUDGET[package], use_of(package)
    assert use.nodes <= row["nodes"]
    assert use.names <= row["names"]
    assert use.options <= row["options"]
    assert use.imports == row["imports"]


@pytest.mark.parametrize("package", PACKAGES)
def test_what_was_saved_is_given_back(package: str) -> None:
    row, use = BUDGET[package], use_of(package)
    assert use.nodes >= (1 - UNUSED_SHARE) * row["nodes"]
    assert (use.names, use.options) == (row["names"], row["options"])


@pytest.mark.parametrize("package", PACKAGES)
def test_a_row_names_what_pays_for_it(package: str) -> None:
    """A result file of a benchmark, or a reason signed by whoever accepted it."""
    row = BUDGET[package]
    results = [ROOT / "benchmarks" / "results" / name for name in row.get("figures", [])]
    assert all(path.exists() for path in results)
    assert results or " -- " in row.get("reason", "")


if __name__ == "__main__":
    for name in PACKAGES:
        print(name, *use_of(name))  # noqa: T201
