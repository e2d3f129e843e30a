"""The tutorial's script saves what its page shows, and its other blocks run one after the other."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from redis_servers import Server, wait_until
from warmprefix import ContextBlock, ContextPlanner
from warmprefix_tools.demo import servers, session
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.demo.run_demo import run_demo
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.local import LocalModelError
from warmprefix_tools.local.llama_server import LocalModel
from warmprefix_tools.local.weights import MODEL, fetch_weights

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
SCRIPT, *BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
INSTANT = EmulatorConfig(prefill_rate=float("inf"), decode_rate=float("inf"), base_ttft_ms=0)
POINTS = 6
"""By how many points the saving may differ from the page's: the documents are the pages of this version."""


def saving_in(printed: str) -> int:
    (percent,) = re.findall(r"^prefill saved, net: (\d+)%$", printed, re.MULTILINE)
    return int(percent)


def test_the_script_saves_what_the_page_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with EmulatorServer(INSTANT) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setattr(sys, "argv", ["rag.py", str(ROOT / "docs")])
        names: dict[str, Any] = {}
        exec(compile(SCRIPT, "rag.py", "exec"), names)
        names["client"].close()
    printed = capsys.readouterr().out
    (shown,) = re.findall(r"^```text\n(\d+ questions.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert re.sub(r"[\d,]+", "N", printed) == re.sub(r"[\d,]+", "N", shown)
    assert abs(saving_in(printed) - saving_in(shown)) <= POINTS
    stats = names["planner"].stats()
    assert stats.commits == stats.reports == len(names["questions"])


def rows_in(printed: str) -> list[list[float]]:
    """Return the numbers of hit ratio, prompt tokens and prefilled tokens, without those of the change."""
    rows = re.findall(r"^(?:hit ratio|prompt tokens|tokens prefilled \(net\)) +(\S+) +(\S+) ", printed, re.MULTILINE)
    return [[float(cell.replace(",", "").rstrip("%")) for cell in row] for row in rows]


def real_model_part() -> str:
    (shown,) = re.findall(r"demo --model\n```\n.*?^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return str(shown)


def test_the_real_models_figures_fit_together() -> None:
    hits, prompts, prefilled = rows_in(real_model_part())
    for hit, prompt, computed in zip(hits, prompts, prefilled, strict=True):
        assert hit == round(100 * (1 - computed / prompt), 1)


@pytest.mark.slow
def test_the_real_model_computes_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first layer of the model is enough: what is cached depends on tokens."""
    pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    from gguf_layers import first_layers

    try:
        model = first_layers(fetch_weights(lambda line: None), tmp_path / "one-layer.gguf")
    except LocalModelError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(servers, "LocalModel", functools.partial(LocalModel, model))
    monkeypatch.setattr(session, "MODEL_SECONDS", 600.0)  # all questions, also on a busy machine
    run_demo(DemoOptions(model=True, html_file=tmp_path / "demo.html"))
    printed = capsys.readouterr().out
    assert f"of {MODEL}" in printed
    shown, measured = rows_in(real_model_part()), rows_in(printed)
    assert measured[0] == pytest.approx(shown[0], abs=POINTS)
    for before, after in zip(shown[1:], measured[1:], strict=True):
        assert after == pytest.approx(before, rel=POINTS / 100)


def test_the_shown_figures_fit_together() -> None:
    (shown,) = re.findall(r"^```text\n(\d+ questions.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    without, planned = (int(tokens.replace(",", "")) for tokens in re.findall(r"([\d,]+) tokens", shown))
    assert saving_in(shown) == round(100 * (1 - planned / without))


@pytest.fixture
def application() -> Any:
    """Names of the application around the blocks."""
    passages = [ContextBlock(f"Passage {n}. " * 20, id=f"Doc_{n}") for n in range(3)]
    with EmulatorServer(INSTANT) as server, OpenAI(base_url=server.base_url, api_key="none") as client:
        yield {
            "ContextPlanner": ContextPlanner,
            "blocks": passages,
            "client": client,
            "messages": [],
            "model": INSTANT.model,
            "planner": ContextPlanner(),
            "question": "What is it?",
        }


def test_the_blocks_for_an_application_run(application: dict[str, Any]) -> None:
    head, tail, tenant, shared = BLOCKS
    for block in (head, tail, tenant):
        exec(compile(block, "tutorial.md", "exec"), application)
        assert application["answer"].choices[0].message.content
    assert application["planner"].stats().commits == 3
    with Server() as server:
        check_shared(shared.replace("redis://localhost:6379", server.url), server.url, application)


def check_shared(block: str, url: str, application: dict[str, Any]) -> None:
    """Run the block of one worker until another worker finds its blocks."""
    with ContextPlanner.from_url(url) as worker:

        def holds_all() -> bool:
            plan = worker.plan(application["blocks"], conversation="chat-42", placement="tail", tenant="acme")
            worker.abandon(plan)
            return len(plan.references) == len(application["blocks"])

        def is_up_to_date() -> bool:
            # On a busy machine a turn may get no answer in time; then its blocks are sent in full, and once more.
            exec(compile(block, "tutorial.md", "exec"), {**application})
            with contextlib.suppress(TimeoutError):
                wait_until(holds_all, "once the server is old enough to be trusted", seconds=4)
            return holds_all()

        wait_until(is_up_to_date, "the other worker is up to date")
