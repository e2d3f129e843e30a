"""One process of an application in which two serve one conversation at the same time; prints what it found.

    racing_worker.py URL obedient|careless NUMBER RACES [FORMAT]

It plans first and reads the history after that, so that the history holds whatever a plan refers to: turns are stored
before they are committed. If the history was cut meanwhile, it plans again.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections.abc import Sequence

import redis

from true_prompts import Dialogue, Findings, Message
from warmprefix import ContextPlanner
from warmprefix.errors import StoreError
from warmprefix_redis import RedisSeenStore, record

CHAT = "the one that both serve"

UNLESS_CHANGED = """
if redis.call('LLEN', KEYS[1]) ~= tonumber(ARGV[1]) then return 0 end
if (redis.call('GET', KEYS[2]) or 'None') ~= ARGV[2] then return 0 end
"""
APPEND = f"""{UNLESS_CHANGED}
redis.call('RPUSH', KEYS[1], ARGV[3])
return 1
"""
CUT = f"""{UNLESS_CHANGED}
redis.call('LTRIM', KEYS[1], 0, ARGV[3])
return redis.call('INCR', KEYS[2])
"""


class Storage:
    """Where the application keeps the history: as a list to append to, or as one value that it overwrites."""

    def __init__(self, client: redis.Redis, careless: bool) -> None:
        self._client = client
        self._careless = careless

    def cuts(self) -> str:
        return str(self._client.get("cuts"))

    def load(self) -> list[str]:
        if self._careless:
            messages: list[str] = json.loads(str(self._client.get("history") or "[]"))
            return messages
        return [str(message) for message in self._client.lrange("history", 0, -1)]

    def store(self, history: Sequence[str], cuts: str, message: str) -> bool:
        if self._careless:
            return bool(self._client.set("history", json.dumps([*history, message])))
        return bool(self._client.eval(APPEND, 2, "history", "cuts", len(history), cuts, message))

    def cut(self, history: Sequence[str], cuts: str, keep: int) -> bool:
        if self._careless:
            return bool(self._client.set("history", json.dumps(history[:keep])))
        return bool(self._client.eval(CUT, 2, "history", "cuts", len(history), cuts, keep - 1))


class Racer:
    """The worker: plans, reads, checks, stores, commits."""

    def __init__(self, planner: ContextPlanner, storage: Storage, number: int) -> None:
        self.findings = Findings()
        self.counts = {"kept": 0, "abandoned": 0, "planned again": 0, "cuts": 0}
        self.rng = random.Random(number)
        self._planner = planner
        self._storage = storage

    def turn(self) -> None:
        cuts = self._storage.cuts()
        request = Dialogue.blocks(self.rng.sample(range(20), 5))
        plan = self._planner.plan(request, conversation=CHAT, placement="tail")
        time.sleep(self.rng.choice([0, 0, 0.001]))
        history = self._storage.load()
        if self._storage.cuts() != cuts:
            self._planner.abandon(plan)
            self.counts["planned again"] += 1
            return self.turn()
        message = f"{plan.render()}\n\nQuestion {self.findings.plans}?"
        self.findings.check(plan, request, [Message(text) for text in history], Message(message))
        time.sleep(self.rng.choice([0, 0, 0.001]))  # the model answers
        if self._storage.store(history, cuts, message):
            self._planner.commit(plan)
            self.counts["kept"] += 1
        else:
            self._planner.abandon(plan)
            self.counts["abandoned"] += 1
        return None

    def cut(self) -> None:
        """Drop the end of the history, unless `forget` fails, or another turn came between."""
        cuts, history = self._storage.cuts(), self._storage.load()
        try:
            self._planner.forget(CHAT)
        except StoreError:
            return
        self.counts["cuts"] += self._storage.cut(history, cuts, self.rng.randrange(len(history) + 1))


def main(url: str, application: str, number: int, races: int, value_format: int | None = None) -> None:
    if value_format is not None and value_format != 1:
        write_format(value_format)
    careless = application == "careless"
    # The scheduler of a busy machine may take more than 20 ms from one of two workers: then the careless one is no
    # longer bound to be right. And where formats are compared, a call that fails must have failed for that.
    budget = 0.02 if value_format is None and not careless else 5.0
    with (
        redis.Redis.from_url(url, decode_responses=True) as client,
        ContextPlanner(store=RedisSeenStore(url, timeout=budget), annotate="both") as planner,
    ):
        racer = Racer(planner, Storage(client, careless), number)
        alone = False
        for race in range(races):
            alone = alone or not meet(client, 2 * race)
            racer.turn()
            alone = alone or not meet(client, 2 * race + 1)
            if race % 2 == number or alone:  # and then undisturbed, while the other one waits
                racer.turn()
                racer.turn()
                if racer.rng.random() < 0.1:
                    racer.cut()
        stats = planner.stats()
    findings = racer.findings
    outcome = {"plans": findings.plans, "references": findings.references, "wrong": findings.wrong, "alone": alone}
    outcome |= {"store_errors": stats.store_errors, "conflicts": stats.conflicts, **racer.counts}
    json.dump({**outcome, "examples": findings.examples[:3]}, sys.stdout)


def meet(client: redis.Redis, place: int) -> bool:
    """Go on when the other one does too; False if it does not come any more."""
    if int(str(client.incr(f"meeting {place}"))) == 2:
        client.rpush(f"both at {place}", "go")
        return True
    return client.blpop([f"both at {place}"], timeout=2) is not None


def write_format(version: int) -> None:
    """Let this process act as a release that stores other values under the same keys."""
    for script in record.SCRIPTS.values():
        text = script.text.replace(b"local VERSION, ENDED = '1'", b"local VERSION, ENDED = '%d'" % version)
        assert text != script.text
        script.text, script.digest = text, hashlib.sha1(text, usedforsecurity=False).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
