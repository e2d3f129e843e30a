"""A planner's start, state and end: the methods around those that plan."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from warmprefix.blocks import ContextBlock
from warmprefix.cache_profiles import CacheProfile
from warmprefix.planner.conversation import ConversationStore
from warmprefix.planner.feedback import PlanFeedback
from warmprefix.planner.metrics import PlannerMetrics
from warmprefix.planner.open_plans import OpenPlans
from warmprefix.planner.scope import ScopeOptions, ScopeRegistry, make_scope
from warmprefix.planner.startup import Startup, WarmOptions
from warmprefix.primes import refuses_exact_end, without_exact_end
from warmprefix.telemetry import PlannerStats

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["Blocks", "PlannerLifecycle"]

Blocks: TypeAlias = "Iterable[ContextBlock | str]"
"""Context blocks in relevance order. A string is a block without an id."""


class PlannerLifecycle:
    """Base class of `ContextPlanner`, which sets the attributes."""

    _lock: threading.RLock
    _metrics: PlannerMetrics
    _scopes: ScopeRegistry
    _open_plans: OpenPlans
    _conversations: ConversationStore
    _feedback: PlanFeedback
    _startup: Startup

    @property
    def profile(self) -> CacheProfile:
        """What the engine's cache can do, as given or as learned so far."""
        return self._scopes.profile.current

    def catch_up(self, *, timeout: float = 5.0, **scope: Unpack[ScopeOptions]) -> bool:
        """Learn what other workers served lately; True if all was learned.

        The scope is that of `tenant`, `model` and `preamble`, as for `plan`. Call it before a worker takes requests;
        without it, the worker learns the same in the background. Waits at most `timeout` seconds.
        """
        return self._startup.catch_up(make_scope(**scope), timeout)

    async def acatch_up(self, *, timeout: float = 5.0, **scope: Unpack[ScopeOptions]) -> bool:
        return await self._startup.acatch_up(make_scope(**scope), timeout)

    def warm(
        self, client: Any, preamble: str | None, blocks: Blocks | None = None, **options: Unpack[WarmOptions]
    ) -> int:
        """Fill a new engine's cache before requests come; return the number of prompts.

        Sends the preamble alone, then the hottest paths of its scope, as far as `blocks` contains their texts, which
        the planner does not keep. Assumes that a context opens the user's message, after the preamble as system
        message. Takes seconds. (CacheWeaver's optional warm-up.)

        Args:
            client: An `openai.OpenAI`, or an object with its `chat.completions.create`.
            preamble: As for `plan`.
            blocks: Candidates, such as the documents requested most often lately.
            options: `model`, the engine's name of it too; `tenant`, as for `plan`; `max_paths` to send, 8 by default.

        Raises:
            Exception: Any error of the client; prompts sent before count as resident.
        """
        sent, exact = 0, True
        for request in self._startup.warming_requests(preamble, blocks, **options):
            try:
                client.chat.completions.create(**(request if exact else without_exact_end(request)))
            except Exception as error:
                if not (exact and refuses_exact_end(request, error)):
                    raise
                exact = False
                client.chat.completions.create(**without_exact_end(request))
            sent += 1
        return sent

    async def awarm(
        self, client: Any, preamble: str | None, blocks: Blocks | None = None, **options: Unpack[WarmOptions]
    ) -> int:
        sent, exact = 0, True
        for request in self._startup.warming_requests(preamble, blocks, **options):
            try:
                await client.chat.completions.create(**(request if exact else without_exact_end(request)))
            except Exception as error:
                if not (exact and refuses_exact_end(request, error)):
                    raise
                exact = False
                await client.chat.completions.create(**without_exact_end(request))
            sent += 1
        return sent

    def stats(self) -> PlannerStats:
        """Return counts since the start or the last reset, and the current state."""
        feed = self._feedback.feed_stats()
        with self._lock:
            parts = (self._metrics, self._scopes, self._conversations, self._feedback)
            values = {name: value for part in parts for name, value in part.stats().items()}
            return PlannerStats(feed=feed, open_plans=len(self._open_plans), **values)

    def reset(self) -> None:
        """Forget all that was learned, and all conversations of the store.

        Scopes, labels, open plans, counts; conversations also of other planners that share the store. Raises
        `StoreError` if the store failed: then conversations may still be remembered, and all else is forgotten.
        """
        self._forget_learned()
        self._conversations.clear()

    def _forget_learned(self) -> None:
        with self._lock:
            for part in (self._scopes, self._open_plans, self._metrics, self._feedback.errors):
                part.clear()

    def close(self) -> None:
        """End the threads and connections of this planner. Idempotent.

        Tries once more to deliver what the store has not received. Needed only with a shared store or a feed.
        """
        for part in (self._feedback.feed, self._scopes.sharing, self._conversations):
            part.close()

    async def aclose(self) -> None:
        """Do the same as `close`, and close the connections of this event loop."""
        for part in (self._feedback.feed, self._scopes.sharing):
            part.close()
        await self._conversations.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()
