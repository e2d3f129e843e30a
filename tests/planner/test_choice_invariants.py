"""What holds of every choice: nothing invented, nothing unaccounted for, the first ones fed, no word from others."""

from __future__ import annotations

import os
import random
import string
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmprefix import BatchRequest, Branch, Choice, ContextBlock, ContextPlan, ContextPlanner, EngineReport
from warmprefix.batch.session import BATCH_PLANNERS
from warmprefix.blocks import evidence_blocks, joined_blocks
from warmprefix.ordering import POLICIES

BODY = "The quick brown fox jumps over the lazy dog, and the dog does not care at all about that."
NAMES = [f"{topic}{version}" for topic in "abcdefgh" for version in (1, 2)]

# -- requests ---------------------------------------------------------------------------------------------------------


def passage(name: str, score: float, **options: Any) -> ContextBlock:
    """Return a passage such as `b2`: topic b of version 2, a twin of `b1`."""
    text = f"Docs 1.{name[1]} > {name[0]}\n{name[0]}: {BODY}" if name.strip() else name
    return ContextBlock(text, name.strip() or None, tokens=40 + ord(name[0]) % 7, score=score, **options)


@st.composite
def candidates(draw: st.DrawFn, plain: bool = False) -> list[ContextBlock]:
    """Draw passages of few topics; unless `plain`, some are equal, blank, pinned, or follow the one before them."""
    names = draw(st.lists(st.sampled_from(NAMES if plain else [*NAMES, " "]), max_size=14, unique=plain))
    falls = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=len(names), max_size=len(names)))
    blocks: list[ContextBlock] = []
    score = 10.0
    for name, fall in zip(names, falls, strict=True):
        score -= fall
        options: dict[str, Any] = {}
        if not plain:
            options["pinned"] = draw(st.sampled_from([None, None, None, None, None, "start", "end"]))
            if blocks and blocks[-1].text != passage(name, 0).text:
                options["follows"] = draw(st.sampled_from([None, None, None, blocks[-1]]))
        blocks.append(passage(name, score, **options))
    return blocks


def version(block: ContextBlock) -> tuple[str, int] | None:
    return None if block.id is None or block.id[0] in "gh" else (block.id[0], int(block.id[1]))


def said_by(block: ContextBlock) -> str:
    return block.text.partition("\n")[2]


@st.composite
def choices(draw: st.DrawFn, repeats: bool = True) -> Choice:
    k = draw(st.integers(1, 8))
    options: dict[str, Any] = {
        "keep": draw(st.none() | st.integers(0, k)),
        "within": draw(st.sampled_from([0, 0.2, 1, 100])),
        "extra": draw(st.integers(0, 3)),
        "most": draw(st.sampled_from([0.1, 1])),
    }
    if repeats:
        options["twins"] = draw(st.sampled_from([False, True, said_by]))
        options["version"] = draw(st.sampled_from([None, version]))
    return Choice(k, **options)


turns = st.lists(
    st.tuples(candidates(), choices(), st.sampled_from(["commit", "commit", "abandon", "open"])), max_size=6
)
"""Requests of one planner, with what becomes of each plan."""
kinds = st.sampled_from(["auto", "note", "labels", "both", "none"])

# -- what a plan feeds ------------------------------------------------------------------------------------------------


