"""The hot loops, in plain Python and compiled, compared with simple references."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from warmprefix_kernels import overlap_loops, tree_loops
from warmprefix_kernels.machine import PATH, Machine, Merges, forest_of, index_of, machine, room_for, sets_of
from warmprefix_kernels.overlap_loops import Index, Room, Sets
from warmprefix_kernels.tree_loops import Forest

PLAIN = machine(0)
COMPILED = machine(10**12)
machines = pytest.mark.parametrize("machine_", [pytest.param(PLAIN, id="plain"), pytest.param(COMPILED, id="compiled")])


class Instance(NamedTuple):
    contexts: list[list[int]]
    """Ascending."""
    tokens: list[int]

    def shared(self, *contexts: int) -> int:
        """Return the tokens that all of these contexts share."""
        return weight(set.intersection(*(set(self.contexts[x]) for x in contexts)), self.tokens)


def weight(blocks: Sequence[int] | set[int], tokens: Sequence[int]) -> int:
    return sum(tokens[block] for block in blocks)


@st.composite
def instances(draw: st.DrawFn, contexts: int = 9, blocks: int = 8) -> Instance:
    """Draw contexts of few blocks with few lengths, which share much and tie often."""
    tokens = draw(st.lists(st.sampled_from([1, 2, 2, 3, 7, 1_000_000_007]), min_size=1, max_size=blocks))
    sets = st.sets(st.integers(0, len(tokens) - 1))
    return Instance([sorted(each) for each in draw(st.lists(sets, min_size=1, max_size=contexts))], tokens)


def large_instance(seed: int, contexts: int, blocks: int, size: int) -> Instance:
    """Return Zipf-like contexts, with lists that are long enough for all branches."""
    rng = random.Random(seed)
    popular = [1 / (1 + block) for block in range(blocks)]
    chosen = [sorted(set(rng.choices(range(blocks), popular, k=rng.randrange(size)))) for _ in range(contexts)]
    # Rare blocks get low numbers, as in the planner.
    return Instance(
        [sorted(blocks - 1 - block for block in each) for each in chosen], [rng.randrange(1, 50) for _ in range(blocks)]
    )


def indexed(instance: Instance, machine_: Machine) -> tuple[Sets, Index, Room]:
    sets = sets_of(instance.contexts, machine_)
    index = index_of(sets, machine_.ints(instance.tokens), machine_)
    longest = max(map(len, instance.contexts))
    return sets, index, room_for(2 * len(instance.contexts), longest, 4, machine_)


def set_of(v: int, sets: Sets) -> list[int]:
    return [int(block) for block in sets.items[sets.start[v] : sets.start[v] + sets.size[v]]]


def check_index(sets: Sets, index: Index) -> None:
    """Check that every block's list has exactly its holders and their places."""
    holders: dict[int, list[int]] = {}
    for v in range(len(sets.start)):
        for i in range(sets.start[v], sets.start[v] + sets.size[v]):
            holders.setdefault(int(sets.items[i]), []).append(v)
            assert index.item[index.place[i]] == i
            assert index.entries[index.place[i]] == v
    for block in range(len(index.start)):
        listed = [int(v) for v in index.entries[index.start[block] : index.start[block] + index.size[block]]]
        assert sorted(listed) == holders.get(block, [])


# -- best partners -----------------------------------------------------------------------------------------------------


def check_partners(instance: Instance, machine_: Machine, slack: int) -> None:
    sets, index, room = indexed(instance, machine_)
    check_index(sets, index)
    n = len(instance.contexts)
    for x in range(n):
        most = max((instance.shared(x, other) for other in range(n) if other != x), default=0)
        for first in {-1, 0, x, n - 1, (x + 1) % n}:
            partner, best = machine_.run.best_partner(x, most + slack, first, sets, index, room)
            assert best == most
            assert (partner == -1) == (most == 0)
            assert partner == -1 or (partner != x and instance.shared(x, int(partner)) == most)
            assert not any(room.shared)


@machines
@given(instance=instances(), slack=st.sampled_from([0, 1, 10**12]))
def test_best_partner_is_exact(machine_: Machine, instance: Instance, slack: int) -> None:
    check_partners(instance, machine_, slack)


