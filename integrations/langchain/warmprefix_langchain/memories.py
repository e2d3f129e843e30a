"""An agent middleware that puts memories next to the questions, behind a system prompt that stays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable, iscoroutinefunction
from typing import Annotated, Any

from warmprefix import MissingExtraError
from warmprefix_requests import Memory, MemoryNotes, memories_of

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
    from langchain.agents.middleware.types import PrivateStateAttr
    from langchain_core.messages import AnyMessage, HumanMessage
    from typing_extensions import NotRequired
except ImportError as error:
    raise MissingExtraError("langchain", "langchain") from error

__all__ = ["MemoryMiddleware"]

_Found = dict[str, list[tuple[str, str | None]]]


class _MemoryState(AgentState[Any]):
    warmprefix_memories: NotRequired[Annotated[_Found, PrivateStateAttr]]
    """What was found for each message of the user, by its id."""


class MemoryMiddleware(AgentMiddleware[Any, Any]):
    """Middleware that searches memories for each question, and shows them in front of it.

    For `create_agent`, in place of a dynamic system prompt that contains memories: such a prompt changes in each turn,
    and the engine can reuse nothing behind the change.

        def search(question, runtime):
            return runtime.store.search(("memories", "ann"), query=question)

        agent = create_agent(model, tools, store=store, middleware=[MemoryMiddleware(search)])

    The model reads a note in front of each question: memories that no earlier note shows, and the old text of a memory
    that has another text now. The agent's state keeps the messages as they are, and what was found for each. So each
    prompt is computed from its own messages: forks, retries, time travel and summaries need no special handling.

    Put it behind middleware that removes messages on their way to the model. Otherwise, a note that this removes may be
    the only one that shows a memory.
    """

    state_schema = _MemoryState

    def __init__(self, search: Callable[[str, Any], Any], *, is_all: bool = False) -> None:
        """Create a middleware that finds memories by `search`.

        Args:
            search: Function of the question's text and LangGraph's runtime, which has the store and the context. Called
                once per question; a coroutine function works in `ainvoke` and `astream`. It returns what `memories_of`
                takes, such as the result of `BaseStore.search` or of Mem0's `search`. Its errors pass through.
            is_all: It returns all memories. Those that are missing are then shown as removed.

        Raises:
            TypeError: `search` is not callable.
        """
        super().__init__()
        if not callable(search):
            raise TypeError(f"search must be a function of a question and a runtime, got {type(search).__name__}")
        self._search = search
        self._is_all = is_all

    def before_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Search memories for the newest question, unless that was done before."""
        question = _open_question(state)
        if question is None:
            return None
        if iscoroutinefunction(self._search):
            raise TypeError("search must not be a coroutine function in a synchronous call: use ainvoke or astream")
        return _with_found(state, question, self._search(question.text, runtime))

    async def abefore_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Do the same as `before_agent`."""
        question = _open_question(state)
        if question is None:
            return None
        found = self._search(question.text, runtime)
        return _with_found(state, question, await found if isawaitable(found) else found)

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Pass on the request with notes."""
        return handler(self._noted(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """Do the same as `wrap_model_call`."""
        return await handler(self._noted(request))

    def _noted(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        state: Any = request.state
        found = state.get("warmprefix_memories") or {}
        notes = MemoryNotes()
        messages: list[AnyMessage] = []
        for message in request.messages:
            if isinstance(message, HumanMessage) and message.id in found:
                note = notes.note((Memory(*memory) for memory in found[message.id]), is_all=self._is_all)
                message = _behind(note, message) if note else message
            messages.append(message)
        return request.override(messages=messages)


def _open_question(state: Any) -> HumanMessage | None:
    """Return the newest message of the user; None without one, or if its memories were searched before."""
    questions = [message for message in state["messages"] if isinstance(message, HumanMessage)]
    found = state.get("warmprefix_memories") or {}
    return questions[-1] if questions and questions[-1].id not in found else None


def _with_found(state: Any, question: HumanMessage, found: object) -> dict[str, Any]:
    kept: _Found = state.get("warmprefix_memories") or {}
    ids = {message.id for message in state["messages"]}
    memories = [tuple(memory) for memory in memories_of(found)]
    return {"warmprefix_memories": {**{id: kept[id] for id in kept if id in ids}, question.id: memories}}


def _behind(note: str, message: HumanMessage) -> HumanMessage:
    """Return a copy of a message with a note in front."""
    content: Any = message.content
    if isinstance(content, str):
        content = f"{note}\n\n{content}"
    else:
        content = [{"type": "text", "text": f"{note}\n\n"}, *content]
    return message.model_copy(update={"content": content})
