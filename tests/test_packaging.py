"""The distributions: what they contain, and a wheel in a fresh environment. No package index is needed."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import warmprefix

ROOT = Path(__file__).parents[1]
VERSION = warmprefix.__version__
WITHOUT_TOOLS = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=WITHOUT_TOOLS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def packages() -> list[Path]:
    """Return the folder of each import package."""
    folders = [*ROOT.glob("core/*"), *ROOT.glob("tools/*"), *ROOT.glob("kernels/*"), *ROOT.glob("integrations/*/*")]
    return [folder for folder in folders if (folder / "__init__.py").exists()]


def files_of(folder: Path) -> set[str]:
    """Return the files of a package as paths from the folder around it."""
    return {
        path.relative_to(folder.parent).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


def test_twine_accepts_both_and_renders_the_readme(dist: Path) -> None:
    files = sorted(dist.iterdir())
    assert [file.name for file in files] == [f"warmprefix-{VERSION}-py3-none-any.whl", f"warmprefix-{VERSION}.tar.gz"]
    shown = run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=dist)
    assert shown.count("PASSED") == 2


def test_the_wheel_has_each_file_of_each_package_and_nothing_else(wheel: Path) -> None:
    info = f"warmprefix-{VERSION}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"{info}METADATA").decode()
    expected = set().union(*map(files_of, packages()))
    assert {name for name in names if not name.startswith(info)} == expected
    assert {f"{folder.name}/py.typed" for folder in packages()} <= names
    assert {suffix for suffix in (".css", ".html", ".lua") if any(name.endswith(suffix) for name in names)} == {
        ".css",
        ".html",
        ".lua",
    }
    assert f"{info}licenses/LICENSE" in names
    for label in ("Changelog", "Documentation", "Homepage", "Issues", "Source"):
        assert f"\nProject-URL: {label}, https://" in metadata


def test_the_source_distribution_has_all_that_the_tests_need(dist: Path, tmp_path: Path) -> None:
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    if (ROOT / ".git").exists():
        tracked = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
        assert {name for name in tracked if name and not name.startswith(".ci/") and (ROOT / name).exists()} <= names
    folder = tmp_path / f"warmprefix-{VERSION}"
    tests = ["tests/test_architecture.py", "tests/test_project_files.py", "tests/ordering"]
    assert " passed" in run(sys.executable, "-m", "pytest", "-q", *tests, cwd=folder)


def test_the_wheel_works_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "fresh", with_pip=True, symlinks=os.name != "nt")
    scripts = tmp_path / "fresh" / ("Scripts" if os.name == "nt" else "bin")
    run(scripts / "python", "-m", "pip", "install", "--no-index", "--no-deps", wheel, cwd=tmp_path)
    assert run(scripts / "warmprefix", "--version", cwd=tmp_path) == f"warmprefix {VERSION}\n"
    shown = run(scripts / "warmprefix", "--help", cwd=tmp_path)
    assert all(command in shown for command in ("demo", "doctor", "emulate", "replay", "serve"))
    code = "import warmprefix; print(warmprefix.ContextPlanner().plan(['a', 'b']).render(), warmprefix.__file__)"
    rendered = run(scripts / "python", "-W", "error", "-c", code, cwd=tmp_path)
    assert "fresh" in rendered.splitlines()[-1]
