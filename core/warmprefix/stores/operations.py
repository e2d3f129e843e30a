"""Conversation state as seen by planners: the operations on it, and the stores that execute them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from warmprefix.errors import check_names

__all__ = [
    "Abandon",
    "AsyncSeenStore",
    "Branch",
    "Commit",
    "Conversation",
    "Forget",
    "Operation",
    "Prepare",
    "PreparedTurn",
    "ReadTurn",
    "RecordBounds",
    "SeenBlock",
    "SeenStore",
    "Snapshot",
    "Steps",
    "TurnRecord",
    "WriteTurn",
    "arun_steps",
    "check_positive",
    "check_turn_id",
    "run_steps",
    "unknown_operation",
]

_MAX_ID_LENGTH = 1_024
"""Characters of a turn's id."""

_MAX_OTHERS = 256

_MAX_AGE_SECONDS, _MAX_SKEW_SECONDS = 28 * 86_400, 86_400
"""Hosted APIs drop each response after 30 days, and what it held is missing in the turns that continue it."""

T = TypeVar("T")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class Conversation(NamedTuple):
    """A conversation's key: ids are unique within a tenant only."""

    tenant: str | None
    """Name of the tenant; None without one."""
    id: str
    """The id of the conversation."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A conversation, named by the turn that the prompt continues, for histories that may fork.

    Every turn has an id that no other turn of the tenant ever gets: that of a response, a message or a checkpoint.

    Raises:
        TypeError: `after` is neither a str nor None.
        ValueError: `after` is empty or longer than 1,024 characters.
    """

    after: str | None
    """Id of the last turn in the history; None if no message in front of this prompt has context.

    If there may be some, as after a cut, pass an id that no turn was committed with: then the history is unknown.
    """

    def __post_init__(self) -> None:
        check_turn_id(after=self.after)


def check_turn_id(**ids: str | None) -> None:
    """Check arguments that are a turn's id or None; the error names them."""
    check_names(**ids)
    for name, value in ids.items():
        if value is not None and not 0 < len(value) <= _MAX_ID_LENGTH:
            raise ValueError(f"{name} must have from 1 to {_MAX_ID_LENGTH:,} characters, got {len(value):,}")


class SeenBlock(NamedTuple):
    """A block that the conversation's history contains in full."""

    fingerprint: bytes
    """Digest of the text."""
    label: str
    """The label that the prompt shows; empty in the record of a branch if it shows none."""
    turn: int
    """The turn that sent the block."""
    tokens: int
    """Length in tokens."""
    time: int = 0
    """When it was sent, in seconds since 1970; only in the records of turns."""


class PreparedTurn(NamedTuple):
    """The result of `Prepare`."""

    turn: int
    """Turns committed so far."""
    seen: Mapping[bytes, SeenBlock]
    """The proposed blocks that the history contains."""
    taken: frozenset[str]
    """The proposed labels that name another block in this conversation."""
    contested: frozenset[bytes] = frozenset()
    """The seen blocks that no reference may point to, though their labels stay taken. Another block has the proposed
    label too; or they may still be rolled back, because a plan prepared before they were recorded is open: its commit
    may be on its way, or lost."""
    damaged: bool = False
    """True if values of the record were damaged, or of another version. They count as unseen."""


