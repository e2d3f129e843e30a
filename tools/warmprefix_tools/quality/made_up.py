"""Made-up questions, for machines without a network and for planted readers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from warmprefix_tools.quality.questions import EarlierTurn, EvidenceQuestion

__all__ = ["LANGUAGES", "made_up_questions"]

_WORDINGS = {
    "en": ("The {attribute} of {entity} is {value}.", "What is the {attribute} of {entity}?"),
    "de": ("{entity}: {attribute} ist {value}.", "Was ist {attribute} von {entity}?"),
    "es": ("En {entity}, {attribute} es {value}.", "¿Cuál es {attribute} de {entity}?"),
    "zh": ("{entity}的{attribute}是{value}。", "{entity}的{attribute}是什么?"),
}
"""A fact and a question, by language."""
LANGUAGES = tuple(_WORDINGS)
_SYLLABLES = ("ka", "lo", "mi", "ra", "ten", "vor", "sul", "pe", "dan", "ri", "go", "nes", "tal", "ur")
_ATTRIBUTES = ("capital", "harbour", "river", "founder", "emblem", "oldest bridge", "patron", "main export")
_TOPIC = 12
"""Entities of one topic, whose passages are retrieved together."""
_ASKED_OF_TOPIC = 4 * _TOPIC
_PASSAGES = 8
_PARAGRAPH_FACTS = 3


class _Topic(NamedTuple):
    entities: Sequence[tuple[str, Mapping[str, str]]]
    """Name and facts of each."""
    asked: Sequence[tuple[int, str]]
    """An entity's number and an attribute, for each question."""


def made_up_questions(
    count: int, *, language: str = "en", turns: bool = False, seed: int = 0
) -> Iterator[EvidenceQuestion]:
    """Yield questions about entities that do not exist, so that no model has the answers from elsewhere.

    Questions of one topic share passages, as those of users do; the passage with the answer is the most relevant one in
    half of them. The same arguments give the same questions.

    Args:
        count: Number of questions.
        language: One of `LANGUAGES`.
        turns: Whether each question ends a conversation of three turns, an earlier one of which has the passage with
            the answer.
        seed: Another seed gives other questions.
    """
    rng = random.Random(seed)  # noqa: S311
    topic = _Topic((), ())
    for number in range(count):
        at = number % _ASKED_OF_TOPIC
        if at == 0:
            topic = _new_topic(rng, number // _ASKED_OF_TOPIC)
        id = f"{'turns-' * turns}{language}-{number}"
        earlier = [_question(rng, language, topic, (at + n) % _ASKED_OF_TOPIC, id) for n in (1, 2) if turns]
        question = _question(rng, language, topic, at, id)
        yield _with_turns(question, earlier) if turns else question


def _new_topic(rng: random.Random, number: int) -> _Topic:
    entities = []
    for at in range(_TOPIC):
        facts = {attribute: _word(rng, 3) for attribute in _ATTRIBUTES}
        entities.append((f"{_word(rng, 2)}-{number}-{at}", facts))
    return _Topic(entities, rng.sample([(at, name) for at in range(_TOPIC) for name in _ATTRIBUTES], _ASKED_OF_TOPIC))


def _word(rng: random.Random, syllables: int) -> str:
    return "".join(rng.choices(_SYLLABLES, k=syllables)).capitalize()


def _question(rng: random.Random, language: str, topic: _Topic, number: int, id: str) -> EvidenceQuestion:
    at, attribute = topic.asked[number]
    others = rng.sample([other for other in range(_TOPIC) if other != at], _PASSAGES - 1)
    place = 0 if rng.random() < 0.5 else rng.randrange(1, _PASSAGES)
    texts = [_passage(language, *topic.entities[each]) for each in [*others[:place], at, *others[place:]]]
    name, facts = topic.entities[at]
    question = _WORDINGS[language][1].format(attribute=attribute, entity=name)
    return EvidenceQuestion(id, question, (facts[attribute],), tuple(texts), (place,))


def _passage(language: str, name: str, facts: Mapping[str, str]) -> str:
    """Return the facts of an entity in several paragraphs: four of five real passages have a blank line."""
    fact, _ = _WORDINGS[language]
    found = [fact.format(attribute=attribute, entity=name, value=value) for attribute, value in facts.items()]
    return "\n\n".join(" ".join(found[at : at + _PARAGRAPH_FACTS]) for at in range(0, len(found), _PARAGRAPH_FACTS))


def _with_turns(last: EvidenceQuestion, asked: Sequence[EvidenceQuestion]) -> EvidenceQuestion:
    """Return a question behind others, the first of which gets the passage with the answer if none has it."""
    gold = last.passages[last.gold[0]]
    passages = [turn.passages for turn in asked]
    if all(gold not in texts for texts in passages):
        place = next(at for at in range(_PASSAGES) if at not in asked[0].gold)
        passages[0] = (*passages[0][:place], gold, *passages[0][place + 1 :])
    turns = [EarlierTurn(turn.question, turn.answers[0], texts) for turn, texts in zip(asked, passages, strict=True)]
    return replace(last, earlier=tuple(turns))
