"""The messages of a planned prompt, put together so that its prefix is the one that was planned for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from warmprefix.dedup.history import SdkMessage, VisibleHistory, as_mapping
from warmprefix.plan import ContextPlan

__all__ = ["messages_for"]


_SYSTEM = ("system", "developer")


def messages_for(
    plan: ContextPlan,
    question: str,
    history: Sequence[Mapping[str, Any] | SdkMessage] = (),
    preamble: str | None = None,
) -> list[Any]:
    r"""A chat that asks the question with the plan's context: messages as any OpenAI-compatible chat API takes them.

    With placement "head", the context opens the first user message, right behind the preamble: it is there in every
    turn, and whoever else has the same context shares it. With "tail", the history stays as it is, and context and
    question follow it.

    >>> from warmprefix import ContextBlock, ContextPlanner
    >>> plan = ContextPlanner().plan([ContextBlock("The sea is deep.", id="sea")])
    >>> messages_for(plan, "How deep?", preamble="Be brief.")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '[sea] The sea is deep.\n\nHow deep?'}]

    Args:
        plan: What is to be told.
        question: What is asked.
        history: The earlier messages, oldest first, without the contexts of head plans, with those of tail plans: as
            mappings, or as the SDK's own, `answer.choices[0].message`. They are copied, not changed. Give `plan` the
            same.
        preamble: The system prompt, if it is not the history's first message.

    Raises:
        TypeError: An argument has another type than the above.
        ValueError: The history begins with a system prompt, and there is a preamble too; or the plan refers to a block
            that the history does not hold in full, or follows earlier turns that the history lacks.
    """
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan must be a ContextPlan, got {type(plan).__name__}")
    if not isinstance(question, str):
        raise TypeError(f"question must be a str, got {type(question).__name__}")
    if preamble is not None and not isinstance(preamble, str):
        raise TypeError(f"preamble must be a str or None, got {type(preamble).__name__}")
    earlier = _copied(history)
    begin = next((i for i, message in enumerate(earlier) if message.get("role") not in _SYSTEM), len(earlier))
    if preamble is not None:
        if begin:
            raise ValueError("preamble must be None where the history begins with a system prompt")
        earlier.insert(0, {"role": "system", "content": preamble})
        begin = 1
    context = plan.render()
    if plan.placement == "tail":
        _check_references(plan, earlier, begin)
        return [*earlier, {"role": "user", "content": _joined(context, question)}]
    messages = [*earlier, {"role": "user", "content": question}]
    if context:
        if messages[begin].get("role") != "user":
            messages.insert(begin, {"role": "user", "content": ""})
        messages[begin]["content"] = _before(context, messages[begin].get("content"))
    return messages


def _copied(history: Sequence[Mapping[str, Any] | SdkMessage]) -> list[dict[str, Any]]:
    if isinstance(history, str | bytes | Mapping) or not isinstance(history, Sequence):
        raise TypeError(f"history must be a sequence of messages, got one {type(history).__name__}")
    return [dict(as_mapping(message)) for message in history]


def _check_references(plan: ContextPlan, earlier: Sequence[Mapping[str, Any]], begin: int) -> None:
    referring = [planned for planned in plan.blocks if planned.reference is not None]
    if len(earlier) == begin and (referring or (plan.turn or 1) > 1):
        raise ValueError(
            f"history must hold the conversation's earlier turns, got none: this is turn {plan.turn or '?'}"
        )
    if not referring:
        return
    blocks, labels = [planned.block for planned in referring], [planned.label for planned in referring]
    shown = VisibleHistory(earlier).resolve(blocks, labels, referring[0].templates)
    for planned, (label, reference) in zip(referring, shown, strict=True):
        if reference is None or label != planned.label:
            raise ValueError(f"history must hold block [{planned.label}] in full, which the plan refers to")


def _before(context: str, content: object) -> Any:
    if isinstance(content, list):  # parts, such as images
        return [{"type": "text", "text": context}, *content]
    return _joined(context, content if isinstance(content, str) else "")


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
