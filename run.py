#!/usr/bin/env python3
"""Set up and run warmprefix from a clone, with nothing but Python 3.10 or newer and pip.

    python3 run.py demo [options of `warmprefix demo`]         see the saving on real text
    python3 run.py test [environment ...] [options of pytest]  lint, types, import rules and all tests

Each makes its own virtual environments beside this file the first time, and again when pyproject.toml
changes or the clone moves. Tests have one for the core, one for the kernels, which take torch, and two for
each framework, since the frameworks' requirements contradict each other. Name some to run only these:
{environments}.
If WARMPREFIX_VLLM names a folder, a real vLLM on the CPU is asked too; it is installed there if need be.
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
    "demo": ["-e", ".[cli]"],
    "core": ["-e", ".[cli,events,otel,redis]", "--group", "dev"],
    "kernels": ["-e", ".[gpu]", "--group", "kernels"],
    **{
        f"{framework}-{version}": ["-e", f".[cli,{framework}]", "--group", f"{framework}-{version}"]
        for framework in FRAMEWORKS
        for version in VERSIONS
    },
    "langchain-outside": ["-e", ".[langchain]", "--group", "langchain-outside"],
}
TESTED = [name for name in REQUIREMENTS if name != "demo"]

# What would lead pip, or the virtual environment's Python, elsewhere. Indexes, proxies and the like stay.
PYTHON = {"PYTHONHOME", "PYTHONPATH"}
PIP = {"PIP_PREFIX", "PIP_PYTHON", "PIP_REQUIRE_VIRTUALENV", "PIP_ROOT", "PIP_TARGET"}
ENVIRONMENT = {**{name: value for name, value in os.environ.items() if name not in PYTHON | PIP}, "PIP_USER": "0"}


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    if not arguments or arguments[0] not in ("demo", "test"):
        print((__doc__ or "").format(environments=", ".join(TESTED)))
        return 2
    if sys.version_info < (3, 10):  # noqa: UP036 - this file is what tells the user of an older Python
        print(f"warmprefix needs Python 3.10 or newer; this is {sys.version.split()[0]}.", file=sys.stderr)
        return 2
    command, *options = arguments
    if command == "demo":
        return run(environment("demo").with_name("warmprefix"), "demo", *options, cwd=None)  # --json FILE is the user's
    named = list(takewhile(TESTED.__contains__, options))
    return test(named or TESTED, options[len(named) :])


def test(names: list[str], options: list[str]) -> int:
    """Every check, though an earlier one failed, so that one run shows all there is to mend.

    While one environment's checks run, the next ones are set up: that is mostly waiting for downloads.
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
    """What is run in an environment, under which heading."""
    core = environment("core")  # has the tools
    if name == "core":
        yield "ruff check", [core, "-m", "ruff", "check", "--output-format=concise", "."]
        yield "ruff format", [core, "-m", "ruff", "format", "--check", "--quiet", "."]
        yield "import rules", [core.with_name("lint-imports"), "--no-cache"]
        yield "mypy", [core, "-m", "mypy"]
        yield "pyright", [core, "-m", "basedpyright", "--level", "error", "--pythonpath", core]
        yield "pytest", [core, "-m", "pytest", *options]
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
    """The Python of an up-to-date virtual environment."""
    directory = ROOT / f".venv-{name}"
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
        install(python, *REQUIREMENTS[name])
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
