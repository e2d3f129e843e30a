"""Conversation state in this process."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from warmprefix.fair_lru import FairLru
from warmprefix.forks import fork_safe_lock
from warmprefix.stores.operations import (
    Abandon,
    Commit,
    Conversation,
    Forget,
    Operation,
    Prepare,
    PreparedTurn,
    ReadTurn,
    RecordBounds,
    SeenBlock,
    Snapshot,
    TurnRecord,
    WriteTurn,
    check_positive,
    unknown_operation,
)

__all__ = ["MemorySeenStore"]

T = TypeVar("T")

_SHARED = b""
"""Owner of a label that two parallel plans gave to two texts; no block may be sent under it any more."""

_ENDED = -1
"""Turn of a lease that `Forget` ended: its plan cannot be recorded, but may still be committed."""


class MemorySeenStore:
    """A `SeenStore` in memory, bounded by count and by time. Thread-safe; every operation O(blocks of the request).

    At its defaults it takes about 200 MB at most.

    Args:
        max_conversations: Conversations, and turns with a record of their own; beyond it the tenant with the most of
            them loses the one not used longest.
        max_entries: Blocks, labels and plans remembered over all of these; beyond it the tenant with the most of them
            loses the conversation or turn not used longest.
        bounds: Bounds of each conversation; None for the defaults.
        clock: Seconds from any origin, never backwards.
    """

    def __init__(
        self,
        max_conversations: int = 10_000,
        max_entries: int = 1_000_000,
        bounds: RecordBounds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_positive(max_conversations=max_conversations, max_entries=max_entries)
        self._max_conversations = max_conversations
        self._max_entries = max_entries
        self._bounds = RecordBounds() if bounds is None else bounds
        self._clock = clock
        # Re-entrant: a plan may be abandoned by the garbage collector, in the middle of anything.
        self._lock = fork_safe_lock(self.clear)
        self._states: FairLru[_Key, _State] = FairLru()
        """Sizes are equal shares of the bounds, rounded up."""
        self._entries = 0
        """Sum of `counted` over all states."""

    def execute(self, operation: Operation[T]) -> T:
        """Execute one operation and return its result. O(blocks of the request)."""
        handle = _HANDLERS.get(type(operation))
        if handle is None:
            raise unknown_operation(operation)
        with self._lock:
            return handle(self, operation, self._clock())  # type: ignore[no-any-return]

    def _prepare(self, operation: Prepare, now: float) -> PreparedTurn:
        plan_id, proposed = operation.plan_id, operation.proposed
        state = self._use(operation.conversation, now) or self._new_state(
            operation.conversation, operation.conversation.tenant, now
        )
        state.settle(now)
        if plan_id not in state.closed:
            state.leases[plan_id] = _Lease(state.turn, now + self._bounds.lease_ttl)
            state.trim_leases(self._bounds.max_leases)
        seen = {key: state.blocks[key] for key in proposed if key in state.blocks}
        taken = frozenset(
            label for key, label in proposed.items() if state.labels.get(label, key) != key and key not in seen
        )
        since = min([lease.turn for other, lease in state.leases.items() if other != plan_id], default=state.turn)
        contested = frozenset(
            [
                key
                for key, block in seen.items()
                if block.turn > since or (block.label == proposed[key] and state.labels.get(block.label, key) != key)
            ]
        )
        self._count(operation.conversation, operation.conversation.tenant, state)
        return PreparedTurn(state.turn, seen, taken, contested)

    def _commit(self, operation: Commit, now: float) -> bool:
        plan_id, sent = operation.plan_id, operation.sent
        state = self._use(operation.conversation, now)
        if state is None or plan_id in state.closed:
            return False
        lease = state.close(plan_id, self._bounds.max_leases)
        recorded = lease is not None and lease.turn == state.turn and now < lease.expires
        try:
            if recorded:
                state.record(sent, state.turn + 1)
            else:  # late or not, the model saw it: the history may lack plans prepared in parallel
                state.roll_back(0 if lease is None else max(lease.turn, 0))
            state.take_labels(sent)
            state.trim(self._bounds.max_blocks)
            state.turn += 1
            self._count(operation.conversation, operation.conversation.tenant, state)
        except BaseException:  # such as KeyboardInterrupt: a conversation recorded in part is dropped
            self._drop(operation.conversation)
            raise
        return recorded

    def _abandon(self, operation: Abandon, now: float) -> bool:
        state = self._use(operation.conversation, now)
        lease = None if state is None else state.close(operation.plan_id, self._bounds.max_leases)
        return lease is not None and lease.turn != _ENDED

    def _forget(self, operation: Forget, now: float) -> None:
        state = self._states.get(operation.conversation)
        if state is None:
            if not (operation.open or operation.sent):
                return
            state = self._new_state(operation.conversation, operation.conversation.tenant, now)
        state.roll_back(0)
        for lease in state.leases.values():
            lease.turn = _ENDED
        for plan_id in operation.ended:
            state.close(plan_id, self._bounds.max_leases)
        for plan_id in operation.open:
            if plan_id not in state.closed:
                state.leases[plan_id] = _Lease(_ENDED, now + self._bounds.lease_ttl)
        state.trim_leases(self._bounds.max_leases)
        state.take_labels(operation.sent)
        state.trim(self._bounds.max_blocks)
        self._count(operation.conversation, operation.conversation.tenant, state)

    def _read_turn(self, operation: ReadTurn, now: float) -> TurnRecord | None:
        state = self._use((operation.conversation, "turn"), now)
        return None if state is None else state.turn_record

    def _write_turn(self, operation: WriteTurn, now: float) -> bool:
        key, tenant = (operation.conversation, "turn"), operation.conversation.tenant
        record = operation.record.bounded(self._bounds.max_blocks)
        state = self._use(key, now)
        if state is None:
            state = self._new_state(key, tenant, now)
            state.turn_record = record
        elif not record.agrees(state.turn_record):
            state.turn_record = None
        self._count(key, tenant, state)
        return state.turn_record is not None

    def _new_state(self, key: _Key, tenant: str | None, now: float) -> _State:
        state = _State(used=now)
        self._states.put(key, state, tenant)
        while len(self._states) > self._max_conversations:
            self._evict()
        return state

    def inspect(self, conversation: Conversation) -> Snapshot | None:
        """Return a conversation's state, or None if it is unknown."""
        with self._lock:
            state = self._states.get(conversation)
            if state is None or self._is_over(state, self._clock()):
                return None
            leases = tuple(plan_id for plan_id, lease in state.leases.items() if lease.turn != _ENDED)
            return Snapshot(state.epoch, state.turn, tuple(state.blocks.values()), leases)

    def clear(self) -> None:
        """Forget all conversations."""
        with self._lock:
            self._states.clear()
            self._entries = 0

    def _use(self, key: _Key, now: float) -> _State | None:
        while (oldest := next(self._states.values(), None)) is not None and self._is_over(oldest, now):
            self._drop(next(iter(self._states)))
        state = self._states.use(key)
        if state is not None:
            state.used = now
        return state

    def _count(self, key: _Key, tenant: str | None, state: _State) -> None:
        """Enforce the bound over all conversations, after an operation on this one."""
        size = len(state.blocks) + len(state.labels) + len(state.leases) + len(state.closed)
        size += 0 if state.turn_record is None else len(state.turn_record.blocks)
        self._entries += size - state.counted
        state.counted = size
        shares = max(-(-size * self._max_conversations // self._max_entries), 1)
        self._states.put(key, state, tenant, shares)
        while self._entries > self._max_entries and len(self._states) > 1:
            self._evict()

    def _evict(self) -> None:
        self._entries -= self._states.evict()[1].counted

    def _drop(self, key: _Key) -> None:
        state = self._states.pop(key)
        self._entries -= 0 if state is None else state.counted

    def _is_over(self, state: _State, now: float) -> bool:
        return state.used + self._bounds.ttl <= now


_HANDLERS: dict[type, Callable[[MemorySeenStore, Any, float], Any]] = {
    Prepare: MemorySeenStore._prepare,  # noqa: SLF001
    Commit: MemorySeenStore._commit,  # noqa: SLF001
    Abandon: MemorySeenStore._abandon,  # noqa: SLF001
    Forget: MemorySeenStore._forget,  # noqa: SLF001
    ReadTurn: MemorySeenStore._read_turn,  # noqa: SLF001
    WriteTurn: MemorySeenStore._write_turn,  # noqa: SLF001
}

_Key: TypeAlias = "Conversation | tuple[Conversation, str]"
"""Of a conversation; of a turn with its kind, as ids of turns and of conversations may be equal."""


@dataclass(slots=True)
class _Lease:
    turn: int
    expires: float


@dataclass(slots=True)
class _State:
    used: float
    counted: int = 0
    """Its number of entries when last counted."""
    epoch: int = 0
    turn: int = 0
    blocks: OrderedDict[bytes, SeenBlock] = field(default_factory=OrderedDict)
    labels: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    leases: OrderedDict[str, _Lease] = field(default_factory=OrderedDict)
    closed: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """The plans committed or abandoned most recently."""
    turn_record: TurnRecord | None = None
    """That of a turn; None if two were written for its id."""

    def close(self, plan_id: str, max_closed: int) -> _Lease | None:
        self.closed[plan_id] = None
        while len(self.closed) > max_closed:
            self.closed.popitem(last=False)
        return self.leases.pop(plan_id, None)

    def settle(self, now: float) -> None:
        """End leases that timed out. If others were committed meanwhile, treat each as committed, because it may be."""
        over = [plan_id for plan_id, lease in self.leases.items() if lease.turn < self.turn and lease.expires <= now]
        for plan_id in over:
            self.roll_back(max(self.leases.pop(plan_id).turn, 0))

    def trim_leases(self, max_leases: int) -> None:
        while len(self.leases) > max_leases:
            _, lease = self.leases.popitem(last=False)
            if lease.turn < self.turn:
                self.roll_back(max(lease.turn, 0))

    def record(self, sent: Sequence[SeenBlock], turn: int) -> None:
        for block in sent:
            self.blocks[block.fingerprint] = block._replace(turn=turn)
            self.blocks.move_to_end(block.fingerprint)

    def take_labels(self, sent: Sequence[SeenBlock]) -> None:
        for block in sent:
            owner = self.labels.get(block.label, block.fingerprint)
            self.labels[block.label] = block.fingerprint if owner == block.fingerprint else _SHARED
            self.labels.move_to_end(block.label)

    def roll_back(self, turn: int) -> None:
        """Forget every block recorded after `turn`."""
        self.epoch += 1
        for block in [block for block in self.blocks.values() if block.turn > turn]:
            del self.blocks[block.fingerprint]

    def trim(self, max_blocks: int) -> None:
        while len(self.blocks) > max_blocks:
            self.blocks.popitem(last=False)
        # A label outlives its block's record, because the history may still show the text that it names. A block never
        # outlives its label, or another text could get that label.
        while len(self.labels) > 4 * max_blocks:
            label, owner = self.labels.popitem(last=False)
            if owner in self.blocks and self.blocks[owner].label == label:
                self.labels[label] = owner
