"""The rules of the house: docs/architecture.md agrees with the code, and modules and classes stay small and unique."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
CORE, TOOLS, KERNELS = "warmprefix", "warmprefix_tools", "warmprefix_kernels"
PACKAGES = {
    path.name: path
    for path in [
        *(ROOT / "core").iterdir(),
        *(ROOT / "tools").iterdir(),
        *(ROOT / "kernels").iterdir(),
        *(ROOT / "integrations").glob("*/*"),
    ]
    if (path / "__init__.py").exists()
}

MAX_MODULE_LINES = 500
MAX_CLASS_LINES = 400
UNIQUE_MODULE_NAMES = {"base", "command", "errors", "options", "table", "wording"}


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_picture_has_one_node_for_each_room() -> None:
    nodes, _ = read_picture()
    assert nodes == {node_of(room) for room in rooms()}


def test_each_import_follows_the_arrows() -> None:
    reachable = reachable_nodes()
    against = {
        f"{importer} -> {imported}"
        for importer, imported in imports_between_rooms()
        if not {importer, imported} & {CORE, TOOLS}  # their `__init__.py` are no rooms
        and node_of(room_of(imported)) not in reachable[node_of(room_of(importer))]
    }
    assert against == set()


def test_the_arrows_point_down_the_layers() -> None:
    """Import-linter checks the layers; the picture must not promise more than they allow."""
    level = {room: number for number, layer in enumerate(read_layers()) for room in layer}
    reachable = reachable_nodes()
    upwards = {(start, end) for start in level for end in reachable[start] & set(level) if level[start] >= level[end]}
    assert upwards == set()


def test_the_table_lists_each_room_of_the_core() -> None:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("## The rooms of the core")
    listed = set(re.findall(r"^\| `(\w+)(?:/|\.py)` \|", rest, re.MULTILINE))
    assert listed == {room.partition(".")[2] for room in rooms() if room.startswith(f"{CORE}.")}


def test_each_folder_of_the_tools_is_listed() -> None:
    listed = set(re.findall(r"`tools/(\w+)/`", PAGE.read_text(encoding="utf-8")))
    assert listed == {path.parent.name for path in PACKAGES[TOOLS].glob("*/__init__.py")}


def test_each_integration_is_listed() -> None:
    listed = set(re.findall(r"`integrations/(\w+)/`", PAGE.read_text(encoding="utf-8")))
    assert listed == {path.parent.name for path in (ROOT / "integrations").glob("*/warmprefix_*")}


def test_each_module_in_the_walks_exists() -> None:
    _, _, walks = PAGE.read_text(encoding="utf-8").partition("## The way of a request")
    names = set(re.findall(r"`(\w+(?:/\w+)+)`", walks))
    assert len(names) > 20
    core = PACKAGES[CORE]
    missing = {name for name in names if not (core / f"{name}.py").exists() and not (core / name).is_dir()}
    assert missing == set()


def test_each_name_of_code_in_the_walks_exists() -> None:
    _, _, walks = PAGE.read_text(encoding="utf-8").partition("## The way of a request")
    names = {name for dotted in re.findall(r"`([A-Za-z_][\w.]*)`", walks) for name in dotted.split(".")}
    defined = {
        name
        for path in modules().values()
        for name in re.findall(r"(?:def|class) (\w+)", path.read_text(encoding="utf-8"))
    }
    assert names - defined == set()


# -- the house rules --------------------------------------------------------------------------------------------------


def test_no_module_is_too_long() -> None:
    lengths = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in modules().items()}
    assert {module: lines for module, lines in lengths.items() if lines > MAX_MODULE_LINES} == {}


def test_no_class_is_too_long() -> None:
    lengths = {
        f"{module}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module, path in modules().items()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_CLASS_LINES} == {}


def test_general_module_names_are_used_once() -> None:
    names = Counter(module.rpartition(".")[2] for module in modules())
    assert {name: names[name] for name in UNIQUE_MODULE_NAMES if names[name] > 1} == {}


def test_each_class_name_is_defined_once() -> None:
    names = Counter(
        node.name for path in modules().values() for node in parse(path).body if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_importing_the_core_imports_only_the_standard_library() -> None:
    code = "import sys; before = set(sys.modules); import warmprefix; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded - set(sys.stdlib_module_names) == {CORE}


# -- the code ---------------------------------------------------------------------------------------------------------


@cache
def modules() -> dict[str, Path]:
    """Return the file of each module, by the module's dotted name."""
    found: dict[str, Path] = {}
    for package in PACKAGES.values():
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room_of(module: str) -> str:
    """Return the folder or module of the core or the tools that holds a module; elsewhere its package."""
    first, _, rest = module.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if rest and first in (CORE, TOOLS) else first