@machines
@pytest.mark.parametrize("size", [5, 25])
def test_best_partner_is_exact_with_long_lists(machine_: Machine, size: int) -> None:
    check_partners(large_instance(size, 120, 60, size), machine_, slack=0)
    check_partners(large_instance(size, 120, 60, size), machine_, slack=10**12)


@machines
@given(instance=instances(), begin=st.integers(0, 3), step=st.integers(1, 4))
def test_best_overlaps_are_exact_in_their_range(machine_: Machine, instance: Instance, begin: int, step: int) -> None:
    sets, index, room = indexed(instance, machine_)
    n = len(instance.contexts)
    best = machine_.ints([weight(context, instance.tokens) for context in instance.contexts])
    before = [int(most) for most in best]
    machine_.run.best_overlaps(begin, n, step, best, sets, index, room)
    for x in range(n):
        exact = max((instance.shared(x, other) for other in range(n) if other != x), default=0)
        assert best[x] == (exact if x in range(begin, n, step) else before[x])


# -- agglomeration -----------------------------------------------------------------------------------------------------


def agglomerated(instance: Instance, machine_: Machine) -> tuple[Merges, Sets, Index]:
    sets, index, room = indexed(instance, machine_)
    n = len(instance.contexts)
    left, right = machine_.zeros(n), machine_.zeros(n)
    bound = machine_.ints([weight(context, instance.tokens) for context in instance.contexts])
    count = machine_.run.agglomerate(
        sets, index, room, bound, machine_.ints(range(n)), left, right, n,
        machine_.zeros(n, -1), machine_.zeros(n), machine_.zeros(n), machine_.zeros(n, -1),
    )  # fmt: skip
    assert not any(room.shared)
    merges = Merges(n)
    merges.left, merges.right = [int(v) for v in left[:count]], [int(v) for v in right[:count]]
    return merges, sets, index


def check_greedy(instance: Instance, merges: Merges) -> None:
    """Check that each merge joins a pair that shares most, until none shares any."""
    clusters = {x: set(context) for x, context in enumerate(instance.contexts)}

    def most() -> int:
        return max((weight(a & b, instance.tokens) for a, b in combinations(clusters.values(), 2)), default=0)

    for new, (a, b) in enumerate(zip(merges.left, merges.right, strict=True), len(instance.contexts)):
        greatest = most()
        clusters[new] = clusters.pop(a) & clusters.pop(b)
        assert 0 < weight(clusters[new], instance.tokens) == greatest
    assert most() == 0


@machines
@given(instance=instances())
@example(instance=Instance([[0]] * 9, [5]))
@example(instance=Instance([[]], [5]))
def test_pair_that_shares_most_is_merged_first(machine_: Machine, instance: Instance) -> None:
    merges, sets, index = agglomerated(instance, machine_)
    check_greedy(instance, merges)
    check_index(sets, index)


@machines
@pytest.mark.parametrize("size", [5, 25])
def test_pair_that_shares_most_is_merged_first_in_a_large_batch(machine_: Machine, size: int) -> None:
    instance = large_instance(size, 100, 60, size)
    merges, sets, index = agglomerated(instance, machine_)
    check_greedy(instance, merges)
    check_index(sets, index)


# -- upper bound -------------------------------------------------------------------------------------------------------


@machines
@given(instance=instances(), data=st.data())
def test_spanning_forest_has_maximum_weight(machine_: Machine, instance: Instance, data: st.DataObject) -> None:
    n = len(instance.contexts)
    held = data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    sets, index, room = indexed(instance, machine_)
    found = machine_.run.spanning_forest(machine_.ints(held), machine_.zeros(n), sets, index, room)
    assert found == kruskal(instance, held)
    assert not any(room.shared)


def kruskal(instance: Instance, held: Sequence[int]) -> int:
    """Return the weight of a maximum spanning tree of contexts and the cache."""
    n = len(instance.contexts)
    edges = [(instance.shared(a, b), a, b) for a, b in combinations(range(n), 2)]
    edges += [(tokens, x, n) for x, tokens in enumerate(held)]
    component = list(range(n + 1))
    total = 0
    for tokens, a, b in sorted(edges, reverse=True):
        if component[a] != component[b]:
            total += tokens
            component = [component[a] if c == component[b] else c for c in component]
    return total


