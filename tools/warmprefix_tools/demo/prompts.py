"""Where context stands in a chat: the two placements that applications use, laid out so that prefixes can be shared.

Fixed instructions come first, then context, then the question, in whatever order the context's blocks are.
"""

from __future__ import annotations

from collections.abc import Sequence

from warmprefix.plan import Placement

__all__ = ["INSTRUCTIONS", "Message", "chat", "continued"]

Message = dict[str, str]
"""OpenAI's: a role and a text."""

INSTRUCTIONS = (
    "You answer questions about the Python standard library. Rely on the documentation in the context, name the"
    " passages that you used by the labels in brackets, and say so if the answer is not there."
)


def chat(
    placement: Placement, instructions: str, history: Sequence[Message], context: str, question: str
) -> list[Message]:
    """The messages of one request.

    `head`: the context follows the instructions, in front of the history, and is another one at the next turn.
    `tail`: it comes with its question, and stays in the history.
    """
    if placement == "head":
        return [_message("system", f"{instructions}\n\n{context}"), *history, _message("user", question)]
    return [_message("system", instructions), *history, _message("user", f"{context}\n\nQuestion: {question}")]


def continued(messages: Sequence[Message], answer: str) -> list[Message]:
    """The history of the turn after this request: all but the system prompt, as it was sent."""
    return [*messages[1:], _message("assistant", answer)]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
