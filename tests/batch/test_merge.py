from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import count, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmprefix.batch import merge
from warmprefix.batch.merge import MergePlanner
from warmprefix.batch.planners import Placed, RelevancePlanner, no_progress
from warmprefix.batch.scope_plan import serve
from warmprefix_baselines.planners import FrequencyPlanner
from warmprefix_kernels.machine import machine

Contexts = list[list[int]]

TOKENS = [3, 5, 1, 0, 8, 2, 2, 9]
PLAIN = machine(0)

batches = st.lists(st.lists(st.integers(0, 7), max_size=6, unique=True), max_size=12)


def arrange(contexts: Contexts, tokens: Sequence[int] = TOKENS, seconds_per_block: float | None = None) -> list[Placed]:
    return MergePlanner(seconds_per_block, device="cpu").arrange(contexts, tokens, no_progress)


def saved(plan: Sequence[Placed], tokens: Sequence[int] = TOKENS) -> int:
    return sum(found.tokens for found in serve(plan, tokens, None, ()))


def is_complete(plan: Sequence[Placed], contexts: Contexts) -> bool:
    return sorted(placed.context for placed in plan) == list(range(len(contexts))) and all(
        sorted(order) == sorted(contexts[i]) for i, order in plan
    )


def zipf(seed: int, contexts: int, blocks: int = 300, k: int = 10) -> tuple[Contexts, list[int]]:
    rng = random.Random(seed)
    popular = [1 / (1 + block) for block in range(blocks)]
    listed = [list(dict.fromkeys(rng.choices(range(blocks), popular, k=k))) for _ in range(contexts)]
    return listed, [rng.randrange(50, 400) for _ in range(blocks)]


def test_example_of_the_paper() -> None:
    """ContextPilot, section 4: three contexts share {2, 1}, two of them also 4."""
    contexts = [[2, 1, 3], [2, 6, 1], [4, 1, 0]]
    plan = arrange(contexts, [10] * 7)
    assert saved(plan, [10] * 7) == 30
    assert [order[0] for _, order in plan] == [1, 1, 1]


def test_plans_of_small_batches_are_optimal() -> None:
    found = most = 0
    for seed in range(60):
        rng = random.Random(seed)
        contexts = [rng.sample(range(6), 3) for _ in range(4)]
        found += saved(arrange(contexts))
        orders = product(*(permutations(context) for context in contexts))
        prefixes = ({order[:end] for order in chosen for end in (1, 2, 3)} for chosen in orders)
        everything = sum(TOKENS[block] for context in contexts for block in context)
        most += everything - min(sum(TOKENS[prefix[-1]] for prefix in held) for held in prefixes)
    assert found >= 0.99 * most


@pytest.mark.parametrize("contexts", [60, 400])
def test_plan_saves_more_than_simpler_planners(contexts: int) -> None:
    listed, tokens = zipf(1, contexts)
    simpler = [
        saved(planner.arrange(listed, tokens, no_progress), tokens)
        for planner in (FrequencyPlanner(), RelevancePlanner())
    ]
    assert saved(arrange(listed, tokens), tokens) > max(simpler)


@settings(max_examples=settings().max_examples // 3)
@given(contexts=batches)
def test_compiled_and_plain_loops_give_the_same_plan(contexts: Contexts) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "machine", lambda *_: PLAIN)
        expected = arrange(contexts)
        patch.setattr(merge, "machine", lambda *_: machine(10**12))
        assert arrange(contexts) == expected


@pytest.mark.parametrize("work", [None, 20_000, 0], ids=["whole", "in groups", "top-down"])
def test_compiled_and_plain_loops_give_the_same_plan_of_a_large_batch(
    work: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, tokens = zipf(2, 300)
    monkeypatch.setattr(merge, "COMPILING_PAYS_FROM", 10**15)  # the same effort for both
    if work is not None:
        monkeypatch.setattr(merge, "_PLAIN", merge._PLAIN._replace(group_work=work, start_entries=0))
    monkeypatch.setattr(merge, "machine", lambda *_: PLAIN)
    expected = arrange(listed, tokens)
    monkeypatch.setattr(merge, "machine", lambda *_: machine(10**12))
    assert arrange(listed, tokens) == expected
    assert is_complete(expected, listed)


@given(contexts=batches)
def test_grouped_plan_is_complete(contexts: Contexts) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "_PLAIN", merge._PLAIN._replace(group_work=20))
        assert is_complete(arrange(contexts), contexts)


def test_groups_of_a_sparse_batch_do_not_read_all_blocks() -> None:
    """A ring: every block in two contexts, thousands of groups of two."""
    n = 6_000
    contexts = [[i, (i + 1) % n] for i in range(n)]
    plan = arrange(contexts, [10] * n)
    assert is_complete(plan, contexts)
    assert saved(plan, [10] * n) == 10 * n // 2


