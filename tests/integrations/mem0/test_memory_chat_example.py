"""The memory chat, as its command runs it, with Mem0, Qdrant and an emulated engine."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

TEA, CATS = "Ann drinks green tea every morning.", "Ann has two cats called Ada and Grace."
STATS = re.compile(r"^  (\d+) of (\d+) prompt tokens were cached$", re.MULTILINE)

Chat = Callable[..., str]


@pytest.fixture
def engine(start_engine: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    engine = start_engine()
    monkeypatch.setenv("OPENAI_BASE_URL", engine.base_url)
    monkeypatch.setenv("MODEL", engine.model)
    for name in ("EMBEDDING_MODEL", "EMBEDDING_URL", "EMBEDDING_DIMENSIONS"):
        monkeypatch.delenv(name, raising=False)
    return engine


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Run the command with these lines as input; returns what it printed."""
    from examples.memory_chat.__main__ import main

    def chat(*lines: str, options: list[str] | None = None) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main(["--stats", *(options or [])]) == 0
        return capsys.readouterr().out

    return chat


def test_memories_are_sent_once_and_the_history_stays_cached(engine: Any, chat: Chat) -> None:
    remember = ["--remember", TEA, "--remember", CATS]
    questions = ("What tea does Ann drink?", "", "What are Ann's cats called?", "Tea every morning, or cats?")
    printed = chat(*questions, options=remember)
    counts = [(int(cached), int(total)) for cached, total in STATS.findall(printed)]
    assert len(counts) == len(engine.answered) == 3
    assert [engine.prompts[-1].count(fact) for fact in (TEA, CATS)] == [1, 1]
    assert "Please also use the context labelled [" in engine.prompts[-1]
    for (cached, _), (_, before) in zip(counts[1:], counts, strict=False):
        assert cached >= before - 16  # all of the prompt before, except for a part of its last KV block


def test_statements_become_memories_of_later_chats(engine: Any, chat: Chat, tmp_path: Path) -> None:
    memories = ["--memories", str(tmp_path / "ann")]
    chat("I cycle to work every day.", "Do I walk to work?", options=memories)
    chat("How do I get to work every day?", options=memories)
    assert "I cycle to work every day." in engine.prompts[-1]
    assert "Do I walk to work?" not in engine.prompts[-1]
    chat("How do I get to work every day?", options=[*memories, "--user", "ben"])
    assert "I cycle" not in engine.prompts[-1]


def test_a_chat_continues_from_its_file(engine: Any, chat: Chat, tmp_path: Path) -> None:
    options = ["--history", str(tmp_path / "chat.json"), "--memories", str(tmp_path / "ann")]
    chat("What tea does Ann drink?", options=[*options, "--remember", TEA])
    stored = json.loads((tmp_path / "chat.json").read_text())
    [(cached, total)] = STATS.findall(chat("Which tea was that?", options=options))
    assert engine.bodies[-1]["messages"][:-1] == stored
    assert engine.prompts[-1].count(TEA) == 1
    assert int(cached) > int(total) / 2
    assert [path.name for path in tmp_path.glob("chat*")] == ["chat.json"]


def test_a_failed_turn_leaves_no_trace(
    engine: Any, chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = tmp_path / "chat.json"
    options = ["--history", str(history)]
    engine.fail_next(3)  # the client tries twice again
    chat("I like green tea.", options=options)
    assert [message["role"] for message in json.loads(history.read_text())] == ["system"]
    chat("Which tea?", options=options)
    assert "green" not in engine.prompts[-1]


def test_another_embedding_model_can_be_named(
    engine: Any, chat: Chat, server_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def embeddings(request: Request) -> JSONResponse:
        body = await request.json()
        asked.extend(body["input"])
        data = [{"object": "embedding", "index": i, "embedding": [1.0, 0.0]} for i in range(len(body["input"]))]
        return JSONResponse({"object": "list", "model": body["model"], "data": data, "usage": {}})

    port, stop = server_thread.listen(Starlette(routes=[Route("/v1/embeddings", embeddings, methods=["POST"])]))
    monkeypatch.setenv("EMBEDDING_MODEL", "small")
    monkeypatch.setenv("EMBEDDING_URL", f"http://127.0.0.1:{port}/v1")
    monkeypatch.setenv("EMBEDDING_DIMENSIONS", "2")
    chat("Anything?", options=["--remember", TEA])
    stop()
    assert {TEA, "Anything?"} <= set(asked)
    assert TEA in engine.prompts[-1]
