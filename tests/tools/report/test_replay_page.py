"""The page of a replay, as text."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmprefix_tools.replay.page import replay_page
from warmprefix_tools.replay.results import Estimates, Misses, ReplayResult
from warmprefix_tools.report.visible import visible

Parse = Callable[[str], Any]

HOSTILE = (
    "</title><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "--></style><style>@import 'http://evil.example'</style>",
    "\u202egnp.exe\u2066",
    "a\x00b\x1b[31m\nc\r\td",
    "&lt;b&gt;",
    "\ud800",
    "x" * 3_000,
    "",
)


def test_replay_page_is_balanced_and_loads_nothing(results: list[ReplayResult], outline: Parse) -> None:
    page = outline(replay_page(results))
    names = {name for name, _ in page.elements}
    assert not names & {"script", "img", "link", "iframe", "object", "embed", "form", "base", "audio", "video", "use"}
    for _, attributes in page.elements:
        assert not any(name in ("src", "srcset", "style", "xlink:href") or name.startswith("on") for name in attributes)
        assert attributes.get("href", "#").startswith("#")
    assert not re.search(r"https?:|//", replay_page(results))


def test_policy_allows_only_the_style_which_loads_nothing(results: list[ReplayResult], outline: Parse) -> None:
    style = resources.files("warmprefix_tools.report").joinpath("style.css").read_text(encoding="utf-8")
    assert "@import" not in style
    assert set(re.findall(r"url\(.", style)) == {"url(#"}
    page = replay_page(results)
    assert page.count("<style>") == 1
    (shown,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(shown.encode()).digest()).decode()
    (policy,) = [
        attributes["content"]
        for name, attributes in outline(page).elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


@pytest.mark.parametrize("placement", ["head", "tail"])
def test_every_result_is_on_the_page(results: list[ReplayResult], placement: str, outline: Parse) -> None:
    chosen = [result for result in results if result.placement == placement]
    texts = set(outline(replay_page(chosen)).texts)
    for result in chosen:
        assert {result.trace, result.policy, f"{result.hit_ratio:.1%}", f"{result.saved_tokens:,}"} <= texts
        assert {f"{result.prefilled_tokens:,}", f"{result.gained_requests:,}", f"{result.lost_requests:,}"} <= texts
    first = [result for result in chosen if result.capacity_tokens == chosen[0].capacity_tokens]
    for result in first:
        assert {f"{result.misses.new:,}", f"{result.misses.order:,}", f"{result.misses.total:,}"} <= texts


@settings(max_examples=settings().max_examples // 3)
@given(
    st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(exclude_categories=[]))), min_size=2, max_size=2)
)
def test_hostile_names_stay_names(results: list[ReplayResult], outline: Parse, names: Sequence[str]) -> None:
    trace, policy = names
    plain, named = results[:3], [replace(result, trace=trace) for result in results[:3]]
    named[0] = replace(named[0], policy=policy)
    if policy in {result.policy for result in named[1:]}:
        return
    page = replay_page(named)
    page.encode("utf-8")
    parsed = outline(page)
    assert {name for name, _ in parsed.elements} <= {name for name, _ in outline(replay_page(plain)).elements} | {"bdi"}
    assert sum(name == "script" for name, _ in parsed.elements) == 0
    for name in filter(None, (trace, policy)):
        assert visible(name) in parsed.texts
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page)


@pytest.mark.parametrize("policies", [["relevance"], ["coaccess"], ["greedy"], ["greedy", "relevance"]])
def test_any_choice_of_policies_makes_a_page(results: list[ReplayResult], policies: list[str], outline: Parse) -> None:
    chosen = [result for result in results if result.policy in policies]
    texts = outline(replay_page(chosen)).texts
    assert f"gross hit ratio with {policies[0]}" in texts


def test_traces_without_requests_or_context_make_a_page(results: list[ReplayResult]) -> None:
    nothing = replace(
        results[0], requests=0, saved_tokens=0, total_tokens=0, gained_requests=0, lost_requests=0,
        reordered_requests=0, untouched_requests=0, note_tokens=0, today_saved_tokens=0, today_total_tokens=0,
        misses=Misses(), over_time=(),
    )  # fmt: skip
    page = replay_page([nothing, replace(nothing, policy="coaccess")])
    assert "nothing to save" in page
    assert "Where the misses" not in page
    assert "over time" not in page


def test_estimates_are_shown_with_what_they_assume(results: list[ReplayResult], outline: Parse) -> None:
    estimates = Estimates(prefill_rate=10_000, price=2.5, cached_price=0.25)
    result = results[7]
    texts = outline(replay_page([result], estimates)).texts
    assert f"{estimates.cost(result):,.2f}" in texts
    assert f"to pay, estimated; today {estimates.cost_today(result):,.2f}" in texts
    seconds = estimates.ttft_seconds(result)
    assert seconds is not None
    assert f"{1e3 * seconds:.0f}\u00a0ms" in texts
    assumed = "Estimates assume a prefill of 10,000 tokens per second, a price of 2.5 per million prefilled tokens"
    assert f"{assumed} and 0.25 per million cached ones, and an idle engine." in texts
    assert "estimated" not in replay_page([result])
