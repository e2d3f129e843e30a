"""A recorded session of vLLM 0.32: what it published of its cache agrees with what it said of each request.

A cache of 160 KV blocks of 32 tokens; cold requests, repeated ones, shared prefixes, salts, prompts that end with a
full KV block, eviction, concurrent requests, `/reset_prefix_cache`, and a restart. Each request has the token ids and
the cached tokens that the engine returned.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kv_publisher import KvPublisher
from warmprefix.plan import Scope
from warmprefix.residency.base import ServedPrompt
from warmprefix.residency.kv_events import END, EventBatch, read_batch, read_message
from warmprefix.residency.kv_index import KvIndex
from warmprefix.residency.kv_keys import pack_tokens
from warmprefix.residency.spans import SpanFinder

BLOCK = 32


@pytest.fixture(scope="module")
def session() -> dict[str, Any]:
    with gzip.open(Path(__file__).parent / "vllm_session.json.gz") as file:
        document: dict[str, Any] = json.load(file)
    return document


def apply(index: KvIndex, frames: list[str]) -> EventBatch:
    message = read_message([bytes.fromhex(frame) for frame in frames])
    batch = read_batch(message.payload)
    if message.sequence == 0:
        index.wipe("engine", known=True)
    index.apply("engine", batch)
    return batch


def usable(tokens: int, prompt: int) -> int:
    """What vLLM reuses of a resident prefix: not the block with the prompt's last token, which it computes again."""
    return min(tokens, (prompt - 1) // BLOCK * BLOCK)


def test_the_index_knows_of_every_request_what_the_engine_will_reuse(session: dict[str, Any]) -> None:
    index = KvIndex()
    requests, silent = 0, False
    for step in session["steps"]:
        if "frames" in step:
            assert apply(index, step["frames"]).unknown == 0
            index.check_integrity()
            silent = False
        elif "request" in step:
            held = index.resident_tokens(pack_tokens(step["token_ids"]), step["salt"])
            if silent:  # a reset and a restart are first heard of with the next request
                assert step["cached_tokens"] == 0 < held
            else:
                assert usable(held, len(step["token_ids"])) == step["cached_tokens"], step["request"]
            requests += 1
        else:
            silent = True
    assert requests == 73
    assert index.unknown == 0
    assert index.certain(salted=True)


def test_what_is_told_of_context_blocks_is_what_the_engine_reuses(session: dict[str, Any]) -> None:
    """Who believes what was served, and then what is told, knows how many context blocks of a path are reused."""
    index = KvIndex()
    finder = SpanFinder(session["tokens"].__getitem__)
    believed: dict[tuple[Scope, tuple[bytes, ...]], int] = {}
    compared, silent = 0, False
    for step in session["steps"]:
        if "frames" in step:
            apply(index, step["frames"])
            silent = False
        elif "request" in step:
            scope = Scope(step["salt"], None, None)
            keys = tuple(text.encode() for text in step["paragraphs"])
            mapped = finder.map(ServedPrompt(scope, step["salt"], keys, tuple(step["paragraphs"]), step["token_ids"]))
            assert mapped is not None
            if (scope, keys) in believed and not silent:
                reused = step["cached_tokens"]
                expected = sum(usable(end // BLOCK * BLOCK, len(step["token_ids"])) <= reused for end in mapped.ends)
                assert believed[scope, keys] == expected, step["request"]
                compared += 1
            index.remember(mapped)
            for other in believed:
                if other[0] == scope:
                    believed[other] = max(believed[other], common(other[1], keys))
            believed[scope, keys] = len(keys)
        else:
            silent = True
        for change in index.changes():
            for other in believed:
                if other[0] == change.scope:
                    shared = common(other[1], change.keys)
                    resident = change.resident_blocks
                    believed[other] = resident if shared > resident else max(believed[other], shared)
        index.check_integrity()
    assert compared >= 12
    assert index.prompts == len(believed) > 40


def common(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def test_its_own_replay_tells_the_same(session: dict[str, Any]) -> None:
    """The answer to a request from 0, as the engine gave it, leads to what the messages did since the restart."""
    live, replayed = KvIndex(), KvIndex()
    for step in session["steps"]:
        if "frames" in step:
            apply(live, step["frames"])
    for frames in session["replay"][:-1]:
        apply(replayed, frames)
    assert read_message([bytes.fromhex(frame) for frame in session["replay"][-1]]).sequence == END
    assert len(session["replay"]) > 30
    assert {len(frames) for frames in session["replay"]} == {4}
    assert replayed.kv_blocks == live.kv_blocks > 100
    for step in session["steps"]:
        if "request" in step:
            tokens = pack_tokens(step["token_ids"])
            assert replayed.resident_tokens(tokens, step["salt"]) == live.resident_tokens(tokens, step["salt"])


def test_a_feed_hears_it(session: dict[str, Any], feed_of: Any, until: Any) -> None:
    """The same messages by way of sockets, the restart among them, by a publisher that counts as the engine did."""
    messages = [[bytes.fromhex(frame) for frame in step["frames"]] for step in session["steps"] if "frames" in step]
    expected = KvIndex()
    for step in session["steps"]:
        if "frames" in step:
            apply(expected, step["frames"])
    with KvPublisher(replays=False) as publisher:
        feed = feed_of(publisher, replay=False)
        for frames in messages:
            publisher.send_frames(*frames)
        until(lambda: feed.stats().kv_blocks == expected.kv_blocks and feed.stats().wipes == 1)
        until(lambda: feed.stats().connected)
    stats = feed.stats()
    assert (stats.sources, stats.gaps, stats.malformed, stats.unknown) == (1, 0, 0, 0)
