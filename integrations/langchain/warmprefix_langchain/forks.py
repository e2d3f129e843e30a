"""Sub-agents that begin with their parent's messages."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

__all__ = ["fork_messages"]


def fork_messages(messages: Sequence[BaseMessage], task: str) -> list[BaseMessage]:
    """Return the messages of a sub-agent: its parent's, and a task. O(messages).

    Give the sub-agent the parent's model, tools and system prompt as well: then the engine computes the task alone. If
    a call has no result, such as the one that starts the sub-agent, the messages end in front of the answer with it, as
    for `warmprefix_requests.fork`.

    >>> fork_messages([HumanMessage("What is new?")], "Read the news.")[-1].content
    'Read the news.'
    """
    made: dict[str | None, int] = {}
    for number, message in enumerate(messages):
        if isinstance(message, AIMessage):
            made.update({call["id"]: number for call in message.tool_calls})
        elif isinstance(message, ToolMessage):
            made.pop(message.tool_call_id, None)
    return [*messages[: min(made.values(), default=len(messages))], HumanMessage(task)]
