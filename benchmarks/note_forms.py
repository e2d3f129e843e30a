"""Compare what each form of a note costs in tokens and saves net, and whether a reader finds the passage that it names.

    pip install tiktoken
    python benchmarks/note_forms.py [--requests N]

The chunks are those of docs/*.md, of the docstrings and the code of Python's standard library, cut at blank lines into
passages of up to 800 characters. In the workload `reuse` each request has 8 of the 16 chunks of one of 40 sections, in
random order; in `no reuse` all chunks are new. The cache holds everything. *net*: the share of
the tokens of relevance order, joined by blank lines, that is spared. *read*: the share of prompts with a note in which
a reader of the text alone finds the best passage: it counts paragraphs for places, and searches for quotes and labels.
The order is that of `ContextPlanner` for the form's own note; `places` and `separators` take the orders of one quote.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import print_table
from result_files import write_rows
from token_estimates import installed_counters
from warmprefix import ContextBlock, ContextPlan, ContextPlanner, Templates
from warmprefix.annotate import Annotate

ROOT = Path(__file__).parents[1]
LIBRARY = Path(sysconfig.get_path("stdlib"))
TOKENIZERS = ("cl100k", "o200k")
MOST_CHARACTERS = 800
FORMS: dict[str, tuple[Annotate, int]] = {
    "places": ("note", 1),
    "separators and places": ("note", 1),
    "1 quote": ("note", 1),
    "2 quotes": ("note", 2),
    "3 quotes": ("note", 3),
    "labels": ("labels", 1),
    "labels and note": ("both", 1),
}
KIND = ("workload", "form", "tokenizer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    options = parser.parse_args()
    counters = {name: count for name, count in installed_counters().items() if name in TOKENIZERS}
    rows = [
        measured(workload, form, name, counters[name], requests)
        for workload, requests in workloads(options.requests).items()
        for name in counters
        for form in FORMS
    ]
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    write_rows("note_forms", rows, KIND)


def chunks() -> list[str]:
    """Return passages of documentation and code, neighbours next to each other."""
    paths = [*sorted((ROOT / "docs").glob("*.md")), *sorted(LIBRARY.glob("*.py"))[:60]]
    found: list[str] = []
    for path in paths:
        passage = ""
        for part in re.split(r"\n\s*\n", path.read_text("utf-8", "replace")):
            if passage and len(passage) + len(part) > MOST_CHARACTERS:
                found.append(passage)
                passage = ""
            passage = f"{passage}\n\n{part}" if passage else part
        found += [passage] if passage.strip() else []
    return list(dict.fromkeys(found))


def workloads(requests: int) -> dict[str, list[list[str]]]:
    rng = random.Random(1)
    found = chunks()
    sections = [found[begin : begin + 16] for begin in range(0, 40 * 16, 16)]
    fresh = found[40 * 16 :]
    return {
        "reuse": [rng.sample(rng.choice(sections), 8) for _ in range(requests)],
        "no reuse": [fresh[begin : begin + 8] for begin in range(0, len(fresh) - 8, 8)][:requests],
    }


def measured(
    workload: str, form: str, tokenizer: str, count: Callable[[str], int], requests: Sequence[Sequence[str]]
) -> dict[str, Any]:
    annotate, quoted = FORMS[form]
    planner = ContextPlanner(annotate=annotate, templates=Templates(most_quoted=quoted), tokenizer=count)
    before, ours = Computed(count), Computed(count)
    notes: list[int] = []
    read: list[bool] = []
    for request in requests:
        with planner.planning([ContextBlock(text, tokens=count(text)) for text in request]) as plan:
            shown, note = written(form, plan)
            before.serve(request)
            ours.serve([*shown, note] if note else shown)
            if note:
                notes.append(count(note))
                read.append(finds("\n\n".join(shown), note, form, plan))
    return {
        "workload": workload,
        "form": form,
        "tokenizer": tokenizer,
        "note_tokens": round(statistics.fmean(notes), 1) if notes else 0,
        "noted_percent": round(100 * len(notes) / len(requests), 1),
        "net_percent": round(100 * (1 - ours.tokens / before.tokens), 2),
        "read_percent": round(100 * statistics.fmean(read), 1) if read else None,
    }


def written(form: str, plan: ContextPlan) -> tuple[list[str], str | None]:
    """Return the paragraphs and the note of a prompt."""
    shown = plan.paragraphs()
    if "places" not in form:
        return shown, plan.order_annotation
    if "separators" in form:
        shown = [f"---\n{text}" for text in shown]
    order = [block.rank for block in plan.blocks]
    best = [order.index(rank) + 1 for rank in range(min(3, len(order)))]
    note = f"Most relevant passages above: {', '.join(map(str, best))}."
    return shown, note if plan.order_annotation else None


def finds(context: str, note: str, form: str, plan: ContextPlan) -> bool:
    """Return True if a reader of the text finds the best passage."""
    best = min(plan.blocks, key=lambda block: block.rank)
    begin = context.index(best.render())
    place: int
    if form == "places":
        number = int(note.split(": ")[1].split(",")[0].rstrip("."))
        place = [0, *[gap.end() for gap in re.finditer(r"\n\s*\n", context)]][number - 1]
    elif form == "separators and places":
        number = int(note.split(": ")[1].split(",")[0].rstrip("."))
        place = [gap.end() for gap in re.finditer(r"(?m)^---\n", context)][number - 1]
    elif "quote" in form:
        place = context.index(note.split('"')[1])
    else:
        place = context.index(note[note.index("[") : note.index("]") + 1])
    return begin <= place < begin + len(best.render())


class Computed:
    """Tokens of prompts that an unbounded prefix cache does not hold: paragraphs are found or not as a whole."""

    def __init__(self, count: Callable[[str], int]) -> None:
        self.tokens = 0
        self._count = count
        self._held: set[tuple[str, ...]] = set()

    def serve(self, paragraphs: Sequence[str]) -> None:
        for end in range(1, len(paragraphs) + 1):
            path = tuple(paragraphs[:end])
            if path not in self._held:
                self._held.add(path)
                self.tokens += self._count(paragraphs[end - 1]) + 1


if __name__ == "__main__":
    main()
