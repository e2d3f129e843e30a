"""`EngineLink`: makes HTTP clients for the OpenAI SDK that tell a planner what becomes of its plans."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from contextvars import Token
from typing import TYPE_CHECKING, Any, NamedTuple

from warmprefix.errors import log_failure
from warmprefix.forks import in_each_process
from warmprefix.openai.calls import Call, TokenIds, completed, holds_blocks, read_call
from warmprefix.openai.exchange import Exchange, Verdict
from warmprefix.openai.marks import PLAN_HEADER, Sending, plan_in_context, sending_now
from warmprefix.openai.plans import PlanBook, SentPlan
from warmprefix.openai.stats import LinkStats
from warmprefix.openai.transports import AsyncLinkTransport, LinkTransport
from warmprefix.openai.wire import AsyncInner, Request, SyncInner, body_of, remade
from warmprefix.plan import ContextPlan
from warmprefix.ticker import Ticker

if TYPE_CHECKING:
    from typing_extensions import Self

    from warmprefix.openai.clients import AsyncLinkClient, LinkClient
    from warmprefix.planner import ContextPlanner

__all__ = ["EngineLink"]

_log = logging.getLogger("warmprefix")

_THREAD = "warmprefix-link"

_UNSENT = (
    "a block of sending(plan) ended and no request in it was the plan's: it is still to be sent, as streams that go "
    "out when first read, or it does not hold the plan's blocks; the plan is abandoned, and what is sent from now on "
    "goes without its cache_salt"
)

_COMMITS = ("commit", "commit part")

_IDLE = 60.0
"""Seconds between two looks for plans to give up, while there are none."""


class Opening(NamedTuple):
    """What to send in place of a request, and who is to be told of its answer."""

    request: Request
    exchange: Exchange | None


class EngineLink:
    """Between an OpenAI client and one planner: requests go out with what belongs to their plan, and their answers
    commit or abandon it.

        link = EngineLink(planner)
        client = OpenAI(http_client=link.http_client())
        plan = planner.plan(blocks)
        with link.sending(plan):
            client.chat.completions.create(model=model, messages=messages_for(plan, question))

    A plan is committed, with what the engine reported, once the application has the answer. Within a block of `sending`
    that is when the block ends without an exception. Without such a block it is when the answer has been read to its
    end. It is abandoned on an error, a time-out, a cancellation, or a stream that is closed early; if nothing would be
    recorded as seen, a stream that fails or is closed after its first token commits it too. After a failure that may be
    tried again, the plan waits for that: any failure until the block of `sending` ends, without one those that clients
    try again by themselves for `retry_grace` seconds.

    Requests without a plan pass untouched, and no failure in here ever becomes one of a request. One link serves any
    number of clients, threads and tasks. Memory is bounded.
    """

    def __init__(
        self,
        planner: ContextPlanner,
        *,
        cache_salt: bool = True,
        stream_usage: bool = True,
        token_ids: TokenIds | None = None,
        session_header: str | None = None,
        max_plans: int = 4_096,
        retry_grace: float = 30.0,
    ) -> None:
        """Nothing runs, and nothing is imported of an SDK, before it is needed.

        Args:
            planner: Whose plans are sent; of another's, nothing is learned.
            cache_salt: Send a plan's `cache_salt`, unless the request has one. Plans without a tenant have none.
                OpenAI's own endpoint, unlike vLLM's and SGLang's, refuses it. Of a prompt that went out under another
                salt than its plan's, or under none, a feed of KV events is told nothing.
            stream_usage: Have streams report usage. An application that did not ask for it does not see it.
            token_ids: Have the engine return the prompt's tokens, for a feed of its KV events: in the way of `"vllm"`,
                or of `"sglang"`, which has them for answers in one piece only. Other engines may refuse it.
            session_header: The name of a header to send with requests of a conversation, for a router: it carries a
                digest of tenant and conversation, as hard to guess as the planner's `cache_salt`.
            max_plans: Most plans known; beyond it the oldest are forgotten, and their requests go on without. Also
                most plans that wait for another attempt; beyond it those that have waited longest are abandoned.
            retry_grace: Seconds that a plan, whose request failed, waits for the client to try again; and what the
                server asks for with `Retry-After` on top.

        Raises:
            ValueError: `token_ids` is another value than the above, or a number is out of bounds.
        """
        if token_ids not in (None, "vllm", "sglang"):
            raise ValueError(f"token_ids must be 'vllm', 'sglang' or None, got {token_ids!r}")
        if max_plans < 1:
            raise ValueError(f"max_plans must be 1 or more, got {max_plans}")
        if not retry_grace >= 0:
            raise ValueError(f"retry_grace must be 0 or more, got {retry_grace}")
        self._planner = planner
        self._cache_salt = cache_salt
        self._stream_usage = stream_usage
        self._token_ids: TokenIds | None = token_ids
        self._session_header = session_header
        self._retry_grace = retry_grace
        self._book = PlanBook(max_plans)
        self._counts: Counter[str] = Counter()
        self._settling: set[asyncio.Task[None]] = set()
        in_each_process(self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()
        self._ticker = Ticker(self._give_up_overdue, _nothing, _THREAD)

    # -- for the application -----------------------------------------------------------------------------------

    def http_client(self, **options: Any) -> LinkClient:
        """For `OpenAI(http_client=...)`: an `openai.DefaultHttpxClient`, which takes these options, with this link.

        Raises:
            MissingExtraError: The extra `openai` is not installed.
        """
        from warmprefix.openai.clients import LinkClient

        return LinkClient(self, **options)

    def async_http_client(self, **options: Any) -> AsyncLinkClient:
        """For `AsyncOpenAI(http_client=...)`: an `openai.DefaultAsyncHttpxClient` with this link.

        Raises:
            MissingExtraError: The extra `openai` is not installed.
        """
        from warmprefix.openai.clients import AsyncLinkClient

        return AsyncLinkClient(self, **options)

    def transport(self, inner: SyncInner) -> Any:
        """For an HTTP client of your own: `httpx.Client(transport=link.transport(httpx.HTTPTransport()))`.

        Of httpx or httpx2, as `inner` is; it is closed with this one.
        """
        return LinkTransport(self, inner)

    def async_transport(self, inner: AsyncInner) -> Any:
        """`transport` for an `AsyncClient`."""
        return AsyncLinkTransport(self, inner)

    def headers(self, plan: ContextPlan) -> dict[str, str]:
        """What marks one request as that of a plan: `create(..., extra_headers=link.headers(plan))`.

        The header does not leave the process, if the client has this link.
        """
        return {PLAN_HEADER: self._enter(plan).id}

    def sending(self, plan: ContextPlan) -> _SendingBlock:
        """`with` or `async with`: within the block, the request whose prompt holds the plan's blocks is that plan's.

        For frameworks that pass no headers, and for whatever sends several requests of which one has the context. Store
        the answer, and close a stream, inside the block. If the block ends without an exception, the plan is committed,
        even if you closed the stream early. If an exception or a cancellation leaves it, the plan is abandoned. A plan
        that no request had, or whose last request failed, is abandoned too.

        The request must be sent within the block. A stream that the SDK returned may be read after it. One that is
        sent when it is first read, as that of LangChain's `stream` is, must be read within, or be marked instead:
        `llm.stream(messages, extra_headers=link.headers(plan))`. Otherwise it goes out without a plan, and without the
        tenant's `cache_salt`. Such blocks are counted as `unsent`, and the first is logged as a warning.
        """
        return _SendingBlock(self, self._book, self._enter(plan))

    def stats(self) -> LinkStats:
        """Counts since the start."""
        with self._lock:
            return LinkStats(**self._counts, waiting=self._book.failed)

    def close(self) -> None:
        """Abandon the plans that wait for another attempt. Clients stay open, and the link usable. Idempotent."""
        with self._lock:
            ticker, self._ticker = self._ticker, Ticker(self._give_up_overdue, _nothing, _THREAD)
        ticker.stop(timeout=1.0)
        self._give_up(float("inf"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _enter(self, plan: ContextPlan) -> SentPlan:
        if not isinstance(plan, ContextPlan):
            raise TypeError(f"plan must be a ContextPlan, got {type(plan).__name__}")
        return self._book.enter(plan)

    # -- for transports and clients ----------------------------------------------------------------------------

    def open(self, request: Request) -> Opening:
        """Take the mark off a request, if it has one, and make it that of its plan. Never raises."""
        named = request.headers.get(PLAN_HEADER)
        try:
            if named is not None:
                sent = self._book.find(named)
                if sent is not None:
                    return self._opened(request, sent, by_name=True)
                self._count("unknown_plans")
            elif (sent := plan_in_context(self._book)) is not None:
                return self._opened(request, sent, by_name=False)
        except Exception:
            self.failed("a request could not be given what belongs to its plan")
        return Opening(request if named is None else remade(request, without=PLAN_HEADER), None)

    def _opened(self, request: Request, sent: SentPlan, *, by_name: bool) -> Opening:
        content = body_of(request)
        call = None if content is None else read_call(request.method, request.url.path, request.headers, content)
        if call is None:
            self._count("unmatched")
            return Opening(remade(request, without=PLAN_HEADER) if by_name else request, None)
        plan = sent.plan
        if plan is not None and not by_name and not holds_blocks(call.prompt, plan):
            self._count("unmatched")
            plan = None
        else:
            plan = self._book.take(sent)
            self._count("repeated_plans" if plan is None else "requests")
        try:
            return self._with_additions(request, call, sent, plan)
        except BaseException:
            if plan is not None:
                self._book.put_back(sent)
            raise

    def _with_additions(self, request: Request, call: Call, sent: SentPlan, plan: ContextPlan | None) -> Opening:
        """Without a plan of its own, a request still gets what keeps tenants apart."""
        additions = completed(
            call,
            cache_salt=sent.cache_salt if self._cache_salt else None,
            stream_usage=self._stream_usage and plan is not None,
            token_ids=None if plan is None else self._token_ids,
        )
        header = {self._session_header: sent.session} if self._session_header and sent.session else None
        changed = remade(request, without=PLAN_HEADER, content=additions.content, added=header)
        if plan is None:
            return Opening(changed, None)
        return Opening(changed, Exchange(sent, plan, call, additions=additions, on_error=self.failed))

    def settle(self, verdict: Verdict | None) -> None:
        """Do what follows from an exchange. Never raises; a finalizer may call it."""
        if verdict is not None and (due := self._noted(verdict)) is not None:
            self._tell(due)

    async def asettle(self, verdict: Verdict | None) -> None:
        """`settle`, for tasks. It is done even if the caller is cancelled; then a commit is taken back.

        A caller that is cancelled here has no answer: its application gets a CancelledError instead.
        """
        due = None if verdict is None else self._noted(verdict)
        if due is None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # that of Trio, say, which has no such tasks
            try:
                await self._atell(due, [])
            except BaseException:
                self._withdraw(due)
                raise
            return
        begun: list[bool] = []
        telling = loop.create_task(self._atell(due, begun))
        self._settling.add(telling)  # the loop itself holds tasks weakly

        def told(task: asyncio.Task[None]) -> None:
            self._settling.discard(task)
            if not begun:  # the loop was closed before it came to it
                self._tell(due)

        telling.add_done_callback(told)
        try:
            await asyncio.shield(telling)
        except BaseException:
            self._withdraw(due)
            raise

    def failed(self, what: str) -> None:
        """The one place where a failure of ours, or of the planner, degrades to a request that nobody learns from."""
        with self._lock:
            self._counts["errors"] += 1
            first = self._counts["errors"] == 1
        log_failure(_log, what, first=first)

    def unsent(self) -> None:
        """A block of `sending` ended as if all was well, and no request had its plan."""
        with self._lock:
            self._counts["unsent"] += 1
            first = self._counts["unsent"] == 1
        _log.log(logging.WARNING if first else logging.DEBUG, "%s", _UNSENT)

    def _noted(self, verdict: Verdict) -> Verdict | None:
        """Note where the plan is now; return what is due at the planner, for this plan or for one that it displaced."""
        if verdict.step == "put back":
            self._book.put_back(verdict.sent)
            return None
        commits = verdict.step in _COMMITS and verdict.plan.tracked
        if commits and self._book.hold(verdict.sent, verdict):  # the end of the block decides
            return None
        if commits and verdict.sent.dropped:
            verdict = verdict._replace(step="abandon", report=None)
        if verdict.step == "commit part":
            self._count("early_closes")
            verdict = verdict._replace(step="abandon", report=None)
        may_be_retried = verdict.step == "fail"
        # The SDK is done with what it was refused; what called it may fall back on another model or endpoint.
        if may_be_retried or (verdict.step == "abandon" and verdict.sent.is_sending):
            grace = self._retry_grace + verdict.delay if may_be_retried else 0.0
            displaced = self._book.fail(verdict.sent, time.monotonic() + grace)
            self._watch()
            return None if displaced is None else Verdict(*displaced, "abandon")
        self._book.end(verdict.sent)
        if verdict.unread:
            self._count("unread_answers")
        return verdict

    def _tell(self, verdict: Verdict) -> None:
        try:
            if verdict.step in _COMMITS:
                self._told_commit(self._planner.commit(verdict.plan, report=verdict.report))
            else:
                self._planner.abandon(verdict.plan)
                self._count("abandons")
        except Exception:
            self.failed(f"the planner failed to {verdict.step} a plan")

    async def _atell(self, verdict: Verdict, begun: list[bool]) -> None:
        begun.append(True)
        try:
            if verdict.step in _COMMITS:
                self._told_commit(await self._planner.acommit(verdict.plan, report=verdict.report))
            else:
                await self._planner.aabandon(verdict.plan)
                self._count("abandons")
        except Exception:
            self.failed(f"the planner failed to {verdict.step} a plan")

    def _withdraw(self, verdict: Verdict) -> None:
        if verdict.step in _COMMITS and verdict.plan.tracked:
            try:
                self._planner.withdraw(verdict.plan)
                self._count("withdrawn")
            except Exception:  # the caller's cancellation goes on
                self.failed("a commit could not be taken back")

    def _told_commit(self, recorded: bool) -> None:
        with self._lock:
            self._counts["commits"] += 1
            self._counts["refused_commits"] += not recorded

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    # -- plans that nobody tries again -------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            with self._lock:
                self._ticker.start()
                self._ticker.wake()
        except RuntimeError:  # there can be no more threads: they are given up when something else is
            self.failed("no thread to give up plans in")

    def _give_up_overdue(self) -> float:
        self._give_up(time.monotonic())
        deadline = self._book.next_deadline
        return _IDLE if deadline is None else min(_IDLE, deadline - time.monotonic())

    def _give_up(self, now: float) -> None:
        for sent, plan in self._book.end_overdue(now):
            self._tell(Verdict(sent, plan, "abandon"))


class _SendingBlock:
    """What `EngineLink.sending` returns; for one `with` statement."""

    def __init__(self, link: EngineLink, book: PlanBook, sent: SentPlan) -> None:
        self._link = link
        self._book = book
        self._sent = sent
        self._sending: Sending | None = None
        self._token: Token[Sending | None] | None = None

    def __enter__(self) -> None:
        self._book.enter_block(self._sent)
        self._sending = Sending(self._book, self._sent, sending_now.get())
        self._token = sending_now.set(self._sending)

    def __exit__(self, kind: object, *exception: object) -> None:
        self._link.settle(self._leave(raised=kind is not None))

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, kind: object, *exception: object) -> None:
        await self._link.asettle(self._leave(raised=kind is not None))

    def _leave(self, *, raised: bool) -> Verdict | None:
        assert self._sending is not None
        assert self._token is not None
        self._sending.is_open = False
        with contextlib.suppress(ValueError):  # a generator that stands in the block was closed in another context
            sending_now.reset(self._token)
        plan, answer = self._book.leave_block(self._sent, raised=raised)
        if plan is None:
            return None
        if not raised and isinstance(answer, Verdict):
            return answer._replace(step="commit")
        if not raised and not self._sent.was_taken:
            self._link.unsent()
        return Verdict(self._sent, plan, "abandon")


def _nothing() -> None:
    """What is left to do for a thread whose link is gone."""
