"""What a call of LangChain shows of the conversation that its prompt continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias
from uuid import UUID

from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.runnables import RunnableConfig

__all__ = ["ConversationRule", "first_name", "metadata_of", "thread_conversation"]

ConversationRule: TypeAlias = Callable[[RunnableConfig], Any]
"""Returns what a call continues: its messages, a `BaseChatMessageHistory`, a `Branch`, the name of a linear history, or
None if that is unknown."""

_NAMES = ("thread_id", "session_id", "conversation_id")

_HISTORY = "message_history"
"""Key of the history that a `RunnableWithMessageHistory` loads."""

_READ = "__pregel_read"
"""Key of LangGraph's function that reads a channel of the running graph, as the checkpoint before this step has it.
Its own `ToolNode` reads an agent's state there."""

_GRAPH_KEYS = ("checkpoint", "__pregel", "langgraph")


def thread_conversation(config: RunnableConfig) -> Any:
    """Return what a call continues, from the best source that its config has.

    - In a `RunnableWithMessageHistory`: the history that it loaded.
    - In a node or a tool of a LangGraph graph: the `messages` of the graph's state, as this branch of the thread has
      them. Forks, time travel, edits and interrupts need no special handling. None if the state has no messages,
      because a thread's id does not distinguish its branches.
    - Elsewhere: the `thread_id`, `session_id` or `conversation_id` in `configurable` or `metadata`, if it is a str, an
      int or a UUID: the name of a linear history. The number 5 and the text "5" are one name, as in LangGraph.
    """
    configurable, metadata = config.get("configurable") or {}, config.get("metadata") or {}
    history, read = configurable.get(_HISTORY), configurable.get(_READ)
    if isinstance(history, BaseChatMessageHistory):
        return history
    if read is not None:
        return _messages(read)
    if any(str(key).startswith(_GRAPH_KEYS) for key in (*configurable, *metadata)):
        return None
    name = first_name((configurable, metadata))
    return str(name) if isinstance(name, str | int | UUID) else None


def first_name(sources: Iterable[Mapping[str, Any]]) -> object:
    """Return the first name of a conversation in any of these; None if there is none."""
    names = (source.get(key) for source in sources for key in _NAMES)
    return next((name for name in names if name is not None and name != ""), None)


def metadata_of(run: object) -> Mapping[str, Any]:
    """Return the metadata of a run manager, or of the manager of its children."""
    return getattr(run, "metadata", None) or {}


def _messages(read: Callable[[str], Any]) -> Any:
    try:
        messages = read("messages")
    except KeyError:  # the state has no such channel
        return None
    return messages if isinstance(messages, list) else [] if messages is None else None
