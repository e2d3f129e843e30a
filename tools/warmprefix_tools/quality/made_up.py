"""Made-up questions, for machines without a network, small models and planted readers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from warmprefix_tools.quality.questions import EarlierTurn, EvidenceQuestion

__all__ = ["LANGUAGES", "MADE_UP", "made_up_questions"]

MADE_UP = "made-up"
"""What the names of these sets begin with."""


class _Wording(NamedTuple):
    """A kind of made-up questions."""

    facts: Mapping[str, tuple[str, str]]
    """The sentence of a fact and a question, by attribute."""
    names: Sequence[str] = ()
    """Of entities; without them, they are made up from syllables, and so are the values."""
    values: Mapping[str, Sequence[str]] = {}
    """By attribute. Each entity of a topic has another one."""
    passages: int = 8
    paragraph_facts: int = 3


# Words of one token in most vocabularies, so that a small model reads five passages in 150 tokens.
_NAMES = (
    "Anna Carl Diana Edgar George Helen Ivan Julia Kevin Laura Martin Oscar Robert Sarah Thomas Victor Wendy Adam Bella"
    " Daniel Emma Frank Henry Jack Karen Alice Peter Simon Ruth Paul David Susan Linda Michael James Lucy"
)
_CITIES = "Paris London Berlin Madrid Rome Vienna Oslo Dublin Prague Athens Lisbon Warsaw Tokyo Cairo Delhi Boston"
_JOBS = "doctor teacher baker farmer lawyer painter driver nurse pilot singer sailor miner tailor judge chef writer"
_ANIMALS = "dog cat horse rabbit parrot goat snake turtle sheep duck pig goose donkey cow spider bear"
_SPORTS = "tennis golf chess football hockey soccer cricket baseball basketball volleyball rugby polo squash"
_ATTRIBUTES = ("capital", "harbour", "river", "founder", "emblem", "oldest bridge", "patron", "main export")
_WORDINGS: Mapping[str, _Wording] = {
    language: _Wording(
        {name: (fact.replace("ATTRIBUTE", name), ask.replace("ATTRIBUTE", name)) for name in _ATTRIBUTES}
    )
    for language, fact, ask in (
        ("en", "The ATTRIBUTE of {entity} is {value}.", "What is the ATTRIBUTE of {entity}?"),
        ("de", "{entity}: ATTRIBUTE ist {value}.", "Was ist ATTRIBUTE von {entity}?"),
        ("es", "En {entity}, ATTRIBUTE es {value}.", "¿Cuál es ATTRIBUTE de {entity}?"),
        ("zh", "{entity}的ATTRIBUTE是{value}。", "{entity}的ATTRIBUTE是什么?"),
    )
} | {
    "names": _Wording(
        {
            "city": ("{entity} lives in {value}.", "Where does {entity} live?"),
            "job": ("{entity} works as a {value}.", "What is the job of {entity}?"),
            "animal": ("{entity} owns a {value}.", "Which animal does {entity} own?"),
            "sport": ("{entity} plays {value}.", "Which sport does {entity} play?"),
        },
        _NAMES.split(),
        {"city": _CITIES.split(), "job": _JOBS.split(), "animal": _ANIMALS.split(), "sport": _SPORTS.split()},
        passages=5,
        paragraph_facts=2,
    ),
}
LANGUAGES = tuple(_WORDINGS)
"""What questions can be made in; `names` are short ones in English about people with ordinary names."""
_SYLLABLES = ("ka", "lo", "mi", "ra", "ten", "vor", "sul", "pe", "dan", "ri", "go", "nes", "tal", "ur")
_TOPIC = 12
"""Entities of one topic, whose passages are retrieved together."""
_ASKED_OF_TOPIC = 4 * _TOPIC


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
    wording, topic = _WORDINGS[language], _Topic((), ())
    for number in range(count):
        at = number % _ASKED_OF_TOPIC
        if at == 0:
            topic = _new_topic(rng, wording, number // _ASKED_OF_TOPIC)
        id = f"{'turns-' * turns}{language}-{number}"
        earlier = [_question(rng, wording, topic, (at + n) % _ASKED_OF_TOPIC, id) for n in (1, 2) if turns]
        question = _question(rng, wording, topic, at, id)
        yield _with_turns(question, earlier) if turns else question


def _new_topic(rng: random.Random, wording: _Wording, number: int) -> _Topic:
    names = rng.sample(wording.names, _TOPIC) if wording.names else []
    values = {attribute: rng.sample(values, _TOPIC) for attribute, values in wording.values.items()}
    entities = []
    for at in range(_TOPIC):
        facts = {name: values[name][at] if values else _word(rng, 3) for name in wording.facts}
        entities.append((names[at] if names else f"{_word(rng, 2)}-{number}-{at}", facts))
    asked = [(at, name) for at in range(_TOPIC) for name in wording.facts]
    return _Topic(entities, rng.sample(asked, _ASKED_OF_TOPIC))


def _word(rng: random.Random, syllables: int) -> str:
    return "".join(rng.choices(_SYLLABLES, k=syllables)).capitalize()


def _question(rng: random.Random, wording: _Wording, topic: _Topic, number: int, id: str) -> EvidenceQuestion:
    at, attribute = topic.asked[number]
    others = rng.sample([other for other in range(_TOPIC) if other != at], wording.passages - 1)
    place = 0 if rng.random() < 0.5 else rng.randrange(1, wording.passages)
    texts = [_passage(wording, *topic.entities[each]) for each in [*others[:place], at, *others[place:]]]
    name, facts = topic.entities[at]
    question = wording.facts[attribute][1].format(entity=name)
    return EvidenceQuestion(id, question, (facts[attribute],), tuple(texts), (place,), chance=1 / wording.passages)


def _passage(wording: _Wording, name: str, facts: Mapping[str, str]) -> str:
    """Return the facts of an entity in several paragraphs: four of five real passages have a blank line."""
    found = [wording.facts[attribute][0].format(entity=name, value=value) for attribute, value in facts.items()]
    step = wording.paragraph_facts
    return "\n\n".join(" ".join(found[at : at + step]) for at in range(0, len(found), step))


def _with_turns(last: EvidenceQuestion, asked: Sequence[EvidenceQuestion]) -> EvidenceQuestion:
    """Return a question behind others, the first of which gets the passage with the answer if none has it."""
    gold = last.passages[last.gold[0]]
    passages = [turn.passages for turn in asked]
    if all(gold not in texts for texts in passages):
        place = next(at for at in range(len(passages[0])) if at not in asked[0].gold)
        passages[0] = (*passages[0][:place], gold, *passages[0][place + 1 :])
    turns = [EarlierTurn(turn.question, turn.answers[0], texts) for turn, texts in zip(asked, passages, strict=True)]
    return replace(last, earlier=tuple(turns))
