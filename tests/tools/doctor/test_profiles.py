"""`doctor --profile`: bodies of all APIs, what their caches have of them, and what they lose there."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from warmprefix.cache_profiles import as_profile
from warmprefix_requests.prices import with_prices
from warmprefix_tools.doctor.diagnosis import diagnose
from warmprefix_tools.doctor.findings import ProfileReport
from warmprefix_tools.doctor.log_reader import ReadLog, read_log
from warmprefix_tools.doctor.page import profile_summary

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


def test_tool_calls_and_their_results_are_read(read: Any) -> None:
    call = {"type": "tool_use", "id": "1", "name": "look_up", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "It rains."}]}
    item = {"type": "function_call", "call_id": "1", "name": "look_up", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": "It rains."}
    log = read(
        [
            {"messages": [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]},
            {"input": [item, output]},
        ]
    ).log
    for request in log.requests:
        first, second = map(log.text, request.messages)
        assert "look_up" in first
        assert second == "It rains."


def test_marks_are_read_with_their_places(read: Any) -> None:
    tool = {"name": "look_up", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two.", **MARK}]
    converse = {
        "system": [{"text": "Be brief."}, {"cachePoint": {"type": "default"}}],
        "messages": [{"role": "user", "content": [{"text": "Why?"}]}],
    }
    log = read(
        [
            {"tools": [tool], "messages": [{"role": "user", "content": parts}]},
            converse,
            {"messages": [{"role": "user", "content": "Why?"}], "cache_control": {"type": "ephemeral"}},
        ]
    ).log
    found = [[(mark.message, mark.end, mark.lifetime) for mark in request.marks] for request in log.requests]
    length = len(log.text(log.requests[0].messages[0]))
    assert found == [
        [(0, length, 3_600.0), (1, len("One.\nTwo."), None)],
        [(0, len("Be brief."), None)],
        [(0, 4, None)],
    ]
    assert "ttl" not in log.text(log.requests[0].messages[0])


def test_answers_of_anthropic_count(read: Any) -> None:
    usage = {"input_tokens": 10, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 0}
    log = read([anthropic(), {"type": "message", "role": "assistant", "content": [], "usage": usage}]).log
    (request,) = log.requests
    assert (request.reported_prompt_tokens, request.reported_cached_tokens) == (100, 90)


def test_requests_without_marks_lose_what_marks_would_save(examine: Any) -> None:
    report = examine("anthropic", [anthropic() for _ in range(20)])
    assert kinds(report) == ["marks-missing"]
    assert report.read_tokens == report.written_tokens == 0
    assert report.cost == 1.0
    assert report.planned_cost < 0.75
    (finding,) = report.findings
    assert finding.share == pytest.approx(1 - report.planned_cost, abs=0.01)
    assert finding.divergence is not None
    assert "would cost less" in finding.cost


def test_prices_of_a_model_are_shown_in_dollars(read: Any) -> None:
    profile = with_prices("anthropic", "m", {"m": {"input_cost_per_token": 1e-3}})
    log = read([anthropic() for _ in range(3)])
    report = diagnose(log, profile=profile)
    assert report.profile is not None
    assert report.profile.full_price == pytest.approx(report.prompt_tokens * 1e-3)
    assert f"of ${report.profile.full_price:,.4f}" in profile_summary(report.profile)


def test_a_good_mark_is_no_finding(examine: Any) -> None:
    def body() -> dict[str, Any]:
        return {**anthropic(mark=True), "messages": [{"role": "user", "content": text(50)}]}

    report = examine("anthropic", [body() for _ in range(20)])
    assert kinds(report) == []
    assert report.read_tokens > 0.8 * report.uncached_tokens
    assert report.cost < 0.3


def test_a_mark_behind_changing_text_is_found(examine: Any) -> None:
    report = examine("anthropic", [anthropic(f"Now it is {n}.\n{SYSTEM}", mark=True) for n in range(20)])
    assert kinds(report) == ["mark-behind-volatile"]
    assert report.cost > 1.0


def test_too_many_marks_are_refused(examine: Any) -> None:
    bodies = [anthropic(mark=True) for _ in range(20)]
    for body in bodies[:7]:
        for part in body["messages"][0]["content"]:
            part.update(MARK)
    report = examine("anthropic", bodies)
    assert report.findings[-1].kind == "marks-refused"
    assert report.findings[-1].requests == 7


def test_marks_expire_by_the_times_of_the_log(examine: Any) -> None:
    def log(seconds: int) -> list[dict[str, Any]]:
        return [anthropic(mark=True, timestamp=1e9 + seconds * n) for n in range(20)]

    assert examine("anthropic", log(60)).read_tokens > 0
    assert examine("anthropic", log(600)).read_tokens == 0


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
    assert report.planned_cost is None
    assert kinds(report) == ([] if kind is None else [kind])
