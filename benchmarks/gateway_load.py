"""What a gateway costs: CPU per request, memory over many requests, and many streams at one time.

    python benchmarks/gateway_load.py [--requests 300] [--soak 100000] [--streams 500] [--gigabytes 1]

A gateway runs in a process of its own between a client and an upstream that answers at once with canned bytes, so its
process time is the added CPU. The bodies are agents' histories with some repeated tool results. `growing` has sessions
whose requests each add a call and its result, as agents send them; the other rows send one body again and again.
`untouched` has a body that the gateway does not read. Only a run with the default options is written to `results/`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from common import print_table
from result_files import write_rows

WORDS = ["prefix", "cache", "of", "the", "engine", "holds", "a", "block", "and", "its", "tokens"]
DEFAULTS = {"requests": 300, "soak": 100_000, "streams": 500, "gigabytes": 1.0}
CHUNKS = 50
SIZES = (("8 kB", 8_000, False), ("8 kB", 8_000, True), ("110 kB", 110_000, True), ("1 MB", 1_000_000, True))
GROWING = (("8 kB", 8_000), ("110 kB", 110_000), ("1 MB", 1_000_000))
TURNS = 20
"""Requests of one growing session."""
TICKS = os.sysconf("SC_CLK_TCK")
PIECE = b"data: " + b"x" * 65_000 + b"\n\n"


def history(size: int) -> list[dict[str, Any]]:
    """Return an agent's messages of about this many bytes; every eighth result repeats an earlier one."""
    rng = random.Random(size)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go on."}]
    results: list[str] = []
    written, number = 0, 0
    while written < size:
        repeats = number % 8 == 7
        text = rng.choice(results) if repeats else " ".join(rng.choices(WORDS, k=400))
        results.append(text)
        call = {"name": "read", "arguments": json.dumps({"path": f"file{number}"})}
        made = {"id": f"call{number}", "type": "function", "function": call}
        messages.append({"role": "assistant", "content": None, "tool_calls": [made]})
        messages.append({"role": "tool", "tool_call_id": f"call{number}", "content": text})
        written += len(text) + 300
        number += 1
    return messages


def growing(size: int, session: int) -> Iterator[bytes]:
    """Yield the bodies of a session that grows to this many bytes by a call and its result at a time."""
    messages = history(size)
    messages[0] = {"role": "system", "content": f"This is session {session}."}
    for turn in range(TURNS, -1, -1):
        kept = messages[: max(len(messages) - 2 * turn, 2)]
        yield json.dumps({"model": "m", "messages": kept, "stream": True}).encode()


def chunk(text: str, reason: str | None = None) -> bytes:
    payload = {"id": "x", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


USAGE = {"prompt_tokens": 1_000, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 900}}


