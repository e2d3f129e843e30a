"""Plans of a run: committed once a model has answered a prompt that shows them, and abandoned if none has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeAlias, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook

from warmprefix import Branch, ContextBlock, ContextPlan, ContextPlanner, PlannedBlock
from warmprefix_requests.prompts import hides_text, is_cut_elsewhere

__all__ = ["RecordedPlan", "follow_runs"]


_MAX_ID_LENGTH = 1_024
_MAX_PLANS = 256
"""Plans of one root run that are followed at a time."""


class RecordedPlan:
    """A context, for `with` or `async with`, that plans a prompt which continues a conversation.

    At its end the run's `RunPlans` take over. Without them, no model call of the same run can follow, and the plan is
    abandoned.
    """

    plan: ContextPlan
    call: UUID | None = None
    """The latest model call whose prompt shows the plan."""
    is_answered: bool = False
    """True if that call ended well."""
    enclosing: Sequence[UUID] = ()
    """The runs that the plan was made in, the innermost first."""
    texts: Sequence[str] = ()
    """What a prompt shows of the plan."""
    _loop: asyncio.AbstractEventLoop | None = None
    """The event loop that the plan was made on."""

    def __init__(
        self,
        planner: ContextPlanner,
        blocks: Sequence[ContextBlock],
        options: Mapping[str, Any],
        run: object,
        on_lost: Callable[[], None],
    ) -> None:
        """Take the arguments of `planner.plan`.

        Args:
            planner: Makes the plan.
            blocks: The documents.
            options: The other arguments, by keyword.
            run: The manager of the run, or of its children.
            on_lost: Called if a prompt lacks a block that one of its references names.
        """
        self._planner = planner
        self._blocks = blocks
        self._options: dict[str, Any] = {**options}
        self._run = run
        self._on_lost = on_lost
        branch = options["conversation"]
        self.branch = branch if isinstance(branch, Branch) else None

    def __enter__(self) -> ContextPlan:
        self.plan = self._planner.plan(self._blocks, **self._options)
        return self.plan

    def __exit__(self, kind: object, *error: object) -> None:
        if not self._is_followed(kind):
            self._planner.abandon(self.plan)

    async def __aenter__(self) -> ContextPlan:
        self._loop = asyncio.get_running_loop()
        self.plan = await self._planner.aplan(self._blocks, **self._options)
        return self.plan

    async def __aexit__(self, kind: object, *error: object) -> None:
        if not self._is_followed(kind):
            await self._planner.aabandon(self.plan)

    def _is_followed(self, kind: object) -> bool:
        plans = RunPlans.of(self._run) if kind is None else None
        if plans is not None:
            self.texts = [paragraph for paragraph in self.plan.paragraphs() if paragraph]
            self.enclosing = plans.enclosing(getattr(self._run, "parent_run_id", None))
            plans.add(self)
        return plans is not None

    def show(self, run_id: UUID, prompt: Prompt) -> None:
        """Note a model call, if its prompt shows the plan."""
        if not all(any(shown in text for text in prompt.texts) for shown in self.texts):
            return
        self.call, self.is_answered = run_id, False
        if prompt.lacks([planned for planned in self.plan.blocks if planned.reference], "history" in self._options):
            self._on_lost()
            self.call = None
        elif prompt.is_cut or (self.branch is not None and prompt.after not in (None, self.branch.after)):
            self.call = None

    def end(self, turn_id: str | None, is_seen: bool) -> None:
        """Commit the plan if the model saw it; else abandon it, which does nothing to a committed one."""
        if is_seen:
            self._planner.commit(self.plan, turn_id=turn_id)
        else:
            self._planner.abandon(self.plan)

    def withdraw(self) -> None:
        """Take back the commit of a named conversation, whose answer the application did not get."""
        self._planner.withdraw(self.plan)

    async def aend(self, turn_id: str | None, is_seen: bool) -> None:
        """Do the same as `end`."""
        if self._loop is not asyncio.get_running_loop():  # the store has no connection for this loop
            await asyncio.to_thread(self.end, turn_id, is_seen)
        elif is_seen:
            await self._planner.acommit(self.plan, turn_id=turn_id)
        else:
            await self._planner.aabandon(self.plan)


_End: TypeAlias = "tuple[RecordedPlan, str | None, bool]"
"""A plan to end, with the arguments of its `end`."""


class Prompt:
    """The messages of a model call, as far as they tell what the next one continues."""

    def __init__(self, messages: Sequence[BaseMessage], parameters: Mapping[str, Any]) -> None:
        self.texts = [text for message in messages if message.type != "system" for text in _texts(message)]
        """Texts that stay in the history. A system message is written again in each turn."""
        self.after = parameters.get("previous_response_id")
        """The stored response that the call continues; None if no parameter names one."""
        self.is_cut = is_cut_elsewhere({**parameters, "previous_response_id": None})
        """True if the server may drop a part of the history."""
        answers = [message for message in messages if isinstance(message, AIMessage)]
        self._has_answers = bool(answers)
        is_elsewhere = hides_text(parameters) or any(map(_stored_id, answers))
        self._history = None if is_elsewhere else [text for message in messages for text in _texts(message)]

    def lacks(self, referenced: Sequence[PlannedBlock], is_shown: bool) -> bool:
        """Return True if one of the blocks is in no message as references name it, and the server adds none.

        A prompt without answers may be one whose history is elsewhere, unless the planner was shown its messages.
        """
        history = self._history
        if history is None or not (is_shown or self._has_answers):
            return False
        return not all(any(map(planned.is_held, history)) for planned in referenced)


class _Event:
    """A callback that awaits the store where an event loop runs, and calls it elsewhere.

    LangChain gives the same handler to both kinds of runs, and decides with each event whether it is awaited.
    """

    def __init__(self, ends: Callable[..., Iterable[_End]]) -> None:
        self._ends = ends

    def __get__(self, handler: RunPlans, owner: object = None) -> Callable[..., Any]:
        return partial(_call if _running_loop() is None else _acall, self._ends, handler)


class RunPlans(BaseCallbackHandler):
    """The plans of one root run: a callback handler of that run and of all runs in it.

    A model call shows a plan if its prompt holds all the plan's texts. If that call ends well:

    - A plan that continues a branch is committed at once, with the id of the answer. Where the run fails later, the
      application never continues from that answer.
    - A plan of a named conversation is committed when the root run ends well: until then a parser may fail, and a retry
      or a fallback gives another answer.

    All other plans are abandoned: when a run around them fails or is cancelled, and when the root run ends. LangChain
    ends the root run of a stream that was closed early as if it were complete; but then runs in it are still open.
    """

    run_inline = True

    def __init__(self) -> None:
        self._open: dict[UUID, UUID | None] = {}
        """The parent of each run that has begun and not ended."""
        self._root: UUID | None = None
        self._plans: list[RecordedPlan] = []

    @classmethod
    def of(cls, run: object) -> RunPlans | None:
        """Return the handler of a run manager; None if there is no run around it that can end well."""
        found = next((handler for handler in getattr(run, "handlers", ()) if isinstance(handler, cls)), None)
        return found if found is not None and found.has_room else None

    @property
    def has_room(self) -> bool:
        """True if a root run has begun and not ended, and there is room for another plan."""
        return self._root in self._open and len(self._plans) < _MAX_PLANS

    def enclosing(self, run_id: UUID | None) -> Sequence[UUID]:
        """Return the ids of a run and of the runs around it."""
        found: list[UUID] = []
        while run_id is not None and run_id not in found:
            found.append(run_id)
            run_id = self._open.get(run_id, self._root)
        return found

    def add(self, plan: RecordedPlan) -> None:
        """Follow a plan until the root run ends."""
        self._plans.append(plan)

    # -- events of LangChain: runs -------------------------------------------------------------------------------

    def on_chain_start(self, *_: Any, run_id: UUID, parent_run_id: UUID | None = None, **__: Any) -> None:
        if not self._open and self._root is None:
            self._root = run_id
        self._open[run_id] = parent_run_id

    def _entered(self, *_: Any, run_id: UUID, parent_run_id: UUID | None = None, **__: Any) -> None:
        self._open[run_id] = parent_run_id

    on_tool_start = on_retriever_start = _entered

    def _left(self, *_: Any, run_id: UUID, **__: Any) -> None:
        self._open.pop(run_id, None)

    on_tool_end = on_tool_error = on_retriever_end = on_retriever_error = _left

    def _ended(self, *_: Any, run_id: UUID, **__: Any) -> Iterator[_End]:
        self._open.pop(run_id, None)
        if run_id == self._root:
            is_complete = not self._open
            for plan in self._taken(run_id):
                yield plan, None, plan.is_answered and is_complete and plan.branch is None

    def _failed(self, *_: Any, run_id: UUID, **__: Any) -> Iterator[_End]:
        self._open.pop(run_id, None)
        for plan in self._taken(run_id):
            yield plan, None, False

    on_chain_end: Any = _Event(_ended)
    on_chain_error: Any = _Event(_failed)

    def _taken(self, run_id: UUID) -> list[RecordedPlan]:
        """Remove and return the plans that were made in a run."""
        taken = [plan for plan in self._plans if run_id in plan.enclosing]
        self._plans = [plan for plan in self._plans if run_id not in plan.enclosing]
        return taken

    # -- events of LangChain: models -----------------------------------------------------------------------------

    def on_chat_model_start(
        self, serialized: Any, messages: list[list[BaseMessage]], *, run_id: UUID, **options: Any
    ) -> None:
        if self._plans:
            prompt = Prompt(messages[0], options.get("invocation_params") or {})
            for plan in self._plans:
                plan.show(run_id, prompt)

    def on_llm_start(self, serialized: Any, prompts: list[str], *, run_id: UUID, **options: Any) -> None:
        self.on_chat_model_start(serialized, [[HumanMessage(prompts[0])]], run_id=run_id, **options)

    def _answered(self, response: LLMResult, *, run_id: UUID, **_: Any) -> Iterator[_End]:
        shown = [plan for plan in self._plans if plan.call == run_id]
        # Two contexts of one turn don't know each other's labels, so neither may be the record of the turn.
        contexts = {(plan.branch, *plan.texts) for plan in shown if plan.branch}
        ids = _turn_ids(response) if len(contexts) == 1 else ()
        for plan in shown:
            plan.is_answered = True
            for turn_id in ids if plan.branch else ():
                yield plan, turn_id, True

    on_llm_end: Any = _Event(_answered)


def _call(ends: Callable[..., Iterable[_End]], *args: Any, **kwargs: Any) -> None:
    for plan, turn_id, is_seen in ends(*args, **kwargs):
        plan.end(turn_id, is_seen)


async def _acall(ends: Callable[..., Iterable[_End]], *args: Any, **kwargs: Any) -> None:
    for plan, turn_id, is_seen in ends(*args, **kwargs):
        await plan.aend(turn_id, is_seen)
        if is_seen and not _is_awaited():
            plan.withdraw()


def _is_awaited() -> bool:
    """Return False if the caller of this task was cancelled meanwhile.

    LangChain shields such a task: it goes on, and loses its only callback. A task whose callbacks are unknown counts as
    awaited.
    """
    return bool(getattr(asyncio.current_task(), "_callbacks", True))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _texts(message: BaseMessage) -> Iterator[str]:
    for part in [message.content] if isinstance(message.content, str) else message.content:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


def _stored_id(message: BaseMessage) -> str | None:
    """Return the id of an answer that a server may have stored."""
    id = message.response_metadata.get("id")
    return id if isinstance(id, str) and id.startswith("resp_") else None


def _turn_ids(response: LLMResult) -> list[str]:
    """Return the ids of complete answers, and of their stored responses."""
    generations = [answer for answers in response.generations for answer in answers]
    messages = [generation.message for generation in generations if isinstance(generation, ChatGeneration)]
    complete = [m for m in messages if m.response_metadata.get("status") in (None, "completed")]
    ids = dict.fromkeys(id for message in complete for id in (message.id, _stored_id(message)) if id is not None)
    return [id for id in ids if 0 < len(id) <= _MAX_ID_LENGTH]


class _OnePerRootRun:
    """A variable, for LangChain's hook, that has a new handler wherever a root run begins."""

    def get(self) -> RunPlans | None:
        return RunPlans() if var_child_runnable_config.get() is None else None


@cache
def follow_runs() -> None:
    """Give a `RunPlans` to each root run from now on."""
    register_configure_hook(cast(Any, _OnePerRootRun()), inheritable=True, handle_class=RunPlans)
