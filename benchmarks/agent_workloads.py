"""What agents are asked in `agent_routing.py`: requests with documents that recur, or don't, generated or of traces."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from common import zipf_requests
from traces import trace_of
from warmprefix import ContextBlock
from warmprefix_tools.replay.workload import Workload
from warmprefix_tools.traces.reader import read_trace
from warmprefix_tools.traces.trace import Trace

__all__ = ["DOCUMENTS", "GENERATED", "AgentRequest", "AgentWorkload", "load"]

DOCUMENTS = 15
"""Most documents of a request: ContextPilot's fifteen agents had one each."""
HOT_SHARE = 0.6
_TURNS = 4
"""Of a conversation, for workloads that have none of their own."""
_QUESTION = 24
"""Tokens of a question, where a trace has no number."""
_SEPARATOR = "+"


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A question, the documents that it is about, and the conversation that it belongs to."""

    number: int
    blocks: tuple[ContextBlock, ...]
    question_tokens: int
    conversation: str


@dataclass(frozen=True, slots=True)
class AgentWorkload:
    """Requests in the order in which they come."""

    name: str
    requests: tuple[AgentRequest, ...]

    @property
    def documents(self) -> int:
        """Given out, those that recur each time."""
        return sum(len(request.blocks) for request in self.requests)

    @property
    def recurring(self) -> float:
        """Share of all documents' tokens that had come in an earlier request."""
        seen: set[bytes] = set()
        new = total = 0
        for request in self.requests:
            for block in request.blocks:
                total += block.tokens
                if block.fingerprint not in seen:
                    seen.add(block.fingerprint)
                    new += block.tokens
        return 1 - new / total


def _topics(requests: int, per_topic: int, k: int = DOCUMENTS) -> Trace:
    return trace_of("generated", zipf_requests(requests, k=k, topics=60, per_topic=per_topic))


GENERATED: dict[str, Callable[[], Trace]] = {
    "generated_topics": lambda: _topics(400, 25),
    "generated_single": lambda: _topics(2_000, 10, k=1),
    "generated_control": lambda: trace_of("generated", ([5 * i + j for j in range(5)] for i in range(500))),
    "generated_small": lambda: _topics(40, 16),
}
"""Topics of Zipf's distribution; the same with one document a request; and nothing that recurs."""


@lru_cache(maxsize=2)
def load(source: str, limit: int | None = None) -> AgentWorkload:
    """Return the workload of a trace file, or a generated one; `+hot` puts one document into most requests."""
    base, _, kind = source.partition(_SEPARATOR)
    generated = GENERATED.get(base)
    trace = read_trace(Path(base)) if generated is None else replace(generated(), name=base)
    requests = list(_requests(trace, limit))
    if kind == "hot":
        requests = list(_with_hot_document(requests))
    return AgentWorkload(trace.name + (", one hot document" if kind == "hot" else ""), tuple(requests))


def _requests(trace: Trace, limit: int | None) -> Iterator[AgentRequest]:
    asked = [request for request in Workload(trace, DOCUMENTS).requests if request.blocks][:limit]
    for number, request in enumerate(asked):
        own = request.conversation
        conversation = f"c{number // _TURNS}" if own is None else own
        yield AgentRequest(number, request.blocks, request.source.query_tokens or _QUESTION, conversation)


def _with_hot_document(requests: Sequence[AgentRequest], seed: int = 1) -> Iterator[AgentRequest]:
    """Replace the last document of most requests by one of twice the average length."""
    rng = random.Random(seed)
    mean = _mean(block.tokens for request in requests for block in request.blocks)
    hot = ContextBlock("the document that most requests are about", id="hot", tokens=2 * mean)
    for request in requests:
        if rng.random() < HOT_SHARE:
            yield replace(request, blocks=(hot, *request.blocks[: max(len(request.blocks) - 1, 0)]))
        else:
            yield request


def _mean(values: Iterable[int]) -> int:
    listed = list(values)
    return round(sum(listed) / len(listed))
