"""Files around the code: workflows, changelog, compatibility, and texts for other projects."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from packaging.requirements import Requirement
from packaging.version import Version

import warmprefix
from engine_tables import overview
from result_files import read_rows
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

ROOT = Path(__file__).parents[1]
RUN: dict[str, Any] = runpy.run_path(str(ROOT / "run.py"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
HEALTH = ["CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md"]
REPOSITORY = "https://github.com/warmprefix/warmprefix"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.name


# -- workflows --------------------------------------------------------------------------------------------------------


def steps_of(workflow: Any) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def environments_of(job: dict[str, Any], line: str) -> list[str]:
    """Return a line once for each version of Python in a job's matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    versions = [*matrix.get("python", []), *(each["python"] for each in matrix.get("include", []))]
    return [line.replace("${{ matrix.python }}", version) for version in versions or [""]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_each_workflow_can_read_and_may_do_no_more_unless_a_job_asks(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert set(job.get("permissions", {})) <= {"pages", "id-token"}
        assert ("environment" in job) == ("permissions" in job)
    for step in steps_of(workflow):
        assert ("uses" in step) != ("run" in step)
        assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{40})", step.get("uses", "a/b@v1"))


def test_workflows_name_commands_and_environments_that_exist() -> None:
    found = 0
    for path in WORKFLOWS:
        for job in load(path)["jobs"].values():
            for line in "\n".join(step.get("run", "") for step in job["steps"]).splitlines():
                if "run.py" not in line:
                    continue
                for filled in environments_of(job, line):
                    python, script, command, *options = shlex.split(filled)
                    assert (python, script, command) == ("python", "run.py", "test")
                    assert options[:1] in ([], ["--all"])
                    assert set(options[1:]) <= set(RUN["TESTED"])
                    found += 1
    assert found >= 8


def test_the_tested_versions_of_python_are_those_of_the_project() -> None:
    matrix = load(ROOT / ".github/workflows/test.yml")["jobs"]["core"]["strategy"]["matrix"]
    certain = [*matrix["python"], "3.11"]
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', read("pyproject.toml"))
    assert sorted(certain, key=Version) == classifiers
    rows = re.findall(r"^\| (3\.\d+) \| (.*) \|$", read("docs/compatibility.md"), re.MULTILINE)
    assert [version for version, _ in rows] == list(RUN["PYTHON_VERSIONS"])
    assert [version for version, rest in rows if "untested" not in rest] == classifiers


def test_each_test_module_for_other_pythons_exists() -> None:
    assert [path for path in RUN["CORE_TESTS"] if not (ROOT / path).exists()] == []


def test_a_python_of_an_environment_has_its_version() -> None:
    assert RUN["interpreter"]("python-2.99") is None
    names = RUN["default_environments"]()
    assert set(names) <= set(RUN["TESTED"])
    assert all(RUN["interpreter"](name) is not None for name in names if name.startswith("python-"))


def test_pre_commit_runs_the_static_checks_of_run_py() -> None:
    hooks = {hook["name"]: hook for hook in load(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]}
    together = ROOT / ".venv-together/bin/python"
    for heading, command in RUN["static_checks"](together):
        wanted = [str(Path(part).relative_to(ROOT)) if Path(part).is_absolute() else part for part in command]
        assert shlex.split(hooks.pop(heading)["entry"]) == wanted
    assert hooks == {}


def test_each_page_of_the_site_in_the_forms_exists() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / ".github").rglob("*.yml"))
    pages = re.findall(r"https://warmprefix\.github\.io/warmprefix/([\w-]+)/", text)
    assert pages
    assert [page for page in pages if not (ROOT / f"docs/{page}.md").exists()] == []


# -- version, citation, changelog -------------------------------------------------------------------------------------


