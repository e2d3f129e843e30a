"""The public packages and modules of the Python reference, and a page for each."""

from __future__ import annotations

import ast
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [
    "core",
    "tools",
    "kernels",
    *sorted(f"integrations/{path.name}" for path in (ROOT / "integrations").iterdir()),
]
MODULES = (
    "warmprefix.background_counter",
    "warmprefix.cache_profiles",
    "warmprefix.errors",
    "warmprefix.plan",
    "warmprefix_requests.prices",
    "warmprefix_ray.serve",
    "warmprefix_redis.settings",
    "warmprefix_telemetry.opentelemetry",
    "warmprefix_telemetry.prometheus",
    "warmprefix.tokens",
    "warmprefix_chain_of_agents.langgraph",
    "warmprefix_chain_of_agents.workflows",
    "warmprefix_tools.retriever",
)
"""Public modules outside the `__init__.py` files, which applications import by their full name."""
GROUPS = {
    "The core": ("warmprefix",),
    "Next to the core": (
        "warmprefix_redis",
        "warmprefix_kv_events",
        "warmprefix_telemetry",
        "warmprefix_baselines",
        "warmprefix_requests",
        "warmprefix_routing",
        "warmprefix_openai",
    ),
    "Frameworks and the gateway": (
        "warmprefix_langchain",
        "warmprefix_llamaindex",
        "warmprefix_mem0",
        "warmprefix_chain_of_agents",
        "warmprefix_ray",
        "warmprefix_gateway",
    ),
    "Tools and kernels": ("warmprefix_tools", "warmprefix_kernels"),
}
"""Headings of the overview, and the distribution packages below each."""


def public_names() -> dict[str, list[str]]:
    """Return the public names of each package and module of the reference, in the order of the overview.

    A test compares the names of the packages with the code.
    """
    packages: dict[str, list[str]] = json.loads((ROOT / "tests/frozen/data/public_names.json").read_text("utf-8"))
    found = {**packages, **{module: listed_names(module) for module in MODULES}}
    order = [first for group in GROUPS.values() for first in group]
    return {name: found[name] for name in sorted(found, key=lambda name: (order.index(name.partition(".")[0]), name))}


def listed_names(module: str) -> list[str]:
    """Return the `__all__` of a module, read from its source, so that nothing need be imported."""
    for source in SOURCES:
        path = ROOT / source / f"{module.replace('.', '/')}.py"
        if path.exists():
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    return sorted(ast.literal_eval(node.value))
    raise LookupError(f"{module} has no __all__")


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
