"""Time of the doctor for 10,000 requests of 8,000 tokens each, on one core.

The log is that of a retrieval application with several defects: a clock in the system prompt, tools in changing order,
and passages in relevance order that are numbered by position. Its text comes from the standard library's docstrings.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from common import print_table
from result_files import write_results
from warmprefix_tools.demo.corpus import read_standard_library
from warmprefix_tools.doctor.diagnosis import diagnose
from warmprefix_tools.doctor.log_reader import read_log

SEED = 7
PROMPT_TOKENS = 8_000
PASSAGES = 4_000
PASSAGE_TOKENS = 420


def write_log(path: Path, requests: int, *, distinct: bool) -> None:
    """Write the log; with `distinct`, hardly any sentence of its passages recurs."""
    rng = random.Random(SEED)
    texts = [[word.strip(".!?") for word in entry.docstring.split()] for entry in read_standard_library()]
    sentences = [f"{' '.join(text[start : start + 7])}." for text in texts for start in range(0, len(text) - 7, 7)]
    passages = [passage(rng, sentences, PASSAGE_TOKENS) for _ in range(PASSAGES)]
    rules = passage(rng, sentences, 1_200)
    tools = [tool(rng, sentences, number) for number in range(8)]
    weights = [1 / rank for rank in range(1, PASSAGES + 1)]
    clock = datetime(2025, 3, 4, 9)
    with path.open("w", encoding="utf-8") as file:
        for number in range(requests):
            clock += timedelta(seconds=rng.randint(1, 40))
            if distinct:
                found = [passage(rng, sentences, PASSAGE_TOKENS, mixed=True) for _ in range(14)]
            else:
                found = rng.choices(passages, weights, k=14)
            context = "\n\n".join(f"[{place}] {text}" for place, text in enumerate(dict.fromkeys(found), 1))
            body = {
                "model": "m",
                "user": f"user-{number % 97}",
                "messages": [
                    {"role": "system", "content": f"It is {clock:%A, %d %B %Y, %H:%M:%S}.\n{rules}"},
                    {
                        "role": "user",
                        "content": f"Context:\n\n{context}\n\nQuestion: {rng.choice(sentences)} ({number})",
                    },
                ],
                "tools": rng.sample(tools, len(tools)),
            }
            file.write(json.dumps(body) + "\n")


def passage(rng: random.Random, sentences: list[str], tokens: int, *, mixed: bool = False) -> str:
    """Return random sentences, some with a line feed behind them; if mixed, each combines two of the list."""
    parts: list[str] = []
    length = 0
    while length < tokens:
        sentence = rng.choice(sentences)
        if mixed:
            sentence = f"{sentence[:-1]} {rng.choice(sentences)}"
        length += len(sentence) // 4 + 1
        parts.append(sentence + rng.choice([" ", " ", "\n"]))
    return "".join(parts).strip()


def tool(rng: random.Random, sentences: list[str], number: int) -> dict[str, Any]:
    fields = {f"field_{i}": {"type": "string", "description": rng.choice(sentences)[:80]} for i in range(4)}
    return {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": rng.choice(sentences)[:120],
            "parameters": {"type": "object", "properties": fields},
        },
    }


def measure(requests: int, *, distinct: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.jsonl"
        write_log(path, requests, distinct=distinct)
        size = path.stat().st_size
        start = time.perf_counter()
        read = read_log([path])
        reading = time.perf_counter() - start
        report = diagnose(read)
        seconds = time.perf_counter() - start
    return {
        "log": "distinct passages" if distinct else "recurring passages",
        "requests": report.requests,
        "prompt_tokens": report.prompt_tokens,
        "megabytes": round(size / 1e6, 1),
        "reading_s": round(reading, 2),
        "total_s": round(seconds, 2),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "findings": {finding.kind: round(finding.share, 4) for finding in report.findings},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    options = parser.parse_args()
    results = [measure(options.requests, distinct=distinct) for distinct in (False, True)]
    columns = ["log", "requests", "prompt_tokens", "megabytes", "reading_s", "total_s", "peak_memory_mb"]
    print_table(columns, [[row[column] for column in columns] for row in results])
    for row in results:
        print(f"{row['log']}: {row['findings']}")
    if options.requests == parser.get_default("requests"):
        write_results("doctor_speed", results)


if __name__ == "__main__":
    main()
