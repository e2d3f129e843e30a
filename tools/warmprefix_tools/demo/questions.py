"""The demo's questions: users with interests of their own, in conversations that overlap in time."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Generic, TypeVar

from warmprefix_tools.demo.corpus import LibraryEntry
from warmprefix_tools.retriever import content_words

__all__ = ["USERS", "QuestionWording", "UserQuestion", "Wordings", "ask", "ask_about"]

USERS = 40
"""Users of a session, unless it is told otherwise."""
_INTERESTS = 4
_MOST_TURNS = 4
_LEAST_ENTRIES_OF_A_TOPIC = 3
_ATTEMPTS = 100
_THINKING_TIME = 4.0  # mean time between turns; 1 is the mean time between the starts of conversations

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UserQuestion:
    """One turn of one conversation."""

    user: int
    conversation: int
    turn: int
    """From 1 on."""
    text: str
    """As the user types it: "And what does it return?"."""
    query: str
    """The same without the conversation, as a query rewriter passes it to a retriever."""


@dataclass(frozen=True, slots=True)
class QuestionWording:
    """A question as typed, and as it would be asked without the conversation before it."""

    text: str
    query: str


@dataclass(frozen=True, slots=True)
class Wordings(Generic[T]):
    """Functions that word the questions about a subject."""

    first: Callable[[T], list[QuestionWording]]
    """Questions that open a conversation; they need no rewriting."""
    follow_up: Callable[[T], list[QuestionWording]]
    """Questions that leave the subject's name to the conversation."""
    about_another: Callable[[T, T], list[QuestionWording]]
    """Questions that move on to the first subject from the second."""


def ask(entries: Sequence[LibraryEntry], questions: int, seed: int, users: int = USERS) -> tuple[UserQuestion, ...]:
    """Return this number of questions about the standard library, as `ask_about` does; a topic is a module."""
    topics: dict[str, list[LibraryEntry]] = {}
    for entry in entries:
        topics.setdefault(entry.module, []).append(entry)
    large = [topic for topic in topics.values() if len(topic) >= _LEAST_ENTRIES_OF_A_TOPIC]
    return ask_about(
        large, Wordings(_first_wordings, _follow_up_wordings, _wordings_about_another), questions, seed, users
    )


def ask_about(
    topics: Sequence[Sequence[T]], wordings: Wordings[T], questions: int, seed: int, users: int = USERS
) -> tuple[UserQuestion, ...]:
    """Return this number of questions in order of arrival; the same for the same topics, wordings and seed.

    A topic is a list of subjects. How much users care for topics, and for the subjects of one, follows Zipf's law over
    an order drawn at random. A user has four topics; a conversation is about one of them and has 1 to 4 turns, about
    one subject until a turn moves on to another. Conversations begin at random times, so their turns interleave. No
    two queries have the same words for a retriever as long as their topic has others left, so conversations share
    their subjects but not their questions.
    """
    rng = random.Random(seed)  # noqa: S311 - a simulation
    popular = _Popularity([_Popularity(topic, rng) for topic in topics], rng)
    interests = [[popular.draw(rng) for _ in range(_INTERESTS)] for _ in range(users)]

    asked: set[frozenset[str]] = set()
    arrivals: list[tuple[float, UserQuestion]] = []
    start = 0.0
    for conversation in count():
        start += rng.expovariate(1)
        time, user = start, rng.randrange(users)
        turns = min(rng.randint(1, _MOST_TURNS), questions - len(arrivals))
        for turn, wording in enumerate(
            _conversation(rng.choice(interests[user]), wordings, turns, asked, rng), start=1
        ):
            arrivals.append((time, UserQuestion(user, conversation, turn, wording.text, wording.query)))
            time += rng.expovariate(1 / _THINKING_TIME)
        if len(arrivals) == questions:
            break
    return tuple(question for _, question in sorted(arrivals, key=lambda arrival: arrival[0]))


def _conversation(
    topic: _Popularity[T], wordings: Wordings[T], turns: int, asked: set[frozenset[str]], rng: random.Random
) -> Iterator[QuestionWording]:
    """Yield the questions of a conversation, and add each to `asked`."""
    subject = topic.draw(rng)
    candidates = wordings.first(subject)
    for _ in range(turns):
        for _ in range(_ATTEMPTS):
            fresh = [wording for wording in candidates if _words(wording) not in asked]
            if fresh:
                candidates = fresh
                break
            subject = topic.draw(rng)
            candidates = wordings.first(subject)
        wording = rng.choice(candidates)
        asked.add(_words(wording))
        yield wording
        other = topic.draw(rng)
        if other is not subject and rng.random() < 0.5:
            candidates = wordings.about_another(other, subject)
            subject = other
        else:
            candidates = wordings.follow_up(subject)


def _words(wording: QuestionWording) -> frozenset[str]:
    return frozenset(content_words(wording.query))


class _Popularity(Generic[T]):
    """Things in a random order, the n-th of which is drawn with a weight of 1/n."""

    def __init__(self, things: Sequence[T], rng: random.Random) -> None:
        self._things = list(things)
        rng.shuffle(self._things)
        self._weights = list(accumulate(1 / n for n in range(1, len(things) + 1)))

    def draw(self, rng: random.Random) -> T:
        return rng.choices(self._things, cum_weights=self._weights)[0]


# -- wordings --------------------------------------------------------------------------------------------------------

