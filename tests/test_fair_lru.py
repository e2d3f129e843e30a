"""A tenant that fills shared space loses only its own values."""

from __future__ import annotations

from collections import Counter, OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from warmprefix.fair_lru import FairLru

steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "use", "pop", "evict"]), st.integers(0, 9), st.sampled_from("abc"), st.integers(0, 4)
    ),
    max_size=60,
)


@given(steps)
def test_every_step_agrees_with_a_plain_description(steps: list[tuple[str, int, str, int]]) -> None:
    values: FairLru[int, str] = FairLru()
    plain: OrderedDict[int, tuple[str, int]] = OrderedDict()
    for step, key, tenant, size in steps:
        if step == "put":
            values.put(key, f"{key} of {tenant}", tenant, size)
            if plain.get(key, (tenant, 0))[0] != tenant:
                del plain[key]
            plain[key] = tenant, size
        elif step == "use":
            assert (values.use(key) is None) == (key not in plain)
            if key in plain:
                plain.move_to_end(key)
        elif step == "pop":
            assert (values.pop(key) is None) == (plain.pop(key, None) is None)
        elif plain:
            sizes: Counter[str] = Counter()
            for owner, size in plain.values():
                sizes[owner] += size
            gone, value = values.evict()
            owner, _ = plain[gone]
            assert sizes[owner] == max(sizes.values())
            assert gone == next(key for key, (other, _) in plain.items() if other == owner)
            assert value == f"{gone} of {owner}"
            del plain[gone]
        assert list(values) == list(plain)
        assert [values.get(key) for key in plain] == [f"{key} of {owner}" for key, (owner, _) in plain.items()]
        assert list(values.values()) == [f"{key} of {owner}" for key, (owner, _) in plain.items()]
        assert (len(values), values.size) == (len(plain), sum(size for _, size in plain.values()))
    values.clear()
    assert (len(values), values.size, list(values)) == (0, 0, [])


@given(st.lists(st.integers(0, 9), max_size=60))
def test_with_one_tenant_the_least_recently_used_value_goes(keys: list[int]) -> None:
    values: FairLru[int, int] = FairLru()
    plain: OrderedDict[int, int] = OrderedDict()
    for key in keys:
        values.put(key, key, None)
        plain[key] = key
        if len(values) > 3:
            assert values.evict() == plain.popitem(last=False)
    assert list(values) == list(plain)


def test_flood_of_one_tenant_takes_nothing_from_others() -> None:
    values: FairLru[str, int] = FairLru()
    for number in range(10):
        values.put(f"own {number}", number, "small")
    for number in range(1_000):
        values.put(f"flood {number}", number, "large")
        if len(values) > 50:
            values.evict()
    assert [values.get(f"own {number}") for number in range(10)] == list(range(10))
    assert len(values) == 50


def test_equal_tenants_take_turns() -> None:
    values: FairLru[int, int] = FairLru()
    for number in range(20):
        values.put(number, number, f"tenant {number}")
    values.use(0)
    assert [values.evict()[0] for _ in range(3)] == [1, 2, 3]
