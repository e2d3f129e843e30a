"""Verdicts, runs that stop when they are certain, and the prefill of each arm."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.tools.conftest import Finished
from tests.tools.quality.conftest import CONFIG, arguments, filled

from planted_reader import PlantedReader
from warmprefix_tools.caches.slots import common_prefix
from warmprefix_tools.emulator import EmulatorServer
from warmprefix_tools.emulator.tokenizer import ChatMessage
from warmprefix_tools.quality.answer_store import AnswerStore, CallKey, GivenAnswer
from warmprefix_tools.quality.arms import prompts_of
from warmprefix_tools.quality.cache_probe import PREFILL_PROBLEMS, SaltSupport
from warmprefix_tools.quality.made_up import made_up_questions
from warmprefix_tools.quality.paired import compare_pairs
from warmprefix_tools.quality.questions import EvidenceQuestion
from warmprefix_tools.quality.remarks import interval, remarks
from warmprefix_tools.quality.results import results_of, verdict

Run = Callable[..., Finished]


def test_style_costs_nothing(tmp_path: Path, run: Run) -> None:
    """The same facts in longer sentences are no loss, neither to the report nor to `--check`."""
    count, file = 300, tmp_path / "a"
    questions = list(made_up_questions(count))
    sentences = [f"It is {question.answers[0]}, as the text says." for question in questions]
    wrong = ["x"] * 15
    filled(file, {"relevance": ["right"] * (count - 15) + wrong, "note": sentences}).__exit__(None, None, None)
    report = run("quality", "report", file, "--check", "note", "--json", tmp_path / "json", "--html", tmp_path / "html")
    assert report.returncode == 0
    note = json.loads((tmp_path / "json").read_text())["arms"][1]
    assert (note["verdict"], note["comparisons"]["f1"]["high"] < -0.3) == ("better", True)
    assert note["scores"]["words"] > 5 > note["scores"]["words"] * note["scores"]["f1"]
    page = (tmp_path / "html").read_text()
    for text in ("note: measures disagree. By f1 it is worse", "note: its answers have", "list several things"):
        assert text in report.stdout
        assert text in page
    assert run("quality", "report", file, "--check", "note", "--measure", "f1").returncode == 1


def test_verdicts_agree_with_the_intervals(tmp_path: Path) -> None:
    """31 won and 49 lost of 328 were once called open, although the interval excludes 0."""
    lost, won, rest = ["right"] * 49, ["x"] * 31, ["right"] * 248
    with filled(tmp_path / "a", {"relevance": lost + won + rest, "labels": ["x"] * 49 + lost[:31] + rest}) as store:
        labels = results_of(store, "contains").arms[1]
    assert labels.comparison is not None
    assert (labels.comparison.high < 0, labels.comparison.p_value > 0.05) == (True, True)
    assert interval(labels.comparison) == "\u221210.9 to \u22120.1"
    assert verdict(labels, 0.01) == "worse"
    assert verdict(labels, 0.11) == "worse, within margin"


@pytest.mark.parametrize(
    ("high", "text"), [(0.0003, "+0.03"), (-0.00004, "\u22120.004"), (0.0, "\u00b10.0"), (0.01, "+1.0")]
)
def test_an_end_that_is_not_0_is_not_shown_as_0(high: float, text: str) -> None:
    assert interval(replace(compare_pairs([0.0, -1.0]), high=high)).endswith(f"to {text}")


def test_a_look_at_an_unfinished_run_is_called_one(tmp_path: Path) -> None:
    unfinished = "2 of 3 questions are asked. These intervals are for the end of the run"
    with filled(tmp_path / "a", {"relevance": ["right"] * 3, "note": ["right"] * 2}) as store:
        assert unfinished not in "".join(remarks(results_of(store, "contains")))
        questions, baselines = store.questions(), store.settings()["arms"]
    with AnswerStore(tmp_path / "b") as store:
        store.begin({"model": "m", "data": "made-up", "arms": baselines}, questions)
        for arm in baselines:
            for question, text in zip(questions, ["x", None], strict=False):  # a call that failed was made, too
                store.add(GivenAnswer(CallKey(question.id, arm, 0), True, text))
        assert unfinished in "".join(remarks(results_of(store, "contains")))


# -- runs that stop by themselves, and what they compute --------------------------------------------------------------


def test_a_run_stops_when_it_is_certain(
    reader: EmulatorServer, asked: list[Sequence[ChatMessage]], run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "answers"
    more = ("--limit", 300, "--arms", "note", "--margin", 5, "--stop-when-certain")
    done = run(*arguments(reader, file, *more))
    assert done.returncode == 0
    assert "After 50 questions, an arm changes" in done.stderr
    stopped = re.search(r"Stopped after (\d+) of 300 questions: every arm is certain", done.stderr)
    assert stopped is not None
    with AnswerStore(file) as store:
        answers = [answer.key for answer in store.answers()]
        results = results_of(store, "contains")
        note = results.arms[1].comparison
    assert note is not None
    assert len(answers) == 2 * int(stopped[1]) == 2 * note.pairs < 600, "each question is asked in all arms"
    assert note.pairs >= 50
    assert (results.margin, results.stops, note.high < 0) == (0.05, True, True)
    report = run("quality", "report", file)
    assert "they hold at any time up to 300 questions" in report.stdout
    assert f"{stopped[1]} of 300 questions are asked" in report.stdout
    before = len(asked)
    assert run(*arguments(reader, file, *more)).returncode == 0
    assert len(asked) == before, "a run that is certain asks nothing more"
    assert run(*arguments(reader, file, *more[:-1])).returncode == 2, "its rule to stop belongs to the run"


def same(question: EvidenceQuestion) -> Sequence[Mapping[str, Any]]:
    (prompt,) = prompts_of(["relevance"], [question])
    return prompt.messages


def test_the_prefill_of_each_arm_is_measured_alone(tmp_path: Path, run: Run) -> None:
    """Equal prompts compute equal tokens in two arms, although the engine has just seen the other arm's."""
    file = tmp_path / "answers"
    with EmulatorServer(CONFIG, reader=PlantedReader().answer) as server:
        assert run(*arguments(server, file, "--limit", 40, "--arms", f"planned,{__name__}:same")).returncode == 0
    with AnswerStore(file) as store:
        results = results_of(store, "contains")
    relevance, planned, equal = results.arms
    assert results.prefill_problem is None
    assert equal.saved == pytest.approx(0.0, abs=0.02)
    assert planned.saved is not None
    assert planned.cached_tokens is not None
    assert relevance.cached_tokens is not None
    computed = (planned.prompt_tokens - planned.cached_tokens) / (relevance.prompt_tokens - relevance.cached_tokens)
    assert planned.saved == pytest.approx(1 - computed)
    assert planned.saved > 0.03
    report = run("quality", "report", file).stdout
    assert f"\u2212{100 * planned.saved:.1f}%" in next(
        line for line in report.splitlines() if line.startswith("planned")
    )
    assert "Prefill is not measured" not in report


