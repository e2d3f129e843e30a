"""Questions from files, made-up ones, and the arms that ask them."""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from planted_reader import PlantedReader
from warmprefix_tools.choice_option import parse_choice
from warmprefix_tools.emulator.tokenizer import ChatMessage
from warmprefix_tools.quality.arms import (
    ArmError,
    ArmPrompt,
    baseline_of,
    check_arm,
    compared_with,
    expanded_arms,
    prompts_of,
)
from warmprefix_tools.quality.conversations import Messages
from warmprefix_tools.quality.data_sets import DATA_SETS, data_set_questions
from warmprefix_tools.quality.made_up import made_up_questions
from warmprefix_tools.quality.questions import (
    EarlierTurn,
    EvidenceQuestion,
    QuestionsError,
    ScoredPassage,
    read_questions,
    squad_questions,
    with_fewer_passages,
)

SCORED = [{"text": "The sea.", "score": 2.5}, {"text": "The sky.", "score": -1}]
GOOD = {"id": "1", "question": "How deep?", "answers": ["3,688 m"], "passages": ["The sea.", "The sky."], "gold": [0]}


def test_a_file_is_read(tmp_path: Path) -> None:
    turn = {"question": "Where?", "answer": "There.", "passages": ["The sea."]}
    other = {**GOOD, "id": 2, "answers": [], "gold": [], "earlier": [turn], "candidates": SCORED}
    path = tmp_path / "questions.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(other)}\n")
    one, two = read_questions(path)
    assert (one.id, one.question, one.answers, one.passages, one.gold) == (
        *("1", "How deep?"),
        *(("3,688 m",), ("The sea.", "The sky."), (0,)),
    )
    assert (two.id, two.answers) == ("2", ())
    assert two.earlier == (EarlierTurn("Where?", "There.", ("The sea.",)),)
    assert (one.candidates, two.candidates) == ((), (ScoredPassage("The sea.", 2.5), ScoredPassage("The sky.", -1.0)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"question": " "}, "question: "),
        ({"question": 7}, "question: "),
        ({"answers": "3,688 m"}, "answers"),
        ({"answers": [""]}, "answers"),
        ({"passages": []}, "passages: .* at least 1 item"),
        ({"passages": ["a", "a"]}, "all different"),
        ({"passages": ["\ud800"]}, "Invalid JSON"),
        ({"gold": [2]}, "gold must be a list of indices"),
        ({"gold": [True]}, "gold.0: "),
        ({"earlier": {}}, "earlier: "),
        ({"earlier": ["Why?"]}, "earlier.0: "),
        ({"earlier": [{"question": "Why?", "answer": "", "passages": ["a"]}]}, "earlier.0.answer: "),
        ({"earlier": [{"question": "Why?", "answer": "a", "passages": ["a", "a"]}]}, "all different"),
        ({"candidates": [{"text": "The sea."}]}, "candidates.0.score: "),
        ({"candidates": [{"text": "The sea.", "score": "high"}]}, "candidates.0.score: "),
        ({"candidates": [*SCORED, {"text": "The moon.", "score": 1e999}]}, "candidates.2.score: .*finite"),
        ({"candidates": SCORED[:1]}, "the first ones must be the passages"),
        ({"candidates": SCORED[::-1]}, "the first ones must be the passages"),
        ({"candidates": [*SCORED, SCORED[0]]}, "all different"),
        ({"candidates": [*SCORED, {"text": "The moon.", "score": 3}]}, "a higher one at index 2"),
        ({"id": "1"}, "the id '1' is there twice"),
    ],
)
def test_an_error_names_the_line(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps({**GOOD, 'id': '2', **change})}\n")
    with pytest.raises(QuestionsError, match=f"line 2: .*{reason}"):
        read_questions(path)


