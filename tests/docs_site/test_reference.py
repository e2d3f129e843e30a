"""Every public name is in the reference, with a description."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import griffe

ROOT = Path(__file__).parents[2]


def test_each_public_name_has_a_docstring(modules: griffe.ModulesCollection, reference: ModuleType) -> None:
    packages = reference.public_names()
    assert len(packages) > 30
    assert [package for package in packages if not modules[package].docstring] == []
    assert [path for path, found in public_objects(modules, packages) if found.docstring is None] == []


def test_each_import_of_the_docs_is_in_the_reference(reference: ModuleType) -> None:
    packages = reference.public_names()
    imports = [
        (path.name, module, name)
        for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
        for module, names in re.findall(
            r"^from (warmprefix[\w.]*) import (\([^)]+\)|.+)", path.read_text(), re.MULTILINE
        )
        for name in re.findall(r"(\w+)(?: as \w+)?", re.sub(r"#.*", "", names))
    ]
    assert len(imports) > 50
    assert [(page, module, name) for page, module, name in imports if name not in packages.get(module, ())] == []


def public_objects(
    modules: griffe.ModulesCollection, packages: dict[str, list[str]]
) -> Iterator[tuple[str, griffe.Object]]:
    for package, names in packages.items():
        for name in names:
            found = modules[package].members[name]
            yield f"{package}.{name}", found.final_target if isinstance(found, griffe.Alias) else found
