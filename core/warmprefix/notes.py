"""Labels and notes of a planner's prompts, and their price in tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from warmprefix.annotate import Annotate, Annotation, Templates, annotation_for, check_annotate, has_labels
from warmprefix.forks import ForkSafeProperty
from warmprefix.plan import PlannedBlock
from warmprefix.tokens import CheckedCounter

__all__ = ["NoteWriter", "OrderNote"]

_MARGIN = 1.5
"""Tokens that an order must save for each token of its note: both are estimates, and short blocks are often shorter."""


@dataclass(frozen=True, slots=True)
class NoteWriter:
    """The wording of one planner, and the tokens that it takes."""

    templates: Templates
    annotate: Annotate
    """What a request shows of the relevance order unless it asks for something else."""
    count: CheckedCounter
    annotations: Mapping[str, Annotate] = field(default_factory=dict)
    """What `"auto"` stands for, by model."""

    def resolve(self, annotate: Annotate | None, model: str | None) -> Annotate:
        """Return what a request to this model shows; `"auto"` if the planner chooses.

        Raises:
            ValueError: `annotate` has another value.
        """
        if annotate is not None:
            check_annotate(annotate)
        asked = self.annotate if annotate is None else annotate
        return self.annotations.get(model, asked) if asked == "auto" and model is not None else asked

    def opening_annotation(self, model: str | None) -> Annotation:
        """Return what a context at the beginning of a prompt shows unless its request asks for something else."""
        return annotation_for(self.resolve(None, model), "head")

    def tokens(self, annotation: Annotation, planned: Sequence[PlannedBlock], note: str | None = None) -> int:
        """Return the tokens of all labels and notes in a context.

        Args:
            annotation: What the prompt shows.
            planned: The context.
            note: Its order annotation.
        """
        if annotation == "none":
            return 0
        total = 0 if note is None else self.count(note)
        labels = [block.label for block in planned if block.reference is not None]
        if labels:
            total += self.count(self.templates.location_annotation(labels))
        if not has_labels(annotation):
            return total
        return total + sum([self.count(f"[{block.label}] ") for block in planned if block.reference is None])


class OrderNote:
    """The order annotation of one request. It is written once, as soon as an order needs it."""

    def __init__(
        self,
        writer: NoteWriter,
        annotation: Annotation,
        labels: Sequence[str],
        texts: Sequence[str],
        joined: Collection[int] = (),
    ) -> None:
        """Take the blocks' labels and texts in relevance order, and which of them continue a run."""
        self._writer = writer
        self._annotation: Annotation = annotation
        self._labels = labels
        self._texts = texts
        self._joined = joined

    @ForkSafeProperty
    def _text(self) -> str | None:
        labels = [label for i, label in enumerate(self._labels) if i not in self._joined]
        texts = [text for i, text in enumerate(self._texts) if i not in self._joined]
        others = [self._texts[i] for i in self._joined]
        return self._writer.templates.note(self._annotation, labels, texts, others)

    @ForkSafeProperty
    def _tokens(self) -> int:
        return 0 if self._text is None else self._writer.count(self._text)

    def _is_needed(self, order: Sequence[int]) -> bool:
        ranks = [i for i in order if i not in self._joined] if self._joined else order
        return self._writer.templates.needs_note(self._annotation, ranks)

    def of(self, order: Sequence[int]) -> str | None:
        """Return the note of an order of the blocks; None if it needs none, or if none can be written."""
        return self._text if self._is_needed(order) else None

    def tokens(self, order: Sequence[int]) -> int | None:
        """Return the tokens of the note of an order: 0 if it needs none, None if none can be written."""
        if not self._is_needed(order):
            return 0
        return None if self._text is None else self._tokens

    def price(self, order: Sequence[int]) -> int:
        """Return the tokens that an order must save to be worth its note; 0 without one."""
        return round(_MARGIN * (self.tokens(order) or 0))
