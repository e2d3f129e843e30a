"""Endpoints that a run must notice: another model, a template without a system role, slots; and the pace of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.tools.conftest import Finished
from tests.tools.quality.conftest import CONFIG, filled

from warmprefix_tools.emulator import EmulatorServer
from warmprefix_tools.quality.answer_store import AnswerStore
from warmprefix_tools.quality.pace import RunPace
from warmprefix_tools.quality.published import published
from warmprefix_tools.quality.remarks import remarks
from warmprefix_tools.quality.results import results_of

Run = Callable[..., Finished]
LISTED = {
    "id": "m",
    "object": "model",
    "created": 1,
    "owned_by": "llamacpp",
    "meta": {"n_params": 134515008, "size": 96576768, "ftype": "Q4_1", "n_ctx": 4096},
}
"""An entry of llama.cpp's list of models."""
NO_SYSTEM = {"error": {"code": 500, "message": "System role not supported", "type": "server_error"}}


class Endpoint(ThreadingHTTPServer):
    """Answers with the shapes of llama.cpp's server."""

    listed: Mapping[str, Any] | None = LISTED
    answers_as = "m"
    has_system_role = True
    answer: Mapping[str, Any] = {"timings": {"cache_n": 0}, "system_fingerprint": "b1-x"}
    body: bytes | None = None
    """Sent as the answer to every chat, if given."""

    def __init__(self) -> None:
        self.asked: list[Sequence[Mapping[str, Any]]] = []
        super().__init__(("127.0.0.1", 0), Handler)

    def reply(self, path: str, body: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
        if path == "/v1/models":
            return (404, {}) if self.listed is None else (200, {"object": "list", "data": [self.listed]})
        if not self.has_system_role and any(message["role"] == "system" for message in body["messages"]):
            return 500, NO_SYSTEM
        self.asked.append(body["messages"])
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Oslo"}}
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
        made = {"id": "1", "object": "chat.completion", "created": 1, "model": self.answers_as, "choices": [choice]}
        return 200, {**made, "usage": usage, **self.answer}


class Handler(BaseHTTPRequestHandler):
    server: Endpoint  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        self.send(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def do_GET(self) -> None:
        self.send({})

    def send(self, body: Mapping[str, Any]) -> None:
        status, fields = self.server.reply(self.path, body)
        content = json.dumps(fields).encode()
        if self.server.body is not None and self.path != "/v1/models":
            content = self.server.body
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.send_header("retry-after", "0")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Stay silent."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def arguments(endpoint: Endpoint, file: Path, *more: object) -> list[object]:
    base = f"http://127.0.0.1:{endpoint.server_port}/v1"
    run = ["quality", "run", "--endpoint", base, "--model", "m", "--answers", file, "--data", "made-up:names"]
    return [*run, "--arms", "note", *more]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"listed": {**LISTED, "meta": {**LISTED["meta"], "ftype": "Q8_0"}}}, "ftype: Q4_1 before, Q8_0 now"),  # type: ignore[dict-item]
        ({"listed": {"id": "m", "owned_by": "vllm", "root": "/models/m"}}, "root: None before, /models/m now"),
        ({"answers_as": "m-2026-11"}, "model: m before, m-2026-11 now"),
        ({"listed": {**LISTED, "created": 2, "meta": {**LISTED["meta"], "n_ctx": 1}}, "answer": {}}, None),  # type: ignore[dict-item]
    ],
)
def test_another_model_does_not_go_on_with_a_run(
    endpoint: Endpoint, run: Run, tmp_path: Path, changed: Mapping[str, Any], what: str | None
) -> None:
    file = tmp_path / "answers"
    assert run(*arguments(endpoint, file, "--limit", 3)).returncode == 0
    with AnswerStore(file) as store:
        store._file.execute("DELETE FROM answer WHERE arm = 'note'")  # as if the run was stopped
    for name, value in changed.items():
        setattr(endpoint, name, value)
    done = run(*arguments(endpoint, file, "--limit", 3))
    with AnswerStore(file) as store:
        answers = len(list(store.answers()))
    if what is None:
        assert (done.returncode, answers) == (0, 6)
    else:
        assert (done.returncode, answers) == (2, 3)
        assert "has the answers of another model" in done.stderr
        assert what in done.stderr


