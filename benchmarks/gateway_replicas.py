"""Tokens that replicas compute for recorded agent sessions: through gateways, and with random placement.

    python benchmarks/gateway_replicas.py FOLDER [--replicas 4] [--sessions 40] [--turns 40] [--at-once 8] [--vllm]
    python benchmarks/gateway_replicas.py FOLDER --gateways 4 ...

FOLDER has recordings as `agent_sessions.py` reads them. Each session asks once per turn, with its messages so far, and
`--at-once` sessions run at one time against emulated engines, or against real ones with a tiny model on the CPU. For
these, sessions end after 30,000 characters, and results are messages of the user. Sessions have no name: the gateway
finds them by their messages. `one replica` is the best that any placement can do. With `--gateways`, each request goes
to a gateway drawn by chance: they share nothing, or a Redis server, or one that is killed after half of the requests;
`ratio` compares what is computed with one gateway. Gateways may wait for Redis for a second, because they share the
machine with engines and clients. Printed, and written with `--write`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count, islice
from pathlib import Path
from typing import Any

import openai

from agent_sessions import Messages, sessions_of
from common import print_table
from redis_servers import Server
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
    parser.add_argument("--gateways", type=int, default=0, help="compare so many gateways with one")
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
    rows: list[dict[str, Any]] = []
    arms = {"random": 0, "gateway": 1, "one replica": 0}
    if options.gateways:
        os.environ["WARMPREFIX_STORE_BUDGET"] = "1"
        several = f"{options.gateways} gateways"
        arms = {"1 gateway": 1}
        arms |= dict.fromkeys((several, f"{several}, Redis", f"{several}, Redis killed"), options.gateways)
    requests = sum(map(len, sessions))
    for name, gateways in arms.items():
        rng, replicas = random.Random(1), 1 if name == "one replica" else options.replicas
        with ExitStack() as stack:
            if options.vllm:
                engines: list[Any] = [stack.enter_context(VllmServer(kv_blocks=8_000)) for _ in range(replicas)]
            else:
                engines = [stack.enter_context(EmulatorServer(CONFIG)) for _ in range(replicas)]
            bases = [engine.base_url for engine in engines]
            model = engines[0].model if options.vllm else CONFIG.model
            redis = stack.enter_context(Server()) if "Redis" in name else None
            if gateways:
                url = None if redis is None else redis.url
                made = GatewayOptions(
                    tuple(bases), port=0, references="off", redis_url=url, salt_key=b"of all gateways"
                )
                bases = [stack.enter_context(GatewayServer(made)).base_url for _ in range(gateways)]
            killed = redis if name.endswith("killed") else None

            async def run(
                bases: list[str] = bases,
                model: str = model,
                rng: random.Random = rng,
                killed: Server | None = killed,
            ) -> tuple[int, int]:
                clients = [openai.AsyncOpenAI(base_url=base, api_key="none") for base in bases]
                asked = count(1)

                def drawn() -> openai.AsyncOpenAI:
                    if next(asked) == requests // 2 and killed is not None:
                        killed.kill()
                    return rng.choice(clients)

                try:
                    return await ask(sessions, options.at_once, model, drawn)
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
                "requests": requests,
                "prompt_tokens": total,
                "computed_tokens": computed,
                "computed_percent": round(100 * computed / total, 2),
            }
        )
    header = ["recordings", "engine", "placement", "replicas", "requests", "tokens", "computed", "%"]
    if options.gateways:
        header += ["at once", "ratio"]
        least: Any = rows[0]["computed_tokens"]
        rows = [{**row, "at_once": options.at_once, "ratio": round(row["computed_tokens"] / least, 3)} for row in rows]
    print_table(header, [list(row.values()) for row in rows])
    if options.write:
        key = ["recordings", "engine", "placement"]
        if options.gateways:
            write_rows("gateway_replicas_agreement", rows, [*key, "at_once"])
        else:
            write_rows("gateway_replicas", rows, key)


if __name__ == "__main__":
    main()