@pytest.mark.parametrize("content", [b"", b"\n", b"{", b"[]", b"\xff\xfe"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "questions.jsonl").write_bytes(content)
    with pytest.raises(QuestionsError):
        read_questions(tmp_path / "questions.jsonl")
    with pytest.raises(QuestionsError):
        read_questions(tmp_path / "missing.jsonl")


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("language", ["en", "de", "es", "zh"])
def test_made_up_questions_can_be_answered(language: str, turns: bool) -> None:
    questions = list(made_up_questions(60, language=language, turns=turns, seed=3))
    assert questions == list(made_up_questions(60, language=language, turns=turns, seed=3))
    assert len({question.id for question in questions}) == 60
    for question in questions:
        assert len(set(question.passages)) == 8
        (gold,) = question.gold
        assert question.answers[0] in question.passages[gold]
        assert [len(set(turn.passages)) for turn in question.earlier] == [8] * 2 * turns
        assert not turns or any(question.passages[gold] in turn.passages for turn in question.earlier)


def answer_to(reader: PlantedReader, prompt: ArmPrompt) -> str:
    return reader.answer([ChatMessage(each["role"], each["content"] or "") for each in prompt.messages])


def test_questions_with_ordinary_names_are_short() -> None:
    long, short = (list(made_up_questions(200, language=language)) for language in ("en", "names"))
    characters = [sum(map(len, question.passages)) for question in (*long, *short)]
    assert sum(characters[200:]) * 4 < sum(characters[:200])
    for question in short:
        assert len(question.passages) == 5
        assert all("\n\n" in passage for passage in question.passages)
        holders = [at for at, text in enumerate(question.passages) if f" {question.answers[0]}." in text]
        assert tuple(holders) == question.gold  # a guess among the passages is right in one of five cases
        assert question.chance == 0.2
    assert len({(question.question, question.passages) for question in short}) == 200


@pytest.mark.parametrize("turns", [False, True])
def test_fewer_passages_keep_those_with_the_answer(turns: bool) -> None:
    for question in made_up_questions(60, language="names", turns=turns):
        fewer = with_fewer_passages(question, 2)
        assert len(fewer.passages) == 2
        assert fewer.chance == 0.5
        assert [fewer.passages[at] for at in fewer.gold] == [question.passages[at] for at in question.gold]
        assert [text for text in question.passages if text in fewer.passages] == list(fewer.passages)
        assert all(len(turn.passages) == 2 for turn in fewer.earlier)
        assert with_fewer_passages(question, 5) == question
    several = EvidenceQuestion("1", "Why?", ("x",), ("a", "b", "c", "d"), (1, 3))
    assert with_fewer_passages(several, 1).passages == ("b", "d")
    assert with_fewer_passages(several, 3).passages == ("a", "b", "d")
    assert with_fewer_passages(several, 3).chance is None
    likely = EvidenceQuestion("1", "Why?", ("x",), ("a", "b", "c", "d"), (1,), chance=0.5)
    assert with_fewer_passages(likely, 1).chance == 1.0


EVERY_ARM = [
    *("planned", "note", "labels", "both", "cited", "borders", "places", "named", "batch", "shuffled", "references"),
    *("positions", "orders", "shuffled-9", "gold-3"),
]


@pytest.mark.parametrize("turns", [False, True])
def test_each_arm_has_the_same_evidence(turns: bool) -> None:
    questions = list(made_up_questions(80, turns=turns))
    names = expanded_arms(EVERY_ARM, questions)
    assert len(names) == len(set(names)) == 27
    reader = PlantedReader(accuracy=1.0)
    for prompt in prompts_of(names, questions):
        texts = [message["content"] or "" for message in prompt.messages]
        assert all(passage in "\n".join(texts) for passage in prompt.question.passages)
        assert texts[-1].endswith(prompt.question.question)
        assert answer_to(reader, prompt).startswith(prompt.question.answers[0])
        assert prompt.messages[0]["role"] == "system"
        if not prompt.question.earlier:
            times = 2 if prompt.arm == "full-again" else 1
            assert "\n".join(texts).count(prompt.question.passages[0]) == times


def test_each_arm_differs_from_its_baseline() -> None:
    questions = list(made_up_questions(40))
    names = expanded_arms(EVERY_ARM, questions)
    prompts = list(prompts_of(names, questions))
    assert prompts == list(prompts_of(names, questions))
    changed = {prompt.arm for prompt in prompts if prompt.is_changed}
    assert changed == {name for name in names if baseline_of(name) != name}


def test_arms_bring_their_baselines_along() -> None:
    questions = list(made_up_questions(3))
    assert expanded_arms(["references", "cited"], questions) == [
        *("full-again", "references", "relevance", "labels", "cited")
    ]
    assert [arm for arm in expanded_arms(["positions"], questions) if arm != "relevance"] == [
        f"gold-{place}" for place in range(1, 9)
    ]


def upper_case(question: EvidenceQuestion) -> Messages:
    return [{"role": "user", "content": f"{question.passages[0]} {question.question}".upper()}]


@compared_with(f"{__name__}:rightly")
def wrongly(question: EvidenceQuestion) -> Messages:
    return []


@compared_with(f"{__name__}:wrongly")
def rightly(question: EvidenceQuestion) -> Messages:
    return []


def test_a_circle_of_baselines_is_refused() -> None:
    with pytest.raises(ArmError, match="circle"):
        expanded_arms([f"{__name__}:rightly"], [])


@pytest.mark.parametrize("name", ["best", "gold-", "gold-0", "gold-100", "no_such_module:f", f"{__name__}:missing", ""])
def test_unknown_arms_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="arm"):
        check_arm(name)


