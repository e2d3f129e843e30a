"""The numbers of a run, as its printed report and as a page."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from warmprefix.errors import MissingExtraError
from warmprefix.plan import Placement
from warmprefix_tools.console import plain_table
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.demo.servers import ANSWER_TOKENS, EMULATOR, LOCAL_THREADS
from warmprefix_tools.demo.session import MODEL_SECONDS, ArmRuns, DemoResult, DemoText, ServedTurn
from warmprefix_tools.emulator import ChatMessage, render_chat
from warmprefix_tools.local.weights import LICENCE, MODEL
from warmprefix_tools.report.amounts import counted
from warmprefix_tools.report.line_chart import Line, LineChart
from warmprefix_tools.report.pages import render_page
from warmprefix_tools.retriever import content_words

try:
    from rich.console import Console
    from rich.text import Text
except ImportError as exc:
    raise MissingExtraError("cli", "rich") from exc

__all__ = ["TITLE", "demo_fields", "demo_page", "print_report"]

TITLE = "What warmprefix saves"
"""Title of the page."""

_PLACEMENTS: dict[Placement, str] = {
    "head": "head: context in the system prompt, built again each turn",
    "tail": "tail: context comes with each question and stays in the chat",
}
_COLUMNS = ("relevance order", "warmprefix", "change")
_ARMS = ("relevance", "warmprefix")
_RESULT = "tokens prefilled (net)"
_MOST_POINTS = 120
_SHOWN_ANSWERS = 3
_KV_BLOCK = 16  # tokens
_MESSAGE_END = 2  # tokens
_LAST_OF_ANSWER = 1 + _MESSAGE_END  # tokens that the engine did not compute when it gave the answer


def print_report(result: DemoResult, options: DemoOptions, console: Console) -> None:
    """Print the workload, a table per placement, and notes."""
    for line in _workload(result.text):
        console.print(Text(line))
    for placement, arms in result.runs.items():
        table = plain_table("", *_COLUMNS, gap=3, title=_PLACEMENTS[placement])
        table.columns[0].min_width = 30
        for row in _rows(*arms):
            table.add_row(*row, style="bold" if row[0] == _RESULT else None)
        console.print()
        console.print(table)
    console.print()
    if options.model:
        for line in _answers(result):
            console.print(Text(line))
        console.print()
    for note in _notes(result, options):
        console.print(note)


def demo_page(result: DemoResult, options: DemoOptions) -> str:
    """Return a self-contained HTML page with charts and prompts; equal arguments make equal bytes."""
    return render_page(
        "demo/page.html",
        title=TITLE,
        workload=_workload(result.text),
        columns=_COLUMNS,
        result=_RESULT,
        sections=[(_PLACEMENTS[placement], _rows(*arms), _chart(*arms)) for placement, arms in result.runs.items()],
        examples=_examples(result.runs),
        notes=_notes(result, options),
    )


def demo_fields(result: DemoResult, options: DemoOptions) -> dict[str, Any]:
    """Return the numbers of a run, and each answer of the model on this machine, as JSON."""
    fields: dict[str, Any] = {
        "questions": len(result.text.turns),
        "passages": result.text.passages,
        "placements": {
            placement: {arm: _totals(served).as_json() for arm, served in zip(_ARMS, arms, strict=True)}
            for placement, arms in result.runs.items()
        },
    }
    if options.model:
        fields["model"] = {"name": MODEL, "licence": LICENCE, "threads": LOCAL_THREADS}
        fields["answers"] = [
            {"question": pair[0].turn.question.text, **dict(zip(_ARMS, map(_answer_fields, pair), strict=True))}
            for pair in zip(*result.runs["head"], strict=True)
        ]
    return fields


def _answer_fields(served: ServedTurn) -> dict[str, Any]:
    answer = served.answer
    return {
        "text": answer.text,
        "is_cut": answer.finish_reason == "length",
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "ttft_ms": round(1e3 * served.ttft, 1),
    }


def _answers(result: DemoResult) -> Iterator[str]:
    """Yield a few questions with both answers: first those whose prompts differ."""
    pairs = list(zip(*result.runs["head"], strict=True))
    same = sum(before.answer.text == after.answer.text for before, after in pairs)
    yield f"Answers of {MODEL}, which are the same text for {same} of {counted(len(pairs), 'question')}:"
    for pair in sorted(pairs, key=lambda pair: pair[0].messages == pair[1].messages)[:_SHOWN_ANSWERS]:
        yield f"\n{pair[0].turn.question.text}"
        for name, each in zip(_COLUMNS, pair, strict=False):
            computed = (each.answer.prompt_tokens or 0) - (each.answer.cached_tokens or 0)
            cut = f" [cut at {ANSWER_TOKENS} tokens]" if each.answer.finish_reason == "length" else ""
            text = " ".join((each.answer.text or "").split())
            yield f"  {name}, {computed:,} tokens computed, {1e3 * each.ttft:,.0f} ms: {text}{cut}"


def _workload(text: DemoText) -> list[str]:
    """Return in words what was asked, and how much the retrieved passages overlap."""
    seen: set[bytes] = set()
    by_conversation: defaultdict[int, set[bytes]] = defaultdict(set)
    by_anyone = in_conversation = 0.0
    for question, found in text.turns:
        blocks = {block.fingerprint for block in found}
        own = by_conversation[question.conversation]
        by_anyone += len(blocks & seen) / max(len(blocks), 1)
        in_conversation += len(blocks & own) / max(len(blocks), 1)
        seen |= blocks
        own |= blocks
    subject, passages = "this Python's standard library", "its docstrings' passages"
    documents, number = text.documents, len(text.turns)
    if documents is not None:
        subject = f"{counted(documents.files, 'file')} of {documents.name}"
        passages = f"their {counted(len(documents.passages), 'passage')}"
    different = {frozenset(content_words(question.query)) for question, _ in text.turns}
    asked = (
        f"{number} questions ({len(different)} different) of {len({question.user for question, _ in text.turns})} users"
        f" in {len(by_conversation)} conversations about {subject}; BM25 finds the {text.passages} best of {passages}."
        f" Of these, {by_anyone / number:.0%} were found for an earlier question too, {in_conversation / number:.0%} in"
        " the same conversation."
    )
    if documents is None:
        return [asked]
    made_up = (
        "The questions are made up: each is a phrase of a passage, and some passages are asked about more often than"
        " others. Your users may ask otherwise. warmprefix record and warmprefix replay measure their real questions."
    )
    return [asked, made_up + documents.remarks]


# -- the tables ------------------------------------------------------------------------------------------------------


class _ArmTotals(NamedTuple):
    """Totals of one arm under one placement. Token counts are the engine's, None if it does not report them."""

    prompt_tokens: int | None
    prefilled: int | None
    """Prompt tokens that the engine had to compute."""
    hit_ratio: float | None
    ttfts: list[float]
    """Milliseconds, ascending."""

    def as_json(self) -> dict[str, Any]:
        """Return the totals, with percentiles in place of the times."""
        times = {f"ttft_p{share}_ms": round(_percentile(self.ttfts, share), 1) for share in (50, 95)}
        return {**{name: value for name, value in self._asdict().items() if name != "ttfts"}, **times}


