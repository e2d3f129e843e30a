"""Ways to share out documents over agents: those of common applications, and `AgentRouter`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from agent_workloads import AgentRequest
from warmprefix import ContextBlock, EngineReport
from warmprefix_routing import Agent, AgentBounds, AgentRouter, Assignment
from warmprefix_tools.emulator import KvSequence

__all__ = ["ARMS", "OURS", "Arm", "Part", "RouterArm"]

OURS = "AgentRouter"


@dataclass(slots=True, eq=False)
class Part:
    """One prompt: a document of a request that one agent reads, and its outcome."""

    request: AgentRequest
    agent: int
    block: ContextBlock
    assignment: Assignment | None = None
    cached: int = 0
    """Tokens of its prompt that the engine had."""
    prompt: Sequence[int] = ()
    sequence: KvSequence | None = field(default=None, repr=False)


class Arm(ABC):
    """Gives each document of a request to an agent; agents are numbers."""

    def __init__(self, agents: int, seed: int, capacity_tokens: int) -> None:
        self.names = [f"agent-{seed}-{number}" for number in range(agents)]
        self.agents = agents

    def give(self, request: AgentRequest) -> list[Part]:
        """Return the prompts of a request."""
        return [Part(request, self.choose(block), block) for block in request.blocks]

    @abstractmethod
    def choose(self, block: ContextBlock) -> int:
        """Return the agent for one document."""

    def loads(self) -> list[float] | None:
        """Return the load of each live agent; None if this arm does not count loads."""
        return None

    def answered(self, part: Part) -> None:  # noqa: B027 - most ways do not learn
        """Record an answered prompt, of which `part.cached` tokens were cached."""


class RoundRobin(Arm):
    """The next document to the next agent, from request to request."""

    turn = -1

    def choose(self, block: ContextBlock) -> int:
        self.turn += 1
        return self.turn % self.agents


class Hash(Arm):
    """The document's hash modulo the number of agents: always one agent, whatever the loads."""

    def choose(self, block: ContextBlock) -> int:
        digest = blake2b(block.fingerprint, digest_size=8, key=self.names[0].encode()).digest()
        return int.from_bytes(digest, "big") % self.agents


class RouterArm(Arm):
    """`AgentRouter`, with a report on each answer."""

    eps = 0.25

    def __init__(self, agents: int, seed: int, capacity_tokens: int) -> None:
        super().__init__(agents, seed, capacity_tokens)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.router = AgentRouter(
            [Agent(name, capacity_tokens) for name in self.names], bounds=AgentBounds(eps=self.eps)
        )

    def choose(self, block: ContextBlock) -> int:
        raise NotImplementedError("documents of a request are shared out at once")

    def loads(self) -> list[float]:
        return list(self.router.load().values())

    def give(self, request: AgentRequest) -> list[Part]:
        assignment = self.router.assign(request.blocks, conversation=request.conversation)
        return [Part(request, self.numbers[each.agent], each.block, assignment) for each in assignment.blocks]

    def answered(self, part: Part) -> None:
        assert part.assignment is not None
        report = EngineReport(cached_tokens=part.cached, prompt_tokens=len(part.prompt))
        self.router.commit(part.assignment, self.names[part.agent], report, blocks=(part.block,))


class Unbounded(RouterArm):
    """Affinity alone: no load is too high."""

    eps = 1e9


ARMS: dict[str, Callable[[int, int, int], Arm]] = {
    "round robin": RoundRobin,
    "hash": Hash,
    OURS: RouterArm,
    "affinity without a bound": Unbounded,
}