def test_arms_do_what_their_names_promise() -> None:
    questions = list(made_up_questions(40))
    question = questions[-1]
    names = expanded_arms(EVERY_ARM, questions)
    prompts = {prompt.arm: prompt for prompt in prompts_of(names, questions)}
    gold = question.passages[question.gold[0]]
    contexts = {arm: prompt.messages[1]["content"] for arm, prompt in prompts.items()}
    assert contexts["relevance"].startswith("\n\n".join(question.passages))
    assert contexts["gold-1"].startswith(gold)
    before, _, _ = contexts["gold-3"].partition(gold)
    assert sum(passage in before for passage in question.passages) == 2
    assert contexts["gold-8"].endswith(f"{gold}\n\n{question.question}")
    assert len({contexts[f"shuffled-{number}"] for number in (1, 2, 3, 4, 5)}) == 5
    assert "Most relevant above" in contexts["note"]
    assert "[ctx-" in contexts["labels"]
    assert "[ctx-" not in contexts["planned"]
    noted = [
        {prompt.arm: prompt.messages[1]["content"] for prompt in group}
        for group in zip(
            *[iter(prompts_of(["relevance", "note", "borders", "places", "named"], questions))] * 5, strict=True
        )
    ]
    assert len([texts for texts in noted if "Most relevant" in texts["note"]]) > 10
    for each, texts in zip(questions, noted, strict=True):
        order = sorted(each.passages, key=texts["note"].index)
        for arm in ("borders", "places", "named"):
            assert sorted(each.passages, key=texts[arm].index) == order
        assert texts["borders"] == "\n\n".join([*[f"---\n{text}" for text in order], each.question])
        assert (
            ("Most relevant" in texts["places"])
            == ("Most relevant" in texts["named"])
            == ("Most relevant" in texts["note"])
        )
        if "Most relevant" in texts["note"]:
            place = int(re.findall(r"Most relevant above: passage (\d+) of 8\.", texts["places"])[0])
            assert order[place - 1] == each.passages[0]
            (label,) = re.findall(r"Most relevant above: \[(.*)\]", texts["named"])
            assert texts["named"].count("[") == 2
            assert f"[{label}] {each.passages[0]}" in texts["named"]
    assert f"[{prompts['cited'].gold_labels[0]}] {gold}" in contexts["cited"]
    assert gold not in prompts["references"].messages[-1]["content"]


# -- arms with other evidence ------------------------------------------------------------------------------------------


def question_with_candidates(number: int, rng: random.Random) -> EvidenceQuestion:
    """Return a question on one of a few topics, whose passages are found in another order each time."""
    topic = number % 3
    texts = [f"Passage {each} of topic {topic}. {'It is long. ' * 20}" for each in range(12)]
    scores = [10.0, *sorted([rng.uniform(8, 9) for _ in texts[1:]], reverse=True)]
    found = tuple(map(ScoredPassage, rng.sample(texts, len(texts)), scores))
    passages = tuple([each.text for each in found[:6]])
    return EvidenceQuestion(str(number), f"Question {number}?", ("It is long",), passages, (0,), candidates=found)


def fed_candidates(prompt: ArmPrompt) -> list[int]:
    context = prompt.messages[1]["content"]
    return [at for at, each in enumerate(prompt.question.candidates) if each.text in context]


def test_a_choice_feeds_other_candidates() -> None:
    rng = random.Random(1)
    questions = [question_with_candidates(number, rng) for number in range(60)]
    arms = expanded_arms(["planned", "chosen", "extra", "chance"], questions)
    assert all(baseline_of(arm) == "relevance" for arm in arms)
    prompts = list(prompts_of(arms, questions))
    assert prompts == list(prompts_of(arms, questions))
    fed = {arm: [fed_candidates(prompt) for prompt in prompts if prompt.arm == arm] for arm in arms}
    first = [*range(6)]
    assert fed["relevance"] == fed["planned"] == [first] * 60
    assert all(each[:3] == first[:3] and len(each) == 6 for each in [*fed["chosen"], *fed["chance"]])
    assert all(each[:6] == first and len(each) <= 8 for each in fed["extra"])
    swaps = {arm: [sum(at >= 6 for at in each) for each in fed[arm]] for arm in ("chosen", "chance", "extra")}
    assert sum(swaps["chosen"]) > 20
    assert sum(swaps["extra"]) > 10
    assert swaps["chance"] == swaps["chosen"]
    assert fed["chance"] != fed["chosen"]
    assert all(prompt.has_other_evidence == (max(fed_candidates(prompt)) >= 6) for prompt in prompts)


