"""`ContextPlanner`: blocks in, plan out; commit what the model saw."""

from __future__ import annotations

import hashlib
import hmac
import logging
import operator
import os
import threading
import time
import uuid
import weakref
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict, get_args, runtime_checkable

from warmprefix.annotate import Templates
from warmprefix.batch.planners import BatchPlanner, Progress, no_progress
from warmprefix.blocks import ContextBlock, as_blocks, distinct_blocks, evidence_blocks, fingerprint
from warmprefix.dedup.exact import shown_labels
from warmprefix.dedup.history import Message, VisibleHistory, header_lines
from warmprefix.errors import check_count
from warmprefix.failures import log_failure
from warmprefix.labels import LabelRegistry, lasting_labels
from warmprefix.order_sharing.base import LearnedOrder, NoSharing, OrderSharing
from warmprefix.ordering import POLICIES, OrderingPolicy, PrefixView, ServedBlock
from warmprefix.plan import ContextPlan, Placement, PlannedBlock, Scope
from warmprefix.planner.request import Draft, Past
from warmprefix.prefix.tree import PrefixMatch, PrefixTree
from warmprefix.residency.base import EngineReport, FeedStats, NoFeed, ResidencyFeed, ServedPrompt
from warmprefix.residency.feedback import ScopeFeedback
from warmprefix.residency.usage import PredictionErrors
from warmprefix.residency.warm import paths_to_warm, warming_request
from warmprefix.stores import AsyncSeenStore, Conversation, MemorySeenStore, Prepared, SeenBlock, SeenStore
from warmprefix.stores.guard import GuardedStore
from warmprefix.stores.outbox import unheard
from warmprefix.telemetry import LatencyHistogram, NoObserver, PlannerObserver, PlannerStats
from warmprefix.traces.base import RequestRecorder
from warmprefix.traces.environment import recorder_from_environment

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from warmprefix.batch.bounds import Bound
    from warmprefix.batch.device import Device
    from warmprefix.batch.plan import BatchPlan, BatchRequest, PlannedRequest
    from warmprefix.batch.session import Requests
    from warmprefix.settings import SharedSettings

__all__ = ["BatchOptions", "ContextPlanner", "PlanOptions", "PlannerOptions"]

_log = logging.getLogger("warmprefix")

_PLACEMENTS = get_args(Placement)

_CATCHING_UP = 0.005
"""Seconds between two looks at how far it has come."""


class PlanOptions(TypedDict, total=False):
    """The keyword arguments of `ContextPlanner.plan`, which documents them."""

    conversation: str | None
    placement: Placement
    tenant: str | None
    model: str | None
    preamble: str | None
    history: Iterable[Message] | None
    order_locked: bool


class PlannerOptions(TypedDict, total=False):
    """The keyword arguments of `ContextPlanner`, which documents them, without those that `from_url` decides."""

    policy: str | Callable[[], OrderingPolicy]
    capacity_tokens: int | None
    max_nodes: int
    max_scopes: int
    max_labels: int
    max_open_plans: int
    templates: Templates | None
    salt_key: bytes
    recorder: RequestRecorder | None
    feed: ResidencyFeed | None
    observer: PlannerObserver | None
    patience: int | None


class BatchOptions(TypedDict, total=False):
    """The keyword arguments of `ContextPlanner.plan_batch`, which documents them."""

    capacity_tokens: int | None
    model: str | None
    preamble: str | None
    time_budget: float | None
    device: Device
    progress: Progress | None


class _Closable(Protocol):
    def close(self) -> None: ...


@runtime_checkable
class _AsyncClosable(Protocol):
    async def aclose(self) -> None: ...


