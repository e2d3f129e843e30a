"""The demo's text: the docstrings of the Python standard library, as context blocks.

Every machine that runs the demo has them, and they were not written for the demo.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from warmprefix import ContextBlock
from warmprefix_tools.demo import DemoError

__all__ = [
    "BLANK_LINES",
    "LEAST_TOKENS",
    "MOST_TOKENS",
    "LibraryEntry",
    "Parameter",
    "packed",
    "passages",
    "read_standard_library",
    "tokens_of",
]

LEAST_TOKENS = 60
"""Least tokens of a block; a shorter docstring makes none."""

MOST_TOKENS = 270
"""Most tokens of a block, before a short remainder and a heading are added."""

BLANK_LINES = re.compile(r"\n\s*\n")
_LONGEST_NAME = 36  # leaves room for a part's number in a label

_Kind = Literal["module", "class", "function"]

_SKIPPED = {"ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests", "turtledemo"}
_DOCUMENTED_IN = {"_pydatetime": "datetime", "_pydecimal": "decimal", "_pyio": "io"}
_LEAST_ENTRIES = 100


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that a caller can name: neither `self` nor private nor starred."""

    name: str
    optional: bool


@dataclass(frozen=True, slots=True)
class LibraryEntry:
    """A documented module, class or function, and the context blocks that its docstring makes."""

    name: str
    """Qualified: `json.dumps`, `json.encoder.JSONEncoder.encode`."""
    module: str
    kind: _Kind
    parameters: tuple[Parameter, ...]
    docstring: str
    blocks: tuple[ContextBlock, ...]


def read_standard_library(root: Path | None = None) -> tuple[LibraryEntry, ...]:
    """Return every public docstring below `root` that is long enough, sorted by name.

    The default is this Python's own library. Sources are parsed, never imported; those that cannot be read or parsed
    are left out. The same files give the same entries.

    Raises:
        DemoError: There are hardly any docstrings: this Python was installed without its sources.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    entries: dict[str | None, LibraryEntry] = {}  # by label, which must name one block only
    for module, path in sorted(_sources(root)):
        tree = _parsed(path)
        if tree is not None:
            for entry in _entries(tree, module, module):
                entries.setdefault(entry.blocks[0].id, entry)
    if len(entries) < _LEAST_ENTRIES:
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
            warnings.simplefilter("ignore")  # about escape sequences that a later Python will refuse
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _entries(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str, module: str
) -> Iterator[LibraryEntry]:
    """Yield the entry of a node, then those of its public definitions; definitions in functions do not count."""
    docstring = ast.get_docstring(node) or ""
    kind: _Kind = "function"
    parameters: tuple[Parameter, ...] = ()
    if isinstance(node, ast.Module | ast.ClassDef):
        kind = "module" if isinstance(node, ast.Module) else "class"
        heading = f"{kind} {name}"
    else:
        parameters = tuple(_parameters(node.args))
        heading = f"{name}({ast.unparse(node.args)})"
    blocks = passages(name, heading, docstring)
    if blocks:
        yield LibraryEntry(name, module, kind, parameters, docstring, blocks)
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


def passages(name: str, heading: str, docstring: str) -> tuple[ContextBlock, ...]:
    r"""Return a docstring as blocks that end where paragraphs end; none for too short a text.

    Each block can be found and read by itself: the first begins with the heading, the others with the name. The ids
    are short enough to be labels.

    >>> words = "Sixty tokens are some forty words. " * 20
    >>> [block.id for block in passages("json.dumps", "json.dumps(obj)", f"{words}\n\n{words}")]
    ['json.dumps', 'json.dumps:2']
    """
    bodies = _bodies(docstring)
    if not bodies or tokens_of(heading) + tokens_of(bodies[0]) < LEAST_TOKENS:
        return ()
    label = name
    while len(label) > _LONGEST_NAME and "." in label:
        label = label.partition(".")[2]
    first = ContextBlock(f"{heading}\n\n{bodies[0]}", label)
    rest = enumerate(bodies[1:], start=2)
    return (first, *(ContextBlock(f"{name} (continued)\n\n{body}", f"{label}:{i}") for i, body in rest))


def _bodies(docstring: str) -> list[str]:
    pieces: list[str] = []
    for paragraph in BLANK_LINES.split(docstring.strip()):
        fits = tokens_of(paragraph) <= MOST_TOKENS
        pieces += [paragraph] if fits else packed(paragraph.split("\n"), "\n")
    bodies = packed(pieces, "\n\n")
    if len(bodies) > 1 and tokens_of(bodies[-1]) < LEAST_TOKENS:
        bodies[-2:] = ["\n\n".join(bodies[-2:])]
    return bodies


def packed(pieces: Iterable[str], joint: str) -> list[str]:
    """Join neighbours as long as they fit into one block."""
    joined: list[str] = []
    for piece in pieces:
        if joined and tokens_of(joined[-1]) + tokens_of(piece) <= MOST_TOKENS:
            joined[-1] += joint + piece
        elif piece:
            joined.append(piece)
    return joined


def tokens_of(text: str) -> int:
    """Return the tokens of a text, by the planner's estimate."""
    return ContextBlock(text).tokens
