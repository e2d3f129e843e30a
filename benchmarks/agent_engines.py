"""Agents in virtual time: the emulator's engines, asked by sessions, and what it took until all had answered."""

from __future__ import annotations

import gc
import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

from agent_arms import Arm, Part
from agent_workloads import AgentRequest, AgentWorkload
from warmprefix_tools.emulator import EmulatorConfig, KvSequence, PrefixCache

__all__ = ["PREAMBLE", "Run", "roomy", "simulate"]

RATES = EmulatorConfig()
"""Of time only; cache sizes are calculated."""
PREAMBLE = 64
"""Tokens of the system prompt: the role, the same in every prompt."""
TASK = 64
"""Tokens of what is to be done with the documents, behind the question."""
ANSWER = 32
"""Tokens of a communication unit."""
BUSY = 0.7
"""How much of the time all agents would compute if nothing was cached: it sets how often requests come."""


@dataclass(slots=True)
class Run:
    """What became of a workload."""

    reads: list[float]
    """By request: seconds from its arrival to the last first token; the answers take equally long with every arm."""
    context_tokens: int = 0
    """Of the documents, which stand behind the preamble."""
    context_cached: int = 0
    worst: float = 0.0
    """The highest load over the mean that there was, once the mean was above what is free."""


class EngineLoads:
    """Tokens given to each agent, much as `AgentRouter` counts them, for ways that count nothing: after `window` tokens
    an agent, they count for 1/e.
    """

    def __init__(self, agents: int, window: int = 65_536, free: int = 4_096) -> None:
        self.loads = dict.fromkeys(range(agents), 0.0)
        self.free = free
        self._window = window

    def give(self, parts: Sequence[Part]) -> None:
        factor = math.exp(-sum(part.block.tokens for part in parts) / (self._window * len(self.loads)))
        for agent in self.loads:
            self.loads[agent] *= factor
        for part in parts:
            self.loads[part.agent] += part.block.tokens


