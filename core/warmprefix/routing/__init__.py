"""Which agent, or which replica, gets what: the one whose prefix cache holds it, under a bound on its load."""

from warmprefix.routing.agents import AgentRouter
from warmprefix.routing.base import Agent, AssignedBlock, Assignment, RouterStats
from warmprefix.routing.hints import RequestHints, SessionHints
from warmprefix.routing.replica_state import Replica
from warmprefix.routing.replicas import ReplicaRouter, ReplicaStats, Route

__all__ = [
    "Agent",
    "AgentRouter",
    "AssignedBlock",
    "Assignment",
    "Replica",
    "ReplicaRouter",
    "ReplicaStats",
    "RequestHints",
    "Route",
    "RouterStats",
    "SessionHints",
]
