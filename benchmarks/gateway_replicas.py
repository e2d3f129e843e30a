"""Tokens that replicas compute for recorded agent sessions: through the gateway, and with random placement.

    python benchmarks/gateway_replicas.py FOLDER [--replicas 4] [--sessions 40] [--turns 40] [--at-once 8] [--vllm]

FOLDER has recordings as `agent_sessions.py` reads them. Each session asks once per turn, with its messages so far, and
`--at-once` sessions run at one time against emulated engines, or against real ones with a tiny model on the CPU. For
these, sessions end after 30,000 characters, and results are messages of the user. Sessions have no name: the gateway
finds them by their messages. `one replica` is the best that any placement can do. Printed, and written with `--write`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import openai

from agent_sessions import Messages, sessions_of
from common import print_table
from result_files import write_rows
from vllm_server import VllmServer, engine_version
from warmprefix_gateway import GatewayOptions, GatewayServer
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

CONFIG = EmulatorConfig(kv_blocks=60_000, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
EMULATED_CHARACTERS, REAL_CHARACTERS = 120_000, 30_000
"""Length of the longest prompt."""


def turns_of(messages: Messages, most: int, characters: int) -> list[Messages]:
    """Return the prompts of a session, each ending behind a result or a user's message."""
    written, prompts = 0, []
    for number, message in enumerate(messages):
        written += len(str(message))
        if written > characters:
            break
        following = messages[number + 1]["role"] if number + 1 < len(messages) else "assistant"
        if message["role"] != "assistant" and following == "assistant":
            prompts.append(messages[: number + 1])
    return prompts[:most]


def plain(messages: Messages) -> Messages:
    """Return messages without tool calls, for a chat template that has none."""
    return [
        {
            "role": "user" if message["role"] == "tool" else message["role"],
            "content": message.get("content") or json.dumps(message.get("tool_calls")),
        }
        for message in messages
    ]


async def ask(
    sessions: list[list[Messages]], at_once: int, model: str, client_of: Callable[[], Any]
) -> tuple[int, int]:
    """Run all sessions; return their prompt tokens, and those that were computed."""
    waiting = iter(sessions)
    total = computed = 0

    async def run() -> None:
        nonlocal total, computed
        for prompts in waiting:
            for prompt in prompts:
                answer = await client_of().chat.completions.create(model=model, messages=prompt, max_tokens=1)
                total += answer.usage.prompt_tokens
                details = answer.usage.prompt_tokens_details
                computed += answer.usage.prompt_tokens - ((details and details.cached_tokens) or 0)

    await asyncio.gather(*[run() for _ in range(at_once)])
    return total, computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--vllm", action="store_true", help="use real engines")
    parser.add_argument("--write", action="store_true", help="write the results")
    options = parser.parse_args()
    files = sorted([*options.folder.rglob("*.json"), *options.folder.rglob("*.traj")])
    characters = REAL_CHARACTERS if options.vllm else EMULATED_CHARACTERS
    found = (turns_of(messages, options.turns, characters) for path in files for messages in sessions_of(path))
    sessions = list(islice((prompts for prompts in found if len(prompts) > 2), options.sessions))
    if options.vllm:
        sessions = [[plain(prompt) for prompt in prompts] for prompts in sessions]
    rows: list[dict[str, object]] = []
    for name, replicas in (("random", options.replicas), ("gateway", options.replicas), ("one replica", 1)):
        rng = random.Random(1)
        with ExitStack() as stack:
            if options.vllm:
                engines: list[Any] = [stack.enter_context(VllmServer(kv_blocks=8_000)) for _ in range(replicas)]
            else:
                engines = [stack.enter_context(EmulatorServer(CONFIG)) for _ in range(replicas)]
            bases = [engine.base_url for engine in engines]
            model = engines[0].model if options.vllm else CONFIG.model
            if name == "gateway":
                made = GatewayOptions(tuple(bases), port=0, references="off")
                bases = [stack.enter_context(GatewayServer(made)).base_url]

            async def run(bases: list[str] = bases, model: str = model, rng: random.Random = rng) -> tuple[int, int]:
                clients = [openai.AsyncOpenAI(base_url=base, api_key="none") for base in bases]
                try:
                    return await ask(sessions, options.at_once, model, lambda: rng.choice(clients))
                finally:
                    for client in clients:
                        await client.close()

            total, computed = asyncio.run(run())
        rows.append(
            {
                "recordings": options.folder.name,
                "engine": engine_version() if options.vllm else "emulator",
                "placement": name,
                "replicas": replicas,
                "requests": sum(map(len, sessions)),
                "prompt_tokens": total,
                "computed_tokens": computed,
                "computed_percent": round(100 * computed / total, 2),
            }
        )
    header = ["recordings", "engine", "placement", "replicas", "requests", "tokens", "computed", "%"]
    print_table(header, [list(row.values()) for row in rows])
    if options.write:
        write_rows("gateway_replicas", rows, ["recordings", "engine", "placement"])


if __name__ == "__main__":
    main()
