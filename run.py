#!/usr/bin/env python3
"""Set up and run warmprefix from a clone, with nothing but Python 3.10 or newer and pip.

    python3 run.py demo [options of `warmprefix demo`]    see the saving on real text
    python3 run.py test [options of pytest]               lint, types, import rules and all tests

Each makes its own virtual environment beside this file the first time, and again when pyproject.toml
changes or the clone moves.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
REQUIREMENTS = {"demo": ["-e", ".[cli]"], "test": ["-e", ".[cli]", "--group", "dev"]}

# What would lead pip, or the virtual environment's Python, elsewhere. Indexes, proxies and the like stay.
PYTHON = {"PYTHONHOME", "PYTHONPATH"}
PIP = {"PIP_PREFIX", "PIP_PYTHON", "PIP_REQUIRE_VIRTUALENV", "PIP_ROOT", "PIP_TARGET"}
ENVIRONMENT = {**{name: value for name, value in os.environ.items() if name not in PYTHON | PIP}, "PIP_USER": "0"}


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    if not arguments or arguments[0] not in REQUIREMENTS:
        print(__doc__)
        return 2
    if sys.version_info < (3, 10):  # noqa: UP036 - this file is what tells the user of an older Python
        print(f"warmprefix needs Python 3.10 or newer; this is {sys.version.split()[0]}.", file=sys.stderr)
        return 2
    command, *options = arguments
    python = environment(command)
    if command == "demo":
        return run(python.with_name("warmprefix"), "demo", *options, cwd=None)  # a --json FILE is the user's
    return test(python, options)


def test(python: Path, options: list[str]) -> int:
    """Every check, though an earlier one failed, so that one run shows all there is to mend."""
    checks: list[tuple[str, list[str | Path]]] = [
        ("ruff check", [python, "-m", "ruff", "check", "--output-format=concise", "."]),
        ("ruff format", [python, "-m", "ruff", "format", "--check", "--quiet", "."]),
        ("import rules", [python.with_name("lint-imports"), "--no-cache"]),
        ("mypy", [python, "-m", "mypy"]),
        ("pyright", [python, "-m", "basedpyright", "--level", "error", "--pythonpath", python]),
        ("pytest", [python, "-m", "pytest", *options]),
    ]
    failed: list[str] = []
    for name, check in checks:
        print(f"\n== {name}", flush=True)
        if run(*check) != 0:
            failed.append(name)
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall checks passed")
    return 1 if failed else 0


def environment(command: str) -> Path:
    """The Python of an up-to-date virtual environment for `command`."""
    directory = ROOT / f".venv-{command}"
    python = directory / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = directory / "installed"
    origin = f"{sys.version} {sys.base_prefix} {ROOT}"  # a clone that was moved has to be installed again
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + origin.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"Setting up {directory.name} (once) ...", flush=True)
    try:
        create(directory, python)
        install(python, "--upgrade", "pip>=25.1")  # the first that knows --group
        install(python, *REQUIREMENTS[command])
        stamp.write_text(wanted)
    except OSError as error:
        raise SystemExit(f"Cannot set up {directory}: {error.strerror}.") from error
    return python


def create(directory: Path, python: Path) -> None:
    """Make an empty virtual environment that has pip."""
    shutil.rmtree(directory, ignore_errors=True)
    symlinks = os.name != "nt"  # a copied Python may not find its libraries
    try:
        venv.create(directory, symlinks=symlinks, with_pip=True)
    except subprocess.CalledProcessError:  # Debian ships venv without ensurepip; whoever runs this has pip
        venv.create(directory, symlinks=symlinks, clear=True)
        where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        packages = subprocess.run(where, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout.strip()
        install(Path(sys.executable), "--target", packages, "pip")


def install(python: Path, *requirements: str) -> None:
    """Let this Python's pip install something, or end here."""
    if run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements) != 0:
        raise SystemExit(f"pip could not install {' '.join(requirements)}; see above. Is a package index in reach?")


def run(*command: str | Path, cwd: Path | None = ROOT) -> int:
    """Run a command and return its exit status."""
    return subprocess.run([str(part) for part in command], cwd=cwd, env=ENVIRONMENT, check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
