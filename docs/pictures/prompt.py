"""Draw docs/pictures/prompt.svg: three prompts in relevance order and as warmprefix plans them, and what is cached.

BM25 retrieves the passages below for each question. The emulator's tokenizer counts the tokens, and its prefix cache,
which follows vLLM's rules with KV blocks of 16 tokens, the cached ones. The cache is empty before the first request.

    python docs/pictures/prompt.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from drawing import Drawing

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_tools.emulator import ChatMessage, PrefixCache, render_chat
from warmprefix_tools.retriever import Bm25Retriever

FILE = Path(__file__).with_suffix(".svg")

INSTRUCTIONS = "You answer customers of a lamp shop. Use the passages below, and name the ones that you used."
PASSAGES = {
    "Returns": (
        "Returns. A customer can return an unused lamp within 30 days after it arrived. The return needs the number of"
        " the order and the original box. Lamps that were made to measure cannot be returned. We check each returned"
        " lamp within two days after it reached the warehouse in Kassel, and confirm the return by e-mail. If a part is"
        " missing, we ask for it first, and keep the lamp for two weeks."
    ),
    "Refunds": (
        "Refunds. We refund the price of a returned lamp to the card or account that paid for it. A refund takes five"
        " working days after the return was confirmed. A gift card is refunded as a gift card. If a discount applied to"
        " several lamps, the refund of one lamp is its share of the price that was paid."
    ),
    "Shipping": (
        "Shipping. A parcel takes two to four working days. Shipping is free from 60 euros on and costs 5 euros below."
        " For a return we send a label for free shipping by e-mail; a return without this label is paid by the"
        " customer. Heavy lamps are shipped on a pallet, by appointment. An island may take two days longer."
    ),
    "Warranty": (
        "Warranty. A lamp that fails within three years is repaired or replaced. Please send us a photo of the defect"
        " first. The warranty covers drivers, switches and built-in light sources, but not glass that broke after the"
        " delivery. It begins on the day of the purchase, and a replaced lamp has a new warranty of three years."
    ),
    "Payment": (
        "Payment. We accept cards, bank transfer and gift cards. A card is charged when the parcel leaves the house."
        " An order that is paid by bank transfer leaves the warehouse after the money arrived. Companies can pay by"
        " invoice within 30 days."
    ),
}
QUESTIONS = (
    "How many days do I have to return a lamp?",
    "When is a returned lamp refunded to my card?",
    "Is shipping a return free, and is it refunded?",
)
PASSAGES_PER_QUESTION = 3

Arm = Literal["relevance", "warmprefix"]
NAMES: dict[Arm, str] = {"relevance": "in relevance order", "warmprefix": "with warmprefix"}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a prompt, from one token to another; the header of a message belongs to the part after it."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine receives it."""

    parts: tuple[Part, ...]
    tokens: int
    cached_tokens: int
    note: str | None


def prompts_of(arm: Arm, retrieved: Sequence[Sequence[ContextBlock]]) -> list[Prompt]:
    """Return one arm's prompts, served one after the other by one engine."""
    cache = PrefixCache(1_024)
    planner = ContextPlanner(policy="relevance" if arm == "relevance" else "coaccess")
    prompts = []
    for question, blocks in zip(QUESTIONS, retrieved, strict=True):
        with planner.planning(blocks, preamble=INSTRUCTIONS) as plan:
            system = f"{INSTRUCTIONS}\n\n{plan.render()}"
        messages = [ChatMessage("system", system), ChatMessage("user", question)]
        tokens = render_chat(messages)
        sequence = cache.allocate(tokens)
        assert sequence is not None
        cache.store(sequence)
        cache.free(sequence)
        texts = {"instructions": INSTRUCTIONS}
        texts |= {planned.block.id or "": planned.block.text for planned in plan.blocks}
        if plan.order_annotation is not None:
            texts["note"] = plan.order_annotation
        parts: list[Part] = []
        for name, text in texts.items():
            until = system.index(text) + len(text)
            end = len(render_chat([ChatMessage("system", system[:until])], add_generation_prompt=False)) - 2
            parts.append(Part(name, parts[-1].end if parts else 0, end))
        parts.append(Part("question", parts[-1].end, len(tokens)))
        prompts.append(Prompt(tuple(parts), len(tokens), sequence.cached_tokens, plan.order_annotation))
    return prompts


