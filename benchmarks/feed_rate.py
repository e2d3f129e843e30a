"""KV events that one core decodes and applies per second, and the memory after millions of them.

    python benchmarks/feed_rate.py                # 10 million events
    python benchmarks/feed_rate.py --events 200000

The events are those of an engine with a full prefix cache whose prompts share prefixes: a `BlockStored`
of 1 to 8 KV blocks of 16 tokens per scheduled step, and for each stored block a `BlockRemoved` of the oldest, one hash
per event, as vLLM sends them. Between them, prompts are remembered and changes are read, as a feed
does. The publisher's time is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import resource
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from common import percentile, print_table
from kv_index_checks import check_index
from kv_publisher import removed, stored
from result_files import write_results
from warmprefix.plan import Scope
from warmprefix_kv_events.kv_events import read_batch, read_message
from warmprefix_kv_events.kv_index import KvIndex
from warmprefix_kv_events.prompt_tree import MappedPrompt, pack_tokens

BLOCK = 16
TARGET = 50_000
ROUND = 1_000
"""Messages between two calls of `changes`."""
SCOPE = Scope(None, None, None)


def engine(capacity: int, seed: int) -> Iterator[tuple[list[dict[str, object]], list[int] | None]]:
    """Yield an engine's batches without end, and with the last batch of a prompt its tokens.

    A prompt is the same two KV blocks, then ten of 200 documents of four blocks, in random order.
    """
    rng = random.Random(seed)
    documents = [[rng.randrange(150_000) for _ in range(4 * BLOCK)] for _ in range(200)]
    preamble = [rng.randrange(150_000) for _ in range(2 * BLOCK)]
    names: dict[tuple[int, bytes], int] = {}
    held: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
    counter = itertools.count(1)
    while True:
        tokens = preamble + [token for number in rng.sample(range(200), 10) for token in documents[number]]
        blocks = [tokens[start : start + BLOCK] for start in range(0, len(tokens), BLOCK)]
        parent, at = 0, 0
        while at < len(blocks) and (name := names.get((parent, pack_tokens(blocks[at])))) is not None:
            held.move_to_end(name)
            parent, at = name, at + 1
        while at < len(blocks):
            run = blocks[at : at + rng.randint(1, 8)]
            new = [(next(counter) * 0x9E3779B97F4A7C15) % 2**64 for _ in run]
            event = stored(new, parent or None, [token for block in run for token in block], BLOCK)
            for name, block in zip(new, run, strict=True):
                key = (parent, pack_tokens(block))
                names[key], held[name], parent = name, key, name
            evicted = []
            while len(held) > capacity:
                name, key = held.popitem(last=False)
                del names[key]
                evicted.append(removed(name))
            at += len(run)
            yield [*evicted, event], tokens if at >= len(blocks) else None


def run(events: int, capacity: int, seed: int) -> dict[str, object]:
    index = KvIndex()
    index.wipe("engine", complete=True)
    encoder = msgspec.msgpack.Encoder()
    batches = engine(capacity, seed)
    applied = changes = sequence = peak_blocks = 0
    seconds, rates, memory = 0.0, [], []
    while applied < events:
        frames, prompts, count = [], [], 0
        for _ in range(ROUND):
            batch, tokens = next(batches)
            payload = encoder.encode([time.time(), batch, 0])
            frames.append((b"kv@engine", sequence.to_bytes(8, "big"), payload))
            sequence += 1
            count += len(batch)
            if tokens is not None:
                ends = tuple(range(6 * BLOCK, len(tokens) + 1, 4 * BLOCK))
                keys = tuple(pack_tokens(tokens[end - 4 * BLOCK : end])[:16] for end in ends)
                prompts.append(MappedPrompt(SCOPE, None, keys, pack_tokens(tokens), ends))
        started = time.process_time()
        for message in frames:
            index.apply("engine", read_batch(read_message(message).payload))
        spent = time.process_time() - started
        # One prompt in eight is ours; the engine serves others too.
        for prompt in prompts[::8]:
            index.remember(prompt)
        started = time.process_time()
        changes += len(index.changes())
        spent += time.process_time() - started
        seconds += spent
        rates.append(count / spent)
        applied += count
        peak_blocks = max(peak_blocks, index.kv_blocks)
        memory.append(resident_megabytes())
    check_index(index)
    tenth = max(len(memory) // 10, 1)
    return {
        "events": applied,
        "messages": sequence,
        "cpu_seconds": round(seconds, 2),
        "events_per_second": round(applied / seconds),
        "events_per_second_p5_of_rounds": round(percentile(rates, 5)),
        "engine_kv_blocks": capacity,
        "kv_blocks_peak": peak_blocks,
        "prompts_remembered": index.prompts,
        "changes": changes,
        "unknown": index.unknown,
        "resident_mb_after_a_tenth": round(memory[tenth - 1], 1),
        "resident_mb_at_the_end": round(memory[-1], 1),
        "resident_mb_peak": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "target_events_per_second": TARGET,
    }


def resident_megabytes() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--capacity", type=int, default=30_000, help="KV blocks that the engine holds")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = run(arguments.events, arguments.capacity, arguments.seed)
    print_table(("", "value"), list(result.items()))
    if arguments.events >= 10_000_000:
        write_results("feed_rate", [result])


if __name__ == "__main__":
    main()
