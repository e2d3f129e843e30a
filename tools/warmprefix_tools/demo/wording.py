"""The words of questions: what people ask about an entry first, next, and on the way to another one."""

from __future__ import annotations

from dataclasses import dataclass

from warmprefix_tools.demo.corpus import Entry
from warmprefix_tools.demo.phrases import goal, remarks, spoken_name

__all__ = ["Wording", "first_wordings", "follow_up_wordings", "wordings_about_another"]


@dataclass(frozen=True, slots=True)
class Wording:
    """A question as typed, and as it would be asked without the conversation before it."""

    text: str
    query: str


def first_wordings(entry: Entry) -> list[Wording]:
    """Questions that open a conversation; they need no rewriting."""
    name = spoken_name(entry)
    if entry.kind == "module":
        asked = [
            f"What is the {entry.name} module good for?",
            f"Where do I start with {entry.name}?",
            f"What does {entry.name} offer that I would otherwise write myself?",
        ]
    elif entry.kind == "class":
        asked = [
            f"What is {name} for?",
            f"When should I use the {name} class?",
            f"How do I work with a {name}?",
            f"What do I need to know before I subclass {name}?",
        ]
    else:
        asked = [
            f"What does {name} do?",
            f"When would I call {name}?",
            f"How is {name} meant to be used?",
            f"I found {name} in somebody's code. What is it for?",
        ]
        asked += [f"What do I pass to {name} as {parameter.name}?" for parameter in entry.parameters[:3]]
    what = goal(entry)
    if what is not None:
        asked += [
            f"How do I {what} in Python?",
            f"What is the usual way to {what}?",
            f"Can {entry.module} {what}?",
            f"I want to {what}. What does the standard library have for that?",
        ]
    return [Wording(question, question) for question in asked]


def follow_up_wordings(entry: Entry) -> list[Wording]:
    """Questions that leave the entry's name to the conversation."""
    name = spoken_name(entry)
    wordings = [
        Wording("Is there something similar?", f"Alternatives to {name} in {entry.module}"),
        *(Wording(f'What does this mean: "{remark}"?', f"{name}: {remark}") for remark in remarks(entry)[:4]),
    ]
    if entry.kind == "module":
        return [*wordings, Wording("Which functions does it have?", f"Functions in the {entry.name} module")]
    if entry.kind == "class":
        return [
            *wordings,
            Wording("Which methods does it have?", f"Methods of {name}"),
            Wording("And how do I create one?", f"How to create a {name}"),
        ]
    wordings += [
        Wording("And which exceptions can it raise?", f"Which exceptions can {name} raise?"),
        Wording("What does it return?", f"What does {name} return?"),
    ]
    for parameter in entry.parameters[:4]:
        wordings.append(Wording(f"What is {parameter.name} for?", f"What is the {parameter.name} argument of {name}?"))
        if parameter.optional:
            omitted = f"What does {name} do by default if {parameter.name} is not given?"
            wordings.append(Wording(f"And if I leave {parameter.name} out?", omitted))
    return wordings


def wordings_about_another(entry: Entry, previous: Entry) -> list[Wording]:
    """Questions that move on from `previous` to `entry`."""
    name, before = spoken_name(entry), spoken_name(previous)
    wordings = [
        Wording(f"How does that differ from {name}?", f"Difference between {before} and {name}"),
        Wording(f"And what about {name}?", f"What does {name} do?"),
        Wording(f"Should I rather use {name}?", f"When to use {name} instead of {before}?"),
    ]
    what = goal(entry)
    if what is not None:
        wordings.append(Wording(f"And how do I {what}?", f"How do I {what} with {entry.module}?"))
    return wordings
