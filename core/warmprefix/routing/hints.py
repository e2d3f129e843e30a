"""`SessionHints`: headers and fields with which a router that is in place already places requests well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from warmprefix.plan import ContextPlan
from warmprefix.routing.keys import head_key, session_key, tenant_key

__all__ = ["RequestHints", "Router", "SessionHints"]

Router = Literal["production-stack", "sglang", "llm-d", "dynamo", "aibrix", "ray"]

_Engine = Literal["vllm", "sglang"]

_MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RequestHints:
    """What to send with one request: `create(..., extra_headers=hints.headers, extra_body=hints.extra_body)`.

    The caller may add to both.
    """

    headers: dict[str, str]
    extra_body: dict[str, Any]


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
            router: `"production-stack"` is vLLM's, `"sglang"` its gateway, also called smg.
            session_header: The session's header, if the deployment has renamed it.
            head_blocks: Number of first blocks, in planned order, that are the routing key of a request without a
                conversation, if the router takes one: requests that begin alike meet at one replica. 0 for no key.
            engine: The engine behind the router, for the field `priority` of its API. By default vLLM, and SGLang
                behind its own gateway.

        Raises:
            TypeError: `head_blocks` or `session_header` has another type.
            ValueError: `router` or `engine` has another value, `head_blocks` is negative, or `session_header` is empty.
        """
        if router not in _DIALECTS:
            raise ValueError(f"router must be one of {', '.join(_DIALECTS)}, got {router!r}")
        if engine not in (None, *get_args(_Engine)):
            raise ValueError(f"engine must be 'vllm', 'sglang' or None, got {engine!r}")
        if isinstance(head_blocks, bool) or not isinstance(head_blocks, int):
            raise TypeError(f"head_blocks must be an int, got {type(head_blocks).__name__}")
        if head_blocks < 0:
            raise ValueError(f"head_blocks must be 0 or more, got {head_blocks}")
        if session_header is not None and not isinstance(session_header, str):
            raise TypeError(f"session_header must be a str or None, got {type(session_header).__name__}")
        if session_header == "":
            raise ValueError("session_header must not be empty, got ''; None stands for the router's own")
        dialect = _DIALECTS[router]
        self._dialect = dialect
        self._session_header = dialect.session_header if session_header is None else session_header
        self._head_blocks = head_blocks if dialect.takes_keys else 0
        self._engine: _Engine = dialect.engine if engine is None else engine

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
        if not isinstance(plan, ContextPlan):
            raise TypeError(f"plan must be a ContextPlan, got {type(plan).__name__}")
        if priority is not None:
            if isinstance(priority, bool) or not isinstance(priority, int):
                raise TypeError(f"priority must be an int or None, got {type(priority).__name__}")
            if abs(priority) > _MAX_PRIORITY:
                raise ValueError(f"priority must be between -{_MAX_PRIORITY} and {_MAX_PRIORITY}, got {priority}")
        hints = RequestHints({}, {})
        key = session_key(plan)
        if key is None and self._head_blocks:
            key = head_key(plan, self._head_blocks)
        if key is not None:
            hints.headers[self._session_header] = key
        self._dialect.add(hints, plan, priority, self._engine)
        return hints


class _Dialect(NamedTuple):
    """What one router understands."""

    session_header: str
    takes_keys: bool
    """True if the header may hold any key, not only a session's: the router sends equal keys to one replica."""
    engine: _Engine
    add: Callable[[RequestHints, ContextPlan, int | None, _Engine], None]


def _add_engine_fields(hints: RequestHints, plan: ContextPlan, priority: int | None, engine: _Engine) -> None:
    """Add fields for the engine, which the body reaches unchanged."""
    if plan.cache_salt is not None:
        hints.extra_body["cache_salt"] = plan.cache_salt
    if priority is not None:
        hints.extra_body["priority"] = priority if engine == "sglang" else -priority  # vLLM's lowest comes first


def _add_for_sglang(hints: RequestHints, plan: ContextPlan, priority: int | None, engine: _Engine) -> None:
    """Add the gateway's class too: interactive, default or bulk; its class system is for its own traffic."""
    _add_engine_fields(hints, plan, priority, engine)
    if priority is not None:
        urgency = "interactive" if priority > 0 else "bulk" if priority < 0 else "default"
        hints.headers["X-SMG-Priority"] = urgency


def _add_for_llm_d(hints: RequestHints, plan: ContextPlan, priority: int | None, engine: _Engine) -> None:
    """Add the tenant, among whom it is fair; its priorities are objectives that an operator names."""
    _add_engine_fields(hints, plan, priority, engine)
    if (tenant := tenant_key(plan)) is not None:
        hints.headers["x-llm-d-inference-fairness-id"] = tenant


def _add_for_dynamo(hints: RequestHints, plan: ContextPlan, priority: int | None, engine: _Engine) -> None:
    """Add its extension; it translates priorities for the engine."""
    extension: dict[str, Any] = {}
    if plan.cache_salt is not None:
        extension["cache_salt"] = plan.cache_salt
    if priority is not None:
        extension["agent_hints"] = {"priority": priority}
    if extension:
        hints.extra_body["nvext"] = extension


_DIALECTS: dict[str, _Dialect] = {
    "production-stack": _Dialect("x-user-id", False, "vllm", _add_engine_fields),
    "sglang": _Dialect("X-SMG-Routing-Key", True, "sglang", _add_for_sglang),
    "llm-d": _Dialect("x-session-id", False, "vllm", _add_for_llm_d),
    "dynamo": _Dialect("X-Dynamo-Session-ID", False, "vllm", _add_for_dynamo),
    "aibrix": _Dialect("x-aibrix-session-key", True, "vllm", _add_engine_fields),
    "ray": _Dialect("x-session-id", False, "vllm", _add_engine_fields),
}