def _totals(served: Sequence[ServedTurn]) -> _ArmTotals:
    prompts = [each.answer.prompt_tokens for each in served]
    # vLLM omits the field from an answer without a hit: missing everywhere means not reported, else it means 0.
    cached = [each.answer.cached_tokens for each in served if each.answer.cached_tokens is not None]
    ttfts = sorted(1e3 * each.ttft for each in served)
    prompt = sum(filter(None, prompts))
    if None in prompts or not cached or not prompt:
        return _ArmTotals(None if None in prompts else prompt, None, None, ttfts)
    return _ArmTotals(prompt, prompt - sum(cached), sum(cached) / prompt, ttfts)


def _rows(relevance: Sequence[ServedTurn], warmprefix: Sequence[ServedTurn]) -> list[tuple[str, str, str, str]]:
    """Return the lines of a table, without those that the engine does not report or that would be empty."""
    before, after = _totals(relevance), _totals(warmprefix)
    plans = [each.plan for each in warmprefix if each.plan is not None]
    planning = sorted(1e3 * each.planning_seconds for each in warmprefix)
    compared: list[tuple[str, float | None, float | None, str]] = [
        ("hit ratio", before.hit_ratio, after.hit_ratio, "{:.1%}"),
        ("prompt tokens", before.prompt_tokens, after.prompt_tokens, "{:,}"),
        (_RESULT, before.prefilled, after.prefilled, "{:,}"),
        ("TTFT p50", _percentile(before.ttfts, 50), _percentile(after.ttfts, 50), "{:.0f} ms"),
        ("TTFT p95", _percentile(before.ttfts, 95), _percentile(after.ttfts, 95), "{:.0f} ms"),
    ]
    rows: list[tuple[str, str, str, str]] = []
    for name, old, new, form in compared:
        if old is not None and new is not None:
            change = f"{new / old - 1:+.0%}" if old else ""
            if name == "hit ratio":
                change = f"{100 * (new - old):+.1f} points"
            rows.append((name, form.format(old), form.format(new), change))
    for name, tokens in (
        ("labels, notes, references", sum(plan.note_tokens for plan in plans)),
        ("context saved by references", sum(plan.reference_tokens for plan in plans)),
    ):
        if tokens:
            rows.append((name, "", f"{tokens:,} tokens", ""))
    return [*rows, ("planning p50, within TTFT", "", f"{_percentile(planning, 50):.2f} ms", "")]


