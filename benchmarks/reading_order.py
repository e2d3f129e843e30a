"""Hits against right answers, with a reader that reads some places of its context better than others.

    python benchmarks/reading_order.py [--texts made-up,lihua,xquad] [--requests 637] [--caches 30000,100000]

A planted reader answers every question over HTTP, behind the emulator and its prefix cache. Whether it is right depends
on the place of the passage with the answer alone: 94 % of the questions in the first place, 58 % in the middle and
74 % in the last, as measured on a model of 0.5 billion parameters (`u`); the `mirror`; and the same everywhere
(`flat`). Planners know the profile, and have one price each: the points of right answers that one percent of saved
prefill is worth. Without a price the planner does not know the profile. The other numbers:

- *hits*: the share of all prompt tokens that the engine found in its cache;
- *saved*: the prefill saved, all in, in % of that in relevance order;
- *right*: the share of right answers; *back*: the share of the points that the planner without the profile lost
  against relevance order and this one gets back;
- *same*: the prompts that are equal to those without the profile, byte by byte.

`lihua` and `xquad` are texts with BM25's passages in the folder that the environment variable WARMPREFIX_TRACES names;
`made-up` questions are there in any clone. In 94 % of the questions of xquad, and in 68 % of those of lihua, the answer
is in the passage that stands first in relevance order; of those made up, in half. Prompts have 5 passages, made-up ones
8.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI

from common import print_table, size
from engine_workload import BUNDLES, records
from result_files import write_rows
from traces import FOLDER
from warmprefix import ContextBlock, ContextPlanner
from warmprefix_openai import messages_for
from warmprefix_tools.emulator import ChatMessage, EmulatorConfig, EmulatorServer
from warmprefix_tools.quality.made_up import made_up_questions
from warmprefix_tools.quality.questions import EvidenceQuestion

PROFILES: Mapping[str, Sequence[float]] = {"u": (94, 58, 74), "mirror": (74, 58, 94), "flat": (75,)}
PRICES = (10.0, 5.0, 3.0, 2.5, 2.0, 1.0, 0.3, 0.0)
K = 5
SYSTEM = "Answer from the passages."
MODEL = "warmprefix-emulator"
GOLDEN = (math.sqrt(5) - 1) / 2
KIND = ("text", "cache", "profile", "points_per_percent")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", default=f"made-up,{','.join(BUNDLES)}")
    parser.add_argument("--requests", type=int, default=600, help="questions of each text")
    parser.add_argument("--caches", default="30000,100000,unbounded", help="tokens")
    parser.add_argument("--profiles", default=",".join(PROFILES))
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for text in options.texts.split(","):
        try:
            asked = questions(text, options.requests)
        except FileNotFoundError as error:
            print(f"{text} is not there: {error}", file=sys.stderr)
            continue
        for cache in options.caches.split(","):
            capacity = None if cache == "unbounded" else int(cache)
            for profile in options.profiles.split(","):
                measured = [*curve(asked, PROFILES[profile], capacity)]
                about = {"text": text, "questions": len(asked), "cache": size(capacity), "profile": profile}
                rows += [about | row for row in measured]
                print(f"\n{text}, {len(asked)} questions, cache {cache}, profile {profile}\n")
                print_table([*measured[-1]], [[row.get(name, "") for name in measured[-1]] for row in measured])
    write_rows("reading_order", rows, KIND)


def questions(text: str, count: int) -> list[EvidenceQuestion]:
    """Return the first questions of a text whose passages hold the answer.

    Raises:
        FileNotFoundError: The text is not there.
    """
    if text == "made-up":
        return [*made_up_questions(count)]
    folder = Path(os.environ.get(FOLDER, ""))
    lines = records(folder / f"{BUNDLES[text]}.text.jsonl.gz")
    found = records(folder / f"{BUNDLES[text]}_bm25_k20.jsonl.gz")
    passages = {line["block"]: line["text"] for line in lines if "block" in line}
    asked = [line for line in lines if "query" in line]
    retrieved = [line for line in found if "request" in line]
    kept: list[EvidenceQuestion] = []
    for question, request in zip(asked, retrieved, strict=True):
        texts = tuple(dict.fromkeys(passages[block] for block in request["blocks"][:K]))
        gold = tuple(i for i, each in enumerate(texts) if each in {passages[block] for block in request["gold"]})
        if gold:
            kept.append(EvidenceQuestion(str(question["query"]), question["text"], (), texts, gold[:1]))
    return kept[:count]


@dataclass
class PlaceReader:
    """Answers `right` or `wrong`, by the place of the passage with the answer."""

    right: Sequence[float]
    """Right answers in percent, in places from the first to the last."""
    asked: Mapping[str, tuple[int, EvidenceQuestion]]
    """The questions by what their prompts end with, with their numbers."""

    def answer(self, messages: Sequence[ChatMessage]) -> str:
        prompt = messages[-1].text
        number, question = self.asked[prompt.rpartition("\n\n")[2]]
        order = sorted(range(len(question.passages)), key=lambda i: prompt.index(question.passages[i]))
        way = order.index(question.gold[0]) / max(len(order) - 1, 1) * (len(self.right) - 1)
        before, after = self.right[int(way)], self.right[min(int(way) + 1, len(self.right) - 1)]
        # Multiples of the golden ratio are spread evenly, so that few questions show the shares.
        return "right" if number * GOLDEN % 1 < (before + (after - before) * (way % 1)) / 100 else "wrong"


@dataclass
class Served:
    """What came of all questions with one planner."""

    prompts: list[str]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    right: int = 0

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


def curve(
    asked: Sequence[EvidenceQuestion], right: Sequence[float], capacity: int | None
) -> Iterator[dict[str, object]]:
    """Yield one row per planner: relevance order, the default without the profile, and with it, by price."""
    before = serve(asked, right, ContextPlanner(policy="relevance", capacity_tokens=capacity), capacity)
    unaware = serve(asked, right, ContextPlanner(capacity_tokens=capacity), capacity)
    served: list[tuple[object, Served]] = [("relevance order", before), ("no profile", unaware)]
    for price in PRICES:
        planner = ContextPlanner(capacity_tokens=capacity, positions={MODEL: right}, points_per_percent=price)
        served.append((price, serve(asked, right, planner, capacity)))
    lost = before.right - unaware.right
    for label, found in served:
        yield {
            "points_per_percent": label,
            "hit_percent": round(100 * found.cached_tokens / found.prompt_tokens, 2),
            "saved_percent": round(100 - 100 * found.computed_tokens / before.computed_tokens, 2),
            "right_percent": round(100 * found.right / len(asked), 2),
            "back_percent": round(100 * (found.right - unaware.right) / lost) if lost > 0 else None,
            "same_percent": round(100 * sum(map(str.__eq__, found.prompts, unaware.prompts)) / len(asked), 1),
        }


def serve(
    asked: Sequence[EvidenceQuestion], right: Sequence[float], planner: ContextPlanner, capacity: int | None
) -> Served:
    """Ask all questions one after another."""
    worded = {f"Question {number}: {question.question}": (number, question) for number, question in enumerate(asked)}
    config = EmulatorConfig(
        kv_blocks=(capacity or 10_000_000) // 16 + 1,
        max_model_len=min(capacity or 100_000, 30_000),
        prefill_rate=math.inf,
        base_ttft_ms=0,
        decode_rate=math.inf,
        model=MODEL,
    )
    served = Served([])
    with (
        EmulatorServer(config, reader=PlaceReader(right, worded).answer) as server,
        OpenAI(base_url=server.base_url, api_key="none") as client,
    ):
        for wording, (_, question) in worded.items():
            blocks = [ContextBlock(text) for text in question.passages]
            with planner.planning(blocks, model=MODEL, preamble=SYSTEM) as plan:
                messages = messages_for(plan, wording, preamble=SYSTEM)
                answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
            usage = answer.usage
            assert usage is not None
            details = usage.prompt_tokens_details
            served.prompts.append(messages[-1]["content"])
            served.prompt_tokens += usage.prompt_tokens
            served.cached_tokens += (details.cached_tokens or 0) if details is not None else 0
            served.right += answer.choices[0].message.content == "right"
    return served


if __name__ == "__main__":
    main()
