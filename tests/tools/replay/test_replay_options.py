"""Options of `warmprefix replay` for other programs: lists in one text, and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from warmprefix_baselines import POLICIES
from warmprefix_tools.replay.replay_options import ReplayOptions, parse_capacities

TRACES = [Path("t.jsonl")]


def test_policies_keep_the_order_of_their_names() -> None:
    assert ReplayOptions(TRACES, policies="coaccess, relevance,coaccess").policy_names == ("coaccess", "relevance")
    for every in ("all", "relevance,all"):
        assert ReplayOptions(TRACES, policies=every).policy_names == tuple(POLICIES)


@pytest.mark.parametrize("wrong", ["best", "", "relevance,", "All"])
def test_unknown_policy_is_refused_with_all_names(wrong: str) -> None:
    with pytest.raises(ValueError, match=rf"--policies takes all, or names of {', '.join(POLICIES)}; got "):
        ReplayOptions(TRACES, policies=wrong)


def test_capacities_are_numbers_or_unbounded() -> None:
    assert parse_capacities("100000,unbounded") == (100_000, None)
    assert parse_capacities("1, 100_000,500k,1M,500000") == (1, 100_000, 500_000, 1_000_000)


@pytest.mark.parametrize("wrong", ["0", "", "-5", "1.5M", "many", "100000,", "0k", "1e6", "unbound", "١"])
def test_other_capacities_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="--capacity-tokens takes unbounded, or whole numbers from 1 on"):
        ReplayOptions(TRACES, capacity_tokens=wrong)


@pytest.mark.parametrize("name", ["t.jsonl", "./t.jsonl", "link.jsonl"])
def test_no_trace_is_overwritten(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.jsonl").symlink_to("t.jsonl")
    with pytest.raises(ValueError, match=rf"--html must name a file that the command does not read, got {Path(name)}"):
        ReplayOptions([tmp_path / "t.jsonl"], html=Path(name))


def test_two_names_of_one_file_are_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="must name different files"):
        ReplayOptions(TRACES, json_file=tmp_path / "x", html=Path("x"))
