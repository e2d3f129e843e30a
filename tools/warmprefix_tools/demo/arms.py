"""The prompts that the demo compares: retrieved blocks in relevance order, and planned by warmprefix.

Both lay a chat out so that prefixes can be shared: fixed instructions come first, then context, then the question.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from warmprefix import ContextBlock, ContextPlanner
from warmprefix.labels import label_candidates
from warmprefix.plan import Placement

__all__ = [
    "DOCUMENT_INSTRUCTIONS",
    "INSTRUCTIONS",
    "DemoArm",
    "Message",
    "PromptContext",
    "chat",
    "continued",
    "relevance_arm",
    "warmprefix_arm",
]

Message = dict[str, str]
"""OpenAI's message: a role and a text."""

INSTRUCTIONS = (
    "You answer questions about the Python standard library. Rely on the documentation in the context, name the"
    " passages that you used, and point it out if the answer is not there."
)

DOCUMENT_INSTRUCTIONS = (
    "You answer questions about a collection of documents. Rely on the passages in the context, name those that you"
    " used, and point it out if the answer is not there."
)


def chat(
    placement: Placement, instructions: str, history: Sequence[Message], context: str, question: str
) -> list[Message]:
    """Return the messages of one request.

    `head`: the context follows the instructions, before the history, and changes with each turn.
    `tail`: the context comes with its question, and stays in the history.
    """
    if placement == "head":
        return [_message("system", f"{instructions}\n\n{context}"), *history, _message("user", question)]
    return [_message("system", instructions), *history, _message("user", f"{context}\n\nQuestion: {question}")]


def continued(messages: Sequence[Message], answer: str) -> list[Message]:
    """Return the history of the next turn: all but the system prompt, as it was sent."""
    return [*messages[1:], _message("assistant", answer)]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


@dataclass(frozen=True, slots=True)
class ShownBlock:
    """A context block as a prompt shows it."""

    label: str
    """Its name in the report; the prompt shows it only if `text` does."""
    text: str
    is_reference: bool


@dataclass(frozen=True, slots=True)
class PromptContext:
    """The context of one request, as an arm arranges it."""

    blocks: tuple[ShownBlock, ...]
    order_annotation: str | None
    text: str
    cache_salt: str | None
    reordered: bool = False
    note_tokens: int = 0
    """Tokens of the labels and notes in `text`, by the planner's estimate."""
    reference_tokens: int = 0
    planning_seconds: float | None = None


DemoArm = Callable[[Sequence[ContextBlock], Sequence[Message]], AbstractAsyncContextManager[PromptContext]]
"""Function of retrieved blocks and the history as it will be sent; the model is asked inside the context manager."""


def relevance_arm(cache_salt: str) -> DemoArm:
    """Return the arm without warmprefix: plain texts in the retriever's order."""

    @asynccontextmanager
    async def arrange(blocks: Sequence[ContextBlock], history: Sequence[Message]) -> AsyncIterator[PromptContext]:
        shown = tuple(ShownBlock(_name(block), block.text, False) for block in blocks)
        yield PromptContext(shown, None, "\n\n".join([block.text for block in shown]), cache_salt)

    return arrange


def _name(block: ContextBlock) -> str:
    """Return the label that a block would have in a prompt with labels."""
    return next(label_candidates(block))


def warmprefix_arm(
    placement: Placement, tenant: str, model: str, instructions: str, capacity_tokens: int | None
) -> DemoArm:
    """Return the arm that plans the blocks: it commits a plan on leaving, and abandons it after an exception."""
    planner = ContextPlanner(capacity_tokens=capacity_tokens)

    @asynccontextmanager
    async def arrange(blocks: Sequence[ContextBlock], history: Sequence[Message]) -> AsyncIterator[PromptContext]:
        started = time.perf_counter()
        async with planner.aplanning(
            blocks,
            placement=placement,
            tenant=tenant,
            model=model,
            preamble=instructions,
            history=history if placement == "tail" else None,
        ) as plan:
            text = plan.render()
            seconds = time.perf_counter() - started
            shown = tuple(
                ShownBlock(planned.label or _name(planned.block), paragraph, planned.reference is not None)
                for planned, paragraph in zip(plan.blocks, plan.paragraphs(), strict=True)
            )
            yield PromptContext(
                shown,
                plan.order_annotation,
                text,
                plan.cache_salt,
                plan.reordered,
                plan.note_tokens,
                plan.reference_tokens,
                seconds,
            )

    return arrange
