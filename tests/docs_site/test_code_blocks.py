"""Every block of code on a page runs in a test, parses, or names commands and options that exist."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml  # type: ignore[import-untyped]
from openai import OpenAI

from warmprefix import Choice, ContextBlock, ContextPlanner
from warmprefix_openai import EngineLink
from warmprefix_tools.cli import app
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
LANGUAGES = {"", "console", "json", "mermaid", "py", "python", "sh", "text", "toml", "yaml"}
RUN_BY = {
    "README.md": "test_docs.py",
    "docs/batch.md": "openai_chat/batch_runner/test_batch_docs.py",
    "docs/caches.md": "docs_site/test_code_blocks.py",
    "docs/choice.md": "docs_site/test_code_blocks.py",
    "docs/concepts.md": "docs_site/test_code_blocks.py",
    "docs/emulator.md": "test_docs.py",
    "docs/engines.md": "test_engines_page.py",
    "docs/frameworks.md": "integrations/conftest.py",
    "docs/gateway.md": "integrations/gateway/test_clients.py",
    "docs/openai.md": "openai_chat/test_example.py",
    "docs/operations.md": "tools/redis_admin/test_operations_docs.py",
    "docs/prompt-text.md": "docs_site/test_code_blocks.py",
    "docs/quality.md": "docs_site/test_code_blocks.py",
    "docs/record.md": "test_docs.py",
    "docs/replay.md": "tools/replay/test_recount.py",
    "docs/routing.md": "routing/test_routing_page.py",
    "docs/telemetry.md": "telemetry/test_telemetry_docs.py",
    "docs/tokens.md": "test_tokens.py",
    "docs/tutorial.md": "test_tutorial.py",
}
"""The test that runs the Python blocks of each page. Blocks that cannot run are marked `py`."""


def blocks(path: Path, *languages: str) -> list[str]:
    """Return the blocks of a page that are marked as one of these languages."""
    return [text for _, language, text in FENCE.findall(path.read_text("utf-8")) if language in languages]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# -- Python -----------------------------------------------------------------------------------------------------------


def test_each_page_with_python_has_a_test_that_runs_it() -> None:
    with_code = {name_of(path) for path in PAGES if blocks(path, "python")}
    assert len(with_code) > 15
    assert with_code == RUN_BY.keys()
    for page, test in RUN_BY.items():
        text = (ROOT / "tests" / test).read_text("utf-8")
        assert Path(page).name in text, f"{test} does not read {page}"
        assert re.search(r"\bexec\(|subprocess|runpy", text), f"{test} runs no code"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_each_block_has_a_language_and_parses(path: Path) -> None:
    assert {language for _, language, _ in FENCE.findall(path.read_text("utf-8"))} <= LANGUAGES
    for text in blocks(path, "python", "py"):
        compile(text, name_of(path), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for text in blocks(path, "json"):
        parse_json(text)
    for text in blocks(path, "yaml"):
        yaml.safe_load(text)
    if sys.version_info >= (3, 11):
        import tomllib

        for text in blocks(path, "toml"):
            tomllib.loads(text)


def parse_json(text: str) -> None:
    """Parse one value, or one value per line."""
    try:
        json.loads(text)
    except json.JSONDecodeError:
        for line in text.splitlines():
            json.loads(line)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Names of the application around the examples."""
    monkeypatch.chdir(tmp_path)
    config = EmulatorConfig(prefill_rate=math.inf, decode_rate=math.inf, base_ttft_ms=0, model="my-model")
    with EmulatorServer(config) as server, OpenAI(base_url=server.base_url, api_key="none") as client:
        planner = ContextPlanner()
        texts = [f"Passage {n}. " * 30 for n in range(3)]
        yield {
            "engine": server.url,
            "base_url": server.base_url,
            "client": client,
            "model": config.model,
            "planner": planner,
            "plan": planner.plan(texts),
            "question": "What is it?",
            "retrieved": [("Which?", texts), ("What?", texts[1:])],
            "preamble": "Answer from the passages.",
            "documents": [ContextBlock(text) for text in texts],
            "answer": SimpleNamespace(
                prompt_token_ids=[1, 2, 3],
                usage=SimpleNamespace(prompt_tokens_details=SimpleNamespace(cached_tokens=16)),
            ),
        }