def test_an_endpoint_without_a_list_of_models_is_asked(endpoint: Endpoint, run: Run, tmp_path: Path) -> None:
    endpoint.listed = None
    assert run(*arguments(endpoint, tmp_path / "answers", "--limit", 3)).returncode == 0


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"id": "1", "choi', "the answer is no JSON"),
        (b'{"error": {"message": "Overloaded", "code": 502}}', "Overloaded"),
        (b'{"id": "1", "choices": null, "usage": null}', "has no message"),
        (b'{"id": "1", "choices": ["x"], "usage": "many"}', "has no message"),
        (b'{"id": "1", "choices": [{"index": 0}]}', "has no message"),
        (b"[1]", "no chat completion but list"),
    ],
)
def test_a_body_that_is_no_answer_is_asked_again_later(
    endpoint: Endpoint, run: Run, tmp_path: Path, body: bytes, reason: str
) -> None:
    file = tmp_path / "answers"
    endpoint.body = body
    failed = run(*arguments(endpoint, file, "--limit", 12))
    assert (failed.returncode, "failed 20 times in a row" in failed.stderr) == (2, True)
    assert reason in " ".join(failed.stderr.split())
    endpoint.body = None
    assert run(*arguments(endpoint, file, "--limit", 12)).returncode == 0
    with AnswerStore(file) as store:
        assert [answer.text for answer in store.answers()] == ["Oslo"] * 24


def test_usage_of_another_type_counts_as_no_usage(endpoint: Endpoint, run: Run, tmp_path: Path) -> None:
    endpoint.answer = {"usage": "many"}
    assert run(*arguments(endpoint, tmp_path / "answers", "--limit", 3)).returncode == 0
    with AnswerStore(tmp_path / "answers") as store:
        assert {answer.prompt_tokens for answer in store.answers()} == {None}


def test_a_try_without_any_answer_says_nothing_about_the_endpoint(
    endpoint: Endpoint, run: Run, tmp_path: Path, reader: EmulatorServer
) -> None:
    file = tmp_path / "answers"
    base = ["quality", "run", "--answers", file, "--model", CONFIG.model, "--limit", 12, "--arms", "planned"]
    endpoint.body = b"{"
    assert run(*base, "--endpoint", f"http://127.0.0.1:{endpoint.server_port}/v1").returncode == 2
    assert run(*base, "--endpoint", reader.base_url).returncode == 0
    assert "Prefill is not measured" not in run("quality", "report", file).stdout


