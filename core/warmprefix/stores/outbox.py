"""What a store has not been told yet."""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from warmprefix.forks import in_each_process
from warmprefix.stores.base import AsyncSeenStore, Conversation, SeenBlock, SeenStore

__all__ = ["Abandon", "Commit", "Forget", "Notice", "Outbox", "Reserve", "Settle", "unheard"]


def unheard(plan_id: str) -> str:
    """Another id for a plan of which the store did not hear in time: under its own the question may come late."""
    return f"{plan_id}?"


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """A plan's prompt was seen by the model."""

    plan_id: str
    sent: Sequence[SeenBlock]

    def tell(self, store: SeenStore, conversation: Conversation) -> None:
        store.commit(conversation, self.plan_id, self.sent)

    async def atell(self, store: AsyncSeenStore, conversation: Conversation) -> None:
        await store.acommit(conversation, self.plan_id, self.sent)


@dataclass(frozen=True, slots=True, eq=False)
class Abandon:
    """A plan's prompt will not be seen."""

    plan_id: str

    def tell(self, store: SeenStore, conversation: Conversation) -> None:
        store.abandon(conversation, self.plan_id)

    async def atell(self, store: AsyncSeenStore, conversation: Conversation) -> None:
        await store.aabandon(conversation, self.plan_id)


@dataclass(frozen=True, slots=True, eq=False)
class Reserve:
    """A plan was made of which the store did not hear, so that nothing is known of its past.

    Nothing that was recorded is certain any more. What is recorded from now on is contested until that plan ends, and
    its commit voids that too, for there may be more such plans, elsewhere: so its lease is taken, and ended at once.
    """

    plan_id: str

    def tell(self, store: SeenStore, conversation: Conversation) -> None:
        store.prepare(conversation, self.plan_id, {})
        store.forget(conversation)

    async def atell(self, store: AsyncSeenStore, conversation: Conversation) -> None:
        await store.aprepare(conversation, self.plan_id, {})
        await store.aforget(conversation)


@dataclass(frozen=True, slots=True, eq=False)
class Forget:
    """The history is no longer what was recorded."""

    def tell(self, store: SeenStore, conversation: Conversation) -> None:
        store.forget(conversation)

    async def atell(self, store: AsyncSeenStore, conversation: Conversation) -> None:
        await store.aforget(conversation)


@dataclass(frozen=True, slots=True, eq=False)
class Settle:
    """Plans ended, more than are worth telling one by one: nothing that was recorded is certain, but their labels hold.

    Their blocks are committed as those of a plan that the store did not hear of in time, which records their labels
    and voids all else. Only then does each plan give its lease back, which would contest what is recorded later.
    """

    plan_id: str
    sent: Sequence[SeenBlock]
    ended: Sequence[str]

    @classmethod
    def of(cls, notices: Sequence[Notice]) -> Settle:
        """One for many, of which the last is taken for the newest; it keeps no more than a store would."""
        sent: dict[tuple[str, bytes], SeenBlock] = {}
        ended: dict[str, None] = {}
        for notice in notices:
            if isinstance(notice, Commit | Settle):
                sent.update({(block.label, block.fingerprint): block for block in notice.sent})
            if isinstance(notice, Settle):
                ended.update(dict.fromkeys(notice.ended))
            elif isinstance(notice, Commit | Abandon):
                ended[notice.plan_id] = None
        for notice in notices:
            if isinstance(notice, Reserve):
                ended.pop(notice.plan_id, None)  # the store never heard of it
        plan_id = unheard(f"settled-{uuid.uuid4().hex}")
        return cls(plan_id, tuple(sent.values())[-_MOST_LABELS:], tuple(ended)[-_MOST_OF_ONE:])

    def tell(self, store: SeenStore, conversation: Conversation) -> None:
        Reserve(self.plan_id).tell(store, conversation)
        store.commit(conversation, self.plan_id, self.sent)
        for plan_id in self.ended:
            store.abandon(conversation, plan_id)

    async def atell(self, store: AsyncSeenStore, conversation: Conversation) -> None:
        await Reserve(self.plan_id).atell(store, conversation)
        await store.acommit(conversation, self.plan_id, self.sent)
        for plan_id in self.ended:
            await store.aabandon(conversation, plan_id)


Notice = Commit | Abandon | Reserve | Forget | Settle
"""Each may be told twice, and late: the store's contract sees to that."""


_MOST_OF_ONE = 64
_MOST_LABELS = 4_096


class Outbox:
    """Notices that could not be delivered, by conversation, oldest first. Thread-safe; operations take O(1).

    A notice stays until it is known to be delivered: while one thread delivers it, another must not take the
    conversation's record for true. If a conversation has dozens of them, one that settles them takes their place.

    Args:
        max_notices: Beyond it the conversation whose notices wait longest loses them.
    """

    def __init__(self, max_notices: int = 65_536) -> None:
        if max_notices < 1:
            raise ValueError(f"max_notices must be 1 or more, got {max_notices}")
        self._max_notices = max_notices
        in_each_process(self._renew_lock)
        self._waiting: OrderedDict[Conversation, tuple[Notice, ...]] = OrderedDict()
        self._count = 0
        self.dropped = 0
        """Notices lost to the bound."""

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # plans are abandoned by the garbage collector too, in the middle of anything

    def add(self, conversation: Conversation, notice: Notice) -> None:
        with self._lock:
            before = self._waiting.get(conversation, ())
            after = (*(before if len(before) < _MOST_OF_ONE else _settled(before)), notice)
            self._waiting[conversation] = after
            self._count += len(after) - len(before)
            while self._count > self._max_notices:
                _, lost = self._waiting.popitem(last=False)
                self._count -= len(lost)
                self.dropped += len(lost)

    def waiting(self, conversation: Conversation) -> tuple[Notice, ...]:
        """A conversation's notices, in the order in which to deliver them."""
        return self._waiting.get(conversation, ())

    def delivered(self, conversation: Conversation, notice: Notice) -> None:
        """Take a notice out; nothing happens if it is out already."""
        with self._lock:
            before = self._waiting.get(conversation, ())
            left = tuple(other for other in before if other is not notice)
            self._count -= len(before) - len(left)
            if left:
                self._waiting[conversation] = left
            else:
                self._waiting.pop(conversation, None)

    def conversations(self) -> list[Conversation]:
        """All that have notices, those first that wait longest."""
        with self._lock:
            return list(self._waiting)

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()
            self._count = self.dropped = 0

    def __len__(self) -> int:
        return self._count


def _settled(notices: tuple[Notice, ...]) -> tuple[Notice, ...]:
    """One for those that ended, and those about plans that are open still: the last of them, if they are many."""
    settle = Settle.of(notices)
    ended = {notice.plan_id for notice in notices if isinstance(notice, Commit | Abandon)}
    still_open = [notice for notice in notices if isinstance(notice, Reserve) and notice.plan_id not in ended]
    return (settle, *still_open[-(_MOST_OF_ONE // 2) :])
