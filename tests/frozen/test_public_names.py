"""The public names of every package are the committed ones."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import warmprefix

ROOT = Path(__file__).parents[2]
SOURCES = ("core", "tools", "kernels", *(f"integrations/{path.name}" for path in (ROOT / "integrations").glob("*")))


def public_names() -> dict[str, list[str]]:
    """Return the `__all__` of each package that has one, read from its source, so that nothing need be installed."""
    found: dict[str, list[str]] = {}
    for source in SOURCES:
        for path in (ROOT / source).glob("warmprefix*/**/__init__.py"):
            package = ".".join(path.parent.relative_to(ROOT / source).parts)
            names = _listed_names(path)
            if names is not None:
                found[package] = sorted(names)
    return found


def _listed_names(path: Path) -> list[str] | None:
    for node in ast.parse(path.read_text("utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert node.value is not None
            return list(ast.literal_eval(node.value))
    return None


def test_each_package_lists_the_committed_names(freeze: Callable[..., None]) -> None:
    freeze("public_names.json", public_names())


def test_listed_names_of_the_core_exist() -> None:
    assert sorted(warmprefix.__all__) == public_names()["warmprefix"]
    assert all(hasattr(warmprefix, name) for name in warmprefix.__all__)
