"""The messages of a planned prompt, with the prefix that the plan is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from warmprefix.errors import check_names
from warmprefix.history import SdkMessage, VisibleHistory, as_mapping
from warmprefix.plan import ContextPlan

__all__ = ["messages_for"]


_SYSTEM = ("system", "developer")


def messages_for(
    plan: ContextPlan,
    question: str,
    history: Sequence[Mapping[str, Any] | SdkMessage] = (),
    preamble: str | None = None,
    *,
    parts: bool = False,
) -> list[Any]:
    r"""Return the messages of a chat that asks the question with the plan's context.

    With placement "head", the context opens the first user message, right after the preamble: it is there in every
    turn, and chats with the same context share it. With "tail", the history stays as it is, and context and question
    follow it.

    >>> from warmprefix import ContextBlock, ContextPlanner
    >>> plan = ContextPlanner().plan([ContextBlock("The sea is deep.", id="sea")])
    >>> messages_for(plan, "How deep?", preamble="Be brief.")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'The sea is deep.\n\nHow deep?'}]

    Args:
        plan: The plan of the context.
        question: The user's question.
        history: The earlier messages, oldest first, without the contexts of head plans, with those of tail plans: as
            mappings, or as the SDK's own, `answer.choices[0].message`. They are copied, not changed. The planner must
            get the same history.
        preamble: The system prompt, if it is not the history's first message.
        parts: Give the message with the context a list of content parts, one per block, so that a cache mark can stand
            between blocks. Their texts join to the same prompt.

    Raises:
        TypeError: An argument has another type than the above.
        ValueError: The history begins with a system prompt, and there is a preamble too; or the history lacks a block
            that the plan refers to, or the earlier turns that the plan follows.
    """
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan must be a ContextPlan, got {type(plan).__name__}")
    if not isinstance(question, str):
        raise TypeError(f"question must be a str, got {type(question).__name__}")
    check_names(preamble=preamble)
    if isinstance(history, str | bytes | Mapping) or not isinstance(history, Sequence):
        raise TypeError(f"history must be a sequence of messages, got {type(history).__name__}")
    earlier = [dict(as_mapping(message)) for message in history]
    begin = next((i for i, message in enumerate(earlier) if message.get("role") not in _SYSTEM), len(earlier))
    if preamble is not None:
        if begin:
            raise ValueError(f"preamble must be None if the history begins with a system prompt, got {preamble!r}")
        earlier.insert(0, {"role": "system", "content": preamble})
        begin = 1
    context = plan.render()
    if plan.placement == "tail":
        _check_references(plan, earlier, begin)
        return [*earlier, {"role": "user", "content": _content(plan, question, parts)}]
    messages = [*earlier, {"role": "user", "content": question}]
    if context:
        if messages[begin].get("role") != "user":
            messages.insert(begin, {"role": "user", "content": ""})
        content = messages[begin].get("content")
        if isinstance(content, list):  # parts, such as images
            messages[begin]["content"] = [*_text_parts(plan.parts() if parts else [context]), *content]
        else:
            messages[begin]["content"] = _content(plan, content if isinstance(content, str) else "", parts)
    return messages


def _check_references(plan: ContextPlan, earlier: Sequence[Mapping[str, Any]], begin: int) -> None:
    referring = [planned for planned in plan.blocks if planned.reference is not None]
    if len(earlier) == begin and (referring or (plan.turn or 1) > 1):
        which = plan.turn or "?"
        raise ValueError(f"history must hold the conversation's earlier turns, got none: this is turn {which}")
    if not referring:
        return
    shown = VisibleHistory(earlier)
    for planned in referring:
        if not shown.holds(planned):
            name = f"[{planned.label}]" if planned.label else repr(planned.reference and planned.reference.opening)
            raise ValueError(f"history must hold block {name} in full, because the plan refers to it, got none")


def _content(plan: ContextPlan, question: str, parts: bool) -> str | list[dict[str, str]]:
    texts = plan.parts()
    if question:
        texts.append(f"\n\n{question}" if texts and plan.separator is None else question)
    return _text_parts(texts) if parts and texts else "".join(texts)


def _text_parts(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]
