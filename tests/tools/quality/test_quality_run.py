"""Runs against a planted reader over HTTP: killed, resumed, refused, and reported."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import openai
import pytest
from tests.tools.conftest import Finished
from tests.tools.quality.conftest import CONFIG, arguments, filled

import quality_arms
from planted_reader import PlantedReader
from redis_servers import wait_until
from warmprefix import ContextPlanner
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.emulator.tokenizer import ChatMessage
from warmprefix_tools.quality.answer_store import AnswerStore
from warmprefix_tools.quality.arms import prompts_of
from warmprefix_tools.quality.asking import EndpointError, ask_all
from warmprefix_tools.quality.made_up import made_up_questions
from warmprefix_tools.quality.page import quality_page
from warmprefix_tools.quality.quality_options import QualityOptions
from warmprefix_tools.quality.questions import EvidenceQuestion
from warmprefix_tools.quality.remarks import remarks
from warmprefix_tools.quality.results import OrderEffect, results_of
from warmprefix_tools.quality.scores import ScoreError
from warmprefix_tools.quality.watch import RunWatch

Run = Callable[..., Finished]


def test_a_planted_loss_is_reported(reader: EmulatorServer, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "answers"
    done = run(*arguments(reader, file, "--limit", 120, "--arms", "note,planned,references"))
    assert (done.returncode, done.stdout) == (0, "")
    assert "120 questions in 5 arms: 600 calls, about" in done.stderr
    report = run("quality", "report", file, "--json", tmp_path / "json", "--html", tmp_path / "page.html")
    assert report.returncode == 0
    verdicts = {line.split()[0]: line.split()[-1] for line in report.stdout.splitlines()[1:6]}
    assert verdicts["note"] == "worse"
    assert verdicts["relevance"] == verdicts["full-again"] == "baseline"
    assert verdicts["planned"] in ("worse", "open")
    fields = json.loads((tmp_path / "json").read_text())
    (note,) = [arm for arm in fields["arms"] if arm["arm"] == "note"]
    assert note["verdict"] == "worse"
    assert note["comparison"]["difference"] < -0.15
    assert "<circle" in (tmp_path / "page.html").read_text()
    assert run("quality", "report", file, "--check", "note").returncode == 1
    assert run("quality", "report", file, "--check", "references", "--margin", 30).returncode == 0


def test_instructions_and_examples_are_in_every_prompt(
    reader: EmulatorServer, asked: list[Sequence[ChatMessage]], run: Run, tmp_path: Path
) -> None:
    text = tmp_path / "system.txt"
    text.write_text("Copy the answer.\n")
    options = ("--limit", 6, "--arms", "note,references", "--examples", 2, "--passages", 3, "--at-once", 2)
    assert run(*arguments(reader, tmp_path / "a", *options, "--system", text)).returncode == 0
    with AnswerStore(tmp_path / "a") as store:
        questions = store.questions()
        assert len(list(store.answers())) == 6 * 4
    first, second, *others = made_up_questions(8)
    assert [question.id for question in questions] == [question.id for question in others]
    assert {len(question.passages) for question in questions} == {3}
    for chat in asked:
        assert chat[0].text.startswith("Copy the answer.\n\nExample:\n\n")
        for example in (first, second):
            assert f"{example.passages[example.gold[0]]}\n\n{example.question}\n{example.answers[0]}" in chat[0].text
    other = run(*arguments(reader, tmp_path / "a", *options, "--system", "Copy it."))
    assert "has the answers of a run with other system" in other.stderr
    nothing = run(*arguments(reader, tmp_path / "b", "--data", questions_file(tmp_path), "--examples", 2))
    assert (nothing.returncode, "--examples takes them all" in nothing.stderr) == (2, True)
    text.write_bytes(b"\xff")
    assert "could not be read" in run(*arguments(reader, tmp_path / "b", "--system", text)).stderr


def test_answers_that_a_choice_loses_are_reported(reader: EmulatorServer, run: Run, tmp_path: Path) -> None:
    made_up = list(made_up_questions(96))
    data, lines = tmp_path / "questions.jsonl", []
    for number, question in enumerate(made_up):
        topic = made_up[48 * (number // 48) : 48 * (number // 48 + 1)]
        others = {text: None for each in topic for text in each.passages if text not in question.passages}
        gold = question.passages[question.gold[0]]
        first = [*[text for text in question.passages if text != gold], gold]  # in the place that it may leave
        scores = [10.0] * 3 + [8.0] * 9
        found = [{"text": text, "score": score} for text, score in zip([*first, *others], scores, strict=False)]
        asked = {"question": question.question, "answers": question.answers, "passages": first, "gold": [7]}
        lines.append(json.dumps({**asked, "candidates": found}))
    data.write_text("\n".join(lines))
    file = tmp_path / "answers"
    done = run(*arguments(reader, file, "--data", data, "--arms", "chosen,extra,chance"))
    assert done.returncode == 0
    report = run("quality", "report", file, "--json", tmp_path / "json")
    arms = {arm["arm"]: arm for arm in json.loads((tmp_path / "json").read_text())["arms"]}
    assert arms["relevance"]["other_evidence"] == 0
    for name in ("chosen", "chance"):
        assert arms[name]["other_evidence"] == arms["chosen"]["other_evidence"] > 10
        assert f"{name}: {arms[name]['other_evidence']} of 96 questions have other evidence." in report.stdout
        assert arms[name]["comparison"]["losses"] > 0
        assert arms[name]["comparison"]["wins"] == 0
    assert arms["extra"]["other_evidence"] > 10
    assert arms["extra"]["comparison"]["losses"] == 0
    other = run(*arguments(reader, file, "--data", data, "--arms", "chosen,extra,chance", "--choose", "keep=7"))
    assert "has the answers of a run with other choose" in other.stderr
    for options, message in (
        ((), "need questions with candidates"),
        (("--choose", "k=3"), "can't set k"),
        (("--choose", "keep=x"), "keep must be an integer"),
    ):
        refused = run(*arguments(reader, tmp_path / "b", "--arms", "chosen", *options))
        assert (refused.returncode, message in refused.stderr) == (2, True)


def questions_file(folder: Path) -> Path:
    file = folder / "questions.jsonl"
    file.write_text(json.dumps({"question": "Why?", "answers": [], "passages": ["a"]}))
    return file


@pytest.mark.slow
def test_a_killed_run_goes_on_without_a_lost_or_doubled_answer(
    reader: EmulatorServer, asked: list[Sequence[ChatMessage]], run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "answers"
    options = list(map(str, arguments(reader, file, "--limit", 150, "--arms", "note,labels", "--repeats", 2)))
    kills = 3
    for number in range(kills):
        running = subprocess.Popen([sys.executable, "-m", "warmprefix_tools", *options], stderr=subprocess.DEVNULL)
        answered = len(asked) + 90 + 7 * number
        wait_until(lambda answered=answered: len(asked) >= answered, "enough questions are answered")  # type: ignore[misc]
        os.kill(running.pid, signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
    assert run(*options).returncode == 0
    with AnswerStore(file) as store:
        answers = list(store.answers())
    assert len(answers) == len({answer.key for answer in answers}) == 150 * 3 * 2
    assert all(answer.text for answer in answers)
    probes = 3 * (kills + 1)
    assert 900 + probes <= len(asked) <= 900 + probes + 8 * kills  # those under way are made again


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("--limit", 6, "questions"),
        ("--arms", "labels", "arms"),
        ("--data", "made-up:de", "data"),
    ],
)
def test_another_run_needs_another_file(
    reader: EmulatorServer, run: Run, tmp_path: Path, option: str, value: object, name: str
) -> None:
    base = {"--limit": 5, "--arms": "note", "--data": "made-up"}
    for changed, status in (({}, 0), ({option: value}, 2)):
        given = [part for pair in {**base, **changed}.items() for part in pair]
        done = run(*arguments(reader, tmp_path / "answers", *given))
        assert done.returncode == status
    assert "has the answers of a run with other" in done.stderr
    assert name in done.stderr


def test_an_endpoint_that_is_down_stops_the_run(run: Run, tmp_path: Path) -> None:
    done = run(*arguments(None, tmp_path / "answers", "--limit", 3, "--arms", "note"))
    assert done.returncode == 2
    assert "6 calls failed; run the same command again" in done.stderr


@pytest.mark.slow
def test_an_unknown_model_stops_the_run(reader: EmulatorServer, run: Run, tmp_path: Path) -> None:
    done = run("quality", "run", "--endpoint", reader.base_url, "--model", "m", "--answers", tmp_path / "a")
    assert done.returncode == 2
    assert "refuses the calls" in done.stderr


def test_an_endpoint_that_is_no_model_stops_the_run(run: Run, tmp_path: Path) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html>Hello</html>")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            """Stay silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}/v1"
        done = run("quality", "run", "--endpoint", base, "--model", "m", "--answers", tmp_path / "a", "--limit", 20)
        server.shutdown()
    assert done.returncode == 2
    assert "failed 20 times in a row: the answer is no chat completion" in done.stderr
    with AnswerStore(tmp_path / "a") as store:
        assert store.done() == set()


