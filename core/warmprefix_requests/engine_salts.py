"""Which engine takes a tenant's salt on which route: facts, and how an engine is recognised. Pure: no I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

__all__ = ["ENGINES", "Engine", "EngineName", "recognised_engine"]

EngineName = Literal["vllm", "sglang", "llama.cpp", "warmprefix-emulator"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

_ANY, _NEWEST = (0, 0), (1_000, 0)
_UNNUMBERED = (0, 1)
"""What vLLM reports as its version if it was built without its tags."""
_SALTED: Mapping[EngineName, Mapping[str, tuple[int, int]]] = {
    "vllm": {"chat": (0, 9), "completions": (0, 9), "responses": (0, 11), "messages": (0, 32)},
    "sglang": {"chat": _ANY, "completions": _ANY, "responses": _ANY},
    "llama.cpp": {},
    "warmprefix-emulator": {"chat": _ANY, "responses": _ANY, "messages": _ANY},
}
"""The first version that separates its cache by `cache_salt`, by route. SGLang ignores the field on Messages, as of
0.5.23; vLLM takes it there in 0.32 and 0.33. Embeddings are open where an engine has salts."""

_OWNERS: Mapping[str, EngineName] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama.cpp",
    "warmprefix-emulator": "warmprefix-emulator",
}
"""The engine by `owned_by` of its models."""


class Engine(NamedTuple):
    """An upstream's engine, as far as it was recognised."""

    name: EngineName | None = None
    version: tuple[int, int] | None = None
    """None if it was not recognised."""

    def takes_salt(self, route: str) -> bool | None:
        """Return whether a salt separates tenants on a route; None if that is open."""
        if self.name is None:
            return None
        first = _SALTED[self.name].get(route)
        if first is None:
            return None if route == "embeddings" and _SALTED[self.name] else False
        if first == _ANY:
            return True
        return None if self.version is None else self.version >= first

    @classmethod
    def given(cls, name: EngineName) -> Engine:
        """Return the newest version of an engine."""
        return cls(name, _NEWEST)


def recognised_engine(models: bytes, version: bytes) -> Engine:
    """Return the engine whose answers to `GET /v1/models` and `GET /version` these are.

    >>> recognised_engine(b'{"data": [{"id": "m", "owned_by": "vllm"}]}', b'{"version": "0.33.0"}')
    Engine(name='vllm', version=(0, 33))
    """
    cards = _object(models).get("data")
    cards = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    named: set[EngineName | None] = {_OWNERS.get(str(card.get("owned_by"))) for card in cards}
    name = named.pop() if len(named) == 1 else None
    found = re.match(r"v?(\d{1,4})\.(\d{1,4})", str(_object(version).get("version")))
    number = None if name is None or found is None else (int(found[1]), int(found[2]))
    return Engine(name, None if number == _UNNUMBERED else number)


def _object(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
