"""`ServeRequestRouter`: Ray Serve sends each request to the replica whose prefix cache holds most of its prompt."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from warmprefix.errors import MissingExtraError
from warmprefix.plan import Scope
from warmprefix.residency import ResidencyFeed, ServedPrompt
from warmprefix_kv_events.kv_feed import KvEventFeed
from warmprefix_kv_events.spans import EngineTokenizer
from warmprefix_ray.request_prompts import RequestPrompt, prompt_of_request
from warmprefix_routing import Replica, ReplicaRouter, ReplicaStats, Route

try:
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ImportError as exc:
    raise MissingExtraError("ray", "ray.serve") from exc

__all__ = ["ServeRequestRouter"]

_log = logging.getLogger("warmprefix")
_SESSION_TOKENS = 1_000
"""What a request with a session and no readable prompt counts."""


@dataclass
class _OpenRequest:
    """A request on its way. Serve sends it again while replicas refuse it, and reports the end of each attempt."""

    prompt: RequestPrompt | None
    """None if only its session is read."""
    session: str
    route: Route | None = None
    future: asyncio.Future[Any] | None = None
    """Serve's, of the latest attempt: its result is a replica."""
    attempts: int = 0
    ended: int = 0
    """Attempts whose end Serve has reported."""
    accepted: bool = False
    """True if a replica has confirmed that it works on it."""