# -- local search ------------------------------------------------------------------------------------------------------


def check_forest(instance: Instance, forest: Forest, exact: bool) -> None:
    """Check trees, the sets and weights of merges, and the stack of unused merges.

    With `exact`, a merge's set must be the whole intersection, because there was always room for it.
    """
    n = len(instance.contexts)
    sets, tokens = forest.sets, instance.tokens
    spare = [int(v) for v in forest.free[1 : 1 + forest.free[0]]]
    assert len(set(spare)) == len(spare)
    for v in range(2 * n):
        blocks = set_of(v, sets)
        assert blocks == sorted(set(blocks))
        assert forest.weight[v] == weight(blocks, tokens)
        assert sets.size[v] <= forest.space[v]
        children = [int(child) for child in (forest.left[v], forest.right[v])]
        if v < n:
            assert children == [-1, -1]
            assert blocks == instance.contexts[v]
        elif v in spare:
            assert [*children, forest.parent[v], *blocks] == [-1, -1, -1]
        else:
            assert all(forest.parent[child] == v for child in children)
            assert children[0] != children[1]
            common = set(set_of(children[0], sets)) & set(set_of(children[1], sets))
            assert set(blocks) == common if exact else set(blocks) <= common
        if forest.parent[v] >= 0:
            assert v in (forest.left[forest.parent[v]], forest.right[forest.parent[v]])
        up, steps = v, 0
        while up >= 0:
            up, steps = forest.parent[up], steps + 1
            assert steps <= 2 * n, "a circle"
    spaces = sorted((int(sets.start[v]), int(forest.space[v])) for v in range(2 * n) if forest.space[v])
    assert all(start + space <= after for (start, space), (after, _) in pairwise(spaces))
    assert forest.used[0] <= len(sets.items)
    assert not spaces or sum(spaces[-1]) <= forest.used[0]


def planted(instance: Instance, rng: random.Random, machine_: Machine, spare_sets: int) -> Forest:
    """Return trees of random merges, with room for some sets of the largest size."""
    merges = Merges(len(instance.contexts))
    roots = list(range(merges.first))
    for _ in range(rng.randrange(merges.first)):
        merges.left.append(roots.pop(rng.randrange(len(roots))))
        merges.right.append(roots.pop(rng.randrange(len(roots))))
        roots.append(merges.first + len(merges.left) - 1)
    forest = forest_of(instance.contexts, instance.tokens, merges, machine_)
    longest = max(map(len, instance.contexts))
    items = [int(block) for block in forest.sets.items[: forest.used[0]]] + [0] * spare_sets * (longest + 1)
    return forest._replace(sets=forest.sets._replace(items=machine_.ints(items)))


def saved(forest: Forest, n: int) -> int:
    return int(sum(forest.weight[n:]))


def has_room(forest: Forest, room: Room) -> bool:
    """Check the preconditions of `detach` and `attach`."""
    return bool(forest.used[0] + len(room.buffer) <= len(forest.sets.items))


class Step(NamedTuple):
    what: str
    nodes: list[int]


@st.composite
def steps(draw: st.DrawFn) -> list[Step]:
    """An operation and its nodes, modulo the number of nodes."""
    nodes = st.lists(st.integers(0, 63), min_size=1, max_size=20)
    step = st.builds(Step, st.sampled_from(["regraft", "uproot", "move"]), nodes)
    return draw(st.lists(step, min_size=1, max_size=8))


def take(step: Step, instance: Instance, forest: Forest, index: Index, room: Room, machine_: Machine) -> int:
    """Do one step; return the tokens that it reports as gained."""
    n, run = len(instance.contexts), machine_.run
    nodes = machine_.ints([node % (2 * n) for node in step.nodes])
    if step.what == "regraft":
        return int(run.regraft(nodes, n, forest, index, room, 8 + 8 * len(nodes)))
    if step.what == "uproot":
        return -int(run.uproot(nodes, forest, room, index.tokens))
    u, v = int(nodes[0]), int(nodes[-1])
    if forest.parent[u] < 0 or not has_room(forest, room):
        return 0
    sibling, lost = run.detach(u, forest, room.buffer, index.tokens)
    is_spare = v >= n and forest.left[v] < 0
    place = int(sibling) if is_spare or v in below(u, forest, n) else v
    return int(run.attach(u, place, forest, room.buffer, index.tokens)) - int(lost)


