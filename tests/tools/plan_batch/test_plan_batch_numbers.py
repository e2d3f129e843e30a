"""The numbers of `warmprefix plan-batch` are those of an engine that serves its orders."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from warmprefix.annotate import Annotation, Templates
from warmprefix.tokens import order_note
from warmprefix_baselines import BATCH_PLANNERS
from warmprefix_tools.cli import app
from warmprefix_tools.plan_batch import run_plan_batch
from warmprefix_tools.traces.trace import stand_in

Line = dict[str, Any]
Recount = Callable[[list[Line], list[Line], int | None], int]
Write = Callable[[Path, list[Line]], Path]

CONTRACT = [
    "planner", "trace", "requests", "saved_tokens", "total_tokens", "hit_ratio", "today_saved_tokens", "note_tokens",
    "net_saved_tokens", "prefill_change", "upper_bound", "seconds", "device",
]  # fmt: skip


class PlanBatchRun:
    """One run of the command in this process, with its output."""

    def __init__(self, trace: Path, *options: object) -> None:
        numbers, orders = trace.with_suffix(".numbers"), trace.with_suffix(".orders")
        arguments = ["plan-batch", trace, "--json", numbers, "--orders-out", orders, *options]
        result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        self.printed = result.stdout
        self.numbers: dict[str, Any] = json.loads(numbers.read_text())
        self.orders: list[Line] = [json.loads(line) for line in orders.read_text().splitlines()]


def requests_of(lines: list[Line]) -> list[Line]:
    return [line for line in lines if "request" in line]


@pytest.mark.sample(12)
@pytest.mark.parametrize("planner", BATCH_PLANNERS)
@pytest.mark.parametrize("capacity", [None, 20_000, 900, 1])
@pytest.mark.parametrize("scopes", [(None,), (None, "acme", "")])
def test_saved_tokens_can_be_counted_again(
    tmp_path: Path,
    topic_lines: Callable[..., list[Line]],
    write: Write,
    recount: Recount,
    planner: str,
    capacity: int | None,
    scopes: tuple[str | None, ...],
) -> None:
    lines = topic_lines(scopes=scopes)
    trace = write(tmp_path / "topics.jsonl", lines)
    size = "unbounded" if capacity is None else capacity
    planned = PlanBatchRun(trace, "--planner", planner, "--capacity-tokens", size)
    numbers = planned.numbers
    assert list(numbers) == CONTRACT
    assert (numbers["planner"], numbers["trace"], numbers["requests"]) == (planner, "topics", 200)
    assert numbers["saved_tokens"] == recount(lines, planned.orders, capacity)
    assert numbers["hit_ratio"] == numbers["saved_tokens"] / numbers["total_tokens"]
    assert numbers["saved_tokens"] <= numbers["upper_bound"] < numbers["total_tokens"]
    assert numbers["seconds"] > 0
    assert numbers["device"] == "cpu"

    asked = {line["request"]: line["blocks"] for line in requests_of(lines)}
    tokens = {line["block"]: line["tokens"] for line in lines if "block" in line}
    assert all(list(line) == ["request", "order"] for line in planned.orders)
    assert Counter(line["request"] for line in planned.orders) == Counter(asked.keys())
    for line in planned.orders:
        assert sorted(line["order"]) == sorted(asked[line["request"]])
        if planner == "relevance":
            assert line["order"] == asked[line["request"]]
    assert numbers["total_tokens"] == sum(tokens[block] for blocks in asked.values() for block in blocks)

    as_they_came = [{"request": line["request"], "order": line["blocks"]} for line in requests_of(lines)]
    assert numbers["today_saved_tokens"] == recount(lines, as_they_came, capacity)
    before = numbers["today_saved_tokens"] / numbers["total_tokens"]
    net = numbers["saved_tokens"] - numbers["today_saved_tokens"] - numbers["note_tokens"]
    assert numbers["net_saved_tokens"] == net
    assert numbers["prefill_change"] == pytest.approx(-net / (numbers["total_tokens"] - numbers["today_saved_tokens"]))
    assert f"{net:+,} tokens, " in planned.printed
    assert (": a loss" in planned.printed) == (net < 0)
    assert f"{before:.1%} as they came -> {numbers['hit_ratio']:.1%} planned" in planned.printed
    if capacity is None and planner == "relevance":
        assert numbers["hit_ratio"] == before
    elif capacity is None:
        assert numbers["hit_ratio"] > before + 0.1


@st.composite
def traces(draw: st.DrawFn) -> list[Line]:
    """Few blocks under ids that look alike, requests that may be empty or equal, and scopes."""
    ids: list[str | int] = draw(st.lists(st.sampled_from([*range(6), *map(str, range(6)), "é\n", ""]), unique=True))
    lines: list[Line] = [{"name": "any"}]
    lines += [{"block": id, "tokens": draw(st.integers(0, 40))} for id in ids]
    some = st.permutations(ids).flatmap(lambda ids: st.integers(0, len(ids)).map(lambda n: ids[:n]))
    for number in range(draw(st.integers(1, 12))):
        id = number // 2 if number % 2 else str(number // 2)  # the same digits twice, once as a string
        lines.append({"request": id, "blocks": draw(some), "scope": draw(st.sampled_from([None, "a"]))})
    return lines


@given(
    lines=traces(),
    planner=st.sampled_from(BATCH_PLANNERS),
    capacity=st.none() | st.integers(1, 120),
    k=st.integers(1, 9),
)
def test_any_trace(
    tmp_path_factory: pytest.TempPathFactory,
    write: Write,
    recount: Recount,
    lines: list[Line],
    planner: str,
    capacity: int | None,
    k: int,
) -> None:
    trace = write(tmp_path_factory.mktemp("any") / "any.jsonl", lines)
    size = "unbounded" if capacity is None else capacity
    planned = PlanBatchRun(trace, "--planner", planner, "--capacity-tokens", size, "-k", k)
    assert planned.numbers["saved_tokens"] == recount(lines, planned.orders, capacity)
    asked = [(line["request"], frozenset(line["blocks"][:k])) for line in requests_of(lines)]
    got = [(line["request"], frozenset(line["order"])) for line in planned.orders]
    assert len(got) == len(asked)
    assert set(got) == set(asked)


def test_long_requests_are_cut_at_15_blocks(tmp_path: Path, write: Write) -> None:
    lines: list[Line] = [{}, *({"block": i, "tokens": 10} for i in range(20)), {"request": 0, "blocks": [*range(20)]}]
    planned = PlanBatchRun(write(tmp_path / "long.jsonl", lines))
    assert planned.orders == [{"request": 0, "order": [*range(15)]}]
    assert planned.numbers["trace"] == "long"


def test_equal_requests_of_different_scopes_share_nothing(tmp_path: Path, write: Write) -> None:
    lines: list[Line] = [{}, {"block": 1, "tokens": 100}]
    lines += [{"request": number, "blocks": [1], "scope": f"tenant {number % 5}"} for number in range(10)]
    planned = PlanBatchRun(write(tmp_path / "scopes.jsonl", lines))
    assert planned.numbers["saved_tokens"] == 5 * 100
    assert [line["request"] for line in planned.orders] == [0, 5, 1, 6, 2, 7, 3, 8, 4, 9]


@pytest.mark.parametrize("annotate", ["auto", "note", "labels", "both", "none"])
def test_notes_are_those_of_the_prompts(trace: Path, annotate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written tokens are those by which prompts differ from their texts; a found block's label is found too."""
    monkeypatch.setattr(run_plan_batch, "load_tokenizer", lambda name: words)
    planned = PlanBatchRun(trace, "--planner", "merge", "--annotate", annotate, "--tokenizer", "words.json")
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    ranks = {line["request"]: {block: rank for rank, block in enumerate(line["blocks"])} for line in requests_of(lines)}
    seen: set[tuple[int, ...]] = set()
    labels = found_labels = notes = 0
    for line in planned.orders:
        for end in range(1, len(line["order"]) + 1):
            labels += annotate in ("labels", "both")
            found_labels += annotate in ("labels", "both") and tuple(line["order"][:end]) in seen
            seen.add(tuple(line["order"][:end]))
        shown: Annotation = "note" if annotate == "auto" else cast(Annotation, annotate)
        order = [ranks[line["request"]][block] for block in line["order"]]
        note = order_note(
            Templates(), shown, order, [f"b{i}" for i in order], list(map(stand_in, map(str, line["order"])))
        )
        notes += 0 if note is None else words(note)
    assert planned.numbers["note_tokens"] == labels + notes
    gross = planned.numbers["saved_tokens"] - planned.numbers["today_saved_tokens"]
    assert planned.numbers["net_saved_tokens"] == gross - (labels - found_labels) - notes
    assert (labels + notes > 0) == (annotate != "none")


