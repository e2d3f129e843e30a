"""Batches: the requests of a batch, and the plan for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from warmprefix.annotate import Annotation
from warmprefix.blocks import ContextBlock, as_blocks, evidence_blocks, joined_blocks
from warmprefix.cache_profiles import Checkpoints
from warmprefix.choice import Candidates, LeftOut
from warmprefix.plan import ContextPlan, PlannedBlock, Scope
from warmprefix.tokens import NoteWriter, order_note

__all__ = ["BatchPlan", "BatchRequest", "BoundKind", "PlannedPrime", "PlannedRequest", "SharedWording"]

BoundKind = Literal["spanning forest", "best partners", "every block once", "sampled"]
"""How an upper bound was computed, tightest first; see `warmprefix.batch.bounds.Bound`."""


@dataclass(frozen=True, slots=True, init=False)
class BatchRequest:
    """One request of a batch: a question, and the context to answer it from."""

    id: str
    """The caller's name for the request, unique in the batch."""
    blocks: tuple[ContextBlock, ...]
    """In relevance order."""
    question: str
    """The question, which stands after the context."""
    tenant: str | None
    """The owner of the request. Tenants share nothing."""
    order_locked: bool
    """Keep the blocks in the given order: they are chronological, or cited by position."""

    def __init__(
        self,
        id: str | int,
        blocks: Iterable[ContextBlock | str],
        question: str = "",
        *,
        tenant: str | None = None,
        order_locked: bool = False,
    ) -> None:
        """Check the arguments.

        A string among `blocks` is a block without an id. An `int` as `id` becomes its digits.

        Raises:
            TypeError: An argument has a different type.
            ValueError: `id` is empty.
        """
        if isinstance(id, bool) or not isinstance(id, str | int):
            raise TypeError(f"id must be a str or an int, got {type(id).__name__}")
        if id == "":
            raise ValueError("id must not be empty, got ''")
        if not isinstance(question, str):
            raise TypeError(f"question must be a str, got {type(question).__name__}")
        if tenant is not None and not isinstance(tenant, str):
            raise TypeError(f"tenant must be a str or None, got {type(tenant).__name__}")
        assign = object.__setattr__
        assign(self, "id", str(id))
        assign(self, "blocks", tuple(as_blocks(blocks)))
        assign(self, "question", question)
        assign(self, "tenant", tenant)
        assign(self, "order_locked", bool(order_locked))


@dataclass(frozen=True, slots=True)
class SharedWording:
    """The text that all requests of one scope have in common."""

    scope: Scope
    """The scope of the requests."""
    labels: Mapping[bytes, str]
    """The label of every block of the scope's requests, by fingerprint; empty if the prompts show none."""
    writer: NoteWriter
    """Writer of the notes and labels."""
    preamble: str | None
    """The text in front of every context."""
    cache_salt: str | None
    """The salt of the tenant; None without a tenant."""

    @property
    def annotation(self) -> Annotation:
        """What every prompt shows of the relevance order."""
        return self.writer.choose(None, self.scope.model)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request in its place in the execution order, with its blocks in planned order."""

    request: BatchRequest
    """The request as it was given."""
    order: tuple[int, ...]
    """For each place in planned order, the block's position in the request."""
    saved_tokens: int
    """Tokens of its context that the engine's prefix cache will hold when the request runs."""
    warmed_by: str | None
    """The id of the first request that brings all of them into the cache. None if there are no such tokens, or if the
    cache held them before the batch began. Do not run the two requests at the same time."""
    plan_id: str
    """The id of its `plan`; unique among all planners."""
    wording: SharedWording = field(repr=False, compare=False)
    """The text that it shares with the other requests of its scope."""
    candidates: Candidates | None = field(default=None, repr=False, compare=False)
    """Its distinct blocks, of which those in `order` are fed; None if all are."""

    @property
    def id(self) -> str:
        """The id that the caller gave the request."""
        return self.request.id

    @property
    def blocks(self) -> tuple[PlannedBlock, ...]:
        """The distinct blocks with text, in planned order."""
        return tuple([block for _, block in self._placed()])

    def _placed(self) -> list[tuple[int, PlannedBlock]]:
        """Return the blocks in planned order, each with its place in relevance order: a twin has that of its place."""
        if self.candidates is not None:
            distinct, positions, joined = self.candidates.feeding(self.candidates.fed_at(self.order))
        else:
            distinct, positions = evidence_blocks(self.request.blocks)
            joined = joined_blocks(self.request.blocks, positions)
        at = {places[0]: i for i, places in enumerate(positions)}
        labels, templates = self.wording.labels, self.wording.writer.templates
        names = frozenset([labels[block.fingerprint] for block in distinct] if labels else ())
        return [
            (
                i,
                PlannedBlock(
                    block, positions[i], labels.get(block.fingerprint, ""), None, templates, names, i in joined
                ),
            )
            for i, block in [(at[position], distinct[at[position]]) for position in self.order]
        ]

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The candidates that are not fed; see `ContextPlan.left_out`."""
        return () if self.candidates is None else self.candidates.left_out(self.order)

    @property
    def entered(self) -> tuple[int, ...] | None:
        """Positions of the fed candidates that relevance alone would have left out; see `ContextPlan.entered`."""
        return None if self.candidates is None else self.candidates.entered(self.order)

    @property
    def plan(self) -> ContextPlan:
        """A plan for `ContextPlanner.commit` and `abandon`. O(blocks) per access, O(characters) if it has a note."""
        placed = self._placed()
        blocks = tuple([block for _, block in placed])
        annotation, writer = self.wording.annotation, self.wording.writer
        note = order_note(
            writer.templates,
            annotation,
            [None if planned.joined else place for place, planned in placed],
            [planned.label for planned in blocks],
            [planned.block.text for planned in blocks],
        )
        return ContextPlan(
            id=self.plan_id,
            scope=self.wording.scope,
            conversation=None,
            placement="head",
            turn=None,
            blocks=blocks,
            resident_tokens=self.saved_tokens,
            cache_salt=self.wording.cache_salt,
            tracked=False,
            opens_prompt=writer.separator is None,
            annotation=annotation,
            note_tokens=writer.tokens(annotation, blocks, note),
            order_annotation=note,
            separator=writer.separator,
            candidates=self.candidates,
        )

    @property
    def cache_salt(self) -> str | None:
        """The engine's `cache_salt`, derived from the tenant."""
        return self.wording.cache_salt

    @property
    def total_tokens(self) -> int:
        """Tokens of all its blocks, without labels and annotations."""
        return self.plan.total_tokens

    @property
    def note_tokens(self) -> int:
        """Tokens of the labels and notes in its context, counted or estimated."""
        return self.plan.note_tokens

    @property
    def order_annotation(self) -> str | None:
        """The note that names the most relevant blocks; None if its order needs none."""
        return self.plan.order_annotation

    def render(self) -> str:
        """Return the default prompt text of its context; see `ContextPlan.render`."""
        return self.plan.render()

    def messages(self) -> list[dict[str, str]]:
        """Return the chat for this request.

        The preamble, if there is one, is the system message. Context and question follow in a user message.
        """
        content = "\n\n".join(part for part in (self.render(), self.request.question) if part)
        preamble = self.wording.preamble
        system = [] if preamble is None else [{"role": "system", "content": preamble}]
        return [*system, {"role": "user", "content": content}]


