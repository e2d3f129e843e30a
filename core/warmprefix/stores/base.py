"""The seam of conversation state: which blocks each conversation has been sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

__all__ = ["AsyncSeenStore", "Conversation", "Maintained", "Prepared", "SeenBlock", "SeenStore", "Snapshot"]


class Conversation(NamedTuple):
    """A conversation's key: its id means nothing outside its tenant."""

    tenant: str | None
    id: str


class SeenBlock(NamedTuple):
    """A block that the conversation's history holds in full."""

    fingerprint: bytes
    label: str
    turn: int
    tokens: int


class Prepared(NamedTuple):
    """The answer to `SeenStore.prepare`."""

    turn: int
    """Turns committed so far."""
    seen: Mapping[bytes, SeenBlock]
    """Those of the proposed blocks that the history holds."""
    taken: frozenset[str]
    """Those of the proposed labels that name another block in this conversation."""
    contested: frozenset[bytes] = frozenset()
    """Those of the seen blocks that may yet be taken back, for a plan that was prepared beside them is still open: its
    commit may be on its way, or lost. No reference may point to them; their labels hold."""


class Snapshot(NamedTuple):
    """A conversation's whole state, for operators and tests."""

    epoch: int
    turn: int
    blocks: tuple[SeenBlock, ...]
    leases: tuple[str, ...]


@runtime_checkable
class SeenStore(Protocol):
    """Remembers, per conversation, the blocks that its history holds; digests and labels only, never text.

    The order of a turn is `prepare`, then `commit` or `abandon` with the same plan id. Each is atomic. The contract
    errs towards *unseen*: a block wrongly sent again costs tokens, a block wrongly believed seen is evidence lost.

    - A block is seen only once a plan that sent it is committed.
    - Plans of one conversation that were prepared side by side cannot all be part of one linear history. When the
      second of them is committed, all that was recorded since their common past is forgotten, and `epoch` grows.
    - So it is, too, when a plan is committed whose lease timed out. If the lease is gone altogether, lost to a bound
      or ended by `forget`, nothing is known of that past, and all is forgotten.
    - Until such a plan is committed or abandoned, what was recorded since its past is contested. If its lease times out
      or is lost to a bound, that is forgotten, as if it had been committed.
    - Every operation on an unknown conversation or plan is valid, and does nothing.
    - State is bounded, and a conversation dropped for that is one that nothing is known of.
    """

    def prepare(self, conversation: Conversation, plan_id: str, proposed: Mapping[bytes, str]) -> Prepared:
        """Lease the next turn to a plan, and tell what the history holds.

        Args:
            conversation: Whose turn.
            plan_id: Unique.
            proposed: Fingerprints of the blocks to send, each with the label it would get.
        """
        ...

    def commit(self, conversation: Conversation, plan_id: str, sent: Sequence[SeenBlock]) -> bool:
        """The model saw the plan's prompt: record the blocks that it holds in full. True if they were recorded.

        They count as sent in the turn that `prepare` leased to the plan, whatever turn they name.

        False also for a plan that was committed or abandoned lately, and then nothing changes.
        """
        ...

    def abandon(self, conversation: Conversation, plan_id: str) -> bool:
        """Give the lease back; nothing is recorded. True if there was one."""
        ...

    def forget(self, conversation: Conversation) -> None:
        """The history is no longer what was recorded: nothing is seen any more, `epoch` grows, every lease ends.

        Labels stay taken and turns go on counting, for the history may still hold some of them.
        """
        ...

    def inspect(self, conversation: Conversation) -> Snapshot | None:
        """What is known of a conversation; None if nothing is."""
        ...

    def clear(self) -> None:
        """Forget all conversations."""
        ...


@runtime_checkable
class AsyncSeenStore(Protocol):
    """A `SeenStore` that can also be awaited; each method is the twin of the one without the `a`.

    One that has not what it needs for one of the two kinds says so by an attribute, `serves_threads` or `serves_tasks`,
    that is False.
    """

    async def aprepare(self, conversation: Conversation, plan_id: str, proposed: Mapping[bytes, str]) -> Prepared: ...

    async def acommit(self, conversation: Conversation, plan_id: str, sent: Sequence[SeenBlock]) -> bool: ...

    async def aabandon(self, conversation: Conversation, plan_id: str) -> bool: ...

    async def aforget(self, conversation: Conversation) -> None: ...


@runtime_checkable
class Maintained(Protocol):
    """A store with work to do between requests."""

    def maintain(self) -> None:
        """Do what is due. Called about twice a second by one thread, never on the way of a request; may raise."""
        ...
