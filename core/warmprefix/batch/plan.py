"""What goes into a batch, and what planning it returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from warmprefix.annotate import Templates
from warmprefix.blocks import ContextBlock, as_blocks, evidence_blocks
from warmprefix.plan import ContextPlan, PlannedBlock, Scope

if TYPE_CHECKING:
    from warmprefix.batch.bounds import BoundKind

__all__ = ["BatchOwner", "BatchPlan", "BatchRequest", "PlannedRequest", "Wording"]


@dataclass(frozen=True, slots=True, init=False)
class BatchRequest:
    """One request of a batch: a question, and the context to answer it from."""

    id: str
    """The caller's name for it, unique in the batch."""
    blocks: tuple[ContextBlock, ...]
    """In relevance order."""
    question: str
    tenant: str | None
    """Whose request. Nothing is shared between tenants."""
    order_locked: bool
    """Keep the blocks as they stand: they are chronological, or cited by position."""

    def __init__(
        self,
        id: str | int,
        blocks: Iterable[ContextBlock | str],
        question: str = "",
        *,
        tenant: str | None = None,
        order_locked: bool = False,
    ) -> None:
        """Check what is given. A string among `blocks` is a block without an id; an `int` as `id` is its digits.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: `id` is empty.
        """
        if isinstance(id, bool) or not isinstance(id, str | int):
            raise TypeError(f"id must be a str or an int, got {type(id).__name__}")
        if id == "":
            raise ValueError("id must not be empty")
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


class Wording(Protocol):
    """What all requests of one scope have in common."""

    @property
    def scope(self) -> Scope: ...
    @property
    def labels(self) -> Mapping[bytes, str]:
        """The label of every block of the scope's requests, by fingerprint."""
        ...

    @property
    def templates(self) -> Templates: ...
    @property
    def preamble(self) -> str | None:
        """The text in front of every context."""
        ...

    @property
    def cache_salt(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request in its place of the execution order, with its blocks in planned order."""

    request: BatchRequest
    order: tuple[int, ...]
    """For each place in planned order, the block's position in the request."""
    saved_tokens: int
    """Tokens of its context that the engine's prefix cache will hold when its turn comes."""
    warmed_by: str | None
    """The id of the request that brings them there, the first one to hold all that this one shares; None if nothing is
    shared, or if the cache held it before the batch began. The two are not to run side by side."""
    plan_id: str
    """Names its `plan`; unique among all planners."""
    wording: Wording = field(repr=False, compare=False)

    @property
    def id(self) -> str:
        """The request's own id."""
        return self.request.id

    @property
    def blocks(self) -> tuple[PlannedBlock, ...]:
        """The blocks that have a text, in planned order, each once."""
        distinct, positions = evidence_blocks(self.request.blocks)
        at = {places[0]: i for i, places in enumerate(positions)}
        labels, templates = self.wording.labels, self.wording.templates
        names = frozenset([labels[block.fingerprint] for block in distinct])
        return tuple(
            [
                PlannedBlock(distinct[i], positions[i], labels[distinct[i].fingerprint], None, templates, names)
                for i in [at[position] for position in self.order]
            ]
        )

    @property
    def plan(self) -> ContextPlan:
        """As a plan of its own: what `ContextPlanner.commit` and `abandon` take. Made anew each time; O(blocks)."""
        return ContextPlan(
            id=self.plan_id,
            scope=self.wording.scope,
            conversation=None,
            placement="head",
            turn=None,
            blocks=self.blocks,
            resident_tokens=self.saved_tokens,
            cache_salt=self.wording.cache_salt,
            tracked=False,
            opens_prompt=True,
        )

    @property
    def cache_salt(self) -> str | None:
        """For the engine's `cache_salt`: derived from the tenant."""
        return self.wording.cache_salt

    @property
    def total_tokens(self) -> int:
        """Tokens of all its blocks, without labels and annotations."""
        return self.plan.total_tokens

    @property
    def order_annotation(self) -> str | None:
        """The note that restores the relevance order; None where the planned order is that order."""
        return self.plan.order_annotation

    def render(self) -> str:
        """The default prompt text of its context; see `ContextPlan.render`."""
        return self.plan.render()

    def messages(self) -> list[dict[str, str]]:
        """The chat that asks it: the preamble, if there is one, as system message; then context and question."""
        asked = "\n\n".join(part for part in (self.render(), self.request.question) if part)
        preamble = self.wording.preamble
        system = [] if preamble is None else [{"role": "system", "content": preamble}]
        return [*system, {"role": "user", "content": asked}]


class BatchOwner(Protocol):
    """Learns from what was served: the planner that made the batch."""

    def commit(self, plan: ContextPlan, cached_tokens: int | None = None) -> bool: ...
    def abandon(self, plan: ContextPlan) -> bool: ...


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A whole batch, arranged. Iterating over it gives the requests in execution order.

    `warmprefix.openai.BatchRunner` runs it.
    """

    id: str
    """Names this plan; unique among all planners."""
    requests: tuple[PlannedRequest, ...] = field(repr=False)
    """In execution order."""
    positions: Mapping[str, int] = field(repr=False)
    """Where each request, by id, stands in that order, listed as the caller gave them."""
    planner: str
    """What arranged it."""
    device: str
    """Where its distances and overlaps were computed: `cpu` or `cuda`."""
    capacity_tokens: int | None
    """The size of the prefix cache that was planned for; None for no bound."""
    saved_tokens: int
    """Tokens of context that such a cache will hold when their request's turn comes."""
    total_tokens: int
    """Tokens of all contexts, without labels and annotations."""
    upper_bound: int
    """The most tokens that any plan could save."""
    bound: BoundKind
    """How that is known; see `warmprefix.batch.bounds`."""
    seconds: float
    """What planning took."""
    owner: BatchOwner = field(repr=False, compare=False)

    @property
    def hit_ratio(self) -> float:
        """Saved tokens over total tokens; 0 of an empty batch."""
        return self.saved_tokens / self.total_tokens if self.total_tokens else 0.0

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[PlannedRequest]:
        return iter(self.requests)

    def __getitem__(self, id: str) -> PlannedRequest:
        """The request of this id.

        Raises:
            KeyError: The batch has none of that id.
        """
        return self.requests[self.positions[id]]

    def in_callers_order(self) -> Iterator[PlannedRequest]:
        """The requests in the order in which they were given."""
        return map(self.requests.__getitem__, self.positions.values())
