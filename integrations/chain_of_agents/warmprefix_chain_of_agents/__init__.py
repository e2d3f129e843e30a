"""Chain of Agents: each document goes to the agent that already knows it, and the manager answers from what they say.

After Zhang et al., "Chain of Agents: Large Language Models Collaborating on Long-Context Tasks" (2024, arXiv
2406.02818), and ContextPilot's parallel variant of it.
"""

from warmprefix_chain_of_agents.agents import Manager, Worker
from warmprefix_chain_of_agents.chain import ChainOfAgents
from warmprefix_chain_of_agents.errors import ChainOfAgentsError, ManagerError, WorkersFailedError
from warmprefix_chain_of_agents.memory import Chat, ChatKey, ChatMemory, InMemoryChats
from warmprefix_chain_of_agents.prompts import Prompts
from warmprefix_chain_of_agents.results import AgentReport, Answer, Progress, Usage

__all__ = [
    "AgentReport",
    "Answer",
    "ChainOfAgents",
    "ChainOfAgentsError",
    "Chat",
    "ChatKey",
    "ChatMemory",
    "InMemoryChats",
    "Manager",
    "ManagerError",
    "Progress",
    "Prompts",
    "Usage",
    "Worker",
    "WorkersFailedError",
]
