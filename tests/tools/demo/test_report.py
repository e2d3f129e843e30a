"""The printed report and the JSON of a session."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from warmprefix_tools.demo.demo_measures import pick_examples, prompt_lines, summarize_arm, summarize_workload
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.demo.demo_report import print_report
from warmprefix_tools.demo.run_demo import result_as_json
from warmprefix_tools.demo.session import ArmRuns, DemoResult, ServedTurn


def printed(result: DemoResult, options: DemoOptions, width: int = 100, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding, errors="strict", write_through=True) as file:
        print_report(result, options, Console(file=file, width=width, highlight=False))
        return raw.getvalue().decode(encoding)


def test_report_has_both_tables_three_prompts_and_the_caveats(result: DemoResult, options: DemoOptions) -> None:
    text = printed(result, options)
    assert text.count("tokens prefilled (net)") == 2
    assert text.count("labels, notes, references") == 2
    for served in result.runs["head"]:
        ratio = summarize_arm(served).hit_ratio
        assert ratio is not None
        assert f"{ratio:.1%}" in text
    assert text.count("\nQ: ") == 3
    reordered, referring, _ = pick_examples(result.runs)
    for example in (reordered, referring):
        for shown in (example.before, example.after):
            assert f" 1. {shown.context.blocks[0].label}" in text
    assert f"  then: {reordered.after.context.order_annotation}" in text
    notes = sum(summarize_arm(after).annotated for _, after in result.runs.values())
    assert f"; {notes} have a note that names the most relevant" in text
    assert "\u21a9 " in text
    assert "Emulated" in text
    assert "--endpoint" in text
    assert len(text.splitlines()) <= 64


@pytest.mark.parametrize("width", [40, 80, 200])
def test_report_fits_any_width(result: DemoResult, options: DemoOptions, width: int) -> None:
    assert max(map(len, printed(result, options, width).splitlines())) <= width


def test_report_can_be_printed_without_unicode(result: DemoResult, options: DemoOptions) -> None:
    text = printed(result, options, encoding="ascii")
    assert "# cached" in text
    assert "^ reference" in text


def test_unreported_counts_are_left_out(result: DemoResult) -> None:
    def silent(served: ServedTurn) -> ServedTurn:
        return replace(served, answer=replace(served.answer, cached_tokens=None))

    runs: ArmRuns = {
        placement: ([silent(each) for each in before], [silent(each) for each in after])
        for placement, (before, after) in result.runs.items()
    }
    real = replace(result, runs=runs, emulator=None)
    text = printed(real, DemoOptions(endpoint="http://engine:8000/v1"))
    assert "does not report cached tokens" in text
    assert "hit ratio" not in text
    assert "tokens prefilled" not in text
    assert "TTFT p50" in text
    assert "\u25cb" not in text.partition("\nQ: ")[2]


def test_missing_count_is_zero_if_others_are_reported(result: DemoResult) -> None:
    served = list(result.runs["head"][0])
    zero = next(i for i, each in enumerate(served) if not each.answer.cached_tokens)
    served[zero] = replace(served[zero], answer=replace(served[zero].answer, cached_tokens=None))
    assert summarize_arm(served) == summarize_arm(result.runs["head"][0])


def test_marks_agree_with_the_engines_count(result: DemoResult) -> None:
    for placement, arms in result.runs.items():
        for served in (each for arm in arms for each in arm[::4]):
            states = [line.cached for line in prompt_lines(served, placement) if not line.is_reference]
            assert states == sorted(states, key=["all", "part", "none"].index)  # a prefix
            assert states.count("part") <= 1
            assert len(prompt_lines(served, placement)) - len(served.context.blocks) in (0, 1)


def test_examples_are_of_their_kinds(result: DemoResult) -> None:
    reordered, referring, least = pick_examples(result.runs)
    assert reordered.after.context.reordered
    assert referring.after.context.reference_tokens > 0
    for example in (reordered, referring, least):
        assert example.before.question is example.after.question


def test_workload_summary_matches_the_turns(result: DemoResult) -> None:
    workload = summarize_workload(result.turns)
    assert workload.questions == len(result.turns)
    assert 0 < workload.seen_in_conversation < workload.seen_by_anyone < 1
    assert workload.distinct_blocks == len({block for turn in result.turns for block in turn.blocks})


def test_json_has_totals_and_requests(result: DemoResult, options: DemoOptions) -> None:
    document = json.loads(json.dumps(result_as_json(result, options), allow_nan=False))
    assert document["options"] == {"k": 10, "questions": 40, "seed": 0, "concurrency": 1}
    assert document["engine"]["emulated"] is True
    assert document["workload"]["questions"] == 40
    assert set(document["placements"]) == {"head", "tail"}
    for arms in document["placements"].values():
        assert set(arms) == {"relevance_order", "warmprefix"}
        for arm in arms.values():
            requests = arm["per_request"]
            assert len(requests) == arm["requests"] == 40
            assert sum(request["prompt_tokens"] for request in requests) == arm["prompt_tokens"]
            assert sum(request["cached_tokens"] for request in requests) == arm["cached_tokens"]
            assert arm["prefilled_tokens"] == arm["prompt_tokens"] - arm["cached_tokens"]
            assert arm["hit_ratio"] == arm["cached_tokens"] / arm["prompt_tokens"]


def test_json_of_a_real_server_has_no_api_key(result: DemoResult) -> None:
    options = DemoOptions(endpoint="http://engine:8000/v1", api_key="secret")
    document = result_as_json(replace(result, emulator=None), options)
    assert document["engine"] == {"emulated": False, "endpoint": "http://engine:8000/v1", "model": result.model}
    assert "secret" not in json.dumps(document)
