"""Picks the prompts that the report shows, and works out which part of each the cache held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from warmprefix.plan import Placement
from warmprefix_tools.demo.runner import Served
from warmprefix_tools.emulator.chat import ChatMessage, render_chat

__all__ = ["Example", "Held", "PromptLine", "Runs", "pick_examples", "prompt_lines"]

Held = Literal["all", "part", "none", "unknown"]

Runs = Mapping[Placement, tuple[Sequence[Served], Sequence[Served]]]
"""What relevance order's and what warmprefix's requests came to, question for question."""

_KV_BLOCK = 16
_MESSAGE_END = 2  # tokens
_LAST_OF_ANSWER = 1 + _MESSAGE_END  # the engine did not compute them when it gave the answer


@dataclass(frozen=True, slots=True)
class Example:
    """One question as both arms put it."""

    title: str
    placement: Placement
    before: Served
    after: Served


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A context block in its place in a prompt, or the history in front of them all."""

    label: str
    is_reference: bool
    held: Held


def pick_examples(runs: Runs) -> list[Example]:
    """At most three: a typical reordered prompt, a typical one with references, and the one that gained least.

    Typical is the median of the tokens saved, over all such prompts.
    """
    pairs = [
        Example("", placement, before, after)
        for placement, (relevance, warmprefix) in runs.items()
        for before, after in zip(relevance, warmprefix, strict=True)
    ]
    first = [pair for pair in pairs if pair.placement == pairs[0].placement]
    reordered = [pair for pair in first if pair.after.context.order_annotation is not None]
    referring = [pair for pair in pairs if pair.after.context.reference_tokens]
    picked = []
    for title, some, share in (
        ("A typical prompt with another order", reordered, 0.5),
        ("A typical prompt with references", referring, 0.5),
        ("The prompt that gained least", first, 0.0),
    ):
        if some:
            chosen = sorted(some, key=_saved)[int(share * len(some))]
            picked.append(Example(title, chosen.placement, chosen.before, chosen.after))
    return picked


def prompt_lines(served: Served, placement: Placement) -> list[PromptLine]:
    """The context of one prompt from its beginning, each block with how much of it the cache held.

    The engine reports how many tokens of the whole prompt it found. Where these end is counted with the emulator's
    tokenizer, and so is an estimate where another engine answered.
    """
    messages = [ChatMessage(message["role"], message["content"]) for message in served.messages]
    place = 0 if placement == "head" else len(messages) - 1
    before, holder = messages[:place], messages[place]
    cached = _cached_by_our_count(served, messages)
    lines: list[PromptLine] = []
    if len(before) > 1:
        end = len(render_chat(before, add_generation_prompt=False))
        lines.append(PromptLine(f"(history, {end:,} tokens)", False, _held(0, end - _LAST_OF_ANSWER, cached)))
    offset = 0
    for block in served.context.blocks:
        start = holder.text.index(block.text, offset)
        offset = start + len(block.text)
        place_in_tokens = [
            len(render_chat([*before, ChatMessage(holder.role, holder.text[:at])], add_generation_prompt=False))
            - _MESSAGE_END
            for at in (start, offset)
        ]
        held = _held(place_in_tokens[0], place_in_tokens[1], cached)
        lines.append(PromptLine(block.label, block.is_reference, held))
    return lines


def _saved(pair: Example) -> int:
    """Tokens that the engine prefilled less for warmprefix's prompt."""
    before, after = pair.before.answer, pair.after.answer
    if before.prompt_tokens is None or after.prompt_tokens is None:
        return 0
    return before.prompt_tokens - (before.cached_tokens or 0) - after.prompt_tokens + (after.cached_tokens or 0)


def _cached_by_our_count(served: Served, messages: Sequence[ChatMessage]) -> float | None:
    answer = served.answer
    if answer.cached_tokens is None or not answer.prompt_tokens:
        return None
    return answer.cached_tokens * len(render_chat(messages)) / answer.prompt_tokens


def _held(start: int, end: int, cached: float | None) -> Held:
    """Less than a KV block counts as nothing: it can't be held by itself."""
    if cached is None:
        return "unknown"
    if end - cached < _KV_BLOCK:
        return "all"
    return "part" if cached - start >= _KV_BLOCK else "none"
