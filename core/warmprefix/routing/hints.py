"""`SessionHints`: what the router that a deployment already runs is told, so that it places requests well by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from warmprefix.plan import ContextPlan
from warmprefix.routing.keys import head_key, session_key, tenant_key

__all__ = ["RequestHints", "Router", "SessionHints"]

Router = Literal["production-stack", "sglang", "llm-d", "dynamo", "aibrix", "ray"]

_Engine = Literal["vllm", "sglang"]

_I32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RequestHints:
    """What goes with one request: `create(..., extra_headers=hints.headers, extra_body=hints.extra_body)`.

    Both are the caller's own, to be added to.
    """

    headers: dict[str, str]
    extra_body: dict[str, Any]


class SessionHints:
    """Hands the placement of requests to a router that is there, and only orders them.

    For each it is the header or body field that it knows; one that a router has not got is left out. No name of a
    tenant or conversation is told: session ids and keys are digests, as hard to guess as the planner's `cache_salt`, if
    there is a tenant.

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
        """Remember what to send.

        Args:
            router: `"production-stack"` is vLLM's, `"sglang"` its gateway, also known as smg.
            session_header: The header for the session, where the deployment has given it another name.
            head_blocks: How many of the first blocks, in planned order, are the routing key of a request without a
                conversation, where the router takes one: requests that begin with the same meet at the same replica.
                0 for no key.
            engine: Which engine stands behind the router, for the field `priority` of its API: vLLM by default, and
                SGLang behind its own gateway.

        Raises:
            ValueError: `router` or `engine` is another value than the above, `head_blocks` is negative, or
                `session_header` is empty.
        """
        if router not in _DIALECTS:
            raise ValueError(f"router must be one of {', '.join(_DIALECTS)}, got {router!r}")
        if engine not in (None, *get_args(_Engine)):
            raise ValueError(f"engine must be 'vllm', 'sglang' or None, got {engine!r}")
        if head_blocks < 0:
            raise ValueError(f"head_blocks must be 0 or more, got {head_blocks}")
        if session_header == "":
            raise ValueError("session_header must not be empty; give None for the router's own")
        dialect = _DIALECTS[router]
        self._dialect = dialect
        self._session_header = dialect.session_header if session_header is None else session_header
        self._head_blocks = head_blocks if dialect.takes_keys else 0
        self._engine: _Engine = dialect.engine if engine is None else engine

    def for_plan(self, plan: ContextPlan, *, priority: int | None = None) -> RequestHints:
        """What to send with the plan's request.

        Args:
            plan: Tells the conversation, the tenant's `cache_salt`, and what the prompt begins with.
            priority: Higher is more urgent, and 0 is what requests without one have, whatever the router and the
                engine count in. vLLM refuses any other than 0 unless it schedules by priority.

        Raises:
            TypeError: `plan` is no `ContextPlan`, or `priority` no integer.
            ValueError: `priority` has more than 32 bits.
        """
        if not isinstance(plan, ContextPlan):
            raise TypeError(f"plan must be a ContextPlan, got {type(plan).__name__}")
        if priority is not None:
            if isinstance(priority, bool) or not isinstance(priority, int):
                raise TypeError(f"priority must be an int or None, got {type(priority).__name__}")
            if not -_I32 <= priority <= _I32:
                raise ValueError(f"priority must be between -{_I32} and {_I32}, got {priority}")
        hints = RequestHints({}, {})
        key = session_key(plan)
        if key is None and self._head_blocks:
            key = head_key(plan, self._head_blocks)
        if key is not None:
            hints.headers[self._session_header] = key
        self._dialect.add(hints, plan, priority, self._engine)
        return hints


_Add = Callable[[RequestHints, ContextPlan, int | None, _Engine], None]


class _Dialect(NamedTuple):
    """What one router understands."""

    session_header: str
    takes_keys: bool
    """Whether the header's value may be any key, for which it finds the same replica again, and not a session only."""
    engine: _Engine
    add: _Add


def _engines_own(hints: RequestHints, plan: ContextPlan, priority: int | None, engine: _Engine) -> None:
    """The body reaches the engine as it is."""
    if plan.cache_salt is not None:
        hints.extra_body["cache_salt"] = plan.cache_salt
    if priority is not None:
        hints.extra_body["priority"] = priority if engine == "sglang" else -priority  # vLLM's lowest comes first


def _gateways(hints: RequestHints, plan: ContextPlan, priority: int | None, engine: _Engine) -> None:
    """Its classes are system, interactive, default and bulk; the first is for its own traffic."""
    _engines_own(hints, plan, priority, engine)
    if priority is not None:
        urgency = "interactive" if priority > 0 else "bulk" if priority < 0 else "default"
        hints.headers["X-SMG-Priority"] = urgency


def _llm_ds(hints: RequestHints, plan: ContextPlan, priority: int | None, engine: _Engine) -> None:
    """It shares out fairly among those that it is told apart; its priorities are objectives that an operator names."""
    _engines_own(hints, plan, priority, engine)
    if (tenant := tenant_key(plan)) is not None:
        hints.headers["x-llm-d-inference-fairness-id"] = tenant


def _dynamos(hints: RequestHints, plan: ContextPlan, priority: int | None, engine: _Engine) -> None:
    """It turns priorities into the engine's by itself."""
    extension: dict[str, Any] = {}
    if plan.cache_salt is not None:
        extension["cache_salt"] = plan.cache_salt
    if priority is not None:
        extension["agent_hints"] = {"priority": priority}
    if extension:
        hints.extra_body["nvext"] = extension


_DIALECTS: dict[str, _Dialect] = {
    "production-stack": _Dialect("x-user-id", False, "vllm", _engines_own),
    "sglang": _Dialect("X-SMG-Routing-Key", True, "sglang", _gateways),
    "llm-d": _Dialect("x-session-id", False, "vllm", _llm_ds),
    "dynamo": _Dialect("X-Dynamo-Session-ID", False, "vllm", _dynamos),
    "aibrix": _Dialect("x-aibrix-session-key", True, "vllm", _engines_own),
    "ray": _Dialect("x-session-id", False, "vllm", _engines_own),
}
