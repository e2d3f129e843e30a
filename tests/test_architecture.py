"""The rules of the house: docs/architecture.md agrees with the code, and what is written stays small and used."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = {
    path.name: path
    for folder in ("core", "kernels", "integrations/*", "tools")
    for path in sorted(ROOT.glob(f"{folder}/warmprefix*"))
    if (path / "__init__.py").exists()
}

MAX_MODULE_LINES = 500
MAX_CLASS_LINES = 400
MEDIAN_MODULE_LINES = (120, 250)
UNIQUE_MODULE_NAMES = {"base", "command", "errors", "options", "table", "wording"}


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_picture_has_one_node_for_each_package() -> None:
    assert read_picture()[0] == {node_of(package) for package in PACKAGES}


def test_each_import_between_packages_is_an_arrow() -> None:
    _, arrows = read_picture()
    imports = {(node_of(a), node_of(b)) for a, b in imports_between_packages()}
    assert imports <= arrows
    used = {(a, b) for a, b in arrows if (a, b) in imports}
    assert {a for a, _ in arrows} == {a for a, _ in used}, "a package has arrows that no import follows"


def test_the_arrows_have_no_circle() -> None:
    _, arrows = read_picture()
    left = {node for arrow in arrows for node in arrow}
    while left:
        ends = {node for node in left if not any(a == node and b in left for a, b in arrows)}
        assert ends, f"a circle of imports among {', '.join(sorted(left))}"
        left -= ends


def test_the_table_lists_each_room_of_the_core() -> None:
    _, _, rest = TEXT.partition("## The rooms of the core")
    listed = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", rest, re.MULTILINE)
    rooms = {path.stem for path in PACKAGES["warmprefix"].iterdir() if path.suffix == ".py" or path.is_dir()}
    assert set(listed) == rooms - {"__init__", "__pycache__"}
    level = {room: number for number, layer in enumerate(read_layers()) for room in layer}
    assert listed == sorted(listed, key=level.__getitem__), "the rooms stand in the order of the layers"


def test_each_package_is_listed() -> None:
    listed = set(re.findall(r"^\| `(?:core|kernels|tools)/(\w+)/` \|", TEXT, re.MULTILINE))
    assert listed == {name for name, path in PACKAGES.items() if "integrations" not in path.parts}


def test_each_module_and_name_in_the_walks_exists() -> None:
    _, _, walks = TEXT.partition("## The way of a request")
    modules_named = set(re.findall(r"`(\w+(?:/\w+)+)`", walks))
    assert len(modules_named) > 10
    places = [*PACKAGES.values(), *(ROOT / "core").glob("warmprefix")]
    found = {
        name
        for name in modules_named
        for first, _, rest in [name.partition("/")]
        for place in [*places, ROOT / "core" / f"warmprefix_{first}"]
        for part in [rest if place.name == f"warmprefix_{first}" else name]
        if (place / f"{part}.py").exists() or (place / part).is_dir()
    }
    assert found == modules_named
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
    """Private base classes count as part of the class."""

    def lines_of(name: str) -> int:
        node = classes()[name]
        bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
        inherited = sum(lines_of(base) for base in bases if base.startswith("_") and base in classes())
        return (node.end_lineno or 0) - node.lineno + 1 + inherited

    lengths = {name: lines_of(name) for name in classes()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_CLASS_LINES} == {}


def test_the_median_module_is_neither_small_nor_large() -> None:
    """Of those with more than five lines, which are no lists of names."""
    for package in PACKAGES:
        files = [path for path in modules().values() if PACKAGES[package] in path.parents]
        lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in files]
        assert statistics.median([count for count in lines if count > 5]) <= MEDIAN_MODULE_LINES[1], package
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in modules().values()]
    assert statistics.median([count for count in lines if count > 5]) >= MEDIAN_MODULE_LINES[0]


def test_no_base_class_has_one_subclass() -> None:
    subclasses: dict[str, set[str]] = defaultdict(set)
    for node in classes().values():
        for base in node.bases:
            subclasses[ast.unparse(base).partition("[")[0].rpartition(".")[2]].add(node.name)
    private = {name for name, node in classes().items() if name.startswith("_") and not is_protocol(node)}
    assert {name: subclasses[name] for name in private if len(subclasses[name]) == 1} == {}


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
    assert loaded - set(sys.stdlib_module_names) == {"warmprefix"}


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


@cache
def classes() -> dict[str, ast.ClassDef]:
    return {
        node.name: node
        for path in modules().values()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef)
    }


def is_protocol(node: ast.ClassDef) -> bool:
    return any("Protocol" in ast.unparse(base) for base in node.bases)


def imports_between_packages() -> Iterator[tuple[str, str]]:
    """Yield the packages of each import of one of ours by another, type-checking imports included."""
    for importer, path in modules().items():
        for node in ast.walk(parse(path)):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in named:
                first, package = importer.partition(".")[0], name.partition(".")[0]
                if package in PACKAGES and package != first:
                    yield first, package


def read_layers() -> list[set[str]]:
    """Return the core's layers in pyproject.toml, the highest first. Python 3.10 has no `tomllib`."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (layers,) = re.findall(r'containers = \["warmprefix"\]\nlayers = (\[.*?^\])', text, re.DOTALL | re.MULTILINE)
    return [set(re.split(r"\s*\|\s*", layer)) for layer in ast.literal_eval(layers)]


# -- the picture ------------------------------------------------------------------------------------------------------


def node_of(package: str) -> str:
    """Return the package's node: all frameworks share one, but the tools import the gateway and Ray."""
    name = package.removeprefix("warmprefix_")
    if "integrations" in PACKAGES[package].parts and name not in ("gateway", "ray"):
        return "frameworks"
    return "core" if package == "warmprefix" else name


def read_picture() -> tuple[set[str], set[tuple[str, str]]]:
    """Return the nodes of the picture, and its arrows; one from or to a box is one from or to each node in it."""
    (picture,) = re.findall(r"```mermaid\nflowchart \w+\n(.*?)```", TEXT, re.DOTALL)
    members: dict[str, set[str]] = defaultdict(set)
    nodes: set[str] = set()
    pairs: list[tuple[str, str]] = []
    box = ""
    for line in map(str.strip, picture.splitlines()):
        if opened := re.fullmatch(r"subgraph (\w+)(?: \[.*\])?", line):
            box = opened[1]
        elif line == "end":
            box = ""
        elif arrow := re.fullmatch(r"([\w &]+) --> ([\w &]+)", line):
            pairs += [(a.strip(), b.strip()) for a in arrow[1].split("&") for b in arrow[2].split("&")]
        elif node := re.fullmatch(r"(\w+)(?:\[.*\])?", line):
            nodes.add(node[1])
            members[box].add(node[1])
        else:
            assert line.startswith("direction ") or not line, f"unknown line in the picture: {line}"
    arrows = {(a, b) for start, end in pairs for a in members.get(start, {start}) for b in members.get(end, {end})}
    assert {node for arrow in arrows for node in arrow} <= nodes
    return nodes, arrows