def test_a_system_prompt_is_a_text_or_a_file_that_exists(endpoint: Endpoint, run: Run, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("From a file.\n")
    long = "Answer from the context, in as few words as possible. " * 20
    for given, sent in ((tmp_path / "prompt.txt", "From a file."), (long, long), ("请回答。", "请回答。")):
        endpoint.asked.clear()
        assert run(*arguments(endpoint, tmp_path / sent[:9], "--limit", 1, "--system", given)).returncode == 0
        assert endpoint.asked[-1][0]["content"].startswith(sent)
    failed = run(*arguments(endpoint, tmp_path / "other", "--limit", 1, "--system", tmp_path / "promt.txt"))
    assert (failed.returncode, "looks like the name of a file" in " ".join(failed.stderr.split())) == (2, True)


def test_without_a_system_role_the_user_gives_the_instruction(endpoint: Endpoint, run: Run, tmp_path: Path) -> None:
    endpoint.has_system_role = False
    done = run(*arguments(endpoint, tmp_path / "answers", "--limit", 3, "--system", "Be brief."))
    assert done.returncode == 0
    assert "no system role" in done.stderr
    assert {message["role"] for chat in endpoint.asked for message in chat} == {"user"}
    assert all(chat[0]["content"].startswith("Be brief.\n\n") for chat in endpoint.asked)
    with AnswerStore(tmp_path / "answers") as store:
        assert [answer.problem for answer in store.answers()] == [None] * 6


@pytest.mark.parametrize(("at_once", "advised"), [(8, True), (1, False)])
def test_one_call_at_a_time_is_advised_for_slots(
    endpoint: Endpoint, run: Run, tmp_path: Path, at_once: int, advised: bool
) -> None:
    done = run(*arguments(endpoint, tmp_path / "answers", "--limit", 2, "--at-once", at_once))
    assert ("--at-once 1" in done.stderr) == advised
    endpoint.answer = {}
    assert "--at-once 1" not in run(*arguments(endpoint, tmp_path / "others", "--limit", 2)).stderr


def test_a_log_has_the_pace_and_the_time_left(endpoint: Endpoint, run: Run, tmp_path: Path) -> None:
    done = run(*arguments(endpoint, tmp_path / "answers", "--limit", 15))
    (line,) = [line for line in done.stderr.splitlines() if "per minute" in line]
    assert line.startswith("20 calls made, 10 left: ")


def test_a_log_gets_a_line_per_minute() -> None:
    pace, on_terminal = RunPace(6000, 100.0, is_terminal=False), RunPace(6000, 100.0, is_terminal=True)
    written = [(made, pace.line(6000 - made, 100.0 + made)) for made in range(1, 6001)]
    lines = {made: line for made, line in written if line is not None}
    assert list(lines)[:3] == [20, 80, 140]
    assert lines[20] == "20 calls made, 5,980 left: 60 per minute, about 1 h 40 min more."
    assert list(lines)[-1] == 5960  # the last call needs no forecast
    assert lines[5960].endswith("about 1 min more.")
    shown = [made for made in range(1, 6001) if on_terminal.line(6000 - made, 100.0 + made) is not None]
    assert shown == [20]
    assert RunPace(30, 5.0, is_terminal=False).line(10, 5.0) is None  # a clock without progress


def test_a_model_that_ignores_the_question_is_noticed(tmp_path: Path) -> None:
    cases = {
        "guesses": (["right"] * 12 + [f"x {n}" for n in range(68)], False, True),
        "one answer": (["right"] * 12 + ["Sorry."] * 68, True, True),
        "a reader": (["right"] * 60 + ["Sorry."] * 20, False, False),
    }
    for name, (answers, is_same, is_chance) in cases.items():
        with filled(tmp_path / name, {"relevance": answers}) as store:
            text = " ".join(remarks(results_of(store, "contains", 0.01)))
        assert ("Does the model ignore the question?" in text) == is_same
        assert ("right no more often" in text) == is_chance
        assert "a guess among the passages is right in 12.5%" in text


# -- what is published -------------------------------------------------------------------------------------------------


def test_published_numbers_hold_no_text(endpoint: Endpoint, run: Run, tmp_path: Path) -> None:
    questions = tmp_path / "private questions.jsonl"
    rows = [
        {"question": f"Where is {n}?", "answers": ["Oslo"], "passages": [f"{n} is in Oslo.", "x", "y"], "gold": [0]}
        for n in range(12)
    ]
    questions.write_text("\n".join(map(json.dumps, rows)))
    file = tmp_path / "answers"
    options = ("--arms", "positions,planned", "--system", "A secret.", "--data", questions)
    assert run(*arguments(endpoint, file, *options)).returncode == 0
    assert run("quality", "report", file, "--publish", tmp_path / "public.json").returncode == 0
    text = (tmp_path / "public.json").read_text()
    assert not any(word in text for word in ("secret", "private", "Oslo", "Where", "unanswerable", str(tmp_path)))
    fields = json.loads(text)
    assert (fields["model"], fields["set"], fields["system"], fields["questions"]) == ("m", "own", "own", 12)
    about = {"owned_by": "llamacpp", "software": "b1-x"}
    assert fields["engine"] == {**about, "n_params": 134515008, "size": 96576768, "ftype": "Q4_1"}
    assert fields["positions"] == {"passages": 3, "right": [1.0, 1.0, 1.0], "questions": [12, 12, 12]}
    planned = next(arm for arm in fields["arms"] if arm["arm"] == "planned")
    assert planned["comparisons"]["contains"]["pairs"] == planned["questions"] == 12
    assert (planned["flips"], planned["saved"], planned["verdict"]) == (0.0, None, "open")
    assert run("quality", "report", file, "--publish", file).returncode == 2


def test_arms_of_the_users_are_not_published(tmp_path: Path, run: Run) -> None:
    filled(tmp_path / "a", {"relevance": ["right"] * 3, "note": ["x"] * 3, "json:loads": ["x"] * 3})
    assert run("quality", "report", tmp_path / "a", "--publish", tmp_path / "b").returncode == 0
    fields = json.loads((tmp_path / "b").read_text())
    assert [arm["arm"] for arm in fields["arms"]] == ["relevance", "note"]
    assert fields["set"] == "made-up"
    assert fields["chance"] == 0.125
    assert "positions" not in fields
    assert fields["arms"][1]["comparisons"]["exact"]["losses"] == 3


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("ft:gpt-5:ann::x1", "ft:gpt-5:ann::x1"),
        ("/home/ann/models/qwen3", "qwen3"),
        ("C:\\ann\\qwen3.gguf", "qwen3.gguf"),
        ("./ann/qwen3", "qwen3"),
        ("~/ann/qwen3/", "qwen3"),
    ],
)
def test_a_published_model_has_no_path_and_each_call_counts_once(tmp_path: Path, model: str, name: str) -> None:
    with filled(tmp_path / "a", {"relevance": ["right"] * 4}, repeats=2) as store:
        results = results_of(store, "contains")
    arms = tuple([replace(arm, prompt_tokens=400) for arm in results.arms])
    results = replace(results, settings={**results.settings, "model": model, "repeats": 2}, arms=arms)
    fields = published(results, [], date(2026, 1, 1))
    assert (fields["model"], fields["arms"][0]["tokens_per_prompt"]) == (name, 100.0)


def test_a_report_shows_the_names_of_arms_as_they_are(tmp_path: Path, run: Run) -> None:
    filled(tmp_path / "a", {"relevance": ["right"] * 3, "timeit:repeat": ["x"] * 3})
    assert "timeit:repeat: open;" in run("quality", "report", tmp_path / "a").stdout
