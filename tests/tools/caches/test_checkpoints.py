"""The rules of engines that keep checkpoints; `tests/engine` compares the cache with vLLM's own scheduler."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tools.kv_integrity import check_blocks

from warmprefix.cache_profiles import Checkpoints
from warmprefix_tools.caches import CheckpointCache, CheckpointLayout, MarkedPrompt, serve
from warmprefix_tools.caches.checkpoints import CheckpointSequence

WINDOW = CheckpointLayout(Checkpoints(128), window=512)
RECURRENT = CheckpointLayout(Checkpoints(528))
RECURRENT_WITH_UNIT = CheckpointLayout(Checkpoints(528, 16))


def hits(layout: CheckpointLayout, *prompts: list[int], kv_blocks: int = 5_000) -> list[int]:
    cache = CheckpointCache(kv_blocks, layout)
    return [serve(cache, MarkedPrompt(prompt)).read for prompt in prompts]


def text(name: int, tokens: int) -> list[int]:
    return [name * 10_000 + place for place in range(tokens)]


@pytest.mark.parametrize("layout", [WINDOW, CheckpointLayout(Checkpoints(128))])
def test_third_visit_to_a_shared_prefix_is_the_first_to_hit(layout: CheckpointLayout) -> None:
    shared = text(0, 1000)
    assert hits(layout, *(shared + text(visit, 300) for visit in (1, 2, 3))) == [0, 0, 896]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [(WINDOW, 896), (RECURRENT, 528), (RECURRENT_WITH_UNIT, 992), (CheckpointLayout(Checkpoints(1_056)), 0)],
)
def test_prompt_that_is_sent_again_hits_at_its_last_boundary(layout: CheckpointLayout, expected: int) -> None:
    assert hits(layout, text(0, 1000), text(0, 1000)) == [0, expected]


def test_prime_that_ends_behind_a_boundary_makes_the_second_visit_hit() -> None:
    shared = text(0, 1057)
    visits = [shared + text(visit, 300) for visit in (1, 2)]
    assert hits(RECURRENT, shared, *visits) == [0, 1056, 1056]
    assert hits(RECURRENT, shared[:-1], *visits) == [0, 528, 1056]  # it ends at the boundary, not behind it


def test_dense_retention_makes_second_visits_hit_in_a_window() -> None:
    layout = CheckpointLayout(Checkpoints(128), window=512, retention=128)
    shared = text(0, 1000)
    assert hits(layout, *(shared + text(visit, 300) for visit in (1, 2))) == [0, 896]


def test_answers_are_cached_with_the_prompt() -> None:
    cache = CheckpointCache(500, WINDOW)
    prompt, answer = text(0, 500), text(1, 300)
    sequence = cache.allocate(prompt, room_for=300)
    assert sequence is not None
    cache.store(sequence)
    for token in answer:
        cache.append(sequence, token)
    cache.free(sequence)
    follow_up = [*prompt, *answer, *text(2, 100)]
    assert hits_in(cache, follow_up) == [384]  # the end of the prompt; the end of the answer is a junction from now on
    assert hits_in(cache, [*prompt, *answer, *text(3, 100)]) == [768]


def hits_in(cache: CheckpointCache, *prompts: list[int]) -> list[int]:
    return [serve(cache, MarkedPrompt(prompt)).read for prompt in prompts]


class OneCheckpoint:
    """SGLang's rule without a tree: one checkpoint per prompt, at its junction or near its end."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.kept: list[list[int]] = []

    def hit(self, prompt: list[int]) -> int:
        ends = range(0, len(prompt), self.block)
        junction = max(end for end in ends if any(kept[:end] == prompt[:end] for kept in self.kept) or not end)
        hit = max(end for end in ends if prompt[:end] in self.kept or not end)
        if len(prompt) - hit >= self.block:
            end = junction if junction > hit else len(prompt) // self.block * self.block
            self.kept.append(prompt[:end])
        return hit


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=4), max_size=12))
def test_sglang_keeps_one_checkpoint_per_prompt(prompts: list[list[tuple[int, int]]]) -> None:
    rule = OneCheckpoint(4)
    texts = [[token for name, length in pieces for token in text(name, length)] for pieces in prompts]
    expected = [rule.hit(prompt) for prompt in texts]
    assert hits(CheckpointLayout(Checkpoints(4, junction_only=True)), *texts) == expected


def test_sglangs_second_visit_keeps_its_junction_and_not_its_end() -> None:
    layout = CheckpointLayout(Checkpoints(64, junction_only=True))
    one, two = (text(0, 1000) + text(visit, 300) for visit in (1, 2))
    assert hits(layout, one, two, two, one) == [0, 0, 960, 1280]  # as SGLang 0.5.23's own tree


@given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=12),
    layout=st.sampled_from(
        [
            CheckpointLayout(Checkpoints(8), window=17, sparse_groups=2, step_tokens=13),
            CheckpointLayout(Checkpoints(8, 2), sparse_groups=2, step_tokens=13),
            CheckpointLayout(Checkpoints(8), sparse_groups=1, step_tokens=64, retention=None),
        ]
    ),
    together=st.booleans(),
)
def test_running_requests_never_lack_blocks(
    lengths: list[tuple[int, int, int]], layout: CheckpointLayout, together: bool
) -> None:
    """Requests in any number share a pool; admission leaves enough blocks for all of them to end."""
    cache = CheckpointCache(60, layout)
    running = []
    for name, prompt, answer in lengths:
        sequence = cache.allocate(text(name, prompt), room_for=answer)
        if sequence is None:
            continue
        assert sequence.cached_tokens < prompt
        if together:
            running.append((sequence, answer))
        else:
            run_to_end(cache, sequence, answer)
    for sequence, _ in running:
        cache.store(sequence)
        check_blocks(cache)
    for sequence, answer in running:
        for token in range(answer):
            cache.append(sequence, token)
        check_blocks(cache)
        cache.free(sequence)
    assert cache.usage == cache.num_sequences == 0
    assert cache.reset()
    check_blocks(cache)


def run_to_end(cache: CheckpointCache, sequence: CheckpointSequence, answer: int) -> None:
    cache.store(sequence)
    for token in range(answer):
        cache.append(sequence, token)
    check_blocks(cache)
    cache.free(sequence)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 1}, "window must be 2 or more, got 1"),
        ({"sparse_groups": 0}, "sparse_groups must be 1 or more, got 0"),
        ({"step_tokens": 0}, "step_tokens must be 1 or more, got 0"),
        ({"retention": 100}, "retention must be a multiple of 128, got 100"),
    ],
)
def test_layout_out_of_range_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointLayout(Checkpoints(128), **arguments)


def test_calls_in_the_wrong_order_are_refused() -> None:
    cache = CheckpointCache(100, WINDOW)
    with pytest.raises(ValueError, match="token_ids must have 1 token or more"):
        cache.allocate([])
    sequence = cache.allocate(text(0, 10))
    assert sequence is not None
    with pytest.raises(ValueError, match="sequence must be stored before tokens are appended"):
        cache.append(sequence, 1)
    cache.store(sequence)
    with pytest.raises(ValueError, match="sequence must be stored once"):
        cache.store(sequence)
    assert not cache.reset()
    cache.free(sequence)
    with pytest.raises(ValueError, match="sequence must be a running one"):
        cache.free(sequence)