class ServeRequestRouter(RequestRouter):
    """A request router for Ray Serve that sends each request where `ReplicaRouter` would.

    It reads the prompts of OpenAI chat completions and completions: the first argument of a call, as a JSON object or
    with these fields as attributes, in the order in which it is. Requests with a `cache_salt` share nothing with those
    of another. A request without a readable prompt goes where its session's last one went, if it has a session id, and
    else to the shortest queue. A replica whose queue is full is not chosen.

    A replica may publish in `record_replica_metadata` where its engine publishes KV events: `kv_events`, and perhaps
    `kv_replay`, as for `KvEventFeed`, and `base_url` of the API that tokenizes. Then the predictions follow the events.

    Each of Serve's proxies and handles has a router of its own, which sees the requests that pass through it. All of
    them choose the same replica for the beginning of a prompt that none of them has seen.

    Serve does not report first tokens, so a prompt counts as waiting until its answer is complete.
    """

    def initialize_state(self, **options: Any) -> None:
        """Create the router. Serve calls this with `request_router_kwargs`.

        Args:
            options: Those of `ReplicaRouter` that are numbers or strings.

        Raises:
            TypeError: An option has another name.
            ValueError: An option is out of range.
        """
        self._router = ReplicaRouter(**options)
        self._feeds: dict[str, KvEventFeed] = {}
        self._tokenizers: dict[str, EngineTokenizer] = {}
        self._open: dict[str, _OpenRequest] = {}

    def stats(self) -> ReplicaStats:
        """Return the counts of this process's router."""
        return self._router.stats()

    # -- replicas come and go

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        names = {replica.replica_id.unique_id for replica in replicas}
        members = {member.name for member in self._router.replicas}
        for gone in members - names:
            self._forget(gone)
        for replica in replicas:
            if replica.replica_id.unique_id not in members:
                name = replica.replica_id.unique_id
                self._router.join(Replica(name), self._feed_of(name, replica.replica_metadata))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id.unique_id)

    def _forget(self, name: str) -> None:
        if name in {member.name for member in self._router.replicas}:
            self._router.leave(name)  # which closes its feed
        self._feeds.pop(name, None)
        self._tokenizers.pop(name, None)

    def _feed_of(self, name: str, metadata: dict[str, Any]) -> ResidencyFeed | None:
        """Return a feed of the events that a replica publishes; None if it publishes none."""
        if "kv_events" not in metadata:
            return None
        try:
            tokenizer = EngineTokenizer(metadata["base_url"])
            feed = KvEventFeed(metadata["kv_events"], replay=metadata.get("kv_replay"), tokenizer=tokenizer)
        except Exception:  # requests must go on
            _log.warning("replica %s has no usable addresses of KV events", name, exc_info=True)
            return None
        self._feeds[name], self._tokenizers[name] = feed, tokenizer
        return feed

    # -- requests come and go

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica first, then the others. Serve calls it again while no replica has accepted."""
        if pending_request is None or pending_request.future.done() or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        number = pending_request.metadata.internal_request_id
        request = self._open.get(number) or self._opened(number, pending_request)
        if request is None:
            return [candidate_replicas]
        if request.future is not pending_request.future:
            request.future = pending_request.future
            request.attempts += 1
        self._route(request, self.select_available_replicas(candidate_replicas) or candidate_replicas)
        if request.route is None:
            return [candidate_replicas]
        chosen = [replica for replica in candidate_replicas if replica.replica_id.unique_id == request.route.replica]
        return [chosen, [replica for replica in candidate_replicas if replica not in chosen]]

    def _opened(self, number: str, pending: PendingRequest) -> _OpenRequest | None:
        """Note a request that Serve has just received; return None if nothing of it can be read."""
        prompt, session = _prompt_of(pending), pending.metadata.session_id
        if prompt is None and not session:
            return None
        request = self._open[number] = _OpenRequest(prompt, session)
        if self._confirms:  # Serve does not report the end of a request for which a caller only asked for a choice
            given_up = weakref.finalize(pending, _call_soon, asyncio.get_running_loop(), self._given_up, number)
            given_up.atexit = False
        return request

    @property
    def _confirms(self) -> bool:
        """Whether Serve waits until a replica has accepted a request."""
        confirms: bool = self._use_replica_queue_len_cache
        return confirms

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Choose a replica. Of a request that is cancelled now, Serve reports nothing else."""
        try:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except BaseException:
            self._given_up(pending_request.metadata.internal_request_id)
            raise

    def _given_up(self, number: str) -> None:
        """Forget a request that was cancelled, or dropped by Serve, before a replica accepted it."""
        request = self._open.get(number)
        if request is not None and not request.accepted:
            self._abandon(request)
            del self._open[number]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Note that a replica has accepted a request, and that it may be another than the chosen one."""
        number = pending_request.metadata.internal_request_id
        request = self._open.get(number)
        if request is not None:
            self._accept(request, replica_id)
            self._close(number, request)  # its end may have been reported before

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that an attempt has ended. Serve calls this for those that a replica has refused, too."""
        request = self._open.get(internal_request_id)
        if request is None:
            return
        request.ended += 1
        if not self._confirms:
            self._accept(request, replica_id)
        self._close(internal_request_id, request)

    def _accept(self, request: _OpenRequest, replica_id: ReplicaID) -> None:
        request.accepted = True
        if request.route is None or request.route.replica != replica_id.unique_id:
            self._route(
                request, [replica for replica in self.curr_replicas.values() if replica.replica_id == replica_id]
            )

    def _close(self, number: str, request: _OpenRequest) -> None:
        """Record a request whose attempts have all ended; take its route back if each was refused."""
        if request.ended < request.attempts:
            return
        if not request.accepted:
            self._abandon(request)
            return
        del self._open[number]
        if request.route is not None and self._router.commit(request.route):
            self._remember(request, request.route)

    def _route(self, request: _OpenRequest, among: Iterable[RunningReplica]) -> None:
        """Choose a replica; none if all of these have left."""
        self._abandon(request)
        members = {member.name for member in self._router.replicas}
        names = [replica.replica_id.unique_id for replica in among if replica.replica_id.unique_id in members]
        prompt = request.prompt
        if not names:
            return
        if prompt is None:
            request.route = self._router.route(
                conversation=request.session, prompt_tokens=_SESSION_TOKENS, replicas=names
            )
            return
        request.route = self._router.route(
            prompt.blocks,
            tenant=prompt.tenant,
            preamble=prompt.preamble,
            prompt_tokens=prompt.tokens,
            order_locked=True,
            replicas=names,
        )

    def _abandon(self, request: _OpenRequest) -> None:
        if request.route is not None:
            self._router.abandon(request.route)
            request.route = None

    def _remember(self, request: _OpenRequest, route: Route) -> None:
        """Let the replica's feed find the prompt among the KV blocks."""
        prompt, name = request.prompt, route.replica
        feed, tokenizer = self._feeds.get(name), self._tokenizers.get(name)
        if feed is None or tokenizer is None or prompt is None or not prompt.paragraphs:
            return
        scope = Scope(prompt.tenant, None, route.preamble)
        keys = tuple([block.fingerprint for block in prompt.blocks])
        fields = prompt.fields
        feed.remember(ServedPrompt(scope, prompt.tenant, keys, prompt.paragraphs, lambda: tokenizer.of_request(fields)))


def _prompt_of(pending: PendingRequest) -> RequestPrompt | None:
    values = [*pending.args, *pending.kwargs.values()]
    try:
        return prompt_of_request(values[0]) if values else None
    except Exception:  # the deployment decides what it makes of such a request
        _log.warning("a request has no readable prompt", exc_info=True)
        return None


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function, *args)
