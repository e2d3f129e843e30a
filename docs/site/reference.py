"""The public packages and modules of the Python reference, and a page for each."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [
    "core",
    "tools",
    "kernels",
    *sorted(f"integrations/{path.name}" for path in (ROOT / "integrations").iterdir()),
]
MODULES = (
    "warmprefix_kv_events.background_counter",
    "warmprefix.cache_profiles",
    "warmprefix.errors",
    "warmprefix.plan",
    "warmprefix_openai.cache_metrics",
    "warmprefix_openai.shards",
    "warmprefix_requests.prices",
    "warmprefix_ray.serve",
    "warmprefix_redis.settings",
    "warmprefix_telemetry.opentelemetry",
    "warmprefix_telemetry.prometheus",
    "warmprefix_telemetry.trace_recorder",
    "warmprefix.tokens",
    "warmprefix.traces",
    "warmprefix_chain_of_agents.langgraph",
    "warmprefix_chain_of_agents.workflows",
    "warmprefix_tools.retriever",
)
"""Public modules outside the `__init__.py` files, which applications import by their full name."""
GROUPS = {
    "The core": ["warmprefix"],
    "Next to the core": sorted(path.name for path in (ROOT / "core").glob("warmprefix_*")),
    "Frameworks and the gateway": sorted(path.name for path in (ROOT / "integrations").glob("*/warmprefix_*")),
    "Tools and kernels": ["warmprefix_tools", "warmprefix_kernels"],
}
"""Headings of the overview, and the distribution packages below each."""


def public_names() -> dict[str, list[str]]:
    """Return the public names of each package and module of the reference, in the order of the overview."""
    found = {**package_names(), **{module: _names_of_module(module) for module in MODULES}}
    order = [first for group in GROUPS.values() for first in group]
    return {name: found[name] for name in sorted(found, key=lambda name: (order.index(name.partition(".")[0]), name))}


def package_names() -> dict[str, list[str]]:
    """Return the `__all__` of each package that has one, read from its source, so that nothing need be imported."""
    found = {}
    for source in SOURCES:
        for path in (ROOT / source).glob("warmprefix*/**/__init__.py"):
            names = _listed_names(path)
            if names is not None:
                found[".".join(path.parent.relative_to(ROOT / source).parts)] = names
    return found


def _names_of_module(module: str) -> list[str]:
    paths = [ROOT / source / f"{module.replace('.', '/')}.py" for source in SOURCES]
    names = next(_listed_names(path) for path in paths if path.exists())
    if names is None:
        raise LookupError(f"{module} has no __all__")
    return names


def _listed_names(path: Path) -> list[str] | None:
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(ast.unparse(target) == "__all__" for target in targets):
                return sorted(ast.literal_eval(node.value))
    return None


def overview_page() -> str:
    """Return the list of all packages and modules, with their names."""
    names = public_names()
    lines = [
        "# Python reference",
        "",
        "The public names of each package. Everything else may change without notice.",
        "",
    ]
    for heading, firsts in GROUPS.items():
        lines += [f"## {heading}", "", "| package | names |", "|---|---|"]
        for package in names:
            if package.partition(".")[0] in firsts:
                links = ", ".join(_link(package, name, names) for name in names[package])
                lines.append(f"| [`{package}`]({package}.md) | {links} |")
        lines.append("")
    return "\n".join(lines)


def _link(package: str, name: str, packages: dict[str, list[str]]) -> str:
    path = f"{package}.{name}"
    return f"[`{name}`]({path}.md)" if path in packages else f"[`{name}`][{path}]"


def package_page(package: str) -> str:
    """Return the page of a package: its docstring, then each of its public names."""
    options = ["show_root_heading: false", "show_root_toc_entry: false", "members:"]
    packages = public_names()
    members = [f"  - {name}" for name in packages[package] if f"{package}.{name}" not in packages]
    block = "\n".join(f"      {line}" for line in options + members)
    return f"# {package}\n\n::: {package}\n    options:\n{block}\n"
