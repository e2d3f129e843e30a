"""Who asks what, and when: users with interests of their own, in conversations that overlap in time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Generic, TypeVar

from warmprefix_tools.demo.corpus import Entry
from warmprefix_tools.demo.wording import Wording, first_wordings, follow_up_wordings, wordings_about_another
from warmprefix_tools.demo.words import content_words

__all__ = ["Question", "ask"]

_USERS = 40
_INTERESTS = 4
_MOST_TURNS = 4
_FEWEST_ENTRIES_OF_A_TOPIC = 3
_ATTEMPTS = 100
_THINKING_TIME = 4.0  # between turns, where 1 is the mean time between two conversations' starts

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question:
    """One turn of one conversation."""

    user: int
    conversation: int
    turn: int
    """From 1 on."""
    text: str
    """As the user types it: "And what does it return?"."""
    query: str
    """The same without the conversation, as a query rewriter hands it to a retriever."""


def ask(entries: Sequence[Entry], questions: int, seed: int) -> tuple[Question, ...]:
    """So many questions in order of arrival; the same for the same entries and seed, on every run.

    A topic is a module. How much users care for topics, and for the entries of one, follows Zipf's law over an order
    drawn at random. A user has four topics; a conversation is about one of them and has 1 to 4 turns, about one
    entry until a turn moves on to another. Conversations begin at random times, so their turns interleave. No two
    queries mean the same words to a retriever, while their topic has others left: what conversations share is what
    they are about.
    """
    rng = random.Random(seed)  # noqa: S311 - a simulation
    topics: dict[str, list[Entry]] = {}
    for entry in entries:
        topics.setdefault(entry.module, []).append(entry)
    popular = _Popularity(
        [_Popularity(topic, rng) for topic in topics.values() if len(topic) >= _FEWEST_ENTRIES_OF_A_TOPIC], rng
    )
    users = [[popular.draw(rng) for _ in range(_INTERESTS)] for _ in range(_USERS)]

    asked: set[frozenset[str]] = set()
    arrivals: list[tuple[float, Question]] = []
    start = 0.0
    for conversation in count():
        start += rng.expovariate(1)
        time, user = start, rng.randrange(_USERS)
        turns = min(rng.randint(1, _MOST_TURNS), questions - len(arrivals))
        for turn, wording in enumerate(_conversation(rng.choice(users[user]), turns, asked, rng), start=1):
            arrivals.append((time, Question(user, conversation, turn, wording.text, wording.query)))
            time += rng.expovariate(1 / _THINKING_TIME)
        if len(arrivals) == questions:
            break
    return tuple(question for _, question in sorted(arrivals, key=lambda arrival: arrival[0]))


def _conversation(
    topic: _Popularity[Entry], turns: int, asked: set[frozenset[str]], rng: random.Random
) -> Iterator[Wording]:
    """Its questions, each added to `asked`."""
    subject = topic.draw(rng)
    wordings = first_wordings(subject)
    for _ in range(turns):
        for _ in range(_ATTEMPTS):
            fresh = [wording for wording in wordings if _words(wording) not in asked]
            if fresh:
                wordings = fresh
                break
            subject = topic.draw(rng)
            wordings = first_wordings(subject)
        wording = rng.choice(wordings)
        asked.add(_words(wording))
        yield wording
        other = topic.draw(rng)
        if other is not subject and rng.random() < 0.5:
            wordings = wordings_about_another(other, subject)
            subject = other
        else:
            wordings = follow_up_wordings(subject)


def _words(wording: Wording) -> frozenset[str]:
    return frozenset(content_words(wording.query))


class _Popularity(Generic[T]):
    """Things of which the n-th most popular is drawn with a weight of 1/n; which one is the n-th, chance decides."""

    def __init__(self, things: Sequence[T], rng: random.Random) -> None:
        self._things = list(things)
        rng.shuffle(self._things)
        self._weights = list(accumulate(1 / n for n in range(1, len(things) + 1)))

    def draw(self, rng: random.Random) -> T:
        return rng.choices(self._things, cum_weights=self._weights)[0]
