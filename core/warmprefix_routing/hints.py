"""`SessionHints`: headers and fields with which a router that is in place already places requests well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

from warmprefix.plan import ContextPlan
from warmprefix_routing.members import check_type

__all__ = ["RequestHints", "Router", "SessionHints", "session_key"]

Router = Literal["production-stack", "vllm-router", "sglang", "llm-d", "dynamo", "aibrix", "ray"]

_SESSION_HEADERS: dict[str, str] = {
    "production-stack": "x-user-id",
    "vllm-router": "x-session-id",
    "sglang": "X-SMG-Routing-Key",
    "llm-d": "x-session-id",
    "dynamo": "X-Dynamo-Session-ID",
    "aibrix": "x-aibrix-session-key",
    "ray": "x-session-id",
}
_TAKES_KEYS = ("aibrix", "sglang", "vllm-router")
"""Routers whose header may hold any key, not only a session's: they send equal keys to one replica."""
_MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RequestHints:
    """What to send with one request: `create(..., extra_headers=hints.headers, extra_body=hints.extra_body)`.

    The caller may add to both.
    """

    headers: dict[str, str]
    """Headers to add."""
    extra_body: dict[str, Any]
    """Fields to add to the body."""


class SessionHints:
    """Leaves the placement of requests to an existing router, and only orders their context.

    Each hint is a header or body field that this router understands; one that it lacks is omitted. No name of a tenant
    or conversation is sent: session ids and keys are digests, as hard to guess as the planner's `cache_salt` if there
    is a tenant.

    >>> from warmprefix import ContextPlanner
    >>> plan = ContextPlanner().plan(["The sea is deep."], conversation="chat-42", placement="tail")
    >>> hints = SessionHints("dynamo").for_plan(plan, priority=5)
    >>> list(hints.headers), hints.extra_body
    (['X-Dynamo-Session-ID'], {'nvext': {'agent_hints': {'priority': 5}}})
    """

    def __init__(
        self,
        router: Router,
        *,
        session_header: str | None = None,
        head_blocks: int = 1,
        engine: Literal["vllm", "sglang"] | None = None,
    ) -> None:
        """Choose what to send.

        Args:
            router: `"production-stack"` and `"vllm-router"` are vLLM's, `"sglang"` is its gateway, also called smg.
            session_header: The session's header, if the deployment has renamed it.
            head_blocks: Number of first blocks, in planned order, that are the routing key of a request without a
                conversation, if the router takes one: requests that begin alike meet at one replica. 0 for no key.
            engine: The engine behind the router, for the field `priority` of its API. By default vLLM, and SGLang
                behind its own gateway.

        Raises:
            TypeError: `head_blocks` or `session_header` has another type.
            ValueError: `router` or `engine` has another value, `head_blocks` is negative, or `session_header` is empty.
        """
        if router not in _SESSION_HEADERS:
            raise ValueError(f"router must be one of {', '.join(_SESSION_HEADERS)}, got {router!r}")
        if engine not in (None, "vllm", "sglang"):
            raise ValueError(f"engine must be 'vllm', 'sglang' or None, got {engine!r}")
        check_type("head_blocks", head_blocks, int)
        if head_blocks < 0:
            raise ValueError(f"head_blocks must be 0 or more, got {head_blocks}")
        check_type("session_header", session_header, str, optional=True)
        if session_header == "":
            raise ValueError("session_header must not be empty, got ''; None stands for the router's own")
        self._router = router
        self._session_header = session_header or _SESSION_HEADERS[router]
        self._head_blocks = head_blocks if router in _TAKES_KEYS else 0
        self._engine = engine or ("sglang" if router == "sglang" else "vllm")

    def for_plan(self, plan: ContextPlan, *, priority: int | None = None) -> RequestHints:
        """Return what to send with the plan's request.

        Args:
            plan: Has the conversation, the tenant's `cache_salt`, and the beginning of the prompt.
            priority: Higher is more urgent, and 0 is that of requests without one, whatever scale the router and the
                engine have. vLLM refuses any other than 0 unless it schedules by priority.

        Raises:
            TypeError: `plan` is not a `ContextPlan`, or `priority` not an integer.
            ValueError: `priority` has more than 32 bits.
        """
        check_type("plan", plan, ContextPlan)
        check_type("priority", priority, int, optional=True)
        if priority is not None and abs(priority) > _MAX_PRIORITY:
            raise ValueError(f"priority must be between -{_MAX_PRIORITY} and {_MAX_PRIORITY}, got {priority}")
        headers: dict[str, str] = {}
        key = session_key(plan)
        if key is None and self._head_blocks:
            key = _head_key(plan, self._head_blocks)
        if key is not None:
            headers[self._session_header] = key
        body: dict[str, Any] = {} if plan.cache_salt is None else {"cache_salt": plan.cache_salt}
        if self._router == "dynamo":  # it translates priorities for the engine
            if priority is not None:
                body["agent_hints"] = {"priority": priority}
            return RequestHints(headers, {"nvext": body} if body else {})
        if priority is not None:
            body["priority"] = priority if self._engine == "sglang" else -priority  # vLLM's lowest comes first
        if self._router == "sglang" and priority is not None:  # its class system is for its own traffic
            headers["X-SMG-Priority"] = "interactive" if priority > 0 else "bulk" if priority < 0 else "default"
        if self._router == "llm-d" and plan.cache_salt is not None:  # fair among tenants; operators name its priorities
            headers["x-llm-d-inference-fairness-id"] = _digest(plan.cache_salt, b"warmprefix-ten", ())
        return RequestHints(headers, body)


def session_key(plan: ContextPlan) -> str | None:
    """Return 32 hexadecimal digits that stand for a plan's conversation; None without one.

    As hard to guess as the plan's `cache_salt`, or, without a tenant, as the conversation's name.
    """
    if plan.conversation is None:
        return None
    return _digest(plan.cache_salt, b"warmprefix", [plan.conversation.encode("utf-8", "surrogatepass")])


def _head_key(plan: ContextPlan, blocks: int) -> str | None:
    """Return a key for the preamble and first blocks, in planned order; None if they do not open the prompt."""
    if not plan.opens_prompt or not plan.blocks:
        return None
    first = [planned.block.fingerprint for planned in plan.blocks[:blocks]]
    return _digest(plan.cache_salt, b"warmprefix-head", [plan.scope.preamble or b"", *first])


def _digest(salt: str | None, purpose: bytes, parts: Iterable[bytes]) -> str:
    key = b"" if salt is None else salt.encode()
    return blake2b(b"".join(parts), digest_size=16, key=key[:64], person=purpose).hexdigest()
