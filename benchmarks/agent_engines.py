"""Agents in virtual time: the emulator's engines, asked by sessions, and what it took until all had answered."""

from __future__ import annotations

import gc
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count, pairwise
from typing import Literal

from agent_arms import Arm, Part, RouterArm
from agent_workloads import AgentRequest, AgentWorkload
from warmprefix_tools.emulator import EmulatorConfig, KvSequence, PrefixCache

__all__ = ["PREAMBLE", "EngineLoads", "Kill", "Run", "Sessions", "prompt_tokens", "roomy", "simulate"]

Sessions = Literal["sessions", "turns", "backlog"]
"""Requests come at random; or turns of conversations, each after the one before was answered; or all at once."""

RATES = EmulatorConfig()
"""Of time only; cache sizes are given."""
PREAMBLE = 64
"""Tokens of the system prompt: the role, the same in every prompt."""
TASK = 64
"""Tokens of what is to be done with the documents, behind the question."""
ANSWER = 32
"""Tokens of a communication unit."""
BUSY = 0.7
"""How much of the time all agents would compute if nothing was cached: it sets how often requests come."""
THINKING = 2.0
"""Seconds, on average, before the next turn."""
AT_ONCE = 8
"""Requests under way in a backlog."""


@dataclass(frozen=True, slots=True)
class Kill:
    """An agent dies when this request arrives."""

    agent: int
    request: int


@dataclass(slots=True)
class Run:
    """What became of a workload."""

    makespans: list[float]
    """By request, from its arrival until its last document was answered for."""
    reads: list[float]
    """The time until the last first token; the answers take equally long with every arm."""
    seconds: float
    """From the first arrival until the last answer."""
    prompt_tokens: int
    cached_tokens: int
    context_tokens: int
    context_cached: int
    """Of the documents, which stand behind the preamble."""
    answered: int
    """Documents."""
    worst: float
    """The highest load over the mean that there was, once the mean was above what is free."""
    beyond: float
    """The highest load over the highest that the bound allows, `max(free, (1 + eps) * mean)`."""
    given: list[int]
    """Tokens of documents given to each agent."""
    lost: int = 0
    """Prompts that a dead agent did not answer."""
    kept: int = 0
    """Documents that another agent had read before the death and that went to such an agent when they came again."""
    kept_of: int = 0
    moved_to: dict[int, int] = field(default_factory=dict)
    """How many documents that only the dead agent had read went to which agent when they came again."""


class EngineLoads:
    """Tokens given to each agent, much as `AgentRouter` counts them, for ways that count nothing: after `window` tokens
    an agent, they count for 1/e.
    """

    def __init__(self, agents: int, window: int = 65_536, free: int = 4_096) -> None:
        self.loads = dict.fromkeys(range(agents), 0.0)
        self.free = free
        self._window = window

    def give(self, parts: Sequence[Part]) -> None:
        factor = math.exp(-sum(part.tokens for part in parts) / (self._window * len(self.loads)))
        for agent in self.loads:
            self.loads[agent] *= factor
        for part in parts:
            self.loads[part.agent] += part.tokens


