"""Labels and notes of a planner's prompts, and their price in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from warmprefix.annotate import Annotate, Annotation, Templates, annotation_for, check_annotate, has_labels
from warmprefix.plan import PlannedBlock
from warmprefix.tokens import CheckedCounter

__all__ = ["NoteWriter"]


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

    def order_note_tokens(self, annotation: Annotation, ranks: Sequence[int | None], labels: Sequence[str]) -> int:
        """Return the tokens of the note that an order needs; see `Templates.order_note`."""
        note = self.templates.order_note(annotation, ranks, labels)
        return 0 if note is None else self.count(note)

    def tokens(self, annotation: Annotation, planned: Sequence[PlannedBlock]) -> int:
        """Return the tokens of all labels and notes in a context."""
        if annotation == "none":
            return 0
        labels = [block.label for block in planned]
        ranks = [None if block.joined else block.positions[0] for block in planned]
        total = self.order_note_tokens(annotation, ranks, labels)
        labels = [block.label for block in planned if block.reference is not None]
        if labels:
            total += self.count(self.templates.location_annotation(labels))
        if not has_labels(annotation):
            return total
        return total + sum([self.count(f"[{block.label}] ") for block in planned if block.reference is None])
