"""The page of a session: the terminal's numbers, and prompts whose places are those that a note counts."""

from __future__ import annotations

import html
import re
from dataclasses import replace

from warmprefix_tools.demo.demo_measures import pick_examples, summarize_arm
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.demo.demo_report import comparison_rows, notes, workload_summary
from warmprefix_tools.demo.page import demo_page
from warmprefix_tools.demo.session import ArmRuns, DemoResult, ServedTurn


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page))


def test_page_has_the_numbers_of_the_terminal(result: DemoResult, options: DemoOptions) -> None:
    page = demo_page(result, options)
    assert page == demo_page(result, options)
    text = text_of(page)
    assert workload_summary(result, options) in text
    assert all(note in text for note in notes(result))
    for before, after in result.runs.values():
        for row in comparison_rows(summarize_arm(before), summarize_arm(after)):
            assert f"{row.name}{row.before}{row.after}{row.change}\n" in text.replace("\n\n", "\n")


def test_prompts_are_numbered_as_their_notes_count(result: DemoResult, options: DemoOptions) -> None:
    page = demo_page(result, options)
    lists = [
        [text_of(item) for item in re.findall(r"<li[^>]*>(.*?)</li>", each)]
        for each in re.findall(r'<ol class="prompt">(.*?)</ol>', page, re.DOTALL)
    ]
    examples = pick_examples(result.runs)
    shown = [served for example in examples for served in (example.before, example.after)]
    for items, served in zip(lists, shown, strict=True):
        blocks = [item for item in items if not item.startswith("(history")]
        assert blocks == [f"{place}. {block.label}" for place, block in enumerate(served.context.blocks, 1)]
    assert any(item.startswith("(history") for items in lists for item in items)
    for example in examples:
        annotation = example.after.context.order_annotation
        assert annotation is None or f"then: {annotation}" in text_of(page)


def test_page_without_reported_counts_has_no_chart(result: DemoResult) -> None:
    def silent(served: ServedTurn) -> ServedTurn:
        return replace(served, answer=replace(served.answer, cached_tokens=None))

    runs: ArmRuns = {
        placement: ([silent(each) for each in before], [silent(each) for each in after])
        for placement, (before, after) in result.runs.items()
    }
    page = demo_page(replace(result, runs=runs, emulator=None), DemoOptions(endpoint="http://engine:8000/v1"))
    assert "Hit ratio over time" not in page
    assert "does not report cached tokens" in page
