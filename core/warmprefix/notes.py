"""Labels and notes of a planner's prompts, and their price in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warmprefix.annotate import Annotate, Annotation, Templates, annotation_for, check_annotate, has_labels
from warmprefix.plan import Placement, PlannedBlock
from warmprefix.tokens import CheckedCounter

__all__ = ["NoteWriter"]


@dataclass(frozen=True, slots=True)
class NoteWriter:
    """The wording of one planner, and the tokens that it takes."""

    templates: Templates
    annotate: Annotate
    """What a request shows of the relevance order unless it asks for something else."""
    count: CheckedCounter

    def is_automatic(self, annotate: Annotate | None) -> bool:
        """Return True if the planner chooses what a request shows."""
        return (self.annotate if annotate is None else annotate) == "auto"

    def annotation(self, annotate: Annotate | None, placement: Placement) -> Annotation:
        """Return what a request shows.

        Raises:
            ValueError: `annotate` has another value.
        """
        if annotate is None:
            return annotation_for(self.annotate, placement)
        check_annotate(annotate)
        return annotation_for(annotate, placement)

    def order_note_tokens(self, annotation: Annotation, ranks: Sequence[int], labels: Sequence[str]) -> int:
        """Return the tokens of the note that an order needs; see `Templates.order_note`."""
        note = self.templates.order_note(annotation, ranks, labels)
        return 0 if note is None else self.count(note)

    def tokens(self, annotation: Annotation, planned: Sequence[PlannedBlock]) -> int:
        """Return the tokens of all labels and notes in a context."""
        if annotation == "none":
            return 0
        labels = [block.label for block in planned]
        total = self.order_note_tokens(annotation, [block.positions[0] for block in planned], labels)
        labels = [block.label for block in planned if block.reference is not None]
        if labels:
            total += self.count(self.templates.location_annotation(labels))
        if not has_labels(annotation):
            return total
        return total + sum([self.count(f"[{block.label}] ") for block in planned if block.reference is None])