def rooms() -> set[str]:
    """Return all rooms; the core's `__init__.py` lists the public names of all, and that of the tools is empty."""
    return {room_of(module) for module in modules()} - {CORE, TOOLS}


def imports_between_rooms() -> Iterator[tuple[str, str]]:
    """Yield each import of one of our modules by a module of another room, type-checking imports included."""
    for importer, path in modules().items():
        for node in ast.walk(parse(path)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                members = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [member if member in modules() else node.module for member in members]
            for imported in names:
                if imported in modules() and room_of(imported) != room_of(importer):
                    yield importer, imported


def read_layers() -> list[set[str]]:
    """Return the core's layers in pyproject.toml, the highest first. Python 3.10 has no `tomllib`."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (layers,) = re.findall(r"^layers = (\[.*?^\])", text, re.DOTALL | re.MULTILINE)
    return [set(re.split(r"\s*\|\s*", layer)) for layer in ast.literal_eval(layers)]


# -- the picture ------------------------------------------------------------------------------------------------------


def node_of(room: str) -> str:
    """Return the name of a room's node in the picture."""
    package, _, name = room.partition(".")
    prefix = {CORE: "", TOOLS: "tools_"}.get(package)
    if prefix is None:
        return package.removeprefix("warmprefix_")
    return f"{prefix}{name.strip('_')}"


@cache
def read_picture() -> tuple[set[str], dict[str, set[str]]]:
    """Return the nodes of the picture, and the direct arrows between nodes.

    An arrow from or to a box is an arrow from or to each node in it.
    """
    (picture,) = re.findall(r"```mermaid\nflowchart \w+\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    members: dict[str, set[str]] = defaultdict(set)
    arrows: list[tuple[str, str]] = []
    nodes: set[str] = set()
    open_boxes: list[str] = []
    for line in map(str.strip, picture.splitlines()):
        if box := re.fullmatch(r"subgraph (\w+)(?: \[.*\])?", line):
            open_boxes.append(box[1])
        elif line == "end":
            open_boxes.pop()
        elif arrow := re.fullmatch(r"([\w &]+) --> ([\w &]+)", line):
            arrows += [(a.strip(), b.strip()) for a in arrow[1].split("&") for b in arrow[2].split("&")]
        elif node := re.fullmatch(r"(\w+)(?:\[.*\])?", line):
            nodes.add(node[1])
            for name in open_boxes:
                members[name].add(node[1])
        else:
            assert line.startswith(("%%", "direction ")) or not line, f"unknown line in the picture: {line}"
    direct: dict[str, set[str]] = defaultdict(set)
    for start, end in arrows:
        for each in members.get(start, {start}):
            direct[each] |= members.get(end, {end})
    assert set(direct).union(*direct.values()) <= nodes
    return nodes, direct


@cache
def reachable_nodes() -> dict[str, set[str]]:
    """Return the nodes that a path of arrows leads to, for each node."""
    nodes, direct = read_picture()
    found: dict[str, set[str]] = {}
    for node in nodes:
        reached: set[str] = set()
        waiting = list(direct.get(node, ()))
        while waiting:
            current = waiting.pop()
            if current not in reached:
                reached.add(current)
                waiting += direct.get(current, ())
        assert node not in reached, f"the arrows of the picture lead from {node} back to it"
        found[node] = reached
    return found
