"""Questions with evidence, and files that hold them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

from warmprefix import ContextBlock
from warmprefix.errors import MissingExtraError, WarmprefixError
from warmprefix_tools.retriever import Bm25Retriever

try:
    from annotated_types import Ge, Le, Len
    from pydantic import AfterValidator, BaseModel, FiniteFloat, Strict, StringConstraints, ValidationError
except ImportError as exc:
    raise MissingExtraError("cli", "pydantic") from exc

__all__ = [
    "EarlierTurn",
    "EvidenceQuestion",
    "FoundEvidence",
    "QuestionsError",
    "ScoredPassage",
    "evidence_with",
    "read_questions",
    "squad_questions",
    "with_fewer_passages",
]

_SENTENCE = re.compile(r".{40,}?(?:[.!?][\"\u201d)]?\s+(?=\W?[A-Z0-9])|\Z)|.+", re.DOTALL)
"""A sentence of 40 characters or more: an abbreviation seldom ends one."""


_CANDIDATES = 2.5
"""Candidates per place."""


class QuestionsError(WarmprefixError):
    """Questions could not be read; the message names the file and the line."""


class ScoredPassage(NamedTuple):
    """A passage that the retriever found, with its score."""

    text: str
    score: float
    """Higher is better."""


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
    chance: float | None = None
    """Share of guesses among the evidence that are right, from 0 to 1; None if unknown."""
    candidates: tuple[ScoredPassage, ...] = ()
    """In relevance order, all different: the passages, and others that no place was left for. Empty if the passages are
    not the first ones that the retriever found, or their scores are unknown."""


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


class _CandidateFields(BaseModel):
    """A candidate in a file of questions."""

    text: _Text
    score: FiniteFloat


class _QuestionLine(BaseModel):
    """A line of a file of questions."""

    id: str | int | None = None
    question: _Text
    answers: tuple[_Text, ...]
    passages: _Passages
    gold: tuple[Annotated[int, Strict(), Ge(0)], ...] = ()
    earlier: tuple[_TurnFields, ...] = ()
    chance: Annotated[float, Ge(0), Le(1)] | None = None
    candidates: tuple[_CandidateFields, ...] = ()

    def made(self, number: int) -> EvidenceQuestion:
        """Return the question; a line without an id gets its number."""
        if any(at >= len(self.passages) for at in self.gold):
            raise ValueError("gold must be a list of indices of passages")
        found = tuple([ScoredPassage(each.text, each.score) for each in self.candidates])
        if found:
            _check_candidates(found, self.passages)
        turns = tuple([EarlierTurn(turn.question, turn.answer, turn.passages) for turn in self.earlier])
        id = str(number if self.id is None else self.id)
        return EvidenceQuestion(id, self.question, self.answers, self.passages, self.gold, turns, self.chance, found)


def _check_candidates(candidates: Sequence[ScoredPassage], passages: tuple[str, ...]) -> None:
    texts = tuple([each.text for each in candidates])
    if len(set(texts)) < len(texts) or texts[: len(passages)] != passages:
        raise ValueError("candidates must be all different, and the first ones must be the passages")
    for at, (one, next_one) in enumerate(pairwise(candidates), 1):
        if next_one.score > one.score:
            raise ValueError(f"candidates must come with falling scores, got a higher one at index {at}")


def read_questions(path: Path) -> list[EvidenceQuestion]:
    """Read a file with one JSON object per line: `id`, `question`, `answers`, `passages`, and perhaps `gold`,
    `earlier`, `chance` and `candidates`.

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


def with_fewer_passages(question: EvidenceQuestion, count: int) -> EvidenceQuestion:
    """Return a question with this many passages at most in each turn: those that the answer needs, and the first ones.

    A needed passage stays even if there are more of them. If another one leaves for it, the question has no candidates:
    no retriever would have returned these passages.
    """
    needed = {question.passages[at] for at in question.gold}

    def fewer(passages: Sequence[str]) -> tuple[str, ...]:
        others = [text for text in passages if text not in needed]
        dropped = set(others[max(0, count - (len(passages) - len(others))) :])
        return tuple([text for text in passages if text not in dropped])

    passages = fewer(question.passages)
    return replace(
        question,
        passages=passages,
        candidates=question.candidates if passages == question.passages[: len(passages)] else (),
        gold=tuple(sorted(map(passages.index, needed))),
        earlier=tuple([turn._replace(passages=fewer(turn.passages)) for turn in question.earlier]),
        chance=question.chance and min(1.0, question.chance * len(question.passages) / len(passages)),
    )


def squad_questions(text: bytes, sentences: bool = False) -> Iterator[EvidenceQuestion]:
    """Yield the questions of a file in SQuAD's format, such as those of SQuAD, XQuAD and MLQA.

    The evidence of a question is paragraphs of the file; see `evidence_with`. O(questions * paragraphs).

    Args:
        text: The content of the file.
        sentences: Whether the evidence is sentences in place of paragraphs, and five of them in place of eight, so that
            a small model can read it.

    Raises:
        ValueError, KeyError, TypeError: The file has another format.
    """
    paragraphs = [paragraph for article in json.loads(text)["data"] for paragraph in article["paragraphs"]]
    asked = [(paragraph["context"], entry) for paragraph in paragraphs for entry in paragraph["qas"]]
    split = _sentences if sentences else lambda context: [context]
    parts = [part.strip() for paragraph in paragraphs for part in split(str(paragraph["context"]))]
    retriever = Bm25Retriever([ContextBlock(context) for context in dict.fromkeys(parts)])
    for context, entry in asked:
        question, answers = str(entry["question"]), [str(answer["text"]) for answer in entry["answers"]]
        needed = str(context)
        if sentences:
            begin = int(entry["answers"][0]["answer_start"])
            needed = next(part for part in split(needed) if (begin := begin - len(part)) < 0)
        found = evidence_with(retriever, question, [needed.strip()], 5 if sentences else 8)
        yield found.asked(str(entry["id"]), question, tuple(dict.fromkeys(answers)))


def _sentences(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph, each with the white space behind it; joined, they are the paragraph."""
    return [found[0] for found in _SENTENCE.finditer(paragraph)]


class FoundEvidence(NamedTuple):
    """What a retriever finds for a question."""

    passages: tuple[str, ...]
    gold: tuple[int, ...]
    candidates: tuple[ScoredPassage, ...]
    """See `EvidenceQuestion`, as for the others."""

    def asked(
        self, id: str, question: str, answers: tuple[str, ...], earlier: tuple[EarlierTurn, ...] = ()
    ) -> EvidenceQuestion:
        """Return the question with this evidence."""
        return EvidenceQuestion(id, question, answers, self.passages, self.gold, earlier, None, self.candidates)


def evidence_with(retriever: Bm25Retriever, question: str, needed: Sequence[str], count: int = 8) -> FoundEvidence:
    """Return the passages that BM25 finds for a question, the indices of the needed ones, and the candidates.

    Needed passages that BM25 does not find take the last places; then there are no candidates.
    """
    scored = retriever.scored(question, round(_CANDIDATES * count))
    candidates = [ScoredPassage(block.text, score) for block, score in scored]
    found = [each.text for each in candidates[:count]]
    missing = [text for text in dict.fromkeys(needed) if text not in found]
    others = [text for text in found if text not in needed]
    dropped = set(others[len(others) - max(0, len(found) + len(missing) - count) :])
    passages = [text for text in found if text not in dropped] + missing
    gold = tuple(sorted({passages.index(text) for text in needed}))
    return FoundEvidence(tuple(passages), gold, () if missing else tuple(candidates))
