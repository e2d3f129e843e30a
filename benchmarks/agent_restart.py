"""What agents compute again after their application's process was replaced, with and without shared routing.

    python benchmarks/agent_restart.py [TRACE_OR_FOLDER ...] [--limit 80] [--every 20] [--agents 4]

Without an argument the traces are those of `REPORTED` in the folder that the environment variable WARMPREFIX_TRACES
names, if it does, in addition to the generated questions. Texts are made of the traces' token counts.

`ChainOfAgents` in mode "map" on emulated engines over HTTP, which stay up: one prompt per document, or chats, whose
messages the application keeps in SQLite. The application's process answers all questions (`one process`); or it is
killed every `--every` questions, and another starts (`restarted`); or two processes answer in turn (`two processes`).
`Redis` marks those whose routers and planners share through a real server; the others share nothing. `computed` are the
tokens of the documents' prompts that no engine had cached, as the engines report them. A question is asked when what
the one before showed has arrived. A run with all traces and questions is written to `results/`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

from openai import OpenAI

from agent_workloads import AgentWorkload, load
from common import print_table
from redis_servers import Server
from result_files import Row, write_results
from traces import given_files
from warmprefix import ContextBlock, ContextPlanner
from warmprefix_chain_of_agents import ChainOfAgents, Chat, ChatKey, Manager, Worker
from warmprefix_redis import SharedSettings
from warmprefix_routing import AgentRouter
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

CONFIG = EmulatorConfig(kv_blocks=20_000, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
REPORTED = ("mtrag_elser_questions", "synth_multiturn_seen40_k10")
LIMIT, EVERY, AGENTS = 80, 20, 4
ARMS = {"one process": 0, "restarted": 0, "restarted, Redis": 1, "two processes": 0, "two processes, Redis": 1}
"""True for those that share."""
_ARRIVAL_SECONDS = 0.15
"""Until another process has learned what a question showed; people ask more slowly."""


class SqliteChats:
    """The chats of an application that keeps its messages in a database: a `ChatMemory`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        with self._opened() as database:
            database.execute("CREATE TABLE IF NOT EXISTS chats (tenant, conversation, agent, messages)")

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        database = sqlite3.connect(self._file, timeout=10)
        try:
            with database:
                yield database
        finally:
            database.close()

    def load(self, key: ChatKey) -> Chat:
        with self._opened() as database:
            return self._read(database, key)

    def save(self, key: ChatKey, chat: Chat, *, instead_of: Chat) -> bool:
        with self._opened() as database:
            database.execute("BEGIN IMMEDIATE")
            if self._read(database, key) != instead_of:
                return False
            self._delete(database, *key)
            row = (key.tenant or "", key.conversation, key.agent, json.dumps(chat.messages))
            database.execute("INSERT INTO chats VALUES (?, ?, ?, ?)", row)
            return True

    def forget(self, tenant: str | None, conversation: str) -> None:
        with self._opened() as database:
            self._delete(database, tenant, conversation, None)

    @staticmethod
    def _read(database: sqlite3.Connection, key: ChatKey) -> Chat:
        query = "SELECT messages FROM chats WHERE tenant = ? AND conversation = ? AND agent = ?"
        row = database.execute(query, (key.tenant or "", key.conversation, key.agent)).fetchone()
        return Chat() if row is None else Chat(tuple(json.loads(row[0])))

    @staticmethod
    def _delete(database: sqlite3.Connection, tenant: str | None, conversation: str, agent: str | None) -> None:
        query = "DELETE FROM chats WHERE tenant = ? AND conversation = ? AND agent = ifnull(?, agent)"
        database.execute(query, (tenant or "", conversation, agent))


def work(bases: Sequence[str], folder: Path, redis_url: str) -> None:
    """Answer the questions that come in, in a process of its own."""
    router, planner = AgentRouter(), ContextPlanner()
    if redis_url:
        settings = SharedSettings(redis_url=redis_url, store_budget=1.0)
        router, planner = AgentRouter.from_url(settings=settings), ContextPlanner.from_url(settings=settings)
    clients = [OpenAI(base_url=base, api_key="none") for base in bases]
    workers = [Worker(f"agent {i}", client, CONFIG.model) for i, client in enumerate(clients[1:])]
    manager = Manager(clients[0], CONFIG.model)
    memory = SqliteChats(folder / "chats")
    chain = ChainOfAgents(workers, manager, router=router, planner=planner, mode="map", memory=memory)
    for line in sys.stdin:
        asked = json.loads(line)
        documents = [ContextBlock(text, id=id) for id, text in asked["documents"]]
        answer = chain.run(asked["question"], documents, conversation=asked["conversation"], tenant="acme")
        usages = [report.usage for report in answer.workers]
        counts = [sum(usage.prompt_tokens or 0 for usage in usages), sum(usage.cached_tokens or 0 for usage in usages)]
        print(json.dumps(counts), flush=True)


