"""Photograph the pages that warmprefix writes: demo, replay, doctor, quality and gateway, each after a real run.

Needs a Chromium on the PATH, or named by WARMPREFIX_BROWSER. An emulator stands in for the engine, and a planted reader
for the model; passages and questions are those of the demo, from Python's own standard library.

    PYTHONPATH=benchmarks python docs/pictures/screenshots.py [FOLDER SECONDS_PER_STEP]
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from openai import OpenAI
from PIL import Image

from planted_reader import PlantedReader
from warmprefix import ContextBlock
from warmprefix_gateway import GatewayOptions, GatewayServer
from warmprefix_telemetry.trace_recorder import TraceRecorder
from warmprefix_tools.demo.corpus import read_standard_library
from warmprefix_tools.demo.questions import ask
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.retriever import Bm25Retriever

FOLDER = Path(__file__).parent
WIDTH, HEIGHT = 1280, 800
STEP_SECONDS = 50
"""The gateway's page has a point for each minute."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTANT = EmulatorConfig(prefill_rate=float("inf"), decode_rate=float("inf"), base_ttft_ms=0)
Retrieved = Sequence[tuple[str, int, Sequence[ContextBlock]]]
"""Question, conversation and passages of each request."""


def retrieved(questions: int) -> Retrieved:
    """Return the demo's questions, and what BM25 finds for them."""
    entries = read_standard_library()
    retriever = Bm25Retriever([block for entry in entries for block in entry.blocks])
    return [(each.query, each.conversation, retriever.retrieve(each.query, 10)) for each in ask(entries, questions, 0)]


def warmprefix(folder: Path, *arguments: object) -> None:
    """Run the command in a folder, so that pages show no other path."""
    command = [sys.executable, "-m", "warmprefix_tools", *map(str, arguments)]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


# -- the pages -------------------------------------------------------------------------------------------------------


def demo(folder: Path) -> str:
    """Run the demo with half of its questions, and return the address of the page."""
    warmprefix(folder, "demo", "--questions", 120, "--html", "demo.html")
    return (folder / "demo.html").as_uri()


def replay(folder: Path) -> str:
    """Replay a recorded trace, and return the address of the page."""
    trace = "standard-library.jsonl.gz"
    with TraceRecorder(folder / trace) as recorder:
        for _, conversation, blocks in retrieved(300):
            recorder.record(blocks, conversation=str(conversation))
    warmprefix(folder, "replay", trace, "--html", "replay.html")
    return (folder / "replay.html").as_uri()


def doctor(folder: Path) -> str:
    """Look for what keeps the cache cold in a log of requests with a clock in front, and return the page's address."""
    log = "requests.jsonl"
    rng = random.Random(0)
    with (folder / log).open("w", encoding="utf-8") as lines:
        for number, (question, _, blocks) in enumerate(retrieved(200)):
            passages = "\n\n".join(f"[{block.id}] {block.text}" for block in rng.sample(blocks[:5], 5))
            clock = f"The current time is 2026-11-25 10:{number // 60:02}:{number % 60:02}."
            system = f"You answer questions about Python. {clock}\n\nUse these passages:\n\n{passages}"
            messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            lines.write(json.dumps({"model": "m", "messages": messages}) + "\n")
    warmprefix(folder, "doctor", log, "--html", "doctor.html")
    return (folder / "doctor.html").as_uri()


def quality(folder: Path) -> str:
    """Ask a reader that labels distract, and return the address of the report's page."""
    reader = PlantedReader(label_loss=0.05, position_loss=0.04, noise=0.01)
    with EmulatorServer(INSTANT, reader=reader.answer) as server:
        options = ["--endpoint", server.base_url, "--model", INSTANT.model, "--answers", "answers"]
        warmprefix(folder, "quality", "run", *options)
    warmprefix(folder, "quality", "report", "answers", "--html", "quality.html")
    return (folder / "quality.html").as_uri()


def ask_as_agents(base_url: str, step_seconds: float) -> None:
    """Let three agents read files for some minutes, some files twice."""
    texts = [block.text for _, _, blocks in retrieved(30) for block in blocks]
    sessions: dict[str, list[Any]] = {
        agent: [
            {"role": "system", "content": f"You are the {agent} of a team."},
            {"role": "user", "content": "Read the files that you need, and report."},
        ]
        for agent in ("planner", "coder", "reviewer")
    }
    with OpenAI(base_url=base_url, api_key="none") as client:
        for step in range(8):
            for agent, messages in sessions.items():
                file = step if agent != "reviewer" else step % 3
                call = {"name": "read", "arguments": json.dumps({"path": f"file-{file}.txt"})}
                calls = [{"id": f"{agent}-{step}", "type": "function", "function": call}]
                messages.append({"role": "assistant", "content": None, "tool_calls": calls})
                result = "\n\n".join(texts[10 * file : 10 * file + 4])
                messages.append({"role": "tool", "tool_call_id": f"{agent}-{step}", "content": result})
                headers = {"x-session-id": agent, "user-agent": f"{agent}/1.0"}
                client.chat.completions.create(
                    model=INSTANT.model, messages=messages, max_tokens=8, extra_headers=headers
                )
            time.sleep(step_seconds)


# -- the browser -----------------------------------------------------------------------------------------------------


def photograph(address: str, picture: Path) -> None:
    """Write a picture of a page, in light colours."""
    named = os.environ.get("WARMPREFIX_BROWSER")
    browser = next(filter(None, map(shutil.which, [named] if named else BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"no browser found: {named or ', '.join(BROWSERS)}; set WARMPREFIX_BROWSER")
    with tempfile.TemporaryDirectory() as profile:
        flags = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"),
            *(f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}", "--blink-settings=preferredColorScheme=1"),
        ]
        subprocess.run([browser, *flags, address], check=True, capture_output=True, timeout=120)
    with Image.open(picture) as taken:  # 128 colours take half the bytes; small marks keep theirs by this method
        taken.convert("RGB").quantize(128, method=Image.Quantize.MAXCOVERAGE).save(picture, optimize=True)


def main(folder: Path, step_seconds: float = STEP_SECONDS) -> None:
    """Write all pictures into a folder."""
    pages: tuple[Callable[[Path], str], ...] = (demo, replay, doctor, quality)
    with tempfile.TemporaryDirectory() as directory:
        for page in pages:
            photograph(page(Path(directory)), folder / f"page-{page.__name__}.png")
    with (
        EmulatorServer(INSTANT) as engine,
        GatewayServer(GatewayOptions(upstreams=(engine.base_url,), port=0)) as gateway,
    ):
        ask_as_agents(f"{gateway.url}/v1", step_seconds)
        photograph(gateway.url, folder / "page-gateway.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2])) if len(sys.argv) > 2 else main(FOLDER)
