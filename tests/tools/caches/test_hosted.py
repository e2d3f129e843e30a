"""The rules of hosted caches, as the vendors document them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix.cache_profiles import CacheProfile, as_profile
from warmprefix_tools.caches import CacheUse, HostedCache, Mark, MarkedPrompt, MarksRefusedError, serve

ANTHROPIC = replace(as_profile("anthropic"), minimum_tokens=10)
OPENAI = replace(as_profile("openai"), minimum_tokens=10)
MINUTES = 60.0


def prompt(*parts: str, marks: tuple[int | Mark, ...] = (), automatic: bool = True) -> MarkedPrompt:
    """Return a prompt of parts with 10 tokens each; equal names make equal tokens; a name in capitals is a message."""
    tokens = [1_000 * ord(name[0].lower()) + place for name in parts for place in range(10)]
    return MarkedPrompt(
        tokens,
        part_ends=tuple(range(10, len(tokens) + 1, 10)),
        marks=tuple(mark if isinstance(mark, Mark) else Mark(mark) for mark in marks),
        message_ends=tuple(number for number, name in enumerate(parts) if name.isupper()),
        automatic=automatic,
    )


def uses(profile: CacheProfile, *prompts: MarkedPrompt, seconds: float = 1.0) -> list[tuple[int, int, int]]:
    cache = HostedCache(profile)
    found = [serve(cache, each, seconds * number) for number, each in enumerate(prompts)]
    return [(use.read, sum(use.written), use.uncached) for use in found]


# -- Anthropic


def test_longer_prompt_reads_what_earlier_marks_wrote_and_writes_the_rest() -> None:
    first = prompt("a", "b", marks=(0, 1))
    assert uses(ANTHROPIC, first, prompt("a", "b", "c", marks=(0, 2))) == [(0, 20, 0), (20, 10, 0)]


def test_earlier_mark_is_found_twenty_parts_back_and_no_further() -> None:
    letters = [chr(ord("a") + number) for number in range(22)]
    first = prompt(*letters[:1], marks=(0,))
    assert uses(ANTHROPIC, first, prompt(*letters[:20], marks=(19,)))[1] == (10, 190, 0)
    assert uses(ANTHROPIC, first, prompt(*letters[:21], marks=(20,)))[1] == (0, 210, 0)
    assert uses(ANTHROPIC, first, prompt(*letters[:21], marks=(5, 20)))[1] == (10, 200, 0)


def test_prefix_below_the_minimum_is_not_cached() -> None:
    longer = replace(ANTHROPIC, minimum_tokens=21)
    assert uses(longer, prompt("a", "b", marks=(1,)), prompt("a", "b", marks=(1,))) == [(0, 0, 20)] * 2
    exact = replace(ANTHROPIC, minimum_tokens=20)
    assert uses(exact, prompt("a", "b", marks=(0, 1)), prompt("a", "b", marks=(0, 1))) == [(0, 20, 0), (20, 0, 0)]


def test_lifetime_is_renewed_by_reading() -> None:
    marked = prompt("a", marks=(0,))
    assert uses(ANTHROPIC, *[marked] * 4, seconds=4 * MINUTES) == [(0, 10, 0)] + [(10, 0, 0)] * 3
    assert uses(ANTHROPIC, *[marked] * 2, seconds=301.0) == [(0, 10, 0)] * 2


def test_longer_lifetime_is_charged_up_to_its_last_mark() -> None:
    marks = (Mark(0, 3600.0), Mark(2))
    cache = HostedCache(ANTHROPIC)
    both = prompt("a", "b", "c", "d", marks=marks)
    assert serve(cache, both, 0.0) == CacheUse(read=0, written=(20, 10), uncached=10)
    assert serve(cache, both, 30 * MINUTES) == CacheUse(read=10, written=(20, 0), uncached=10)
    assert serve(cache, both, 120 * MINUTES) == CacheUse(read=0, written=(20, 10), uncached=10)


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ((0, 1, 2, 3, 4), "at most 4 marks, got 5"),
        ((Mark(0), Mark(1, 3600.0)), "must not live longer than one in front of it"),
        ((Mark(0, 60.0),), "must live for one of"),
    ],
)
def test_marks_against_the_rules_are_refused(marks: tuple[int | Mark, ...], message: str) -> None:
    with pytest.raises(MarksRefusedError, match=message):
        uses(ANTHROPIC, prompt("a", "b", "c", "d", "e", marks=marks))


def test_prefix_that_is_still_computed_is_not_read() -> None:
    cache = HostedCache(ANTHROPIC)
    marked = prompt("a", marks=(0,))
    first, second = cache.admit(marked), cache.admit(marked)
    assert (first.use.read, second.use.read) == (0, 0)
    assert (cache.num_sequences, cache.reset()) == (2, False)
    first.store(0.0)
    assert cache.admit(marked).use.read == 10


# -- OpenAI from GPT-5.6


def test_end_of_the_newest_message_is_a_mark() -> None:
    assert uses(OPENAI, prompt("s", "U"), prompt("s", "U"), prompt("s", "V")) == [(0, 20, 0), (20, 0, 0), (0, 20, 0)]


def test_conversation_reads_up_to_its_previous_message() -> None:
    first, second = prompt("s", "U"), prompt("s", "U", "x", "V")
    assert uses(OPENAI, first, second) == [(0, 20, 0), (20, 20, 0)]


def test_only_the_latest_marks_are_written_and_all_are_read() -> None:
    parts = ("a", "b", "c", "d", "e", "U")
    assert uses(OPENAI, prompt(*parts, marks=(0, 1, 2, 3, 4)), prompt("a", "b", "U", marks=(0, 1))) == [
        (0, 60, 0),  # up to c, d, e and the message's end
        (0, 30, 0),
    ]
    explicit = prompt(*parts, marks=(0, 1, 2, 3, 4), automatic=False)
    assert uses(OPENAI, explicit, prompt("a", "b", "U", marks=(0, 1), automatic=False)) == [(0, 50, 10), (20, 0, 10)]


# -- without marks


def test_steps_are_read_from_the_minimum_on() -> None:
    profile = replace(as_profile("openai-before-5.6"), unit=8, minimum_tokens=16)
    tokens = list(range(40))
    prompts = [MarkedPrompt(each) for each in (tokens, tokens, [*tokens[:18], 99], tokens[:15] + [99] * 5)]
    cache = HostedCache(profile)
    assert [serve(cache, each).read for each in prompts] == [0, 32, 16, 0]
    assert serve(cache, MarkedPrompt(tokens), now=299.0).read == 32
    assert serve(cache, MarkedPrompt(tokens), now=700.0).read == 0


# -- all of them


@given(
    requests=st.lists(
        st.tuples(
            st.lists(st.sampled_from(["a", "b", "U", "V"]), min_size=1, max_size=6),
            st.sets(st.integers(0, 5), max_size=4),
            st.integers(0, 5),
            st.floats(0, 400),
        ),
        max_size=12,
    ),
    profile=st.sampled_from([ANTHROPIC, OPENAI, replace(as_profile("deepseek"), unit=4, minimum_tokens=4)]),
)
def test_tokens_are_conserved_and_only_earlier_prompts_are_read(
    requests: list[tuple[list[str], set[int], int, float]], profile: CacheProfile
) -> None:
    cache = HostedCache(profile)
    earlier: list[list[int]] = []
    now = 0.0
    for parts, marked, long_lived, seconds in requests:
        now += seconds
        lifetimes = profile.marks.lifetimes if profile.marks else (300.0,)
        marks = tuple(
            Mark(part, lifetimes[-1] if part < long_lived else None) for part in sorted(marked) if part < len(parts)
        )
        each = prompt(*parts, marks=marks)
        use = serve(cache, each, now)
        assert use.tokens == len(each.tokens)
        assert min(use.read, use.uncached, *use.written) >= 0
        assert use.read == 0 or any(each.tokens[: use.read] == other[: use.read] for other in earlier)
        earlier.append(list(each.tokens))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": []}, "tokens must have 1 token"),
        ({"part_ends": (2, 1)}, "part_ends must rise"),
        ({"part_ends": (4,)}, "part_ends must rise from 0 to at most 3"),
        ({"marks": (Mark(0),)}, "marks must rise and be numbers of 0 parts"),
        ({"part_ends": (1, 2), "message_ends": (1, 1)}, "message_ends must rise"),
    ],
)
def test_contradictory_prompt_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MarkedPrompt(**{"tokens": [1, 2, 3], **fields})  # type: ignore[arg-type]
