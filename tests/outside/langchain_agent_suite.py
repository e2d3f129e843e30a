"""Compare LangChain's own agent test suite with our middleware in every agent to the suite without it.

    python tests/outside/langchain_agent_suite.py [options of pytest]

Fetches the source distribution of the installed langchain with pip and runs its agent tests twice. Exits with 1 if a
test's outcome differs, if the middleware failed open anywhere, or if it was never called. The environment needs the
dependency group `langchain-outside`.

This file is also the pytest plugin that adds the middleware and records the outcomes.
"""

# ruff: noqa: T201

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

AGENT_TESTS = "tests/unit_tests/agents"
REPORT = "WARMPREFIX_SUITE_REPORT"
"""Variable with the path of the file for the outcomes."""
INJECT = "WARMPREFIX_SUITE_INJECT"
"""Variable that puts the middleware into every agent."""

# As langchain's makefile runs them, but in one process.
OPTIONS = ["-q", "-p", "no:cacheprovider", "--benchmark-disable", "--disable-socket", "--allow-unix-socket"]
OPTIONS += ["--override-ini", "addopts=--strict-markers --strict-config --snapshot-warn-unused"]


def main(options: list[str]) -> int:
    """Run the suite twice and print the differences."""
    with tempfile.TemporaryDirectory() as folder:
        root = fetch(Path(folder))
        plain = run(root, options, inject=False)
        injected = run(root, options, inject=True)
    ours = injected["middleware"]
    is_same = bool(plain["outcomes"]) and plain["outcomes"] == injected["outcomes"]
    if not is_same or ours["errors"]:
        print(plain["output"], injected["output"], sep="\n")
    different = sorted(
        test
        for test in plain["outcomes"].keys() | injected["outcomes"].keys()
        if plain["outcomes"].get(test) != injected["outcomes"].get(test)
    )
    for test in different:
        print(f"{test}: {plain['outcomes'].get(test)} without, {injected['outcomes'].get(test)} with")
    passed, failed = (list(plain["outcomes"].values()).count(outcome) for outcome in ("passed", "failed"))
    print(f"langchain {version('langchain')}: {len(plain['outcomes'])} tests, {passed} pass and {failed} fail without.")
    print(f"With the middleware, {len(different)} differ. {ours}")
    return 0 if is_same and ours["prompts"] and not ours["errors"] else 1


def fetch(folder: Path) -> Path:
    """Extract the tests of the installed version without its code, so that they run against the installed code."""
    requirement = f"langchain=={version('langchain')}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "langchain", "--dest", str(folder)]
    subprocess.run([*command, requirement], check=True)
    [archive] = folder.glob("langchain-*.tar.gz")
    with tarfile.open(archive) as source:
        wanted = [m for m in source.getmembers() if m.name.split("/")[1:2] in (["tests"], ["pyproject.toml"])]
        source.extractall(folder, wanted, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def run(root: Path, options: list[str], *, inject: bool) -> dict[str, Any]:
    """Run the agent tests once; return the plugin's report and pytest's output."""
    report = root / "report.json"
    report.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), REPORT: str(report)}
    environment.pop(INJECT, None)
    if inject:
        environment[INJECT] = "1"
    command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, *OPTIONS, *options, AGENT_TESTS]
    ran = subprocess.run(
        command, cwd=root, env=environment, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if not report.exists():
        raise SystemExit(f"pytest wrote no report:\n{ran.stdout}")
    return {**json.loads(report.read_text()), "output": ran.stdout}


class Outcomes:
    """Plugin that records each test's outcome and, at the end, the middleware's counters."""

    def __init__(self, report: Path, middlewares: list[Any]) -> None:
        self._report = report
        self._middlewares = middlewares
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.nodeid] = report.outcome

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._outcomes[report.nodeid] = "not collected"

    def pytest_sessionfinish(self) -> None:
        counts = {
            name: sum(getattr(middleware.stats(), name) for middleware in self._middlewares)
            for name in ("prompts", "references", "errors")
        }
        self._report.write_text(json.dumps({"outcomes": self._outcomes, "middleware": counts}))


def pytest_configure(config: pytest.Config) -> None:
    report = os.environ.get(REPORT)
    if report is not None:
        middlewares = put_middleware_into_every_agent() if os.environ.get(INJECT) else []
        config.pluginmanager.register(Outcomes(Path(report), middlewares))


def put_middleware_into_every_agent() -> list[Any]:
    """Append our middleware in each call of `create_agent`; return the list of all instances."""
    import langchain.agents
    import langchain.agents.factory

    from warmprefix_langchain import ContextReuseMiddleware

    appended: list[Any] = []
    create_agent = langchain.agents.factory.create_agent

    @functools.wraps(create_agent)
    def with_ours(*arguments: Any, middleware: Any = (), **options: Any) -> Any:
        appended.append(ContextReuseMiddleware())
        return create_agent(*arguments, middleware=[*middleware, appended[-1]], **options)

    for module in (langchain.agents, langchain.agents.factory):
        vars(module)["create_agent"] = with_ours
    return appended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
