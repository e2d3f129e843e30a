"""The index of KV blocks, with a model that keeps every token."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_index_checks import check_index, resident_tokens
from kv_publisher import removed, stored
from warmprefix.plan import Scope
from warmprefix_kv_events.kv_events import EventBatch, read_batch
from warmprefix_kv_events.kv_index import KvIndex
from warmprefix_kv_events.prompt_tree import KvLayout, MappedPrompt, ResidencyChange, chain, pack_tokens, root_key

SCOPE = Scope(None, None, None)
SIZE = 2


def batch_of(*events: Any, rank: int | None = 0) -> EventBatch:
    return read_batch(msgspec.msgpack.encode([1.0, list(events), rank]))


def prompt(tokens: list[int], *ends: int, salt: str | None = None, scope: Scope = SCOPE) -> MappedPrompt:
    """Return a prompt whose context blocks are named after the tokens up to their ends."""
    keys = tuple(bytes(tokens[:end]) for end in ends)
    return MappedPrompt(scope, salt, keys, pack_tokens(tokens[: ends[-1]]), ends)


def changes_of(index: KvIndex) -> list[tuple[int, int]]:
    return [(len(change.keys), change.resident_blocks) for change in index.changes()]


def complete_index(**bounds: Any) -> KvIndex:
    """Return an index with the complete state of one source."""
    index = KvIndex(**bounds)
    index.wipe("engine", complete=True)
    assert index.changes() == []
    return index


@pytest.fixture
def index() -> KvIndex:
    return complete_index()


TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_block_is_its_tokens_and_their_prefix(index: KvIndex) -> None:
    index.apply("engine", batch_of(stored([1, 2], None, [1, 2, 3, 4], SIZE)))
    assert resident_tokens(index, pack_tokens([1, 2, 3, 4, 5])) == 4
    assert resident_tokens(index, pack_tokens([3, 4])) == 0
    assert resident_tokens(index, pack_tokens([1, 2, 9, 9])) == 2
    assert resident_tokens(index, pack_tokens([1])) == 0


def test_prompts_that_part_behind_a_block_share_it_only_without_lookahead(index: KvIndex) -> None:
    """Both hashes of the block are held, and dropping one leaves the other."""
    index.apply("engine", batch_of(stored([1], None, [1, 2], SIZE, lookahead_token_ids=[[3]])))
    index.apply("engine", batch_of(stored([2], None, [1, 2], SIZE, lookahead_token_ids=[[4]])))
    assert [resident_tokens(index, pack_tokens([1, 2, behind])) for behind in (3, 4, 5)] == [2, 2, 0]
    index.apply("engine", batch_of(removed(1)))
    assert [resident_tokens(index, pack_tokens([1, 2, behind])) for behind in (3, 4, 5)] == [0, 2, 0]
    check_index(index)


@pytest.mark.parametrize("lookahead", [[[3]], [[3], []], [[3], [5, 6]], [[3], [5], [6]], [[3], [-1]], [[3], [2**32]]])
def test_unusable_lookahead_makes_the_state_incomplete(index: KvIndex, lookahead: list[list[int]]) -> None:
    index.apply("engine", batch_of(stored([1, 2], None, [1, 2, 3, 4], SIZE, lookahead_token_ids=lookahead)))
    assert (index.unknown, index.certain()) == (2, False)
    check_index(index)


def test_an_engine_does_not_change_its_lookahead_before_it_restarts(index: KvIndex) -> None:
    index.apply("engine", batch_of(stored([1], None, [1, 2], SIZE, lookahead_token_ids=[[3]])))
    index.apply("engine", batch_of(stored([2], None, [7, 8], SIZE)))
    assert (index.unknown, index.certain()) == (1, False)
    index.wipe("engine", complete=True)
    index.apply("engine", batch_of(stored([2], None, [7, 8], SIZE)))
    assert resident_tokens(index, pack_tokens([7, 8])) == 2
    assert index.certain()


def test_keys_depend_on_salt_and_adapter() -> None:
    roots = [root_key(salt, adapter) for salt in (None, "", "a") for adapter in (None, "", "a")]
    assert len(set(roots)) == len(roots)
    packed = pack_tokens(TOKENS)
    assert len({key for root in roots for key in chain(packed, KvLayout(SIZE), root)}) == 4 * len(roots)


def test_copies_are_counted(index: KvIndex) -> None:
    """vLLM computes the last full block of a repeated prompt again, and drops each copy separately."""
    index.apply("engine", batch_of(stored([1, 2], None, [1, 2, 3, 4], SIZE), stored([2], 1, [3, 4], SIZE)))
    index.apply("engine", batch_of(removed(2)))
    assert resident_tokens(index, pack_tokens(TOKENS)) == 4
    index.apply("engine", batch_of(removed(2)))
    assert resident_tokens(index, pack_tokens(TOKENS)) == 2
    check_index(index)


def test_reported_copies_are_not_counted() -> None:
    index = KvIndex(count_copies=False)
    index.apply("engine", batch_of(stored([1], None, [1, 2], SIZE), stored([1], None, [1, 2], SIZE), removed(1)))
    assert index.kv_blocks == 0


def test_a_copy_on_another_medium_stays(index: KvIndex) -> None:
    index.apply("engine", batch_of(stored([1, 2], None, [1, 2, 3, 4], SIZE)))
    index.apply("engine", batch_of(stored([1], None, [1, 2], SIZE, medium="CPU")))
    index.apply("engine", batch_of(stored([2], None, [], 0, medium="CPU")))  # by name only
    index.apply("engine", batch_of(removed(2), removed(1)))
    assert resident_tokens(index, pack_tokens(TOKENS)) == 4
    index.apply("engine", batch_of(removed(2, medium="CPU")))
    assert resident_tokens(index, pack_tokens(TOKENS)) == 2
    check_index(index)


def test_a_missing_medium_is_the_gpu(index: KvIndex) -> None:
    index.apply("engine", batch_of(stored([1], None, [1, 2], SIZE, medium=None), removed(1)))
    assert index.kv_blocks == 0


def test_of_groups_without_a_kind_only_the_first_counts(index: KvIndex) -> None:
    index.apply("engine", batch_of(stored([1], None, [1, 2], SIZE), stored([1], None, [1, 2], SIZE, group_idx=1)))
    index.apply("engine", batch_of(removed(1, group_idx=1)))
    assert index.kv_blocks == 1
    assert index.unknown == 0


WHOLE, STATES, WINDOW = 0, 1, 2


def sparse(hashes: list[int], group: int, **fields: object) -> dict[str, object]:
    """Return the event of a cache with the states of recurrent layers, or with the last two blocks of a window."""
    kind: dict[str, object] = {"kv_cache_spec_kind": "mamba"}
    if group == WINDOW:
        kind = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 2 * SIZE + 1}
    return stored(hashes, None, TOKENS, SIZE, group_idx=group, **{**kind, **fields})


def whole(hashes: list[int], tokens: list[int]) -> dict[str, object]:
    return stored(hashes, None, tokens, SIZE, group_idx=WHOLE, kv_cache_spec_kind="full_attention")


def test_full_attention_continues_behind_every_block(index: KvIndex) -> None:
    """Also where nothing is held: no checkpoints would mean that the engine continues nowhere."""
    index.apply("engine", batch_of(stored([9], None, [9, 9], SIZE)))
    index.remember(prompt(TOKENS, 4, 8))
    assert index.changes() == [ResidencyChange(SCOPE, prompt(TOKENS, 4).keys, 0)]
    index.apply("engine", batch_of(stored([1, 2, 3, 4], None, TOKENS, SIZE)))
    assert index.changes() == [ResidencyChange(SCOPE, prompt(TOKENS, 4, 8).keys, 2)]
    index.apply("engine", batch_of(removed(3, 4)))
    assert index.changes() == [ResidencyChange(SCOPE, prompt(TOKENS, 4, 8).keys, 1)]


def test_a_hybrid_model_continues_where_all_its_caches_can(index: KvIndex) -> None:
    index.apply("engine", batch_of(sparse([1, 3, 4], STATES), sparse([2, 3, 4], WINDOW), whole([1, 2, 3, 4], TOKENS)))
    assert resident_tokens(index, pack_tokens(TOKENS)) == 8
    mapped = prompt(TOKENS, 2, 6, 8)
    index.remember(mapped)
    assert index.changes() == [(SCOPE, mapped.keys, 3, (SIZE, (2, 3)))]
    index.apply("engine", batch_of(removed(4, group_idx=STATES)))
    assert resident_tokens(index, pack_tokens(TOKENS)) == 6
    assert index.changes() == [(SCOPE, mapped.keys, 3, (SIZE, (2,)))]
    index.apply("engine", batch_of(removed(2, group_idx=WINDOW)))
    assert resident_tokens(index, pack_tokens(TOKENS)) == 0
    assert index.changes() == [(SCOPE, mapped.keys, 3, (SIZE, ()))]
    check_index(index)


def test_a_sparse_block_matters_to_prompts_that_end_behind_it(index: KvIndex) -> None:
    index.apply("engine", batch_of(sparse([1, 2, 3, 4], WINDOW), whole([1, 2, 3, 4], TOKENS)))
    index.remember(prompt(TOKENS, 4))
    index.remember(prompt(TOKENS, 2, 6, 8))
    assert [change.checkpoints for change in index.changes()] == [(SIZE, (1,)), (SIZE, (1, 2, 3))]
    index.apply("engine", batch_of(removed(2, group_idx=WINDOW)))
    assert [change.checkpoints for change in index.changes()] == [(SIZE, (1, 3))]


def test_a_checkpoint_needs_the_blocks_of_its_own_source(index: KvIndex) -> None:
    index.apply("engine", batch_of(sparse([1], STATES), whole([1, 2], TOKENS[:4])))
    index.wipe("other", complete=True)
    index.apply("other", batch_of(sparse([1, 2], STATES), whole([1, 2], TOKENS[:4])))
    index.remember(prompt(TOKENS[:4], 2, 4))
    assert [change.checkpoints for change in index.changes()] == [(SIZE, (1, 2))]
    index.apply("other", batch_of(removed(2, group_idx=WHOLE)))
    assert [change.checkpoints for change in index.changes()] == [(SIZE, (1,))]


@pytest.mark.parametrize(
    "event",
    [
        sparse([7], STATES),  # an unknown block
        stored([1], None, [1, 2, 3, 4], 2 * SIZE, group_idx=STATES, kv_cache_spec_kind="mamba"),  # larger blocks
        sparse([1], WINDOW, kv_cache_spec_sliding_window=None),
        sparse([1], WINDOW, kv_cache_spec_kind="chunked_local_attention"),
    ],
)
def test_a_sparse_cache_that_is_not_understood_makes_the_state_uncertain(
    index: KvIndex, event: dict[str, object]
) -> None:
    index.apply("engine", batch_of(whole([1, 2], TOKENS[:4]), event))
    assert not index.certain()
    assert index.kv_blocks == 2
    index.remember(prompt(TOKENS[:4], 4))
    assert [change.checkpoints for change in index.changes()] == []


def test_sparse_caches_are_bounded_and_cleared() -> None:
    index = complete_index(max_kv_blocks=6)
    for start in range(0, 60, 4):
        names = [start + 1, start + 2]
        stored_blocks = whole(names, [start, start, start + 1, start + 1])
        index.apply("engine", batch_of(sparse(names, STATES), sparse(names, WINDOW), stored_blocks))
        check_index(index)
    assert index.dropped > 0
    index.apply("engine", batch_of({"type": "AllBlocksCleared"}))
    check_index(index)
    assert index.kv_blocks == 0
    assert index.certain()


@pytest.mark.parametrize(
    "event",
    [
        stored([5], 4, [1, 2], SIZE),  # an unknown parent
        stored([5, 6], None, [1, 2], SIZE),  # fewer tokens than blocks: some are skipped
        stored([5], None, [1, 2, 3], 3),  # another size than this engine's
        stored([5], None, [-1, 2], SIZE),
        stored([5], None, [], 0, medium="CPU"),
        stored([5], None, [1, 2], SIZE, lora_id=3),  # whose adapter has no name
    ],
)
def test_a_skipped_block_makes_the_state_uncertain(index: KvIndex, event: dict[str, object]) -> None:
    index.apply("engine", batch_of(stored([1], None, [9, 9], SIZE)))
    assert index.certain()
    index.apply("engine", batch_of(event))
    assert index.unknown > 0
    assert not index.certain()
    assert index.kv_blocks == 1
    index.apply("engine", batch_of({"type": "AllBlocksCleared"}))
    assert index.certain()
    check_index(index)


def test_one_hash_for_two_blocks_keeps_the_second(index: KvIndex) -> None:
    index.apply("engine", batch_of(stored([1], None, [1, 2], SIZE), stored([1], None, [3, 4], SIZE)))
    assert resident_tokens(index, pack_tokens([3, 4])) == 2
    assert resident_tokens(index, pack_tokens([1, 2])) == 0
    assert not index.certain()
    check_index(index)


def test_two_hashes_for_one_block_are_both_counted(index: KvIndex) -> None:
    index.apply("engine", batch_of(stored([1], None, [1, 2], SIZE), stored([2], None, [1, 2], SIZE), removed(1)))
    assert resident_tokens(index, pack_tokens([1, 2])) == 2
    check_index(index)


def test_images_are_part_of_a_block(index: KvIndex) -> None:
    image = [None, [["image", 0]]]
    index.apply("engine", batch_of(stored([1, 2], None, [1, 2, 3, 4], SIZE, extra_keys=image)))
    assert resident_tokens(index, pack_tokens(TOKENS)) == 2


def test_an_adapter_serves_its_own_blocks(index: KvIndex) -> None:
    adapted = Scope(None, "adapter", None)
    index.apply("engine", batch_of(stored([1], None, [1, 2], SIZE)))
    index.remember(prompt(TOKENS, 2, scope=adapted))  # counts as the base model's: the adapter is not in an event yet
    assert changes_of(index) == []
    event = stored([5], None, [1, 2], SIZE, lora_name="adapter", lora_id=1, extra_keys=[["adapter"]])
    index.apply("engine", batch_of(event))
    assert (index.prompts, index.dropped) == (0, 1)
    index.remember(prompt(TOKENS, 2, scope=adapted))
    index.apply("engine", batch_of(removed(1)))
    assert changes_of(index) == []
    index.apply("engine", batch_of(removed(5)))
    assert changes_of(index) == [(1, 0)]


def test_prompts_wait_for_the_size_of_a_block() -> None:
    index = KvIndex()
    index.remember(prompt(TOKENS, 4, 8))
    assert index.prompts == 1
    index.wipe("engine", complete=True)
    index.apply("engine", batch_of(stored([1, 2], None, TOKENS[:4], SIZE)))
    assert changes_of(index) == [(2, 1)]
    waiting = KvIndex()
    for number in range(300):
        waiting.remember(MappedPrompt(SCOPE, None, (b"%d" % number,), pack_tokens([number, 1]), (2,)))
    assert (waiting.prompts, waiting.dropped) == (256, 44)


def test_engines_may_have_different_block_sizes() -> None:
    index = KvIndex()
    for name in ("small", "large"):
        index.wipe(name, complete=True)
    index.apply("small", batch_of(stored([1], None, TOKENS[:2], 2)))
    index.apply("large", batch_of(stored([1], None, TOKENS[:4], 4)))
    index.remember(prompt(TOKENS, 4, 8))
    assert changes_of(index) == [(2, 1)]
    assert resident_tokens(index, pack_tokens(TOKENS)) == 4
    index.apply("large", batch_of(removed(1)))
    assert changes_of(index) == [(1, 0)]
    check_index(index)


def test_a_restarted_source_may_change_its_block_size(index: KvIndex) -> None:
    index.apply("engine", batch_of(stored([1], None, TOKENS[:2], 2)))
    index.wipe("engine", complete=True)
    index.apply("engine", batch_of(stored([1], None, TOKENS[:4], 4)))
    assert resident_tokens(index, pack_tokens(TOKENS)) == 4
    assert index.certain()


def test_sources_beyond_the_bound_are_dropped() -> None:
    index = KvIndex(max_sources=1)
    index.apply("a", batch_of(stored([1], None, TOKENS[:2], SIZE)))
    index.apply("b", batch_of(stored([1], None, TOKENS[:4], 4)))
    index.wipe("b", complete=True)
    assert (index.sources, index.kv_blocks, index.dropped) == (1, 1, 1)


def test_blocks_dropped_to_stay_within_bounds_are_not_reported_as_gone() -> None:
    index = complete_index(max_kv_blocks=8)
    index.apply("engine", batch_of(stored([1, 2], None, TOKENS[:4], SIZE)))
    index.remember(prompt(TOKENS, 2, 4))
    assert changes_of(index) == []
    for number in range(20):
        index.apply("engine", batch_of(stored([100 + number], None, [50 + number, 0], SIZE)))
    assert index.kv_blocks <= 8
    assert index.dropped >= 14
    assert not index.certain()
    assert changes_of(index) == []
    check_index(index)


def test_the_least_recently_served_prompt_is_forgotten() -> None:
    index = complete_index(max_prompts=2)
    index.apply("engine", batch_of(stored([1], None, [1, 1], SIZE), stored([2], None, [2, 2], SIZE)))
    first, second, third = (prompt([number, number], 2) for number in (1, 2, 3))
    index.remember(first)
    index.remember(second)
    index.remember(first)
    index.remember(third)
    assert changes_of(index) == [(1, 0)]
    index.apply("engine", batch_of(removed(1), removed(2)))
    assert changes_of(index) == [(1, 0)]  # of the first only
    assert index.prompts == 2
    check_index(index)


def test_a_prompt_beyond_the_bound_is_dropped() -> None:
    index = KvIndex(max_prompt_blocks=3)
    index.apply("engine", batch_of(stored([1], None, [1, 1], SIZE)))
    index.remember(prompt(TOKENS, 8))
    assert (index.prompts, index.dropped) == (0, 1)
    check_index(index)


def test_the_same_blocks_in_another_prompt_replace_it(index: KvIndex) -> None:
    """This happens when the text before them changes."""
    index.apply("engine", batch_of(stored([1, 2], None, TOKENS[:4], SIZE)))
    index.remember(MappedPrompt(SCOPE, None, (b"a",), pack_tokens(TOKENS[:4]), (4,)))
    index.remember(MappedPrompt(SCOPE, None, (b"a",), pack_tokens([9, 9, 9, 9]), (4,)))
    assert index.prompts == 1
    assert changes_of(index) == [(1, 0)]
    check_index(index)


@pytest.mark.parametrize("bound", ["max_kv_blocks", "max_prompts", "max_prompt_blocks", "max_sources"])
def test_bounds_are_checked(bound: str) -> None:
    with pytest.raises(ValueError, match=bound):
        complete_index(**{bound: 0})


class AgainstAModel(RuleBasedStateMachine):
    """Engines that store, copy, move, remove, clear, restart and lose events.

    The model counts, for each source and medium, the copies of each token string. It also follows what a planner
    assumes: a served prompt is resident, until a change is reported.
    """

    SOURCES = ("a", "b")
    MEDIA = ("GPU", "CPU")

    @initialize()
    def start(self) -> None:
        self.index = KvIndex(max_prompts=1_000)
        self.held: dict[str, dict[str, Counter[tuple[int, ...]]]] = {}
        self.complete: dict[str, bool] = {}
        self.names: dict[tuple[str, tuple[int, ...]], int] = {}
        self.assumed: dict[tuple[bytes, ...], int | None] = {}
        self.prompts: dict[tuple[bytes, ...], tuple[list[int], tuple[int, ...]]] = {}
        for name in self.SOURCES:
            self.held[name] = {medium: Counter() for medium in self.MEDIA}
            self.complete[name] = True
            self.index.wipe(name, complete=True)
            root = (250 + len(self.complete), 0)
            self.index.apply(name, batch_of(stored([self.name(name, root)], None, root, SIZE)))
            self.held[name]["GPU"][root] += 1

    def name(self, source: str, tokens: tuple[int, ...]) -> int:
        return self.names.setdefault((source, tokens), len(self.names) + 1)

    def count(self, source: str, tokens: tuple[int, ...]) -> int:
        return sum(medium[tokens] for medium in self.held[source].values())

    @rule(
        source=st.sampled_from(SOURCES),
        medium=st.sampled_from(MEDIA),
        path=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        at=st.integers(0, 4),
    )
    def store(self, source: str, medium: str, path: list[int], at: int) -> None:
        """Store a run of blocks after a parent that the source holds."""
        tokens = tuple(token for block in path for token in (block, block))
        start = min(at, len(path) - 1)
        while start and not self.count(source, tokens[: SIZE * start]):
            start -= 1
        ends = [SIZE * (position + 1) for position in range(start, len(path))]
        names = [self.name(source, tokens[:end]) for end in ends]
        parent = self.name(source, tokens[: SIZE * start]) if start else None
        self.index.apply(source, batch_of(stored(names, parent, tokens[SIZE * start :], SIZE, medium=medium)))
        for end in ends:
            self.held[source][medium][tokens[:end]] += 1

    @rule(source=st.sampled_from(SOURCES), medium=st.sampled_from(MEDIA), data=st.data())
    def remove(self, source: str, medium: str, data: st.DataObject) -> None:
        choices = sorted(tokens for tokens, count in self.held[source][medium].items() if count)
        if choices:
            tokens = data.draw(st.sampled_from(choices))
            self.held[source][medium][tokens] -= 1
            self.index.apply(source, batch_of(removed(self.name(source, tokens), medium=medium)))

    @rule(source=st.sampled_from(SOURCES), how=st.sampled_from(["cleared", "restarted", "lost"]))
    def empty(self, source: str, how: str) -> None:
        if how == "cleared":
            self.index.apply(source, batch_of({"type": "AllBlocksCleared"}))
        else:
            self.index.wipe(source, complete=how == "restarted")
        self.complete[source] = how != "lost"
        self.held[source] = {medium: Counter() for medium in self.MEDIA}

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=5), cuts=st.sets(st.integers(1, 10), min_size=1))
    def serve(self, path: list[int], cuts: set[int]) -> None:
        tokens = [token for block in path for token in (block, block)]
        ends = tuple(sorted({min(cut, len(tokens)) for cut in cuts}))
        mapped = prompt(tokens, *ends)
        self.prompts[mapped.keys] = (tokens, ends)
        self.index.remember(mapped)
        for keys, assumed in self.assumed.items():
            if assumed is not None:
                self.assumed[keys] = max(assumed, common(keys, mapped.keys))
        self.assumed[mapped.keys] = len(ends)

    def resident(self, source: str, tokens: list[int]) -> int:
        length = 0
        while length < len(tokens) // SIZE and self.count(source, tuple(tokens[: SIZE * (length + 1)])):
            length += 1
        return length * SIZE

    def stops(self, source: str, tokens: list[int]) -> list[int]:
        """Return the numbers of tokens behind which a source continues."""
        return list(range(SIZE, self.resident(source, tokens) + 1, SIZE))

    def apply(self, change: ResidencyChange) -> None:
        """Apply a change as a planner does."""
        for keys in self.assumed:
            shared = common(keys, change.keys)
            assumed = self.assumed[keys]
            if shared > change.resident_blocks:
                self.assumed[keys] = change.resident_blocks
            elif assumed is not None:
                self.assumed[keys] = max(assumed, shared)

    @precondition(lambda self: hasattr(self, "index"))
    @invariant()
    def agrees(self) -> None:
        changes = self.index.changes()
        check_index(self.index)
        certain = all(self.complete.values())
        assert self.index.certain() is certain
        for change in changes:
            self.apply(change)
        for keys, (tokens, ends) in self.prompts.items():
            path = tokens[: ends[-1]]
            held = max(self.resident(source, path) for source in self.SOURCES)
            usable = max([0, *(stop for source in self.SOURCES for stop in self.stops(source, path))])
            assert resident_tokens(self.index, pack_tokens(path)) == usable
            count = sum(end // SIZE * SIZE <= held for end in ends)
            if certain:
                assert self.assumed[keys] == count
            else:  # engines may hold more than the index has
                assumed = self.assumed[keys]
                assert assumed is None or assumed >= count


def common(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


class HybridAgainstAModel(AgainstAModel):
    """The same for a hybrid model, whose sparse caches store and remove blocks at any time."""

    @initialize()
    def start(self) -> None:
        self.sparse: dict[tuple[str, int], Counter[tuple[int, ...]]] = {}
        self.checkpoints: dict[tuple[bytes, ...], set[int]] = {}
        super().start()
        for source in self.SOURCES:
            self.announce(source)

    def announce(self, source: str) -> None:
        """Show the caches of a source, with a block that no prompt has."""
        root = (240, 240)
        name = self.name(source, root)
        self.index.apply(source, batch_of(sparse([name], STATES), sparse([name], WINDOW), whole([name], [*root])))
        self.held[source]["GPU"][root] += 1
        for group in (STATES, WINDOW):
            self.sparse[source, group] = Counter([root])

    @rule(
        source=st.sampled_from(AgainstAModel.SOURCES),
        path=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        missing=st.tuples(st.sets(st.integers(0, 5), max_size=1), st.sets(st.integers(0, 5), max_size=1)),
    )
    def store_hybrid(self, source: str, path: list[int], missing: tuple[set[int], set[int]]) -> None:
        """Store a whole path, and most of its blocks in the sparse caches."""
        self.store(source, "GPU", path, 0)
        tokens = tuple(token for block in path for token in (block, block))
        for group, left_out in zip((STATES, WINDOW), missing, strict=True):
            chosen = [tokens[: SIZE * blocks] for blocks in range(1, len(path) + 1) if blocks not in left_out]
            self.index.apply(source, batch_of(sparse([self.name(source, block) for block in chosen], group)))
            self.sparse[source, group].update(chosen)

    @rule(source=st.sampled_from(AgainstAModel.SOURCES), group=st.sampled_from([STATES, WINDOW]), data=st.data())
    def remove_sparse(self, source: str, group: int, data: st.DataObject) -> None:
        held = self.sparse[source, group]
        if held:
            tokens = data.draw(st.sampled_from(sorted(held)))
            self.index.apply(source, batch_of(removed(self.name(source, tokens), group_idx=group)))
            held[tokens] -= 1
            held += Counter()  # without the zeros

    @rule(source=st.sampled_from(AgainstAModel.SOURCES), how=st.sampled_from(["cleared", "restarted", "lost"]))
    def empty(self, source: str, how: str) -> None:
        super().empty(source, how)
        self.announce(source)

    def stops(self, source: str, tokens: list[int]) -> list[int]:
        stops: list[int] = []
        for stop in super().stops(source, tokens):
            blocks = [tuple(tokens[:end]) for end in range(SIZE, stop + 1, SIZE)]
            window = all(self.sparse[source, WINDOW][block] for block in blocks[-2:])
            if window and self.sparse[source, STATES][blocks[-1]]:
                stops.append(stop)
        return stops

    def apply(self, change: ResidencyChange) -> None:
        super().apply(change)
        if change.checkpoints is None:
            return
        for keys in self.assumed:
            shared = min(common(keys, change.keys), change.resident_blocks)
            others = {end for end in self.checkpoints.get(keys, ()) if end > shared}
            self.checkpoints[keys] = others | {end for end in change.checkpoints.ends if end <= shared}

    @precondition(lambda self: hasattr(self, "index"))
    @invariant()
    def agrees(self) -> None:
        super().agrees()
        if not self.index.certain():
            return
        for keys, (tokens, ends) in self.prompts.items():
            path = tokens[: ends[-1]]
            stops = {stop for source in self.SOURCES for stop in self.stops(source, path)}
            expected = {1 + sum(end < stop for end in ends) for stop in stops}
            resident = self.assumed[keys] or 0
            assert {end for end in self.checkpoints.get(keys, ()) if end <= resident} == {
                end for end in expected if end <= resident
            }


AgainstAModel.TestCase.settings = HybridAgainstAModel.TestCase.settings = settings()
TestAgainstAModel = AgainstAModel.TestCase
TestHybridAgainstAModel = HybridAgainstAModel.TestCase