def below(u: int, forest: Forest, n: int) -> list[int]:
    nodes = [u]
    for v in nodes:  # the list grows while it is read
        if v >= n:
            nodes += [int(forest.left[v]), int(forest.right[v])]
    return nodes


def plain(forest: Forest) -> dict[str, Any]:
    parts = {name: [int(v) for v in part] for name, part in forest._asdict().items() if name != "sets"}
    return {**parts, **{name: [int(v) for v in part] for name, part in forest.sets._asdict().items()}}


@given(instances(), st.randoms(use_true_random=False), steps())
def test_forests_stay_consistent_and_gains_are_correct(
    instance: Instance, rng: random.Random, todo: list[Step]
) -> None:
    check_steps(instance, planted(instance, rng, PLAIN, 10_000), todo, exact=True)


@given(instances(), st.randoms(use_true_random=False), steps(), st.integers(0, 12))
def test_forests_stay_consistent_with_little_room(
    instance: Instance, rng: random.Random, todo: list[Step], spare_sets: int
) -> None:
    check_steps(instance, planted(instance, rng, PLAIN, spare_sets), todo, exact=False)


def check_steps(instance: Instance, forest: Forest, todo: list[Step], exact: bool) -> None:
    n = len(instance.contexts)
    _, index, room = indexed(instance, PLAIN)
    check_forest(instance, forest, exact=True)
    for step in todo:
        before = saved(forest, n)
        gained = take(step, instance, forest, index, room, PLAIN)
        assert saved(forest, n) - before == gained
        assert gained >= 0 or step.what != "regraft" or not exact
        assert not any(room.shared)
        check_forest(instance, forest, exact)


@given(instances(), st.randoms(use_true_random=False), steps(), st.integers(0, 12))
def test_compiled_and_plain_loops_give_the_same_forest(
    instance: Instance, rng: random.Random, todo: list[Step], spare_sets: int
) -> None:
    state = rng.getstate()
    outcomes: list[tuple[list[int], dict[str, Any]]] = []
    for machine_ in (PLAIN, COMPILED):
        rng.setstate(state)
        forest = planted(instance, rng, machine_, spare_sets)
        _, index, room = indexed(instance, machine_)
        gained = [take(step, instance, forest, index, room, machine_) for step in todo]
        outcomes.append((gained, plain(forest)))
    assert outcomes[0] == outcomes[1]


@machines
def test_set_without_room_to_grow_is_updated_later(machine_: Machine) -> None:
    """The root has no room for {0, 1, 2}; after [1] joins, the contexts share {1}."""
    instance = Instance([[0], [0, 1, 2], [0, 1, 2], [1]], [1, 1, 1])
    merges = Merges(4)
    merges.left, merges.right = [0, 4], [1, 2]
    forest = forest_of(instance.contexts, instance.tokens, merges, machine_)
    forest = forest._replace(sets=forest.sets._replace(items=forest.sets.items[: forest.used[0]]))
    _, index, room = indexed(instance, machine_)
    assert machine_.run.detach(0, forest, room.buffer, index.tokens) == (1, 1)
    assert set_of(5, forest.sets) == [0], "no room, and yet it grew"
    machine_.run.attach(3, 1, forest, room.buffer, index.tokens)
    check_forest(instance, forest, exact=True)
    assert set_of(5, forest.sets) == [1]


@machines
def test_node_that_saves_more_alone_stays_a_root(machine_: Machine) -> None:
    instance = Instance([[0, 1], [0, 1, 2], [2]], [3, 2, 1])
    merges = Merges(3)
    merges.left, merges.right = [2, 3], [1, 0]
    forest = forest_of(instance.contexts, instance.tokens, merges, machine_)
    _, index, room = indexed(instance, machine_)
    assert machine_.run.regraft(machine_.ints([2]), 3, forest, index, room, 100) == 4
    assert (forest.parent[2], saved(forest, 3)) == (-1, 5)


