"""Whose memories a search finds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from warmprefix import fingerprint

__all__ = ["owners_of", "tenant_of"]

_ENTITY_IDS = ("user_id", "agent_id", "app_id", "run_id")


def tenant_of(filters: object, within: str | None = None) -> str:
    """A name for those whose memories `filters` allow, the same for two searches only if these are the same.

    That is the entity ids which every memory found must have, whatever else is filtered. Where an entity id stands
    under OR or NOT, or with an operator or a wildcard, and where there is none, all of the filters count.

    >>> tenant_of({"user_id": "ann", "topic": "food"}) == tenant_of({"AND": [{"user_id": "ann"}]})
    True
    >>> tenant_of({"OR": [{"user_id": "ann"}]}) == tenant_of({"OR": [{"user_id": "bob"}]})
    False

    Args:
        filters: As Mem0's `search` takes them.
        within: What keeps apart two Mem0s that give the same ids to different people.
    """
    entities = _required_ids(filters)
    if not entities:
        text = json.dumps(filters, sort_keys=True, default=str)
        return json.dumps(["mem0", within, fingerprint(text).hex()])
    return json.dumps(["mem0", within, entities], sort_keys=True)


def owners_of(memories: Sequence[Mapping[str, Any]], within: str | None = None) -> str:
    """A name for all whose memories these are, where no filters tell: users if any has one, else agents, else runs."""
    for kind in ("user_id", "agent_id", "run_id"):
        names = {str(memory.get(kind)) for memory in memories if memory.get(kind) is not None}
        if names:
            return json.dumps(["mem0 owners", within, kind, sorted(names)])
    return json.dumps(["mem0 owners", within])


def _required_ids(filters: object) -> dict[str, str] | None:
    """The entity ids that `filters` demand; None if they say anything else of entities."""
    if not isinstance(filters, Mapping):
        return None
    required: dict[str, str] = {}
    for key, value in filters.items():
        if key in _ENTITY_IDS:
            if isinstance(value, bool) or not isinstance(value, str | int) or "*" in str(value):
                return None
            found: dict[str, str] | None = {key: str(value).strip()}  # as Mem0 does
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
    """Both; None if they contradict each other."""
    both = one | other
    return both if both == other | one else None


def _names_entities(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(key in _ENTITY_IDS or _names_entities(part) for key, part in value.items())
    return isinstance(value, list | tuple) and any(map(_names_entities, value))
