"""The code blocks of docs/engines.md run as they stand, against the emulator."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from result_files import read_rows
from warmprefix import ContextBlock
from warmprefix.cache_profiles import as_profile
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

PAGE = (Path(__file__).parents[1] / "docs/engines.md").read_text(encoding="utf-8")
MODEL = EmulatorConfig().model
EMULATOR = ("warmprefix-emulator", "any")
INSTANT: dict[str, Any] = {"prefill_rate": math.inf, "decode_rate": math.inf, "base_ttft_ms": 0}
PASSAGES = [f"Passage {n}. " + f"The function number {n} opens a file and reads it. " * 12 for n in range(6)]

Start = Callable[..., str]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start an emulator that ends with the test, and return its base URL."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(EmulatorServer(EmulatorConfig(**INSTANT, **options))).base_url


def run(heading: str, names: dict[str, Any], replaced: dict[str, str] | None = None) -> dict[str, Any]:
    """Run the Python blocks under a heading of the second level, one after the other."""
    _, *parts = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (section,) = (part for part in parts if part.startswith(f"{heading}\n"))
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert blocks, heading
    for block in blocks:
        for old, new in (replaced or {}).items():
            block = block.replace(old, new)
        exec(compile(block, "engines.md", "exec", dont_inherit=True), names)
    return names


@pytest.fixture
def retrieved() -> list[tuple[str, list[ContextBlock]]]:
    blocks = [ContextBlock(text * 3, id=f"p{number}") for number, text in enumerate(PASSAGES)]
    return [(f"Question {n}?", blocks if n % 2 else blocks[::-1]) for n in range(8)]


def test_the_check_that_fits_all(start: Start, retrieved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"base_url": start(), "model": MODEL, "retrieved": retrieved}
    run("The check that fits all", names)["client"].close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8 answers with a count of cached tokens"
    assert int(lines[1].partition(" cached")[0]) > 0
    assert float(lines[2].removeprefix("agreement ")) > 0.8
    assert lines[4].startswith("profile: full-attention from ")


def test_kv_events(start: Start) -> None:
    here = {"http://engine:8000": start().removesuffix("/v1"), "tcp://engine:": "tcp://127.0.0.1:"}
    ask = {"documents": PASSAGES, "ask": lambda plan: SimpleNamespace(prompt_token_ids=[1, 2, 3])}
    planner = run("KV events", ask, here)["planner"]
    planner.close()
    assert planner.stats().commits == 1


def test_hybrid_models(capsys: pytest.CaptureFixture[str]) -> None:
    run("Hybrid models", {})
    assert capsys.readouterr().out == "Checkpoints(block=528, unit=16, junction_only=False)\n"


def test_hosted_apis(start: Start, retrieved: Any) -> None:
    pytest.importorskip("anthropic")
    url = start(profile="anthropic").removesuffix("/v1")
    names = {"anthropic_url": url, "model": MODEL, "retrieved": retrieved, "preamble": "Answer. " * 600}
    run("Anthropic", names)["hosted"].close()
    marks = names["link"].mark_stats()
    assert marks.read_tokens > marks.written_tokens > 0
    assert (marks.refused, marks.errors) == (0, 0)
    planner = run("OpenAI", names)["planner"]
    assert (planner.profile.name, planner.profile.isolation) == ("openai", "prompt_cache_key")


def test_each_engine_with_a_contract_is_listed_with_its_version() -> None:
    page = (Path(__file__).parents[1] / "docs/compatibility.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (\S+?),? (?:by xllamacpp )?([\d.]+)[^|]*\| \[contract\]", page, re.MULTILINE)
    recorded = {(row["engine"], row["version"]) for row in read_rows("engine_contract")}
    assert sorted((name.lower(), version) for name, version in listed) == sorted(recorded - {EMULATOR})


def test_the_named_profiles_exist() -> None:
    table = re.findall(r"^\| .* \| .* \| (.*`.*) \|$", PAGE.partition("\n## ")[0], re.MULTILINE)
    listed = " ".join(table).replace("BLOCK,UNIT", "528,16").replace("SLOTS", "4")
    named = {*re.findall(r"`([^`]+)`", listed), *re.findall(r'profile[= ]"([^"]+)"', PAGE)}
    assert {"anthropic", "openai", "gemini", "deepseek", "sglang-checkpoints", "llama.cpp(4)"} <= named
    for name in named:
        assert as_profile(name).name == name
