"""`ServeRequestRouter`: Ray Serve sends each request to the replica whose prefix cache holds most of its prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from warmprefix.errors import MissingExtraError
from warmprefix.plan import Scope
from warmprefix.ray.request_prompts import RequestPrompt, prompt_of_request
from warmprefix.residency import EngineTokenizer, KvEventFeed, ResidencyFeed, ServedPrompt
from warmprefix.routing import Replica, ReplicaRouter, ReplicaStats, Route

try:
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ImportError as exc:
    raise MissingExtraError("ray", "ray.serve") from exc

__all__ = ["ServeRequestRouter"]

_log = logging.getLogger("warmprefix")
_SESSION_TOKENS = 1_000
"""What a request with a session and no readable prompt counts."""


class _OpenRequest(NamedTuple):
    """A request on its way."""

    prompt: RequestPrompt | None
    """None if only its session is read."""
    route: Route
    accepted: bool = False
    """True if the replica has confirmed that it works on it."""


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
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        number = pending_request.metadata.internal_request_id
        self._abandon(number)
        available = self.select_available_replicas(candidate_replicas) or candidate_replicas
        prompt = _prompt_of(pending_request)
        route = self._route(prompt, pending_request, available)
        if route is None:
            return [candidate_replicas]
        self._open[number] = _OpenRequest(prompt, route)
        pending_request.future.add_done_callback(partial(self._routed, number))
        chosen = [replica for replica in available if replica.replica_id.unique_id == route.replica]
        return [chosen, [replica for replica in candidate_replicas if replica not in chosen]]

    def _routed(self, number: str, future: asyncio.Future[Any]) -> None:
        """Forget a request that was cancelled before a replica was found."""
        if future.cancelled():
            self._abandon(number)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Note that a replica has accepted a request, and that it may be another than the chosen one."""
        number = pending_request.metadata.internal_request_id
        request = self._open.get(number)
        if request is None:
            return
        route: Route | None = request.route
        if request.route.replica != replica_id.unique_id:
            self._abandon(number)
            accepting = [replica for replica in self.curr_replicas.values() if replica.replica_id == replica_id]
            route = self._route(request.prompt, pending_request, accepting)
        if route is not None:
            self._open[number] = _OpenRequest(request.prompt, route, accepted=True)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a request has ended. Serve calls this for those that a replica has refused, too."""
        request = self._open.get(internal_request_id)
        if request is None or request.route.replica != replica_id.unique_id:
            return
        confirms = self._use_replica_queue_len_cache  # else Serve does not wait for a replica to accept
        if confirms and not request.accepted:
            self._abandon(internal_request_id)
            return
        del self._open[internal_request_id]
        if self._router.commit(request.route):
            self._remember(request)

    def _route(
        self, prompt: RequestPrompt | None, pending: PendingRequest, among: Iterable[RunningReplica]
    ) -> Route | None:
        """Choose a replica; None if nothing of the request can be read, or these replicas are gone."""
        members = {member.name for member in self._router.replicas}
        names = [replica.replica_id.unique_id for replica in among if replica.replica_id.unique_id in members]
        session = pending.metadata.session_id
        if not names or (prompt is None and not session):
            return None
        if prompt is None:
            return self._router.route(conversation=session, prompt_tokens=_SESSION_TOKENS, replicas=names)
        return self._router.route(
            prompt.blocks,
            tenant=prompt.tenant,
            preamble=prompt.preamble,
            prompt_tokens=prompt.tokens,
            order_locked=True,
            replicas=names,
        )

    def _abandon(self, number: str) -> None:
        request = self._open.pop(number, None)
        if request is not None:
            self._router.abandon(request.route)

    def _remember(self, request: _OpenRequest) -> None:
        """Let the replica's feed find the prompt among the KV blocks."""
        prompt, name = request.prompt, request.route.replica
        feed, tokenizer = self._feeds.get(name), self._tokenizers.get(name)
        if feed is None or tokenizer is None or prompt is None or not prompt.paragraphs:
            return
        scope = Scope(prompt.tenant, None, request.route.preamble)
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
