"""A plugin of pytest that makes every import of a sibling of the core raise: `-p tests.without_siblings`.

As a script this prints the tests that run with it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.abc import MetaPathFinder
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIBLINGS = {path.name for path in (ROOT / "core").iterdir() if path.is_dir() and path.name.startswith("warmprefix_")}
ROOMS = {path.stem for path in (ROOT / "core/warmprefix").iterdir()}


class WithoutSiblings(MetaPathFinder):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.partition(".")[0] in SIBLINGS:
            raise AssertionError(f"the core or its tests imported {fullname}")


def pytest_configure() -> None:
    sys.meta_path.insert(0, WithoutSiblings())


def own_names(core: Iterable[str], siblings: Iterable[str]) -> list[str]:
    """Return the names of policies or planners of the core, and those of its siblings if they can be imported."""
    return [*core, *([] if any(isinstance(finder, WithoutSiblings) for finder in sys.meta_path) else siblings)]


def core_tests() -> list[str]:
    """Return the test files of the core's rooms, without those that need a sibling or the tools."""
    outside = re.compile(rf"\b({'|'.join([*sorted(SIBLINGS), 'warmprefix_tools', 'redis_servers'])})\b")
    folders = [path for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name in ROOMS]
    files = [path for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    files += [path for path in sorted((ROOT / "tests").glob("test_*.py")) if path.stem.removeprefix("test_") in ROOMS]
    return [path.relative_to(ROOT).as_posix() for path in files if not outside.search(_with_fixtures(path))]


def _with_fixtures(path: Path) -> str:
    """Return the text of a test file and of the conftest files that apply to it, below the one of all tests."""
    folders = [folder for folder in path.parents if (ROOT / "tests") in folder.parents]
    conftests = [folder / "conftest.py" for folder in folders if (folder / "conftest.py").exists()]
    return "\n".join(each.read_text(encoding="utf-8") for each in (path, *conftests))


if __name__ == "__main__":
    print(*core_tests())  # noqa: T201
