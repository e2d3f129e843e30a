"""Tenants of memory searches, derived from filters or from the memories found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from warmprefix import fingerprint

__all__ = ["owners_of", "tenant_of"]

_ENTITY_IDS = ("user_id", "agent_id", "app_id", "run_id")


def tenant_of(filters: object, within: str | None = None) -> str:
    """Return a tenant name for the owners of the memories that `filters` allow.

    Two searches get the same name only if they have the same owners. The name is made of the entity ids that every
    memory found must have; other conditions do not count. It is made of all filters if there is no entity id, or if one
    is under OR or NOT, or has an operator or a wildcard.

    >>> tenant_of({"user_id": "ann", "topic": "food"}) == tenant_of({"AND": [{"user_id": "ann"}]})
    True
    >>> tenant_of({"OR": [{"user_id": "ann"}]}) == tenant_of({"OR": [{"user_id": "bob"}]})
    False

    Args:
        filters: Filters in the format of Mem0's `search`.
        within: Name that separates Mem0 instances in which one id names different people.
    """
    entities = _required_ids(filters)
    if not entities:
        text = json.dumps(filters, sort_keys=True, default=str)
        return json.dumps(["mem0", within, fingerprint(text).hex()])
    return json.dumps(["mem0", within, entities], sort_keys=True)


def owners_of(memories: Sequence[Mapping[str, Any]], within: str | None = None) -> str:
    """Return a tenant name for the owners of `memories`: their users, else their agents, else their runs."""
    for kind in ("user_id", "agent_id", "run_id"):
        names = {str(memory.get(kind)) for memory in memories if memory.get(kind) is not None}
        if names:
            return json.dumps(["mem0 owners", within, kind, sorted(names)])
    return json.dumps(["mem0 owners", within])


def _required_ids(filters: object) -> dict[str, str] | None:
    """Return the entity ids that `filters` require; None for any other condition on entities."""
    if not isinstance(filters, Mapping):
        return None
    required: dict[str, str] = {}
    for key, value in filters.items():
        if key in _ENTITY_IDS:
            if isinstance(value, bool) or not isinstance(value, str | int) or "*" in str(value):
                return None
            found: dict[str, str] | None = {key: str(value).strip()}  # Mem0 strips ids too
        elif key == "AND" and isinstance(value, list):
            found = {}
            for condition in value:
                part = _required_ids(condition)
                found = None if found is None or part is None else _merged(found, part)
        else:
            found = None if _names_entities(value) else {}
        merged = None if found is None else _merged(required, found)
        if merged is None:
            return None
        required = merged
    return required


def _merged(one: dict[str, str], other: dict[str, str]) -> dict[str, str] | None:
    """Return the union; None if the two contradict each other."""
    both = one | other
    return both if both == other | one else None


def _names_entities(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(key in _ENTITY_IDS or _names_entities(part) for key, part in value.items())
    return isinstance(value, list | tuple) and any(map(_names_entities, value))
