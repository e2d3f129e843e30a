"""Made-up questions, for machines without a network and for planted readers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from warmprefix_tools.quality.questions import EarlierTurn, EvidenceQuestion

__all__ = ["LANGUAGES", "MadeUpSet", "made_up_questions"]

MadeUpSet = Literal["facts", "two-hop", "latest", "turns"]
"""Kinds of questions.

`"facts"`: one passage holds the answer. `"two-hop"`: one passage names the entity, another one has its fact.
`"latest"`: passages contradict each other, and the last one counts, so their order is part of the evidence. `"turns"`:
the question ends a conversation, whose earlier turns have many of its passages."""


class _Wording(NamedTuple):
    fact: str
    question: str
    partner: str
    """Names an entity by its partner."""
    has_partner: str
    latest: str
    """A question about the last of several facts."""


_WORDINGS: Mapping[str, _Wording] = {
    "en": _Wording(
        "The {attribute} of {entity} is {value}.",
        "What is the {attribute} of {entity}?",
        "the partner of {entity}",
        "The partner of {entity} is {other}.",
        "By the last passage that names it, what is the {attribute} of {entity}?",
    ),
    "de": _Wording(
        "{entity}: {attribute} ist {value}.",
        "Was ist {attribute} von {entity}?",
        "dem Partner von {entity}",
        "Der Partner von {entity} ist {other}.",
        "Was ist laut dem letzten Absatz dazu {attribute} von {entity}?",
    ),
    "es": _Wording(
        "En {entity}, {attribute} es {value}.",
        "¿Cuál es {attribute} de {entity}?",
        "la pareja de {entity}",
        "La pareja de {entity} es {other}.",
        "Según el último pasaje que lo nombra, ¿cuál es {attribute} de {entity}?",
    ),
    "zh": _Wording(
        "{entity}的{attribute}是{value}。",
        "{entity}的{attribute}是什么?",
        "{entity}的伙伴",
        "{entity}的伙伴是{other}。",
        "根据最后提到它的段落,{entity}的{attribute}是什么?",
    ),
}
LANGUAGES = tuple(_WORDINGS)
_SYLLABLES = ("ka", "lo", "mi", "ra", "ten", "vor", "sul", "pe", "dan", "ri", "go", "nes", "tal", "ur")
_ATTRIBUTES = ("capital", "harbour", "river", "founder", "emblem", "oldest bridge", "patron", "main export")
_TOPIC = 12
"""Entities of one topic, whose passages are retrieved together."""
_ASKED_OF_TOPIC = 4 * _TOPIC
_PARAGRAPH_FACTS = 3
_REPORTS = 3
"""Passages about one entity in the set `latest`."""


class _Entity(NamedTuple):
    name: str
    facts: Mapping[str, str]


class _Topic(NamedTuple):
    entities: Sequence[_Entity]
    asked: Sequence[tuple[int, str]]
    """An entity's number and an attribute, for each question."""