def words(text: str) -> int:
    return len(text.split())


def test_net_loss_is_called_a_loss(tmp_path: Path, write: Write) -> None:
    """Blocks of two tokens are shorter than the note that another order needs."""
    lines: list[Line] = [{}, *({"block": i, "tokens": 2} for i in range(30))]
    lines += [{"request": i, "blocks": [i + 1, 0, i + 10]} for i in range(10)]
    trace = write(tmp_path / "short.jsonl", lines)
    loss = PlanBatchRun(trace, "--planner", "merge")
    assert loss.numbers["saved_tokens"] > 0 > loss.numbers["net_saved_tokens"]
    assert loss.numbers["prefill_change"] > 0
    assert ": a loss, try --annotate none or --planner relevance" in " ".join(loss.printed.split())
    free = PlanBatchRun(trace, "--planner", "merge", "--annotate", "none")
    assert free.numbers["net_saved_tokens"] == free.numbers["saved_tokens"] == loss.numbers["saved_tokens"]
    assert "loss" not in free.printed


def test_upper_bound_is_printed_with_its_kind(trace: Path) -> None:
    printed = PlanBatchRun(trace).printed
    assert re.search(r"upper bound +[\d,]+ \(\d\d\.\d%\), exact maximum spanning forest", printed)


@pytest.mark.parametrize("replicas", [2, 5, 300])
def test_replicas_get_all_requests_in_execution_order(
    tmp_path: Path, topic_lines: Callable[..., list[Line]], write: Write, recount: Recount, replicas: int
) -> None:
    lines = topic_lines()
    trace = write(tmp_path / "topics.jsonl", lines)
    whole = PlanBatchRun(trace)
    cut = PlanBatchRun(trace, "--replicas", replicas)
    assert [{"request": line["request"], "order": line["order"]} for line in cut.orders] == whole.orders
    assert list(cut.numbers) == [*CONTRACT, "replicas"]
    tokens = {line["block"]: line["tokens"] for line in lines if "block" in line}
    computed: list[int] = []
    for number, replica in enumerate(cut.numbers["replicas"]):
        own = [line for line in cut.orders if line["replica"] == number]
        computed.append(sum(tokens[block] for line in own for block in line["order"]) - recount(lines, own, None))
        assert replica == {"requests": len(own), "computed_tokens": computed[-1]}
    assert len(computed) == replicas
    assert f"On {replicas} replicas:" in cut.printed
    assert f"-> {sum(computed):,} on all together" in cut.printed


