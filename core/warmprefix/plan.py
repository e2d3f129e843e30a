"""Plans: a request's blocks in planned order, and the prompt text they make."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from warmprefix.annotate import Annotation, Templates
from warmprefix.blocks import ContextBlock
from warmprefix.choice import Candidates, LeftOut
from warmprefix.stores import Branch, TurnRecord

__all__ = [
    "ContextPlan",
    "Placement",
    "PlannedBlock",
    "Reference",
    "Retention",
    "Scope",
    "Touch",
    "joint_reference",
    "tenant_salt",
]

Placement = Literal["head", "tail"]
"""Where the context stands in the prompt: before the history, or after it."""


class Scope(NamedTuple):
    """Requests that may share a prefix and learned statistics; scopes share neither."""

    tenant: str | None
    """Name of the tenant; None if the caller gave none."""
    model: str | None
    """Name of the model; None if the caller gave none."""
    preamble: bytes | None
    """Fingerprint of the text in front of the context, such as the system prompt."""


class Retention(NamedTuple):
    """What the engine should keep longer than its LRU would, by the number of its requests, not by time."""

    blocks: int = 0
    """Number of the plan's first blocks that deserve it."""
    priority: int = 0
    """Requests of age that they deserve beyond the plan's own."""


class Touch(NamedTuple):
    """The beginning of an earlier plan, to be sent to the engine with one token of output, so that it is kept."""

    scope: Scope
    """The scope of the plan."""
    plan_id: str
    """The latest committed plan that begins so."""
    blocks: int
    """Number of the plan's first blocks to send."""
    tokens: int
    """Tokens of these blocks."""
    priority: int
    """Requests of age that they deserve; 0 for an engine that takes no priorities."""


@dataclass(frozen=True, slots=True)
class Reference:
    """An earlier place in this prompt that holds a block in full."""

    label: str
    """Label of the block at its earlier place; empty if a quote names it."""
    turn: int | None
    """The conversation's turn that sent it, from 1 on; None if it was found in the visible history."""
    annotation: str
    """The note that replaces the block."""
    opening: str = ""
    """The words that the block begins with, if they name it."""


class PlannedBlock(NamedTuple):
    """A block of a plan: in full, or as a reference to its place in this very prompt."""

    block: ContextBlock
    """The block as it was given."""
    positions: tuple[int, ...]
    """Its places in the request, ascending; more than one if the request repeats it."""
    label: str
    """The name that the prompt shows in front of it; empty if it shows none."""
    reference: Reference | None
    """The place that already holds the block; None if its text is in the plan."""
    templates: Templates
    """The wording of its prompt."""
    names: frozenset[str] = frozenset()
    """Labels of its prompt and conversation; a line of its text that begins with one is escaped, and so is a line that
    begins like a note."""
    joined: bool = False
    """True if it belongs to the run of the block in front of it; see `follows` of `ContextBlock`."""

    @property
    def rank(self) -> int:
        """The block's place in relevance order."""
        return self.positions[0]

    @property
    def text(self) -> str:
        """The block's own text, unlabelled, or the location annotation that replaces it."""
        return self.block.text if self.reference is None else self.reference.annotation

    def render(self) -> str:
        """Return the block as the prompt shows it: its text, perhaps labelled, or a location annotation."""
        if self.reference is not None:
            return self.reference.annotation
        if not self.label:
            return self.templates.escaped(self.block.text, self.names)
        return self.templates.block(self.label, self.block.text, self.names)

    def is_held(self, prompt: str) -> bool:
        """Return True if a text holds the whole block as its reference names it. O(len(prompt))."""
        if self.label:
            header = f"[{self.label}] "
            start = prompt.find(header)
            while start >= 0 and self.templates.matching_end(prompt, start, self.label, self.block.text) is None:
                start = prompt.find(header, start + 1)
            return start >= 0
        return self.block.text in prompt or self.templates.escaped(self.block.text) in prompt


