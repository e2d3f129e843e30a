"""`EngineLink`: makes HTTP clients for the OpenAI SDK that commit or abandon a planner's plans."""

from __future__ import annotations

import contextlib
from contextvars import Token
from typing import TYPE_CHECKING, Any

from warmprefix.plan import ContextPlan
from warmprefix.stores import check_turn_id
from warmprefix_openai.clients import linked_async_client, linked_client
from warmprefix_openai.engine_metrics import EngineMetrics
from warmprefix_openai.exchange import Verdict
from warmprefix_openai.plans import PLAN_HEADER, Sending, SentPlan, sending_now
from warmprefix_openai.primer import Primer, PrimeStats
from warmprefix_openai.touching import LinkTouches
from warmprefix_openai.tracker import LinkStats, PlanTracker
from warmprefix_openai.writer import LinkWriter
from warmprefix_requests.marks import MarkStats
from warmprefix_requests.outgoing import TokenIds
from warmprefix_requests.retention import RequestPriorities
from warmprefix_requests.touches import Toucher, TouchStats

if TYPE_CHECKING:
    from typing_extensions import Self

    from warmprefix.planner import ContextPlanner

__all__ = ["EngineLink"]


class EngineLink:
    """Link between OpenAI clients and one planner: requests carry their plan, and their answers commit or abandon it.

        link = EngineLink(planner)
        client = OpenAI(http_client=link.http_client())
        plan = planner.plan(blocks)
        with link.sending(plan):
            client.chat.completions.create(model=model, messages=messages_for(plan, question))

    A plan is committed, with the engine's report, once the application has the answer. Within a block of `sending`
    that is when the block ends without an exception. Without such a block it is when the answer has been read to its
    end. It is abandoned on an error, a time-out, a cancellation, or a stream that is closed early; if nothing would be
    recorded as seen, a stream that fails or is closed after its first token commits it too. After a failure that may be
    tried again, the plan waits for that: any failure until the block of `sending` ends, without one those that clients
    try again by themselves, for 30 seconds in addition to the server's `Retry-After`.

    Streams report their usage; an application that did not ask for it does not see it.

    It reads the metrics of each engine once, on a thread: for a planner that learns its capacity or profile, and to
    know that the engine is your own. Hosted APIs are not asked.

    For a planner whose profile has marks, such as `ContextPlanner(profile="anthropic")`, it puts cache marks into the
    requests with a plan; `messages_for(plan, question, parts=True)` leaves room for them between blocks. If the API
    refuses them, the request goes out once more without. Anthropic's SDK takes `link.http_client(httpx2.Client)`.

    Requests without a plan pass unchanged, and no failure in here ever becomes one of a request. One link serves any
    number of clients, threads and tasks. Memory is bounded.
    """

    def __init__(
        self,
        planner: ContextPlanner,
        *,
        cache_salt: bool = True,
        token_ids: TokenIds | None = None,
        primes: int = 0,
        touches: bool | None = None,
    ) -> None:
        """Set up the link. It starts no thread and imports no SDK before they are needed.

        Args:
            planner: The planner whose plans are sent; it ignores another planner's.
            cache_salt: Send a plan's `cache_salt`, unless the request has one. Plans without a tenant have none.
                OpenAI's own endpoint, unlike vLLM's and SGLang's, refuses it; with the planner's profile `"openai"`
                it goes out as `prompt_cache_key`. A tenant's request to an engine that ignores the salt is not sent but
                answered with status 400. A feed of KV events gets no tokens of a prompt that went out under another
                salt than its plan's, or under none.
            token_ids: Have the engine return the prompt's tokens, for a feed of its KV events: in the way of `"vllm"`,
                or of `"sglang"`, which has them for answers in one piece only. Other engines may refuse it.
            primes: For an engine that keeps checkpoints, requests for one token that go out right in front of a chat:
                1 for one behind its third block, 2 for one behind the second and one behind the fourth, when these
                blocks first come in this order. 0 for none. The chat waits for them, a round trip each; they are left
                out where this would take longer than they are expected to save.

        Raises:
            TypeError: `primes` is no int.
            ValueError: `token_ids` or `primes` is another value than the above.
        """
        if token_ids not in (None, "vllm", "sglang"):
            raise ValueError(f"token_ids must be 'vllm', 'sglang' or None, got {token_ids!r}")
        priorities = RequestPriorities(planner)
        self._touches = LinkTouches(Toucher(planner, priorities))
        metrics = EngineMetrics(planner, always=touches is None)
        self._tracker = PlanTracker(planner, metrics, Primer(planner, primes), self._touches)
        self._writer = LinkWriter(
            self._tracker, priorities, cache_salt=cache_salt, token_ids=token_ids, touches=touches
        )

    def http_client(self, kind: Any = None, **options: Any) -> Any:
        """Return an HTTP client for `OpenAI(http_client=...)`, with these options.

        Args:
            kind: The client's class: `httpx.Client` or `httpx2.Client`, or one derived from it; by default the OpenAI
                SDK's `DefaultHttpxClient`.
            **options: The arguments of that class.

        Raises:
            MissingExtraError: There is no `kind`, and the extra `openai` is not installed.
        """
        return linked_client(self._writer, kind, options)

    def async_http_client(self, kind: Any = None, **options: Any) -> Any:
        """Return a client for `AsyncOpenAI(http_client=...)`, such as an `httpx.AsyncClient`; see `http_client`."""
        return linked_async_client(self._writer, kind, options)

    def headers(self, plan: ContextPlan) -> dict[str, str]:
        """Return the header that gives one request a plan: `create(..., extra_headers=link.headers(plan))`.

        The header does not leave the process, if the client has this link.
        """
        return {PLAN_HEADER: self._tracker.enter(plan).id}

    def sending(self, plan: ContextPlan, *, turn_id: str | None = None) -> SendingBlock:
        """Return a block for `with` or `async with`: the request in it whose prompt holds the plan's blocks carries it.

        For frameworks that pass no headers, and for code that sends several requests of which one has the context.
        Store the answer, and close a stream, inside the block. If the block ends without an exception, the plan is
        committed, even if you closed the stream early. If an exception or a cancellation leaves it, the plan is
        abandoned. A plan that no request carried, or whose last request failed, is abandoned too.

        If the plan continues a `Branch`, other responses in the block, such as those of an agent's loop, become turns
        of it that add no blocks.

        The request must be sent within the block. A stream that the SDK returned may be read after it. A stream that is
        sent when it is first read, such as LangChain's `stream`, must be read within, or be marked instead:
        `llm.stream(messages, extra_headers=link.headers(plan))`. Otherwise it goes out without a plan, and without the
        tenant's `cache_salt`. Such blocks are counted as `unsent`, and the first is logged as a warning.

        Args:
            plan: The plan.
            turn_id: For a plan with a `Branch`, the id of this turn, if the application keeps the messages and makes
                the ids. A response that the server stores has its own, which the link reads from the answer.

        Raises:
            TypeError: An argument has another type.
            ValueError: `turn_id` is empty or longer than 1,024 characters.
        """
        check_turn_id(turn_id=turn_id)
        return SendingBlock(self._tracker, self._tracker.enter(plan), turn_id)

    def stats(self) -> LinkStats:
        """Return the counts since the start."""
        return self._tracker.stats()

    def prime_stats(self) -> PrimeStats:
        """Return the counts of the primes since the start."""
        return self._tracker.primer.stats()

    def touch_stats(self) -> TouchStats:
        """Return the counts of the touches since the start."""
        return self._touches.toucher.stats()

    def mark_stats(self) -> MarkStats:
        """Return the counts of cache marks since the start; all zero for a planner whose profile has no marks."""
        return MarkStats() if self._writer.marker is None else self._writer.marker.stats()

    def close(self) -> None:
        """Abandon the plans that wait for another attempt, and end touches in flight.

        Clients stay open, and the link usable. Idempotent.
        """
        self._tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class SendingBlock:
    """The block that `EngineLink.sending` returns, for one `with` statement."""

    def __init__(self, tracker: PlanTracker, sent: SentPlan, turn_id: str | None) -> None:
        self._tracker = tracker
        self._sent = sent
        self._turn_id = turn_id
        self._sending: Sending | None = None
        self._token: Token[Sending | None] | None = None

    def __enter__(self) -> None:
        self._tracker.book.enter_block(self._sent, self._turn_id)
        self._sending = Sending(self._tracker.book, self._sent, sending_now.get())
        self._token = sending_now.set(self._sending)

    def __exit__(self, kind: object, *exception: object) -> None:
        self._tracker.settle(self._leave(raised=kind is not None))

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(self, kind: object, *exception: object) -> None:
        await self._tracker.asettle(self._leave(raised=kind is not None))

    def _leave(self, *, raised: bool) -> Verdict | None:
        assert self._sending is not None
        assert self._token is not None
        self._sending.is_open = False
        with contextlib.suppress(ValueError):  # a generator suspended in the block was closed in another context
            sending_now.reset(self._token)
        plan, answer = self._tracker.book.leave_block(self._sent, raised=raised)
        if plan is None:
            return None
        if not raised and isinstance(answer, Verdict):
            return answer._replace(step="commit")
        if not raised and not self._sent.was_taken:
            self._tracker.count_unsent()
        return Verdict(self._sent, plan, "abandon")