def test_the_users_own_choice_is_tried() -> None:
    rng = random.Random(2)
    questions = [question_with_candidates(number, rng) for number in range(60)]
    own = parse_choice("keep=5,extra=1,most=1")
    fed = {arm: list[list[int]]() for arm in ("relevance", "chosen", "extra", "chance")}
    for prompt in prompts_of([*fed], questions, choose=own):
        fed[prompt.arm].append(fed_candidates(prompt))
        assert prompt.has_other_evidence == (fed[prompt.arm][-1][-1] >= 6)
    assert all(each[:5] == [*range(5)] and len(each) <= 7 for arm in ("chosen", "chance") for each in fed[arm])
    assert [len(each) for each in fed["chance"]] == [len(each) for each in fed["chosen"]]
    assert {len(each) for each in fed["extra"]} == {6, 7}


def test_a_choice_needs_scores() -> None:
    questions = list(made_up_questions(3))
    for arm in ("chosen", "extra", "chance"):
        with pytest.raises(ArmError, match="need questions with candidates"):
            list(prompts_of(["relevance", arm], questions))
    scored = question_with_candidates(0, random.Random(0))
    arms = ("relevance", "chosen", "extra", "chance")
    for prompt in prompts_of(arms, [scored, *questions, scored]):
        if prompt.question is not scored:
            assert all(text in prompt.messages[1]["content"] for text in prompt.question.passages)


def test_fewer_passages_are_those_that_the_retriever_would_return() -> None:
    question = replace(question_with_candidates(0, random.Random(0)), gold=(1,))
    fewer = with_fewer_passages(question, 4)
    assert (fewer.passages, fewer.candidates) == (question.passages[:4], question.candidates)
    moved = with_fewer_passages(replace(question, gold=(5,)), 4)
    assert (moved.passages, moved.candidates) == ((*question.passages[:3], question.passages[5]), ())


def squad_paragraph(name: str) -> dict[str, Any]:
    context = f"{name} lies by the sea. Its harbour is {name}port."
    answer = {"text": f"{name}port", "answer_start": context.index(f"{name}port")}
    return {
        "context": context,
        "qas": [{"id": name, "question": f"What is the harbour of {name}?", "answers": [answer] * 2}],
    }


SQUAD = {"data": [{"paragraphs": [squad_paragraph(name) for name in ("Lorem", "Ipsum", "Dolor", "Amet")]}]}


def test_a_file_in_squads_format_is_read() -> None:
    questions = list(squad_questions(json.dumps(SQUAD).encode()))
    assert [question.id for question in questions] == ["Lorem", "Ipsum", "Dolor", "Amet"]
    for question in questions:
        (gold,) = question.gold
        assert question.passages[gold].startswith(question.id)
        assert question.answers == (f"{question.id}port",)
        assert question.passages == tuple([each.text for each in question.candidates])[: len(question.passages)]
        assert len(set(question.passages)) == len(question.passages)


def test_sentences_can_be_the_evidence() -> None:
    context = (
        "Lorem lies by the sea, near the hill of Ipsum. It has 12,000 people, as Dolor said in his book. It is over."
    )
    asked = [
        ("Where does Lorem lie?", "by the sea"),
        ("How many people has it?", "12,000"),
        ("What is over?", "It is over"),
    ]
    entries = [
        {"id": str(at), "question": question, "answers": [{"text": text, "answer_start": context.index(text)}]}
        for at, (question, text) in enumerate(asked)
    ]
    others = [{"context": f"Where people lie over Lorem, house {number} stands.", "qas": []} for number in range(9)]
    data = {"data": [{"paragraphs": [{"context": context, "qas": entries}, *others]}]}
    questions = list(squad_questions(json.dumps(data).encode(), sentences=True))
    assert len(questions) == 3
    for question in questions:
        assert len(question.passages) == 5
        (gold,) = question.gold
        assert question.answers[0] in question.passages[gold]
        assert question.passages[gold] in context
        assert question.passages[gold] != context
        assert question.passages[gold] == question.passages[gold].strip()


# -- public data sets --------------------------------------------------------------------------------------------------

