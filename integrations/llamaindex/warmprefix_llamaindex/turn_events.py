"""Plans with tail placement until their turn ends, as LlamaIndex's instrumentation shows it.

A plan is answered by a model call whose messages hold its texts: a call in the same tree of spans, or in the same task
where the postprocessor was not called within a span. A branch is committed then, because its turn id does nothing until
the application continues it. A name is committed once the outermost span has ended well, because agents write their
memory at the end of a run.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import uuid4

from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.exception import ExceptionEvent
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.instrumentation.span import BaseSpan, active_span_id
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.workflow import Workflow
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import active_instrument_tags

from warmprefix import Branch, ContextPlan, ContextPlanner
from warmprefix.forks import fork_safe_lock

__all__ = ["PendingTurn", "install_turn_events", "turns", "warn_rebuilt"]

_log = logging.getLogger("warmprefix")

_MAX_PENDING, _MAX_SPANS = 256, 16_384
_MAX_IN_TASK = 8
"""Most plans of one task that wait for a model call without a span around both."""

_REBUILDERS = ("llama_index.core.chat_engine.", "llama_index.core.query_engine.")
_OPEN_ENDED = frozenset(("BaseChatEngine", "SimpleChatEngine", "CustomQueryEngine"))
"""Classes of those modules whose prompts are the application's own."""

_in_task: ContextVar[tuple[PendingTurn, ...]] = ContextVar("warmprefix_turns", default=())


class PendingTurn:
    """A plan whose prompt no model has answered yet.

    Args:
        planner: Has made the plan.
        plan: The plan; its id becomes that of the turn.
        name: The name of the conversation; None if the plan continues a branch, or sees the history.
        refuse: Called with the name of an engine whose prompt does not hold what a reference names.
    """

    def __init__(
        self, planner: ContextPlanner, plan: ContextPlan, name: str | None, refuse: Callable[[str], object]
    ) -> None:
        self.planner = planner
        self.plan = plan
        self.name = None if name is None else (plan.scope.tenant, name)
        self.refuse = refuse
        self.spans: tuple[str, ...] = ()
        """The spans around it, innermost first; empty until a model call of its task, if it has none."""
        self.calls: set[str] = set()
        """The spans of model calls that have its texts and have not ended."""
        self.answered = self.ended = False

    def is_in(self, prompt: str) -> bool:
        """Return True if a prompt holds the plan's texts."""
        return all(paragraph.strip() in prompt for paragraph in self.plan.paragraphs())

    def dangles_in(self, prompt: str) -> bool:
        """Return True if a prompt does not hold a block that a reference names."""
        return not all(planned.is_held(prompt) for planned in self.plan.blocks if planned.reference is not None)

    def note(self, span_id: str, is_kept: bool, failed: bool, left: bool) -> bool:
        """Note the end of a model call or of a span; return True if the turn is over."""
        if failed and span_id in self.spans:
            self.answered = False
            return True
        if span_id in self.calls and (failed or not left):
            self.calls.remove(span_id)
            self.answered = self.answered or is_kept
        self.ended = self.ended or (left and span_id in self.spans[-1:])
        return (self.answered and self.name is None) or (self.ended and not self.calls)

    def settle(self) -> None:
        """Commit the plan if it was answered, else abandon it. Never raises: the application has its answer."""
        try:
            if self.answered:
                self.planner.commit(self.plan, turn_id=self.plan.id)
            else:
                self.planner.abandon(self.plan)
        except Exception:
            _log.warning("a turn was not recorded", exc_info=True)


class _OpenSpan(NamedTuple):
    parent: str | None
    engine: str | None
    """Name of the engine that runs in it, if that rebuilds its context for each question."""
    names: set[Any]
    """Named conversations of the plans within it."""


