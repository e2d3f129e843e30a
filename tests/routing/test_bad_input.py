"""Messages for bad input: they name the argument, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from warmprefix import ContextPlanner, fingerprint
from warmprefix.errors import NoAgentError
from warmprefix_routing import Agent, AgentBounds, AgentRouter, Replica, ReplicaBounds, ReplicaRouter, SessionHints

agent: Any = Agent
replica: Any = Replica
agents: Any = AgentRouter
replicas: Any = ReplicaRouter
agent_bounds: Any = AgentBounds
replica_bounds: Any = ReplicaBounds
hints: Any = SessionHints
Case = tuple[Callable[[], object], type[Exception], str]


def plan(**options: Any) -> object:
    return ContextPlanner().plan(["text"], **options)


def commit_plan_of(**options: Any) -> object:
    router = replicas(["a"])
    return router.commit(router.route(["text"], tenant="one"), plan=plan(**options))


MEMBERS: list[Case] = [
    (lambda: agent(3), TypeError, "name must be a str, got int"),
    (lambda: agent(""), ValueError, "name must not be empty, got ''"),
    (lambda: agent("a", "b"), TypeError, "capacity_tokens must be an int or None, got str"),
    (lambda: agent("a", 0), ValueError, "capacity_tokens must be 1 or more, or None, got 0"),
    (lambda: agent("a", weight="b"), TypeError, "weight must be a number, got str"),
    (lambda: agent("a", weight=0.0), ValueError, "weight must be positive and finite, got 0.0"),
    (lambda: agent("a", weight=float("nan")), ValueError, "weight must be positive and finite, got nan"),
    (lambda: agent("a", weight=float("inf")), ValueError, "weight must be positive and finite, got inf"),
    (lambda: replica("a", -1), ValueError, "capacity_tokens must be 1 or more, or None, got -1"),
]
AGENT_ROUTERS: list[Case] = [
    (lambda: agents("ab"), TypeError, "agents must be an iterable of Agent or str, got one str"),
    (lambda: agents(["a", "a"]), ValueError, "agents must have different names, got 'a' twice"),
    (lambda: agents(["a", agent("a", 5)]), ValueError, "agents must have different names, got 'a' twice"),
    (lambda: agents([3]), TypeError, "agent must be an Agent or its name, got int"),
    (lambda: agents([""]), ValueError, "name must not be empty, got ''"),
    (lambda: agent_bounds(eps="x"), TypeError, "eps must be a number, got str"),
    (lambda: agent_bounds(eps=-0.1), ValueError, "eps must be 0 or more, and finite, got -0.1"),
    (lambda: agent_bounds(eps=float("nan")), ValueError, "eps must be 0 or more, and finite, got nan"),
    (lambda: agent_bounds(eps=float("inf")), ValueError, "eps must be 0 or more, and finite, got inf"),
    (lambda: agent_bounds(free_tokens=-1), ValueError, "free_tokens must be 0 or more, got -1"),
    (lambda: agent_bounds(prompt_tokens=-1), ValueError, "prompt_tokens must be 0 or more, got -1"),
    (lambda: agent_bounds(window_tokens=0), ValueError, "window_tokens must be 1 or more, got 0"),
    (lambda: agent_bounds(max_blocks=0), ValueError, "max_blocks must be 1 or more, got 0"),
    (lambda: agent_bounds(max_tenants=0), ValueError, "max_tenants must be 1 or more, got 0"),
    (lambda: agent_bounds(max_bytes=0), ValueError, "max_bytes must be 1 or more, got 0"),
    (lambda: agent_bounds(max_conversations=0), ValueError, "max_conversations must be 1 or more, got 0"),
    (lambda: agent_bounds(max_open=0), ValueError, "max_open must be 1 or more, got 0"),
    (lambda: agents(sharing="redis://"), TypeError, "sharing must be an OrderSharing or None, got str"),
    (lambda: agents(["a"]).join("b", feed=3), TypeError, "feed must be a ResidencyFeed or None, got int"),
    (lambda: agents(["a"]).join("a"), ValueError, "agents must have different names, got 'a' twice"),
    (lambda: agents(["a"]).leave("b"), ValueError, "agent must be one of 'a', got 'b'"),
    (lambda: agents(["a"]).fail("b"), ValueError, "agent must be one of 'a', got 'b'"),
    (lambda: agents().assign(["x"]), NoAgentError, "no agent is available"),
    (lambda: agents(["a"]).assign(["x"], []), ValueError, "agents must have one name or more, got none"),
    (lambda: agents(["a"]).assign(["x"], "a"), TypeError, "agents must be an iterable of names, got one str"),
    (lambda: agents(["a"]).assign(["x"], ["a", "a"]), ValueError, "agents must be different, got 'a' twice"),
    (
        lambda: agents(["a"]).assign(["x"], ["a", "b"]),
        ValueError,
        "agents must be registered, got 'b'; registered: 'a'",
    ),
    (lambda: agents(["a"]).assign("x"), TypeError, "blocks must be"),
    (lambda: agents(["a"]).assign(None), TypeError, "blocks must be"),
    (lambda: agents(["a"]).assign([b"x"]), TypeError, "blocks[0]"),
    (lambda: agents(["a"]).assign(["x"], conversation=5), TypeError, "conversation must be a str or None, got int"),
    (lambda: agents(["a"]).assign(["x"], conversation=""), ValueError, "conversation must not be empty, got ''"),
    (lambda: agents(["a"]).assign(["x"], tenant=5), TypeError, "tenant must be a str or None, got int"),
    (lambda: agents(["a"]).end(5), TypeError, "conversation must be a str or None, got int"),
    (lambda: agents(["a"]).end(None), TypeError, "conversation must be a str, got NoneType"),
    (lambda: agents(["a"]).end(""), ValueError, "conversation must not be empty, got ''"),
    (lambda: agents(["a"]).commit("x"), TypeError, "assignment must be an Assignment, got str"),
    (lambda: agents(["a"]).abandon(None), TypeError, "assignment must be an Assignment, got NoneType"),
    (lambda: agents(["a"]).reassign(None, "a"), TypeError, "assignment must be an Assignment, got NoneType"),
]
REPLICA_ROUTERS: list[Case] = [
    (lambda: replicas("abc"), TypeError, "replicas must be an iterable of Replica or str, got one str"),
    (lambda: replicas([1]), TypeError, "replica must be a Replica or its name, got int"),
    (lambda: replicas([agent("a")]), TypeError, "replica must be a Replica or its name, got Agent"),
    (lambda: replicas(["a", "a"]), ValueError, "replicas must have different names, got 'a' twice"),
    (lambda: replicas([""]), ValueError, "name must not be empty, got ''"),
    (lambda: replica_bounds(eps=-0.1), ValueError, "eps must be 0 or more, and finite, got -0.1"),
    (
        lambda: replica_bounds(held_weight=float("inf")),
        ValueError,
        "held_weight must be 0 or more, and finite, got inf",
    ),
    (lambda: replica_bounds(waiting_weight=-1), ValueError, "waiting_weight must be 0 or more, and finite, got -1"),
    (lambda: replica_bounds(eps=float("nan")), ValueError, "eps must be 0 or more, and finite, got nan"),
    (lambda: replica_bounds(floor_tokens=-1), ValueError, "floor_tokens must be 0 or more, and finite, got -1"),
    (lambda: replica_bounds(window_tokens=0), ValueError, "window_tokens must be 1 or more, got 0"),
    (lambda: replicas(capacity_tokens=0), ValueError, "capacity_tokens must be 1 or more, or None, got 0"),
    (lambda: replicas(bounds=replica_bounds(max_nodes=0)), ValueError, "max_nodes must be 1 or more, got 0"),
    (lambda: replica_bounds(max_scopes=0), ValueError, "max_scopes must be 1 or more, got 0"),
    (lambda: replica_bounds(max_tenants=0), ValueError, "max_tenants must be 1 or more, got 0"),
    (lambda: replica_bounds(max_conversations=0), ValueError, "max_conversations must be 1 or more, got 0"),
    (lambda: replica_bounds(max_open_routes=0), ValueError, "max_open_routes must be 1 or more, got 0"),
    (lambda: replica_bounds(max_bytes=0), ValueError, "max_bytes must be 1 or more, got 0"),
    (lambda: replicas(["a"]).target("b"), ValueError, "replica must be one of 'a', got 'b'"),
    (lambda: replicas(["a"]).join("b", feed=3), TypeError, "feed must be a ResidencyFeed or None, got int"),
    (lambda: replicas().route(), NoAgentError, "no replica is available"),
    (lambda: replicas(["a"]).route("text"), TypeError, "blocks must be"),
    (lambda: replicas(["a"]).route(tenant=1), TypeError, "tenant must be a str or None, got int"),
    (lambda: replicas(["a"]).route(preamble=b"x"), TypeError, "preamble must be a str or None, got bytes"),
    (lambda: replicas(["a"]).route(conversation=""), ValueError, "conversation must not be empty, got ''"),
    (lambda: replicas(["a"]).route(prompt_tokens=-1), ValueError, "prompt_tokens must be 0 or more, got -1"),
    (lambda: replicas(["a"]).route(prompt_tokens=True), TypeError, "prompt_tokens must be an int or None, got bool"),
    (lambda: replicas(["a"]).route(replicas=[]), ValueError, "replicas must have one name or more, got none"),
    (lambda: replicas(["a"]).route(replicas="a"), TypeError, "replicas must be an iterable of names, got one str"),
    (lambda: replicas(["a"]).route(replicas=["b"]), ValueError, "replicas must be registered, got 'b'"),
    (lambda: replicas(["a"]).commit("r"), TypeError, "route must be a Route, got str"),
    (lambda: replicas(["a"]).abandon("r"), TypeError, "route must be a Route, got str"),
    (lambda: replicas(["a"]).prefilled("r"), TypeError, "route must be a Route, got str"),
    (lambda: commit_plan_of(tenant="two"), ValueError, "plan must have the route's tenant 'one', got 'two'"),
    (
        lambda: commit_plan_of(tenant="one", preamble="p"),
        ValueError,
        f"plan must have the route's preamble None, got {fingerprint('p')!r}",
    ),
]
HINTS: list[Case] = [
    (lambda: hints("nginx"), ValueError, "router must be one of production-stack"),
    (lambda: hints("nginx"), ValueError, "got 'nginx'"),
    (lambda: hints("ray", engine="tgi"), ValueError, "engine must be 'vllm', 'sglang' or None, got 'tgi'"),
    (lambda: hints("ray", head_blocks=-1), ValueError, "head_blocks must be 0 or more, got -1"),
    (lambda: hints("ray", head_blocks=1.5), TypeError, "head_blocks must be an int, got float"),
    (lambda: hints("ray", session_header=""), ValueError, "session_header must not be empty, got ''"),
    (lambda: hints("ray", session_header=5), TypeError, "session_header must be a str or None, got int"),
    (lambda: hints("ray").for_plan("plan"), TypeError, "plan must be a ContextPlan, got str"),
    (lambda: hints("ray").for_plan(plan(), priority=1.5), TypeError, "priority must be an int or None, got float"),
    (lambda: hints("ray").for_plan(plan(), priority=True), TypeError, "priority must be an int or None, got bool"),
    (lambda: hints("ray").for_plan(plan(), priority="high"), TypeError, "priority must be an int or None, got str"),
    (
        lambda: hints("ray").for_plan(plan(), priority=2**31),
        ValueError,
        "priority must be between -2147483647 and 2147483647, got 2147483648",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), [*MEMBERS, *AGENT_ROUTERS, *REPLICA_ROUTERS, *HINTS])
def test_message_names_argument_value_and_what_is_allowed(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)
