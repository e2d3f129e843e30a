"""Chain of Agents: each document goes to the agent whose cache holds it, and a manager answers from their summaries.

After Zhang et al., "Chain of Agents: Large Language Models Collaborating on Long-Context Tasks" (2024, arXiv
2406.02818), and ContextPilot's parallel variant of it.
"""

from warmprefix_chain_of_agents.agents import Manager, Worker
from warmprefix_chain_of_agents.chain import ChainOfAgents
from warmprefix_chain_of_agents.memory import Chat, ChatKey, ChatMemory, InMemoryChats
from warmprefix_chain_of_agents.prompts import Prompts
from warmprefix_chain_of_agents.results import (
    AgentReport,
    ChainAnswer,
    ChainOfAgentsError,
    ChainProgress,
    ManagerError,
    Usage,
    WorkersFailedError,
)

__all__ = [
    "AgentReport",
    "ChainAnswer",
    "ChainOfAgents",
    "ChainOfAgentsError",
    "ChainProgress",
    "Chat",
    "ChatKey",
    "ChatMemory",
    "InMemoryChats",
    "Manager",
    "ManagerError",
    "Prompts",
    "Usage",
    "Worker",
    "WorkersFailedError",
]
