"""Questions with evidence, and files that hold them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from warmprefix import ContextBlock
from warmprefix.errors import MissingExtraError, WarmprefixError
from warmprefix_tools.retriever import Bm25Retriever

try:
    from annotated_types import Ge, Len
    from pydantic import AfterValidator, BaseModel, Strict, StringConstraints, ValidationError
except ImportError as exc:
    raise MissingExtraError("cli", "pydantic") from exc

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


_Text = Annotated[str, StringConstraints(pattern=r"\S")]


def _different(texts: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(texts)) < len(texts):
        raise ValueError("must be all different")
    return texts


_Passages = Annotated[tuple[_Text, ...], Len(min_length=1), AfterValidator(_different)]


class _TurnFields(BaseModel):
    """A turn in a file of questions."""

    question: _Text
    answer: _Text
    passages: _Passages


class _QuestionLine(BaseModel):
    """A line of a file of questions."""

    id: str | int | None = None
    question: _Text
    answers: tuple[_Text, ...]
    passages: _Passages
    gold: tuple[Annotated[int, Strict(), Ge(0)], ...] = ()
    earlier: tuple[_TurnFields, ...] = ()

    def made(self, number: int) -> EvidenceQuestion:
        """Return the question; a line without an id gets its number."""
        if any(at >= len(self.passages) for at in self.gold):
            raise ValueError("gold must be a list of indices of passages")
        turns = tuple([EarlierTurn(turn.question, turn.answer, turn.passages) for turn in self.earlier])
        id = str(number if self.id is None else self.id)
        return EvidenceQuestion(id, self.question, self.answers, self.passages, self.gold, turns)


def read_questions(path: Path) -> list[EvidenceQuestion]:
    """Read a file with one JSON object per line: `id`, `question`, `answers`, `passages`, and perhaps `gold` and
    `earlier`.

    Raises:
        QuestionsError: The file can't be read, or a line is not of this form.
    """
    questions: dict[str, EvidenceQuestion] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise QuestionsError(f"{path} could not be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                question = _QuestionLine.model_validate_json(line).made(number)
                if question.id in questions:
                    raise ValueError(f"the id {question.id!r} is there twice")
            except ValidationError as error:
                found = error.errors()[0]
                reason = ": ".join(filter(None, (".".join(map(str, found["loc"])), found["msg"])))
                raise QuestionsError(f"{path}, line {number}: {reason}") from error
            except ValueError as error:
                raise QuestionsError(f"{path}, line {number}: {error}") from error
            questions[question.id] = question
    if not questions:
        raise QuestionsError(f"{path} has no question")
    return list(questions.values())


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
