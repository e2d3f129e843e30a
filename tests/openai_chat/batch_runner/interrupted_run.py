"""A run with a journal, as a program: takes the engine's base URL and the journal, prints the answers by id."""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from pathlib import Path

import openai

from warmprefix_openai import BatchRunner


async def main(base_url: str, journal: str) -> None:
    names = runpy.run_path(str(Path(__file__).with_name("conftest.py")))
    batch = names["make_batch"](names["make_requests"](6, 10))
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        run = BatchRunner(batch).run(client, names["INSTANT"].model, concurrency=4, journal=journal, max_tokens=6)
        print(json.dumps({result.id: result.text async for result in run}))  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