def _percentile(ordered: Sequence[float], share: int) -> float:
    """Return the least value that at least `share` percent of the values do not exceed."""
    return ordered[max(math.ceil(share * len(ordered) / 100) - 1, 0)]


def _notes(result: DemoResult, options: DemoOptions) -> list[str]:
    """Return in words how the numbers came about, and what they leave open."""
    plans = [each.plan for _, after in result.runs.values() for each in after if each.plan is not None]
    order = (
        f"Order: changed in {sum(plan.reordered for plan in plans)} of {len(plans)} prompts;"
        f" {sum(plan.order_annotation is not None for plan in plans)} have a note that names the most relevant passage."
        " Whether answers stay as good is up to your model's use of that note. Measure it: warmprefix quality run."
    )
    if options.model:
        stopped = ""
        if len(plans) < options.number:
            stopped = f" Stopped after {MODEL_SECONDS:.0f} s, before {options.number} questions were asked."
        return [
            f"Real: {MODEL} ({LICENCE}) on llama.cpp, {counted(LOCAL_THREADS, 'thread')}, no GPU. The engine reported"
            " the tokens, and the times are this machine's. Each column has a server of its own, which was empty; they"
            f" answered the same questions in turn, each question without a history.{stopped}",
            "The model is small: expect many wrong answers in both columns. It shows what the engine computes and how"
            " long that takes, not how well a model reads.",
            order,
        ]
    if options.endpoint is None:
        return [
            "Emulated: the engines, one for each column. No model runs; the cache follows vLLM's rules, with KV blocks"
            f" of {EMULATOR.block_size} tokens and room for {EMULATOR.capacity_tokens:,}. TTFT is modelled:"
            f" {EMULATOR.base_ttft_ms:g} ms + uncached tokens / {EMULATOR.prefill_rate:,.0f} per second, plus HTTP.",
            order,
            "Next, your engine: the same command with --endpoint http://localhost:8000/v1",
        ]
    if _totals(next(iter(result.runs.values()))[0]).prefilled is not None:
        return [order]
    return [
        "The server does not report cached tokens, so the tables show TTFT only."
        " vLLM reports them with --enable-prompt-tokens-details.",
        order,
    ]


# -- the page --------------------------------------------------------------------------------------------------------


def _chart(before: Sequence[ServedTurn], after: Sequence[ServedTurn]) -> LineChart | None:
    """Return the hit ratio of all requests up to each; None if the engine does not report it."""
    if len(before) < 2 or None in (_totals(before).prefilled, _totals(after).prefilled):
        return None
    lines = (("warmprefix", "hero", after), ("relevance order", "base", before))
    return LineChart([Line(name, look, tuple(_so_far(served))) for name, look, served in lines])


