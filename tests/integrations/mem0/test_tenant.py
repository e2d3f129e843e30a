"""Whose memories a search finds, read from its filters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix_mem0.memory_owners import tenant_of

SAME = [
    {"user_id": "ann"},
    {"user_id": " ann "},
    {"user_id": "ann", "topic": "food"},
    {"user_id": "ann", "created_at": {"gte": "2026-01-01"}},
    {"AND": [{"user_id": "ann"}]},
    {"AND": [{"user_id": "ann"}, {"created_at": {"gte": "2026-01-01"}}]},
    {"user_id": "ann", "AND": [{"AND": [{"user_id": "ann"}]}, {"OR": [{"topic": "food"}, {"topic": "sport"}]}]},
]
DIFFERENT: list[Any] = [
    {"user_id": "ann"},
    {"user_id": "bob"},
    {"agent_id": "ann"},
    {"run_id": "ann"},
    {"app_id": "ann"},
    {"user_id": "ann", "run_id": "1"},
    {"user_id": "ann", "run_id": "2"},
    {"user_id": "*"},
    {"user_id": {"in": ["ann"]}},
    {"user_id": {"in": ["ann", "bob"]}},
    {"OR": [{"user_id": "ann"}]},
    {"OR": [{"user_id": "ann"}, {"agent_id": "bot"}]},
    {"agent_id": "bot", "OR": [{"user_id": "ann"}, {"user_id": "bob"}]},
    {"agent_id": "bot", "OR": [{"user_id": "ann"}, {"user_id": "eve"}]},
    {"agent_id": "bot", "NOT": [{"user_id": "ann"}]},
    {"agent_id": "bot"},
    {"AND": [{"user_id": "ann"}, {"user_id": "bob"}]},
    {"AND": [{"user_id": "ann"}, "odd"]},
    {},
    None,
    {"topic": "food"},
    {"topic": "sport"},
]


def test_one_tenant_whatever_else_is_filtered() -> None:
    assert len({tenant_of(filters) for filters in SAME}) == 1


def test_a_number_is_the_id_that_mem0_makes_of_it() -> None:
    assert tenant_of({"user_id": 7, "topic": "food"}) == tenant_of({"user_id": "7"})
    assert tenant_of({"user_id": True}) != tenant_of({"user_id": "True"})


def test_different_entities_are_different_tenants() -> None:
    assert len({tenant_of(filters) for filters in DIFFERENT}) == len(DIFFERENT)


@pytest.mark.parametrize("filters", SAME + DIFFERENT)
def test_nothing_is_shared_within_different_tenants(filters: Any) -> None:
    assert len({tenant_of(filters), tenant_of(filters, "acme"), tenant_of(filters, "globex")}) == 3


def filters_of(user: str, inner: Any) -> Any:
    """The same structure with the user in its place."""
    if isinstance(inner, dict):
        return {key: filters_of(user, value) for key, value in inner.items()}
    if isinstance(inner, list):
        return [filters_of(user, value) for value in inner]
    return user if inner == "USER" else inner


leaves = st.sampled_from(["USER", "food", 3, None])
keys = st.sampled_from(["user_id", "agent_id", "AND", "OR", "NOT", "topic", "in", "metadata"])
structures = st.recursive(
    leaves, lambda inner: st.dictionaries(keys, inner, max_size=3) | st.lists(inner, max_size=3), max_leaves=8
)


@given(st.dictionaries(keys, structures, max_size=4))
def test_no_two_users_are_one_tenant(filters: dict[str, Any]) -> None:
    """Wherever a user is named as one, however deep."""
    ann, bob = filters_of("ann", filters), filters_of("bob", filters)
    if names_user(filters):
        assert tenant_of(ann) != tenant_of(bob)


def names_user(filters: Any) -> bool:
    if isinstance(filters, dict):
        return any(
            (key in ("user_id", "agent_id") and "USER" in repr(value)) or names_user(value)
            for key, value in filters.items()
        )
    return isinstance(filters, list) and any(map(names_user, filters))