@machines
@pytest.mark.parametrize("size", [4, 12])
def test_each_pass_of_regrafting_gains_less(machine_: Machine, size: int) -> None:
    instance = large_instance(size, 150, 60, size)
    n = len(instance.contexts)
    forest = planted(instance, random.Random(size), machine_, 10_000)
    _, index, room = indexed(instance, machine_)
    totals = [saved(forest, n)]
    for _ in range(4):
        gained = machine_.run.regraft(machine_.ints(range(2 * n)), n, forest, index, room, 4_096)
        totals.append(saved(forest, n))
        assert totals[-1] - totals[-2] == gained
        check_forest(instance, forest, exact=True)
    assert totals[1] > totals[0]
    assert totals == sorted(totals)


@settings(suppress_health_check=[HealthCheck.filter_too_much])  # many forests have no node u, or no partner for it
@given(instances(contexts=7, blocks=6), st.randoms(use_true_random=False), st.integers(0, 63))
def test_node_moves_to_the_best_place_of_all(instance: Instance, rng: random.Random, number: int) -> None:
    """With enough nominees and entries, no place is missed."""
    n = len(instance.contexts)
    u = number % (2 * n)
    forest = planted(instance, rng, PLAIN, 10_000)
    assume(forest.sets.size[u] > 0)
    _, index, room = indexed(instance, PLAIN)
    room = room._replace(nominees=[0] * n)
    assume(tree_loops.nominate(u, n, forest, index, room, 10_000) > 0)  # nodes without partners do not move
    base = saved(forest, n)
    best = base
    if forest.parent[u] >= 0:
        alone = copied(forest)
        tree_loops.detach(u, alone, room.buffer, instance.tokens)
        best = max(best, saved(alone, n))
        for v in range(2 * n):
            is_there = v < n or alone.left[v] >= 0
            if is_there and v not in below(u, alone, n):
                tried = copied(alone)
                tree_loops.attach(u, v, tried, room.buffer, instance.tokens)
                best = max(best, saved(tried, n))
    else:
        for v in range(2 * n):
            if (v < n or forest.left[v] >= 0) and v not in below(u, forest, n):
                tried = copied(forest)
                tree_loops.attach(u, v, tried, room.buffer, instance.tokens)
                best = max(best, saved(tried, n))
    assert tree_loops.regraft([u], n, forest, index, room, 10_000) == best - base


def copied(forest: Forest) -> Forest:
    parts = {name: list(part) for name, part in forest._asdict().items() if name != "sets"}
    return Forest(**parts, sets=Sets(*map(list, forest.sets)))


def test_place_below_the_longest_path_is_not_considered() -> None:
    """Each context holds the next one's blocks; the way up is longer than `PATH`."""
    n = PATH + 50
    instance = Instance([list(range(x + 1)) for x in range(n)], [1] * n)
    merges = Merges(n)
    for x in range(n - 1):
        merges.left.append(n - 1 if x == 0 else n + x - 1)
        merges.right.append(n - 2 - x)
    forest = forest_of(instance.contexts, instance.tokens, merges, PLAIN)
    before = saved(forest, n)
    _, index, room = indexed(instance, PLAIN)
    assert tree_loops.regraft(range(2 * n), n, forest, index, room, 4_096) == saved(forest, n) - before
    check_forest(instance, forest, exact=False)


def test_walked_entries_are_counted() -> None:
    _, index, room = indexed(Instance([[0, 1], [0], [1]], [2, 3]), PLAIN)
    sets = sets_of([[0, 1], [0], [1]], PLAIN)
    overlap_loops.best_partner(0, 5, -1, sets, index, room)
    assert room.walked[0] > 0


def test_compiled_loops_release_the_gil() -> None:
    assert COMPILED.compiled
    assert all(getattr(COMPILED.run, name).targetoptions["nogil"] for name in overlap_loops.HOT + tree_loops.HOT)


def test_numbers_beyond_64_bits_are_computed_in_python() -> None:
    assert machine(10**12, (1 << 62) - 1).compiled
    assert not machine(10**12, 1 << 62).compiled
