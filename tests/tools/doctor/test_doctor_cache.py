"""The doctor's cache, on segments, against the emulator's, on tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from warmprefix_tools.doctor.cache import seen_tokens, simulate
from warmprefix_tools.doctor.request_log import LogRequest, RequestLog, SegmentPool, cut
from warmprefix_tools.emulator import ChatMessage, PrefixCache, encode, render_chat

Turn = tuple[str, str]
"""Role and text."""

TEXTS = st.text(
    st.sampled_from("ab. ?!\n\t\r-_3\u00e9\u00a0\u200b\u65e5{}[]\"',") | st.characters(exclude_categories=["Cs"]),
    max_size=60,
)
PROMPTS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(["system", "user"]), TEXTS), min_size=1, max_size=3),
        st.sampled_from([None, "a"]),
    ),
    min_size=1,
    max_size=8,
)


def emulated(prompts: Sequence[tuple[Sequence[Turn], str | None]], cache: PrefixCache) -> tuple[list[int], list[int]]:
    """Return the tokens of each prompt, and those that the emulator finds."""
    totals, hits = [], []
    for turns, salt in prompts:
        tokens = render_chat([ChatMessage(*turn) for turn in turns])
        sequence = cache.allocate(tokens, salt)
        assert sequence is not None
        cache.store(sequence)
        cache.free(sequence)
        totals.append(len(tokens))
        hits.append(sequence.cached_tokens)
    return totals, hits


def log_of(prompts: Sequence[tuple[Sequence[Turn], str | None]]) -> RequestLog:
    log = RequestLog()
    for number, (turns, salt) in enumerate(prompts, 1):
        messages = tuple(log.message(role, text) for role, text in turns)
        log.requests.append(LogRequest("log", number, messages, salt=salt))
    return log


@given(TEXTS)
def test_segments_keep_the_text_and_its_tokens(text: str) -> None:
    pool = SegmentPool()
    ids = pool.ids(text)
    assert "".join(cut(text)) == pool.text(ids) == text
    assert pool.count_tokens(ids) == len(encode(text))
    assert b"".join(map(pool.packed_tokens, ids)) == b"".join(token.to_bytes(4, "big") for token in encode(text))


@settings(max_examples=settings().max_examples * 3 // 2)
@given(PROMPTS, st.sampled_from([1, 2, 16]))
def test_hits_are_the_emulators(prompts: Sequence[tuple[Sequence[Turn], str | None]], block_size: int) -> None:
    # Random prompts share little, so some of them get the start of the first one.
    longer = [([*prompts[0][0][:1], *turns], salt) for turns, salt in prompts]
    everything = [*prompts, *longer, *prompts]
    log = log_of(everything)
    outcome = simulate(log.as_sent(), log.pool, block_size)
    totals, hits = emulated(everything, PrefixCache(10_000, block_size))
    assert outcome.prompt_tokens == totals
    assert outcome.hit_tokens == hits
    assert all(tokens >= 0 for tokens in seen_tokens(log.as_sent(), log.pool))


def test_donor_is_the_first_request_with_the_found_tokens() -> None:
    log = log_of([([("user", "one two three. Four five.")], None)] * 3 + [([("user", "one two three. Six.")], "a")])
    outcome = simulate(log.as_sent(), log.pool, 1)
    assert outcome.donors == [None, 0, 0, None]
    assert outcome.hit_tokens[0] == outcome.hit_tokens[3] == 0
