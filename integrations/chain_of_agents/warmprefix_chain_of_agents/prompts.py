"""The prompts of agents: documents first, so that prompts with the same document begin with the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from string import Formatter
from typing import NamedTuple

__all__ = ["Prompts", "Unit"]


class Unit(NamedTuple):
    """A communication unit: a worker's summary."""

    text: str
    labels: tuple[str, ...]
    """Labels of the documents that it is made from."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The wording, by default that of Zhang et al. (2024, section 3), with constant system prompts in front.

    Documents are labelled. The parts of a prompt are paragraphs; their order is fixed.

    Raises:
        TypeError: A template is no str.
        ValueError: A template lacks one of its placeholders, or has another one.
    """

    worker_role: str = (
        "You are one of several agents who together read a source text that is too long for one of them. You are given"
        " documents of it, each behind its [label]. Rely on them and on the summary that you are given, and on nothing"
        " else."
    )
    """A worker's system prompt: the same for every question."""
    previous: str = "Here is the summary of the previous source text: {unit}"
    """Follows the documents, if a worker before this one wrote a summary."""
    task: str = (
        "Question: {question}\n\n"
        "You need to read current source text and summary of previous source text (if any) and generate a summary to"
        " include them both. Later, this summary will be used for other agents to answer the Query, if any. So please"
        " write the summary that can include the evidence for answering the Query."
    )
    """Ends a worker's prompt."""
    manager_role: str = "You answer questions from what other agents have read and summarized for you."
    """The manager's system prompt: the same for every question."""
    summaries: str = (
        "The following are given passages. However, the source text is too long and has been summarized. You need to"
        " answer based on the summary: {units}"
    )
    """Opens the manager's prompt."""
    one_of_several: str = "Summary {number} (of {labels}): {unit}"
    """A summary, if the manager gets all of them; `{labels}` names its documents."""
    unread: str = "{count} of the documents could not be read. Mention this if the answer may depend on them."
    """For the manager, if documents were skipped."""
    answer: str = "Question: {question}\n\nAnswer:"
    """Ends the manager's prompt."""

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name))

    def for_worker(self, documents: str, unit: str | None, question: str) -> str:
        """Return a worker's user message. `unit` is the summary of the worker before, if there is one."""
        previous = "" if unit is None else self.previous.format(unit=unit)
        return _paragraphs(documents, previous, self.task.format(question=question))

    def for_manager(self, units: Sequence[Unit], unread: int, question: str) -> str:
        """Return the manager's user message.

        Args:
            units: At least one: the last of a chain, or those of all workers.
            unread: Number of documents that no agent could read.
            question: The user's question.
        """
        given = self.summaries.format(units=self._listed(units))
        missing = self.unread.format(count=unread) if unread else ""
        return _paragraphs(given, missing, self.answer.format(question=question))

    def _listed(self, units: Sequence[Unit]) -> str:
        if len(units) == 1:
            return units[0].text
        listed = [
            self.one_of_several.format(
                number=number, labels=", ".join(f"[{label}]" for label in unit.labels), unit=unit.text
            )
            for number, unit in enumerate(units, start=1)
        ]
        return _paragraphs("", *listed)


_PLACEHOLDERS = {
    "previous": {"unit"},
    "task": {"question"},
    "summaries": {"units"},
    "one_of_several": {"number", "labels", "unit"},
    "unread": {"count"},
    "answer": {"question"},
}
"""Placeholders of each template; the others are sent as they are."""


def _check(name: str, template: object) -> None:
    if not isinstance(template, str):
        raise TypeError(f"{name} must be a str, got {type(template).__name__}")
    if name not in _PLACEHOLDERS:
        return
    try:
        fields = [(field, spec, how) for _, field, spec, how in Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ValueError(f"{name} has unbalanced braces: {template!r}") from error
    wanted = _PLACEHOLDERS[name]
    if {field for field, _, _ in fields} != wanted or any(spec or how for _, spec, how in fields):
        listed = ", ".join(f"{{{placeholder}}}" for placeholder in sorted(wanted))
        raise ValueError(f"{name} must hold {listed} and no other placeholder, got {template!r}")


def _paragraphs(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
