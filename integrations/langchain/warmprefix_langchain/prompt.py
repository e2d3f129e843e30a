"""A chat prompt that has the order note next to the question."""

from __future__ import annotations

from typing import Any, get_args

from langchain_core.prompts import (
    ChatPromptTemplate,
    HumanMessagePromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
    StringPromptTemplate,
    SystemMessagePromptTemplate,
)

from warmprefix.plan import Placement
from warmprefix_langchain.runnable import NOTE_KEY

__all__ = ["context_prompt"]


def context_prompt(
    system: str = "Answer the question from the context. If the answer is not in it, say that you do not know.",
    *,
    placement: Placement = "head",
) -> ChatPromptTemplate:
    """A prompt for `create_stuff_documents_chain` behind `context_reuse`.

    It takes ``context``, ``input``, and, if they are given, ``chat_history`` and ``context_note``. What is empty leaves
    no blank line.

    Args:
        system: The instructions; a template, in which you may use variables of your own. A variable that differs in
            each request, such as the time, keeps the prefix cache cold.
        placement: `"head"` has the documents behind the instructions, `"tail"` in the last message, in front of the
            question. That message must then stay in the history as it was sent.

    Raises:
        ValueError: `placement` is neither.

    >>> prompt = context_prompt("Be brief.")
    >>> for message in prompt.format_messages(context="[a] Water boils at 100 °C.", input="When does it boil?"):
    ...     print(f"{message.type}: {message.content}")
    system: Be brief.
    <BLANKLINE>
    [a] Water boils at 100 °C.
    human: When does it boil?
    """
    if placement not in get_args(Placement):
        raise ValueError(f"placement must be 'head' or 'tail', got {placement!r}")
    head, tail = ((system, "{context}"), ()) if placement == "head" else ((system,), ("{context}",))
    messages = [
        SystemMessagePromptTemplate(prompt=_Paragraphs.of(*head)),
        MessagesPlaceholder("chat_history", optional=True),
        HumanMessagePromptTemplate(prompt=_Paragraphs.of(*tail, f"{{{NOTE_KEY}}}", "{input}")),
    ]
    return ChatPromptTemplate.from_messages(messages).partial(**{NOTE_KEY: ""})


class _Paragraphs(StringPromptTemplate):
    """Templates, joined with blank lines; one that comes out empty is left out."""

    paragraphs: tuple[PromptTemplate, ...]

    @classmethod
    def of(cls, *templates: str) -> _Paragraphs:
        paragraphs = tuple(map(PromptTemplate.from_template, templates))
        variables = dict.fromkeys(name for paragraph in paragraphs for name in paragraph.input_variables)
        return cls(paragraphs=paragraphs, input_variables=list(variables))

    def format(self, **kwargs: Any) -> str:
        return "\n\n".join(filter(None, [paragraph.format(**kwargs) for paragraph in self.paragraphs]))