def assert_chosen(plan: ContextPlan, request: Sequence[ContextBlock], choose: Choice) -> None:
    """Check a plan against its candidates."""
    distinct, positions = evidence_blocks(request)
    place_of = {places[0]: i for i, places in enumerate(positions)}
    fed = [place_of[planned.positions[0]] for planned in plan.blocks]
    out = [place_of[left.position] for left in plan.left_out]
    # Fed ones and others are all that was given, each once, as the very objects that were passed.
    assert sorted([*fed, *out]) == [*range(len(distinct))]
    assert out == sorted(out)
    assert all(planned.block is request[planned.positions[0]] for planned in plan.blocks)
    assert all(planned.positions == positions[i] for planned, i in zip(plan.blocks, fed, strict=True))
    assert all(left.block is request[left.position] for left in plan.left_out)
    assert bool(plan.render()) == bool(fed)
    assert plan.entered is not None
    assert {place_of[position] for position in plan.entered} <= {*fed}
    # A place that is not filled has a reason.
    reasons = [left.reason for left in plan.left_out]
    for left in plan.left_out:
        assert left.instead is None or place_of[left.instead] in fed
        if left.reason == "twin" and left.instead is not None:
            assert said_by(request[left.instead]) == said_by(left.block)
        if left.reason == "superseded":
            found, newer = version(left.block), None if left.instead is None else version(request[left.instead])
            assert found is not None
            assert newer is None or (newer[0] == found[0] and newer[1] > found[1])
        if left.reason == "exchanged":
            assert left.instead in plan.entered
    assert reasons.count("twin") == 0 or choose.twins
    assert reasons.count("superseded") == 0 or choose.version
    extra = len(plan.entered) - reasons.count("exchanged")
    assert 0 <= extra <= choose.extra
    filled = len(fed) - extra
    if not choose.twins and choose.version is None:
        assert filled == min(choose.k, len(distinct))
        assert {*range(min(choose.kept, len(distinct)))} <= {*fed}
        losses = choose.losses([block.score for block in distinct])
        assert all(losses[i] <= choose.within for i in fed if i >= choose.k)
        assert {place_of[position] for position in plan.entered} == {i for i in fed if i >= choose.k}
    else:
        assert filled <= min(choose.k, len(distinct))
        assert bool(fed) == bool(distinct)
        # The first ones are there, or what says the same, or what is newer.
        reached = {i for i, left in zip(out, plan.left_out, strict=True) if left.instead is not None}
        gone = {i for i, left in zip(out, plan.left_out, strict=True) if left.reason == "superseded"}
        assert {*range(min(choose.kept, choose.k, len(distinct)))} <= {*fed} | reached | gone
    if choose.twins:
        keys = [said_by(block) for block in distinct]
        free = [i for i in fed if not distinct[i].pinned and not in_run(request, i)]
        assert len({keys[i] for i in free}) == len(free)
    if choose.version is not None:
        newest: dict[str, int] = {}
        for block in distinct:
            source = version(block)
            if source is not None:
                newest[source[0]] = max(newest.get(source[0], 0), source[1])
        assert all(newest[found[0]] == found[1] for i in fed if (found := version(distinct[i])) is not None)


def in_run(request: Sequence[ContextBlock], i: int) -> bool:
    joined = joined_blocks(request, evidence_blocks(request)[1])
    return i in joined or i + 1 in joined


def served(planner: ContextPlanner, turns: Sequence[Any], **options: Any) -> list[ContextPlan]:
    """Return the plans of some requests."""
    plans = []
    for request, choose, outcome in turns:
        plan = planner.plan(request, choose=choose, **options)
        assert_chosen(plan, request, choose)
        plans.append(plan)
        if outcome == "commit":
            planner.commit(plan, cached_tokens=plan.resident_tokens)
        elif outcome == "abandon":
            planner.abandon(plan)
    return plans


@given(turns=turns, policy=st.sampled_from(sorted(POLICIES)), annotate=kinds, tenant=st.sampled_from([None, "acme"]))
def test_a_plan_feeds_what_was_given_and_the_first_ones(turns: Any, policy: str, annotate: Any, tenant: Any) -> None:
    served(ContextPlanner(policy=policy, annotate=annotate, capacity_tokens=2_000), turns, tenant=tenant)


@given(turns=turns, shown=st.booleans(), annotate=kinds)
def test_conversations_feed_what_was_given(turns: Any, shown: bool, annotate: Any) -> None:
    planner = ContextPlanner(annotate=annotate)
    history: list[dict[str, str]] = []
    for turn, (request, choose, outcome) in enumerate(turns):
        visible = [*history] if shown else None
        plan = planner.plan(request, conversation="chat", placement="tail", history=visible, choose=choose)
        assert_chosen(plan, request, choose)
        if turn and history:
            assert plan.entered == ()
        for planned in plan.blocks:
            if planned.reference is not None and shown:
                assert any(planned.block.text[:20] in message["content"] for message in history)
        if outcome == "commit":
            history.append({"role": "user", "content": plan.render()})
            planner.commit(plan)
        else:
            planner.abandon(plan)


