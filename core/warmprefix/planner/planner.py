"""`ContextPlanner`: the public methods, which delegate to the parts of a planner."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from warmprefix.annotate import Annotate
from warmprefix.batch.planners import BatchPlanner, Progress
from warmprefix.blocks import ContextBlock
from warmprefix.cache_profiles import CacheProfile
from warmprefix.choice import Choice
from warmprefix.errors import check_count, check_names
from warmprefix.history import Message
from warmprefix.plan import ContextPlan, Placement, Scope, Touch
from warmprefix.planner.batching import BatchSession
from warmprefix.planner.config import PlannerConfig, PlannerOptions, options_of_url
from warmprefix.planner.conversation import ConversationStore
from warmprefix.planner.feedback import PlanFeedback, as_report, check_plan
from warmprefix.planner.request import (
    PlanOptions,
    QueuedRequest,
    RequestPlanner,
    ScopeOptions,
    let_others_announce,
)
from warmprefix.planner.state import PlannerState
from warmprefix.residency import EngineReport, ResidencyTarget
from warmprefix.stores import Branch, Conversation, check_turn_id
from warmprefix.telemetry import PlannerStats

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from warmprefix.batch.plan import BatchPlan
    from warmprefix.batch.planners import Device
    from warmprefix.batch.session import Requests

__all__ = ["Blocks", "ContextPlanner", "PlanningContext"]

Blocks: TypeAlias = "Iterable[ContextBlock | str]"
"""Context blocks in relevance order. A string is a block without an id."""


class ContextPlanner:
    """Arranges context so that the engine's prefix cache already holds much of it.

    The planner learns only from prompts that the model saw: commit a plan, or abandon it. Until then it counts as in
    flight. One planner serves any number of threads and tasks. Its state is in memory and bounded. `aplan` is the async
    twin of `plan`, and so on. All methods raise `TypeError` for an argument of a wrong type.

    >>> from warmprefix import ContextBlock
    >>> planner = ContextPlanner()
    >>> sky = ContextBlock("The sky is blue.", id="sky", tokens=100)
    >>> sea = ContextBlock("The sea is deep.", id="sea", tokens=100)
    >>> with planner.planning([sky, sea]) as plan:
    ...     pass  # here the model answers
    >>> with planner.planning([sea, sky]) as plan:
    ...     print(plan.render())
    The sky is blue.
    <BLANKLINE>
    The sea is deep.
    <BLANKLINE>
    Most relevant above: the passage with "The sea is".
    """

    def __init__(self, config: PlannerConfig | None = None, **options: Unpack[PlannerOptions]) -> None:
        """Start with nothing learned.

        Args:
            config: All arguments as one value; by default made from the `options`.
            options: The fields of `PlannerConfig`, which documents them.

        Raises:
            TypeError: Both are given, or an option has the wrong type.
            ValueError: An option has an unknown value, or a bound is below 1.
        """
        if config is not None and (options or not isinstance(config, PlannerConfig)):
            raise TypeError(f"config must be a PlannerConfig without other arguments, got {type(config).__name__}")
        config = PlannerConfig(**options) if config is None else config
        self._state = state = PlannerState(config)
        self._requests = RequestPlanner(state)
        self._conversations = ConversationStore(config.store, state.metrics)
        self._feedback = PlanFeedback(state, config.feed)
        self._batches = BatchSession(state)

    @classmethod
    def from_url(cls, url: str | None = None, *, settings: object = None, **options: Unpack[PlannerOptions]) -> Self:
        """Return a planner that shares its state with others through Redis or Valkey.

        It connects in the background. A server that is down or slow costs 20 ms, then requests go on without
        de-duplication. `close` it at the end, or use it as a context manager.

        Args:
            url: Its scheme names the package that connects (entry points `warmprefix.urls`). For `redis://` and the
                others that `RedisSeenStore` takes this is `warmprefix_redis`, also without a URL.
            settings: What that package takes: `warmprefix_redis.SharedSettings`, by default from the environment:
                `WARMPREFIX_REDIS_URL`, `WARMPREFIX_LEASE_TTL`, and so on.
            options: The fields of `PlannerConfig`; they override the settings.

        Raises:
            MissingExtraError: The package's extra is not installed.
            ValueError: There is no URL or no package for it, it can't be used, or a setting is out of bounds.
        """
        return cls(**(options_of_url(url, settings) | options))

    @property
    def profile(self) -> CacheProfile:
        """What the engine's cache can do, as given or as learned so far."""
        return self._state.profile.current

    @property
    def residency(self) -> ResidencyTarget:
        """Receives reports on plans of this planner from a feed: the `listener` of a `ReplicaRouter`."""
        return self._feedback

    def plan(
        self,
        blocks: Blocks,
        *,
        conversation: str | Branch | None = None,
        placement: Placement = "head",
        tenant: str | None = None,
        model: str | None = None,
        preamble: str | None = None,
        history: Iterable[Message] | None = None,
        order_locked: bool = False,
        annotate: Annotate | None = None,
        choose: Choice | None = None,
    ) -> ContextPlan:
        """Arrange one request's context.

        Every block is in it once, in full or as a reference. Call `commit` once the model has seen the prompt, or
        `abandon` if it has not.

        Args:
            blocks: In relevance order. Equal blocks have the id, tokens and pin of the first.
            conversation: A `Branch` names the turn that the prompt continues, in histories that may fork; pass the id
                of the new turn to `commit`. A str names one linear message history. Without it or `history`, nothing
                is de-duplicated.
            placement: `"head"` if each turn builds a new context in front of the history: it is ordered, never
                de-duplicated, and `conversation` and `history` are ignored. `"tail"` if the history keeps it: the first
                turn is ordered; later turns keep relevance order, and blocks in the history become references.
            tenant: The owner of the request. Nothing is shared between tenants.
            model: Only labels of seen blocks are shared between models.
            preamble: The text in front of the context, or a name of it: different ones share no prefix.
            history: With `"tail"`: the messages in front of the new context, as the model will see them. They alone
                decide which blocks become references, whatever was committed before; pass them wherever you can.
            order_locked: Keep the order, pins included: the blocks are chronological, or cited by position.
            annotate: What this prompt shows of the relevance order; by default the planner's `annotate`.
            choose: The blocks are candidates with scores, of which `choose.k` are fed: the first ones, or others of the
                last places that the engine holds already. `left_out` of the plan names those that are not fed.

        Raises:
            ValueError: `placement` or `annotate` has another value, or `conversation` is empty; with `choose`, a score
                is missing, no finite number, or better than the one before it, or the order is locked.
        """
        began = time.perf_counter()
        draft = self._requests.draft(
            blocks, conversation, placement, tenant, model, preamble, history, order_locked, annotate, choose
        )
        record = None if draft.key is None else self._conversations.prepare(draft)
        return self._requests.arrange(draft, record, began)

    async def aplan(self, blocks: Blocks, **options: Unpack[PlanOptions]) -> ContextPlan:
        """Plan as `plan` does, and await the store."""
        began = time.perf_counter()
        draft = self._requests.draft(blocks, **options)
        with self._requests.announced(draft):
            await let_others_announce()
            record = None if draft.key is None else await self._conversations.aprepare(draft)
            return self._requests.arrange(draft, record, began)

    def planning(self, blocks: Blocks, **options: Unpack[PlanOptions]) -> PlanningContext:
        """Return a context, for `with` or `async with`, that plans, then commits at its end or abandons on an error.

        Cancellation abandons the plan or its commit. In a branch, set `turn_id` of the context before its end.
        """
        return PlanningContext(self, blocks, options)

    def queued(self, blocks: Blocks, **scope: Unpack[ScopeOptions]) -> QueuedRequest:
        """Announce a request that waits to be planned, so that requests before it leave a prefix it can share.

        Changes no order of arrival and delays nothing. `plan` with the same blocks and scope ends it. `aplan` announces
        its requests itself: tasks that are started together consider each other.

        Args:
            blocks: As for `plan`, with placement `"head"`.
            scope: `tenant`, `model` and `preamble`, as for `plan`.
        """
        return self._requests.queued(blocks, **scope)

    def plan_batch(
        self,
        requests: Requests,
        planner: str | BatchPlanner = "auto",
        *,
        capacity_tokens: int | None = None,
        model: str | None = None,
        preamble: str | None = None,
        time_budget: float | None = None,
        device: Device = "auto",
        progress: Progress | None = None,
        choose: Choice | None = None,
    ) -> BatchPlan:
        """Arrange requests that are all available before the first one runs.

        Plans their execution order and the blocks of each, starting from what the engine is predicted to hold.
        `commit` or `abandon` each request, as after `plan`; `BatchRunner.run` does that. Deterministic unless a time
        budget is given. Other calls go on meanwhile.

        Args:
            requests: `BatchRequest`s, or a mapping from ids to contexts.
            planner: `"merge"` maximises the tokens actually saved; `"context-index"` plans as ContextPilot does
                (extra `batch`); `"frequency"` puts the blocks first that most requests hold; `"relevance"` only
                orders the requests; `"auto"` is `"merge"`, unless `"relevance"` saves as much. `"window"` plans the 2
                to 200 requests that wait now, within milliseconds, from what is learned, and ignores bound, budget and
                device. Or your own `warmprefix.batch.BatchPlanner`.
            capacity_tokens: Tokens of context that the engine's prefix cache can hold; None for no bound.
            model, preamble: As for `plan`, of all requests; `BatchRunner.run` sends the preamble as system message.
            time_budget: Seconds for which `"merge"` may improve its first plan; None for as long as usually pays.
            device: Where distances and overlaps are computed: `"cpu"`, `"cuda"` (extra `gpu`), or `"auto"` for CUDA
                where it is available and pays.
            progress: Called with the name of a stage, its steps done, and all its steps.
            choose: As for `plan`, but in place of blocks that the engine holds, requests may be fed those that they
                share with others of the batch, if it computes less that way.

        Raises:
            MissingExtraError: The planner or the device needs a package that is not installed.
            ValueError: Two requests have one id; an unknown planner or device; a bound below 1; a negative budget;
                more requests than `"context-index"` can hold; your own planner omits or repeats a context or block; or,
                with `choose`, as for `plan`.
        """
        return self._batches.plan_batch(
            self, requests, planner, capacity_tokens, model, preamble, time_budget, device, progress, choose
        )

    def commit(
        self,
        plan: ContextPlan,
        cached_tokens: int | None = None,
        *,
        report: EngineReport | None = None,
        turn_id: str | None = None,
    ) -> bool:
        """Learn from a prompt that the model saw, and count its blocks as seen.

        If you throw the answer away, abandon the plan, unless you pass the history to `plan`.

        Args:
            cached_tokens: The engine's count, as `usage.prompt_tokens_details.cached_tokens`.
            report: All that the engine reported of the answer, instead of `cached_tokens`.
            turn_id: The id of this turn in its branch, for the `Branch(after=...)` of later plans; no other turn of the
                tenant may ever have it. Without it the turn can't be continued. Ignored unless the plan has a branch.

        Returns:
            True if all of that was recorded; False, which does no harm, if the plan was no longer open, or if another
            plan of its conversation was committed after this one was made.

        Raises:
            ValueError: A count or a duration is negative, or `turn_id` is empty or longer than 1,024 characters.
        """
        began = time.perf_counter()
        if turn_id is not None:
            check_turn_id(turn_id=turn_id)
        checked = as_report(plan, cached_tokens, report)
        recorded = in_time = self._feedback.commit(plan, checked)
        if plan.tracked or plan.branch is not None:
            recorded = self._conversations.commit(plan, in_time, turn_id) and in_time
        self._state.metrics.notify_committed(plan, checked, recorded, began)
        return recorded

    async def acommit(
        self,
        plan: ContextPlan,
        cached_tokens: int | None = None,
        *,
        report: EngineReport | None = None,
        turn_id: str | None = None,
    ) -> bool:
        """Commit as `commit` does, and await the store."""
        began = time.perf_counter()
        if turn_id is not None:
            check_turn_id(turn_id=turn_id)
        checked = as_report(plan, cached_tokens, report)
        recorded = in_time = self._feedback.commit(plan, checked)
        if plan.tracked or plan.branch is not None:
            recorded = await self._conversations.acommit(plan, in_time, turn_id) and in_time
        self._state.metrics.notify_committed(plan, checked, recorded, began)
        return recorded

    def abandon(self, plan: ContextPlan) -> bool:
        """Drop a plan whose prompt the model did not see; True if it was open."""
        was_open = self._feedback.abandon(plan)
        if was_open and plan.tracked:
            self._conversations.abandon(plan)
        return was_open

    async def aabandon(self, plan: ContextPlan) -> bool:
        """Abandon as `abandon` does, and await the store."""
        was_open = self._feedback.abandon(plan)
        if was_open and plan.tracked:
            await self._conversations.aabandon(plan)
        return was_open

    def report(self, plan: ContextPlan, report: EngineReport) -> None:
        """Apply the engine's report for a plan that other code commits.

        O(blocks). Raises `ValueError` for a negative count or duration.
        """
        self._feedback.report(plan, as_report(plan, None, report))

    def touches(self, scope: Scope, most: int = 1) -> list[Touch]:
        """Return beginnings of earlier plans that are about to be evicted and likely to be asked for again.

        Send each to the engine with one token of output, and pass the answer to `touched`; or ignore it. None is named
        twice before that. Empty unless mirrors of the cache with touches would have saved more than the touches cost;
        these follow the scope's requests from the first call on.

        Args:
            scope: `ContextPlan.scope` of plans that were committed lately.
            most: Most touches to return.
        """
        check_count("most", most)
        with self._state.lock:
            return self._state.touches(scope, most)

    def touched(self, touch: Touch, report: EngineReport | None = None) -> None:
        """Learn that the engine has answered a touch.

        With `cached_tokens` of that answer alone, and `prompt_tokens`, the planner learns whether touches come in time.
        """
        with self._state.lock:
            self._state.touched(touch, EngineReport() if report is None else report)

    def withdraw(self, plan: ContextPlan) -> None:
        """Take back a commit whose answer the application does not keep.

        The plan's conversation has seen nothing until its next commit; what was learned of the engine stays. Where an
        event loop runs, a task notifies a shared store. Does nothing for a plan without a named conversation.
        """
        check_plan(plan)
        if plan.tracked:
            self._conversations.withdraw(plan)

    def forget(self, conversation: str, *, tenant: str | None = None) -> None:
        """Count no block as seen any more, because the history was changed.

        Call it after a cut, an edit, a summary or a branch, if `plan` gets no `history`. Open plans count as unseen.

        Raises:
            StoreError: The store failed. This planner does not trust its record before it has forgotten; others do.
        """
        check_names(conversation=conversation, tenant=tenant)
        self._conversations.forget(Conversation(tenant, conversation))

    def stats(self) -> PlannerStats:
        """Return counts since the start or the last reset, and the current state."""
        feed = self._feedback.feed_stats()
        with self._state.lock:
            return PlannerStats(feed=feed, **self._state.stats(), **self._conversations.stats())

    def reset(self) -> None:
        """Forget all that was learned, and all conversations of the store.

        Scopes, labels, open plans, counts; conversations also of other planners that share the store. Raises
        `StoreError` if the store failed: then conversations may still be remembered, and all else is forgotten.
        """
        self._state.clear()
        self._conversations.clear()

    def close(self) -> None:
        """End the threads and connections of this planner. Idempotent.

        Tries once more to deliver what the store has not received. Needed only with a shared store or a feed. An `async
        with` also closes the connections of its event loop.
        """
        for part in (self._feedback.feed, self._state.sharing, self._conversations):
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        for part in (self._feedback.feed, self._state.sharing):
            part.close()
        await self._conversations.aclose()


class PlanningContext:
    """A context that plans when it begins, and commits or abandons the plan when it ends."""

    __slots__ = ("_blocks", "_options", "_plan", "_planner", "turn_id")

    _plan: ContextPlan

    def __init__(self, planner: ContextPlanner, blocks: Blocks, options: PlanOptions) -> None:
        self._planner = planner
        self._blocks = blocks
        self._options = options
        self.turn_id: str | None = None
        """The `turn_id` of `commit`."""

    def __enter__(self) -> ContextPlan:
        self._plan = self._planner.plan(self._blocks, **self._options)
        return self._plan

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._planner.commit(self._plan, turn_id=self.turn_id)
        else:
            self._planner.abandon(self._plan)

    async def __aenter__(self) -> ContextPlan:
        self._plan = await self._planner.aplan(self._blocks, **self._options)
        return self._plan

    async def __aexit__(self, kind: object, *error: object) -> None:
        if kind is None:
            await self._planner.acommit(self._plan, turn_id=self.turn_id)
        else:
            await self._planner.aabandon(self._plan)
