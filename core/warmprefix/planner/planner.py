"""`ContextPlanner`: the public methods, which delegate to the parts of a planner."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from warmprefix.annotate import Templates
from warmprefix.batch.planners import BatchPlanner, Progress
from warmprefix.blocks import ContextBlock
from warmprefix.dedup.history import Message
from warmprefix.errors import check_names
from warmprefix.order_sharing import OrderSharing
from warmprefix.ordering import OrderingPolicy
from warmprefix.plan import ContextPlan, Placement, Scope
from warmprefix.planner.batching import BatchOptions, BatchSession
from warmprefix.planner.config import PlannerBounds, PlannerConfig, PlannerOptions, connect_shared_parts
from warmprefix.planner.conversation import ConversationStore
from warmprefix.planner.feedback import PlanFeedback, as_report, check_plan
from warmprefix.planner.metrics import PlannerMetrics
from warmprefix.planner.open_plans import OpenPlans
from warmprefix.planner.request import PlanOptions, RequestPlanner
from warmprefix.planner.scope import ScopeOptions, ScopeRegistry, make_scope
from warmprefix.planner.startup import Startup, WarmOptions
from warmprefix.residency import EngineReport, NoFeed, ResidencyFeed
from warmprefix.stores import Conversation, SeenStore
from warmprefix.telemetry import PlannerObserver, PlannerStats
from warmprefix.traces import RequestRecorder

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from warmprefix.batch.device import Device
    from warmprefix.batch.plan import BatchPlan
    from warmprefix.batch.session import Requests
    from warmprefix.settings import SharedSettings

__all__ = ["ContextPlanner"]

Blocks: TypeAlias = "Iterable[ContextBlock | str]"
"""Context blocks in relevance order. A string is a block without an id."""


class ContextPlanner:
    """Arranges context so that the engine's prefix cache already holds much of it.

    A plan alone does not change later plans. Committing it does: the planner learns only from prompts that the model
    saw. One planner serves any number of threads and tasks. Its state is in memory and bounded. `aplan` is the async
    twin of `plan`, and so on. All methods raise `TypeError` for an argument of a wrong type.

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
    ) -> None:
        """Start with nothing learned.

        Args:
            policy: A name in `warmprefix.ordering.POLICIES`, or a class or function that makes a policy. It is called
                once per scope, so that scopes share no state.
            capacity_tokens: Tokens of context in the engine's prefix cache; None for no bound, `"auto"` to learn it.
            max_nodes: Most nodes of the prefix tree, per scope.
            max_scopes, max_labels: Most scopes, and most blocks with a label in each; the least recently used go.
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

        Raises:
            ValueError: `policy` is an unknown name, or a bound is below 1.
        """
        bounds = PlannerBounds(capacity_tokens, max_nodes, max_scopes, max_labels, max_open_plans, patience)
        config = PlannerConfig(policy, bounds, store, sharing, templates, salt_key, recorder, feed, observer)
        self._lock = threading.RLock()  # scope.py states its rules
        wording = Templates() if templates is None else templates
        self._metrics = PlannerMetrics(self._lock, observer, recorder)
        self._scopes = ScopeRegistry(config, self._lock, self._metrics)
        self._open_plans = OpenPlans(max_open_plans)
        state = self._lock, self._scopes, self._open_plans, self._metrics
        self._requests = RequestPlanner(wording, *state)
        self._conversations = ConversationStore(store, self._metrics)
        self._feedback = PlanFeedback(NoFeed() if feed is None else feed, *state)
        self._batches = BatchSession(wording, *state)
        self._startup = Startup(wording, self._lock, self._scopes)
        self._feedback.feed.follow(self)

    @classmethod
    def from_url(
        cls, url: str | None = None, *, settings: SharedSettings | None = None, **options: Unpack[PlannerOptions]
    ) -> Self:
        """Return a planner that shares its state with others through Redis or Valkey.

        It connects in the background. A server that is down or slow costs 20 ms, then requests go on without
        de-duplication. `close` it at the end, or use it as a context manager.

        Args:
            url: As `RedisSeenStore` takes it; by default the URL of the settings.
            settings: By default from the environment: `WARMPREFIX_REDIS_URL`, `WARMPREFIX_LEASE_TTL`, and so on.
            options: As `ContextPlanner` takes them; they override the settings.

        Raises:
            MissingExtraError: The extra `redis` is not installed.
            ValueError: There is no URL, or it can't be used, or a setting is out of bounds.
        """
        connection, store, sharing, defaults = connect_shared_parts(url, settings)
        planner = cls(store=store, sharing=sharing, **(defaults | options))
        planner._conversations.connection = connection
        return planner

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

        Raises:
            ValueError: `placement` has another value, or `conversation` is empty.
        """
        began = time.perf_counter()
        draft = self._requests.draft(blocks, conversation, placement, tenant, model, preamble, history, order_locked)
        return self._requests.arrange(draft, self._conversations.prepare(draft), began)

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
        began = time.perf_counter()
        draft = self._requests.draft(blocks, **options)
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
        """Arrange 10 to 200 requests in flight within milliseconds; O(n * n).

        As `plan_batch`, but it only tries merging, and computes a quick bound. More requests are planned as a batch.
        """
        return self._batches.plan_window(self, requests, model, preamble)

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

        Call it after a cut, an edit, a summary or a branch, if `plan` does not get the `history`. Plans in flight will
        count as unseen.

        Raises:
            StoreError: The store failed. It receives this once it answers again; until then only this planner forgets.
        """
        check_names(conversation=conversation, tenant=tenant)
        self._conversations.forget(Conversation(tenant, conversation))

    async def aforget(self, conversation: str, *, tenant: str | None = None) -> None:
        check_names(conversation=conversation, tenant=tenant)
        await self._conversations.aforget(Conversation(tenant, conversation))

    def residency_changed(self, scope: Scope, keys: Sequence[bytes], resident_blocks: int) -> None:
        """Apply an event of a feed.

        The engine holds the first `resident_blocks` of `keys`. These are fingerprints of blocks that follow the
        preamble in this order. O(blocks + nodes below them).
        """
        self._feedback.apply_residency(scope, keys, resident_blocks)

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
        sent = 0
        for request in self._startup.warming_requests(preamble, blocks, **options):
            client.chat.completions.create(**request)
            sent += 1
        return sent

    async def awarm(
        self, client: Any, preamble: str | None, blocks: Blocks | None = None, **options: Unpack[WarmOptions]
    ) -> int:
        sent = 0
        for request in self._startup.warming_requests(preamble, blocks, **options):
            await client.chat.completions.create(**request)
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
        with self._lock:
            self._scopes.clear()
            self._open_plans.clear()
            self._metrics.clear()
            self._feedback.errors.clear()
        self._conversations.clear()

    def close(self) -> None:
        """End the threads and connections of this planner. Idempotent.

        Tries once more to deliver what the store has not received. Needed only with a shared store or a feed.
        """
        for part in (self._feedback.feed, self._scopes.sharing, self._conversations):
            part.close()

    async def aclose(self) -> None:
        """Do the same as `close`, and close the connections of this event loop."""
        self.close()
        await self._conversations.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()