class Engine:
    """One agent's engine: an exact KV cache, one prefill after the other, decoding in parallel."""

    def __init__(self, capacity_tokens: int, base_ttft_ms: float) -> None:
        self.cache = PrefixCache(capacity_tokens // RATES.block_size + 1, RATES.block_size)
        self.rates = replace(RATES, base_ttft_ms=base_ttft_ms)
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
        return self.rates.prefill_seconds(len(part.prompt) - part.cached)

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

    def unanswered(self) -> list[Part]:
        computing = [] if self.computing is None else [self.computing]
        return [*self.decoding, *computing, *self.queue]


def _held(part: Part) -> KvSequence:
    assert part.sequence is not None
    return part.sequence


def prompt_tokens(part: Part) -> list[int]:
    """Return the prompt: preamble, documents, then question and instructions, so that the longest prefix recurs."""
    prompt = [*range(1 << 30, (1 << 30) + PREAMBLE)]
    for block in part.blocks:
        prompt += _document(block.fingerprint, block.tokens)
    return prompt + _own_tokens(part, part.request.question_tokens + TASK, 0)


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


def simulate(
    workload: AgentWorkload,
    arm: Arm,
    capacity_tokens: int,
    sessions: Sessions,
    seed: int,
    *,
    base_ttft_ms: float = RATES.base_ttft_ms,
    kill: Kill | None = None,
    prompts: Callable[[Part], list[int]] | None = None,
) -> Run:
    """Run a workload to its end. Of one seed, requests come at the same times whatever the arm.

    `base_ttft_ms` is the cost of each prompt in addition to its tokens; `prompts` defaults to `prompt_tokens`.
    """
    collecting = gc.isenabled()
    gc.disable()  # of a million KV blocks none is garbage before the end
    try:
        return _Simulation(workload, arm, capacity_tokens, sessions, seed, base_ttft_ms, kill, prompts).run()
    finally:
        if collecting:
            gc.enable()


class _Simulation:
    def __init__(
        self,
        workload: AgentWorkload,
        arm: Arm,
        capacity_tokens: int,
        sessions: Sessions,
        seed: int,
        base_ttft_ms: float,
        kill: Kill | None,
        prompts: Callable[[Part], list[int]] | None,
    ) -> None:
        self.prompts = prompt_tokens if prompts is None else prompts
        self.requests = workload.requests
        self.arm = arm
        self.kill = kill
        self.engines = [Engine(capacity_tokens, base_ttft_ms) for _ in arm.names]
        self.loads = EngineLoads(len(arm.names))
        self.eps = RouterArm.eps
        self.now = 0.0
        self.arrived = [0.0] * len(self.requests)
        self.arrivals = 0
        self.left = [0] * len(self.requests)
        self.readers: dict[bytes, set[int]] = {}
        """Who has read a document."""
        self.before_death: dict[bytes, set[int]] = {}
        """The same when the agent died, of the documents that have not come again."""
        zeros = [0.0] * len(self.requests)
        self.outcome = Run(zeros, [*zeros], 0.0, 0, 0, 0, 0, 0, 0.0, 0.0, [0] * len(arm.names))
        self._numbers = count()
        self._events: list[tuple[float, int, str, Part | AgentRequest]] = []
        self._next: dict[int, AgentRequest] = {}
        rng = random.Random(seed)
        self._thinking = [rng.expovariate(1 / THINKING) for _ in self.requests]
        self._first(sessions, rng)

    def _first(self, sessions: Sessions, rng: random.Random) -> None:
        """Let the first requests come; the others follow answers."""
        if sessions == "backlog":
            self._thinking = [0.0] * len(self.requests)
            for request in self.requests[:AT_ONCE]:
                self._at(0.0, "request", request)
            self._waiting = deque(self.requests[AT_ONCE:])
            return
        self._waiting = deque()
        own = PREAMBLE + TASK
        computing = sum(
            RATES.prefill_seconds(own + request.question_tokens + block.tokens)
            for request in self.requests
            for block in request.blocks
        )
        interval = computing / (BUSY * len(self.engines)) / len(self.requests)
        heads = list(self.requests)
        if sessions == "turns":
            conversations: dict[str, list[AgentRequest]] = {}
            for request in self.requests:
                conversations.setdefault(request.conversation, []).append(request)
            for turns in conversations.values():
                self._next.update((turn.number, after) for turn, after in pairwise(turns))
            heads = [turns[0] for turns in conversations.values()]
            interval *= len(self.requests) / len(heads)
        at = 0.0
        for request in heads:
            at += rng.expovariate(1 / interval)
            self._at(at, "request", request)

    def _at(self, when: float, what: str, whom: Part | AgentRequest) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what, whom))

    def run(self) -> Run:
        while self._events:
            self.now, _, what, whom = heapq.heappop(self._events)
            if isinstance(whom, AgentRequest):
                self._request(whom)
            elif not whom.lost:
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
        if any(self.left) or self.arrivals < len(self.requests):
            raise RuntimeError("a request was never answered")
        self.outcome.seconds = self.now
        return self.outcome

    def _request(self, request: AgentRequest) -> None:
        if self.kill is not None and self.arrivals == self.kill.request:
            self._die(self.kill.agent)
        self.arrivals += 1
        self.arrived[request.number] = self.now
        self.left[request.number] = len(request.blocks)
        parts = self.arm.give(request)
        if self.before_death:
            self._note(parts)
        self._send(parts)

    def _send(self, parts: Sequence[Part]) -> None:
        if not parts:
            return
        outcome, loads = self.outcome, self.loads
        loads.give(parts)
        shown = self.arm.loads() or list(loads.loads.values())
        highest, mean = max(shown), sum(shown) / len(shown)
        if mean > loads.free:
            outcome.worst = max(outcome.worst, highest / mean)
        outcome.beyond = max(outcome.beyond, highest / self._allowed(shown))
        for part in parts:
            part.prompt = self.prompts(part)
            outcome.given[part.agent] += part.tokens
            self.engines[part.agent].queue.append(part)
        for part in parts:
            self._start(part.agent)

    def _allowed(self, loads: Sequence[float]) -> float:
        """Return the highest load that the router's bound allows."""
        return max(self.loads.free, (1 + self.eps) * sum(loads) / len(loads))

    def _start(self, agent: int) -> None:
        engine = self.engines[agent]
        seconds = engine.start()
        if seconds is not None and engine.computing is not None:
            self._at(self.now + seconds, "first token", engine.computing)

    def _answered(self, part: Part) -> None:
        outcome, number = self.outcome, part.request.number
        outcome.prompt_tokens += len(part.prompt)
        outcome.cached_tokens += part.cached
        outcome.context_tokens += part.tokens
        outcome.context_cached += min(max(part.cached - PREAMBLE, 0), part.tokens)
        outcome.answered += len(part.blocks)
        if self.kill is not None:
            for block in part.blocks:
                self.readers.setdefault(block.fingerprint, set()).add(part.agent)
        self.arm.answered(part)
        part.prompt = ()
        self.left[number] -= len(part.blocks)
        if not self.left[number]:
            outcome.makespans[number] = self.now - self.arrived[number]
            following = self._next.get(number) or (self._waiting.popleft() if self._waiting else None)
            if following is not None:
                self._at(self.now + self._thinking[following.number], "request", following)

    # -- an agent that dies ----------------------------------------------------------------------------------------

    def _die(self, agent: int) -> None:
        lost = self.engines[agent].unanswered()
        for part in lost:
            part.lost = True
        self.outcome.lost = len(lost)
        self.engines[agent].queue.clear()
        self.engines[agent].computing = None
        del self.loads.loads[agent]
        self.before_death = {key: set(readers) for key, readers in self.readers.items()}
        self.arm.fail(agent)
        again = self.arm.again(sorted(lost, key=lambda part: part.request.number))
        self._note(again)
        self._send(again)

    def _note(self, parts: Sequence[Part]) -> None:
        """Where documents that were read before the death go when they first come again."""
        assert self.kill is not None
        for part in parts:
            for block in part.blocks:
                readers = self.before_death.pop(block.fingerprint, None)
                if readers is None:
                    continue
                others = readers - {self.kill.agent}
                if others:
                    self.outcome.kept_of += 1
                    self.outcome.kept += part.agent in others
                else:
                    self.outcome.moved_to[part.agent] = self.outcome.moved_to.get(part.agent, 0) + 1
