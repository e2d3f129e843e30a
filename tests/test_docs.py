"""The code blocks of README.md and docs/ run as they stand, one after the other, against the emulator."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai import OpenAI

from engine_tables import overview, tables
from redis_servers import Server, wait_until
from warmprefix import ContextBlock, ContextPlanner
from warmprefix.traces import TraceRecorder
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.traces.reader import read_trace

ROOT = Path(__file__).parent.parent
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def application() -> Any:
    """Names of the application around the examples."""
    passages = [SimpleNamespace(id=f"Doc_{n}", text=f"Passage {n}. " * 20) for n in range(3)]
    instant = EmulatorConfig(prefill_rate=float("inf"), decode_rate=float("inf"), base_ttft_ms=0)
    with EmulatorServer(instant) as server, OpenAI(base_url=server.base_url, api_key="none") as client:
        yield {
            "base_url": server.base_url,
            "client": client,
            "model": instant.model,
            "question": "What is it?",
            "messages": [],
            "retrieved": [
                ("Which?", [ContextBlock(p.text, id=p.id) for p in order]) for order in (passages, passages[1:])
            ],
            "retriever": SimpleNamespace(search=lambda question: passages),
        }


def test_the_readmes_code_runs(
    application: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Blocks for frameworks run in the tests of the frameworks.
    blocks = [block for block in CODE.findall((ROOT / "README.md").read_text()) if "from warmprefix_" not in block]
    *single, shared, linked, batch = blocks
    assert len(single) == 3
    for block in single:
        exec(compile(block, "README.md", "exec"), application)
        assert application["answer"].choices[0].message.content
    assert application["planner"].stats().commits == 3
    with Server() as server:
        here = shared.replace("redis://localhost:6379", server.url)
        with ContextPlanner.from_url(server.url) as worker:

            def holds_all() -> bool:
                plan = worker.plan(application["blocks"], conversation="chat-42", placement="tail", tenant="acme")
                worker.abandon(plan)
                return len(plan.references) == len(application["blocks"])

            def is_up_to_date() -> bool:
                # On a busy machine a turn may get no answer in time; then its blocks are sent in full, and once more.
                exec(compile(here, "README.md", "exec"), {**application, "ContextPlanner": ContextPlanner})
                with contextlib.suppress(TimeoutError):
                    wait_until(holds_all, "once the server is old enough to be trusted", seconds=4)
                return holds_all()

            wait_until(is_up_to_date, "the other worker is up to date")
    exec(compile(linked, "README.md", "exec"), application)
    stats = application["planner"].stats()
    assert (stats.commits, stats.reports) == (4, 1)
    monkeypatch.chdir(tmp_path)  # the batch example writes a journal
    exec(compile(batch, "README.md", "exec"), application)
    assert application["planner"].stats().commits == 6
    assert (tmp_path / "night.journal").stat().st_size > 0
    summary, *answers = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d+% of the context will be cached; at most \d+% could be", summary)
    assert [answer.partition(" ")[0] for answer in answers if answer[:2] in ("0 ", "1 ")] == ["0", "1"]


@pytest.mark.parametrize(
    ("number", "printed"),
    [(0, "0\n96\n"), (1, "2004 0\n0 2004\n"), (2, "0 2100 2100.0\n0 2100 2100.0\n1056 1044 1044.0\n")],
)
def test_the_emulators_examples_print_their_comments(
    number: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = CODE.findall((ROOT / "docs/emulator.md").read_text())
    assert len(blocks) == 3
    if "anthropic import" in blocks[number]:
        pytest.importorskip("anthropic")
    exec(compile(blocks[number], "emulator.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_recording_works_as_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/record.md").read_text()
    planned, *recorded = CODE.findall(page)
    names: dict[str, Any] = {
        # Results of the frameworks' retrievers, with the fields that the page uses.
        "retriever": SimpleNamespace(
            search=lambda question: [SimpleNamespace(text="Passage.", id="plain", score=0.5)],
            invoke=lambda question: [SimpleNamespace(page_content="Document.", id="langchain")],
            retrieve=lambda question: [
                SimpleNamespace(node=SimpleNamespace(get_content=lambda: "Node.", node_id="llamaindex"), score=0.25)
            ],
        ),
        "memory": SimpleNamespace(
            search=lambda question, filters: {"results": [{"memory": "Memory.", "id": "mem0", "score": 0.75}]}
        ),
        "count_tokens": lambda text: 1000 + len(text),
        "system_prompt": "You are terse.",
        "piece": "Piece.",
        **dict.fromkeys(("question", "session_id", "thread_id", "user", "model"), "x"),
    }
    exec(compile(planned, "record.md", "exec"), names)
    names["planner"].plan(["a"])
    assert len(read_trace("planned.jsonl.gz").requests) == 1
    assert len(recorded) == 6
    for block in recorded:
        exec(compile(block, "record.md", "exec"), names)
    trace = read_trace("day.jsonl.gz")
    assert [request.blocks for request in trace.requests] == [
        (id,) for id in ("plain", "langchain", "llamaindex", "mem0", ContextBlock("Piece.").fingerprint.hex(), "plain")
    ]
    assert [request.scores for request in trace.requests] == [(0.5,), (), (0.25,), (0.75,), (), ()]
    assert [request.conversation for request in trace.requests] == [0, 0, None, None, None, None]
    assert trace.requests[-1].query_tokens == 1001
    assert len({request.scope for request in trace.requests}) == 4


def test_the_shown_trace_is_valid(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```json\n(.*?)^```$", (ROOT / "docs/record.md").read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "day.jsonl").write_text(shown)
    with TraceRecorder(tmp_path / "ours.jsonl") as recorder:
        recorder.record([ContextBlock("a"), ContextBlock("b")])
    ours, theirs = (
        [list(json.loads(line)) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("ours.jsonl", "day.jsonl")
    )
    assert ours == theirs
    assert read_trace(tmp_path / "day.jsonl").requests[0].blocks == ("handbook#12", "handbook#40")


def test_the_readme_has_exactly_two_set_up_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^```console\n(.*?)\n```$", readme, re.DOTALL | re.MULTILINE) == [
        "python3 run.py demo",
        "python3 run.py test",
    ]


def test_the_readmes_hit_ratios_are_those_of_the_benchmark() -> None:
    measured = json.loads((ROOT / "benchmarks/results/online_hit_ratio.json").read_text())["results"]
    policies = ("relevance", "contextpilot", "frequency", "greedy", "oracle", "coaccess")
    expected = [
        [
            f"{row['trace']} ({row['requests']:,}, {row['k']})",
            *(f"{hit['unbounded']:.1f} / {hit['100000']:.1f}" for hit in map(row["hit_percent"].get, policies)),
        ]
        for row in measured
    ]
    rows = re.findall(r"^\| (\S+ \([\d,]+, \d+\)) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [[name, *cells.replace("*", "").split(" | ")] for name, cells in rows] == expected


def test_the_hit_ratios_of_batches_are_those_of_the_benchmark() -> None:
    measured = json.loads((ROOT / "benchmarks/results/batch_quality.json").read_text())["results"]
    planners = ("as it comes", "frequency", "top-down", "contextpilot", "merge")
    expected = [
        [
            f"{row['trace'].partition(', ')[0]} ({row['requests']:,}, {row['k']})",
            *(f"{hit['unbounded']:.1f} / {hit['30000']:.1f}" for hit in map(row["hit_percent"].get, planners)),
            f"{row['bound_percent']:.1f}",
            *(f"{row['seconds'][planner]:.1f}" for planner in ("contextpilot", "merge")),
        ]
        for row in measured["traces"]
    ]
    page = (ROOT / "docs/batch.md").read_text()
    rows = re.findall(r"^\| (\S+ \([\d,]+, \d+\)) \| (.*) \|$", page, re.MULTILINE)
    assert [[name, *cells.replace("*", "").split(" | ")] for name, cells in rows] == expected
    small = measured["small_batches"]
    exact = {planner: found["exact"] for planner, found in small["share_of_optimum"].items()}
    found = re.search(
        r"Of (\d+) random.* of\s(\d+) of the (\d+) in.*top-down (\d+), ContextPilot (\d+)", page, re.DOTALL
    )
    assert found is not None
    assert [int(number) for number in found.groups()] == [
        small["batches"],
        exact["merge"],
        small["with_something_to_save"],
        exact["top-down"],
        exact["contextpilot"],
    ]


def test_the_times_of_batches_are_those_of_the_benchmark() -> None:
    measured = json.loads((ROOT / "benchmarks/results/batch_scale.json").read_text())["results"]["merge"]
    rows = re.findall(
        r"^\| ([\d,]+) \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) s \| (\d+) MB \|$",
        (ROOT / "docs/batch.md").read_text(),
        re.MULTILINE,
    )
    assert [row[0] for row in rows] == ["2,000", "10,000", "100,000", "200,000"]
    for requests, *seconds, peak in rows:
        runs = {run["generator"]: run for run in measured if f"{run['requests']:,}" == requests}
        assert seconds == [f"{runs[name]['first_seconds']:.1f}" for name in ("clustered", "topics", "zipf")]
        assert peak == f"{max(run['peak_megabytes'] for run in runs.values()):.0f}"


def test_the_readmes_savings_are_those_of_the_benchmark() -> None:
    measured = json.loads((ROOT / "benchmarks/results/plugin_hit_ratio.json").read_text())["results"]
    expected = []
    for row in measured:
        without, plugin = row["without"], row["with"]
        saved = 1 - plugin["prefilled_tokens"] / without["prefilled_tokens"]
        if row["text"] == "standard library":
            expected.append([row["what"], f"{without['hit_percent']} → {plugin['hit_percent']}", f"{saved:.0%}"])
    rows = re.findall(
        r"^\| (.+: .+|.+, or .+) \| ([\d.]+ → [\d.]+) \| (\d+%) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(map(list, rows)) == sorted(expected)


def test_the_times_on_a_real_engine_are_those_measured() -> None:
    measured = json.loads((ROOT / "benchmarks/results/engine_ttft.json").read_text())["results"]
    page = (ROOT / "docs/engine.md").read_text()
    assert overview(measured) in (ROOT / "README.md").read_text()
    listed = list(tables(measured))
    assert len(listed) >= 2
    for table in listed:
        assert table in page
    assert page.count("| **warmprefix**") == len(listed)


def test_every_example_fits_a_screen_and_has_a_test() -> None:
    frameworks = [folder for folder in (ROOT / "tests/integrations").iterdir() if folder.is_dir()]
    for example in (ROOT / "examples").glob("*.py"):
        assert len(example.read_text().splitlines()) <= 40, example.name
        # The test of a framework's example must run in the framework's environment.
        folder = next((each for each in frameworks if example.name.startswith(f"{each.name}_")), ROOT / "tests")
        tests = [test for test in folder.rglob("test_*.py") if test != Path(__file__)]
        assert any(example.name in test.read_text() for test in tests), example.name


def test_the_readmes_times_of_redis_are_those_measured() -> None:
    measured = json.loads((ROOT / "benchmarks/results/redis_state.json").read_text())["results"]["turns"]
    rows = [row for row in measured if row["workload"] == "pool of 60"]
    readme = (ROOT / "README.md").read_text()
    for row in rows:
        times = [[f"{row[f'{what} {which} µs']:.0f} µs" for what in ("prepare", "commit")] for which in ("p50", "p99")]
        assert " | ".join("; ".join(pair) for pair in times) in readme
    assert len(rows) == 2