_FIRST = {
    "module": (
        "What is the {entry.name} module good for?",
        "Where do I start with {entry.name}?",
        "What does {entry.name} offer that I would otherwise write myself?",
    ),
    "class": (
        "What is {name} for?",
        "When should I use the {name} class?",
        "How do I work with a {name}?",
        "What should I check before I subclass {name}?",
    ),
    "function": (
        "What does {name} do?",
        "When would I call {name}?",
        "How is {name} meant to be used?",
        "I found {name} in other people's code. What is it for?",
    ),
}
_TOWARDS_A_GOAL = (
    "How do I {goal} in Python?",
    "What is the usual way to {goal}?",
    "Can {entry.module} {goal}?",
    "I want to {goal}. What does the standard library have for that?",
)
_FOLLOW_UPS = {
    "module": (("Which functions does it have?", "Functions in the {entry.name} module"),),
    "class": (
        ("Which methods does it have?", "Methods of {name}"),
        ("And how do I create one?", "How to create a {name}"),
    ),
    "function": (
        ("And which exceptions can it raise?", "Which exceptions can {name} raise?"),
        ("What does it return?", "What does {name} return?"),
    ),
}
_ABOUT_ANOTHER = (
    ("How does that differ from {name}?", "Difference between {before} and {name}"),
    ("And what about {name}?", "What does {name} do?"),
    ("Should I rather use {name}?", "When to use {name} instead of {before}?"),
)


def _first_wordings(entry: LibraryEntry) -> list[QuestionWording]:
    goal = _goal(entry)
    asked = [
        *_FIRST[entry.kind],
        *(f"What do I pass to {{name}} as {parameter}?" for parameter, _ in entry.parameters[:3]),
        *(_TOWARDS_A_GOAL if goal is not None else ()),
    ]
    return _filled([(question, question) for question in asked], entry, goal=goal)


def _follow_up_wordings(entry: LibraryEntry) -> list[QuestionWording]:
    name = _spoken_name(entry)
    wordings = [QuestionWording("Is there something similar?", f"Alternatives to {name} in {entry.module}")]
    remarks = _REMARK.findall(" ".join(entry.docstring.split()))[:4]
    wordings += [QuestionWording(f'What does this mean: "{remark}"?', f"{name}: {remark}") for remark in remarks]
    wordings += _filled(_FOLLOW_UPS[entry.kind], entry)
    for parameter, optional in entry.parameters[:4]:
        wordings.append(QuestionWording(f"What is {parameter} for?", f"What is the {parameter} argument of {name}?"))
        if optional:
            omitted = f"What does {name} do by default if {parameter} is not given?"
            wordings.append(QuestionWording(f"And if I leave {parameter} out?", omitted))
    return wordings


def _wordings_about_another(entry: LibraryEntry, previous: LibraryEntry) -> list[QuestionWording]:
    goal = _goal(entry)
    towards = (("And how do I {goal}?", "How do I {goal} with {entry.module}?"),) if goal is not None else ()
    return _filled([*_ABOUT_ANOTHER, *towards], entry, before=_spoken_name(previous), goal=goal)


def _filled(wordings: Iterable[tuple[str, str]], entry: LibraryEntry, **values: str | None) -> list[QuestionWording]:
    values["name"] = _spoken_name(entry)
    return [
        QuestionWording(text.format(entry=entry, **values), query.format(entry=entry, **values))
        for text, query in wordings
    ]


_VERBS = frozenset(
    re.findall(
        r"\w+",
        """
        add allow append apply arrange ask assert attach bind block build call cancel change check choose clear close
        collect combine compare compile complete compute configure connect construct convert copy count create decode
        decompress delete describe detect determine disable display divide download draw dump emit enable encode
        escape evaluate execute expand extract fetch fill filter find fix flush forget format generate get guess
        handle import indicate initialize insert install invoke iterate join list load locate log look make map merge
        modify move open override pack parse place plot pop prepare print process put query quote raise read receive
        record recursively redirect register release reload remove rename render replace report request reset resolve
        restore retrieve reverse rotate round run save scan schedule search seek select send serialize set show shut
        shuffle shutdown simulate sleep sort split start stop store strip submit suspend swap take terminate test
        transform translate truncate try turn undo unpack unregister update upload use validate verify wait walk wrap
        write yield
        """,
    )
)
_SENTENCE_END = re.compile(r"[.:;](?=\s|$)|\s\(|\s--?\s")
_PLAIN = re.compile(r"[A-Za-z][\w ,.'/*-]*", re.ASCII)
_LONGEST_GOAL = 80
_REMARK = re.compile(r"(?<=[.!?:])\s+([A-Z][\w ,'()=-]{30,110})\.(?=\s|$)", re.ASCII)


def _goal(entry: LibraryEntry) -> str | None:
    """Return the purpose of a function, to follow "How do I"; None if its first sentence does not begin with a verb.

    "Return the ..." becomes "get the ...".
    """
    if entry.kind != "function":
        return None
    sentence = _SENTENCE_END.split(" ".join(entry.docstring.split("\n\n")[0].split()))[0]
    sentence = sentence.replace("`", "").replace('"', "")
    verb, _, rest = sentence.partition(" ")
    verb = verb.lower()
    verb = verb if verb in _VERBS or verb == "return" else verb.removesuffix("s")
    if not len(rest.split()) > 1 or len(sentence) > _LONGEST_GOAL or not _PLAIN.fullmatch(sentence):
        return None
    if verb == "return":
        return None if rest.startswith(("True", "true")) else f"get {rest}"
    return f"{verb} {rest}" if verb in _VERBS else None


def _spoken_name(entry: LibraryEntry) -> str:
    """Return the name as people write it: `ElementTree.indent`, not `xml.etree.ElementTree.indent`."""
    return ".".join(entry.name.split(".")[-2:])
