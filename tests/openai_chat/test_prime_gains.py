"""What primes cost and find, on vLLM's cache for models with recurrent layers."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from warmprefix import ContextBlock, ContextPlanner, EngineReport
from warmprefix.cache_profiles import Checkpoints, vllm_checkpoints
from warmprefix_openai import PrimeStats, messages_for
from warmprefix_openai.primer import PrimeLengths, Primer, cut_chat, shortened
from warmprefix_requests import FieldRefusals, OutgoingRequest
from warmprefix_requests.prefixes import EXACT_END
from warmprefix_tools.caches.checkpoints import CheckpointCache, CheckpointLayout

BLOCK = 256
WORDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("ane", "ilo", "our", "eth", "ust", "and")]
Context = Sequence[ContextBlock]


class RecurrentEngine:
    """A server's prompt and cache: a token for each word, some words two, and a template around each message."""

    def __init__(self, unit: int | None = None, *, keeps_ends: bool = True) -> None:
        self._cache = CheckpointCache(100_000, CheckpointLayout(Checkpoints(BLOCK, unit)))
        self._keeps_ends = keeps_ends
        self.computed = 0

    def ask(self, body: Mapping[str, Any]) -> EngineReport:
        tokens = self._tokens(body)
        sequence = self._cache.allocate(tokens, room_for=1)
        assert sequence is not None
        self._cache.store(sequence)
        self._cache.free(sequence)
        self.computed += len(tokens) - sequence.cached_tokens
        return EngineReport(sequence.cached_tokens, len(tokens))

    def _tokens(self, body: Mapping[str, Any]) -> list[int]:
        is_exact = EXACT_END.items() <= body.items()
        tokens: list[int] = []
        for message in body["messages"]:
            words = [f"<{message['role']}>", *message["content"].replace("\n\n", " \n\n ").split(" ")]
            tokens += [zlib.crc32(f"{word}{n}".encode()) for word in words for n in range(1 + (len(word) > 3))]
            tokens += [1, 2]
        if is_exact:
            return tokens[:-2]
        # A server that renders the template anew has nothing in common with a prime.
        return tokens if self._keeps_ends else [0, *tokens]


def serve(engine: RecurrentEngine, contexts: Iterable[Context], primes: int, unit: int | None = None) -> PrimeStats:
    """Serve all contexts in their order, as a link does."""
    planner = ContextPlanner(profile=vllm_checkpoints(BLOCK, unit), policy="relevance", annotate="none")
    primer, refusals = Primer(planner, primes), FieldRefusals()
    for blocks in contexts:
        plan = planner.plan(blocks)
        body = {"messages": messages_for(plan, "What is in it?", preamble="Be brief.")}
        request = OutgoingRequest("chat", json.dumps(body).encode(), body)
        for prime, sent in primer.requests(plan, request):
            report = engine.ask(sent.body)
            primer.answered(prime, refusals.attempt(sent, ""), 200, report.prompt_tokens, report.cached_tokens)
        report = engine.ask(body)
        planner.commit(plan, report=report)
        primer.learn(plan, report)
    return primer.stats()


def passages(count: int, seed: int = 0) -> Iterator[ContextBlock]:
    rng = random.Random(seed)
    for number in range(count):
        text = " ".join(rng.choices(WORDS, k=rng.randint(60, 140)))
        yield ContextBlock(f"{number} {text}")


def topics(count: int, visits: int) -> list[Context]:
    """Return requests that share three passages with others of their topic; topics overlap in time."""
    shared, own = [*passages(3 * count)], passages(count * visits, seed=1)
    order = sorted(range(count * visits), key=lambda n: n % count + 12 * (n // count))
    return [[*shared[3 * (n % count) : 3 * (n % count) + 3], block] for n, block in zip(order, own, strict=True)]


@pytest.mark.parametrize("unit", [None, 16])
def test_primes_pay_where_prefixes_come_again(unit: int | None) -> None:
    plain, primed = RecurrentEngine(unit), RecurrentEngine(unit)
    assert serve(plain, topics(40, 3), 0, unit) == PrimeStats()
    stats = serve(primed, topics(40, 3), 1, unit)
    assert stats.sent > 20
    assert stats.found_tokens > stats.computed_tokens
    assert primed.computed < 0.95 * plain.computed


def test_primes_end_by_themselves_where_nothing_comes_again() -> None:
    plain, primed = RecurrentEngine(), RecurrentEngine()
    contexts = topics(300, 1)
    serve(plain, contexts, 0)
    stats = serve(primed, contexts, 1)
    assert stats.sent + stats.skipped == 300
    assert 1 < stats.sent < 60
    assert stats.computed_tokens > stats.found_tokens
    assert primed.computed < 1.01 * plain.computed


def test_primes_end_by_themselves_where_requests_do_not_find_them() -> None:
    stats = serve(RecurrentEngine(keeps_ends=False), topics(100, 3), 1)
    assert stats.computed_tokens > stats.found_tokens
    assert 1 < stats.sent < 20


def test_no_prime_leaves_a_checkpoint_that_is_there() -> None:
    shared = [*passages(3)]
    same_start = [[*shared[:2], shared[2], block] for block in passages(20, seed=2)]
    assert serve(RecurrentEngine(), same_start, 2).sent <= 1


def test_a_prime_ends_right_behind_its_checkpoint_once_lengths_are_known() -> None:
    lengths, engine = PrimeLengths(), RecurrentEngine()
    rests: list[int] = []
    for blocks in topics(40, 1):
        text = "\n\n".join(block.text for block in blocks)
        chat = cut_chat([{"role": "user", "content": text}], "\n\n".join(block.text for block in blocks[:3]))
        assert chat is not None
        cut = lengths.cut(chat, Checkpoints(BLOCK))
        report = engine.ask({"messages": shortened(chat, cut), **EXACT_END})
        assert report.prompt_tokens is not None
        lengths.add(cut.estimated, report.prompt_tokens)
        rests.append((report.prompt_tokens - 1) % BLOCK)
    assert sum(rests[20:]) / 20 < BLOCK / 4
    assert sum(rest > 0.9 * BLOCK for rest in rests[20:]) <= 3, "too short for their checkpoint"


@pytest.mark.parametrize("content", ["", " ", "a", "\ud800" * 40, "\U0001f600" * 2_000, "word " * 50_000])
def test_odd_texts_are_cut_within_themselves(content: str) -> None:
    lengths = PrimeLengths()
    for tokens in (0, 3, 10_000, 7, 2**31):
        part: Any = [{"type": "text", "text": "x"}]
        chat = [{"role": "system", "content": part}, {"role": "user", "content": content}]
        cut = lengths.cut(chat, Checkpoints(BLOCK, 16))
        assert 0 <= cut.characters <= len(content)
        lengths.add(cut.estimated, tokens)
