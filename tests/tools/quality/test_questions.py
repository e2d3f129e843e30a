"""Questions from files, made-up ones, and the arms that ask them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from warmprefix_tools.quality.arms import ARMS, BASELINES, prompts_of
from warmprefix_tools.quality.questions import QuestionsError, made_up_questions, read_questions, read_squad

GOOD = {"id": "1", "question": "How deep?", "answers": ["3,688 m"], "passages": ["The sea.", "The sky."], "gold": [0]}


def test_a_file_is_read(tmp_path: Path) -> None:
    other = {**GOOD, "id": 2, "answers": [], "gold": []}
    path = tmp_path / "questions.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(other)}\n")
    one, two = read_questions(path)
    assert (one.id, one.question, one.answers, one.passages, one.gold) == (
        *("1", "How deep?"),
        *(("3,688 m",), ("The sea.", "The sky."), (0,)),
    )
    assert (two.id, two.answers) == ("2", ())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"question": " "}, "question must be a text"),
        ({"question": 7}, "question must be a text"),
        ({"answers": "3,688 m"}, "answers must be a list"),
        ({"answers": [""]}, "answers must be a list"),
        ({"passages": []}, "passages must be one or more"),
        ({"passages": ["a", "a"]}, "all different"),
        ({"passages": ["\ud800"]}, "surrogates not allowed"),
        ({"gold": [2]}, "gold must be a list of indices"),
        ({"gold": [True]}, "gold must be a list of indices"),
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


@pytest.mark.parametrize("language", ["en", "de", "es", "zh"])
def test_made_up_questions_can_be_answered(language: str) -> None:
    questions = list(made_up_questions(60, language=language, seed=3))
    assert questions == list(made_up_questions(60, language=language, seed=3))
    assert len({question.id for question in questions}) == 60
    for question in questions:
        assert len(set(question.passages)) == 8
        (gold,) = question.gold
        assert question.answers[0] in question.passages[gold]


def test_each_arm_has_the_same_evidence() -> None:
    questions = list(made_up_questions(80))
    for prompt in prompts_of(list(ARMS), questions, 0):
        text = "\n".join([message["content"] for message in prompt.messages])
        assert all(passage in text for passage in prompt.question.passages)
        assert prompt.messages[-1]["content"].endswith(prompt.question.question)
        assert prompt.messages[0]["role"] == "system"
        times = 2 if prompt.arm == "full-again" else 1
        assert text.count(prompt.question.passages[0]) == times
    assert set(BASELINES) == set(ARMS)


def test_arms_bring_their_baselines_along() -> None:
    prompts = list(prompts_of(["references", "note"], list(made_up_questions(30)), 0))
    assert {prompt.arm for prompt in prompts} == {"references", "full-again", "note", "relevance"}
    assert {prompt.arm for prompt in prompts if prompt.is_changed} == {"references", "note"}
    assert prompts == list(prompts_of(["references", "note"], list(made_up_questions(30)), 0))


def test_arms_do_what_their_names_promise() -> None:
    question = list(made_up_questions(40))[-1]
    prompts = {prompt.arm: prompt for prompt in prompts_of(list(ARMS), list(made_up_questions(40)), 0)}
    gold = question.passages[question.gold[0]]
    contexts = {arm: prompt.messages[1]["content"] for arm, prompt in prompts.items()}
    assert contexts["relevance"].startswith("\n\n".join(question.passages))
    assert contexts["gold-first"].startswith(gold)
    assert contexts["gold-last"].endswith(f"{gold}\n\n{question.question}")
    assert "Most relevant passages above" in contexts["note"]
    assert "[ctx-" in contexts["labels"]
    assert "[ctx-" not in contexts["planned"]
    assert gold not in prompts["references"].messages[-1]["content"]


def squad_paragraph(name: str) -> dict[str, Any]:
    asked = {"id": name, "question": f"What is the harbour of {name}?", "answers": [{"text": f"{name}port"}] * 2}
    return {"context": f"{name} lies by the sea. Its harbour is {name}port.", "qas": [asked]}


SQUAD = {"data": [{"paragraphs": [squad_paragraph(name) for name in ("Lorem", "Ipsum", "Dolor", "Amet")]}]}


def test_a_file_in_squads_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(SQUAD))
    questions = list(read_squad(path, passages=3))
    assert [question.id for question in questions] == ["Lorem", "Ipsum", "Dolor", "Amet"]
    for question in questions:
        (gold,) = question.gold
        assert question.passages[gold].startswith(question.id)
        assert question.answers == (f"{question.id}port",)
        assert len(set(question.passages)) == len(question.passages) <= 3


@pytest.mark.parametrize("content", ["", "[]", '{"data": [{}]}', '{"data": [{"paragraphs": [{"qas": [{}]}]}]}', "7"])
def test_other_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "squad.json").write_text(content)
    with pytest.raises(QuestionsError, match="SQuAD"):
        list(read_squad(tmp_path / "squad.json"))
