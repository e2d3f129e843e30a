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

__all__ = ["LEAST_TOKENS", "MOST_TOKENS", "LibraryEntry", "read_standard_library", "split_text", "tokens_of"]

LEAST_TOKENS = 60
"""Least tokens of a block; a shorter docstring makes none."""

MOST_TOKENS = 270
"""Most tokens of a block, before a short remainder and a heading are added."""

_BLANK_LINES = re.compile(r"\n\s*\n")
_ENDS = [
    (re.compile(end), joint)
    for end, joint in ((r"\n", "\n"), (r"(?<=[.!?])\s+", " "), (r"(?<=[。！？；।؟])(?=.)", ""), (r"\s+", " "))
]
"""Ends of lines, sentences and words, and what joins neighbours again."""
_LONGEST_NAME = 36  # leaves room for a part's number in a label

_Kind = Literal["module", "class", "function"]

_SKIPPED = {"ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests", "turtledemo"}
_DOCUMENTED_IN = {"_pydatetime": "datetime", "_pydecimal": "decimal", "_pyio": "io"}
_LEAST_ENTRIES = 100


@dataclass(frozen=True, slots=True)
class LibraryEntry:
    """A documented module, class or function, and the context blocks that its docstring makes."""

    name: str
    """Qualified: `json.dumps`, `json.encoder.JSONEncoder.encode`."""
    module: str
    kind: _Kind
    parameters: tuple[tuple[str, bool], ...]
    """Those that a caller can name, neither `self` nor private nor starred, with True for an optional one."""
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
    parameters: tuple[tuple[str, bool], ...] = ()
    if isinstance(node, ast.Module | ast.ClassDef):
        kind = "module" if isinstance(node, ast.Module) else "class"
        heading = f"{kind} {name}"
    else:
        parameters = tuple(_parameters(node.args))
        heading = f"{name}({ast.unparse(node.args)})"
    blocks = _passages(name, heading, docstring)
    if blocks:
        yield LibraryEntry(name, module, kind, parameters, docstring, blocks)
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name[0] != "_":
                yield from _entries(child, f"{name}.{child.name}", module)


def _parameters(arguments: ast.arguments) -> Iterator[tuple[str, bool]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    named = [(argument.arg, i >= required) for i, argument in enumerate(positional)]
    named += [(argument.arg, value is not None) for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults)]  # noqa: B905
    yield from ((name, optional) for name, optional in named if name not in ("self", "cls") and name[0] != "_")


def _passages(name: str, heading: str, docstring: str) -> tuple[ContextBlock, ...]:
    """Return a docstring as blocks; none for too short a text.

    Each block can be found and read by itself: the first begins with the heading, the others with the name. The ids
    are short enough to be labels.
    """
    bodies = split_text(docstring.strip())
    if not bodies or tokens_of(heading) + tokens_of(bodies[0]) < LEAST_TOKENS:
        return ()
    label = name
    while len(label) > _LONGEST_NAME and "." in label:
        label = label.partition(".")[2]
    first = ContextBlock(f"{heading}\n\n{bodies[0]}", label)
    rest = enumerate(bodies[1:], start=2)
    return (first, *(ContextBlock(f"{name} (continued)\n\n{body}", f"{label}:{i}") for i, body in rest))


def split_text(text: str) -> list[str]:
    """Return a text in pieces for blocks, which end where paragraphs end if these are short enough."""
    paragraphs = [paragraph.strip("\n") for paragraph in _BLANK_LINES.split(text) if paragraph.strip()]
    found = _packed([piece for paragraph in paragraphs for piece in _split(paragraph)], "\n\n")
    if len(found) > 1 and tokens_of(found[-1]) < LEAST_TOKENS:
        found[-2:] = ["\n\n".join(found[-2:])]
    return found


def _split(text: str) -> list[str]:
    """Return a text, or parts of one that is too long: of lines, of sentences, of words, of characters."""
    if tokens_of(text) <= MOST_TOKENS:
        return [text]
    for end, joint in _ENDS:
        if len(parts := end.split(text)) > 1:
            return _packed([piece for part in parts for piece in _split(part)], joint)
    half = len(text) // 2
    return [*_split(text[:half]), *_split(text[half:])]


def _packed(pieces: Iterable[str], joint: str) -> list[str]:
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
