"""The demo's text: what the Python standard library's own sources say about it.

Every machine that runs the demo has it, and nobody wrote it for the demo.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from warmprefix.blocks import ContextBlock
from warmprefix_tools.demo.errors import DemoError
from warmprefix_tools.demo.passages import passages

__all__ = ["Entry", "Parameter", "read_standard_library"]

Kind = Literal["module", "class", "function"]

_SKIPPED = {"ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests", "turtledemo"}
_DOCUMENTED_IN = {"_pydatetime": "datetime", "_pydecimal": "decimal", "_pyio": "io"}
_FEWEST_ENTRIES = 100


@dataclass(frozen=True, slots=True)
class Parameter:
    """One that a caller can name: neither `self` nor private nor starred."""

    name: str
    optional: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """A documented module, class or function, and the context blocks that its docstring makes."""

    name: str
    """Qualified: `json.dumps`, `json.encoder.JSONEncoder.encode`."""
    module: str
    kind: Kind
    parameters: tuple[Parameter, ...]
    docstring: str
    blocks: tuple[ContextBlock, ...]


def read_standard_library(root: Path | None = None) -> tuple[Entry, ...]:
    """Every public docstring of enough length below `root`, by default this Python's own library, sorted by name.

    Sources are parsed, never imported. What can't be read or parsed is left out. The same files give the same entries.

    Raises:
        DemoError: There is next to nothing to read: a Python that was installed without its sources.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    entries: dict[str | None, Entry] = {}  # by label, which must name one block only
    for module, path in sorted(_sources(root)):
        tree = _parsed(path)
        if tree is not None:
            for entry in _entries(tree, module, module):
                entries.setdefault(entry.blocks[0].id, entry)
    if len(entries) < _FEWEST_ENTRIES:
        raise DemoError(f"The demo reads the standard library's docstrings, but found {len(entries)} below {root}.")
    return tuple(sorted(entries.values(), key=lambda entry: entry.name))


def _sources(root: Path) -> Iterator[tuple[str, Path]]:
    for path in root.rglob("*.py"):
        *packages, file = path.relative_to(root).with_suffix("").parts
        parts = packages if file == "__init__" else [*packages, _DOCUMENTED_IN.get(file, file)]
        if parts and not any(part in _SKIPPED or part.startswith(("_", "config-")) for part in parts):
            yield ".".join(parts), path


def _parsed(path: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escape sequences that a later Python will refuse
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _entries(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str, module: str
) -> Iterator[Entry]:
    """The node's own entry, if its docstring makes one, then those of what it defines; functions hide theirs."""
    docstring = ast.get_docstring(node) or ""
    kind: Kind = "function"
    parameters: tuple[Parameter, ...] = ()
    if isinstance(node, ast.Module | ast.ClassDef):
        kind = "module" if isinstance(node, ast.Module) else "class"
        heading = f"{kind} {name}"
    else:
        parameters = tuple(_parameters(node.args))
        heading = f"{name}({ast.unparse(node.args)})"
    blocks = passages(name, heading, docstring)
    if blocks:
        yield Entry(name, module, kind, parameters, docstring, blocks)
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name[0] != "_":
                yield from _entries(child, f"{name}.{child.name}", module)


def _parameters(arguments: ast.arguments) -> Iterator[Parameter]:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    named = [(argument.arg, i >= required) for i, argument in enumerate(positional)]
    keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    named += [(argument.arg, default is not None) for argument, default in keyword_only]
    for name, optional in named:
        if name not in ("self", "cls") and not name.startswith("_"):
            yield Parameter(name, optional)
