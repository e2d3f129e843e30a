"""The code blocks and commands of README.md, and of pages without a test file of their own, run as they stand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai import OpenAI

from warmprefix import ContextBlock
from warmprefix_gateway import GatewayOptions
from warmprefix_telemetry.trace_recorder import TraceRecorder
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.traces.reader import read_trace

ROOT = Path(__file__).parent.parent
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def application() -> Any:
    """Names of the application around the examples."""
    passages = [SimpleNamespace(id=f"Doc_{n}", text=f"Passage {n}. " * 20) for n in range(3)]
    instant = EmulatorConfig(prefill_rate=float("inf"), decode_rate=float("inf"), base_ttft_ms=0)
    with EmulatorServer(instant) as server, OpenAI(base_url=server.base_url, api_key="none") as client:
        yield {
            "base_url": server.base_url,
            "client": client,
            "model": instant.model,
            "question": "What is it?",
            "messages": [],
            "retrieved": [
                ("Which?", [ContextBlock(p.text, id=p.id) for p in order]) for order in (passages, passages[1:])
            ],
            "retriever": SimpleNamespace(search=lambda question: passages),
        }


def test_the_readmes_code_runs(application: dict[str, Any]) -> None:
    # Blocks for frameworks run in the tests of the frameworks.
    blocks = [block for block in CODE.findall((ROOT / "README.md").read_text()) if "from warmprefix_" not in block]
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), application)
    assert application["answer"].choices[0].message.content
    assert application["planner"].stats().commits == 1


def test_the_readmes_gateway_command_serves(application: dict[str, Any]) -> None:
    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^warmprefix (serve .*)$", readme, re.MULTILINE)
    assert "http://127.0.0.1:8080/v1" in readme  # where it listens by default
    assert GatewayOptions(("http://127.0.0.1:9",)).port == 8080
    arguments = command.replace("http://localhost:8000/v1", application["base_url"]).split()
    code = [sys.executable, "-m", "warmprefix_tools", *arguments, "--port", "0"]
    with subprocess.Popen(code, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            announced = re.search(r"http://127\.0\.0\.1:\d+/v1", process.stdout.readline())
            assert announced is not None
            with OpenAI(base_url=announced[0], api_key="none") as client:
                asked = [{"role": "user", "content": "What is it?"}]
                answer = client.chat.completions.create(model=application["model"], messages=asked)  # type: ignore[arg-type]
            assert answer.system_fingerprint == "warmprefix-emulator"
        finally:
            process.terminate()


@pytest.mark.parametrize(
    ("number", "printed"),
    [(0, "0\n96\n"), (1, "2004 0\n0 2004\n"), (2, "0 2100 2100.0\n0 2100 2100.0\n1056 1044 1044.0\n")],
)
def test_the_emulators_examples_print_their_comments(
    number: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = CODE.findall((ROOT / "docs/emulator.md").read_text())
    assert len(blocks) == 3
    if "anthropic import" in blocks[number]:
        pytest.importorskip("anthropic")
    exec(compile(blocks[number], "emulator.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_recording_works_as_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/record.md").read_text()
    planned, *recorded = CODE.findall(page)
    names: dict[str, Any] = {
        "retriever": SimpleNamespace(
            search=lambda question, limit=1: [SimpleNamespace(text="Passage.", id="plain", score=0.5)],
        ),
        "count_tokens": lambda text: 1000 + len(text),
        "system_prompt": "You are terse.",
        **dict.fromkeys(("question", "session_id", "model"), "x"),
        "answer_id": "answer-17",
    }
    exec(compile(planned, "record.md", "exec"), names)
    names["planner"].plan(["a"])
    assert len(read_trace("planned.jsonl.gz").requests) == 1
    *others, candidates = recorded
    assert len(others) == 2
    for block in others:
        exec(compile(block, "record.md", "exec"), names)
    trace = read_trace("day.jsonl.gz")
    assert [request.blocks for request in trace.requests] == [("plain",), ("plain",)]
    assert [request.scores for request in trace.requests] == [(0.5,), ()]
    assert [request.conversation for request in trace.requests] == [0, None]
    assert trace.requests[-1].query_tokens == 1001
    assert len({request.scope for request in trace.requests}) == 2
    with TraceRecorder(tmp_path / "candidates.jsonl") as names["recorder"]:
        exec(compile(candidates, "record.md", "exec"), names)
    clicks, _ = re.findall(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    with (tmp_path / "candidates.jsonl").open("a") as file:
        file.write(clicks)
    (request,) = read_trace(tmp_path / "candidates.jsonl").requests
    assert (request.request, request.k, request.gold) == ("answer-17", 8, ("handbook#12",))


def test_the_shown_trace_is_valid(tmp_path: Path) -> None:
    _, shown = re.findall(r"^```json\n(.*?)^```$", (ROOT / "docs/record.md").read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "day.jsonl").write_text(shown)
    with TraceRecorder(tmp_path / "ours.jsonl") as recorder:
        recorder.record([ContextBlock("a"), ContextBlock("b")])
        recorder.record([ContextBlock("b"), ContextBlock("a")], k=1)
    ours, theirs = (
        [list(json.loads(line)) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("ours.jsonl", "day.jsonl")
    )
    assert ours == theirs
    assert read_trace(tmp_path / "day.jsonl").requests[0].blocks == ("handbook#12", "handbook#40")
