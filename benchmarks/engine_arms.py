"""The ways to send the same requests to an engine that `engine_ttft.py` compares.

An arm has a planner of its own, and is to have an engine's cache of its own. It is shown every request in the order
that it asks for, and told how each was answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine_client import Answer, Message
from engine_workload import Asked
from warmprefix import BatchPlan, BatchRequest, ContextPlanner
from warmprefix.plan import ContextPlan
from warmprefix.residency.base import EngineReport
from warmprefix.traces import Trace
from warmprefix_tools.replay.simulation import Replay
from warmprefix_tools.replay.workload import Workload

__all__ = ["TODAY", "Arm", "Batch", "Conversations", "Online", "Predicted", "Prepared"]

TODAY = "relevance"
"""The arm that stands for an application without warmprefix."""
PREAMBLE = (
    "You answer questions from the context. Rely on nothing else, name the passages that you used by the labels in"
    " brackets, and say so if the answer is not there."
)


class Prepared(NamedTuple):
    """One request, ready to be sent."""

    messages: list[Message]
    plan: ContextPlan


class Predicted(NamedTuple):
    """What the simulator says of a whole run; shares, of context tokens."""

    hit: float
    saved: float
    """Of what is prefilled in relevance order."""


class Arm(Protocol):
    """One way to send the requests."""

    name: str

    def order(self) -> Sequence[int]:
        """The requests' numbers, in the order in which it wants to be shown them."""
        ...

    def prepare(self, asked: Asked) -> Prepared:
        """What to send."""
        ...

    def answered(self, asked: Asked, prepared: Prepared, answer: Answer) -> None:
        """It was."""
        ...

    def predicted(self, trace: Trace) -> Predicted:
        """What replay expects of it, with a cache of the engine's size."""
        ...


class Online:
    """A request at a time: its context stands in front of everything else, in a policy's order."""

    def __init__(self, policy: str, asked: Sequence[Asked], capacity_tokens: int, preamble: str) -> None:
        self.name = policy
        self._asked = asked
        self._capacity_tokens = capacity_tokens
        self._preamble = preamble
        self._planner = ContextPlanner(policy=policy, capacity_tokens=capacity_tokens)

    def order(self) -> Sequence[int]:
        return [asked.number for asked in self._asked]

    def prepare(self, asked: Asked) -> Prepared:
        plan = self._planner.plan(asked.blocks, preamble=self._preamble)
        return Prepared(chat(self._preamble, [], plan, asked.question), plan)

    def answered(self, asked: Asked, prepared: Prepared, answer: Answer) -> None:
        self._planner.commit(prepared.plan, report=report_of(answer))

    def predicted(self, trace: Trace) -> Predicted:
        result = Replay(Workload(trace, longest(trace))).run(self.name, self._capacity_tokens)
        return Predicted(result.hit_ratio, -result.prefill_change)


class Batch:
    """All requests at hand: `plan_batch` decides on the order of requests, and of the blocks of each."""

    def __init__(self, planner: str, asked: Sequence[Asked], capacity_tokens: int, preamble: str) -> None:
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
        """What planning took."""

    def order(self) -> Sequence[int]:
        return [int(planned.id) for planned in self._batch]

    def prepare(self, asked: Asked) -> Prepared:
        planned = self._batch[str(asked.number)]
        return Prepared(planned.messages(), planned.plan)

    def answered(self, asked: Asked, prepared: Prepared, answer: Answer) -> None:
        self._planner.commit(prepared.plan, report=report_of(answer))

    def predicted(self, trace: Trace) -> Predicted:
        today = Replay(Workload(trace, longest(trace))).run(TODAY, self._capacity_tokens)
        notes = [planned.order_annotation for planned in self._batch]
        paid = sum((len(note.encode()) + 3) // 4 for note in notes if note is not None)
        prefilled = self._batch.total_tokens - self._batch.saved_tokens + paid
        return Predicted(self._batch.hit_ratio, 1 - prefilled / today.prefilled_tokens)


class Conversations:
    """Several turns: each one's context comes with its question, and stays in the history.

    `TODAY` sends every block in full at every turn; any other policy refers to what the conversation holds.
    """

    def __init__(self, policy: str, asked: Sequence[Asked], capacity_tokens: int, preamble: str) -> None:
        self.name = policy
        self._asked = asked
        self._capacity_tokens = capacity_tokens
        self._preamble = preamble
        self._planner = ContextPlanner(policy=policy, capacity_tokens=capacity_tokens)
        self._histories: dict[int, list[Message]] = {}

    def order(self) -> Sequence[int]:
        return [asked.number for asked in self._asked]

    def prepare(self, asked: Asked) -> Prepared:
        history = self._histories.get(asked.conversation, [])
        plan = self._planner.plan(
            asked.blocks,
            placement="tail",
            preamble=self._preamble,
            conversation=str(asked.conversation) if self.name != TODAY else None,
            history=history if self.name != TODAY else None,
        )
        return Prepared(chat(self._preamble, history, plan, asked.question), plan)

    def answered(self, asked: Asked, prepared: Prepared, answer: Answer) -> None:
        self._planner.commit(prepared.plan, report=report_of(answer))
        said = {"role": "assistant", "content": asked.answer}
        self._histories[asked.conversation] = [*prepared.messages[1:], said]

    def predicted(self, trace: Trace) -> Predicted:
        answers = [len(asked.answer.encode()) // 4 for asked in self._asked]
        replay = Replay(Workload(trace, longest(trace)), "tail", sum(answers) // len(answers))
        result = replay.run(self.name, self._capacity_tokens)
        return Predicted(result.hit_ratio, -result.prefill_change)


def chat(preamble: str, history: Sequence[Message], plan: ContextPlan, question: str) -> list[Message]:
    """The messages of one request."""
    asked = {"role": "user", "content": f"{plan.render()}\n\n{question}"}
    return [{"role": "system", "content": preamble}, *history, asked]


def report_of(answer: Answer) -> EngineReport:
    """As the planner takes it."""
    return EngineReport(answer.cached_tokens, answer.prompt_tokens, answer.ttft)


def longest(trace: Trace) -> int:
    return max(len(request.blocks) for request in trace.requests)
