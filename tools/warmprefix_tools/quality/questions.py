"""Questions with evidence: from files, or made up for machines without a network."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmprefix import ContextBlock
from warmprefix.errors import WarmprefixError
from warmprefix_tools.retriever import Bm25Retriever

__all__ = ["EvidenceQuestion", "QuestionsError", "made_up_questions", "read_questions", "read_squad"]


class QuestionsError(WarmprefixError):
    """Questions could not be read; the message names the file and the line."""


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


def read_questions(path: Path) -> list[EvidenceQuestion]:
    """Read a file with one JSON object per line: `id`, `question`, `answers`, `passages`, and perhaps `gold`.

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


def read_squad(path: Path, *, passages: int = 8) -> Iterator[EvidenceQuestion]:
    """Yield the questions of a file in SQuAD's format, such as those of SQuAD, XQuAD and MLQA.

    The evidence of a question is the paragraphs of the file that BM25 finds for it, with the one that it was asked
    about, which is the last if BM25 does not find it. O(questions * paragraphs).

    Raises:
        QuestionsError: The file can't be read, or has another format.
    """
    try:
        articles = json.loads(path.read_text("utf-8"))["data"]
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        asked = [(paragraph["context"], entry) for paragraph in paragraphs for entry in paragraph["qas"]]
        rows = [
            (
                str(entry["id"]),
                str(entry["question"]),
                [str(answer["text"]) for answer in entry["answers"]],
                str(context),
            )
            for context, entry in asked
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise QuestionsError(f"{path} has no questions in SQuAD's format: {error!r}") from error
    contexts = list(dict.fromkeys([str(paragraph["context"]) for paragraph in paragraphs]))
    retriever = Bm25Retriever([ContextBlock(context) for context in contexts])
    for id, question, answers, context in rows:
        found = [block.text for block in retriever.retrieve(question, passages)]
        evidence = found if context in found else [*found[: passages - 1], context]
        yield EvidenceQuestion(id, question, tuple(dict.fromkeys(answers)), tuple(evidence), (evidence.index(context),))


def _read(fields: Any, number: int) -> EvidenceQuestion:
    if not isinstance(fields, dict):
        raise ValueError(f"must be an object, got {type(fields).__name__}")
    question = fields.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError("question must be a text that is not empty")
    texts: dict[str, tuple[str, ...]] = {}
    for name in ("answers", "passages"):
        values = fields.get(name)
        if not isinstance(values, list) or not all(isinstance(value, str) and value.strip() for value in values):
            raise ValueError(f"{name} must be a list of texts that are not empty")
        texts[name] = tuple(values)
    "".join([question, *texts["answers"], *texts["passages"]]).encode()  # half of a surrogate pair is an error
    if not texts["passages"] or len(set(texts["passages"])) < len(texts["passages"]):
        raise ValueError("passages must be one or more, all different")
    gold = fields.get("gold", [])
    if not isinstance(gold, list) or not all(type(n) is int and 0 <= n < len(texts["passages"]) for n in gold):
        raise ValueError("gold must be a list of indices of passages")
    return EvidenceQuestion(str(fields.get("id", number)), question, texts["answers"], texts["passages"], tuple(gold))


# -- made up -----------------------------------------------------------------------------------------------------------

_SYLLABLES = ("ka", "lo", "mi", "ra", "ten", "vor", "sul", "pe", "dan", "ri", "go", "nes", "tal", "ur")
_LANGUAGES = {
    "en": ("The {attribute} of {entity} is {value}.", "What is the {attribute} of {entity}?"),
    "de": ("{entity}: {attribute} ist {value}.", "Was ist {attribute} von {entity}?"),
    "es": ("En {entity}, {attribute} es {value}.", "¿Cuál es {attribute} de {entity}?"),
    "zh": ("{entity}的{attribute}是{value}。", "{entity}的{attribute}是什么?"),
}
_ATTRIBUTES = ("capital", "harbour", "river", "founder", "emblem", "oldest bridge", "patron", "main export")
_TOPIC = 12
"""Entities of one topic, whose passages are retrieved together."""


def made_up_questions(
    count: int, *, language: str = "en", passages: int = 8, seed: int = 0
) -> Iterator[EvidenceQuestion]:
    """Yield questions about entities that do not exist, so that no model has the answers from elsewhere.

    Questions of one topic share passages, as those of users do; the passage with the answer is the most relevant one in
    half of them. The same arguments give the same questions.

    Raises:
        ValueError: The language is unknown, or a number is out of range.
    """
    if language not in _LANGUAGES:
        raise ValueError(f"language must be one of {', '.join(_LANGUAGES)}, got {language!r}")
    if not 2 <= passages <= _TOPIC:
        raise ValueError(f"passages must be 2 to {_TOPIC}, got {passages}")
    fact, question = _LANGUAGES[language]
    rng = random.Random(seed)  # noqa: S311
    asked_of_topic = 4 * _TOPIC
    topic: list[tuple[str, dict[str, str]]] = []
    pairs: list[tuple[int, str]] = []
    for number in range(count):
        if number % asked_of_topic == 0:
            topic = [_entity(rng, number // asked_of_topic, at) for at in range(_TOPIC)]
            pairs = rng.sample([(at, name) for at in range(_TOPIC) for name in _ATTRIBUTES], asked_of_topic)
        at, attribute = pairs[number % asked_of_topic]
        name, facts = topic[at]
        others = rng.sample([other for other in range(_TOPIC) if other != at], passages - 1)
        place = 0 if rng.random() < 0.5 else rng.randrange(1, passages)
        order = [*others[:place], at, *others[place:]]
        texts = [_passage(fact, *topic[each]) for each in order]
        asked = question.format(attribute=attribute, entity=name)
        yield EvidenceQuestion(f"{language}-{number}", asked, (facts[attribute],), tuple(texts), (place,))


def _entity(rng: random.Random, topic: int, number: int) -> tuple[str, dict[str, str]]:
    values = {attribute: _word(rng, 3) for attribute in _ATTRIBUTES}
    return f"{_word(rng, 2)}-{topic}-{number}", values


def _word(rng: random.Random, syllables: int) -> str:
    return "".join(rng.choices(_SYLLABLES, k=syllables)).capitalize()


def _passage(fact: str, name: str, facts: dict[str, str]) -> str:
    return " ".join([fact.format(attribute=attribute, entity=name, value=value) for attribute, value in facts.items()])