@given(contexts=batches)
def test_blocks_without_tokens_do_not_change_the_plan(contexts: Contexts) -> None:
    nothing = [0] * 8
    plan = arrange(contexts, nothing)
    assert [order for _, order in sorted(plan)] == [tuple(context) for context in canonical(contexts)]


def canonical(contexts: Contexts) -> Iterator[list[int]]:
    """Return each context in the order of the first one with the same set."""
    first: dict[frozenset[int], list[int]] = {}
    for context in contexts:
        yield first.setdefault(frozenset(context), context)


@given(contexts=batches)
def test_unshared_blocks_stay_behind_in_order(contexts: Contexts) -> None:
    for i, order in arrange(contexts):
        own = [block for block in contexts[i] if sum(block in context for context in contexts) == 1]
        assert [block for block in order if block in own] == own


@pytest.mark.sample(1)
@pytest.mark.parametrize("length", [1_000_000_000, 10**18, 10**30])
def test_huge_blocks_do_not_overflow(length: int) -> None:
    contexts, _ = zipf(3, 300, k=15)
    tokens = [length + block for block in range(300)]
    plan = arrange(contexts, tokens)
    assert is_complete(plan, contexts)
    assert saved(plan, tokens) > 0.9 * saved(arrange(contexts, [1_000] * 300), [length] * 300)


def test_time_budget_bounds_the_search() -> None:
    """The clock advances per reading, so the budget bounds the number of readings."""
    contexts, tokens = zipf(4, 100)
    blocks = sum(map(len, contexts))
    for seconds in (0, 3, 30):
        looks = count()
        planner = MergePlanner((seconds + 0.5) / blocks, "cpu", clock=lambda looks=looks: float(next(looks)))  # type: ignore[misc]
        assert is_complete(planner.arrange(contexts, tokens, no_progress), contexts)
        assert next(looks) == seconds + 2


def test_seed_determines_the_plan() -> None:
    contexts, tokens = zipf(5, 150)
    plans = [MergePlanner(device="cpu", seed=seed).arrange(contexts, tokens, no_progress) for seed in (0, 0, 1, 2, 3)]
    assert plans[0] == plans[1]
    assert len({tuple(plan) for plan in plans}) > 1
    assert all(is_complete(plan, contexts) for plan in plans)


def test_order_of_requests_changes_savings_little() -> None:
    contexts, tokens = zipf(6, 200)
    totals: list[int] = []
    for seed in range(4):
        shuffled = random.Random(seed).sample(contexts, len(contexts))
        totals.append(saved(arrange(shuffled, tokens), tokens))
    assert min(totals) > 0.97 * max(totals)


def test_progress_is_reported_in_stages() -> None:
    steps: list[tuple[str, int, int]] = []
    contexts, tokens = zipf(7, 100)
    MergePlanner(device="cpu").arrange(contexts, tokens, lambda *step: steps.append(step))
    assert list(dict.fromkeys(stage for stage, _, _ in steps)) == ["merging", "moving", "replanting"]
    assert all(0 <= done <= total for _, done, total in steps)


def test_errors_of_the_progress_callback_are_raised() -> None:
    class CancelledError(Exception): ...

    def cancel(stage: str, done: int, total: int) -> None:
        if stage == "moving":
            raise CancelledError

    contexts, tokens = zipf(8, 50)
    with pytest.raises(CancelledError):
        MergePlanner(device="cpu").arrange(contexts, tokens, cancel)


PROGRAM = """
import hashlib, random, sys
if {blocked!r}:
    sys.modules["numba"] = sys.modules["numpy"] = sys.modules["scipy"] = None
from warmprefix import ContextBlock, ContextPlanner
rng = random.Random(9)
popular = [1 / (1 + i) for i in range(300)]
blocks = [ContextBlock(f"text {{i}}", tokens=50 + i) for i in range(300)]
requests = {{str(i): rng.choices(blocks, popular, k=8) for i in range({requests})}}
plan = ContextPlanner().plan_batch(requests)
assert sorted(p.id for p in plan) == sorted(requests)
assert plan.saved_tokens <= plan.upper_bound
assert ("numba" in sys.modules and sys.modules["numba"] is not None) == {compiled!r}
print(plan.saved_tokens, hashlib.sha256(repr([(p.id, p.order, p.warmed_by) for p in plan]).encode()).hexdigest())
"""


def run(requests: int, blocked: bool = False, compiled: bool = False, hash_seed: str = "0") -> tuple[int, str]:
    program = PROGRAM.format(requests=requests, blocked=blocked, compiled=compiled)
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    total, digest = done.stdout.split()
    return int(total), digest


def test_all_processes_plan_the_same() -> None:
    assert run(150, hash_seed="1") == run(150, hash_seed="2")


def test_plan_needs_neither_numba_nor_numpy() -> None:
    total, _ = run(1_000, compiled=True)
    without, _ = run(1_000, blocked=True)
    assert abs(total - without) < 0.03 * total
