"""The orders of the same requests that `engine_ttft.py` compares on an engine.

An arm has its own planner, and expects an engine's cache of its own. It receives every request in the order
that it chooses, and the engine's answer to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine_client import Answer, Message
from engine_workload import EngineQuestion
from warmprefix import BatchPlan, BatchRequest, ContextPlanner
from warmprefix.plan import ContextPlan
from warmprefix.residency import EngineReport
from warmprefix_tools.replay.simulation import Replay
from warmprefix_tools.replay.workload import Workload
from warmprefix_tools.traces.trace import Trace

__all__ = ["TODAY", "Arm", "Batch", "Conversations", "Online", "Predicted", "Prepared"]

TODAY = "relevance"
"""The arm of an application without warmprefix."""
PREAMBLE = (
    "You answer questions from the context. Rely on nothing else, name the passages that you used, and report if the"
    " answer is not there."
)


class Prepared(NamedTuple):
    """A request that is ready to be sent."""

    messages: list[Message]
    plan: ContextPlan


class Predicted(NamedTuple):
    """The simulator's results of a whole run, as shares of context tokens."""

    hit: float
    saved: float
    """Share of the tokens prefilled in relevance order that is saved."""


class Arm(Protocol):
    """One way to send the requests."""

    name: str

    def order(self) -> Sequence[int]:
        """Return the numbers of the requests in the order in which to prepare them."""
        ...

    def announce(self, asked: EngineQuestion) -> None:
        """Receive a request that is ready to be prepared, as `ContextPlanner.aplan` announces its own."""

    def prepare(self, asked: EngineQuestion) -> Prepared:
        """Prepare a request."""
        ...

    def answered(self, asked: EngineQuestion, prepared: Prepared, answer: Answer) -> None:
        """Record the engine's answer."""
        ...

    def predicted(self, trace: Trace) -> Predicted:
        """Return replay's prediction for a cache of the engine's size."""
        ...


class Online:
    """Plans one request at a time, with its context first, in the order of a policy."""

    def __init__(self, policy: str, asked: Sequence[EngineQuestion], capacity_tokens: int, preamble: str) -> None:
        self.name = policy
        self._asked = asked
        self._capacity_tokens = capacity_tokens
        self._preamble = preamble
        self._planner = ContextPlanner(policy=policy, capacity_tokens=capacity_tokens)

    def order(self) -> Sequence[int]:
        return [asked.number for asked in self._asked]

    def announce(self, asked: EngineQuestion) -> None:
        self._planner.queued(asked.blocks, preamble=self._preamble)

    def prepare(self, asked: EngineQuestion) -> Prepared:
        plan = self._planner.plan(asked.blocks, preamble=self._preamble)
        return Prepared(chat(self._preamble, [], plan, asked.question), plan)

    def answered(self, asked: EngineQuestion, prepared: Prepared, answer: Answer) -> None:
        self._planner.commit(prepared.plan, report=report_of(answer))

    def predicted(self, trace: Trace) -> Predicted:
        result = Replay(Workload(trace, longest(trace))).run(self.name, self._capacity_tokens)
        return Predicted(result.hit_ratio, -result.prefill_change)


class Batch:
    """Plans all requests together: `plan_batch` orders the requests and the blocks of each."""

    def __init__(self, planner: str, asked: Sequence[EngineQuestion], capacity_tokens: int, preamble: str) -> None:
        self.name = f"batch {planner}"
        self._planner = ContextPlanner(capacity_tokens=capacity_tokens)
        self._batch: BatchPlan = self._planner.plan_batch(
            [BatchRequest(request.number, request.blocks, request.question) for request in asked],
            planner,
            capacity_tokens=capacity_tokens,
            preamble=preamble,
        )
        self._capacity_tokens = capacity_tokens
        self.seconds = self._batch.seconds
        """Seconds of planning."""

    def order(self) -> Sequence[int]:
        return [int(planned.id) for planned in self._batch]

    def announce(self, asked: EngineQuestion) -> None:
        """Do nothing: the batch has all requests."""

    def prepare(self, asked: EngineQuestion) -> Prepared:
        planned = self._batch[str(asked.number)]
        return Prepared(planned.messages(), planned.plan)

    def answered(self, asked: EngineQuestion, prepared: Prepared, answer: Answer) -> None:
        self._planner.commit(prepared.plan, report=report_of(answer))

    def predicted(self, trace: Trace) -> Predicted:
        today = Replay(Workload(trace, longest(trace))).run(TODAY, self._capacity_tokens)
        paid = sum(planned.note_tokens for planned in self._batch)
        prefilled = self._batch.total_tokens - self._batch.saved_tokens + paid
        return Predicted(self._batch.hit_ratio, 1 - prefilled / today.prefilled_tokens)


class Conversations:
    """Plans conversations: each turn's context comes with its question and stays in the history.

    `TODAY` sends every block in full at every turn; any other policy refers to what the conversation holds.
    """

    def __init__(self, policy: str, asked: Sequence[EngineQuestion], capacity_tokens: int, preamble: str) -> None:
        self.name = policy
        self._asked = asked
        self._capacity_tokens = capacity_tokens
        self._preamble = preamble
        self._planner = ContextPlanner(policy=policy, capacity_tokens=capacity_tokens)
        self._histories: dict[int, list[Message]] = {}

    def order(self) -> Sequence[int]:
        return [asked.number for asked in self._asked]

    def announce(self, asked: EngineQuestion) -> None:
        """Do nothing: a turn behind a history shares no prefix with other conversations."""

    def prepare(self, asked: EngineQuestion) -> Prepared:
        history = self._histories.get(asked.conversation, [])
        plan = self._planner.plan(
            asked.blocks,
            placement="tail",
            preamble=self._preamble,
            conversation=str(asked.conversation) if self.name != TODAY else None,
            history=history if self.name != TODAY else None,
        )
        return Prepared(chat(self._preamble, history, plan, asked.question), plan)

    def answered(self, asked: EngineQuestion, prepared: Prepared, answer: Answer) -> None:
        self._planner.commit(prepared.plan, report=report_of(answer))
        answered = {"role": "assistant", "content": asked.answer}
        self._histories[asked.conversation] = [*prepared.messages[1:], answered]

    def predicted(self, trace: Trace) -> Predicted:
        answers = [len(asked.answer.encode()) // 4 for asked in self._asked]
        replay = Replay(Workload(trace, longest(trace)), "tail", sum(answers) // len(answers))
        result = replay.run(self.name, self._capacity_tokens)
        return Predicted(result.hit_ratio, -result.prefill_change)


def chat(preamble: str, history: Sequence[Message], plan: ContextPlan, question: str) -> list[Message]:
    """Return the messages of one request."""
    asked = {"role": "user", "content": f"{plan.render()}\n\n{question}"}
    return [{"role": "system", "content": preamble}, *history, asked]


def report_of(answer: Answer) -> EngineReport:
    """Return the request as the planner takes it."""
    return EngineReport(answer.cached_tokens, answer.prompt_tokens, answer.ttft)


def longest(trace: Trace) -> int:
    return max(len(request.blocks) for request in trace.requests)
