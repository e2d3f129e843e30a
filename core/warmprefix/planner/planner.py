"""`ContextPlanner`: the public methods, which delegate to the parts of a planner."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from warmprefix.annotate import Annotate, Templates
from warmprefix.batch.planners import BatchPlanner, Progress
from warmprefix.cache_profiles import CacheProfile
from warmprefix.errors import check_names
from warmprefix.forks import fork_safe_lock
from warmprefix.history import Message
from warmprefix.notes import NoteWriter
from warmprefix.order_sharing import OrderSharing
from warmprefix.ordering import OrderingPolicy
from warmprefix.plan import ContextPlan, Placement, Scope
from warmprefix.planner.batching import BatchOptions, BatchSession
from warmprefix.planner.config import PlannerBounds, PlannerConfig, PlannerOptions, counter_of, options_of_url
from warmprefix.planner.conversation import ConversationStore
from warmprefix.planner.feedback import PlanFeedback, as_report, check_plan
from warmprefix.planner.lifecycle import Blocks, PlannerLifecycle
from warmprefix.planner.metrics import PlannerMetrics
from warmprefix.planner.open_plans import OpenPlans
from warmprefix.planner.request import PlanOptions, QueuedRequest, RequestPlanner, let_others_announce
from warmprefix.planner.scope import ScopeOptions, ScopeRegistry
from warmprefix.planner.startup import Startup
from warmprefix.residency import EngineReport, FoundCheckpoints, NoFeed, ResidencyFeed
from warmprefix.stores import Conversation, SeenStore
from warmprefix.telemetry import PlannerObserver
from warmprefix.tokens import CheckedCounter
from warmprefix.traces import RequestRecorder

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from warmprefix.batch.plan import BatchPlan
    from warmprefix.batch.planners import Device
    from warmprefix.batch.session import Requests
    from warmprefix.planner.micro_batch import MicroBatch

__all__ = ["ContextPlanner"]


class ContextPlanner(PlannerLifecycle):
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

    def __init__(
        self,
        *,
        policy: str | Callable[[], OrderingPolicy] = "coaccess",
        capacity_tokens: int | Literal["auto"] | None = "auto",
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
        annotate: Annotate = "auto",
        annotations: Mapping[str, Annotate] = MappingProxyType({}),
        tokenizer: object = None,
        profile: CacheProfile | str = "auto",
    ) -> None:
        """Start with nothing learned.

        Args:
            policy: A name in `warmprefix.ordering.POLICIES`, or a class or function that makes a policy. It is called
                once per scope, so that scopes share no state.
            capacity_tokens: Tokens of context in the engine's prefix cache; None for no bound, `"auto"` to learn it.
            max_nodes: Most nodes of the prefix tree, per scope.
            max_scopes, max_labels: Most scopes, and most blocks with a label in each; the least recently used go. Of
                scopes and open plans, the tenant with the most loses one.
            max_open_plans: Most open plans besides the last batch's; beyond it the oldest can't be committed.
            store: Remembers conversations; in this process by default. Any other store is called through a
                `GuardedStore`: a request waits at most 20 ms per call, unless you pass one with another budget.
            sharing: Exchanges learned orders with other planners of the same engine; None for no exchange.
            templates: The wording of the annotations.
            salt_key: A secret that makes `ContextPlan.cache_salt` unguessable for people with the tenant's name.
            recorder: Receives every request as it came; by default, only if `warmprefix record` runs the application.
            feed: Follows what the engine holds, such as a `warmprefix.residency.KvEventFeed`. Without one, the planner
                predicts it.
            observer: Notified of every plan and its end.
            patience: After this many answers in a row without the predicted cached tokens, a scope keeps relevance
                order, except for one request in 16, until an answer has some. None for never.
            annotate: What prompts show of the relevance order; see docs/prompt-text.md. `"note"`: a note where the
                order changed. `"labels"`: a label in front of each block. `"both"`, `"none"`. `"auto"`: a note. With
                placement `"tail"` blocks always have labels, which references name.
            annotations: What `"auto"` stands for, by the `model` of a request, as `warmprefix quality report
                --annotations FILE` writes it; see docs/quality.md.
            tokenizer: Counts labels and notes, whose price an order must save: a function of a text, an object with
                `encode`, or a `warmprefix.residency.EngineTokenizer`, asked in the background. By default they are
                estimated.
            profile: Where the engine's cache can match: a `CacheProfile` or its name. `"auto"` learns it.

        Raises:
            ValueError: `policy`, `annotate`, `annotations` or `profile` has an unknown value, or a bound is below 1.
        """
        bounds = PlannerBounds(capacity_tokens, max_nodes, max_scopes, max_labels, max_open_plans, patience)
        config = PlannerConfig(
            policy,
            bounds,
            store,
            sharing,
            templates,
            salt_key,
            recorder,
            feed,
            observer,
            annotate,
            annotations,
            profile,
        )
        self._lock = fork_safe_lock(self._forget_learned)  # scope.py states its rules
        self._metrics = metrics = PlannerMetrics(self._lock, observer, recorder)
        counter = CheckedCounter(counter_of(tokenizer), lambda: metrics.count("tokenizer_errors"))
        wording = Templates() if templates is None else templates
        writer = NoteWriter(wording, annotate, counter, dict(config.annotations))
        self._scopes = ScopeRegistry(config, self._lock, self._metrics)
        self._open_plans = OpenPlans(max_open_plans)
        state = self._lock, self._scopes, self._open_plans, self._metrics
        self._requests = RequestPlanner(writer, *state)
        self._conversations = ConversationStore(store, self._metrics)
        self._feedback = PlanFeedback(NoFeed() if feed is None else feed, *state)
        self._batches = BatchSession(writer, *state)
        self._startup = Startup(writer, self._lock, self._scopes)
        self._feedback.feed.follow(self)

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
            options: As `ContextPlanner` takes them; they override the settings.

        Raises:
            MissingExtraError: The package's extra is not installed.
            ValueError: There is no URL or no package for it, it can't be used, or a setting is out of bounds.
        """
        return cls(**(options_of_url(url, settings) | options))

    def plan(
        self,
        blocks: Blocks,
        *,
        conversation: str | None = None,
        placement: Placement = "head",
        tenant: str | None = None,
        model: str | None = None,
        preamble: str | None = None,
        history: Iterable[Message] | None = None,
        order_locked: bool = False,
        annotate: Annotate | None = None,
    ) -> ContextPlan:
        """Arrange one request's context.

        Every block is in it once, in full or as a reference. Call `commit` once the model has seen the prompt, or
        `abandon` if it has not.

        Args:
            blocks: In relevance order. Equal blocks have the id, tokens and pin of the first.
            conversation: Names one linear message history. Without it or `history`, nothing is de-duplicated.
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

        Raises:
            ValueError: `placement` or `annotate` has another value, or `conversation` is empty.
        """
        began = time.perf_counter()
        draft = self._requests.draft(
            blocks, conversation, placement, tenant, model, preamble, history, order_locked, annotate
        )
        return self._requests.arrange(draft, self._conversations.prepare(draft), began)

    def queued(self, blocks: Blocks, **scope: Unpack[ScopeOptions]) -> QueuedRequest:
        """Announce a request that waits to be planned, so that requests before it leave a prefix it can share.

        Changes no order of arrival and delays nothing. `plan` with the same blocks and scope ends it. `aplan` announces
        its requests itself: tasks that are started together consider each other.

        Args:
            blocks: As for `plan`, with placement `"head"`.
            scope: `tenant`, `model` and `preamble`, as for `plan`.
        """
        return self._requests.queued(blocks, **scope)

    @contextmanager
    def planning(self, blocks: Blocks, **options: Unpack[PlanOptions]) -> Iterator[ContextPlan]:
        """Call `plan`, then `commit` at the end of the block, or `abandon` on an error."""
        plan = self.plan(blocks, **options)
        try:
            yield plan
        except BaseException:
            self.abandon(plan)
            raise
        self.commit(plan)

    async def aplan(self, blocks: Blocks, **options: Unpack[PlanOptions]) -> ContextPlan:
        """Plan as `plan` does, and await the store."""
        began = time.perf_counter()
        draft = self._requests.draft(blocks, **options)
        with self._requests.announced(draft):
            await let_others_announce()
            return self._requests.arrange(draft, await self._conversations.aprepare(draft), began)

    @asynccontextmanager
    async def aplanning(self, blocks: Blocks, **options: Unpack[PlanOptions]) -> AsyncIterator[ContextPlan]:
        """Do the same as `planning`. Cancellation abandons the plan or its commit."""
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
        """Arrange requests that are all available before the first one runs.

        Plans their execution order and the blocks of each, starting from what the engine is predicted to hold.
        `commit` or `abandon` each request, as after `plan`; `BatchRunner.run` does that. Deterministic unless a time
        budget is given. Other calls go on meanwhile.

        Args:
            requests: `BatchRequest`s, or a mapping from ids to contexts.
            planner: `"merge"` maximises the tokens actually saved; `"context-index"` plans as ContextPilot does
                (extra `batch`); `"frequency"` puts the blocks first that most requests hold; `"relevance"` only
                orders the requests; `"auto"` is `"merge"`, unless `"relevance"` saves as much. Or your own
                `warmprefix.batch.BatchPlanner`.
            capacity_tokens: Tokens of context that the engine's prefix cache can hold; None for no bound.
            model, preamble: As for `plan`, of all requests; `BatchRunner.run` sends the preamble as system message.
            time_budget: Seconds for which `"merge"` may improve its first plan; None for as long as usually pays.
            device: Where distances and overlaps are computed: `"cpu"`, `"cuda"` (extra `gpu`), or `"auto"` for CUDA
                where it is available and pays.
            progress: Called with the name of a stage, its steps done, and all its steps.

        Raises:
            MissingExtraError: The planner or the device needs a package that is not installed.
            ValueError: Two requests have one id; an unknown planner or device; a bound below 1; a negative budget;
                more requests than `"context-index"` can hold; or your own planner omits or repeats a context or block.
        """
        return self._batches.plan_batch(
            self, requests, planner, capacity_tokens, model, preamble, time_budget, device, progress
        )

    async def aplan_batch(
        self, requests: Requests, planner: str | BatchPlanner = "auto", **options: Unpack[BatchOptions]
    ) -> BatchPlan:
        """Call `plan_batch` in a thread of its own."""
        import asyncio  # importing it takes long, and the caller has it already

        return await asyncio.to_thread(self.plan_batch, requests, planner, **options)

    def plan_window(self, requests: Requests, *, model: str | None = None, preamble: str | None = None) -> BatchPlan:
        """Arrange 2 to 200 requests that wait now, within milliseconds, from what is learned; O(n * n)."""
        return self._batches.plan_window(self, requests, model, preamble)

    def micro_batch(self, max_delay: float = 0.005, max_requests: int = 16) -> MicroBatch:
        """Plan requests together that come within `max_delay` seconds; see `MicroBatch`."""
        from warmprefix.planner.micro_batch import MicroBatch  # imports asyncio

        return MicroBatch(self, self._metrics, max_delay, max_requests)

    def commit(
        self, plan: ContextPlan, cached_tokens: int | None = None, *, report: EngineReport | None = None
    ) -> bool:
        """Learn from a prompt that the model saw, and count its blocks as seen.

        If you throw the answer away, abandon the plan, unless you pass the history to `plan`.

        Args:
            cached_tokens: The engine's count, as `usage.prompt_tokens_details.cached_tokens`.
            report: All that the engine reported of the answer, instead of `cached_tokens`.

        Returns:
            True if all of that was recorded; False, which does no harm, if the plan was no longer open, or if another
            plan of its conversation was committed after this one was made.

        Raises:
            ValueError: A count or a duration is negative.
        """
        began = time.perf_counter()
        checked = as_report(cached_tokens, report)
        recorded = in_time = self._feedback.commit(plan, checked)
        if plan.tracked:
            recorded = self._conversations.commit(plan, in_time) and in_time
        self._metrics.notify_committed(plan, checked, recorded, began)
        return recorded

    async def acommit(
        self, plan: ContextPlan, cached_tokens: int | None = None, *, report: EngineReport | None = None
    ) -> bool:
        """Commit as `commit` does, and await the store."""
        began = time.perf_counter()
        checked = as_report(cached_tokens, report)
        recorded = in_time = self._feedback.commit(plan, checked)
        if plan.tracked:
            recorded = await self._conversations.acommit(plan, in_time) and in_time
        self._metrics.notify_committed(plan, checked, recorded, began)
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
        check_plan(plan)
        self._feedback.report(plan, as_report(None, report))

    def withdraw(self, plan: ContextPlan) -> None:
        """Take back a commit whose answer the application does not keep.

        The plan's conversation has seen nothing until its next commit; what was learned of the engine stays. Does not
        wait for a shared store; does nothing for a plan without a conversation.
        """
        check_plan(plan)
        if plan.tracked:
            self._conversations.withdraw(plan)

    def forget(self, conversation: str, *, tenant: str | None = None) -> None:
        """Count no block as seen any more, because the history was changed.

        Call it after a cut, an edit, a summary or a branch, if `plan` gets no `history`. Open plans count as unseen.

        Raises:
            StoreError: The store failed. It receives this once it answers again; until then only this planner forgets.
        """
        check_names(conversation=conversation, tenant=tenant)
        self._conversations.forget(Conversation(tenant, conversation))

    async def aforget(self, conversation: str, *, tenant: str | None = None) -> None:
        """Forget as `forget` does, and await the store."""
        check_names(conversation=conversation, tenant=tenant)
        await self._conversations.aforget(Conversation(tenant, conversation))

    def residency_changed(
        self,
        scope: Scope,
        keys: Sequence[bytes],
        resident_blocks: int,
        checkpoints: FoundCheckpoints | None = None,
    ) -> None:
        """Apply an event of a feed.

        The engine holds the first `resident_blocks` of `keys`. These are fingerprints of blocks that follow the
        preamble in this order. It continues only behind the `checkpoints`, unless they are None. The first ones show a
        profile that is recognised by itself that the engine keeps checkpoints. O(blocks + nodes below them).
        """
        self._feedback.apply_residency(scope, keys, resident_blocks, checkpoints)
