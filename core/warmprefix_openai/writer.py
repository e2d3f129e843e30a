"""`LinkWriter`: finds the plan of each request of a link, and writes what goes out in its place. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from warmprefix import Branch
from warmprefix.plan import ContextPlan
from warmprefix_openai.exchange import Exchange, Verdict
from warmprefix_openai.http_requests import body_of, remade
from warmprefix_openai.plans import PLAN_HEADER, SentPlan, plan_in_context
from warmprefix_openai.salt_check import SaltCheck
from warmprefix_openai.server_turns import server_turn
from warmprefix_openai.touching import KeptCall
from warmprefix_openai.tracker import PlanTracker
from warmprefix_requests import (
    FieldRefusals,
    OutgoingRequest,
    Processor,
    holds_blocks,
    prepared,
    read_call,
    with_marks,
    with_salt,
    with_token_ids,
    with_usage,
)
from warmprefix_requests.marks import CacheMarker
from warmprefix_requests.outgoing import PromptRoute, TokenIds
from warmprefix_requests.retention import RequestPriorities
from warmprefix_requests.server_history import server_history

__all__ = ["LinkWriter", "Opening"]


class Opening(NamedTuple):
    """A request to send in place of another."""

    request: Any
    """Of httpx or httpx2."""
    exchange: Exchange | None = None
    """Reads its answer, if it has a plan."""
    salted: PromptRoute | None = None
    """Its route if a salt is to keep its tenant apart, which some engines ignore."""
    carried: CarriedTurn | None = None
    """A turn without a plan in a branch, whose record a plan without blocks carries on."""
    kept: KeptCall | None = None
    """What touches can be cut from, once it is answered."""


class CarriedTurn(NamedTuple):
    """A turn that continues a stored one without any blocks."""

    asked: OutgoingRequest
    options: Mapping[str, Any]
    """For the plan."""


class LinkWriter:
    """Writes the requests of one link. Thread-safe. Nothing that fails in here becomes a failure of a request."""

    def __init__(
        self,
        tracker: PlanTracker,
        priorities: RequestPriorities,
        *,
        cache_salt: bool,
        token_ids: TokenIds | None,
        touches: bool | None,
    ) -> None:
        self.tracker = tracker
        self._priorities = priorities
        self._touches = touches
        profile = tracker.planner.profile
        self.marker = None if profile.marks is None else CacheMarker(profile)
        self._refusals = FieldRefusals()
        self.salts = SaltCheck()
        self._isolation = profile.isolation
        self._cache_salt = cache_salt
        self._token_ids: TokenIds | None = token_ids

    def open(self, request: Any) -> Opening:
        """Find the request's plan, remove its header and add what the plan needs. Never raises."""
        tracker, named = self.tracker, request.headers.get(PLAN_HEADER)
        try:
            if named is not None:
                sent = tracker.book.find(named)
                if sent is not None:
                    return self._opened(request, sent, by_name=True)
                tracker.count("unknown_plans")
            elif (sent := plan_in_context(tracker.book)) is not None:
                return self._opened(request, sent, by_name=False)
            if self._priorities.processor(None) is not None and (asked := _read(request)) is not None:
                processors = [*self._of_others(request, asked)]
                if processors:
                    return Opening(remade(request, prepared(asked, processors).content))
        except Exception:
            tracker.degrade("a request could not be prepared for its plan")
        return Opening(request if named is None else remade(request, body_of(request)))

    def _of_others(self, request: Any, asked: OutgoingRequest) -> Iterator[Processor]:
        """Yield what adds a priority to a request without a plan, whose end the engine would evict first.

        Nothing can take it back after a refusal, so it takes a request with one that was answered.
        """
        process = self._priorities.processor(None)
        model = asked.body.get("model")
        if process is not None and self._refusals.takes(str(request.url), model, None, ("retention",)):
            yield process

    def carried(self, request: Any, opening: Opening, plan: ContextPlan) -> Opening:
        """Return the opening of a request with its plan without blocks. Never raises."""
        tracker, sent = self.tracker, self.tracker.enter(plan)
        try:
            if opening.carried is not None and tracker.book.take(sent) is not None:
                return self._written(request, opening.carried.asked, sent, plan)
        except Exception:
            tracker.degrade("a turn without blocks could not be prepared")
        tracker.settle(Verdict(sent, plan, "abandon"))
        return opening

    def _opened(self, request: Any, sent: SentPlan, *, by_name: bool) -> Opening:
        tracker, asked = self.tracker, _read(request)
        if asked is None:
            tracker.count("unmatched")
            return Opening(remade(request, body_of(request)) if by_name else request)
        plan, outcome = sent.plan, "unmatched"
        if plan is not None and not by_name and not holds_blocks(asked.prompt, plan):
            plan = None
        else:
            plan = tracker.book.take(sent)
            outcome = "repeated_plans" if plan is None else "requests"
            tracker.metrics.visit(request.url)
        try:
            opening = self._written(request, asked, sent, plan)
        except BaseException:
            if plan is not None:
                tracker.book.put_back(sent)
            raise
        tracker.count("requests" if opening.carried is not None else outcome)
        return opening

    def _written(self, request: Any, asked: OutgoingRequest, sent: SentPlan, plan: ContextPlan | None) -> Opening:
        turn = None
        if plan is not None:
            asked, turn = server_turn(asked, plan)
        # A request without a plan of its own still gets the salt, which keeps tenants apart.
        # Anthropic's own API, whose profiles have no isolation, refuses a field that vLLM takes on the same route.
        takes_salt = self._cache_salt and (asked.route != "messages" or self._isolation is not None)
        processors = [with_salt(sent.cache_salt if takes_salt else None, self._isolation or "cache_salt")]
        optional: dict[str, Processor] = {}
        endpoint = str(request.url)
        if plan is not None:
            processors += [with_token_ids(self._token_ids)] if self._token_ids is not None else []
            processors.append(with_usage)
            is_refused = self._refusals.refuses(endpoint, asked.body.get("model"), None, ("marks",))
            if self.marker is not None and not is_refused:
                optional["marks"] = with_marks(self.marker, plan.scope.tenant, plan)
            if (prioritised := self._priorities.processor(plan)) and self.tracker.metrics.may_prioritise(request.url):
                optional["retention"] = prioritised
        else:
            processors += self._of_others(request, asked)
        outgoing = prepared(asked, processors, optional)
        is_salted = takes_salt and sent.cache_salt is not None and self._isolation == "cache_salt"
        salted = asked.route if is_salted else None
        if plan is None:
            return Opening(remade(request, outgoing.content), None, salted, _carried(asked, sent))
        attempt = self._refusals.attempt(outgoing, endpoint)
        exchange = Exchange(
            sent,
            plan,
            asked,
            attempt,
            marker=self.marker,
            toucher=self.tracker.touches.toucher,
            count=self.tracker.count,
            on_error=self.tracker.degrade,
            turn=turn,
        )
        primes = self.tracker.primer.requests(plan, outgoing.plain or outgoing)
        exchange.primes = tuple([(prime, self._refusals.attempt(sent, endpoint)) for prime, sent in primes])
        kept = KeptCall(plan, outgoing.plain or outgoing) if self._may_touch(request) else None
        return Opening(remade(request, attempt.request.encode()), exchange, salted, kept=kept)

    def _may_touch(self, request: Any) -> bool:
        """Return True if touches were asked for, or if nobody bills them: the engine is the application's own."""
        metrics = self.tracker.metrics
        if self.tracker.planner.profile.eviction == "priority":
            return self._touches is not False and metrics.may_prioritise(request.url)
        return metrics.shows(request.url) if self._touches is None else self._touches


def _read(request: Any) -> OutgoingRequest | None:
    content = body_of(request)
    return None if content is None else read_call(request.method, request.url.path, request.headers, content)


def _carried(asked: OutgoingRequest, sent: SentPlan) -> CarriedTurn | None:
    """Return the turn of a request next to one with a branch's plan, such as a call of an agent's loop."""
    history = None if sent.branch is None else server_history(asked.route, asked.body)
    if sent.branch is None or history is None or history.after is None or not history.is_kept:
        return None
    (tenant, model, _), names = sent.branch
    if any(name in asked.prompt for name in names):  # it may show blocks, and its record would lack them
        return None
    try:
        branch = Branch(after=history.after)
    except ValueError:  # not an id of any turn
        return None
    return CarriedTurn(asked, {"conversation": branch, "placement": "tail", "tenant": tenant, "model": model})
