"""Every public name is in the reference, with a description."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe

ROOT = Path(__file__).parents[2]

DESCRIBED_BY = {
    "warmprefix.planner.config.PlannerOptions": "warmprefix.planner.planner.ContextPlanner.__init__",
    "warmprefix.planner.request.PlanOptions": "warmprefix.planner.planner.ContextPlanner.plan",
    "warmprefix.planner.batching.BatchOptions": "warmprefix.planner.planner.ContextPlanner.plan_batch",
}
"""Types of keyword arguments, and the function that describes these arguments."""


def test_each_public_name_has_a_docstring(modules: griffe.ModulesCollection, reference: ModuleType) -> None:
    packages = reference.public_names()
    assert len(packages) > 30
    assert [package for package in packages if not modules[package].docstring] == []
    assert [path for path, found in public_objects(modules, packages) if found.docstring is None] == []


def test_each_member_of_a_public_class_has_a_description(
    modules: griffe.ModulesCollection, reference: ModuleType
) -> None:
    packages = reference.public_names()
    classes = {found.path: found for _, found in public_objects(modules, packages) if isinstance(found, griffe.Class)}
    roles = [found for found in classes.values() if "Protocol" in map(base_name, found.bases)]
    missing = [
        member.path
        for found in classes.values()
        for member in undescribed_members(found)
        if not is_described_elsewhere(member, found, modules, roles)
    ]
    assert not missing, "\n".join(missing)


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


def undescribed_members(found: griffe.Class) -> Iterator[griffe.Object]:
    for name, member in found.members.items():
        is_public = not name.startswith("_") and name != "model_config"  # pydantic's, of no use to applications
        if is_public and isinstance(member, griffe.Object) and member.docstring is None:
            yield member


def is_described_elsewhere(
    member: griffe.Object, owner: griffe.Class, modules: griffe.ModulesCollection, roles: list[griffe.Class]
) -> bool:
    """Return True if the class, the protocol that it has, or a base class describes the member."""
    described = modules[DESCRIBED_BY[owner.path]] if owner.path in DESCRIBED_BY else owner
    if member.name in argument_names(described) or member.name in argument_names(owner.members.get("__init__")):
        return True
    has_roles = [role for role in roles if public_members(role) <= public_members(owner) and role is not owner]
    if any(role.members[member.name].docstring for role in has_roles if member.name in role.members):
        return True  # `OrderingPolicy` describes `order` and `observe` of all policies
    if any(base.members[member.name].docstring for base in owner.mro() if member.name in base.members):
        return True
    if owner.path.startswith("warmprefix_kernels"):
        return False  # they need torch, which need not be here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the frameworks, when they are imported
        defined: Any = getattr(importlib.import_module(owner.module.path), owner.name)
    inherited = [vars(base).get(member.name) for base in defined.__mro__[1:]]
    return any(inspect.getdoc(each) for each in inherited if callable(each) or isinstance(each, property | classmethod))


def argument_names(found: griffe.Object | griffe.Alias | None) -> set[str]:
    """Return the arguments that a docstring describes."""
    if found is None or found.docstring is None:
        return set()
    sections = [section for section in found.docstring.parsed if section.kind.value in ("parameters", "attributes")]
    return {name.strip() for section in sections for entry in section.value for name in entry.name.split(",")}


def public_members(found: griffe.Class) -> set[str]:
    return {name for name in found.all_members if not name.startswith("_")}


def base_name(base: Any) -> str:
    return str(base).partition("[")[0]
