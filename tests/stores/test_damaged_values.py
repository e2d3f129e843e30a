"""Whatever stands in a field of a conversation's record, prompts stay correct."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix_redis import RedisSeenStore

OpenStore = Callable[..., RedisSeenStore]
BLOCKS = [ContextBlock(f"Passage {i}. " + "word " * 30, id=None if i % 2 else f"Doc_{i}") for i in range(8)]
once = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples)


def garbled(value: bytes, way: str, chance: random.Random) -> bytes:
    place = chance.randrange(len(value) + 1)
    if way == "random":
        return chance.randbytes(chance.choice([0, 1, 8, 21, 24, 29, 40, 400]))
    if way == "cut":
        return value[:place]
    if way == "longer":
        return value[:place] + chance.randbytes(chance.randint(1, 9)) + value[place:]
    if way == "digits":
        return b"9" * 400
    changed = bytearray(value or b"\0")
    changed[place % len(changed)] ^= 1 << chance.randrange(8)  # "bit"
    return bytes(changed)


def serve(planner: ContextPlanner, numbers: list[int]) -> ContextPlan:
    plan = planner.plan([BLOCKS[i] for i in numbers], conversation="chat", placement="tail", annotate="labels")
    assert planner.commit(plan)
    return plan


def check_references(history: str, plan: ContextPlan) -> None:
    """Each block is in the prompt in full, or a reference names the label that stands in front of it in the history."""
    for planned in plan.blocks:
        if planned.reference is None:
            assert f"[{planned.label}] {planned.block.text}" in plan.render()
            assert re.fullmatch(r"(Doc_\d~|ctx-)[0-9a-f]{6,32}", planned.label)
        else:
            assert f"[{planned.reference.label}] {planned.block.text}" in history


@once
@given(
    seed=st.integers(0, 2**32),
    way=st.sampled_from(["random", "cut", "longer", "digits", "bit"]),
    several=st.booleans(),
)
def test_garbled_fields_count_as_missing(
    open_store: OpenStore, admin: redis.Redis, seed: int, way: str, several: bool
) -> None:
    admin.flushall()
    chance = random.Random(seed)
    store = open_store()
    with ContextPlanner(store=store) as planner:
        history = "".join(serve(planner, chance.sample(range(8), 4)).render() + "\n\n" for _ in range(2))
        if chance.random() < 0.3:
            planner.plan(BLOCKS[:2], conversation="chat", placement="tail", annotate="labels")  # stays open
        (key,) = admin.keys()
        fields: dict[bytes, bytes] = admin.hgetall(key)  # type: ignore[assignment]
        for field in sorted(fields) if several else [chance.choice(sorted(fields))]:
            admin.hset(key, field, garbled(fields[field], way, chance))
        for _ in range(3):
            plan = planner.plan(
                [BLOCKS[i] for i in chance.sample(range(8), 5)],
                conversation="chat",
                placement="tail",
                annotate="labels",
            )
            check_references(history, plan)
            planner.commit(plan)
            history += plan.render() + "\n\n"
        assert not store.breaker.is_open, "the fault is of one record, not of the server"
        planner.forget("chat")
        assert serve(planner, [0, 1]).references == ()


@pytest.mark.parametrize("kind", [b"b", b"s"])
def test_damaged_values_are_counted_once_per_plan(open_store: OpenStore, admin: redis.Redis, kind: bytes) -> None:
    with ContextPlanner(store=open_store()) as planner:
        serve(planner, [0, 1, 2])
        assert len(serve(planner, [0, 1, 2]).references) == 3
        (key,) = admin.keys()
        fields: dict[bytes, bytes] = admin.hgetall(key)  # type: ignore[assignment]
        for field in fields:
            if field[:1] == kind:
                admin.hset(key, field, fields[field][:1] + b"9" * 400)
        plan = planner.plan(BLOCKS[:3], conversation="chat", placement="tail", annotate="labels")
        assert plan.references == ()
        assert planner.stats().store_errors == 1
        assert "999" not in plan.render()


class OddStore:
    """A store of someone else, which answers with labels that no planner wrote."""

    def __init__(self, store: Any, label: str) -> None:
        self._store = store
        self._label = label

    def execute(self, operation: Any) -> Any:
        answer = self._store.execute(operation)
        if getattr(answer, "seen", None):
            seen = {key: block._replace(label=self._label) for key, block in answer.seen.items()}
            return answer._replace(seen=seen)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("label", ["", "9" * 400, "Doc_0", "x] y [z", "ctx-000000", "Doc_0~000000", "\ud800", "a\nb"])
def test_label_that_a_block_cannot_have_is_in_no_prompt(open_store: OpenStore, admin: redis.Redis, label: str) -> None:
    odd: Any = OddStore(open_store(), label)
    with ContextPlanner(store=odd) as planner:
        serve(planner, [0, 1])
        plan = planner.plan(BLOCKS[:2], conversation="chat", placement="tail", annotate="labels")
        assert plan.references == ()
        digits = [block.fingerprint.hex()[:6] for block in BLOCKS[:2]]
        assert [planned.label for planned in plan.blocks] == [f"Doc_0~{digits[0]}", f"ctx-{digits[1]}"]
        assert planner.stats().store_errors == 1
