"""What a gateway sends in place of a client's request. Pure: no I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from warmprefix.cache_profiles import CacheProfile
from warmprefix.plan import tenant_salt
from warmprefix_gateway.gateway_options import References
from warmprefix_gateway.reordering import Reordered, Reorderer
from warmprefix_gateway.sessions import PromptParts, Session
from warmprefix_gateway.splicing import spliced, survives
from warmprefix_gateway.tenant_bodies import BodyRefusedError
from warmprefix_openai import PromptCall, completed
from warmprefix_requests import Echoes, RewriteLevel, Rewritten, rewrite
from warmprefix_requests.marks import CacheMarker, MarkedBody

__all__ = ["AskedPrompt", "Outgoing", "Rules", "outgoing", "salted", "with_references"]


class Rules(NamedTuple):
    """What a gateway changes."""

    references: References
    keep_tools: Collection[str]
    profile: CacheProfile
    marker: CacheMarker | None
    reorderer: Reorderer | None = None
    order_locked: bool = False


class Outgoing(NamedTuple):
    """A request as it goes to the upstream."""

    content: bytes
    plain: bytes
    """The same with the tenant's salt as the only additional field, for an upstream that refuses another."""
    hide_usage: bool = False
    """True if the client did not ask for the usage in its stream."""
    references: int = 0
    saved_tokens: int = 0
    marked: MarkedBody | None = None
    reordered: Reordered | None = None
    echoes: Echoes | None = None
    """The references, if there are any, to find them in the answer."""

    @property
    def added_fields(self) -> tuple[str, ...]:
        """Kinds of the fields in `content` that `plain` lacks."""
        return ("stream_options",) * self.hide_usage + ("marks",) * (self.marked is not None)

    def without_additions(self) -> Outgoing:
        """Return the same with `plain` as its content."""
        return self._replace(content=self.plain, hide_usage=False, marked=None)


class AskedPrompt(NamedTuple):
    """A request with a prompt, its session, and what goes out for it."""

    call: PromptCall
    session: Session
    parts: PromptParts
    sent: Outgoing


def outgoing(
    call: PromptCall,
    rules: Rules,
    *,
    tenant: str | None,
    salt_key: bytes,
    endpoint: str,
    check: Callable[[], object] | None = None,
) -> Outgoing:
    """Return what to send for a call. O(bytes). `check` is called on the way; what it raises ends the work.

    The client's own bytes stay where nothing is rewritten: references take the place of the texts' own bytes, and
    fields are added in front of the last brace. A salt that a tenant's client sends is replaced by one that is derived
    from it and the tenant, so that no client can use another tenant's.

    Raises:
        BodyRefusedError: The client's salt could not be replaced.
    """
    if rules.reorderer is None:
        return _outgoing(call, None, rules, tenant, salt_key, endpoint, check)
    reordered = rules.reorderer.reordered(call, tenant, order_locked=rules.order_locked)
    try:
        return _outgoing(reordered.call, reordered, rules, tenant, salt_key, endpoint, check)
    except BaseException:
        rules.reorderer.abandon(reordered)
        raise


def _outgoing(
    call: PromptCall,
    reordered: Reordered | None,
    rules: Rules,
    tenant: str | None,
    salt_key: bytes,
    endpoint: str,
    check: Callable[[], object] | None,
) -> Outgoing:
    references = saved = 0
    echoes: Echoes | None = None
    if rules.references != "off":
        call, rewritten = with_references(call, rules.keep_tools, rules.references, check)
        if rewritten is not None:
            references, saved, echoes = rewritten.references, rewritten.saved_tokens, rewritten.echoes
    field = rules.profile.isolation
    if tenant is not None and field is not None:
        call = salted(call, field, tenant, salt_key)
    may_stream = call.route in ("chat", "completions")
    additions = completed(call, cache_salt=None, stream_usage=may_stream, token_ids=None)
    content = additions.content
    marked: MarkedBody | None = None
    if rules.marker is not None and call.route != "completions" and survives(content):
        body: Any = call.body if content is call.content else json.loads(content)
        marked = rules.marker.mark(call.route, body, tenant=tenant, endpoint=endpoint)
        content = content if marked.body == body else json.dumps(marked.body, separators=(",", ":")).encode()
        marked = None if marked.decision is None else marked
    return Outgoing(content, call.content, additions.hide_usage, references, saved, marked, reordered, echoes)


def salted(call: PromptCall, field: str, tenant: str, salt_key: bytes) -> PromptCall:
    """Return a call with the salt of its tenant, if its route has the field.

    Raises:
        BodyRefusedError: The client's salt could not be replaced.
    """
    given = call.body.get(field)
    salt = tenant_salt(salt_key, tenant if given is None else f"{tenant}\0{given}")
    if field not in call.body:
        added = completed(call, cache_salt=salt, stream_usage=False, token_ids=None, salt_field=field)
        if added.content is call.content:  # Messages have no `prompt_cache_key`
            return call
        return call._replace(content=added.content, body={**call.body, field: salt})
    if not survives(call.content):
        message = f"{field} cannot be replaced, because the body cannot be written again"
        raise BodyRefusedError(400, "salt", message)
    body = {**call.body, field: salt}
    return call._replace(content=json.dumps(body, separators=(",", ":")).encode(), body=body)


def with_references(
    call: PromptCall,
    keep_tools: Collection[str] = (),
    level: RewriteLevel = "exact",
    check: Callable[[], object] | None = None,
) -> tuple[PromptCall, Rewritten | None]:
    """Return a call with references to repeated results, and how they were made; None without any. O(bytes)."""
    if call.route == "completions":
        return call, None
    rewritten = rewrite(call.route, call.body, keep_tools=keep_tools, level=level, check=check)
    written = spliced(call.content, rewritten) if rewritten.references else None
    if written is None:
        return call, None
    return call._replace(content=written, body=rewritten.body), rewritten
