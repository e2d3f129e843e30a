"""The rows that a clone can measure by itself, and those that a folder of traces adds."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import online_hit_ratio
import result_files
from traces import from_a_clone

FROM_A_CLONE = [
    "generated_topics",
    "generated_bursts",
    "generated_control",
    "generated_conversations",
    "standard_library",
]
TRACE = [
    {"name": "recorded", "k": 2},
    *[{"block": block, "tokens": 100} for block in "abc"],
    *[{"request": number, "blocks": list(["ab", "ba", "ca"][number % 3])} for number in range(9)],
]


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the names of the traces in the first printed table."""
    monkeypatch.setattr(sys, "argv", ["online_hit_ratio.py", "--policies", "relevance,coaccess", *arguments])
    online_hit_ratio.main()
    table = capsys.readouterr().out.partition("cache of")[0]
    return re.findall(r"^(\w+) \(\d+, \d+\)", table, re.MULTILINE)


@pytest.mark.slow
def test_a_clone_measures_its_own_traces_and_those_of_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(result_files, "RESULTS", tmp_path / "results")
    monkeypatch.delenv("WARMPREFIX_TRACES", raising=False)
    assert printed(monkeypatch, capsys, "--limit", "20") == FROM_A_CLONE
    recorded = tmp_path / "recorded.jsonl"
    recorded.write_text("".join(f"{json.dumps(line)}\n" for line in TRACE))
    monkeypatch.setenv("WARMPREFIX_TRACES", str(tmp_path))
    assert printed(monkeypatch, capsys, "--limit", "20") == [*FROM_A_CLONE, "recorded"]
    assert printed(monkeypatch, capsys, str(recorded)) == ["recorded"]
    assert not (tmp_path / "results").exists(), "two policies are no run of all"


@pytest.mark.slow
def test_the_same_clone_makes_the_same_requests() -> None:
    first, second = (list(from_a_clone()) for _ in range(2))
    assert first == second
    conversations = next(trace for trace in first if trace.name == "generated_conversations")
    assert len(conversations.requests) == 800
    assert all(len(set(request.blocks)) == 10 for request in conversations.requests)