def _so_far(served: Sequence[ServedTurn]) -> Iterator[tuple[int, float]]:
    cached = prompt = 0
    step = -(-len(served) // _MOST_POINTS)
    for number, each in enumerate(served, 1):
        cached += each.answer.cached_tokens or 0
        prompt += each.answer.prompt_tokens or 0
        if number % step == 0 or number == len(served):
            yield number, cached / prompt if prompt else 0.0


class _PromptExample(NamedTuple):
    """The requests of both arms for one question."""

    placement: Placement
    before: ServedTurn
    after: ServedTurn

    @property
    def saved_tokens(self) -> int:
        """Tokens that warmprefix's prompt saved the engine."""
        before, after = (
            (each.answer.prompt_tokens or 0) - (each.answer.cached_tokens or 0) for each in (self.before, self.after)
        )
        return before - after


def _examples(runs: ArmRuns) -> list[tuple[str, str, list[tuple[str, list[tuple[str, str]]]], str | None]]:
    """Return a typical reordered prompt, a typical one with references, and the one that gained least.

    Each has a title, the question, the look and name of each part of both prompts, and the note. Typical is the median
    of the saved tokens over all such prompts. A kind without prompts has no example.
    """
    pairs = [_PromptExample(placement, *pair) for placement, arms in runs.items() for pair in zip(*arms, strict=True)]
    plans = [(pair, pair.after.plan) for pair in pairs if pair.after.plan is not None]
    kinds = (
        ("A typical prompt with another order", [pair for pair, plan in plans if plan.order_annotation], 0.5),
        ("A typical prompt with references", [pair for pair, plan in plans if plan.reference_tokens], 0.5),
        ("The prompt that gained least", [pair for pair, _ in plans if pair.placement == "head"], 0.0),
    )
    found = []
    for title, group, share in kinds:
        if group:
            pair = sorted(group, key=lambda each: each.saved_tokens)[int(share * len(group))]
            asked = pair.before.turn.question
            shown = [(name, _parts(each, pair.placement)) for name, each in zip(_COLUMNS, pair[1:], strict=False)]
            note = pair.after.plan.order_annotation if pair.after.plan else None
            found.append((f"{title}, {pair.placement}, turn {asked.turn}", asked.text, shown, note))
    return found


def _parts(served: ServedTurn, placement: Placement) -> list[tuple[str, str]]:
    """Return the parts of one prompt from its beginning: the look, by how much of it was cached, and the name.

    The engine reports how many tokens of the whole prompt it found. The emulator's tokenizer places their end in the
    text, which is an estimate for another engine.
    """
    messages = [ChatMessage(message["role"], message["content"]) for message in served.messages]
    place = 0 if placement == "head" else len(messages) - 1
    before, holder = messages[:place], messages[place]
    answer = served.answer
    cached = (answer.cached_tokens or 0) * len(render_chat(messages)) / (answer.prompt_tokens or 1)

    def look(start: int, end: int) -> str:
        # Less than a KV block counts as nothing, because it cannot be cached alone.
        return "found" if end - cached < _KV_BLOCK else "partly" if cached - start >= _KV_BLOCK else "new"

    def tokens_before(position: int) -> int:
        cut = ChatMessage(holder.role, holder.text[:position])
        return len(render_chat([*before, cut], add_generation_prompt=False)) - _MESSAGE_END

    parts: list[tuple[str, str]] = []
    if len(before) > 1:
        end = len(render_chat(before, add_generation_prompt=False))
        parts.append((look(0, end - _LAST_OF_ANSWER), f"(history, {end:,} tokens)"))
    offset = 0
    for number, (name, text, is_reference) in enumerate(served.shown, 1):  # as a note counts the blocks
        start = holder.text.index(text, offset)
        offset = start + len(text)
        parts.append(
            ("reference" if is_reference else look(tokens_before(start), tokens_before(offset)), f"{number}. {name}")
        )
    return parts