class Engine:
    """One agent's engine: an exact KV cache, one prefill after the other, decoding in parallel."""

    def __init__(self, capacity_tokens: int) -> None:
        self.cache = PrefixCache(capacity_tokens // RATES.block_size + 1, RATES.block_size)
        self.queue: deque[Part] = deque()
        self.computing: Part | None = None
        self.decoding: set[Part] = set()

    def start(self) -> float | None:
        """Start the next prompt if possible, and return its duration."""
        if self.computing is not None or not self.queue:
            return None
        part = self.queue[0]
        sequence = self.cache.allocate(part.prompt, room_for=ANSWER - 1)
        if sequence is None:
            return None
        self.computing = self.queue.popleft()
        part.sequence, part.cached = sequence, sequence.cached_tokens
        return RATES.prefill_seconds(len(part.prompt) - part.cached)

    def prefilled(self) -> None:
        part, self.computing = self.computing, None
        assert part is not None
        self.cache.store(_held(part))
        self.decoding.add(part)

    def finished(self, part: Part) -> None:
        sequence = _held(part)
        for token in _own_tokens(part, ANSWER - 1, 1):
            self.cache.append(sequence, token)
        self.cache.free(sequence)
        self.decoding.remove(part)
        part.sequence = None


def _held(part: Part) -> KvSequence:
    assert part.sequence is not None
    return part.sequence


def prompt_tokens(part: Part) -> list[int]:
    """Return the prompt: preamble, document, then question and instructions, so that the longest prefix recurs."""
    document = _document(part.block.fingerprint, part.block.tokens)
    question = _own_tokens(part, part.request.question_tokens + TASK, 0)
    return [*range(1 << 30, (1 << 30) + PREAMBLE), *document, *question]


@lru_cache(maxsize=1 << 14)
def _document(fingerprint: bytes, tokens: int) -> list[int]:
    """As many token ids as it has, which no other document has in this order."""
    start = int.from_bytes(fingerprint[:3], "big") << 6
    return [*range(start, start + tokens)]


def _own_tokens(part: Part, tokens: int, what: int) -> list[int]:
    """Tokens of a question or an answer, which no other prompt has."""
    return [(2 + what << 30) + part.request.number] * tokens


def roomy(workload: AgentWorkload, agents: int) -> int:
    """Tokens of a cache that an agent's even share of everything does not fill, all being computed there."""
    own = PREAMBLE + TASK + ANSWER
    whole = sum(
        block.tokens + own + request.question_tokens for request in workload.requests for block in request.blocks
    )
    return max(whole * 5 // (4 * agents), 50_000)


def simulate(workload: AgentWorkload, arm: Arm, capacity_tokens: int, seed: int) -> Run:
    """Run a workload to its end. Of one seed, requests come at the same times whatever the arm."""
    collecting = gc.isenabled()
    gc.disable()  # of a million KV blocks none is garbage before the end
    try:
        return _Simulation(workload, arm, capacity_tokens, seed).run()
    finally:
        if collecting:
            gc.enable()


class _Simulation:
    def __init__(self, workload: AgentWorkload, arm: Arm, capacity_tokens: int, seed: int) -> None:
        self.requests = workload.requests
        self.arm = arm
        self.engines = [Engine(capacity_tokens) for _ in arm.names]
        self.loads = EngineLoads(len(arm.names))
        self.now = 0.0
        self.arrived = [0.0] * len(self.requests)
        self.left = [len(request.blocks) for request in self.requests]
        self.outcome = Run([0.0] * len(self.requests))
        self._numbers = count()
        self._events: list[tuple[float, int, str, Part | AgentRequest]] = []
        own = PREAMBLE + TASK
        computing = sum(
            RATES.prefill_seconds(own + request.question_tokens + block.tokens)
            for request in self.requests
            for block in request.blocks
        )
        interval = computing / (BUSY * len(self.engines)) / len(self.requests)
        at, rng = 0.0, random.Random(seed)
        for request in self.requests:
            at += rng.expovariate(1 / interval)
            self._at(at, "request", request)

    def _at(self, when: float, what: str, whom: Part | AgentRequest) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what, whom))

    def run(self) -> Run:
        while self._events:
            self.now, _, what, whom = heapq.heappop(self._events)
            if isinstance(whom, AgentRequest):
                self._request(whom)
            else:
                engine = self.engines[whom.agent]
                if what == "first token":
                    engine.prefilled()
                    number = whom.request.number
                    self.outcome.reads[number] = self.now - self.arrived[number]
                    self._at(self.now + (ANSWER - 1) / RATES.decode_rate, "answer", whom)
                else:
                    engine.finished(whom)
                    self._answered(whom)
                self._start(whom.agent)
        if any(self.left):
            raise RuntimeError("a request was never answered")
        return self.outcome

    def _request(self, request: AgentRequest) -> None:
        self.arrived[request.number] = self.now
        parts = self.arm.give(request)
        outcome, loads = self.outcome, self.loads
        loads.give(parts)
        shown = self.arm.loads() or list(loads.loads.values())
        highest, mean = max(shown), sum(shown) / len(shown)
        if mean > loads.free:
            outcome.worst = max(outcome.worst, highest / mean)
        for part in parts:
            part.prompt = prompt_tokens(part)
            self.engines[part.agent].queue.append(part)
        for part in parts:
            self._start(part.agent)

    def _start(self, agent: int) -> None:
        engine = self.engines[agent]
        seconds = engine.start()
        if seconds is not None and engine.computing is not None:
            self._at(self.now + seconds, "first token", engine.computing)

    def _answered(self, part: Part) -> None:
        outcome = self.outcome
        outcome.context_tokens += part.block.tokens
        outcome.context_cached += min(max(part.cached - PREAMBLE, 0), part.block.tokens)
        self.arm.answered(part)
        part.prompt = ()
        self.left[part.request.number] -= 1