class Process:
    """A process of the application."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, __file__, "--work", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, question: dict[str, object]) -> tuple[int, int]:
        """Return the tokens of the prompts of a question, and how many of them were cached."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        prompt, cached = json.loads(self._process.stdout.readline())
        return prompt, cached

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def questions(workload: AgentWorkload, chats: bool) -> Iterator[dict[str, object]]:
    """Yield the questions as the processes get them."""
    for request in workload.requests:
        documents = [(str(block.id), text_of(block)) for block in request.blocks]
        text = f"Question {request.number}: what do these documents say?"
        yield {"question": text, "documents": documents, "conversation": request.conversation if chats else None}


def text_of(block: ContextBlock) -> str:
    """Return a text of about as many tokens as the block has."""
    rng = random.Random(str(block.id))
    return f"Document {block.id}. " + " ".join(rng.choices(WORDS, k=max(block.tokens, 8)))


WORDS = ("sea", "sky", "ship", "wind", "land", "rock", "salt", "wave", "deep", "cold", "warm", "light", "dark", "far")


def run(arm: str, workload: AgentWorkload, chats: bool, agents: int, every: int) -> tuple[int, int]:
    """Return the tokens of all prompts to workers, and those that were computed."""
    total = computed = 0
    with ExitStack() as stack:
        bases = [stack.enter_context(EmulatorServer(CONFIG)).base_url for _ in range(agents + 1)]
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url = stack.enter_context(Server()).url if ARMS[arm] else ""

        def start() -> Process:
            process = Process("--bases", ",".join(bases), "--folder", folder, "--redis", url)
            stack.callback(process.kill)
            return process

        turns = cycle([start() for _ in range(2 if arm.startswith("two") else 1)])
        for number, question in enumerate(questions(workload, chats)):
            process = next(turns)
            if arm.startswith("restarted") and number and number % every == 0:
                process.kill()
                process = start()
                turns = cycle([process])
            prompt, cached = process.ask(question)
            total, computed = total + prompt, computed + prompt - cached
            if url:
                time.sleep(_ARRIVAL_SECONDS)
    return total, computed


def measure(source: str, limit: int, agents: int, every: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each way to use the agents."""
    workload = load(source, limit)
    for chats in (False, True):
        counts = {arm: run(arm, workload, chats, agents, every) for arm in ARMS}
        base = counts["one process"][1]
        yield {
            "workload": workload.name,
            "prompts": "chats" if chats else "one per document",
            "agents": agents,
            "questions": len(workload.requests),
            "every": every,
            "arms": {
                arm: {
                    "prompt_tokens": total,
                    "computed_tokens": computed,
                    "more_percent": round(100 * (computed / base - 1), 1),
                }
                for arm, (total, computed) in counts.items()
            },
        }


def table(rows: Sequence[Row]) -> str:
    """Return the table of docs/routing.md: what is computed in addition, in percent."""
    arms = [arm for arm in ARMS if arm != "one process"]
    lines = ["| questions | " + " | ".join(arms) + " |", "|" + "---|" * (1 + len(arms))]
    for row in rows:
        cells = [f"{row['arms'][arm]['more_percent']:.1f}" for arm in arms]
        lines.append(f"| {row['workload']}, {row['prompts']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="trace files, or folders of them")
    parser.add_argument("--limit", type=int, default=LIMIT, help="questions of each workload")
    parser.add_argument("--every", type=int, default=EVERY, help="questions between two restarts")
    parser.add_argument("--agents", type=int, default=AGENTS)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    for hidden in ("--bases", "--folder", "--redis"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.bases.split(","), Path(options.folder), options.redis)
    paths = given_files(options.traces)
    if not options.traces:
        paths = [path for path in paths if path.name.partition(".")[0] in REPORTED]
    rows = []
    for source in ["generated_topics", *map(str, paths)]:
        for row in measure(source, options.limit, options.agents, options.every):
            rows.append(row)
            print(f"\n{row['workload']}, {row['prompts']}, {row['questions']} questions, {row['agents']} agents\n")
            print_table(
                ["", "prompts", "computed", "more, %"], [[arm, *of.values()] for arm, of in row["arms"].items()]
            )
            sys.stdout.flush()
    if (options.limit, options.every, options.agents) == (LIMIT, EVERY, AGENTS) and len(paths) >= len(REPORTED):
        write_results("agent_restart", rows)
    return None


if __name__ == "__main__":
    main()