@given(turns=turns, annotate=kinds, forks=st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_branches_feed_what_was_given(turns: Any, annotate: Any, forks: Sequence[int]) -> None:
    planner = ContextPlanner(annotate=annotate)
    done: list[str] = []
    for turn, (request, choose, _) in enumerate(turns):
        after = done[forks[turn] % len(done)] if done and forks[turn] else None
        plan = planner.plan(request, conversation=Branch(after), placement="tail", choose=choose)
        assert_chosen(plan, request, choose)
        planner.commit(plan, turn_id=f"turn {turn}")
        done.append(f"turn {turn}")


@given(turns=turns, annotate=kinds)
def test_the_same_requests_feed_the_same_bytes(turns: Any, annotate: Any) -> None:
    first, second = (served(ContextPlanner(annotate=annotate), turns, tenant="acme") for _ in range(2))
    assert [plan.render() for plan in first] == [plan.render() for plan in second]
    assert [plan.left_out for plan in first] == [plan.left_out for plan in second]


@given(turns=turns, request=candidates(), choose=choices(repeats=False), annotate=kinds)
def test_without_evidence_the_first_are_fed_with_the_same_bytes(
    turns: Any, request: list[ContextBlock], choose: Choice, annotate: Any
) -> None:
    planner = ContextPlanner(annotate=annotate)
    served(planner, turns, tenant="another scope")
    plan = planner.plan(request, choose=choose)
    distinct, _ = evidence_blocks(request)
    last = [i for i, block in enumerate(request) if block in distinct[: choose.k]]
    expected = ContextPlanner(annotate=annotate).plan([request[i] for i in last])
    assert plan.render() == expected.render()
    assert plan.entered == ()


@settings(max_examples=settings().max_examples // 2)
@given(turns=turns)
def test_without_a_choice_the_scope_is_as_if_there_were_none(turns: Any) -> None:
    """Plans with `choose` leave those without it alone, but for what they fed."""
    chosen, plain = ContextPlanner(), ContextPlanner()
    for request, choose, _ in turns:
        # A twin, and a newer version, may be more relevant than its position says.
        with chosen.planning(request, choose=replace(choose, twins=False, version=None)) as plan:
            pass
        fed = sorted(plan.blocks, key=lambda planned: planned.rank)
        with plain.planning([planned.block for planned in fed]):
            pass
    distinct = [passage(name, 0) for name in NAMES]
    assert chosen.plan(distinct).render() == plain.plan(distinct).render()


@given(
    turns=turns,
    batch=st.lists(candidates(), max_size=5),
    choose=choices(),
    planner=st.sampled_from([*BATCH_PLANNERS, "window"]),
    capacity=st.sampled_from([None, 200]),
)
def test_batches_feed_what_was_given(
    turns: Any, batch: Any, choose: Choice, planner: str, capacity: int | None
) -> None:
    online = ContextPlanner()
    served(online, turns, tenant="acme")
    requests = [BatchRequest(i, request, tenant="acme") for i, request in enumerate(batch)]
    options: dict[str, Any] = {} if planner == "window" else {"capacity_tokens": capacity}
    plans = online.plan_batch(requests, planner, choose=choose, **options)
    assert sorted(planned.id for planned in plans) == sorted(str(i) for i in range(len(batch)))
    for planned in plans:
        assert_chosen(planned.plan, planned.request.blocks, choose)
        assert planned.left_out == planned.plan.left_out
    other = ContextPlanner()
    served(other, turns, tenant="acme")  # it decides which requests compute less with a choice
    again = other.plan_batch(requests, planner, choose=choose, **options)
    fed = {planned.id: {block.block for block in planned.blocks} for planned in plans}
    assert fed == {planned.id: {block.block for block in planned.blocks} for planned in again}
    for planned in plans:
        online.commit(planned.plan)


# -- other tenants ----------------------------------------------------------------------------------------------------

others = st.lists(
    st.tuples(
        st.sampled_from(["plan", "commit", "report", "abandon", "feed", "batch", "queued", "touch", "scopes", "reset"]),
        st.sampled_from(["evil", "", "acm"]),
        candidates(plain=True),
        choices(),
        st.integers(0, 600),
    ),
    max_size=10,
)
"""Calls of other tenants."""


def interfere(planner: ContextPlanner, calls: Sequence[Any]) -> None:
    """Make calls of other tenants: the same texts, the same model."""
    for kind, tenant, request, choose, cached in calls:
        plan = planner.plan(request, tenant=tenant, choose=choose)
        if kind in ("commit", "touch"):
            planner.commit(plan, cached_tokens=cached)
            for touch in planner.touches(plan.scope, 3):
                planner.touched(touch, EngineReport(cached))
        elif kind == "report":
            planner.report(plan, EngineReport(cached, 600, ttft=1.0))
            planner.commit(plan)
        elif kind == "abandon":
            planner.abandon(plan)
        elif kind == "feed":
            planner.commit(plan)
            keys = [planned.block.fingerprint for planned in plan.blocks]
            planner.residency.residency_changed(plan.scope, keys, cached % (len(keys) + 1))
        elif kind == "batch":
            for planned in planner.plan_batch({"a": request, "b": request[::-1]}):
                planner.commit(planned.plan, cached_tokens=cached)
        elif kind == "queued":
            planner.queued(request, tenant=tenant)
        elif kind == "scopes":
            for i in range(9):
                with planner.planning(request, tenant=tenant, preamble=str(i), choose=choose):
                    pass


@given(
    turns=turns,
    calls=st.lists(others, min_size=7, max_size=7),
    reports=st.lists(st.integers(0, 600), min_size=6, max_size=6),
    capacity=st.sampled_from([None, 300, 2_000]),
    profile=st.sampled_from(["auto", "full-attention"]),
    plain=st.sets(st.integers(0, 5), max_size=3),
)
def test_no_other_tenant_changes_what_is_fed(
    turns: Any, calls: Any, reports: Sequence[int], capacity: int | None, profile: Any, plain: set[int]
) -> None:
    """What the engine reports depends on others, who evict a tenant's prefixes: `reports` are those with others."""

    def fed(with_others: bool) -> list[list[ContextBlock]]:
        planner = ContextPlanner(capacity_tokens=capacity, profile=profile, max_scopes=8, max_open_plans=8)
        found = []
        for turn, (request, choose, outcome) in enumerate(turns):
            if with_others:
                interfere(planner, calls[turn])
            plan = planner.plan(request, tenant="acme", choose=None if turn in plain else choose)
            found.append(sorted([planned.block for planned in plan.blocks], key=lambda block: block.fingerprint))
            if with_others:
                interfere(planner, calls[turn + 1][:2])
            if outcome == "commit":
                planner.commit(plan, cached_tokens=reports[turn] if with_others else None)
                if with_others:
                    keys = [planned.block.fingerprint for planned in plan.blocks]
                    planner.residency.residency_changed(plan.scope, keys, reports[turn] % (len(keys) + 1))
            elif outcome == "abandon":
                planner.abandon(plan)
        return found

    assert fed(with_others=True) == fed(with_others=False)


@pytest.mark.parametrize("capacity", [None, 1_500])
def test_much_traffic_of_others_changes_nothing(capacity: int | None) -> None:
    """Many choices happen, and the engine reports to each tenant what others have left of its prefixes."""

    def run(with_others: bool) -> tuple[list[set[ContextBlock]], ContextPlanner]:
        rng, noise = random.Random(3), random.Random(4)
        planner = ContextPlanner(capacity_tokens=capacity, max_scopes=8, max_open_plans=16)
        names = [f"{letter}{version}" for letter in string.ascii_letters[:30] for version in (1, 2)]
        choose = Choice(6, keep=2, within=1, extra=1, most=1, twins=True)
        fed = []
        for i in range(500):
            near = names[(start := rng.randrange(40)) : start + 20]
            request = [passage(name, -float(place)) for place, name in enumerate(rng.sample(near, 14))]
            mixed = None if i % 8 == 7 else choose
            with planner.planning(request, tenant="acme", choose=mixed) as plan:
                fed.append({planned.block for planned in plan.blocks})
            if with_others:
                keys = [planned.block.fingerprint for planned in plan.blocks]
                planner.report(plan, EngineReport(noise.randrange(300), 300))
                planner.residency.residency_changed(plan.scope, keys, noise.randrange(6))
                for tenant in ("evil", "", "acm"):
                    calls = ["plan", "commit", "report", "abandon", "feed", "batch", "queued", "touch", "scopes"]
                    interfere(planner, [(noise.choice(calls), tenant, request, choose, noise.randrange(600))])
                if i % 50 == 0:
                    planner.plan_batch({"q": request})
        return fed, planner

    (alone, planner), (disturbed, _) = run(with_others=False), run(with_others=True)
    stats = planner.stats()
    assert min(stats.exchanged_blocks, stats.extra_blocks, stats.twin_blocks) > 20
    assert alone == disturbed


@given(
    contexts=st.lists(st.permutations("abcdefgh").map(lambda names: names[:5]), max_size=30),
    reports=st.lists(st.integers(0, 5), min_size=30, max_size=30),
    tenant=st.none() | st.just("acme"),
)
def test_orders_follow_what_the_engine_holds(contexts: Any, reports: Sequence[int], tenant: Any) -> None:
    """A choice among as many candidates as places changes no order, whatever the engine has evicted."""

    def orders(choose: Choice | None) -> list[tuple[tuple[int, ...], int]]:
        planner, found = ContextPlanner(capacity_tokens=700), []
        for names, held in zip(contexts, reports, strict=False):
            request = [passage(f"{name}1", -float(place)) for place, name in enumerate(names)]
            with planner.planning(request, tenant=tenant, choose=choose) as plan:
                found.append((plan.order, plan.resident_tokens))
            keys = [planned.block.fingerprint for planned in plan.blocks]
            planner.residency.residency_changed(plan.scope, keys, held)
        return found

    assert orders(Choice(5)) == orders(None)


# -- processes and threads --------------------------------------------------------------------------------------------

REPLAY = """
import hashlib, random
from warmprefix import Choice, ContextBlock, ContextPlanner
rng, digest = random.Random(7), hashlib.sha256()
planner = ContextPlanner(capacity_tokens=3_000)
body = " holds the same twelve words as every other version of this very passage does."
for i in range(300):
    numbers = rng.sample(range(60), 16)
    texts = [f"Docs 1.{number % 3} > page {number // 3}\\nPage {number // 3}{body}" for number in numbers]
    request = [ContextBlock(text, tokens=100, score=-j) for j, text in enumerate(texts)]
    choose = Choice(6, within=1, extra=2, twins=True, version=lambda block: (block.text[-90:-80], block.text[:8]))
    with planner.planning(request, tenant=str(i % 2), choose=choose) as plan:
        digest.update(repr((plan.render(), [left[1:] for left in plan.left_out])).encode())
print(digest.hexdigest())
"""


def test_choices_are_the_same_in_every_process() -> None:
    def replay(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(
            [sys.executable, "-c", REPLAY], env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert replay("1") == replay("2")


@settings(max_examples=max(1, settings().max_examples // 4))
@given(turns=st.lists(turns, min_size=4, max_size=4))
def test_threads_may_share_a_planner(turns: Any) -> None:
    planner = ContextPlanner(capacity_tokens=1_000)
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(served, planner, each, tenant=f"{i % 2}") for i, each in enumerate(turns)]:
            future.result()


def test_no_text_is_retained() -> None:
    text = f"Docs 1.1 > x\n{BODY} " * 20
    planner = ContextPlanner()
    before = sys.getrefcount(text)
    request: list[ContextBlock] = []
    for i in range(4):
        request = [ContextBlock(text, score=2.0), ContextBlock(text.replace("1.1", "1.2"), score=1.0)]
        with planner.planning(request, tenant="acme", choose=Choice(k=1, twins=True)):
            pass
        planner.plan([ContextBlock(f"other {i}", score=3.0), *request], choose=Choice(k=1, twins=True))
    request.clear()
    assert sys.getrefcount(text) == before