class ContextPlanner:
    """Arranges each request's context blocks so that the engine's prefix cache already holds much of the prompt.

    A plan alone changes nothing for later ones. Committing it does: the planner learns only from prompts that the
    model saw. One planner serves any number of threads and tasks. Its state is in memory and bounded.

    >>> planner = ContextPlanner()
    >>> sky, sea = ContextBlock("The sky is blue.", id="sky"), ContextBlock("The sea is deep.", id="sea")
    >>> with planner.planning([sky, sea]) as plan:
    ...     pass  # here the model answers
    >>> with planner.planning([sea, sky]) as plan:
    ...     print(plan.render())
    [sky] The sky is blue.
    <BLANKLINE>
    [sea] The sea is deep.
    <BLANKLINE>
    Please read the context in the following priority order: [sea] > [sky] and answer the question.
    """

    def __init__(
        self,
        *,
        policy: str | Callable[[], OrderingPolicy] = "coaccess",
        capacity_tokens: int | None = 500_000,
        max_nodes: int = 65_536,
        max_scopes: int = 1_024,
        max_labels: int = 65_536,
        max_open_plans: int = 10_000,
        store: SeenStore | None = None,
        sharing: OrderSharing | None = None,
        templates: Templates | None = None,
        salt_key: bytes = b"",
        recorder: RequestRecorder | None = None,
        feed: ResidencyFeed | None = None,
        observer: PlannerObserver | None = None,
        patience: int | None = 32,
    ) -> None:
        """Start with nothing learned.

        Args:
            policy: A name of `warmprefix.ordering.POLICIES`, or a class or function that makes a policy; it is called
                once a scope, for policies of different scopes must share nothing.
            capacity_tokens: Tokens of context that the engine's prefix cache can hold; None for no bound.
            max_nodes: Most nodes of the prefix tree, a scope.
            max_scopes: Most scopes; beyond it the one not used longest is forgotten.
            max_labels: Most blocks whose labels are remembered, a scope.
            max_open_plans: Most plans neither committed nor abandoned; beyond it the oldest can't be committed. Of
                batches, the last one's plans all can.
            store: Where conversations are remembered; in this process by default. Any other is asked through a
                `GuardedStore`, with its defaults if you don't give one: 20 ms a call, then the request goes on.
            sharing: Where what is learned is shared with other planners of the same engine; nowhere by default.
            templates: The wording of the annotations.
            salt_key: A secret that makes `ContextPlan.cache_salt` unguessable to those who know the tenant's name.
            recorder: Is told of every request as it came; by default, what `warmprefix record` asks for, if it runs
                the application, and nothing otherwise.
            feed: Knows from the engine what it holds, such as a `warmprefix.residency.feed.KvEventFeed`. Without one
                the planner goes by its own picture of the cache, and by what is reported of each answer.
            observer: Is told of every plan and its end; nobody by default.
            patience: After so many answers in a row of which nothing was cached, though each had been predicted to be
                cached in part, a scope's requests are left in relevance order, but for one in 16, until one is cached
                again; None for never.

        Raises:
            TypeError: `policy` is a policy itself instead of what makes one, or another argument has another type than
                the above.
            ValueError: `policy` is an unknown name, or a bound is below 1.
        """
        check_count("max_scopes", max_scopes)
        check_count("max_labels", max_labels)
        check_count("max_open_plans", max_open_plans)
        check_count("patience", patience, optional=True)
        if store is not None and not isinstance(store, SeenStore):
            raise TypeError(f"store must be a SeenStore or None, got {type(store).__name__}")
        if sharing is not None and not isinstance(sharing, OrderSharing):
            raise TypeError(f"sharing must be an OrderSharing or None, got {type(sharing).__name__}")
        if templates is not None and not isinstance(templates, Templates):
            raise TypeError(f"templates must be Templates or None, got {type(templates).__name__}")
        if not isinstance(salt_key, bytes):
            raise TypeError(f"salt_key must be bytes, got {type(salt_key).__name__}")
        if recorder is not None and not isinstance(recorder, RequestRecorder):
            raise TypeError(f"recorder must be a RequestRecorder or None, got {type(recorder).__name__}")
        if feed is not None and not isinstance(feed, ResidencyFeed):
            raise TypeError(f"feed must be a ResidencyFeed or None, got {type(feed).__name__}")
        if observer is not None and not isinstance(observer, PlannerObserver):
            raise TypeError(f"observer must be a PlannerObserver or None, got {type(observer).__name__}")
        PrefixTree[bytes](capacity_tokens, max_nodes)  # so that bad bounds fail here, not at the first request
        self._new_policy = _policy_factory(policy)
        self._capacity_tokens = capacity_tokens
        self._max_nodes = max_nodes
        self._max_scopes = max_scopes
        self._max_labels = max_labels
        self._max_open_plans = max_open_plans
        self._store: SeenStore
        self._awaited: AsyncSeenStore
        self._resources: list[_Closable] = []
        """What `close` closes, in this order."""
        if store is None or type(store) is MemorySeenStore:
            self._store = MemorySeenStore() if store is None else store
            self._awaited = _Awaited(self._store)
        else:
            guarded = store if isinstance(store, GuardedStore) else GuardedStore(store)
            self._store = self._awaited = guarded
            self._resources.append(guarded)
        self._sharing: OrderSharing = NoSharing() if sharing is None else sharing
        self._templates = Templates() if templates is None else templates
        self._salt_key = salt_key
        self._recorder = recorder_from_environment() if recorder is None else recorder
        self._feed: ResidencyFeed = NoFeed() if feed is None else feed
        self._observer: PlannerObserver = NoObserver() if observer is None else observer
        self._patience = patience
        self._plan_latency, self._store_latency = LatencyHistogram(), LatencyHistogram()
        self._instance = uuid.uuid4().hex
        # Guards all below; never held while the store works. Re-entrant, because the garbage collector may close a
        # generator that stands in `planning`, and so call `abandon`, in the middle of any other call.
        self._lock = threading.RLock()
        self._scopes: OrderedDict[Scope, _ScopeState] = OrderedDict()
        self._open: OrderedDict[str, Scope] = OrderedDict()
        self._open_batches: OrderedDict[str, _OpenBatch] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._errors = PredictionErrors()
        self._planned = 0
        self._feed.follow(self)

    @classmethod
    def from_url(
        cls, url: str | None = None, *, settings: SharedSettings | None = None, **options: Unpack[PlannerOptions]
    ) -> Self:
        """A planner that shares conversations and learned orders with all others of the same Redis or Valkey.

        It connects in the background. A server that is down or slow costs 20 ms, then requests go on with nothing
        de-duplicated. `close` it at the end, or use it as a context manager.

        Args:
            url: As `RedisSeenStore` takes it; by default that of the settings.
            settings: By default, what the environment says: `WARMPREFIX_REDIS_URL`, `WARMPREFIX_LEASE_TTL`, and so on.
            options: As `ContextPlanner` takes them; they go before the settings.

        Raises:
            MissingExtraError: The extra `redis` is not installed.
            ValueError: Neither gives a URL, or it is none that can be used, or a setting is out of bounds.
        """
        from warmprefix.order_sharing.redis import RedisOrderSharing
        from warmprefix.settings import SharedSettings
        from warmprefix.stores.redis import RedisSeenStore

        given = SharedSettings() if settings is None else settings
        address = given.redis_url if url is None else url
        if not address:
            raise ValueError("url must be given, or WARMPREFIX_REDIS_URL be set")
        store = RedisSeenStore(
            address,
            prefix=given.key_prefix,
            max_blocks=given.max_blocks,
            ttl=given.conversation_ttl,
            lease_ttl=given.lease_ttl,
            # Longer than a request waits: a commit that comes late is better than none.
            timeout=max(0.1, 2 * given.store_budget),
            connect_timeout=max(0.5, 2 * given.store_budget),
        )
        options.setdefault("capacity_tokens", given.capacity_tokens)
        options.setdefault("salt_key", given.salt_key.get_secret_value().encode())
        guarded = GuardedStore(store, budget=given.store_budget)
        guarded.start()
        planner = cls(
            store=guarded,
            sharing=RedisOrderSharing(address, prefix=given.key_prefix) if given.share_orders else None,
            **options,
        )
        planner._resources.append(store)
        return planner

    # -- planning ----------------------------------------------------------------------------------------------

    def plan(
        self,
        blocks: Iterable[ContextBlock | str],
        *,
        conversation: str | None = None,
        placement: Placement = "head",
        tenant: str | None = None,
        model: str | None = None,
        preamble: str | None = None,
        history: Iterable[Message] | None = None,
        order_locked: bool = False,
    ) -> ContextPlan:
        """Arrange one request's context. Every block is in the plan once, in full or as a reference.

        Owe it a `commit` once the model has seen the prompt, or an `abandon` if it has not.

        Args:
            blocks: In relevance order. A string is a block without an id. Of equal blocks the first decides on id,
                tokens and pin.
            conversation: Names one linear message history. Without it nothing is de-duplicated, unless `history` is
                given.
            placement: `"head"` if the context is rebuilt each turn in front of the history: it is ordered, never
                de-duplicated, and `conversation` and `history` are of no account. `"tail"` if it is appended to a
                history in which it stays: the first turn is ordered; later turns keep relevance order, and blocks
                that the history holds become references.
            tenant: Whose request. Nothing is shared between tenants.
            model: Nothing but labels of seen blocks is shared between models.
            preamble: The text in front of the context, or anything that names it: contexts behind different preambles
                share no prefix.
            history: With `"tail"`: the messages in front of the new context, as the model will see them. They decide
                what may be referred to, whatever was committed before; pass them wherever you can.
            order_locked: Keep the order, pins included: the blocks are chronological, or cited by position.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: `placement` is neither value above, or `conversation` is empty.
        """
        began = time.perf_counter()
        draft = self._draft(blocks, conversation, placement, tenant, model, preamble, history, order_locked)
        record = None
        if (key := draft.key) is not None:
            with self._asking_store():
                if draft.visible is None:
                    record = self._store.prepare(key, draft.plan_id, draft.proposed())
                else:  # the record no longer follows this conversation, so no later plan may trust it
                    self._store.forget(key)
        return self._told_of(self._arrange(draft, record), began)

    @contextmanager
    def planning(self, blocks: Iterable[ContextBlock | str], **options: Unpack[PlanOptions]) -> Iterator[ContextPlan]:
        """`plan`, then `commit` when the block ends, or `abandon` when an exception of any kind leaves it."""
        plan = self.plan(blocks, **options)
        try:
            yield plan
        except BaseException:
            self.abandon(plan)
            raise
        self.commit(plan)

    async def aplan(self, blocks: Iterable[ContextBlock | str], **options: Unpack[PlanOptions]) -> ContextPlan:
        """`plan`, for tasks."""
        began = time.perf_counter()
        draft = self._draft(blocks, **options)
        record = None
        if (key := draft.key) is not None:
            with self._asking_store():
                if draft.visible is None:
                    record = await self._awaited.aprepare(key, draft.plan_id, draft.proposed())
                else:
                    await self._awaited.aforget(key)
        return self._told_of(self._arrange(draft, record), began)

    @asynccontextmanager
    async def aplanning(
        self, blocks: Iterable[ContextBlock | str], **options: Unpack[PlanOptions]
    ) -> AsyncIterator[ContextPlan]:
        """`planning`, for tasks.

        Cancellation abandons the plan. If it comes while the plan is committed, the commit is taken back.
        """
        plan = await self.aplan(blocks, **options)
        try:
            yield plan
        except BaseException:
            await self.aabandon(plan)
            raise
        await self.acommit(plan)

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
    ) -> BatchPlan:
        """Arrange requests that are all known before the first runs: the blocks of each, and which comes after which.

        Starts from what the engine is predicted to hold, and changes nothing for later plans until requests of the
        batch are committed, by `BatchPlan.run` or one by one. Each owes that as if `plan` had made it. Deterministic
        unless a time budget is given. Other calls go on meanwhile.

        Args:
            requests: `BatchRequest`s, or a mapping from ids to contexts.
            planner: `"merge"` plans on what is really saved; `"context-index"` as ContextPilot does (extra `batch`);
                `"frequency"` puts the blocks first that most requests hold; `"relevance"` leaves every request as it is
                and only orders the requests; `"auto"` is `"merge"`, unless `"relevance"` saves as much. Or a
                `warmprefix.batch.BatchPlanner` of your own.
            capacity_tokens: Tokens of context that the engine's prefix cache can hold; None for no bound.
            model: The one that all requests are for, as for `plan`.
            preamble: The text in front of every context, as for `plan`; `BatchPlan.run` sends it as system message.
            time_budget: Seconds that `"merge"` may search on for better plans, after what it does at least; None for
                as much as usually pays.
            device: Where distances and overlaps are computed: on the CPU, on a CUDA device (extra `gpu`), or there if
                it is there and pays.
            progress: Is told the name of the stage, how many of its steps are done, and how many it has.

        Raises:
            MissingExtraError: The planner or the device needs what is not installed.
            TypeError: An argument has another type than the above.
            ValueError: Two requests have one id, which is named; another planner or device; a bound below 1; a
                negative budget; `"context-index"` is asked for more requests than it can hold; or a planner of your
                own leaves out a context or a block, or gives one twice.
        """
        from warmprefix.batch.session import as_requests, device_for, planners_for

        started = time.perf_counter()
        check_count("capacity_tokens", capacity_tokens, optional=True)
        _check_names(model=model, preamble=preamble)
        listed = as_requests(requests)
        blocks = sum(len(request.blocks) for request in listed)
        planners = planners_for(planner, blocks, time_budget, device)
        greatest = max(Counter(request.tenant for request in listed).values(), default=0)
        computed_on = device_for(planner, greatest, device)
        told = no_progress if progress is None else progress
        plan = self._plan_requests(listed, planners, capacity_tokens, model, preamble, told, quick=False)
        named = planner if isinstance(planner, str) else type(planner).__name__
        return replace(plan, planner=named, device=computed_on, seconds=time.perf_counter() - started)

    async def aplan_batch(
        self, requests: Requests, planner: str | BatchPlanner = "auto", **options: Unpack[BatchOptions]
    ) -> BatchPlan:
        """`plan_batch` in a thread of its own, for tasks."""
        import asyncio  # it takes long to import, and who calls this has it

        return await asyncio.to_thread(self.plan_batch, requests, planner, **options)

    def plan_window(self, requests: Requests, *, model: str | None = None, preamble: str | None = None) -> BatchPlan:
        """Arrange the requests in flight, some 10 to 200 of them, within milliseconds; O(n * n) for n.

        As `plan_batch`, but merging is all that is tried, and the bound is one that is quick to tell. What is no window
        any more is planned as a batch is, in seconds, not in O(n * n).
        """
        from warmprefix.batch.merge import MergePlanner
        from warmprefix.batch.session import as_requests
        from warmprefix.batch.window import MOST_REQUESTS, WindowPlanner

        started = time.perf_counter()
        _check_names(model=model, preamble=preamble)
        listed = as_requests(requests)
        planner = WindowPlanner() if len(listed) <= MOST_REQUESTS else MergePlanner(seconds_per_block=0)
        plan = self._plan_requests(listed, [planner], None, model, preamble, no_progress, quick=True)
        return replace(plan, planner="window", seconds=time.perf_counter() - started)

    # -- learning ----------------------------------------------------------------------------------------------

    def commit(
        self, plan: ContextPlan, cached_tokens: int | None = None, *, report: EngineReport | None = None
    ) -> bool:
        """The model saw the plan's prompt: learn its order, and count its blocks as seen by the conversation.

        To a conversation a commit also says that the prompt is now part of its history. Abandon a plan whose answer
        you throw away, unless you show `plan` the history.

        Args:
            plan: One of this planner's.
            cached_tokens: What the engine reported, as `usage.prompt_tokens_details.cached_tokens`.
            report: All that is known of the answer, in place of `cached_tokens`.

        Returns:
            Whether all of that was recorded. It is not, and does no harm, if the plan was committed or abandoned
            before, or came too late, or if another plan of its conversation was committed since it was made.

        Raises:
            TypeError: An argument has another type than the above, or both a count and a report are given.
            ValueError: A count or a duration is negative.
        """
        began = time.perf_counter()
        heard = _as_report(cached_tokens, report)
        in_time = self._close_committed(plan, heard)
        recorded = False
        if plan.tracked:
            # The store must know of a late one too: if the model saw it, plans made beside it may not be in the
            # history.
            with self._asking_store():
                recorded = self._store.commit(_conversation(plan), _id_in_store(plan), _sent(plan))
                self._count_conflict(plan, in_time, recorded)
        return self._told_of_commit(plan, heard, in_time and (recorded or not plan.tracked), began)

    def report(self, plan: ContextPlan, report: EngineReport) -> None:
        """What the engine said of an answer to a plan that somebody else commits, or has committed.

        Frameworks' plugins commit their own plans, and do not see what the engine reports. O(blocks).

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: A count or a duration is negative.
        """
        _check_plan(plan)
        heard = _as_report(None, report)
        is_fed = self._is_fed(plan, heard)
        with self._lock:
            self._hear(plan, heard, is_fed)
            state = self._scopes.get(plan.scope)
            if state is not None and plan.opens_prompt:  # since this very prompt it is there again
                state.tree.mark_resident(_keys(plan))
        self._remember(plan, heard)

    def abandon(self, plan: ContextPlan) -> bool:
        """The model did not see the plan's prompt: nothing is remembered of it. True if the plan was open."""
        if not self._close_abandoned(plan):
            return False
        if plan.tracked:
            with self._asking_store():
                self._store.abandon(_conversation(plan), _id_in_store(plan))
        return True

    def withdraw(self, plan: ContextPlan) -> None:
        """Take a commit back whose answer the application does not keep: a call cancelled while it commits, say.

        Nothing counts as seen by the plan's conversation until the next commit. What was learned of the engine stays.
        It never waits for a shared store, and does nothing for a plan without a conversation.
        """
        _check_plan(plan)
        if not plan.tracked:
            return
        with self._lock:
            self._counts["withdrawn_commits"] += 1
        if isinstance(self._store, GuardedStore):
            self._store.forget_soon(_conversation(plan))
        else:
            self._store.forget(_conversation(plan))

    async def acommit(
        self, plan: ContextPlan, cached_tokens: int | None = None, *, report: EngineReport | None = None
    ) -> bool:
        """`commit`, for tasks."""
        began = time.perf_counter()
        heard = _as_report(cached_tokens, report)
        in_time = self._close_committed(plan, heard)
        recorded = False
        if plan.tracked:
            with self._asking_store():
                recorded = await self._awaited.acommit(_conversation(plan), _id_in_store(plan), _sent(plan))
                self._count_conflict(plan, in_time, recorded)
        return self._told_of_commit(plan, heard, in_time and (recorded or not plan.tracked), began)

    async def aabandon(self, plan: ContextPlan) -> bool:
        """`abandon`, for tasks."""
        if not self._close_abandoned(plan):
            return False
        if plan.tracked:
            with self._asking_store():
                await self._awaited.aabandon(_conversation(plan), _id_in_store(plan))
        return True

    def forget(self, conversation: str, *, tenant: str | None = None) -> None:
        """Tell that a conversation's history was cut, edited, summarised or branched: none of its blocks is seen now.

        Needed only where `plan` is not shown the `history`. Plans in flight will count as unseen.

        Raises:
            StoreError: The store failed. It is told again as soon as it answers. Until then this planner does not trust
                the record; another one may.
        """
        _check_names(conversation=conversation, tenant=tenant)
        self._store.forget(Conversation(tenant, conversation))

    async def aforget(self, conversation: str, *, tenant: str | None = None) -> None:
        """`forget`, for tasks."""
        _check_names(conversation=conversation, tenant=tenant)
        await self._awaited.aforget(Conversation(tenant, conversation))

    def reset(self) -> None:
        """Forget everything: scopes, labels, open plans, counts, and all conversations of the store, whoever shares it.

        Raises:
            StoreError: The store failed, so conversations may still be remembered; all else is forgotten.
        """
        with self._lock:
            for scope in self._scopes:
                self._sharing.unfollow(scope)
            self._scopes.clear()
            self._open.clear()
            self._open_batches.clear()
            self._counts.clear()
            self._errors.clear()
        self._plan_latency.reset()
        self._store_latency.reset()
        self._store.clear()

    def close(self) -> None:
        """End the threads that speak with a shared store or an engine, and the connections that `from_url` made.

        What could not be told the store yet gets one more try. A planner that shares nothing and has no feed has
        nothing to close. Idempotent.
        """
        self._feed.close()
        self._sharing.close()
        for resource in self._resources:
            resource.close()

    async def aclose(self) -> None:
        """`close`, for tasks, and the connections of this event loop."""
        self.close()
        for resource in self._resources:
            if isinstance(resource, _AsyncClosable):
                await resource.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def catch_up(
        self,
        *,
        tenant: str | None = None,
        model: str | None = None,
        preamble: str | None = None,
        timeout: float = 5.0,
    ) -> bool:
        """Learn what other workers served lately in a scope; for a worker's start, before it takes requests.

        Without it a worker learns that in the background, from its first request in the scope on.

        Args:
            tenant: As for `plan`.
            model: As for `plan`.
            preamble: As for `plan`.
            timeout: Seconds to wait at most.

        Returns:
            Whether all of it was learned. True at once if nothing is shared.
        """
        scope = self._followed(tenant, model, preamble)
        deadline = time.monotonic() + timeout
        while not self._sharing.has_caught_up(scope):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_CATCHING_UP)
        return True

    async def acatch_up(
        self,
        *,
        tenant: str | None = None,
        model: str | None = None,
        preamble: str | None = None,
        timeout: float = 5.0,
    ) -> bool:
        """`catch_up`, for tasks."""
        import asyncio  # it takes long to import, and who calls this has it

        scope = self._followed(tenant, model, preamble)
        deadline = time.monotonic() + timeout
        while not self._sharing.has_caught_up(scope):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_CATCHING_UP)
        return True

    def _followed(self, tenant: str | None, model: str | None, preamble: str | None) -> Scope:
        _check_names(tenant=tenant, model=model, preamble=preamble)
        scope = _scope(tenant, model, preamble)
        with self._lock:
            self._state(scope)
        return scope

    # -- what the engine holds ---------------------------------------------------------------------------------

    def residency_changed(self, scope: Scope, keys: Sequence[bytes], resident_blocks: int) -> None:
        """For a feed: of the blocks `keys`, which follow the preamble in this order, the first so many are resident.

        O(blocks, and nodes below what is gone).
        """
        with self._lock:
            state = self._scopes.get(scope)
            if state is not None:
                state.tree.mark_resident(keys[:resident_blocks])
                state.tree.mark_stale(keys, resident_blocks)

    def warm(
        self,
        client: Any,
        preamble: str | None,
        blocks: Iterable[ContextBlock | str] | None = None,
        *,
        model: str,
        tenant: str | None = None,
        max_paths: int = 8,
    ) -> int:
        """Have an engine that was just started compute what most requests begin with, before they come.

        Sends the preamble alone, and then the hottest paths of its scope, as far as their blocks are given: texts are
        not retained. Contexts are taken to open the user's message, behind the preamble as system message. To be
        called off the way of requests. (CacheWeaver's optional warm-up.)

        Args:
            client: An `openai.OpenAI`, or what has its `chat.completions.create`.
            preamble: As for `plan`.
            blocks: Whatever may be on these paths, such as the documents asked for most lately.
            model: As for `plan`; the engine knows it by that name. Paths are those of plans made with this model,
                preamble and tenant.
            tenant: As for `plan`.
            max_paths: Most paths sent.

        Returns:
            The prompts that were sent.

        Raises:
            TypeError: An argument has another type than the above.
            Exception: Whatever the client raises; what was sent before counts as resident.
        """
        sent = 0
        for path, request in self._warming(preamble, blocks, model, tenant, max_paths):
            client.chat.completions.create(**request)
            self._warmed(_scope(tenant, model, preamble), path)
            sent += 1
        return sent

    async def awarm(
        self,
        client: Any,
        preamble: str | None,
        blocks: Iterable[ContextBlock | str] | None = None,
        *,
        model: str,
        tenant: str | None = None,
        max_paths: int = 8,
    ) -> int:
        """`warm`, for tasks, with an `openai.AsyncOpenAI`."""
        sent = 0
        for path, request in self._warming(preamble, blocks, model, tenant, max_paths):
            await client.chat.completions.create(**request)
            self._warmed(_scope(tenant, model, preamble), path)
            sent += 1
        return sent

    def _warming(
        self,
        preamble: str | None,
        blocks: Iterable[ContextBlock | str] | None,
        model: str,
        tenant: str | None,
        max_paths: int,
    ) -> Iterator[tuple[list[ContextBlock], dict[str, Any]]]:
        """Paths to warm, none at first, and the request for each."""
        _check_names(tenant=tenant, model=model, preamble=preamble)
        given = as_blocks(() if blocks is None else blocks)
        with self._lock:
            state = self._state(_scope(tenant, model, preamble))
            paths = paths_to_warm(state.tree, given, max_paths)
            labelled = [list(zip(path, state.labels.labels(path), strict=True)) for path in paths]
        for path in labelled:
            names = [label for _, label in path]
            context = "\n\n".join([self._templates.block(label, block.text, names) for block, label in path])
            yield [block for block, _ in path], warming_request(model, preamble, context, state.cache_salt)

    def _warmed(self, scope: Scope, path: Sequence[ContextBlock]) -> None:
        with self._lock:
            tree = self._state(scope).tree
            tree.insert([block.fingerprint for block in path], [block.tokens for block in path])

    def stats(self) -> PlannerStats:
        """Counts since the start or the last reset."""
        shared = self._sharing.stats()
        outbox = self._store.outbox if isinstance(self._store, GuardedStore) else None
        feed = self._feed_stats()
        with self._lock:
            mean, p95 = self._errors.mean_and_p95()
            return PlannerStats(
                **self._counts,
                plan_latency=self._plan_latency.snapshot(),
                store_latency=self._store_latency.snapshot(),
                disabled_scopes=sum(state.feedback.evidence.is_off for state in self._scopes.values()),
                prediction_error_mean=mean,
                prediction_error_p95=p95,
                residency_confidence=self._errors.agreement(),
                feed=feed,
                published_orders=shared.published,
                sharing_errors=shared.dropped + shared.malformed + shared.errors,
                untold_notices=0 if outbox is None else len(outbox),
                lost_notices=0 if outbox is None else outbox.dropped,
                open_plans=len(self._open) + sum(sum(batch.is_open) for batch in self._open_batches.values()),
                scopes=len(self._scopes),
                tree_nodes=sum(state.tree.nodes for state in self._scopes.values()),
            )

    # -- batches -----------------------------------------------------------------------------------------------

    def _plan_requests(
        self,
        requests: Sequence[BatchRequest],
        planners: Sequence[BatchPlanner],
        capacity_tokens: int | None,
        model: str | None,
        preamble: str | None,
        progress: Progress,
        *,
        quick: bool,
    ) -> BatchPlan:
        """Plan each scope's requests for themselves, and count them as planned."""
        from warmprefix.batch import BatchPlan, SharedWording, bound_of_all, plan_scope, planned_requests

        with self._lock:
            self._planned += 1
            batch_id = f"{self._instance}-{os.getpid()}-{self._planned}"
        scoped: dict[Scope, list[BatchRequest]] = {}
        preamble_digest = None if preamble is None else fingerprint(preamble)
        blank = 0
        for request in requests:
            blank += sum([block.is_blank for block in request.blocks])
            scoped.setdefault(Scope(request.tenant, model, preamble_digest), []).append(request)
            self._record(distinct_blocks(request.blocks)[0], None, request.tenant, model, preamble)
        planned: list[PlannedRequest] = []
        scopes: list[Scope] = []
        bounds: list[Bound] = []
        total_tokens = 0
        for scope, own in scoped.items():
            distinct: dict[bytes, ContextBlock] = {}
            for request in own:
                for block in request.blocks:
                    if not block.is_blank:
                        distinct.setdefault(block.fingerprint, block)
            with self._lock:
                state = self._state(scope)
                labels = dict(zip(distinct, state.labels.labels(list(distinct.values())), strict=True))
                # A window looks at the tree that others are changing; for a batch that would take too long to be true.
                tree = _SharedTree(state.tree, self._lock) if quick else state.tree.copy()
            plan = plan_scope(own, planners, tree, capacity_tokens, progress, quick=quick)
            wording = SharedWording(scope, labels, self._templates, preamble, state.cache_salt)
            planned += planned_requests(own, plan, wording, batch_id, len(planned))
            scopes += [scope] * len(own)
            bounds.append(plan.bound)
            total_tokens += plan.total_tokens
        with self._lock:
            self._open_batch(batch_id, scopes)
            self._count_batch(planned, total_tokens)
            self._counts["blank_blocks"] += blank
        bound = bound_of_all(bounds)
        places = {request.id: place for place, request in enumerate(planned)}
        return BatchPlan(
            id=batch_id,
            requests=tuple(planned),
            positions={request.id: places[request.id] for request in requests},
            planner="",
            device="cpu",
            capacity_tokens=capacity_tokens,
            saved_tokens=sum([request.saved_tokens for request in planned]),
            total_tokens=total_tokens,
            upper_bound=bound.tokens,
            bound=bound.kind,
            seconds=0.0,
            owner=self,
        )

    def _open_batch(self, batch_id: str, scopes: Sequence[Scope]) -> None:
        if scopes:
            self._open_batches[batch_id] = _OpenBatch(bytearray(b"\1" * len(scopes)), scopes)
        held = sum(len(batch.scopes) for batch in self._open_batches.values())
        while held > self._max_open_plans and len(self._open_batches) > 1:
            held -= len(self._open_batches.popitem(last=False)[1].scopes)

    def _count_batch(self, planned: Sequence[PlannedRequest], total_tokens: int) -> None:
        counts = self._counts
        counts["plans"] += len(planned)
        counts["planned_tokens"] += total_tokens
        counts["resident_tokens"] += sum([request.saved_tokens for request in planned])
        counts["reordered_plans"] += sum([list(request.order) != sorted(request.order) for request in planned])

    # -- steps that the two kinds of every call share ----------------------------------------------------------

    def _draft(
        self,
        blocks: Iterable[ContextBlock | str],
        conversation: str | None = None,
        placement: Placement = "head",
        tenant: str | None = None,
        model: str | None = None,
        preamble: str | None = None,
        history: Iterable[Message] | None = None,
        order_locked: bool = False,
    ) -> Draft:
        listed = as_blocks(blocks)
        distinct, positions = evidence_blocks(listed)
        _check_names(conversation=conversation, tenant=tenant, model=model, preamble=preamble)
        if conversation == "":
            raise ValueError("conversation must not be empty; give None for a request outside any conversation")
        if placement not in _PLACEMENTS:
            raise ValueError(f"placement must be 'head' or 'tail', got {placement!r}")
        visible = None if history is None else VisibleHistory(history)
        scope = _scope(tenant, model, preamble)
        blank = len(listed) - sum(map(len, positions)) if len(distinct) < len(listed) else 0
        self._record(distinct_blocks(listed)[0] if blank else distinct, conversation, tenant, model, preamble)
        is_unshown = placement == "tail" and visible is None
        imitable = shown_labels(distinct) if is_unshown else ()
        with self._lock:
            state = self._state(scope)
            labels = lasting_labels(distinct) if is_unshown else state.labels.labels(distinct)
            if blank:
                self._counts["blank_blocks"] += blank
            self._planned += 1
            plan_id = f"{self._instance}-{os.getpid()}-{self._planned}"  # a forked planner has the same `_instance`
        return Draft(
            plan_id, scope, placement, conversation, distinct, positions, labels, visible, order_locked, imitable
        )

    def _arrange(self, draft: Draft, record: Prepared | None) -> ContextPlan:
        past = draft.past(record, self._templates)
        distinct, positions, resolved, templates = draft.blocks, draft.positions, past.resolved, self._templates
        with self._lock:
            state = self._state(draft.scope)
            is_left_alone = past.opens_prompt and state.feedback.evidence.leaves_alone()
            order: Sequence[int] = range(len(distinct))
            if not draft.order_locked:
                order = self._order(state, distinct, past.opens_prompt and not is_left_alone)
            names = self._names(draft, past, state.labels)
            planned = tuple([PlannedBlock(distinct[i], positions[i], *resolved[i], templates, names) for i in order])
            plan = ContextPlan(
                id=draft.plan_id,
                scope=draft.scope,
                conversation=draft.conversation,
                placement=draft.placement,
                turn=past.turn,
                blocks=planned,
                resident_tokens=_resident_tokens(state.tree, planned) if past.opens_prompt and not is_left_alone else 0,
                cache_salt=state.cache_salt,
                tracked=past.tracked,
                opens_prompt=past.opens_prompt,
            )
            self._open[plan.id] = plan.scope
            if len(self._open) > self._max_open_plans:
                self._open.popitem(last=False)
            self._count_plan(plan)
            self._counts["disabled_plans"] += is_left_alone
            if record is not None:
                self._counts["contested_blocks"] += len(record.contested)
        return plan

    def _names(self, draft: Draft, past: Past, registry: LabelRegistry) -> frozenset[str]:
        """Return the labels that a line of this prompt must not imitate; the lock is held."""
        own = [label for label, _ in past.resolved]
        if draft.visible is None or draft.placement == "head":
            return frozenset([*own, *past.names])
        names = draft.visible.labels(self._templates, registry.is_text) | set(own)
        in_full = [(block, label) for block, (label, seen) in zip(draft.blocks, past.resolved, strict=True) if not seen]
        lines = [found for block, _ in in_full for found in header_lines(block.text)]
        # Once it is part of the history, such a line must not pass for the first line of a block.
        registry.add_opened([line for label, line in lines if label not in names])
        registry.discard_opened(f"[{label}] {block.text}".partition("\n")[0] for block, label in in_full)
        return frozenset(names)

    def _close_committed(self, plan: ContextPlan, report: EngineReport) -> bool:
        """Learn from a plan that was open; True if it was."""
        _check_plan(plan)
        is_fed = self._is_fed(plan, report)
        with self._lock:
            in_time = self._close(plan)
            self._counts["commits" if in_time else "late_commits"] += 1
            if in_time:
                self._hear(plan, report, is_fed)
                if plan.opens_prompt:
                    self._learn(plan)
        if in_time:
            self._remember(plan, report)
        return in_time

    def _close_abandoned(self, plan: ContextPlan) -> bool:
        _check_plan(plan)
        with self._lock:
            was_open = self._close(plan)
            self._counts["abandons"] += was_open
        if was_open:
            try:
                self._observer.abandoned(plan)
            except Exception:
                self._observer_failed()
        return was_open

    def _count_conflict(self, plan: ContextPlan, in_time: bool, recorded: bool) -> None:
        if in_time and not recorded and plan.turn is not None:
            with self._lock:
                self._counts["conflicts"] += 1

    @contextmanager
    def _asking_store(self) -> Iterator[None]:
        """What may fail inside, and takes time: the request goes on."""
        began = time.perf_counter()
        try:
            yield
        except Exception:
            self._store_failed()
        finally:
            self._store_latency.observe(time.perf_counter() - began)

    def _store_failed(self) -> None:
        """The one place where a failing store degrades to nothing de-duplicated."""
        with self._lock:
            self._counts["store_errors"] += 1
            first = self._counts["store_errors"] == 1
        log_failure(_log, "seen-block store failed", first=first)

    def _record(
        self,
        blocks: Sequence[ContextBlock],
        conversation: str | None,
        tenant: str | None,
        model: str | None,
        preamble: str | None,
    ) -> None:
        try:
            self._recorder.record(
                tuple(blocks), conversation=conversation, tenant=tenant, model=model, preamble=preamble
            )
        except Exception:
            self._recorder_failed()

    def _recorder_failed(self) -> None:
        """The one place where a failing recorder degrades to a request that is not recorded."""
        with self._lock:
            self._counts["recorder_errors"] += 1
            first = self._counts["recorder_errors"] == 1
        log_failure(_log, "request recorder failed", first=first)

    def _told_of(self, plan: ContextPlan, began: float) -> ContextPlan:
        seconds = time.perf_counter() - began
        self._plan_latency.observe(seconds)
        try:
            self._observer.planned(plan, seconds)
        except Exception:
            self._observer_failed()
        return plan

    def _told_of_commit(self, plan: ContextPlan, report: EngineReport, recorded: bool, began: float) -> bool:
        try:
            self._observer.committed(plan, report, recorded, time.perf_counter() - began)
        except Exception:
            self._observer_failed()
        return recorded

    def _observer_failed(self) -> None:
        """The one place where a failing observer degrades to one that did not look."""
        with self._lock:
            self._counts["observer_errors"] += 1
            first = self._counts["observer_errors"] == 1
        log_failure(_log, "observer failed", first=first)

    def _remember(self, plan: ContextPlan, report: EngineReport) -> None:
        """Have the feed find the plan's blocks among the engine's KV blocks."""
        if report.prompt_token_ids is None or not plan.opens_prompt or not plan.blocks:
            return
        paragraphs = tuple([planned.render() for planned in plan.blocks])
        served = ServedPrompt(plan.scope, plan.cache_salt, _keys(plan), paragraphs, report.prompt_token_ids)
        try:
            self._feed.remember(served)
        except Exception:
            self._feed_failed()

    def _is_fed(self, plan: ContextPlan, report: EngineReport) -> bool:
        """Whether the feed knows better than a report. Not to be asked under the lock: the feed's thread takes that."""
        if report.prompt_token_ids is None:  # so it is told nothing of this prompt
            return False
        try:
            return self._feed.knows(plan.cache_salt)
        except Exception:
            self._feed_failed()
            return False

    def _feed_stats(self) -> FeedStats:
        try:
            return self._feed.stats()
        except Exception:
            self._feed_failed()
            return FeedStats()

    def _feed_failed(self) -> None:
        """The one place where a failing feed degrades to none."""
        with self._lock:
            self._counts["feed_errors"] += 1
            first = self._counts["feed_errors"] == 1
        log_failure(_log, "residency feed failed", first=first)

    # -- what the engine says of an answer; the lock is held ---------------------------------------------------

    def _hear(self, plan: ContextPlan, report: EngineReport, is_fed: bool) -> None:
        counts = self._counts
        if report.cached_tokens is not None:
            counts["reports"] += 1
            counts["reported_cached_tokens"] += report.cached_tokens
        state = self._scopes.get(plan.scope)
        if state is None or not plan.opens_prompt:
            return
        heard = state.feedback.hear(plan, report)
        if heard.comparison is not None:
            self._errors.add(heard.comparison)
            counts["compared_reports"] += 1
            counts["predicted_cached_tokens"] += round(heard.comparison.predicted)
            counts["compared_cached_tokens"] += heard.comparison.actual
            counts["compared_prompt_tokens"] += report.prompt_tokens or 0
        if heard.has_turned:
            now = (
                "left as they are, for it evidently caches nothing"
                if state.feedback.evidence.is_off
                else "ordered again"
            )
            _log.warning("requests of one scope, for model %r, are %s", plan.scope.model, now)
        if heard.resident_blocks is not None and not is_fed:
            counts["stale_paths"] += 1
            state.tree.mark_stale(_keys(plan), heard.resident_blocks)

    # -- the order; the lock is held ---------------------------------------------------------------------------

    def _order(self, state: _ScopeState, blocks: Sequence[ContextBlock], opens_prompt: bool) -> Sequence[int]:
        starts = [i for i, block in enumerate(blocks) if block.pinned == "start"]
        ends = [i for i, block in enumerate(blocks) if block.pinned == "end"]
        if not starts and not ends:
            return self._policy_order(state, blocks, ()) if opens_prompt else range(len(blocks))
        middle = [i for i, block in enumerate(blocks) if block.pinned is None]
        if opens_prompt:
            after = [blocks[i].fingerprint for i in starts]
            middle = [middle[i] for i in self._policy_order(state, [blocks[i] for i in middle], after)]
        return [*starts, *middle, *ends]

    def _policy_order(
        self, state: _ScopeState, blocks: Sequence[ContextBlock], after: Sequence[bytes]
    ) -> Sequence[int]:
        try:
            order = [operator.index(i) for i in state.policy.order(blocks, PrefixView(state.tree, after))]
            if sorted(order) != list(range(len(blocks))):
                raise ValueError(f"ordering policy must return a permutation of range({len(blocks)}), got {order}")
        except Exception:
            self._policy_failed()
            return range(len(blocks))
        return order

    def _learn(self, plan: ContextPlan) -> None:
        if not plan.blocks:
            return
        order = LearnedOrder(
            [planned.block.fingerprint for planned in plan.blocks],
            [planned.block.tokens for planned in plan.blocks],
            [planned.rank for planned in plan.blocks],
        )
        self._learn_order(plan.scope, self._state(plan.scope), order)
        self._sharing.publish(plan.scope, order)

    def _learn_order(self, scope: Scope, state: _ScopeState, order: LearnedOrder) -> None:
        keys, tokens, ranks = order
        try:
            resident = state.tree.insert(keys, tokens).blocks
            try:
                state.policy.observe(
                    [
                        ServedBlock(key, length, rank, i < resident)
                        for i, (key, length, rank) in enumerate(zip(keys, tokens, ranks, strict=True))
                    ]
                )
            except Exception:
                self._policy_failed()
        except BaseException:  # such as KeyboardInterrupt: a scope that has half learned is not to be trusted
            self._drop(scope)
            raise

    def _learn_from_others(self, scope: Scope, orders: Sequence[LearnedOrder]) -> None:
        for order in orders:
            with self._lock:  # anew for each, for requests wait for it
                state = self._scopes.get(scope)
                if state is None:
                    return
                self._learn_order(scope, state, order)
                self._counts["shared_orders"] += 1

    def _policy_failed(self) -> None:
        """The one place where a failing policy degrades to relevance order."""
        self._counts["policy_errors"] += 1
        first = self._counts["policy_errors"] == 1
        log_failure(_log, "ordering policy failed", first=first)

    def _state(self, scope: Scope) -> _ScopeState:
        state = self._scopes.get(scope)
        if state is not None:
            self._scopes.move_to_end(scope)
            return state
        tree = PrefixTree[bytes](self._capacity_tokens, self._max_nodes)
        salt = None if scope.tenant is None else _cache_salt(self._salt_key, scope.tenant)
        state = self._scopes[scope] = _ScopeState(
            tree,
            self._new_policy(),
            LabelRegistry(self._max_labels),
            salt,
            ScopeFeedback(self._patience),
        )
        while len(self._scopes) > self._max_scopes:
            self._drop(next(iter(self._scopes)))
        self._sharing.follow(scope, _Learner(self, scope))
        return state

    def _drop(self, scope: Scope) -> None:
        if self._scopes.pop(scope, None) is not None:
            self._sharing.unfollow(scope)

    def _close(self, plan: ContextPlan) -> bool:
        if self._open.get(plan.id) == plan.scope:  # or it is another tenant's, under an id that it has no right to
            del self._open[plan.id]
            return True
        batch_id, _, number = plan.id.rpartition(".")
        batch = self._open_batches.get(batch_id, _OpenBatch(bytearray(), ()))
        try:
            place = int(number)
        except ValueError:  # an id that no planner made
            return False
        if str(place) != number or not 0 <= place < len(batch.scopes) or not batch.is_open[place]:
            return False
        if batch.scopes[place] != plan.scope:
            return False
        batch.is_open[place] = False
        if batch.is_open.rfind(1) < 0:
            del self._open_batches[batch_id]
        return True

    def _count_plan(self, plan: ContextPlan) -> None:
        counts = self._counts
        counts["plans"] += 1
        counts["planned_tokens"] += plan.total_tokens
        counts["resident_tokens"] += plan.resident_tokens
        counts["reordered_plans"] += plan.reordered
        if not plan.opens_prompt:  # only then can there be references
            counts["references"] += len(plan.references)
            counts["reference_tokens"] += plan.reference_tokens