def made_up_questions(
    count: int, *, kind: MadeUpSet = "facts", language: str = "en", passages: int = 8, seed: int = 0
) -> Iterator[EvidenceQuestion]:
    """Yield questions about entities that do not exist, so that no model has the answers from elsewhere.

    Questions of one topic share passages, as those of users do; the passage with the answer is the most relevant one in
    half of them. The same arguments give the same questions.

    Raises:
        ValueError: The kind or the language is unknown, or a number is out of range.
    """
    if kind not in get_args(MadeUpSet):
        raise ValueError(f"kind must be one of {', '.join(get_args(MadeUpSet))}, got {kind!r}")
    if language not in _WORDINGS:
        raise ValueError(f"language must be one of {', '.join(_WORDINGS)}, got {language!r}")
    if not 3 <= passages <= _TOPIC:
        raise ValueError(f"passages must be 3 to {_TOPIC}, got {passages}")
    wording, make = _WORDINGS[language], _MAKERS[kind]
    rng = random.Random(seed)  # noqa: S311
    topic = _Topic((), ())
    for number in range(count):
        if number % _ASKED_OF_TOPIC == 0:
            topic = _new_topic(rng, number // _ASKED_OF_TOPIC)
        id = "-".join([*([kind] if kind != "facts" else []), language, str(number)])
        yield make(rng, wording, topic, number % _ASKED_OF_TOPIC, passages, id)


def _new_topic(rng: random.Random, number: int) -> _Topic:
    entities = [_entity(rng, number, at) for at in range(_TOPIC)]
    return _Topic(entities, rng.sample([(at, name) for at in range(_TOPIC) for name in _ATTRIBUTES], _ASKED_OF_TOPIC))


def _entity(rng: random.Random, topic: int, number: int) -> _Entity:
    facts = _facts(rng)
    return _Entity(f"{_word(rng, 2)}-{topic}-{number}", facts)


def _facts(rng: random.Random) -> dict[str, str]:
    return {attribute: _word(rng, 3) for attribute in _ATTRIBUTES}


def _word(rng: random.Random, syllables: int) -> str:
    return "".join(rng.choices(_SYLLABLES, k=syllables)).capitalize()


def _passage(wording: _Wording, entity: _Entity) -> str:
    """Return the facts of an entity in several paragraphs: four of five real passages have a blank line."""
    facts = [
        wording.fact.format(attribute=name, entity=entity.name, value=value) for name, value in entity.facts.items()
    ]
    paragraphs = [facts[begin : begin + _PARAGRAPH_FACTS] for begin in range(0, len(facts), _PARAGRAPH_FACTS)]
    return "\n\n".join(map(" ".join, paragraphs))


def _order(rng: random.Random, gold: int, passages: int) -> list[int]:
    """Return numbers of entities, with `gold` first in half of all cases."""
    others = rng.sample([other for other in range(_TOPIC) if other != gold], passages - 1)
    place = 0 if rng.random() < 0.5 else rng.randrange(1, passages)
    return [*others[:place], gold, *others[place:]]


_Maker = Callable[[random.Random, _Wording, _Topic, int, int, str], EvidenceQuestion]


def _fact_question(
    rng: random.Random, wording: _Wording, topic: _Topic, number: int, passages: int, id: str
) -> EvidenceQuestion:
    at, attribute = topic.asked[number]
    entity = topic.entities[at]
    order = _order(rng, at, passages)
    texts = [_passage(wording, topic.entities[each]) for each in order]
    question = wording.question.format(attribute=attribute, entity=entity.name)
    return EvidenceQuestion(id, question, (entity.facts[attribute],), tuple(texts), (order.index(at),))


def _two_hop_question(
    rng: random.Random, wording: _Wording, topic: _Topic, number: int, passages: int, id: str
) -> EvidenceQuestion:
    at, attribute = topic.asked[number]
    order = _order(rng, at, passages)
    partner_at = (at + 1) % _TOPIC  # each entity is the partner of the one before
    if partner_at not in order:
        order[order.index(at) - 1] = partner_at
    texts = [_partner_passage(wording, topic, each) for each in order]
    named = wording.partner.format(entity=topic.entities[at].name)
    question = wording.question.format(attribute=attribute, entity=named)
    answer = topic.entities[partner_at].facts[attribute]
    return EvidenceQuestion(id, question, (answer,), tuple(texts), tuple(sorted(map(order.index, (at, partner_at)))))


def _partner_passage(wording: _Wording, topic: _Topic, at: int) -> str:
    entity, other = topic.entities[at], topic.entities[(at + 1) % _TOPIC]
    return f"{wording.has_partner.format(entity=entity.name, other=other.name)} {_passage(wording, entity)}"


def _latest_question(
    rng: random.Random, wording: _Wording, topic: _Topic, number: int, passages: int, id: str
) -> EvidenceQuestion:
    at, attribute = topic.asked[number]
    name = topic.entities[at].name
    reports = _reports(topic)
    own = [each for each in range(len(reports)) if reports[each].name == name]
    others = [each for each in range(len(reports)) if reports[each].name != name]
    order = sorted([*rng.sample(own, min(2, passages)), *rng.sample(others, passages - 2)])
    last = max(set(order) & set(own))
    question = wording.latest.format(attribute=attribute, entity=name)
    texts = [_passage(wording, reports[each]) for each in order]
    return EvidenceQuestion(id, question, (reports[last].facts[attribute],), tuple(texts), (order.index(last),))


def _reports(topic: _Topic) -> list[_Entity]:
    """Return reports about all entities, oldest first; the same ones for each question of the topic."""
    rng = random.Random(topic.entities[0].name)  # noqa: S311
    return [_Entity(entity.name, _facts(rng)) for _ in range(_REPORTS) for entity in topic.entities]


def _last_turn_question(
    rng: random.Random, wording: _Wording, topic: _Topic, number: int, passages: int, id: str
) -> EvidenceQuestion:
    """Make a question of a conversation with two earlier turns, one of which has the passage with the answer."""
    asked = [
        _fact_question(rng, wording, topic, (number + offset) % _ASKED_OF_TOPIC, passages, id) for offset in (1, 2)
    ]
    last = _fact_question(rng, wording, topic, number, passages, id)
    gold = last.passages[last.gold[0]]
    if all(gold not in turn.passages for turn in asked):
        first = asked[0]
        place = next(at for at in range(passages) if at not in first.gold)
        asked[0] = EvidenceQuestion(
            id, first.question, first.answers, (*first.passages[:place], gold, *first.passages[place + 1 :]), first.gold
        )
    earlier = [EarlierTurn(turn.question, turn.answers[0], turn.passages) for turn in asked]
    return EvidenceQuestion(id, last.question, last.answers, last.passages, last.gold, tuple(earlier))


_MAKERS: Mapping[MadeUpSet, _Maker] = {
    "facts": _fact_question,
    "two-hop": _two_hop_question,
    "latest": _latest_question,
    "turns": _last_turn_question,
}
