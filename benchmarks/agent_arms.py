"""Ways to share out documents over agents: those of common applications, and `AgentRouter`."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from agent_workloads import AgentRequest
from warmprefix import ContextBlock, ContextPlan, ContextPlanner, EngineReport
from warmprefix_routing import Agent, AgentRouter, Assignment
from warmprefix_tools.emulator import KvSequence

__all__ = ["ARMS", "MAIN", "OURS", "Arm", "Part", "RouterArm"]

OURS = "AgentRouter"
MAIN = ("round robin", "random", "hash", "least loaded", OURS)


@dataclass(slots=True, eq=False)
class Part:
    """One prompt of a request: the documents that one agent reads in it, and its outcome."""

    request: AgentRequest
    agent: int
    blocks: tuple[ContextBlock, ...]
    assignment: Assignment | None = None
    plan: ContextPlan | None = None
    lost: bool = False
    """Its agent died."""
    cached: int = 0
    """Tokens of its prompt that the engine had."""
    prompt: Sequence[int] = ()
    sequence: KvSequence | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        """Tokens of its documents."""
        return sum(block.tokens for block in self.blocks)


class Arm(ABC):
    """Gives each document of a request to an agent; agents are numbers, and may die."""

    together = False
    """Whether an agent reads all its documents of a request in one prompt, rather than each in one of its own."""

    def __init__(self, agents: int, seed: int, capacity_tokens: int) -> None:
        self.names = [f"agent-{seed}-{number}" for number in range(agents)]
        self.live = list(range(agents))
        self.rng = random.Random(seed)
        self.seconds: list[float] = []
        """Duration of each decision."""

    def give(self, request: AgentRequest) -> list[Part]:
        """Return the prompts of a request."""
        began = time.perf_counter()
        chosen = [(block, self.choose(block)) for block in request.blocks]
        self.seconds.append(time.perf_counter() - began)
        return self._parts(request, chosen)

    @abstractmethod
    def choose(self, block: ContextBlock) -> int:
        """Return the agent for one document."""

    def _parts(self, request: AgentRequest, chosen: Iterable[tuple[ContextBlock, int]]) -> list[Part]:
        if not self.together:
            return [Part(request, agent, (block,)) for block, agent in chosen]
        segments: dict[int, list[ContextBlock]] = {}
        for block, agent in chosen:
            segments.setdefault(agent, []).append(block)
        return [Part(request, agent, tuple(blocks)) for agent, blocks in segments.items()]

    def loads(self) -> list[float] | None:
        """Return the load of each live agent; None if this arm does not count loads."""
        return None

    def answered(self, part: Part) -> None:  # noqa: B027 - most ways do not learn
        """Record an answered prompt, of which `part.cached` tokens were cached."""

    def fail(self, agent: int) -> None:
        """Remove an agent that died."""
        self.live.remove(agent)

    def again(self, lost: Sequence[Part]) -> list[Part]:
        """Return new prompts for the documents of a dead agent."""
        return [
            new
            for part in lost
            for new in self._parts(part.request, [(block, self.choose(block)) for block in part.blocks])
        ]


class RoundRobin(Arm):
    """The next document to the next agent, from request to request."""

    turn = -1

    def choose(self, block: ContextBlock) -> int:
        self.turn += 1
        return self.live[self.turn % len(self.live)]


class RoundRobinTogether(RoundRobin):
    together = True


class Random(Arm):
    def choose(self, block: ContextBlock) -> int:
        return self.rng.choice(self.live)


class Hash(Arm):
    """The document's hash modulo the number of agents: always one agent, whatever the loads."""

    def choose(self, block: ContextBlock) -> int:
        digest = blake2b(block.fingerprint, digest_size=8, key=self.names[0].encode()).digest()
        return self.live[int.from_bytes(digest, "big") % len(self.live)]


class LeastLoaded(Arm):
    """The agent with the fewest tokens in progress; among several, the one that has received the fewest."""

    def __init__(self, agents: int, seed: int, capacity_tokens: int) -> None:
        super().__init__(agents, seed, capacity_tokens)
        self.open = [0] * agents
        self.given = [0] * agents

    def choose(self, block: ContextBlock) -> int:
        chosen = min(self.live, key=lambda agent: (self.open[agent], self.given[agent]))
        self.open[chosen] += block.tokens
        self.given[chosen] += block.tokens
        return chosen

    def answered(self, part: Part) -> None:
        self.open[part.agent] -= part.tokens


class RouterArm(Arm):
    """`AgentRouter`, with a report on each answer."""

    eps = 0.25

    def __init__(self, agents: int, seed: int, capacity_tokens: int) -> None:
        super().__init__(agents, seed, capacity_tokens)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.router = AgentRouter([Agent(name, capacity_tokens) for name in self.names], eps=self.eps)

    def choose(self, block: ContextBlock) -> int:
        raise NotImplementedError("documents of a request are shared out at once")

    def loads(self) -> list[float]:
        return list(self.router.load().values())

    def give(self, request: AgentRequest) -> list[Part]:
        began = time.perf_counter()
        assignment = self.router.assign(request.blocks, conversation=request.conversation, together=self.together)
        self.seconds.append(time.perf_counter() - began)
        return self._assigned(request, assignment)

    def _assigned(self, request: AgentRequest, assignment: Assignment) -> list[Part]:
        chosen = [(assigned.block, self.numbers[assigned.agent]) for assigned in assignment.blocks]
        parts = self._parts(request, chosen)
        for part in parts:
            part.assignment = assignment
        return parts

    def answered(self, part: Part) -> None:
        assert part.assignment is not None
        report = EngineReport(cached_tokens=part.cached, prompt_tokens=len(part.prompt))
        self.router.commit(part.assignment, self.names[part.agent], report, blocks=part.blocks, plan=part.plan)

    def fail(self, agent: int) -> None:
        super().fail(agent)
        self.router.fail(self.names[agent])

    def again(self, lost: Sequence[Part]) -> list[Part]:
        found: list[Part] = []
        done: set[tuple[str, int]] = set()
        for part in lost:
            assert part.assignment is not None
            if (part.assignment.id, part.agent) not in done:
                done.add((part.assignment.id, part.agent))
                again = self.router.reassign(part.assignment, self.names[part.agent])
                found += self._assigned(part.request, again)
        return found


class Unbounded(RouterArm):
    """Affinity alone: no load is too high."""

    eps = 1e9


class RouterTogether(RouterArm):
    """One prompt per agent, in the order that a `ContextPlanner` finds for that agent."""

    together = True

    def __init__(self, agents: int, seed: int, capacity_tokens: int) -> None:
        super().__init__(agents, seed, capacity_tokens)
        self.planner = ContextPlanner(capacity_tokens=capacity_tokens)

    def _assigned(self, request: AgentRequest, assignment: Assignment) -> list[Part]:
        parts = super()._assigned(request, assignment)
        for part in parts:
            part.plan = self.planner.plan(part.blocks, model=self.names[part.agent])
            part.blocks = tuple([planned.block for planned in part.plan.blocks])
        return parts

    def answered(self, part: Part) -> None:
        super().answered(part)
        assert part.plan is not None
        self.planner.commit(part.plan)


ARMS: dict[str, Callable[[int, int, int], Arm]] = {
    "round robin": RoundRobin,
    "random": Random,
    "hash": Hash,
    "least loaded": LeastLoaded,
    OURS: RouterArm,
    "affinity without a bound": Unbounded,
    "round robin, one prompt an agent": RoundRobinTogether,
    "AgentRouter, one prompt an agent": RouterTogether,
}
