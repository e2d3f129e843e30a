"""Which agent, or which replica, gets what: the one whose prefix cache holds it, under a bound on its load."""

from warmprefix.routing.agents import AgentRouter
from warmprefix.routing.base import Agent, AssignedBlock, Assignment, RouterStats

__all__ = ["Agent", "AgentRouter", "AssignedBlock", "Assignment", "RouterStats"]
