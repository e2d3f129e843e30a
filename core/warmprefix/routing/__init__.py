"""Routers: each document to an agent, or each request to a replica, whose prefix cache holds it, balanced by load."""

from warmprefix.routing.agents import AgentRouter
from warmprefix.routing.assignments import AssignedBlock, Assignment, RouterStats
from warmprefix.routing.hints import RequestHints, SessionHints
from warmprefix.routing.members import Agent, Replica
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