class _ScopeState(NamedTuple):
    """What one scope has learned."""

    tree: PrefixTree[bytes]
    policy: OrderingPolicy
    labels: LabelRegistry
    cache_salt: str | None
    feedback: ScopeFeedback


class _OpenBatch(NamedTuple):
    """A batch's plans, in execution order: whether each is neither committed nor abandoned, and its scope."""

    is_open: bytearray
    scopes: Sequence[Scope]


class _SharedTree:
    """A scope's tree, to be looked at while others plan and commit."""

    def __init__(self, tree: PrefixTree[bytes], lock: threading.RLock) -> None:
        self._tree = tree
        self._lock = lock

    @property
    def resident_tokens(self) -> int:
        return self._tree.resident_tokens

    def match_prefix(self, keys: Sequence[bytes]) -> PrefixMatch:
        with self._lock:
            return self._tree.match_prefix(keys)

    def deepest_path(self, keys: Sequence[bytes], after: Sequence[bytes] = ()) -> list[int]:
        with self._lock:
            return self._tree.deepest_path(keys, after)

    def resident_paths(self) -> Iterator[tuple[list[bytes], list[int]]]:
        with self._lock:
            return iter(list(self._tree.resident_paths()))


class _Learner:
    """Hands others' orders to a planner, which it does not keep alive."""

    def __init__(self, planner: ContextPlanner, scope: Scope) -> None:
        self._planner = weakref.ref(planner)
        self._scope = scope

    def __call__(self, orders: Sequence[LearnedOrder]) -> None:
        planner = self._planner()
        if planner is not None:
            planner._learn_from_others(self._scope, orders)  # noqa: SLF001 - it is a part of it


