"""Where the blocks of a plan stand in a prompt. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from warmprefix.plan import ContextPlan, joint_reference

__all__ = ["block_ends", "holds_blocks", "in_full", "in_parts"]


_PROMPTS = {"responses": "input", "completions": "prompt"}
"""The field with the prompt, where it is not `messages`."""


def holds_blocks(prompt: str, plan: ContextPlan) -> bool:
    """Return True if every block of the plan is in the prompt, in full or as its reference."""
    return all(
        paragraph in prompt or planned.render() in prompt or planned.text in prompt
        for planned, paragraph in zip(plan.blocks, plan.paragraphs(), strict=True)
    )


def block_ends(prompt: str, plan: ContextPlan) -> list[float] | None:
    """Return for each planned block the share of the prompt's characters up to its end; None if one is missing.

    The blocks must follow one another in planned order, labelled as the plan renders them, or bare.
    """
    ends = _block_ends(prompt, plan)
    if ends is None:
        return None
    return [end / len(prompt) for end in ends] if prompt else []


def in_parts(route: str, body: Mapping[str, Any], plan: ContextPlan) -> Mapping[str, Any]:
    """Return the body with its context in content parts, one per block, so that a cache mark can stand between them.

    The texts of the parts join to the same text. Returns the body itself if no text of a user holds all blocks in
    planned order, or if the context is in parts already.
    """
    name = _PROMPTS.get(route, "messages")
    given = body.get(name)
    messages: list[Any] = given if isinstance(given, list) else [{"role": "user", "content": given}]
    kind = "input_text" if route == "responses" else "text"
    for at, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) and message.get("role") == "user" else None
        if not isinstance(content, str):
            continue
        ends = _block_ends(content, plan)
        if ends:
            cuts = [0, *ends, len(content)]
            texts = [content[start:end] for start, end in pairwise(cuts) if start < end]
            parts = [{"type": kind, "text": text} for text in texts]
            return {**body, name: [*messages[:at], {**message, "content": parts}, *messages[at + 1 :]]}
    return body


def in_full(route: str, body: Mapping[str, Any], plan: ContextPlan) -> Mapping[str, Any]:
    """Return the body with the plan's blocks in full in place of the notes that refer to them.

    Only the newest place of a note is changed: earlier messages are history.
    """
    referenced = [planned for planned in plan.blocks if planned.reference is not None]
    if not referenced:
        return body
    texts = [planned._replace(reference=None).render() for planned in referenced]
    changed = _with_text(route, body, joint_reference(referenced) or "", (plan.separator or "\n\n").join(texts))
    if changed is not None:
        return changed
    for planned, text in zip(referenced, texts, strict=True):  # the application renders its blocks itself
        body = _with_text(route, body, planned.text, text) or body
    return body


def _with_text(route: str, body: Mapping[str, Any], note: str, text: str) -> Mapping[str, Any] | None:
    for name in (_PROMPTS.get(route, "messages"), "instructions", "system"):
        if (changed := _replaced(body.get(name), note, text)) is not None:
            return {**body, name: changed}
    return None


def _replaced(value: object, old: str, new: str) -> Any:
    """Return a value with its last `old` replaced; None if it has none."""
    if isinstance(value, str):
        before, found, behind = value.rpartition(old)
        return f"{before}{new}{behind}" if found else None
    if isinstance(value, list):
        places: Any = range(len(value) - 1, -1, -1)
    elif isinstance(value, dict):
        places = [name for name in ("output", "content", "text") if name in value]
    else:
        return None
    for place in places:
        if (changed := _replaced(value[place], old, new)) is not None:
            copy = value.copy()
            copy[place] = changed
            return copy
    return None


def _block_ends(prompt: str, plan: ContextPlan) -> list[int] | None:
    each = [planned.render() for planned in plan.blocks]
    found = (
        _ends(prompt, texts, from_start=plan.opens_prompt)
        for texts in (plan.paragraphs(), each, [planned.text for planned in plan.blocks])
    )
    return next((ends for ends in found if ends is not None), None)


def _ends(prompt: str, texts: Sequence[str], *, from_start: bool) -> list[int] | None:
    """Return the end of each text in the prompt; None if one is missing.

    A context at the end of a prompt is searched from there: the history in front may hold the same texts.
    """
    ends = []
    begin = end = 0 if from_start else len(prompt)
    for text in texts if from_start else reversed(texts):
        begin = prompt.find(text, end) if from_start else prompt.rfind(text, 0, begin)
        if begin < 0:
            return None
        end = begin + len(text)
        ends.append(end)
    return ends if from_start else ends[::-1]
