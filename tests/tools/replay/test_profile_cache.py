"""Replays in the cache of a profile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from warmprefix.cache_profiles import PROFILES
from warmprefix.plan import Placement
from warmprefix_tools.replay.simulation import Replay
from warmprefix_tools.replay.workload import Workload
from warmprefix_tools.traces.trace import Trace, TraceRequest

Run = Callable[..., Any]


def trace_of(*orders: str, tokens: int = 100, query_tokens: int = 10, **fields: Any) -> Workload:
    """Return a trace with one letter per block."""
    requests = tuple(
        TraceRequest(f"r{number}", tuple(order), query_tokens=query_tokens, **fields)
        for number, order in enumerate(orders)
    )
    return Workload(Trace("letters", requests, dict.fromkeys("".join(orders), tokens), 8))


def test_marks_at_the_end_alone_cost_more_than_no_cache() -> None:
    letters = trace_of("abx", "aby", tokens=1_000)
    use = Replay(letters, profile=PROFILES["openai"]).run("relevance", None).profile_use
    assert use is not None
    assert use.cost(PROFILES["openai"]) == pytest.approx(1.25 * 2 * 3_010)


@pytest.mark.parametrize("placement", ["head", "tail"])
def test_every_token_of_every_prompt_is_counted_once(placement: Placement) -> None:
    letters = trace_of("abx", "bax", "abx", conversation="c")
    replay = Replay(letters, placement, profile=PROFILES["full-attention"], preamble_tokens=50)
    for policy in ("relevance", "coaccess"):
        result = replay.run(policy, None)
        use = result.profile_use
        assert use is not None
        questions = 0 if placement == "tail" else 3 * 10
        assert use.tokens == result.total_tokens + result.note_tokens + 3 * 50 + questions + 3 * (placement == "tail")


def test_a_prompt_longer_than_the_cache_is_computed() -> None:
    result = Replay(trace_of("ab", "ab"), profile=PROFILES["full-attention"]).run("relevance", 64)
    assert result.profile_use is not None
    assert result.profile_use.read == 0


@pytest.mark.parametrize("profile", ["anthropic", "openai", "bedrock"])
def test_planned_marks_cost_less_than_those_of_the_api(profile: str) -> None:
    letters = trace_of(*["abx", "aby", "abz", "acd"] * 10, tokens=1_000)
    result = Replay(letters, profile=PROFILES[profile], preamble_tokens=1_000).run("coaccess", None)
    assert result.profile_use is not None
    assert result.today_profile_use is not None
    ours, today = (use.cost(PROFILES[profile]) for use in (result.profile_use, result.today_profile_use))
    assert today >= result.today_profile_use.tokens
    assert ours < 0.5 * today


def test_marks_expire_at_the_traces_own_times() -> None:
    orders = ["ab"] * 12
    requests = tuple(TraceRequest(f"r{n}", tuple(order), seconds=7_200.0 * n) for n, order in enumerate(orders))
    letters = Workload(Trace("letters", requests, {"a": 1_000, "b": 1_000}, 8))
    result = Replay(letters, profile=PROFILES["anthropic"]).run("coaccess", None)
    assert result.profile_use is not None
    assert result.profile_use.read == 0
    assert result.profile_use.cost(PROFILES["anthropic"]) < 1.1 * result.profile_use.tokens


def test_command_reports_the_profile(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "letters.jsonl"
    lines: list[dict[str, Any]] = [{"name": "letters", "k": 3}, *({"block": name, "tokens": 500} for name in "abxyz")]
    lines += [{"request": order, "blocks": [*order]} for order in ("abx", "aby", "abz")]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.json"
    options = ["--profile", "openai-before-5.6", "--preamble-tokens", "1000", "--policies", "relevance,coaccess"]
    done = run("replay", str(trace), *options, "--json", str(out))
    shown = " ".join(done.stdout.split())
    assert "In a cache such as openai-before-5.6, coaccess would leave as much to prefill." in shown
    written = json.loads(out.read_text())
    assert (written["profile"], written["preamble_tokens"]) == ("openai-before-5.6", 1000)
    use: dict[str, Any] = written["results"][0]["profile_use"]
    assert use["cost"] == use["uncached"] + 0.5 * use["read"]
    assert use["read"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--profile", "claude"], "--profile: profile must be one of"),
        (["--preamble-tokens", "5"], "--preamble-tokens needs --profile"),
    ],
)
def test_wrong_options_are_named(run: Run, tmp_path: Path, options: list[str], message: str) -> None:
    done = run("replay", str(tmp_path / "none.jsonl"), *options)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