class _Turns:
    """Open spans and pending turns. The planner is never called under the lock."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock(self._clear)
        self._clear()

    def _clear(self) -> None:
        self._spans: OrderedDict[str, _OpenSpan] = OrderedDict()
        self._pending: OrderedDict[PendingTurn, None] = OrderedDict()
        self._continued: OrderedDict[tuple[int | str, str | None, str | None], object] = OrderedDict()
        """Where plans continued a turn: tags or the outermost span; with the tenant, and the turn's id."""

    @property
    def is_idle(self) -> bool:
        """True if no plan waits for a model call."""
        return not self._pending

    def follow(self, turn: PendingTurn) -> None:
        """Wait for a model call that answers a plan, which the postprocessor has just made."""
        with self._lock:
            turn.spans = self._around()
            for span in filter(None, map(self._spans.get, turn.spans)):
                span.names.add(turn.name)
            if not turn.spans:
                _in_task.set((*_in_task.get(), turn)[-_MAX_IN_TASK:])
            self._pending[turn] = None
            oldest = self._pending.popitem(last=False)[0] if len(self._pending) > _MAX_PENDING else None
        if oldest is not None:
            oldest.settle()

    def alone(self, branch: Branch, tenant: str | None) -> Branch:
        """Return the branch for a turn's first plan that continues it, else one without a record.

        The record of a second plan lacks the texts of the first, so its labels must not be taken for unique. Plans are
        of one turn if they have the same tags, outermost span or task; a later turn that looks so costs tokens only.
        """
        tags = active_instrument_tags.get()
        with self._lock:
            spans = self._around()
            places: list[int | str] = [*spans[-1:]]
            if tags:
                places.append(id(tags))
            others = [] if spans else [turn.plan for turn in _in_task.get()]
            seen = any((plan.scope.tenant, plan.branch) == (tenant, branch) for plan in others)
            for place in places:
                key = place, tenant, branch.after
                seen = seen or key in self._continued
                self._continued[key] = tags  # while it is held, no other tags have its id
            while len(self._continued) > _MAX_SPANS:
                self._continued.popitem(last=False)
        return Branch(after=uuid4().hex) if seen else branch

    def _around(self) -> tuple[str, ...]:
        """Return the spans around the postprocessor that is called now, innermost first."""
        spans = self._ancestors(active_span_id.get())
        own = bool(spans) and "._postprocess_nodes-" in spans[0]  # only the synchronous method has a span
        return spans[own:]

    def asked(self, span_id: str, prompt: str) -> None:
        """Note a model call that has begun."""
        dangling: list[PendingTurn] = []
        with self._lock:
            spans = self._ancestors(span_id) or (span_id,)
            for turn in list(self._pending):
                if not self._may_answer(spans, turn) or not turn.is_in(prompt):
                    continue
                turn.spans = turn.spans or spans
                turn.calls.add(span_id)
                if turn.dangles_in(prompt):
                    del self._pending[turn]
                    dangling.append(turn)
        for turn in dangling:
            turn.refuse(turn.spans[-1].partition(".")[0])
            turn.settle()
            turn.planner.withdraw(turn.plan)  # other workers shall not trust the record of this name either

    def _may_answer(self, spans: tuple[str, ...], turn: PendingTurn) -> bool:
        """Return True if a call belongs to a plan, and to no plan of another named conversation."""
        if not turn.spans:
            same_task = _in_task.get()
            return turn in same_task and turn.name == same_task[-1].name
        span = next((self._spans.get(common) for common in turn.spans if common in spans), None)
        return span is not None and (turn.name is None or span.names == {turn.name})

    def note(self, span_id: str, *, is_kept: bool = False, failed: bool = False, left: bool = False) -> None:
        """Note the end of a model call, or of a span that was left; an empty answer is not kept."""
        with self._lock:
            over = [turn for turn in self._pending if turn.note(span_id, is_kept, failed, left)]
            for turn in over:
                del self._pending[turn]
            if left:
                self._spans.pop(span_id, None)
        for turn in over:
            turn.settle()

    def entered(self, span_id: str, parent: str | None, instance: object) -> None:
        """Note a span that was entered."""
        with self._lock:
            self._spans[span_id] = _OpenSpan(parent, _rebuilder(type(instance)), set())
            if len(self._spans) > _MAX_SPANS:
                self._spans.popitem(last=False)

    def engine_around(self) -> str | None:
        """Return the innermost engine around this call that rebuilds its context."""
        with self._lock:
            spans = map(self._spans.get, self._ancestors(active_span_id.get()))
            return next((span.engine for span in spans if span is not None and span.engine), None)

    def _ancestors(self, span_id: str | None) -> tuple[str, ...]:
        """Return a span and the open spans around it, innermost first.

        Workflows leave the span of a run active when it has ended, so a later run in that task seems to lie within it.
        """
        found: list[str] = []
        while span_id is not None and (span := self._spans.get(span_id)) is not None:
            found.append(span_id)
            span_id = span.parent
        return tuple(found)