class _Awaited:
    """A store in this process, for tasks: it answers at once."""

    def __init__(self, store: MemorySeenStore) -> None:
        self._store = store

    async def aprepare(self, conversation: Conversation, plan_id: str, proposed: Mapping[bytes, str]) -> Prepared:
        return self._store.prepare(conversation, plan_id, proposed)

    async def acommit(self, conversation: Conversation, plan_id: str, sent: Sequence[SeenBlock]) -> bool:
        return self._store.commit(conversation, plan_id, sent)

    async def aabandon(self, conversation: Conversation, plan_id: str) -> bool:
        return self._store.abandon(conversation, plan_id)

    async def aforget(self, conversation: Conversation) -> None:
        self._store.forget(conversation)


def _policy_factory(policy: str | Callable[[], OrderingPolicy]) -> Callable[[], OrderingPolicy]:
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(sorted(POLICIES))}, got {policy!r}")
        return POLICIES[policy]
    if not callable(policy):
        raise TypeError(
            f"policy must be a name or a callable that makes a policy for each scope, got {type(policy).__name__}"
        )
    return policy


def _check_names(**names: str | None) -> None:
    for name, value in names.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name} must be a str or None, got {type(value).__name__}")


def _scope(tenant: str | None, model: str | None, preamble: str | None) -> Scope:
    return Scope(tenant, model, None if preamble is None else fingerprint(preamble))


