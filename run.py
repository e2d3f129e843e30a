#!/usr/bin/env python3
"""Set up and run warmprefix from a clone. Needs Python 3.10 or newer, and pip.

    python3 run.py demo [options of `warmprefix demo`]         show the saving on real text
    python3 run.py test [environment ...] [options of pytest]  run lint, type checks, import rules and all tests

Each command creates its own virtual environments next to this file. It creates them again after pyproject.toml has
changed or the clone has moved. The tests use one environment for the core, one for the kernels, which need torch, and
two for each framework: its newest and its oldest supported version. `all` installs nothing: it checks that pip finds
versions which satisfy all extras together. To use only some environments, name them:
{environments}.
If WARMPREFIX_VLLM names a folder, some tests also run against a real vLLM on the CPU, and install it there if needed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
FRAMEWORKS = ("chain_of_agents", "langchain", "llamaindex", "mem0")
VERSIONS = ("newest", "oldest")
REQUIREMENTS = {
    "demo": ["-e", ".[demo]"],
    "core": ["-e", ".[batch,demo,events,otel,redis]", "--group", "dev"],
    "kernels": ["-e", ".[gpu]", "--group", "kernels"],
    **{
        f"{framework}-{version}": ["-e", f".[demo,{framework}]", "--group", f"{framework}-{version}"]
        for framework in FRAMEWORKS
        for version in VERSIONS
    },
    "langchain-outside": ["-e", ".[langchain]", "--group", "langchain-outside"],
    "all": ["--dry-run", "--ignore-installed", "-e", ".[all]"],
}
DEMO_DOWNLOAD = "10 MB"
"""Wheels of the extra `demo`, and pip's own. Installed, with pip, they take about 90 MB."""
TESTED = [name for name in REQUIREMENTS if name != "demo"]

# These would point pip, or the environment's Python, to other places. Settings of indexes and proxies stay.
PYTHON = {"PYTHONHOME", "PYTHONPATH"}
PIP = {"PIP_PREFIX", "PIP_PYTHON", "PIP_REQUIRE_VIRTUALENV", "PIP_ROOT", "PIP_TARGET"}
ENVIRONMENT = {**{name: value for name, value in os.environ.items() if name not in PYTHON | PIP}, "PIP_USER": "0"}


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    if not arguments or arguments[0] not in ("demo", "test"):
        print((__doc__ or "").format(environments=", ".join(TESTED)))
        return 2
    if sys.version_info < (3, 10):  # noqa: UP036 - an older Python can still run this file
        print(f"warmprefix needs Python 3.10 or newer; this is {sys.version.split()[0]}.", file=sys.stderr)
        return 2
    command, *options = arguments
    if command == "demo":
        return run(environment("demo").with_name("warmprefix"), "demo", *options, cwd=None)  # --json FILE is the user's
    named = list(takewhile(TESTED.__contains__, options))
    return test(named or TESTED, options[len(named) :])


def test(names: list[str], options: list[str]) -> int:
    """Run every check, even after one failed, so that one run shows all failures; return the exit status.

    While the checks of one environment run, the next environment is set up. That is mostly waiting for downloads.
    """
    failed: list[str] = []
    with ThreadPoolExecutor(1) as ahead:
        ready = {name: ahead.submit(environment, name) for name in dict.fromkeys(["core", *names])}
        try:
            for name in names:
                for needed in ("core", name):
                    ready[needed].result()
                for check, command in checks(name, options):
                    print(f"\n== {check}", flush=True)
                    if run(*command) != 0:
                        failed.append(check)
        finally:
            ahead.shutdown(wait=False, cancel_futures=True)
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall checks passed")
    return 1 if failed else 0


def checks(name: str, options: list[str]) -> Iterator[tuple[str, list[str | Path]]]:
    """Yield the heading and the command of each check in an environment."""
    core = environment("core")  # has the tools
    if name == "core":
        yield "ruff check", [core, "-m", "ruff", "check", "--output-format=concise", "."]
        yield "ruff format", [core, "-m", "ruff", "format", "--check", "--quiet", "."]
        yield "import rules", [core.with_name("lint-imports"), "--no-cache"]
        yield "mypy", [core, "-m", "mypy"]
        yield "pyright", [core, "-m", "basedpyright", "--level", "error", "--pythonpath", core]
        yield "pytest", [core, "-m", "pytest", *options]
        return
    if name == "all":  # pip has checked it
        return
    python = environment(name)
    if name == "langchain-outside":
        yield "LangChain's own agent tests", [python, "tests/outside/langchain_agent_suite.py"]
        return
    if name == "kernels":
        folders, scripts = [ROOT / "kernels", ROOT / "tests/kernels"], [ROOT / "benchmarks/kernels.py"]
    else:
        framework = name.partition("-")[0]
        folders = [ROOT / "integrations" / framework, ROOT / "tests/integrations" / framework]
        scripts = [*ROOT.glob(f"examples/{framework}_*.py"), *ROOT.glob(f"tests/outside/{framework}_*.py")]
        if name.endswith("newest") and os.environ.get("WARMPREFIX_VLLM"):
            folders += ROOT.glob(f"tests/engine/test_{framework}_chat.py")
    if not name.endswith("oldest"):
        sources = sorted([file for folder in folders for file in folder.rglob("*.py")] + scripts)
        yield f"mypy, {name}", [core, "-m", "mypy", "--python-executable", python, *sources]
        pyright: list[str | Path] = [core, "-m", "basedpyright", "--level", "error", "--pythonpath", python]
        yield f"pyright, {name}", [*pyright, *sources]
    yield f"pytest, {name}", [python, "-m", "pytest", *folders, *options]


def environment(name: str) -> Path:
    """Return the Python of a virtual environment, after bringing the environment up to date."""
    directory = ROOT / f".venv-{name}"
    python = directory / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = directory / "installed"
    origin = f"{sys.version} {sys.base_prefix} {ROOT}"  # a clone that was moved has to be installed again
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + origin.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    size = f": downloads about {DEMO_DOWNLOAD}" if name == "demo" else ""
    print(f"Setting up {directory.name} (once){size} ...", flush=True)
    try:
        create(directory, python)
        install(python, "--quiet", "--upgrade", "pip>=25.1")  # the first that knows --group
        install(python, *([] if name == "demo" else ["--quiet"]), *REQUIREMENTS[name])
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
    except subprocess.CalledProcessError:  # Debian ships venv without ensurepip; copy the pip that runs this
        venv.create(directory, symlinks=symlinks, clear=True)
        where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        packages = subprocess.run(where, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout.strip()
        install(Path(sys.executable), "--quiet", "--target", packages, "pip")


def install(python: Path, *requirements: str) -> None:
    """Install requirements with this Python's pip; exit if pip fails."""
    if run(python, "-m", "pip", "install", "--disable-pip-version-check", *requirements) != 0:
        raise SystemExit(f"pip could not install {' '.join(requirements)}; see above. Is a package index reachable?")


def run(*command: str | Path, cwd: Path | None = ROOT) -> int:
    """Run a command and return its exit status."""
    return subprocess.run([str(part) for part in command], cwd=cwd, env=ENVIRONMENT, check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