async def upstream(port: int) -> None:
    """Serve canned answers."""
    message = {"role": "assistant", "content": "Water."}
    whole = json.dumps(
        {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": USAGE}
    ).encode()
    end = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\ndata: [DONE]\n\n"

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if b'"stream":true' not in body.replace(b" ", b""):
            return web.Response(body=whole, content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(CHUNKS):
            await response.write(chunk(f"word{number} "))
        await response.write(chunk("", "stop") + end)
        return response

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(int(request.query["pieces"])):
            await response.write(PIECE)
        return response

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/v1/other", chat)
    app.router.add_get("/v1/endless", endless)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def megabytes(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def several(times: int, at_once: int, work: Callable[[], Awaitable[None]]) -> None:
    left = iter(range(times))

    async def worker() -> None:
        for _ in left:
            await work()

    await asyncio.gather(*[worker() for _ in range(at_once)])


async def measure(base: str, pid: int, options: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as client:

        async def send(path: str, body: bytes) -> None:
            async with client.post(f"{base}{path}", data=body, headers={"content-type": "application/json"}) as answer:
                await answer.read()
                assert answer.status == 200, answer.status

        for name, size, streams in SIZES:
            body = json.dumps({"model": "m", "messages": history(size), "stream": streams}).encode()
            for path in ("/v1/chat/completions", "/v1/other"):
                await several(20, 4, lambda path=path, body=body: send(path, body))  # type: ignore[misc]
                before = cpu_seconds(pid)
                await several(options.requests, 4, lambda path=path, body=body: send(path, body))  # type: ignore[misc]
                spent = 1_000 * (cpu_seconds(pid) - before) / options.requests
                what = f"{name} {'stream' if streams else 'plain'}{', untouched' if path == '/v1/other' else ''}"
                rows.append({"what": what, "cpu_ms": round(spent, 2)})

        for name, size in GROWING:
            sessions = [growing(size, number) for number in range(max(options.requests // TURNS, 1))]
            for session in sessions:
                await send("/v1/chat/completions", next(session))  # the first one is not a growing session yet
            before, left, count = cpu_seconds(pid), iter(sessions), 0

            async def grow(left: Iterator[Iterator[bytes]] = left) -> None:
                nonlocal count
                for session in left:
                    for body in session:
                        await send("/v1/chat/completions", body)
                        count += 1

            await asyncio.gather(*[grow() for _ in range(4)])
            spent = 1_000 * (cpu_seconds(pid) - before) / count
            rows.append({"what": f"{name} stream, growing", "cpu_ms": round(spent, 2)})

        body = json.dumps({"model": "m", "messages": history(8_000), "stream": True}).encode()
        await several(options.soak // 10, 16, lambda: send("/v1/chat/completions", body))
        early = megabytes(pid)
        await several(options.soak, 16, lambda: send("/v1/chat/completions", body))
        rows.append({"what": f"after {options.soak // 10:,} requests", "megabytes": round(early, 1)})
        rows.append({"what": f"after {options.soak:,} more", "megabytes": round(megabytes(pid), 1)})

        began = time.perf_counter()
        await several(options.streams, options.streams, lambda: send("/v1/chat/completions", body))
        rows.append(
            {"what": f"{options.streams} streams at one time", "seconds": round(time.perf_counter() - began, 2)}
        )

        pieces = int(options.gigabytes * 1e9 / len(PIECE))
        most, read = 0.0, 0
        async with client.get(f"{base}/v1/endless?pieces={pieces}") as answer:
            async for data in answer.content.iter_chunked(1 << 20):
                read += len(data)
                if read < 200_000_000:
                    await asyncio.sleep(0.02)  # a slow reader, at first
                most = max(most, megabytes(pid))
        assert read == pieces * len(PIECE)
        rows.append({"what": f"slow reader of {options.gigabytes:g} GB, at most", "megabytes": round(most, 1)})
    return rows


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--upstream", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.upstream:
        asyncio.run(upstream(options.upstream))
        return
    behind, port = free_port(), free_port()
    serve = [sys.executable, "-m", "warmprefix_tools", "serve", "--upstream", f"http://127.0.0.1:{behind}/v1"]
    processes = [
        subprocess.Popen([sys.executable, __file__, "--upstream", str(behind)]),
        subprocess.Popen([*serve, "--port", str(port)], stdout=subprocess.DEVNULL),
    ]
    try:
        for waited in (behind, port):
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", waited)) == 0:
                        break
                time.sleep(0.05)
        rows = asyncio.run(measure(f"http://127.0.0.1:{port}", processes[1].pid, options))
    finally:
        for process in processes:
            process.terminate()
            process.wait(60)
    header = ["", "CPU ms", "MB", "s"]
    print_table(
        header, [[row["what"], *[row.get(name, "") for name in ("cpu_ms", "megabytes", "seconds")]] for row in rows]
    )
    if {name: getattr(options, name) for name in DEFAULTS} == DEFAULTS:
        write_rows("gateway_load", rows, ["what"])


if __name__ == "__main__":
    main()
