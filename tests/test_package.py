"""The package as a whole: its imports, its public names, and the commands that install extras."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import warmprefix

ROOT = Path(__file__).parent.parent


def in_fresh_python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True)


def test_importing_and_planning_print_nothing() -> None:
    code = "import warmprefix; p = warmprefix.ContextPlanner(); p.commit(p.plan(['a', 'b'])); p.plan([]).render()"
    done = in_fresh_python(code, "-W", "error", "-X", "dev")
    assert (done.stdout, done.stderr) == ("", "")


def test_all_public_names_exist_and_are_documented() -> None:
    for name in warmprefix.__all__:
        assert getattr(warmprefix, name).__doc__ or name == "Placement"


def test_the_package_is_typed() -> None:
    assert (ROOT / "core/warmprefix/py.typed").exists()


# -- the command that installs an extra -----------------------------------------------------------------------------

COMMAND = "from warmprefix import MissingExtraError; print(MissingExtraError('cli', 'typer').command)"


def command_for(folder: Path) -> str:
    """Return the install command from the copy of warmprefix in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(folder)}
    )
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["clone", "a clone", "Ann's clone"])
def test_in_a_clone_an_extra_is_installed_from_the_clone(tmp_path: Path, name: str) -> None:
    clone = tmp_path / name
    shutil.copytree(ROOT / "core", clone / "core", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", clone)
    shown = command_for(clone / "core")
    assert shown.startswith("pip install -e ")
    assert split_by_shell(shown)[3:] == [f"{clone}[cli]"]


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (None, "warmprefix[cli]"),
        ("damaged", "warmprefix[cli]"),
        ({"url": "file:///a%20b/w.whl", "archive_info": {}}, "warmprefix[cli] @ file:///a%20b/w.whl"),
        ({"url": "file:///src", "dir_info": {}}, "warmprefix[cli] @ file:///src"),
        (
            {"url": "https://host/w.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}, "subdirectory": "lib"},
            "warmprefix[cli] @ git+https://host/w.git@c0ffee#subdirectory=lib",
        ),
    ],
)
def test_elsewhere_an_extra_is_installed_from_where_the_package_came(
    tmp_path: Path, origin: Any, requirement: str
) -> None:
    shutil.copytree(ROOT / "core/warmprefix", tmp_path / "warmprefix", ignore=shutil.ignore_patterns("__pycache__"))
    info = tmp_path / "warmprefix-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: warmprefix\nVersion: 1.0\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    assert split_by_shell(command_for(tmp_path)) == ["pip", "install", requirement]


def split_by_shell(command: str) -> list[str]:
    script = f"printf '%s\\n' {command}"
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()


# -- the extras -----------------------------------------------------------------------------------------------------


def test_the_extra_all_includes_every_extra_except_those_that_not_all_can_have() -> None:
    extras = read_extras()
    assert extras_of("all", extras) == set(extras) - {"all", "gpu", "local", "pageindex", "ray"}


ARRAY_LIBRARIES = ("numpy", "scipy", "numba")


def test_the_command_line_needs_no_array_library(tmp_path: Path) -> None:
    requirements = " ".join(read_extras()["cli"])
    assert not any(name in requirements for name in (*ARRAY_LIBRARIES, "openai", "bm25s"))
    log = tmp_path / "log.jsonl"
    log.write_text(f"{json.dumps({'messages': [{'role': 'user', 'content': 'Tides rise and fall. ' * 20}]})}\n" * 2)
    absent = f"import sys; sys.modules.update(dict.fromkeys({ARRAY_LIBRARIES})); "
    run = f"from warmprefix_tools.__main__ import main; sys.argv = ['warmprefix', 'doctor', {str(log)!r}]; main()"
    assert in_fresh_python(absent + run).stdout.startswith("2 requests")


def extras_of(extra: str, extras: dict[str, list[str]]) -> set[str]:
    """Return the extras of warmprefix that an extra brings, directly or not."""
    found: set[str] = set()
    for requirement in extras[extra]:
        if requirement.startswith("warmprefix["):
            for name in requirement.removeprefix("warmprefix[").removesuffix("]").split(","):
                found |= {name} | extras_of(name, extras)
    return found


def read_extras() -> dict[str, list[str]]:
    """Return the extras in pyproject.toml, whose lists of strings look like Python's (3.10 has no `tomllib`)."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text, re.DOTALL | re.MULTILINE)
    _, *parts = re.split(r"^([\w-]+) = ", table, flags=re.MULTILINE)
    return {name: ast.literal_eval(value) for name, value in zip(parts[::2], parts[1::2], strict=True)}
