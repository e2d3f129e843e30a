#!/usr/bin/env python3
"""Set up and run warmprefix from a clone, with nothing but Python 3.10 or newer and pip.

    python3 run.py demo [options of `warmprefix demo`]    see the saving on real text
    python3 run.py test [options of pytest]               lint, types, import rules and all tests

Each makes its own virtual environment beside this file the first time, and again when pyproject.toml changes.
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
        return run(python, "-m", "warmprefix", "demo", *options)
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
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + sys.version.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"Setting up {directory.name} (once) ...", flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    try:
        venv.create(directory, with_pip=True)
        pip: list[str | Path] = [python, "-m", "pip"]
    except (subprocess.CalledProcessError, ImportError):  # Debian ships venv without ensurepip
        venv.create(directory, with_pip=False, clear=True)
        pip = [sys.executable, "-m", "pip", "--python", python]
    for requirements in (["--upgrade", "pip>=25.1"], REQUIREMENTS[command]):
        if run(*pip, "install", "--quiet", "--disable-pip-version-check", *requirements) != 0:
            raise SystemExit(f"pip could not install {' '.join(requirements)}; see above.")
        pip = [python, "-m", "pip"]
    stamp.write_text(wanted)
    return python


def run(*command: str | Path) -> int:
    """Run a command here and return its exit status."""
    return subprocess.run([str(part) for part in command], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
