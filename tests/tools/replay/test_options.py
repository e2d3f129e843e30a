"""What the command may be told, and what it says of what it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from warmprefix.ordering import POLICIES
from warmprefix_tools.replay.options import STDOUT, ReplayOptions, parse_capacities, parse_policies


def test_policies_come_in_the_order_in_which_they_are_named() -> None:
    assert parse_policies("coaccess, relevance,coaccess") == ("coaccess", "relevance")
    assert parse_policies("all") == parse_policies("relevance,all") == tuple(POLICIES)


@pytest.mark.parametrize("wrong", ["best", "", "relevance,", "All"])
def test_an_unknown_policy_is_answered_with_the_known_ones(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"--policies takes all, or names of relevance, sorted, .*coaccess; got "):
        parse_policies(wrong)


def test_capacities_are_numbers_or_unbounded() -> None:
    assert parse_capacities("100000,unbounded") == (100_000, None)
    assert parse_capacities("1, 100_000,500k,1M,500000") == (1, 100_000, 500_000, 1_000_000)


@pytest.mark.parametrize("wrong", ["0", "", "-5", "1.5M", "many", "100000,", "0k", "1e6", "unbound", "١"])
def test_another_capacity_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="--capacity-tokens takes unbounded, or whole numbers from 1 on"):
        parse_capacities(wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"k": 0}, "-k must be 1 or more, got 0"),
        ({"limit": 0}, "--limit must be"),
        ({"answer_tokens": -1}, "--answer-tokens must be"),
        ({"answer_tokens": 5}, "--answer-tokens is for --placement tail"),
        ({"prefill_rate": 0.5}, "--prefill-rate must be from 1 to 1,000,000,000,000, got 0.5"),
        ({"prefill_rate": float("inf")}, "--prefill-rate must be"),
        ({"price": -1.0}, "--price must be from 0 to 1,000,000,000,000, got -1"),
        ({"price": 1e300}, "--price must be"),
        ({"price": float("nan")}, "--price must be"),
        ({"price": 1.0, "cached_price": -1.0}, "--cached-price must be"),
        ({"cached_price": 1.0}, "--cached-price needs --price"),
        ({"orders_file": STDOUT}, "--orders-out needs the name of a file"),
        ({"html_file": STDOUT}, "--html needs the name of a file"),
        ({"html_file": Path("x"), "json_file": Path("x")}, "different files"),
    ],
)
def test_options_say_what_is_wrong_with_them(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ReplayOptions((Path("t.jsonl"),), ("relevance",), (None,), **wrong)


@pytest.mark.parametrize("name", ["t.jsonl", "./t.jsonl", "link.jsonl"])
def test_no_trace_is_written_over(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.jsonl").symlink_to("t.jsonl")
    with pytest.raises(
        ValueError, match=r"t\.jsonl is to be read, so --json, --orders-out and --html can't be written"
    ):
        ReplayOptions((tmp_path / "t.jsonl",), ("relevance",), (None,), html_file=Path(name))


def test_two_names_of_one_file_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="different files"):
        ReplayOptions((Path("t"),), ("relevance",), (None,), json_file=tmp_path / "x", html_file=Path("x"))