def test_the_code_on_marks_runs(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    link, marker = blocks(ROOT / "docs/caches.md", "python")
    exec(compile(link, "caches.md", "exec"), names)
    names["hosted"].close()
    assert isinstance(names["link"], EngineLink)
    assert names["planner"].stats().commits == 2
    assert names["link"].mark_stats().requests == 2
    assert "MarkStats" in capsys.readouterr().out
    names["plan"] = names["planner"].plan(["A passage."])
    exec(compile(marker, "caches.md", "exec"), names)
    assert names["marker"].stats().uncached_tokens == 900


def test_the_code_on_runs_keeps_their_order(names: dict[str, Any]) -> None:
    (block,) = blocks(ROOT / "docs/concepts.md", "python")
    exec(compile(block, "concepts.md", "exec"), names)
    plan = names["planner"].plan(names["steps"])
    assert [planned.joined for planned in plan.blocks] == [False, True]


def test_the_code_on_choice_exchanges_passages(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs/choice.md"
    (block,) = blocks(page, "python")
    passages = [
        SimpleNamespace(id=f"P{n}", text=f"Passage {n}. " * 30, score=[9, 8, 8][n] if n < 3 else 7) for n in range(20)
    ]
    rows = [[0, 1, 2, *range(3, 11)], [0, 1, 2, *range(11, 20)], [0, 1, 2, *range(11, 14), *range(3, 11)]]
    names["retriever"] = SimpleNamespace(search=lambda question, k: [passages[n] for n in rows.pop(0)][:k])
    code = compile(block, "choice.md", "exec")
    exec(code, names)
    planner = names["planner"]
    assert [left.reason for left in names["plan"].left_out] == ["rank"] * 3
    without_planner = compile(block.replace("planner = ContextPlanner()\n", ""), "choice.md", "exec")
    for _ in range(2):
        exec(without_planner, names)
    assert names["planner"] is planner
    assert "exchanged" in capsys.readouterr().out
    fields = {field.name: field.default for field in dataclasses.fields(Choice)}
    shown = dict(
        re.findall(r"`(\w+)=([^`]+)`", page.read_text("utf-8").partition("## Twins")[0].partition("meaning")[2])
    )
    listed = {name: default for name, default in fields.items() if name != "k"}
    assert {name: ast.literal_eval(shown[name]) for name in listed} == listed


def test_the_code_on_wording_shows_in_the_prompt(names: dict[str, Any]) -> None:
    (block,) = blocks(ROOT / "docs/prompt-text.md", "python")
    exec(compile(block, "prompt-text.md", "exec"), names)
    lovelace, babbage = "Ada Lovelace" + " wrote" * 90, "Charles Babbage" + " built" * 90
    for blocks_of_request in ([babbage, lovelace], [lovelace, babbage]):
        with names["planner"].planning(blocks_of_request, annotate="note") as plan:
            prompt = plan.render()
    assert prompt.endswith('Best first: "Ada Lovelace" > "Charles Babbage".')


def test_the_code_on_quality_runs(names: dict[str, Any]) -> None:
    (block,) = blocks(ROOT / "docs/quality.md", "python")
    Path("annotations.json").write_text(json.dumps({"Qwen/Qwen3-8B": "labels"}))
    exec(compile(block, "quality.md", "exec"), names)
    assert names["plan"].annotation == "labels"


# -- commands ---------------------------------------------------------------------------------------------------------


def test_each_command_of_the_pages_exists() -> None:
    found = [(name_of(path), line) for path in PAGES for line in command_lines(path)]
    assert len(found) > 15
    for page, line in found:
        words = shlex.split(line, comments=True)
        check_command(typer.main.get_command(app), words, f"{page}: {line}")


def command_lines(path: Path) -> Iterator[str]:
    """Yield each call of `warmprefix` in blocks of shell, continued lines joined; behind a `$` if there is one."""
    for text in blocks(path, "sh", "console"):
        lines = text.replace("\\\n", " ").splitlines()
        for line in [line for line in lines if line.startswith("$ ")] or lines:
            if found := re.match(
                r"(?:\$ )?(?:[A-Z_]+=\S* )*warmprefix ((?:-|[a-z]+(?:-[a-z]+)*(?: |$)).*)", line.strip()
            ):
                yield found[1].partition(" | ")[0].partition(" && ")[0].removesuffix(" &")


def check_command(command: Any, words: list[str], where: str) -> None:
    """Check that the subcommand and the options exist; words behind `--` are the application's."""
    commands = getattr(command, "commands", None)
    if commands is not None:
        name = words.pop(0)
        if name.startswith("-"):
            assert name in {option for parameter in command.params for option in parameter.opts} | {"--help"}, where
            return
        assert name in commands, where
        check_command(commands[name], words, where)
        return
    options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"--help"}
    for word in words[: words.index("--")] if "--" in words else words:
        if word.startswith("-"):
            assert word.partition("=")[0] in options, f"{where}: {word}"
