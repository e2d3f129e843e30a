"""What planning returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, NamedTuple

from warmprefix.annotate import Templates
from warmprefix.blocks import ContextBlock

__all__ = ["ContextPlan", "Placement", "PlannedBlock", "Reference", "Scope"]

Placement = Literal["head", "tail"]


class Scope(NamedTuple):
    """What may share a prefix and statistics. Nothing learned in one scope is used in another."""

    tenant: str | None
    model: str | None
    preamble: bytes | None
    """Fingerprint of the text in front of the context, such as the system prompt."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Where the prompt already holds a block in full."""

    label: str
    turn: int | None
    """The conversation's turn that sent it, from 1 on; None where the visible history told."""
    annotation: str
    """The note that takes the block's place."""


class PlannedBlock(NamedTuple):
    """A block in its planned place: in full, or as a reference to its earlier occurrence in this very prompt."""

    block: ContextBlock
    positions: tuple[int, ...]
    """Where the request listed it, ascending: more than one place if it came more than once."""
    label: str
    reference: Reference | None
    templates: Templates
    """The wording of the prompt that it stands in."""
    names: frozenset[str] = frozenset()
    """Labels of that prompt and its conversation: a line of text that begins with one is escaped."""

    @property
    def rank(self) -> int:
        """The block's place in relevance order."""
        return self.positions[0]

    @property
    def text(self) -> str:
        """The block's own text, unlabelled, or the location annotation that takes its place."""
        return self.block.text if self.reference is None else self.reference.annotation

    def render(self) -> str:
        """Return the block as the prompt shows it: labelled in full, or its location annotation."""
        if self.reference is not None:
            return self.reference.annotation
        return self.templates.block(self.label, self.block.text, self.names)


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """A request's context, arranged. It knows which request it is, and is handed to `commit` or `abandon` whole."""

    id: str
    """Names this plan; unique among all planners."""
    scope: Scope
    conversation: str | None
    placement: Placement
    turn: int | None
    """The conversation's turn, from 1 on; None without a conversation to count in."""
    blocks: tuple[PlannedBlock, ...]
    """In planned order."""
    resident_tokens: int
    """Tokens of context that the engine's prefix cache is predicted to hold already. Not counted: whatever stands
    before the context, and the blocks that a reference spares."""
    cache_salt: str | None
    """For the engine's `cache_salt`: derived from the tenant, so that tenants share no cached prefix."""
    tracked: bool = field(repr=False)
    """Whether committing it records its blocks as seen by the conversation."""
    opens_prompt: bool = field(repr=False)
    """Whether its context follows the preamble directly, so that other conversations can share it as a prefix."""

    @property
    def order_annotation(self) -> str | None:
        """The note that restores the relevance order; None where the planned order is that order."""
        if not self.reordered:
            return None
        labels = [planned.label for planned in sorted(self.blocks, key=attrgetter("rank"))]
        return self.blocks[0].templates.order_annotation(labels)

    @property
    def total_tokens(self) -> int:
        """Tokens of all blocks, those referred to included, without labels and annotations."""
        return sum([planned.block.tokens for planned in self.blocks])

    @property
    def reference_tokens(self) -> int:
        """Tokens of the blocks that a reference spares."""
        return sum(planned.block.tokens for planned in self.blocks if planned.reference is not None)

    @property
    def references(self) -> tuple[Reference, ...]:
        """The references among the blocks, in planned order."""
        return tuple(planned.reference for planned in self.blocks if planned.reference is not None)

    @property
    def order(self) -> tuple[int, ...]:
        """For each place in planned order, the block's position in the request."""
        return tuple([planned.positions[0] for planned in self.blocks])

    @property
    def reordered(self) -> bool:
        """Whether the planned order differs from relevance order."""
        order = self.order
        return list(order) != sorted(order)

    def paragraphs(self) -> list[str]:
        """Return the prompt text of each block, in planned order.

        One sentence names all blocks that are references. It takes the place of the first of them; the text of the
        others is empty.
        """
        labels = [planned.label for planned in self.blocks if planned.reference is not None]
        if not labels:
            return [planned.render() for planned in self.blocks]
        sentences = iter([self.blocks[0].templates.location_annotation(labels)])
        return [planned.render() if planned.reference is None else next(sentences, "") for planned in self.blocks]

    def render(self) -> str:
        """Return the default prompt text: paragraphs, then the order annotation. Empty for an empty plan."""
        paragraphs = [paragraph for paragraph in self.paragraphs() if paragraph]
        annotation = self.order_annotation
        if annotation is not None:
            paragraphs.append(annotation)
        return "\n\n".join(paragraphs)