@dataclass(frozen=True, slots=True)
class PlannedPrime:
    """A request for one token, which leaves a checkpoint where later requests part."""

    before: PlannedRequest
    """Send the prime right before this request, which begins with the same blocks."""
    depth: int
    """Number of blocks that the later requests share, the first ones of `before`."""
    tokens: int
    """Tokens of the preamble and these blocks, counted or estimated."""

    @property
    def shared_text(self) -> str:
        """The text of the blocks that the later requests share, as it stands in the prompt."""
        return "\n\n".join(text for text in self.before.plan.paragraphs()[: self.depth] if text)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A whole batch, arranged. Iterating over it gives the requests in execution order.

    `warmprefix_openai.BatchRunner` runs it.
    """

    id: str
    """The id of this plan; unique among all planners."""
    requests: tuple[PlannedRequest, ...] = field(repr=False)
    """In execution order."""
    positions: Mapping[str, int] = field(repr=False)
    """The place of each request, by id, in that order; listed in the caller's order."""
    planner: str
    """The name of the batch planner."""
    device: str
    """Where distances and overlaps were computed: `cpu` or `cuda`."""
    capacity_tokens: int | None
    """The size of the prefix cache that the plan assumes; None for no bound."""
    saved_tokens: int
    """Tokens of context that such a cache will hold when their request runs."""
    total_tokens: int
    """Tokens of all contexts, without labels and annotations."""
    upper_bound: int
    """The most tokens that any plan could save."""
    bound: BoundKind
    """How `upper_bound` was computed."""
    seconds: float
    """The time that planning took."""
    owner: Any = field(repr=False, compare=False)
    """The planner that made the batch."""
    checkpoints: Checkpoints | None = None
    """Where the engine keeps states to continue from; None if it can continue anywhere."""
    primes: tuple[PlannedPrime, ...] = field(default=(), repr=False)
    """In execution order; empty unless the engine has checkpoints."""

    @property
    def hit_ratio(self) -> float:
        """Saved tokens over total tokens; 0 for an empty batch."""
        return self.saved_tokens / self.total_tokens if self.total_tokens else 0.0

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[PlannedRequest]:
        return iter(self.requests)

    def __getitem__(self, id: str) -> PlannedRequest:
        """Return the request with this id.

        Raises:
            KeyError: The batch has no request with this id.
        """
        return self.requests[self.positions[id]]

    def in_callers_order(self) -> Iterator[PlannedRequest]:
        """Iterate over the requests in the order in which they were given."""
        return map(self.requests.__getitem__, self.positions.values())
