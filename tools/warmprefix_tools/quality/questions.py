"""Questions with evidence, and files that hold them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from warmprefix import ContextBlock
from warmprefix.errors import WarmprefixError
from warmprefix_tools.retriever import Bm25Retriever

__all__ = ["EarlierTurn", "EvidenceQuestion", "QuestionsError", "evidence_with", "read_questions", "squad_questions"]


class QuestionsError(WarmprefixError):
    """Questions could not be read; the message names the file and the line."""


class EarlierTurn(NamedTuple):
    """A turn of the conversation in front of a question."""

    question: str
    answer: str
    passages: tuple[str, ...]
    """In relevance order, all different."""


@dataclass(frozen=True, slots=True)
class EvidenceQuestion:
    """A question, the evidence to answer it from, and the answers that are right."""

    id: str
    question: str
    answers: tuple[str, ...]
    """Empty if the evidence holds none."""
    passages: tuple[str, ...]
    """In relevance order, all different."""
    gold: tuple[int, ...] = ()
    """Indices of the passages that the answer follows from."""
    earlier: tuple[EarlierTurn, ...] = ()
    """Oldest first."""


def read_questions(path: Path) -> list[EvidenceQuestion]:
    """Read a file with one JSON object per line: `id`, `question`, `answers`, `passages`, and perhaps `gold` and
    `earlier`.

    Raises:
        QuestionsError: The file can't be read, or a line is not of this form.
    """
    questions: list[EvidenceQuestion] = []
    ids: set[str] = set()
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise QuestionsError(f"{path} could not be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question = _read(json.loads(line), number)
            if question.id in ids:
                raise ValueError(f"the id {question.id!r} is there twice")
        except ValueError as error:
            raise QuestionsError(f"{path}, line {number}: {error}") from error
        ids.add(question.id)
        questions.append(question)
    if not questions:
        raise QuestionsError(f"{path} has no question")
    return questions


def squad_questions(text: bytes) -> Iterator[EvidenceQuestion]:
    """Yield the questions of a file in SQuAD's format, such as those of SQuAD, XQuAD and MLQA.

    The evidence of a question is paragraphs of the file; see `evidence_with`. O(questions * paragraphs).

    Raises:
        ValueError, KeyError, TypeError: The file has another format.
    """
    paragraphs = [paragraph for article in json.loads(text)["data"] for paragraph in article["paragraphs"]]
    asked = [(paragraph["context"], entry) for paragraph in paragraphs for entry in paragraph["qas"]]
    contexts = list(dict.fromkeys([str(paragraph["context"]) for paragraph in paragraphs]))
    retriever = Bm25Retriever([ContextBlock(context) for context in contexts])
    for context, entry in asked:
        question, answers = str(entry["question"]), [str(answer["text"]) for answer in entry["answers"]]
        passages, gold = evidence_with(retriever, question, [str(context)])
        yield EvidenceQuestion(str(entry["id"]), question, tuple(dict.fromkeys(answers)), passages, gold)


def evidence_with(
    retriever: Bm25Retriever, question: str, needed: Sequence[str], count: int = 8
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the passages that BM25 finds for a question, and the indices of the needed ones.

    Needed passages that BM25 does not find take the last places.
    """
    found = [block.text for block in retriever.retrieve(question, count)]
    missing = [text for text in dict.fromkeys(needed) if text not in found]
    others = [text for text in found if text not in needed]
    dropped = set(others[len(others) - max(0, len(found) + len(missing) - count) :])
    passages = [text for text in found if text not in dropped] + missing
    return tuple(passages), tuple(sorted({passages.index(text) for text in needed}))


def _read(fields: Any, number: int) -> EvidenceQuestion:
    question = _text(fields, "question")
    answers, passages = _texts(fields, "answers"), _texts(fields, "passages")
    _check_passages(passages)
    gold = fields.get("gold", [])
    if not isinstance(gold, list) or not all(type(n) is int and 0 <= n < len(passages) for n in gold):
        raise ValueError("gold must be a list of indices of passages")
    turns = fields.get("earlier", [])
    if not isinstance(turns, list):
        raise ValueError("earlier must be a list of turns")
    earlier = [EarlierTurn(_text(turn, "question"), _text(turn, "answer"), _texts(turn, "passages")) for turn in turns]
    for turn in earlier:
        _check_passages(turn.passages)
    json.dumps(fields, ensure_ascii=False).encode()  # half of a surrogate pair is an error
    return EvidenceQuestion(str(fields.get("id", number)), question, answers, passages, tuple(gold), tuple(earlier))


def _text(fields: Any, name: str) -> str:
    if not isinstance(fields, dict):
        raise ValueError(f"must be an object, got {type(fields).__name__}")
    text = fields.get(name)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{name} must be a text that is not empty")
    return text


def _texts(fields: Any, name: str) -> tuple[str, ...]:
    values = fields.get(name)
    if not isinstance(values, list) or not all(isinstance(value, str) and value.strip() for value in values):
        raise ValueError(f"{name} must be a list of texts that are not empty")
    return tuple(values)


def _check_passages(passages: Sequence[str]) -> None:
    if not passages or len(set(passages)) < len(passages):
        raise ValueError("passages must be one or more, all different")