@pytest.mark.parametrize("support", ["ignored", "refused", "unreported"])
def test_no_prefill_is_named_that_is_not_measured(tmp_path: Path, run: Run, support: SaltSupport) -> None:
    salts = set[object]()

    class Engine(BaseHTTPRequestHandler):
        before: tuple[str, ...] = ("",)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            salts.add(body.get("cache_salt"))
            text = str(body["messages"])
            cached = max([common_prefix(text.encode(), one.encode()) for one in self.before])
            type(self).before = (*self.before[-3:], text)  # four slots
            details = {"prompt_tokens_details": {"cached_tokens": cached}} if support != "unreported" else {}
            usage = {"prompt_tokens": len(text), "completion_tokens": 1, "total_tokens": len(text) + 1, **details}
            message = {"role": "assistant", "content": "Oslo"}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
            refused = support == "refused" and "cache_salt" in body
            sent = {"error": {"message": "unknown field cache_salt"}} if refused else {**answer, "usage": usage}
            data = json.dumps(sent).encode()
            self.send_response(400 if refused else 200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            """Stay silent."""

    file = tmp_path / "a"
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}/v1"
        asked = ("--model", "m", "--answers", file, "--limit", 10, "--arms", "planned")
        assert run("quality", "run", "--endpoint", base, *asked).returncode == 0
        server.shutdown()
    with AnswerStore(file) as store:
        results = results_of(store, "contains")
    assert [(arm.answers, arm.saved, arm.cached_tokens) for arm in results.arms] == [(10, None, None)] * 2
    assert f"Prefill is not measured: {PREFILL_PROBLEMS[support]}." in run("quality", "report", file).stdout
    assert len(salts - {None}) == (1 if support == "refused" else 2), "salts were tried once, and not sent afterwards"


def test_a_run_whose_engine_changes_measures_no_prefill(tmp_path: Path) -> None:
    with filled(tmp_path / "a", {"relevance": ["right"]}) as store:
        assert store.salt() == store.salt() != ""
        assert store.note_salts("kept") == store.note_salts("kept") == "kept"
        assert store.note_salts("ignored") == store.note_salts("kept") == "ignored"
