"""The page of a report, as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmprefix_tools.doctor.findings import Divergence, DoctorReport, Place, SkippedRecord
from warmprefix_tools.doctor.page import doctor_page
from warmprefix_tools.report.visible import visible

Parse = Callable[[str], Any]
ANY_TEXT = st.one_of(
    st.sampled_from(["</code><script>alert(1)</script>", '"><img src=x onerror=y>', "\u202e\x00\x1b[2J", "&amp;"]),
    st.text(st.characters(exclude_categories=[])),
)


def test_every_finding_is_there_worst_first(report: DoctorReport, outline: Parse) -> None:
    page = outline(doctor_page(report))
    for number, finding in enumerate(report.findings, 1):
        assert {finding.title, f"{number}. {finding.title}", finding.fix, finding.kind} <= set(page.texts)
        assert f"{finding.share:.1%}" in page.texts
    costs = [text for text in page.texts if "computed again" in text]
    assert [int(cost.partition(" ")[0].replace(",", "")) for cost in costs] == [
        finding.lost_tokens for finding in report.findings if finding.lost_tokens
    ]
    assert "Not a matter of speed; 5 requests concerned" in "".join(page.texts)


def test_the_totals_are_there(report: DoctorReport, outline: Parse) -> None:
    texts = outline(doctor_page(report)).texts
    assert {f"{ratio:.1%}" for ratio in (report.hit_ratio, report.repaired_hit_ratio, report.bound_ratio)} <= set(texts)
    assert (
        f"6 causes found. They keep 4.21M tokens out of the cache, {report.lost_share:.1%} of all prompt tokens."
        in texts
    )
    elsewhere = report.bound_tokens - report.repaired_hit_tokens
    new = report.prompt_tokens - report.bound_tokens
    assert {f"{n:,}" for n in (report.hit_tokens, report.lost_tokens, elsewhere, new)} <= set(texts)
    assert "13.8%" in texts  # the engine's own count


def test_the_place_of_divergence_is_exact(report: DoctorReport, outline: Parse) -> None:
    text = "".join(outline(doctor_page(report)).texts)
    assert "Request 7 messages[0] (system), character 55 in logs/day.jsonl line 10" in text
    assert "Request 12 tools[0].function.name in logs/day.jsonl line 15" in text
    assert "share their first 11 tokens. If fixed, they would share 4,280." in text
    assert "<mark>2026-07-01 09:14:07</mark>" in doctor_page(report)
    assert "<mark>2026-07-01 09:14:31</mark>" in doctor_page(report)


def test_unreadable_records_are_listed(report: DoctorReport, outline: Parse) -> None:
    texts = outline(doctor_page(report)).texts
    assert "3 records of the log could not be read and do not count. The first 1:" in texts
    assert "not JSON: Expecting value: line 1 column 1 (char 0)" in texts
    assert "could not be read" not in doctor_page(replace(report, skipped=(), skipped_lines=0))


def test_notes_on_the_log_are_shown(report: DoctorReport, outline: Parse) -> None:
    assert set(report.notes) <= set(outline(doctor_page(report)).texts)


def test_one_cause_is_not_many(report: DoctorReport) -> None:
    assert "1 cause found. It keeps 4.21M tokens" in doctor_page(replace(report, findings=report.findings[:1]))
    free = replace(report, findings=report.findings[-1:], repaired_hit_tokens=report.hit_tokens)
    assert "1 cause found, at no cost in tokens." in doctor_page(free)


def test_a_clean_log_and_an_empty_one(report: DoctorReport, outline: Parse) -> None:
    clean = replace(report, findings=(), repaired_hit_tokens=report.hit_tokens)
    assert "No defect was found." in doctor_page(clean)
    assert "fixed" not in doctor_page(clean)
    empty = replace(
        clean, requests=0, conversations=0, prompt_tokens=0, hit_tokens=0, repaired_hit_tokens=0, bound_tokens=0,
        reported_prompt_tokens=0, reported_cached_tokens=0, files=(),
    )  # fmt: skip
    assert "There was no request to examine." in outline(doctor_page(empty)).texts


def test_it_is_balanced_loads_nothing_and_is_always_the_same(report: DoctorReport, outline: Parse) -> None:
    page = doctor_page(report)
    assert page == doctor_page(replace(report))
    assert not {name for name, _ in outline(page).elements} & {"script", "img", "link", "iframe", "form", "base"}
    assert not re.search(r"https?:|//", page)
    ids = [attributes["id"] for _, attributes in outline(page).elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for name, a in outline(page).elements if name == "a"} <= set(ids)


@settings(max_examples=settings().max_examples // 3)
@given(ANY_TEXT, ANY_TEXT, ANY_TEXT, st.data())
def test_whatever_the_log_holds_stays_text(
    report: DoctorReport, outline: Parse, name: str, snippet: str, path: str, data: st.DataObject
) -> None:
    ends = sorted(data.draw(st.tuples(*2 * [st.integers(0, len(snippet))])))
    place = Place(1, name, 1, message=0, role=path, path=path or None, snippet=snippet, mark=(ends[0], ends[1]))
    finding = replace(report.findings[0], divergence=Divergence(place, place, 1, 2), title=name, fix=snippet, kind=path)
    hostile = replace(
        report,
        files=(name, snippet),
        notes=(path,),
        findings=(finding,),
        skipped=(SkippedRecord(name, 1, snippet),),
        skipped_lines=1,
    )
    page = doctor_page(hostile)
    page.encode("utf-8")
    parsed = outline(page)
    assert {tag for tag, _ in parsed.elements} <= {tag for tag, _ in outline(doctor_page(report)).elements}
    shown = "".join(parsed.texts)
    assert all(visible(text) in shown for text in (name, snippet, path))
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page)


@pytest.mark.parametrize("mark", [None, (0, 0), (0, 3), (3, 3)])
def test_any_mark_will_do(report: DoctorReport, mark: tuple[int, int] | None) -> None:
    place = Place(1, "log", 1, snippet="abc", mark=mark)
    finding = replace(report.findings[0], divergence=Divergence(place, place, 1, 1))
    page = doctor_page(replace(report, findings=(finding,)))
    assert page.count("<mark>") == (0 if mark is None else 2)
    assert "If fixed" not in page