def _check_plan(plan: ContextPlan) -> None:
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan must be a ContextPlan, got {type(plan).__name__}")


def _resident_tokens(tree: PrefixTree[bytes], planned: Sequence[PlannedBlock]) -> int:
    return tree.match_prefix([block.block.fingerprint for block in planned]).tokens


def _keys(plan: ContextPlan) -> tuple[bytes, ...]:
    return tuple([planned.block.fingerprint for planned in plan.blocks])


def _as_report(cached_tokens: int | None, report: EngineReport | None) -> EngineReport:
    if report is not None and not isinstance(report, EngineReport):
        raise TypeError(f"report must be an EngineReport or None, got {type(report).__name__}")
    if report is not None and cached_tokens is not None:
        raise TypeError("give either cached_tokens or report, which has a field of that name")
    told = EngineReport(cached_tokens) if report is None else report
    for name, count in (("cached_tokens", told.cached_tokens), ("prompt_tokens", told.prompt_tokens)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
            raise TypeError(f"{name} must be an int or None, got {type(count).__name__}")
        if count is not None and count < 0:
            raise ValueError(f"{name} must be 0 or more, got {count}")
    if told.ttft is not None and not told.ttft >= 0:
        raise ValueError(f"ttft must be 0 or more, got {told.ttft}")
    if told.block_ends is not None and not all(isinstance(share, (int, float)) for share in told.block_ends):
        raise TypeError(f"block_ends must be numbers, got {told.block_ends!r}")
    return told


def _conversation(plan: ContextPlan) -> Conversation:
    assert plan.conversation is not None
    return Conversation(plan.scope.tenant, plan.conversation)


def _id_in_store(plan: ContextPlan) -> str:
    """The id under which the store knows of a plan; another one if it gave no answer when the plan was made."""
    return plan.id if plan.turn is not None else unheard(plan.id)


def _sent(plan: ContextPlan) -> list[SeenBlock]:
    turn = plan.turn or 0
    return [
        SeenBlock(planned.block.fingerprint, planned.label, turn, planned.block.tokens)
        for planned in plan.blocks
        if planned.reference is None
    ]


def _cache_salt(key: bytes, tenant: str) -> str:
    return hmac.new(key, tenant.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
