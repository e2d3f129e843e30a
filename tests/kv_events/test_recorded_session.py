"""A recorded session of vLLM 0.32: its KV events agree with the cached tokens that it reported per request.

A cache of 160 KV blocks of 32 tokens; cold requests, repeated ones, shared prefixes, salts, prompts that end with a
full KV block, eviction, concurrent requests, `/reset_prefix_cache`, and a restart. Each request has the token ids and
the cached tokens that the engine returned.
"""

from __future__ import annotations

import gzip
import json
import lzma
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from kv_index_checks import check_index, resident_tokens
from kv_publisher import KvPublisher
from warmprefix.plan import Scope
from warmprefix.residency import ServedPrompt
from warmprefix_kv_events.kv_events import END, EventBatch, read_batch, read_message
from warmprefix_kv_events.kv_index import KvIndex
from warmprefix_kv_events.prompt_tree import KvLayout, MappedPrompt, chain, pack_tokens, root_key
from warmprefix_kv_events.spans import SpanFinder

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
        index.wipe("engine", complete=True)
    index.apply("engine", batch)
    return batch


def usable(tokens: int, prompt: int) -> int:
    """Return the reused part of a resident prefix: vLLM computes the block with the last token again."""
    return min(tokens, (prompt - 1) // BLOCK * BLOCK)


def test_the_index_predicts_the_cached_tokens_of_every_request(session: dict[str, Any]) -> None:
    index = KvIndex()
    requests, silent = 0, False
    for step in session["steps"]:
        if "frames" in step:
            assert apply(index, step["frames"]).unknown == 0
            check_index(index)
            silent = False
        elif "request" in step:
            held = resident_tokens(index, pack_tokens(step["token_ids"]), step["salt"])
            if silent:  # the first event after a reset or a restart comes with the next request
                assert step["cached_tokens"] == 0 < held
            else:
                assert usable(held, len(step["token_ids"])) == step["cached_tokens"], step["request"]
            requests += 1
        else:
            silent = True
    assert requests == 73
    assert index.unknown == 0
    assert index.certain(salted=True)


def test_the_index_predicts_the_cached_tokens_of_a_hybrid_model() -> None:
    """The model has Gemma 3's layers: five caches for windows of 512 tokens and one for full attention.

    Its cache holds 400 KV blocks of 128 tokens, too few for the 60 prompts.
    """
    with lzma.open(Path(__file__).parent / "vllm_hybrid_session.json.xz") as file:
        requests = json.load(file)
    index = KvIndex()
    cached = full = 0
    for request in requests:
        tokens = pack_tokens(request["token_ids"][:-1])  # the engine computes the last token again
        if index.sources:
            assert resident_tokens(index, tokens) == request["cached_tokens"]
            full += (
                sum(1 for _ in takewhile(index._holders.get, chain(tokens, KvLayout(128), root_key(None, None)))) * 128
            )
        cached += request["cached_tokens"]
        for frames in request["frames"]:
            assert apply(index, frames).unknown == 0
        check_index(index)
    assert index.certain()
    assert (cached, full) == (8_448, 19_968)


@pytest.mark.parametrize("lookahead", [1, 3], ids=["EAGLE", "a chain of three MTP modules"])
def test_the_index_predicts_the_cached_tokens_with_hashes_that_look_ahead(lookahead: int) -> None:
    """The hash of each KV block of 16 tokens covers the next tokens too: a prompt that parts there does not find it.

    vLLM 0.33's own cache manager, without a model: 48 KV blocks, prompts that part at and around the ends of blocks.
    """
    with lzma.open(Path(__file__).parent / "vllm_lookahead_session.json.xz") as file:
        requests = json.load(file)[str(lookahead)]
    index, layout = KvIndex(), KvLayout(16, lookahead)
    followed: list[MappedPrompt] = []
    cached = parted = 0
    for number, request in enumerate(requests):
        tokens, salt = pack_tokens(request["token_ids"]), request["salt"]
        if index.sources:
            held = resident_tokens(index, tokens, salt)
            assert min(held, (len(request["token_ids"]) - 1) // 16 * 16) == request["cached_tokens"]
        cached += request["cached_tokens"]
        for frames in request["frames"]:
            assert apply(index, frames).unknown == 0
        end = len(request["token_ids"])
        mapped = MappedPrompt(Scope(salt, None, None), salt, (b"%d" % number,), tokens, (end,))
        index.remember(mapped)
        followed.append(mapped)
        for change in index.changes():
            (prompt,) = [prompt for prompt in followed if (prompt.scope, prompt.keys) == (change.scope, change.keys)]
            path = [*chain(prompt.tokens, layout, root_key(prompt.cache_salt, None))]
            parted += len(path) < prompt.ends[-1] // 16
            assert bool(change.resident_blocks) == all(map(index._holders.get, path))
        check_index(index)
    assert index.certain(salted=True)
    assert index.unknown == 0
    assert cached > 1_400
    assert parted > 0, "no prompt ends where its last KV block is still open"


def test_reported_context_blocks_are_the_reused_ones(session: dict[str, Any]) -> None:
    """A target that assumes served blocks as resident and applies each change has the number of reused blocks."""
    index = KvIndex()
    finder = SpanFinder(session["tokens"].__getitem__)
    assumed: dict[tuple[Scope, tuple[bytes, ...]], int] = {}
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
            if (scope, keys) in assumed and not silent:
                reused = step["cached_tokens"]
                expected = sum(usable(end // BLOCK * BLOCK, len(step["token_ids"])) <= reused for end in mapped.ends)
                assert assumed[scope, keys] == expected, step["request"]
                compared += 1
            index.remember(mapped)
            for other in assumed:
                if other[0] == scope:
                    assumed[other] = max(assumed[other], common(other[1], keys))
            assumed[scope, keys] = len(keys)
        else:
            silent = True
        for change in index.changes():
            for other in assumed:
                if other[0] == change.scope:
                    shared = common(other[1], change.keys)
                    resident = change.resident_blocks
                    assumed[other] = resident if shared > resident else max(assumed[other], shared)
        check_index(index)
    assert compared >= 12
    assert index.prompts == len(assumed) > 40


def common(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def test_the_recorded_replay_leads_to_the_same_state(session: dict[str, Any]) -> None:
    """The engine's answer to a replay from 0 leads to the same state as its live messages since the restart."""
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
            assert resident_tokens(replayed, tokens, step["salt"]) == resident_tokens(live, tokens, step["salt"])


def test_a_feed_receives_the_session(session: dict[str, Any], feed_of: Any, until: Any) -> None:
    """The same messages through sockets, including the restart, with the engine's sequence numbers."""
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