def hit_ratio(prompts: Sequence[Prompt]) -> float:
    """Return the share of all prompt tokens that were cached."""
    return sum(prompt.cached_tokens for prompt in prompts) / sum(prompt.tokens for prompt in prompts)


# -- the picture -----------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT = 640, 748
_LEFT, _RIGHT = 24, 616
_BAR = 40


def draw(arms: dict[Arm, list[Prompt]]) -> Drawing:
    """Return the picture of both arms' prompts."""
    before, after = (hit_ratio(arms[arm]) for arm in NAMES)
    drawing = Drawing(
        _WIDTH,
        _HEIGHT,
        "Three prompts with the same passages, in relevance order and planned by warmprefix",
        "An engine skips the beginning of a prompt that it holds already. "
        + " ".join(_described(arm, prompts) for arm, prompts in arms.items()),
    )
    per_token = (_RIGHT - _LEFT) / max(prompt.tokens for prompts in arms.values() for prompt in prompts)
    drawing.text(_LEFT, 42, "The same passages, in another order", 25, "bold")
    for left, look, meaning in ((0, "cached", "cached: the engine skips it"), (310, "new", "computed")):
        drawing.box(_LEFT + left, 60, 20, 20, look, 3)
        drawing.text(_LEFT + left + 28, 77, meaning, 19)
    y = 120.0
    for number, question in enumerate(QUESTIONS):
        drawing.text(_LEFT, y, f"{number + 1}. {question}", 20, "bold")
        same = arms["relevance"][number] == arms["warmprefix"][number]
        for arm in list(NAMES)[: 1 if same else None]:
            prompt = arms[arm][number]
            drawing.text(_LEFT, y + 27, "in either order" if same else NAMES[arm], 18, "dim")
            drawing.text(_RIGHT, y + 27, f"{prompt.cached_tokens} of {prompt.tokens} tokens cached", 18, "dim", "end")
            _draw_prompt(drawing, prompt, y + 36, per_token)
            y += 27 + _BAR + 14
            if number == 0:
                drawing.text(_LEFT, y + 14, "instructions", 17, "dim")
                drawing.text(_LEFT + prompt.tokens * per_token, y + 14, "question", 17, "dim", "end")
                y += 14
            elif prompt.note is not None:
                drawing.text(_RIGHT, y + 14, f"note: {prompt.note}", 17, "noted", "end")
                y += 14
        y += 40
    drawing.text(_LEFT, y + 8, "Hit ratio of the three", 20, "bold")
    drawing.text(_RIGHT, y + 10, f"{before:.0%} → {after:.0%}", 32, "bold good", "end")
    drawing.text(_LEFT, y + 40, "Counted by the emulator: vLLM's rules, KV blocks of 16 tokens.", 17, "dim")
    return drawing


def _draw_prompt(drawing: Drawing, prompt: Prompt, y: float, per_token: float) -> None:
    drawing.box(_LEFT, y, prompt.tokens * per_token, _BAR, "new")
    if prompt.cached_tokens:
        drawing.box(_LEFT, y, prompt.cached_tokens * per_token, _BAR, "cached")
    for part in prompt.parts:
        left, width = _LEFT + part.start * per_token, (part.end - part.start) * per_token
        if part.name == "note":
            drawing.box(left, y, width, _BAR, "note")
        drawing.box(left, y, width, _BAR, "frame")
        if part.name in PASSAGES:
            look = "on-cached" if prompt.cached_tokens >= (part.start + part.end) / 2 else ""
            drawing.text(left + width / 2, y + _BAR / 2 + 7, part.name, 19, look, "middle")


def _described(arm: Arm, prompts: Sequence[Prompt]) -> str:
    each = "; ".join(
        f"{', '.join(part.name for part in prompt.parts)}: {prompt.cached_tokens} of {prompt.tokens} tokens cached"
        for prompt in prompts
    )
    return f"{NAMES[arm].capitalize()}: {each}."


def picture() -> str:
    """Return the SVG; the same bytes each time."""
    blocks = [ContextBlock(text, id=name) for name, text in PASSAGES.items()]
    retriever = Bm25Retriever(blocks)
    retrieved = [retriever.retrieve(question, PASSAGES_PER_QUESTION) for question in QUESTIONS]
    return str(draw({arm: prompts_of(arm, retrieved) for arm in NAMES}))


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