class TurnRecord(NamedTuple):
    """The blocks that a history contains in full up to one turn and in it. The record of a turn never changes."""

    turn: int
    """Number of turns in the history."""
    blocks: tuple[SeenBlock, ...] = ()
    """Oldest first. Some may be missing."""
    others: tuple[str, ...] = ()
    """Labels that lines of the blocks' texts begin with, so that no later block may have them."""
    partial: bool = False
    """True if the history may hold blocks and labels that are missing here."""
    damaged: bool = False
    """True if the stored value was damaged. It counts as missing."""

    def followed_by(self, sent: Sequence[SeenBlock], others: Collection[str], now: int) -> TurnRecord:
        """Return the record of the next turn, whose prompt shows the blocks `sent` in full. O(blocks)."""
        turn = self.turn + 1
        blocks = {block.fingerprint: block for block in self.blocks}
        for block in sent:
            blocks.pop(block.fingerprint, None)
            blocks[block.fingerprint] = block._replace(turn=turn, time=now)
        listed = tuple(dict.fromkeys((*self.others, *others)))
        is_full = len(listed) > _MAX_OTHERS
        return TurnRecord(turn, tuple(blocks.values()), () if is_full else listed, self.partial or is_full)

    def at(self, now: int) -> TurnRecord:
        """Return the record without blocks that were sent too long ago. O(blocks)."""
        return self._with([block for block in self.blocks if -_MAX_SKEW_SECONDS <= now - block.time < _MAX_AGE_SECONDS])

    def bounded(self, max_blocks: int) -> TurnRecord:
        """Return the record with its newest blocks."""
        return self._with(self.blocks[-max_blocks:])

    def _with(self, blocks: Sequence[SeenBlock]) -> TurnRecord:
        return self if len(blocks) == len(self.blocks) else self._replace(blocks=tuple(blocks), partial=True)

    def agrees(self, other: TurnRecord | None) -> bool:
        """Return True if another record differs at most in times, as a second commit of one plan does."""
        if other is None or self._replace(blocks=()) != other._replace(blocks=()):
            return False
        return [block[:-1] for block in self.blocks] == [block[:-1] for block in other.blocks]


class Snapshot(NamedTuple):
    """A conversation's whole state, for operators and tests."""

    epoch: int
    """Number of times that the history was changed."""
    turn: int
    """Number of committed turns."""
    blocks: tuple[SeenBlock, ...]
    """The blocks that count as seen."""
    leases: tuple[str, ...]
    """The ids of the open plans."""


# -- operations --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operation(Generic[ResultT_co]):
    """One atomic change of one conversation, as a value; a store's `execute` returns its result."""

    name: ClassVar[str]
    """Name of the operation, in errors and metrics."""
    conversation: Conversation
    """The conversation that the operation changes."""


@dataclass(frozen=True, slots=True)
class Prepare(Operation[PreparedTurn]):
    """Lease the next turn to a plan, and return what the history contains of the proposed blocks."""

    name: ClassVar[str] = "prepare"
    plan_id: str
    """Unique."""
    proposed: Mapping[bytes, str]
    """Fingerprints of the blocks to send, each with the label it would get."""


@dataclass(frozen=True, slots=True)
class Commit(Operation[bool]):
    """Record the blocks that a plan sent in full, because the model saw its prompt. True if they were recorded.

    They count as sent in the turn that `Prepare` leased to the plan, whatever turn they name. The result is False, and
    nothing changes, for a plan that was committed or abandoned recently.
    """

    name: ClassVar[str] = "commit"
    plan_id: str
    """The id of the plan."""
    sent: Sequence[SeenBlock]
    """The blocks that the prompt shows in full."""


@dataclass(frozen=True, slots=True)
class Abandon(Operation[bool]):
    """Return a plan's lease without recording anything. True if there was a lease."""

    name: ClassVar[str] = "abandon"
    plan_id: str
    """The id of the plan."""


@dataclass(frozen=True, slots=True)
class Forget(Operation[None]):
    """Mark every block as unseen, because the history was changed or is uncertain: `epoch` grows and every lease ends.

    Labels stay taken and the turn count continues, because the history may still contain some of the blocks. The other
    fields are what a planner could not notify the store of in time.
    """

    name: ClassVar[str] = "forget"
    ended: Sequence[str] = ()
    """Plans that were committed or abandoned, whether the store has a lease of them or not."""
    open: Sequence[str] = ()
    """Plans without a lease, because their `Prepare` got no answer. They get one that has ended."""
    sent: Sequence[SeenBlock] = ()
    """Blocks of those plans, whose labels are taken."""


@dataclass(frozen=True, slots=True)
class ReadTurn(Operation[TurnRecord | None]):
    """Return the record of a turn, whose id is that of `conversation`; None if it is unknown."""

    name: ClassVar[str] = "read_turn"


