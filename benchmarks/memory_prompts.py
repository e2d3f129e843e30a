"""Prompt tokens that chats with memories compute: memories in the system prompt, and behind the history.

    python benchmarks/fetch_traces.py locomo_facts
    python benchmarks/memory_prompts.py [--sessions 6] [--k 8] [--write]

The latest sessions of each chat of LoCoMo: one speaker is the user, the other one the assistant, with their own words.
For each question, the memories are the facts noted about the user in earlier sessions that BM25 finds. One emulated
engine with an unbounded cache answers all prompts of an arm.

- *system prompt*: in the system prompt, in relevance order, as applications do it.
- *system prompt, steady order*: the same through `ContextReuseMemory`.
- *newest question only*: in front of the newest question, and gone from the history in the next turn.
- *kept, references*: each in full once, and references to those found again; `MemoryChat`.
- *kept, difference*: only what changed; `MemoryChat(repeats="omit")`, as `MemoryMiddleware` and `TailMemory` do it.

`computed` is what the engine did not find in its cache; the percentage is of the first arm's.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import openai

from common import print_table
from fetch_traces import HOST, default_folder, fetch
from result_files import write_rows
from trace_sources import SOURCES
from trace_texts import chats, sessions
from warmprefix import ContextBlock
from warmprefix_mem0 import ContextReuseMemory, MemoryChat
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.retriever import Bm25Retriever

CONFIG = EmulatorConfig(kv_blocks=400_000, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
SYSTEM = (
    "You are the companion of {user}. You have known each other for years, so you answer as a friend does: warm, short "
    "and honest. Ask back if something matters. Never make up what {user} has not said. Memories are notes of earlier "
    "talks; use them where they fit, and do not list them."
)
Message = dict[str, str]


class FactMemory:
    """The facts noted about a user, with the `search` of Mem0."""

    def __init__(self, facts: list[str], k: int) -> None:
        self._retriever = Bm25Retriever([ContextBlock(text, id=str(place)) for place, text in enumerate(facts)])
        self._k = k

    def search(self, query: str, *, filters: dict[str, str]) -> dict[str, Any]:
        found = self._retriever.retrieve(query, self._k)
        return {"results": [{"id": block.id, "memory": block.text} for block in found]}


class Session(NamedTuple):
    """One talk, with what was noted before."""

    user: str
    memory: FactMemory
    turns: list[tuple[str, str]]


def talks(most: int, k: int) -> Iterator[Session]:
    source = SOURCES["locomo_facts"]
    for chat in chats([fetch(file, default_folder() / "sources", HOST) for file in source.files]):
        user, facts, found = chat["speaker_a"], list[str](), list[Session]()
        for messages, noted in zip(sessions(chat, ""), sessions(chat, "_observation"), strict=False):
            turns: list[list[str]] = []
            for message in messages:
                is_user = message["speaker"] == user
                if is_user and (not turns or turns[-1][1]):
                    turns.append([message["text"], ""])
                elif turns:
                    turns[-1][not is_user] = f"{turns[-1][not is_user]}\n{message['text']}".strip()
            if facts:
                found.append(Session(user, FactMemory(list(facts), k), [(one, other) for one, other in turns]))
            facts += [text for text, _ in noted.get(user, ())]
        yield from found[-most:]


def prompts(session: Session, arm: str, memory: Any) -> Iterator[list[Message]]:
    system, filters = SYSTEM.format(user=session.user), {"user_id": session.user}
    history: list[Message] = []
    for question, answer in session.turns:
        results = memory.search(question, filters=filters)["results"]
        listed = "\n".join(f"- {found['memory']}" for found in results)
        asked = {"role": "user", "content": question}
        front = system
        if arm == "newest question only":
            asked = {"role": "user", "content": f"Memories:\n{listed}\n\n{question}"}
        else:
            front = f"{system}\n\nMemories:\n{listed}"
        yield [{"role": "system", "content": front}, *history, asked]
        history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def chat_prompts(session: Session, arm: str, memory: Any) -> Iterator[list[Message]]:
    chat = MemoryChat(SYSTEM.format(user=session.user), repeats="omit" if arm.endswith("difference") else "refer")
    for question, answer in session.turns:
        messages = chat.ask(question, memory.search(question, filters={"user_id": session.user}))
        yield messages
        chat.commit(messages, answer)


ARMS: dict[str, Callable[[Session, str, Any], Iterator[list[Message]]]] = {
    "system prompt": prompts,
    "system prompt, steady order": prompts,
    "newest question only": prompts,
    "kept, references": chat_prompts,
    "kept, difference": chat_prompts,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=6, help="of each chat")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="write the results")
    options = parser.parse_args()
    found = list(talks(options.sessions, options.k))
    rows: list[dict[str, object]] = []
    for arm, prompts_of in ARMS.items():
        total = computed = requests = 0
        with EmulatorServer(CONFIG) as server, openai.OpenAI(base_url=server.base_url, api_key="none") as client:
            for session in found:
                memory = ContextReuseMemory(session.memory) if arm.endswith("order") else session.memory
                for messages in prompts_of(session, arm, memory):
                    asked: Any = messages
                    usage = client.chat.completions.create(model=CONFIG.model, messages=asked, max_tokens=1).usage
                    assert usage is not None
                    details = usage.prompt_tokens_details
                    requests += 1
                    total += usage.prompt_tokens
                    computed += usage.prompt_tokens - ((details and details.cached_tokens) or 0)
        first = rows[0]["computed_tokens"] if rows else computed
        assert isinstance(first, int)
        rows.append(
            {
                "memories": arm,
                "k": options.k,
                "sessions": len(found),
                "requests": requests,
                "prompt_tokens": total,
                "computed_tokens": computed,
                "computed_percent": round(100 * computed / first, 1),
            }
        )
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    if options.write:
        write_rows("memory_prompts", rows, ("memories", "k"))


if __name__ == "__main__":
    main()