def _rebuilder(kind: type) -> str | None:
    """Return the name of an engine's class if its prompts hold only the context of the last question."""
    bases = [base.__name__ for base in kind.__mro__ if base.__module__.startswith(_REBUILDERS)]
    return kind.__name__ if bases and bases[0] not in _OPEN_ENDED else None


turns = _Turns()
"""Those of this process."""


class _TurnSpans(BaseSpanHandler[BaseSpan]):
    """Passes spans on, and keeps none."""

    def span_enter(
        self, id_: str, *args: Any, instance: Any = None, parent_id: str | None = None, **kwargs: Any
    ) -> None:
        turns.entered(id_, parent_id, instance)

    def span_exit(self, id_: str, *args: Any, instance: Any = None, result: Any = None, **kwargs: Any) -> None:
        # Workflows end a cancelled run, and older ones a failed run, like a good one without a result.
        is_run = isinstance(instance, Workflow) and ".run-" in id_
        turns.note(id_, failed=is_run and result is None, left=True)

    def span_drop(self, id_: str, *args: Any, **kwargs: Any) -> None:
        turns.note(id_, failed=True, left=True)

    def new_span(self, *args: Any, **kwargs: Any) -> None:
        return None

    prepare_to_exit_span = prepare_to_drop_span = new_span


class _TurnEvents(BaseEventHandler):
    """Passes on the events of model calls and failures."""

    @classmethod
    def class_name(cls) -> str:
        return "WarmprefixTurnEvents"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        span_id = event.span_id or ""
        if turns.is_idle:
            return
        if isinstance(event, LLMChatStartEvent):
            turns.asked(span_id, "\n\n".join([_text(message) for message in event.messages]))
        elif isinstance(event, LLMCompletionStartEvent):
            turns.asked(span_id, event.prompt)
        elif isinstance(event, LLMChatEndEvent):
            turns.note(span_id, is_kept=event.response is not None and _has_content(event.response.message))
        elif isinstance(event, LLMCompletionEndEvent):
            turns.note(span_id, is_kept=bool(event.response.text.strip()))
        elif isinstance(event, ExceptionEvent):
            turns.note(span_id)


@lru_cache(64)
def warn_rebuilt(engine: str) -> None:
    """Log once that an engine does not keep the context in its history."""
    _log.warning(
        "placement 'tail' is off in %s, which rebuilds the context for each question and keeps only questions and "
        "answers: use placement 'head' there",
        engine,
    )


def install_turn_events() -> None:
    """Receive spans and events from now on."""
    dispatcher = get_dispatcher()
    if not any(isinstance(handler, _TurnEvents) for handler in dispatcher.event_handlers):
        dispatcher.add_span_handler(_TurnSpans())
        dispatcher.add_event_handler(_TurnEvents())
        if (around := active_span_id.get()) is not None:  # entered before
            turns.entered(around, None, None)


def _text(message: ChatMessage) -> str:
    return "".join([block.text for block in message.blocks if isinstance(block, TextBlock)])


def _has_content(message: ChatMessage) -> bool:
    """Return True if an answer has a text, or a tool call."""
    others = any(not isinstance(block, TextBlock) for block in message.blocks)
    return others or bool(_text(message).strip() or message.additional_kwargs.get("tool_calls"))