HOPS = [
    {
        "_id": f"hop-{number}",
        "question": f"Which harbour lies on the river of town {number}?",
        "answer": f"Port {number}",
        "supporting_facts": [[f"Town {number}", 0], [f"River {number}", 0]],
        "context": [
            [f"Town {number}", [f"Town {number} lies on a river.", " It is old."]],
            [f"River {number}", [f"The river of town {number} has a harbour, Port {number}."]],
            ["Moon", ["The moon has seas without water."]],
        ],
    }
    for number in range(12)
]
CHAT_TASKS = [
    {
        "task_id": f"chat-{number}",
        "contexts": [{"text": f"\nA battery of type {number} lasts {number} years."}] if number else [],
        "input": [
            {"speaker": "user", "text": f"What is the battery of type {number}."},
            {"speaker": "agent", "text": "It is a battery."},
            {"speaker": "user", "text": "How long does it last?"},
        ],
        "targets": [{"text": f"{number} years"}],
    }
    for number in range(3)
]
CHAT = {
    "session_1_date_time": "1 May",
    "session_1": [{"dia_id": "D1:1", "speaker": "Ann", "text": "I bought a boat."}],
    "session_2_date_time": "2 May",
    "session_2": [{"dia_id": "D2:1", "speaker": "Ben", "text": "I sold a car."}],
    "qa": [
        {"question": "What did Ann buy?", "answer": "a boat", "evidence": ["D1:1"], "category": 1},
        {"question": "What did Ben buy?", "evidence": ["D2:1"], "category": 5},
    ],
}


def zipped(name: str, content: object) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, json.dumps(content))
    return file.getvalue()


FILES = {
    "squad": json.dumps(SQUAD).encode(),
    "xquad:de": json.dumps(SQUAD).encode(),
    "xquad:sentences": json.dumps(SQUAD).encode(),
    "hotpotqa": json.dumps(HOPS).encode(),
    "2wiki": json.dumps(HOPS).encode(),
    "mt-rag": "\n".join(map(json.dumps, CHAT_TASKS)).encode(),
    "locomo": zipped("chats/1.json", CHAT),
}


def fetched(name: str, folder: Path, host: str, data: bytes | None = None) -> list[EvidenceQuestion]:
    """Return the questions of a data set whose file is the one above."""
    content = FILES[name] if data is None else data
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return list(data_set_questions(DATA_SETS[name]._replace(blob=blob), folder, host))


@pytest.fixture
def host() -> Iterator[str]:
    """Serve the files above under the paths of their data sets."""

    class Files(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = [FILES[name] for name in FILES if f"/{DATA_SETS[name].path}" == self.path]
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(found[0] if found else b"")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            """Stay silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("name", FILES)
def test_a_data_set_is_downloaded_once(name: str, host: str, tmp_path: Path) -> None:
    questions = fetched(name, tmp_path / "cache", host)
    assert questions
    for question in questions:
        assert len(set(question.passages)) == len(question.passages)
        assert question.gold
    assert fetched(name, tmp_path / "cache", "http://127.0.0.1:1") == questions


def test_formats_are_read_completely(host: str, tmp_path: Path) -> None:
    hops = fetched("hotpotqa", tmp_path, host)
    assert len(hops) == 12
    for number, hop in enumerate(hops):
        needed = {hop.passages[at].split("\n")[0] for at in hop.gold}
        assert (needed, hop.answers) == ({f"Town {number}", f"River {number}"}, (f"Port {number}",))
        assert len(hop.passages) == 8
    chats = fetched("mt-rag", tmp_path, host)
    assert [chat.id for chat in chats] == ["chat-1", "chat-2"]
    assert (chats[0].question, chats[0].answers) == ("How long does it last?", ("1 years",))
    (turn,) = chats[0].earlier
    assert (turn.question, turn.answer) == ("What is the battery of type 1.", "It is a battery.")
    bought, sold = fetched("locomo", tmp_path, host)
    assert bought.passages[bought.gold[0]] == "Ann (1 May): I bought a boat."
    assert (bought.answers, sold.answers) == (("a boat",), ())


def test_another_file_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(QuestionsError, match="is not the file that is expected"):
        fetched("hotpotqa", tmp_path, host, b"another")
    with pytest.raises(QuestionsError, match="could not be fetched"):
        fetched("hotpotqa", tmp_path, "http://127.0.0.1:1")
    assert not list(tmp_path.iterdir())
    fetched("hotpotqa", tmp_path, host)
    (stored,) = tmp_path.iterdir()
    stored.write_bytes(stored.read_bytes()[:-1])
    with pytest.raises(QuestionsError, match="changed, or is incomplete"):
        fetched("hotpotqa", tmp_path, host)