def test_candidates_are_chosen_by_their_scores(
    tmp_path: Path, topic_lines: Callable[..., list[Line]], write: Write, recount: Recount
) -> None:
    lines = topic_lines(k=10)
    lines = [line | {"scores": [20 - 0.1 * i for i in range(10)]} if "request" in line else line for line in lines]
    trace = write(tmp_path / "scored.jsonl", lines)
    first, chosen = PlanBatchRun(trace, "-k", 5), PlanBatchRun(trace, "--choose", "k=5,keep=1,within=1")
    assert recount(lines, chosen.orders, None) == chosen.numbers["saved_tokens"]
    assert chosen.numbers["today_saved_tokens"] == first.numbers["today_saved_tokens"]
    assert chosen.numbers["net_saved_tokens"] > first.numbers["net_saved_tokens"]
    candidates = {line["request"]: line["blocks"] for line in requests_of(lines)}
    entered = 0
    for line in chosen.orders:
        own = candidates[line["request"]]
        assert len({*line["order"]}) == 5
        assert {own[0]} <= {*line["order"]} <= {*own}
        entered += len({*line["order"]} - {*own[:5]})
    assert chosen.numbers["entered_blocks"] == entered > 0
    assert re.search(rf"entered by choice +{entered} blocks", chosen.printed)
    assert "entered" not in first.printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--choose", "keep=1"], "--choose must name k"),
        (["--choose", "k=3", "-k", "4"], "-k must be left out, because --choose has its own"),
        (["--choose", "k=3"], "request '0': candidate 0 must have a finite score to choose by, got None"),
        (["--choose", "k=3,twins=yes"], "it has no texts, by which twins are found"),
    ],
)
def test_choices_that_cannot_be_made_are_refused(trace: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["plan-batch", str(trace), *options])
    assert result.exit_code != 0
    assert message in " ".join((result.output + str(result.exception)).replace("│", " ").split())
