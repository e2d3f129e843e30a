"""What a gateway changes in a client's request: its list of processors. Pure: no I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

from warmprefix.cache_profiles import CacheProfile
from warmprefix.plan import tenant_salt
from warmprefix_gateway.gateway_options import References
from warmprefix_gateway.reordering import FoundContext, Reordered, Reorderer
from warmprefix_gateway.sessions import PromptParts, Session
from warmprefix_gateway.shared_beginnings import GrownRequest
from warmprefix_gateway.tenant_bodies import BodyRefusedError
from warmprefix_gateway.turn_records import FoundTurn
from warmprefix_requests import (
    OutgoingRequest,
    Processor,
    SteadyTools,
    StoredHistory,
    prepared,
    rewrite,
    with_marks,
    with_references,
    with_tools,
    with_tools_behind,
    with_usage,
)
from warmprefix_requests.marks import CacheMarker
from warmprefix_requests.retention import RequestPriorities
from warmprefix_requests.splicing import spliced, survives

__all__ = ["AskedPrompt", "Rules", "outgoing", "with_tenant_salt"]


class Rules(NamedTuple):
    """What a gateway changes."""

    references: References
    keep_tools: Collection[str]
    profile: CacheProfile
    marker: CacheMarker | None
    reorderer: Reorderer | None = None
    priorities: RequestPriorities | None = None
    order_locked: bool = False


class AskedPrompt(NamedTuple):
    """A request with a prompt, its session, and what goes out for it."""

    call: OutgoingRequest
    """The request as the client sent it."""
    session: Session
    parts: PromptParts
    sent: OutgoingRequest
    reordered: Reordered | None
    found: FoundTurn | None = None
    """The response that it continues, if that is known."""

    @property
    def may_be_kept(self) -> bool:
        """True if the upstream may keep the response."""
        return self.call.route == "responses" and self.call.body.get("store") is not False

    @property
    def upstream(self) -> str | None:
        """The only upstream that can answer; None if each one can."""
        return None if self.found is None else self.found.turn.upstream


def outgoing(
    call: OutgoingRequest,
    rules: Rules,
    *,
    tenant: str | None,
    salt_key: bytes,
    check: Callable[[], object] | None = None,
    earlier: StoredHistory | None = None,
    context: FoundContext | None = None,
    grown: GrownRequest | None = None,
    tools: SteadyTools | None = None,
) -> tuple[OutgoingRequest, Reordered | None]:
    """Return what to send for a call. O(bytes). `check` is called on the way; what it raises ends the work.

    `earlier` is the history that its upstream keeps, as for `warmprefix_requests.rewrite`. `context` is the one that
    the reorderer found in it, if it was asked before. `grown` is the call with what is known of its beginning. `tools`
    are those to send in place of the call's.

    The client's own bytes stay where nothing is rewritten. Of what is added, the usage, the marks and tools that the
    client's list lacks are optional; a tenant's salt is not.

    Raises:
        BodyRefusedError: The client's salt could not be replaced.
    """
    processors: list[Processor] = []
    splice, rewriting = (spliced, rewrite) if grown is None else (grown.spliced, grown.rewritten)
    if rules.references != "off":
        passages = rules.references == "passages"
        processors.append(with_references(rules.keep_tools, check, earlier, splice, rewriting, passages=passages))
    if tenant is not None and rules.profile.isolation is not None:
        processors.append(with_tenant_salt(rules.profile.isolation, tenant, salt_key))
    optional: dict[str, Processor] = {"stream_options": with_usage}
    if tools is not None and len(tools.tools) > len(call.body["tools"]):
        optional["tools"] = with_tools(tools)
    elif tools is not None:
        processors.append(with_tools(tools))  # behind the references, which know the places in the client's own bytes
        optional["tools"] = with_tools_behind(tools)
    if (marker := rules.marker) is not None:
        mark = with_marks(marker, tenant)
        optional["marks"] = lambda request: mark(request) if survives(request.content) else None
    if rules.reorderer is None:
        return prepared(call, processors, optional), None
    reordered = rules.reorderer.reordered(call, tenant, context, order_locked=rules.order_locked)
    try:
        prioritised = rules.priorities and rules.priorities.processor(reordered.plan)
        if prioritised:
            optional["retention"] = prioritised
        return prepared(reordered.call, processors, optional), reordered
    except BaseException:
        rules.reorderer.abandon(reordered)
        raise


def with_tenant_salt(field: str, tenant: str, salt_key: bytes) -> Processor:
    """Return a processor that gives a request the salt of its tenant, if its route has the field.

    A salt that the client sends is replaced by one that is derived from it and the tenant, so that no client can use
    another tenant's. Where it can't be replaced, the processor raises a `BodyRefusedError`.
    """

    def process(request: OutgoingRequest) -> OutgoingRequest | None:
        given = request.body.get(field)
        salt = tenant_salt(salt_key, tenant if given is None else f"{tenant}\0{given}")
        if field not in request.body:
            # Messages have no `prompt_cache_key`.
            is_taken = request.route != "messages" or field == "cache_salt"
            return request.with_fields({field: salt}) if is_taken else None
        if not survives(request.content):
            message = f"{field} cannot be replaced, because the body cannot be written again"
            raise BodyRefusedError(400, "salt", message)
        changed = request.with_fields({field: salt})
        # Written here, where a large body is in a thread: it also goes out without what is optional.
        content = json.dumps(changed.body, separators=(",", ":")).encode()
        return replace(changed, content=content, added=(), is_rewritten=False)

    return process
