"""Costs of conversation state in Redis: the bytes of a conversation, and a lasting load.

    python benchmarks/redis_state.py [--workers 2] [--rate 2000] [--seconds 60] [--threads 1]

A turn is one `prepare` and one `commit` of `RedisSeenStore`, both of 15 blocks, against a local server over loopback
TCP, for each installed server binary. It retrieves 15 of 60 blocks, so that later turns see most of them again, and
sends the others. 500 conversations run at a time, and each ends after 10 turns.

The records of turns: branches in which each turn shows new blocks only. `last` are the bytes of the last turn, and
`all` those of all turns together.

The lasting load: each worker process begins `--rate` turns of the pool per second on schedule, and a turn's latency
counts from its scheduled start. `server cpu` is the share of one core that the server used. Only a run
with the defaults is written to `results/`.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from typing import Any

import redis

from common import percentile, print_table
from redis_servers import Server, binaries
from result_files import write_rows
from warmprefix.stores import (
    Commit,
    Conversation,
    Prepare,
    ReadTurn,
    RecordBounds,
    SeenBlock,
    TurnRecord,
    WriteTurn,
)
from warmprefix_redis import RedisSeenStore, conversation_key, turn_key

K = 15
POOL = 60
CONVERSATIONS = 500
TURNS = 10
LATENCIES = ("p50", "p99", "p99.9")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="processes of the load")
    parser.add_argument("--threads", type=int, default=1, help="threads of each")
    parser.add_argument("--rate", type=int, default=2_000, help="turns a second of each worker")
    parser.add_argument("--seconds", type=float, default=60, help="how long the load lasts")
    parser.add_argument("--turns-only", action="store_true", help="measure only the records of turns")
    asked = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {"turns": [], "load": [], "memory": []}
    for flavour in binaries():
        with Server(flavour) as server, server.client() as admin:
            admin.flushall()
            results["turns"] += [{"server": flavour, **row} for row in measure_turns(server, admin)]
            if asked.turns_only:
                continue
            admin.flushall()
            results["memory"] += [{"server": flavour, **row} for row in measure_memory(server, admin)]
            admin.flushall()
            load = measure_load(server, admin, asked.workers, asked.threads, asked.rate, asked.seconds)
            results["load"].append({"server": flavour, **load})
    measured = {part: rows for part, rows in results.items() if rows}
    for title, rows in measured.items():
        print(f"\n{title}")
        print_table(list(rows[0]), [list(row.values()) for row in rows])
    if all(getattr(asked, name) == parser.get_default(name) for name in vars(asked) if name != "turns_only"):
        for part, rows in measured.items():
            write_rows(f"redis_state_{part}", rows, ("server",))


# -- the traffic ---------------------------------------------------------------------------------------------------


@dataclass
class Turn:
    """The blocks that a retriever found for one turn of a conversation."""

    conversation: Conversation
    plan: str
    proposed: dict[bytes, str]


def traffic(worker: str) -> Iterator[Turn]:
    """Seeded turns of alternating conversations, whose blocks are drawn beforehand so that they cost no time."""
    rng = random.Random(worker)
    pools = [blocks_of(rng, POOL) for _ in range(8)]
    found = [[dict(rng.sample(pool, K)) for _ in range(TURNS)] for pool in pools]
    plans = itertools.count()
    for generation in itertools.count():
        chats = [Conversation("tenant", f"{worker}-{generation}-{number}") for number in range(CONVERSATIONS)]
        for turn in range(TURNS):
            for number, chat in enumerate(chats):
                yield Turn(chat, f"{worker}.{next(plans)}", found[number % 8][turn])


def blocks_of(rng: random.Random, count: int) -> list[tuple[bytes, str]]:
    return [(rng.randbytes(16), f"passage-{rng.randrange(10**6):06}") for _ in range(count)]


def serve(store: RedisSeenStore, turn: Turn) -> tuple[float, float]:
    """Return the seconds that prepare and commit took."""
    start = time.perf_counter()
    prepared = store.execute(Prepare(turn.conversation, turn.plan, turn.proposed))
    middle = time.perf_counter()
    sent = [
        SeenBlock(fingerprint, label, prepared.turn + 1, 150)
        for fingerprint, label in turn.proposed.items()
        if fingerprint not in prepared.seen
    ]
    begin = time.perf_counter()
    store.execute(Commit(turn.conversation, turn.plan, sent))
    return middle - start, time.perf_counter() - begin


def server_cpu(admin: redis.Redis) -> float:
    info: Any = admin.info("cpu")
    return float(info["used_cpu_user"] + info["used_cpu_sys"])


def microseconds(seconds: Sequence[float], label: str) -> float:
    return round(percentile(seconds, float(label[1:])) * 1e6, 1)


# -- a load that lasts ---------------------------------------------------------------------------------------------


@dataclass
class Report:
    """The measurements of one worker."""

    prepare: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)
    turn: list[float] = field(default_factory=list)
    """From the scheduled start of each turn."""
    failed: int = 0
    seconds: float = 0.0
    cpu: float = 0.0


def measure_load(
    server: Server, admin: redis.Redis, workers: int, threads: int, rate: int, seconds: float
) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    barrier, reports = context.Barrier(workers + 1), context.SimpleQueue()
    arguments = (server.url, threads, rate, seconds, barrier, reports)
    processes = [context.Process(target=work, args=(f"w{number}", *arguments)) for number in range(workers)]
    for process in processes:
        process.start()
    barrier.wait(60)
    before = server_cpu(admin)
    done: list[Report] = [reports.get() for _ in processes]
    used = server_cpu(admin) - before
    for process in processes:
        process.join()
    lasted = max(report.seconds for report in done)
    turns = [time for report in done for time in report.turn]
    row: dict[str, Any] = {
        "workers": f"{workers} x {threads}",
        "asked turns/s": workers * rate,
        "turns/s": round(len(turns) / lasted),
        "failed": sum(report.failed for report in done),
    }
    for name in ("prepare", "commit", "turn"):
        values = [value for report in done for value in getattr(report, name)]
        row |= {f"{name} {label} µs": microseconds(values, label) for label in LATENCIES}
    return row | {
        "server cpu": round(used / lasted, 2),
        "workers' cpu": round(sum(report.cpu for report in done) / lasted, 2),
    }


def work(name: str, url: str, threads: int, rate: int, seconds: float, barrier: Barrier, reports: Any) -> None:
    """Run one worker process."""
    report, lock = Report(), threading.Lock()
    stream = traffic(name)
    store = RedisSeenStore(url, timeout=5)
    for turn in itertools.islice(stream, 200):
        serve(store, turn)
    barrier.wait(60)
    start, cpu = time.perf_counter(), time.process_time()
    places = iter(range(round(rate * seconds)))

    def loop() -> None:
        while True:
            with lock:
                place = next(places, None)
                if place is None:
                    return
                turn = next(stream)
            due = start + place / rate
            if (ahead := due - time.perf_counter()) > 0:
                time.sleep(ahead)
            try:
                prepare, commit = serve(store, turn)
            except redis.RedisError:
                report.failed += 1
                continue
            report.turn.append(time.perf_counter() - due)
            report.prepare.append(prepare)
            report.commit.append(commit)

    others = [threading.Thread(target=loop) for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    loop()
    for thread in others:
        thread.join()
    report.seconds = time.perf_counter() - start
    report.cpu = time.process_time() - cpu
    store.close()
    reports.put(report)


# -- memory --------------------------------------------------------------------------------------------------------


def measure_memory(server: Server, admin: redis.Redis) -> list[dict[str, Any]]:
    """Return the bytes of one conversation, key included."""
    rows: list[dict[str, Any]] = []
    for name, turns, new, bound in (
        ("nothing sent", 1, 0, 1_024),
        ("10 turns of 5 new blocks", 10, 5, 1_024),
        ("20 turns of 15 new blocks", 20, 15, 1_024),
        ("at the bound of 1,024 blocks", 400, 15, 1_024),
        ("at a bound of 256 blocks", 400, 15, 256),
    ):
        store = RedisSeenStore(server.url, timeout=5, bounds=RecordBounds(max_blocks=bound))
        chat = Conversation("tenant", name)
        rng, largest, blocks, slowest = random.Random(name), 0, 0, 0.0
        for turn in range(turns):
            found = Turn(chat, f"0123456789abcdef.{turn}", dict(blocks_of(rng, new)))
            slowest = max(slowest, *serve(store, found))
            largest = max(largest, int(admin.memory_usage(conversation_key("wp", chat).decode(), samples=0) or 0))
        snapshot = store.inspect(chat)
        assert snapshot is not None
        blocks = len(snapshot.blocks)
        rows.append({"conversation": name, "bytes": largest, "blocks": blocks, "slowest ms": round(slowest * 1e3, 2)})
        store.close()
    return rows


def measure_turns(server: Server, admin: redis.Redis) -> list[dict[str, Any]]:
    """Return the bytes of branches, keys included."""
    rows: list[dict[str, Any]] = []
    for name, turns, new, bound in (
        ("10 turns of 5 new blocks", 10, 5, 1_024),
        ("20 turns of 15 new blocks", 20, 15, 1_024),
        ("100 turns of 15 new blocks", 100, 15, 1_024),
    ):
        store = RedisSeenStore(server.url, timeout=5, bounds=RecordBounds(max_blocks=bound))
        rng, record, sizes = random.Random(name), TurnRecord(0), list[int]()
        for number in range(turns):
            blocks = blocks_of(rng, new)
            sent = [SeenBlock(key, label, 0, rng.randrange(80, 240)) for key, label in blocks]
            turn = Conversation("tenant", f"{name} {number}")
            store.execute(WriteTurn(turn, record.followed_by(sent, (), 1_800_000_000 + 40 * number)))
            found = store.execute(ReadTurn(turn))
            assert found is not None
            record = found
            sizes.append(int(admin.memory_usage(turn_key("wp", turn).decode(), samples=0) or 0))
        rows.append({"branch": name, "blocks": len(record.blocks), "last": sizes[-1], "all": sum(sizes)})
        store.close()
    return rows


if __name__ == "__main__":
    main()