def test_prompts_that_are_too_long_are_counted_and_left_out(run: Run, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    rows = [
        {"id": f"{n}", "question": "Why?", "answers": ["x"], "passages": ["a b " * (50 if n else 900), f"c {n}"]}
        for n in range(4)
    ]
    questions.write_text("\n".join(map(json.dumps, rows)))
    with EmulatorServer(EmulatorConfig(kv_blocks=100, prefill_rate=math.inf, base_ttft_ms=0)) as server:
        more = ("--data", questions, "--arms", "shuffled", "--max-tokens", 3)
        assert run(*arguments(server, tmp_path / "answers", *more)).returncode == 0
    report = run("quality", "report", tmp_path / "answers", "--json", "-")
    arms = json.loads(report.stdout)["arms"]
    assert [(arm["answers"], arm["failed"], arm["truncated"]) for arm in arms] == [(3, 1, 3)] * 2
    assert arms[1]["comparison"]["pairs"] == 3
    assert "relevance: 1 questions have no answer and count in no comparison." in report.stderr


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
def test_only_its_owner_reads_a_file_of_answers(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        with filled(tmp_path / "answers", {"relevance": ["right"]}):
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    finally:
        os.umask(mask)
    assert modes == dict.fromkeys(["answers", "answers-wal", "answers-shm"], 0o600)


def test_only_pairs_are_compared(tmp_path: Path) -> None:
    with filled(
        tmp_path / "a", {"relevance": ["right", None, "right", "x"], "note": ["x", "right", None, "x"]}
    ) as store:
        relevance, note = results_of(store, "exact", 0.01).arms
    assert (relevance.answers, note.answers, relevance.failed, note.failed) == (3, 3, 1, 1)
    assert note.comparison is not None
    assert (note.comparison.pairs, note.comparison.losses, note.comparison.difference) == (2, 1, -0.5)


def test_the_best_annotation_that_is_not_worse_is_named(tmp_path: Path) -> None:
    count = 400
    answers = {
        "relevance": ["right"] * count,
        "planned": ["x"] * 9 + ["right"] * (count - 9),
        "note": ["right"] * count,
        "labels": ["x"] + ["right"] * (count - 1),
    }
    with filled(tmp_path / "a", answers) as store:
        results = results_of(store, "exact", 0.02)
        assert (results.annotate, results.as_json()["annotate"]) == ("note", "note")
        assert 'ContextPlanner(annotate="note") is the best' in "".join(remarks(results))
    with filled(tmp_path / "b", {"relevance": ["right"] * 99, "note": ["x"] * 99}) as store:
        results = results_of(store, "exact", 0.02)
        assert results.annotate is None
        assert "keep relevance order" in "".join(remarks(results))


def test_the_best_annotation_is_saved_for_its_model(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "annotations.json"
    file.write_text('{"other": "none"}')
    right = ["right"] * 400
    filled(tmp_path / "a", {"relevance": right, "labels": right}).__exit__(None, None, None)
    filled(tmp_path / "b", {"relevance": right, "labels": ["x"] * 400}).__exit__(None, None, None)
    for answers in ("a", "b"):  # the second shows nothing to save
        assert run("quality", "report", tmp_path / answers, "--annotations", file).returncode == 0
        assert json.loads(file.read_text()) == {"other": "none", "m": "labels"}
    planner = ContextPlanner(annotations=json.loads(file.read_text()))
    assert planner.plan(["a", "b"], model="m").annotation == "labels"
    file.write_text("[]")
    assert run("quality", "report", tmp_path / "a", "--annotations", file).returncode == 2


def test_the_places_that_a_model_reads_well_are_saved_for_it(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "positions.json"
    file.write_text("{}")
    right = ["right"] * 400
    half = ["right", "x"] * 200
    filled(tmp_path / "uneven", {"relevance": right, "gold-1": right, "gold-2": half}).__exit__(None, None, None)
    filled(tmp_path / "even", {"relevance": right, "gold-1": right, "gold-2": right}).__exit__(None, None, None)
    filled(tmp_path / "few", {"relevance": right[:9], "gold-1": right[:9], "gold-2": half[:9]}).__exit__(
        None, None, None
    )
    filled(tmp_path / "none", {"relevance": right, "gold-2": right}).__exit__(None, None, None)
    for answers, expected in [
        ("few", {}),
        ("uneven", {"m": [100, 50]}),
        ("none", {"m": [100, 50]}),
        ("even", {"m": [100]}),
    ]:
        assert run("quality", "report", tmp_path / answers, "--positions", file).returncode == 0
        positions = json.loads(file.read_text())
        assert positions == expected
        ContextPlanner(positions=positions)
    file.write_text("[]")
    assert run("quality", "report", tmp_path / "even", "--positions", file).returncode == 2


def test_the_effect_of_places_and_orders_is_reported(tmp_path: Path) -> None:
    answers = {
        "relevance": ["right", "right", "x", "x"],
        "gold-1": ["right", "right", "right", "x"],
        "gold-8": ["right", "x", "x", "x"],
        "shuffled-1": ["right", "right", "x", "x"],
        "shuffled-2": ["right", "x", "x", "x"],
    }
    with filled(tmp_path / "a", answers) as store:
        results = results_of(store, "exact", 0.01)
    assert results.positions == {1: 0.75, 8: 0.25}
    assert results.orders == OrderEffect(2, 0.125, 0.25)
    text = "".join(remarks(results))
    assert "1: 75.0, 8: 25.0" in text
    assert "25.0% of the questions have different scores" in text


def half(answer: str, expected: Sequence[str]) -> float:
    return 0.5 if expected[0] in answer else 0.0


def too_much(answer: str, expected: Sequence[str]) -> float:
    return 7.0


def test_a_function_can_be_the_measure(tmp_path: Path) -> None:
    with filled(tmp_path / "a", {"relevance": ["right", "right"], "note": ["right", "x"]}) as store:
        assert [arm.score for arm in results_of(store, f"{__name__}:half", 0.01).arms] == [0.5, 0.25]
        with pytest.raises(ScoreError, match=r"must return a number from 0 to 1, got 7\.0"):
            results_of(store, f"{__name__}:too_much", 0.01)


def test_cited_labels_are_compared_with_the_evidence(reader: EmulatorServer, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "answers"
    assert run(*arguments(reader, file, "--limit", 40, "--arms", "cited")).returncode == 0
    with AnswerStore(file) as store:
        results = results_of(store, "exact", 0.01)
    cited = results.arms[-1]
    assert cited.arm == "cited"
    assert cited.citations == cited.right_citations == round(40 * cited.scores.exact) > 20
    assert "cited: 100.0% of" in "".join(remarks(results))


# -- arms with calls of their own --------------------------------------------------------------------------------------


async def broken(question: EvidenceQuestion, client: openai.AsyncOpenAI, model: str) -> str:
    raise KeyError(question.id)


def agents_reader(messages: Sequence[ChatMessage]) -> str:
    """Answer as a worker, which writes a fact down, and as a manager, which reads it."""
    planted, last = PlantedReader(accuracy=1.0), messages[-1].text
    question = re.findall(r"Question: (What is the (.*) of (\S+)\?)", last)
    if not question:
        return planted.answer(messages)
    asked, attribute, entity = question[-1]
    answer = planted.answer([ChatMessage("user", f"{last}\n{asked}")])
    return answer if "Answer:" in last or answer == "unanswerable" else f"The {attribute} of {entity} is {answer}."


def test_memories_and_agents_can_be_compared(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(quality_arms.__file__).parent))
    file = tmp_path / "answers"
    names = ["memory_list", "steady_list", "memory_chat", "dealt_chain", "routed_chain"]
    arms = ",".join([f"quality_arms:{name}" for name in names])
    with EmulatorServer(CONFIG, reader=agents_reader) as server:
        done = run(*arguments(server, file, "--limit", 12, "--arms", arms, "--data", "made-up:turns"))
    assert done.returncode == 0, done.stderr
    monkeypatch.delenv("PYTHONPATH")
    assert run("quality", "report", file).returncode == 0  # a report needs no function of the arms
    with AnswerStore(file) as store:
        results = results_of(store, "exact", 0.01)
    assert [(arm.arm, arm.baseline, arm.score) for arm in results.arms] == [
        (f"quality_arms:{name}", f"quality_arms:{'dealt_chain' if 'chain' in name else 'memory_list'}", 1.0)
        for name in names
    ]


def test_an_arm_that_raises_stops_the_run(reader: EmulatorServer, tmp_path: Path) -> None:
    options = QualityOptions(endpoint=reader.base_url, model=CONFIG.model, answers=tmp_path / "a")
    prompts = prompts_of([f"{__name__}:broken", "relevance"], list(made_up_questions(30)))
    mine = [prompt for prompt in prompts if prompt.arm != "relevance"]
    with AnswerStore(tmp_path / "a") as store:
        watch = RunWatch({"relevance": "relevance"}, [], 0.01)
        with pytest.raises(EndpointError, match="broken raised KeyError"):
            asyncio.run(ask_all(mine, store, options, watch, lambda remaining: None, lambda sentence: None))
        assert store.done() == set()


# -- the judge ---------------------------------------------------------------------------------------------------------


def planted_judge(messages: Sequence[ChatMessage]) -> str:
    """Prefer the expected answer; the first one if both are wrong; talk nonsense about one question."""
    fields = dict(re.findall(r"^(Expected answer|Answer A|Answer B|Question): (.*)$", messages[-1].text, re.MULTILINE))
    if "river" in fields["Question"]:
        return "As a language model, I like both."
    right = [name for name in ("Answer A", "Answer B") if fields[name] == fields["Expected answer"]]
    return " Equal." if len(right) == 2 else f"{right[0]}." if right else "a"


def test_a_judge_compares_in_both_orders(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "a"
    answers = {"relevance": ["right", "x", "x", "x"] * 30, "note": ["x", "right", "y", "x"] * 30}
    filled(file, answers).__exit__(None, None, None)
    asked: list[str] = []

    def judge(messages: Sequence[ChatMessage]) -> str:
        asked.append(messages[-1].text)
        return planted_judge(messages)

    with EmulatorServer(CONFIG, reader=judge) as server:
        command = ["quality", "judge", file, "--endpoint", server.base_url, "--model", CONFIG.model]
        assert run("quality", "report", file, "--measure", "judge").returncode == 2
        for _ in range(2):
            assert run(*command).returncode == 0
        assert len(asked) == 2 * 90  # equal answers need no judge, and a second run nothing
        assert run(*command[:-1], "another").returncode == 2
    with AnswerStore(file) as store:
        note = results_of(store, "judge", 0.01).arms[1]
        rivers = sum("river" in text for text in asked) // 2
        judgements = list(store.judgements())
        assert {each.preferred for each in judgements} == {"arm", "baseline", "neither", None} - {"neither"}
        assert quality_page(results_of(store, "judge", 0.01))
    assert 0 < note.unjudged == rivers
    assert note.comparison is not None
    assert note.comparison.pairs == 120 - rivers
    assert (note.score, note.comparison.wins + note.comparison.losses <= 60) == (None, True)
    # The judge's preference for the first place cancels out.
    assert all(each.preferred in ("arm", "baseline", None) for each in judgements)
    assert abs(note.comparison.wins - note.comparison.losses) < 15
    report = run("quality", "report", file, "--measure", "judge")
    assert report.returncode == 0
    assert f"note: {rivers} questions have no judgement" in report.stdout


def test_two_runs_are_compared(tmp_path: Path, run: Run) -> None:
    good, bad = ["right"] * 60, ["x"] * 20 + ["right"] * 40
    filled(tmp_path / "a", {"relevance": good, "note": good, "labels": good}).__exit__(None, None, None)
    filled(tmp_path / "b", {"relevance": good, "note": bad, "planned": good}).__exit__(None, None, None)
    filled(tmp_path / "c", {"relevance": good[1:]}).__exit__(None, None, None)
    done = run("quality", "compare", tmp_path / "a", tmp_path / "b")
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [(row[0], row[1], row[-1]) for row in rows] == [("relevance", "60", "open"), ("note", "60", "worse")]
    assert "different questions" in run("quality", "compare", tmp_path / "a", tmp_path / "c").stderr
    assert run("quality", "compare", tmp_path / "a", tmp_path / "missing").returncode == 2


def test_repeats_show_the_noise(tmp_path: Path) -> None:
    calls = ["right", "x", "right", "right", "x", "x", "x", "right"]
    with filled(tmp_path / "a", {"relevance": calls}, repeats=2) as store:
        (arm,) = results_of(store, "exact", 0.01).arms
    assert (arm.noise, arm.scores.exact) == (0.5, 0.5)


@pytest.mark.parametrize("content", [b"", b"no database, but a text that is long enough to look like one" * 99])
def test_other_files_are_refused(run: Run, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert run("quality", "report", tmp_path / "file").returncode == 2
    assert run("quality", "report", tmp_path / "missing").returncode == 2
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        ["--arms", "best"],
        ["--arms", ","],
        ["--limit", "0"],
        ["--repeats", "0"],
        ["--data", "made-up:fr"],
        ["--data", "missing.jsonl"],
        ["--data", "missing.json"],
        ["--data", "made-up:en:de"],
        ["--data", "made-up:turns:turns"],
        ["--arms", "no_such_module:arm"],
    ],
)
def test_options_are_checked(run: Run, tmp_path: Path, wrong: list[str]) -> None:
    assert run(*arguments(None, tmp_path / "answers", *wrong)).returncode == 2


@pytest.mark.parametrize(
    "wrong",
    [
        ["--check", "labels"],
        ["--check", "relevance"],
        ["--measure", "bleu"],
        ["--measure", "judge"],
        ["--measure", "no_such_module:score"],
        ["--margin", "0"],
        ["--margin", "100"],
        ["--html", "-"],
    ],
)
def test_options_of_the_report_are_checked(run: Run, tmp_path: Path, wrong: list[Any]) -> None:
    filled(tmp_path / "a", {"relevance": ["right"], "note": ["right"]}).__exit__(None, None, None)
    assert run("quality", "report", tmp_path / "a", *wrong).returncode == 2
