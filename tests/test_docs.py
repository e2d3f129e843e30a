"""The code blocks of README.md and docs/ run as they stand, one after the other, against the emulator."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai import OpenAI

from warmprefix.emulator import EmulatorConfig, EmulatorServer

ROOT = Path(__file__).parent.parent
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def application() -> Any:
    """The names that a reader has in the application around the examples."""
    passages = [SimpleNamespace(id=f"Doc_{n}", text=f"Passage {n}. " * 20) for n in range(3)]
    instant = EmulatorConfig(prefill_rate=float("inf"), decode_rate=float("inf"), base_ttft_ms=0)
    with EmulatorServer(instant) as server, OpenAI(base_url=server.base_url, api_key="none") as client:
        yield {
            "client": client,
            "model": instant.model,
            "question": "What is it?",
            "messages": [],
            "retriever": SimpleNamespace(search=lambda question: passages),
        }


def test_the_readmes_code_runs(application: dict[str, Any]) -> None:
    blocks = CODE.findall((ROOT / "README.md").read_text())
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "README.md", "exec"), application)
        assert application["answer"].choices[0].message.content
    assert application["planner"].stats().commits == 3


def test_the_emulators_example_prints_what_its_comment_says(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = CODE.findall((ROOT / "docs/emulator.md").read_text())
    exec(compile(block, "emulator.md", "exec"), {})
    assert capsys.readouterr().out == "0\n96\n"


def test_the_readme_has_exactly_two_set_up_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^```console\n(.*?)\n```$", readme, re.DOTALL | re.MULTILINE) == [
        "python3 run.py demo",
        "python3 run.py test",
    ]


def test_every_link_in_the_docs_leads_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
