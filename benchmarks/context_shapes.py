"""Where the order of retrieved lists pays: the gateway's `--reorder` on the shapes in which agents' contexts arrive.

    python benchmarks/context_shapes.py [--questions 200]

Questions of the demo on the Python standard library's documentation, with ten passages each. Each is a chat of its own
with the same system prompt and tools. The list stands in the result of the first tool call, behind the question, or in
the system prompt, as JSON or as Mem0's quickstart writes memories. The gateway leaves tool results alone; here they get
the order that the planner gives the same lists in the system prompt. An emulated engine reports the hits.
"""

from __future__ import annotations

import argparse
import json
import math
import urllib.request
from collections.abc import Sequence
from typing import Any

from common import print_table
from result_files import write_results
from warmprefix_gateway.reordering import Reorderer, as_templates
from warmprefix_requests import read_call
from warmprefix_tools.demo.corpus import read_standard_library
from warmprefix_tools.demo.questions import ask
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.retriever import Bm25Retriever

PASSAGES = 10
MEMORY = 160
"""Characters of a passage that stand for a memory."""
QUESTIONS = 200
CONFIG = EmulatorConfig(kv_blocks=16_384, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
SYSTEM = "Answer from the passages, and point out if the answer is not in them."
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "search", "description": "Finds passages.", "parameters": PARAMETERS}}
]
SHAPES = {
    "JSON list in the first tool result": "json",
    "JSON list in the system prompt": "json",
    "memories in the system prompt": "mem0",
}


def main() -> None:
    """Measure each shape with both orders, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    count = parser.parse_args().questions
    entries = read_standard_library()
    retriever = Bm25Retriever([block for entry in entries for block in entry.blocks])
    asked = [
        (each.query, [block.text for block in retriever.retrieve(each.query, PASSAGES)])
        for each in ask(entries, count, seed=0)
    ]
    rows = []
    for shape, template in SHAPES.items():
        given, ordered = (hit_ratio(shape, template, asked, is_ordered) for is_ordered in (False, True))
        rows.append(
            {
                "shape": shape,
                "questions": count,
                "hit_percent_given": round(100 * given, 1),
                "hit_percent_ordered": round(100 * ordered, 1),
                "prefill_saved_percent": round(100 * (1 - (1 - ordered) / (1 - given)), 1),
            }
        )
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    if count == QUESTIONS:
        write_results("context_shapes", rows)


def hit_ratio(shape: str, template: str, asked: Sequence[tuple[str, Sequence[str]]], is_ordered: bool) -> float:
    """Return the share of all prompt tokens that an engine of its own holds."""
    reorderer = Reorderer(as_templates([template]))
    prompt_tokens = cached_tokens = 0
    with EmulatorServer(CONFIG) as emulator:
        for question, passages in asked:
            body = head_body(template, question, passages)
            if is_ordered:
                call = read_call("POST", "/v1/chat/completions", {}, json.dumps(body).encode())
                assert call is not None
                reordered = reorderer.reordered(call, None)
                body = json.loads(reordered.call.content)
                if reordered.plan is not None:
                    reorderer.planner.commit(reordered.plan)
            usage = ask_engine(emulator.base_url, behind_the_question(body, question) if "tool" in shape else body)
            prompt_tokens += usage["prompt_tokens"]
            cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
    return cached_tokens / prompt_tokens


def head_body(template: str, question: str, passages: Sequence[str]) -> dict[str, Any]:
    """Return a request with the list in its system prompt."""
    if template == "json":
        listed = json.dumps({"results": [{"text": text, "source": "library"} for text in passages]})
    else:
        memories = dict.fromkeys(" ".join(text.split())[:MEMORY] for text in passages)
        listed = "User Memories:\n" + "\n".join(f"- {memory}" for memory in memories)
    messages = [{"role": "system", "content": f"{SYSTEM}\n{listed}"}, {"role": "user", "content": question}]
    return {"model": CONFIG.model, "max_tokens": 2, "messages": messages, "tools": TOOLS}


def behind_the_question(body: dict[str, Any], question: str) -> dict[str, Any]:
    """Return the request with its list as the result of a tool call."""
    system, user = body["messages"]
    function = {"name": "search", "arguments": json.dumps({"query": question})}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "1", "content": system["content"].removeprefix(f"{SYSTEM}\n")}
    return {**body, "messages": [{**system, "content": SYSTEM}, user, call, result]}


def ask_engine(base_url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a request; return its usage."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        usage: dict[str, Any] = json.load(response)["usage"]
    return usage


if __name__ == "__main__":
    main()