@dataclass(frozen=True, slots=True)
class WriteTurn(Operation[bool]):
    """Record a turn, whose id is that of `conversation`.

    False if the id has another record: then one of the two is wrong, and the id counts as unknown from now on.
    """

    name: ClassVar[str] = "write_turn"
    record: TurnRecord
    """Its newest blocks are stored, within the bounds."""


def unknown_operation(operation: object) -> TypeError:
    """Return the error for a value that is not one of the operations."""
    names = "Prepare, Commit, Abandon, Forget, ReadTurn or WriteTurn"
    return TypeError(f"operation must be a {names}, got {type(operation).__name__}")


@dataclass(frozen=True, slots=True)
class RecordBounds:
    """Bounds of what a store remembers of a conversation.

    Raises:
        ValueError: A bound is not positive.
    """

    max_blocks: int = 4_096
    """Blocks; beyond it the oldest is dropped, and sent again."""
    max_leases: int = 64
    """Plans in flight; beyond it the oldest can no longer be committed."""
    ttl: float = 86_400.0
    """Seconds after its last use at which a conversation is dropped."""
    lease_ttl: float = 600.0
    """Seconds in which a plan must be committed."""

    def __post_init__(self) -> None:
        check_positive(max_blocks=self.max_blocks, max_leases=self.max_leases, ttl=self.ttl, lease_ttl=self.lease_ttl)


def check_positive(**bounds: float) -> None:
    """Check that each bound is above 0; the error names it."""
    for name, value in bounds.items():
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")


# -- stores ------------------------------------------------------------------------------------------------------------


@runtime_checkable
class SeenStore(Protocol):
    """Remembers, per conversation, the blocks in its history; digests and labels only, never text.

    A turn is a `Prepare`, then a `Commit` or `Abandon` with the same plan id. Each operation is atomic. The contract
    errs towards *unseen*: sending a block again costs tokens, but wrongly referring to one loses evidence.

    - A block is seen only once a plan that sent it is committed.
    - Plans of one conversation that were prepared in parallel cannot all be part of one linear history. When the
      second of them is committed, everything recorded since their common past is forgotten, and `epoch` grows.
    - The same happens when a plan is committed after its lease timed out. If the lease is gone altogether, dropped by a
      bound or ended by `Forget`, its past is unknown, and everything is forgotten.
    - Until such a plan is committed or abandoned, blocks recorded since its past are contested. If its lease times out
      or is dropped by a bound, they are forgotten, as if the plan had been committed.
    - Every operation on an unknown conversation or plan is valid and does nothing, but that `Prepare` begins a record,
      as does a `Forget` with open plans or sent blocks.
    - State is bounded. A conversation dropped by a bound becomes unknown.

    The records of turns (`ReadTurn`, `WriteTurn`) are apart from that, and share no ids with conversations. Each is
    written once, so one that is old, late or lost is never wrong: at most, blocks are sent again.
    """

    def execute(self, operation: Operation[T]) -> T:
        """Execute one operation and return its result."""
        ...

    def inspect(self, conversation: Conversation) -> Snapshot | None:
        """Return a conversation's state, or None if it is unknown."""
        ...

    def clear(self) -> None:
        """Forget all conversations."""
        ...


@runtime_checkable
class AsyncSeenStore(Protocol):
    """A `SeenStore` that tasks can await."""

    async def aexecute(self, operation: Operation[T]) -> T:
        """Execute one operation and return its result."""
        ...


# -- one description for both kinds of caller --------------------------------------------------------------------------

Steps: TypeAlias = Generator[Callable[[], Any], Any, T]
"""A function that yields each blocking call instead of making it, and receives its result or its exception."""


def run_steps(steps: Steps[T]) -> T:
    """Make the calls that `steps` yields, and return its result."""
    try:
        call = next(steps)
        while True:
            try:
                result = call()
            except BaseException as error:  # noqa: PERF203 - the generator decides
                call = steps.throw(error)
            else:
                call = steps.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def arun_steps(steps: Steps[T]) -> T:
    """Await the calls that `steps` yields, and return its result."""
    try:
        call = next(steps)
        while True:
            try:
                result = await call()
            except BaseException as error:  # noqa: PERF203 - cancellation included: the generator decides
                call = steps.throw(error)
            else:
                call = steps.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
