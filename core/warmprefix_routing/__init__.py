"""Routers: each document to an agent, or each request to a replica, whose prefix cache holds it, balanced by load."""

from warmprefix_routing.agent_state import AgentBounds
from warmprefix_routing.agents import AgentRouter
from warmprefix_routing.assignments import AssignedBlock, Assignment, ReplicaStats, RouterStats
from warmprefix_routing.hints import RequestHints, SessionHints
from warmprefix_routing.members import Agent, Replica
from warmprefix_routing.replica_state import ReplicaBounds, ReplicaLoad
from warmprefix_routing.replicas import ReplicaRouter, Route

__all__ = [
    "Agent",
    "AgentBounds",
    "AgentRouter",
    "AssignedBlock",
    "Assignment",
    "Replica",
    "ReplicaBounds",
    "ReplicaLoad",
    "ReplicaRouter",
    "ReplicaStats",
    "RequestHints",
    "Route",
    "RouterStats",
    "SessionHints",
]
