"""The multi-agent reader, as its command runs it, with real emulated engines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from examples.multi_agent_reader.__main__ import main
from examples.multi_agent_reader.documents import read_documents

from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

AGENT = re.compile(r"(agent \d|manager): ([\d,]+) of ([\d,]+) prompt tokens were cached; read (.+)")
QUESTIONS = ("What do whales eat?", "Where do whales sleep?")


class Line(NamedTuple):
    agent: str
    cached: int
    total: int
    read: list[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "more").mkdir()
    for number in range(12):
        path = tmp_path / "more" / f"{number}.txt" if number % 2 else tmp_path / f"{number}.md"
        path.write_text(f"Observation {number} of a whale. " * 200)
    (tmp_path / "picture.svg").write_text("<svg/>")
    return tmp_path


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EmulatorServer]]:
    config = EmulatorConfig(prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
    with ExitStack() as stack:
        engines = [stack.enter_context(EmulatorServer(config)) for _ in range(4)]
        monkeypatch.setenv("ENGINES", " ".join(engine.base_url for engine in engines))
        monkeypatch.setenv("MODEL", config.model)
        yield engines


def reports(printed: str) -> list[list[Line]]:
    """Return the lines per agent of each answer."""
    answers: list[list[Line]] = []
    for line in printed.splitlines():
        if line in QUESTIONS:
            answers.append([])
        elif found := AGENT.fullmatch(line):
            agent, cached, total, read = found.groups()
            names = [] if read == "no document" else read.split(", ")
            answers[-1].append(Line(agent, int(cached.replace(",", "")), int(total.replace(",", "")), names))
    return answers


def test_each_agent_reads_again_what_its_engine_has_cached(
    folder: Path, engines: list[EmulatorServer], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder), *QUESTIONS]) == 0
    first, second = reports(capsys.readouterr().out)
    names = {str(block.id) for block in read_documents(folder)}
    assert len(names) == 12
    for lines in (first, second):
        assert sorted(name for line in lines for name in line.read) == sorted(names)
        assert {line.agent for line in lines} == {"agent 1", "agent 2", "agent 3", "agent 4", "manager"}
    assert {line.agent: line.read for line in first} == {line.agent: line.read for line in second}
    agents = [line for line in second if line.agent != "manager"]
    assert all(line.cached > 0.9 * line.total for line in agents)


def test_the_others_read_the_documents_of_an_agent_that_is_gone(
    folder: Path, engines: list[EmulatorServer], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder), QUESTIONS[0]]) == 0
    [before] = reports(capsys.readouterr().out)
    engines[-1].close()
    assert main([str(folder), QUESTIONS[1]]) == 0
    printed = capsys.readouterr().out
    [after] = reports(printed)
    assert "not read" not in printed
    read = {line.agent: set(line.read) for line in after}
    assert read["agent 4"] == set()
    for line in before:
        if line.agent != "agent 4":
            assert set(line.read) <= read[line.agent]  # only the documents of agent 4 moved
    assert sum(len(line.read) for line in after) == 12
    assert all(line.cached > line.total / 3 for line in after if line.agent in ("agent 1", "agent 2", "agent 3"))


def test_without_an_engine_the_command_ends_with_an_error(
    folder: Path, engines: list[EmulatorServer], capsys: pytest.CaptureFixture[str]
) -> None:
    for engine in engines:
        engine.close()
    assert main([str(folder), QUESTIONS[0]]) == 1
    assert "no agent could read 12 of the documents" in capsys.readouterr().err


def test_long_texts_are_read_in_parts_of_whole_paragraphs(tmp_path: Path) -> None:
    paragraphs = [f"{number}: {'krill ' * 300}".strip() for number in range(20)]
    (tmp_path / "long.md").write_text("\n\n".join(paragraphs))
    parts = read_documents(tmp_path)
    assert [part.id for part in parts] == [f"long.md:{number}" for number in range(1, len(parts) + 1)]
    assert len(parts) > 2
    assert "\n\n".join(part.text for part in parts) == "\n\n".join(paragraphs)
    assert all(part.tokens <= 2_000 for part in parts)


def test_without_engines_the_command_starts_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ENGINES", raising=False)
    monkeypatch.delenv("MODEL", raising=False)
    for path in sorted(folder.rglob("*.txt")):
        path.unlink()
    assert main([str(folder), QUESTIONS[0], "--agents", "2"]) == 0
    printed = capsys.readouterr().out
    assert "no model ran" in printed
    assert {line.agent for line in reports(printed)[0]} == {"agent 1", "agent 2", "manager"}


def test_a_folder_without_texts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), QUESTIONS[0]])
    assert ended.value.code == 2
    assert "must be a folder with .md, .rst, .txt files" in capsys.readouterr().err
