"""`doctor --profile`: bodies of all APIs, what their caches have of them, and what they lose there."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from warmprefix.cache_profiles import as_profile
from warmprefix_tools.doctor.diagnosis import diagnose
from warmprefix_tools.doctor.findings import ProfileReport
from warmprefix_tools.doctor.log_reader import ReadLog, read_log

MARK = {"cache_control": {"type": "ephemeral"}}
RANDOM = random.Random(19)


def text(words: int) -> str:
    return " ".join(f"word{RANDOM.randrange(3_000)}" for _ in range(words)) + "."


SYSTEM = text(900)
PASSAGES = [text(300) for _ in range(8)]


def anthropic(system: str = SYSTEM, mark: bool = False, **fields: Any) -> dict[str, Any]:
    """Return a body with four passages and a question, and perhaps a mark on its system prompt."""
    parts = [{"type": "text", "text": passage} for passage in RANDOM.sample(PASSAGES, 4)]
    parts.append({"type": "text", "text": text(20)})
    prompt = [{"type": "text", "text": system, **(MARK if mark else {})}]
    return {"model": "m", "system": prompt, "messages": [{"role": "user", "content": parts}], **fields}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def run(bodies: list[dict[str, Any]]) -> ReadLog:
        (tmp_path / "log").write_text("\n".join(map(json.dumps, bodies)), encoding="utf-8")
        return read_log([tmp_path / "log"])

    return run


@pytest.fixture
def examine(read: Any) -> Any:
    def run(profile: str, bodies: list[dict[str, Any]]) -> ProfileReport:
        report = diagnose(read(bodies), profile=as_profile(profile)).profile
        assert report is not None
        assert report.name == profile
        return report

    return run


def kinds(report: ProfileReport) -> list[str]:
    return [finding.kind for finding in report.findings]


def test_bodies_of_all_apis_have_the_same_prompt(read: Any) -> None:
    question = {"type": "text", "text": "Why?"}
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello\nWhy?"}]}
    log = read(
        [
            chat,
            {
                "system": "Be brief.",
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}, question]}],
            },
            {
                "system": [{"text": "Be brief."}],
                "messages": [{"role": "user", "content": [{"text": "Hello"}, {"text": "Why?"}]}],
            },
            {"instructions": "Be brief.", "input": "Hello\nWhy?"},
            {
                "instructions": "Be brief.",
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello\nWhy?"}]}],
            },
        ]
    ).log
    assert len({request.messages for request in log.requests}) == 1
    assert [request.front for request in log.requests] == [0, 1, 1, 1, 1]


def test_requests_without_marks_lose_what_marks_would_save(examine: Any) -> None:
    report = examine("anthropic", [anthropic(mark=number < 5) for number in range(20)])
    (finding,) = report.findings
    assert (finding.kind, finding.requests) == ("marks-missing", 15)
    assert finding.divergence is not None
    assert finding.divergence.later.message == 0
    assert kinds(examine("anthropic", [anthropic(mark=True) for _ in range(20)])) == []


@pytest.mark.parametrize(
    ("profile", "words", "kind"),
    [
        ("vllm-checkpoints(8192)", 900, "cache-inert"),
        ("vllm-checkpoints(2096)", 300, "prefix-below-block"),
        ("vllm-checkpoints(128)", 900, "between-checkpoints"),
        ("deepseek", 100, None),
        ("openai-before-5.6", 150, "prefix-below-minimum"),
    ],
)
def test_prefixes_that_the_cache_misses_are_found(examine: Any, profile: str, words: int, kind: str | None) -> None:
    system = text(words)
    bodies = []
    for number in range(8):
        groups = [system, text(600) if profile != "vllm-checkpoints(128)" else PASSAGES[number // 2] + text(200)]
        bodies.append({"model": "m", "messages": [{"role": "user", "content": "\n".join(groups)}]})
    report = examine(profile, bodies)
    assert kinds(report) == ([] if kind is None else [kind])