def test_the_changelog_has_a_dated_entry_of_this_version_and_links() -> None:
    text = read("CHANGELOG.md")
    versions = re.findall(r"^## \[(.*?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.MULTILINE)
    assert versions[0] == ("Unreleased", "")
    assert all(date for _, date in versions[1:])
    version, date = versions[1]
    assert version == warmprefix.__version__
    citation = load(ROOT / "CITATION.cff")
    assert (citation["version"], str(citation["date-released"])) == (version, date)
    links = dict(re.findall(r"^\[(.*?)\]: (\S+)$", text, re.MULTILINE))
    assert links.pop("Unreleased") == f"{REPOSITORY}/compare/v{version}...HEAD"
    assert links[version] == f"{REPOSITORY}/releases/tag/v{version}"
    assert links.keys() == {version for version, _ in versions[1:]}


# -- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEALTH)
def test_each_file_in_the_text_exists(name: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", read(name)):
        assert (ROOT / target).exists(), target
    placeholders = {"NAME", "XX"}
    paths = re.findall(r"`((?:core|tests|docs|tools|integrations|benchmarks|\.github)/[\w./*-]*)`", read(name))
    assert [
        path for path in paths if not placeholders & set(re.split(r"\W|_", path)) and not (ROOT / path).exists()
    ] == []


def requirements() -> set[tuple[str, str, str]]:
    """Return extra, package and lower bound of each requirement in pyproject.toml."""
    text = read("pyproject.toml")
    (table,) = re.findall(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text, re.DOTALL | re.MULTILINE)
    _, *parts = re.split(r"^([\w-]+) = ", table, flags=re.MULTILINE)
    found = set()
    for extra, value in zip(parts[::2], parts[1::2], strict=True):
        for each in map(Requirement, ast.literal_eval(value)):
            if each.name != "warmprefix":
                (bound,) = each.specifier
                assert bound.operator == ">="
                found.add((extra, each.name, bound.version))
    return found


def test_the_oldest_versions_of_the_page_are_those_of_the_project() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| ([\w.-]+) \| ([\d.]+) \| .* \|$", read("docs/compatibility.md"), re.MULTILINE)
    assert len(rows) > 3
    assert set(rows) - requirements() == set()


def test_the_oldest_environments_pin_the_lower_bounds() -> None:
    pins = re.findall(r"^ *(?:[\w-]+-oldest = .*)?\"([\w-]+)==([\d.]+)\"", read("pyproject.toml"), re.MULTILINE)
    pins += re.findall(r"-oldest = \[.*\"([\w-]+)==([\d.]+)\"", read("pyproject.toml"))
    pinned = {name: Version(version) for name, version in pins}
    for extra in ("langchain", "mem0"):
        ((name, bound),) = [(name, bound) for each, name, bound in requirements() if each == extra]
        assert pinned[name] == Version(bound)
    assert pinned["openai"] == Version("1.60")


# -- texts for other projects -----------------------------------------------------------------------------------------


def test_the_numbers_in_the_pull_requests_are_those_of_the_benchmarks() -> None:
    page = " ".join(re.sub(r"^> ?", "", read("docs/upstream/index.md"), flags=re.MULTILINE).split())
    results = read_rows("plugin_hit_ratio")
    hits = {row["what"]: row for row in results if row["text"] == "standard library"}
    for what, name in (("query engine", "a query engine rose"), ("chat engine", "a chat engine")):
        row = hits[f"LlamaIndex {what}: ContextReusePostprocessor"]
        assert f"of {name} from {row['without']['hit_percent']} to {row['with']['hit_percent']} %" in page
    table = overview(read_rows("engine_ttft"))
    run = "random weights on vLLM, online, standard library: 400 requests of 8 blocks, one at a time"
    online = rf"^\| {run} \| (\d+) → (\d+) ms"
    ((before, after),) = re.findall(online, table, re.MULTILINE)
    assert f"the median TTFT fell from {before} to {after} ms" in page
    assert re.search(r"^\| random weights on vLLM, control.*\| \*\*1\.00\*\* \|", table, re.MULTILINE)


def test_the_code_for_vllm_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = read("docs/upstream/vllm_warmprefix.mdx")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    instant = EmulatorConfig(prefill_rate=float("inf"), decode_rate=float("inf"), base_ttft_ms=0)
    with EmulatorServer(instant) as server:
        here = code.replace("http://localhost:8000/v1", server.base_url).replace("Qwen/Qwen3-8B", instant.model)
        names: dict[str, Any] = {}
        exec(compile(here, "vllm_warmprefix.mdx", "exec"), names)
        names["client"].close()
    *_, last = capsys.readouterr().out.splitlines()
    assert int(last.partition(" ")[0]) > 0


def test_the_options_of_the_gateway_in_the_texts_exist() -> None:
    import typer

    from warmprefix_tools.cli import app

    command: Any = typer.main.get_command(app)
    options = {option for parameter in command.commands["serve"].params for option in parameter.opts}
    (line,) = re.findall(r"^warmprefix serve (.*)$", read("docs/upstream/vllm_warmprefix.mdx"), re.MULTILINE)
    assert {part for part in shlex.split(line) if part.startswith("--")} <= options