def joint_reference(planned: Sequence[PlannedBlock]) -> str | None:
    """Return the sentence that names all referenced blocks of a context; None without one."""
    referring = [block.reference for block in planned if block.reference is not None]
    if not referring:
        return None
    templates = planned[0].templates
    if referring[0].opening:
        return templates.again_annotation([reference.opening for reference in referring])
    return templates.location_annotation([reference.label for reference in referring])


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """An arranged context of one request, which `commit` and `abandon` take as it is."""

    id: str
    """Unique among all planners."""
    scope: Scope
    """The scope of the request."""
    conversation: str | None
    """The name of the conversation; None without one, and in a branch."""
    placement: Placement
    """Where the context stands in the prompt."""
    turn: int | None
    """The conversation's turn, from 1 on; None without a conversation to count in."""
    blocks: tuple[PlannedBlock, ...]
    """In planned order."""
    resident_tokens: int
    """Tokens of context that the engine's prefix cache is predicted to hold already. Text in front of the context, and
    blocks replaced by references, are not counted."""
    cache_salt: str | None
    """For the engine's `cache_salt`: derived from the tenant, so that tenants share no cached prefix."""
    tracked: bool = field(repr=False)
    """True if the store's record of a named conversation follows the plan until it is committed or abandoned."""
    opens_prompt: bool = field(repr=False)
    """True if the context follows the preamble directly, so that other conversations can share it as a prefix. False
    with a `separator`: such a context needs no prefix."""
    annotation: Annotation = "both"
    """What the prompt shows of the relevance order."""
    note_tokens: int = 0
    """Tokens of the labels and notes in its text, counted or estimated."""
    retention: Retention | None = None
    """What the engine should keep longer; None for an engine that takes no priorities, or as long as none pays."""
    order_annotation: str | None = None
    """The note that names the most relevant blocks; None if the order needs none, or `annotation` has none."""
    branch: Branch | None = None
    """The turn that the plan continues, if the store's record of it decides which blocks become references."""
    separator: str | None = None
    """Text in front of each paragraph and behind the last one, at which an engine that reuses text behind other text
    cuts prompts; None for a blank line between paragraphs."""
    parent: TurnRecord | None = field(default=None, repr=False)
    """That record, as far as it is known. It travels with the plan, so that a commit needs not read it again."""
    candidates: Candidates | None = field(default=None, repr=False, compare=False)
    """All candidates of the request; None without `choose`."""
    mirrored: tuple[int, ...] | None = field(default=None, repr=False, compare=False)
    """Positions of the blocks in the order that would be planned if nothing but the tenant's own requests were known:
    what the choices of later requests depend on. None without a tenant, or before its first choice."""

    @property
    def total_tokens(self) -> int:
        """Tokens of all blocks, also of referenced ones, without labels and annotations."""
        return sum([planned.block.tokens for planned in self.blocks])

    @property
    def reference_tokens(self) -> int:
        """Tokens of the blocks that references replace."""
        return sum(planned.block.tokens for planned in self.blocks if planned.reference is not None)

    @property
    def references(self) -> tuple[Reference, ...]:
        """The references among the blocks, in planned order."""
        return tuple(planned.reference for planned in self.blocks if planned.reference is not None)

    @property
    def order(self) -> tuple[int, ...]:
        """Positions of the blocks in the request, in planned order."""
        return tuple([planned.positions[0] for planned in self.blocks])

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The candidates that are not fed, in relevance order; empty without `choose`.

        Blank ones, and repetitions of one that is fed, are not among them.
        """
        return () if self.candidates is None else self.candidates.left_out(self.order)

    @property
    def entered(self) -> tuple[int, ...] | None:
        """Positions of the fed candidates that relevance alone would have left out; None without `choose`."""
        return None if self.candidates is None else self.candidates.entered(self.order)

    @property
    def reordered(self) -> bool:
        """True if the planned order differs from relevance order."""
        order = self.order
        return list(order) != sorted(order)

    def paragraphs(self) -> list[str]:
        """Return the prompt text of each block, in planned order.

        One sentence names all references. It replaces the first of them; the text of the others is empty.
        """
        sentence = joint_reference(self.blocks)
        if sentence is None:
            return [planned.render() for planned in self.blocks]
        sentences = iter([sentence])
        return [planned.render() if planned.reference is None else next(sentences, "") for planned in self.blocks]

    def parts(self) -> list[str]:
        """Return the prompt text in parts, between which a cache mark can stand.

        There is one part per paragraph and one for the order annotation, if any. Joined without a separator, they are
        the text of `render`. Blank lines open the parts that they precede, so that a part's bytes do not depend on
        what follows it.
        """
        paragraphs = [paragraph for paragraph in self.paragraphs() if paragraph]
        annotation = self.order_annotation
        if annotation is not None:
            paragraphs.append(annotation)
        if self.separator is not None:
            return [self.separator + paragraph for paragraph in [*paragraphs, ""]] if paragraphs else []
        return [*paragraphs[:1], *[f"\n\n{paragraph}" for paragraph in paragraphs[1:]]]

    def render(self) -> str:
        """Return the default prompt text: paragraphs, then the order annotation, if any."""
        return "".join(self.parts())


def tenant_salt(key: bytes, tenant: str) -> str:
    """Return the `cache_salt` of a tenant: 64 characters, not to be computed without the secret `key`."""
    return hmac.new(key, tenant.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
