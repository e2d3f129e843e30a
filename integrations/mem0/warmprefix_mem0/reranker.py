"""A reranker for Mem0's configuration that orders for the prefix cache, not by relevance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warmprefix import ContextPlanner, MissingExtraError
from warmprefix_mem0.memory_order import Entry, MemoryArranger
from warmprefix_mem0.memory_owners import owners_of
from warmprefix_requests.neighbours import PinRule

try:
    from mem0.configs.rerankers.base import BaseRerankerConfig
    from mem0.reranker.base import BaseReranker
    from mem0.utils.factory import RerankerFactory
    from pydantic import ConfigDict
except ImportError as error:
    raise MissingExtraError("mem0", "mem0") from error

__all__ = ["ContextReuseReranker", "ContextReuseRerankerConfig", "register"]


class ContextReuseRerankerConfig(BaseRerankerConfig):
    """Options under `config` of `"reranker"`; of Mem0's own fields only `top_k` has an effect."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    planner: ContextPlanner | None = None
    tenant: str | None = None
    order_locked: bool = False
    pinned: PinRule[Entry] | None = None


class ContextReuseReranker(BaseReranker):
    """Reranker that keeps the order of memories across turns, as `ContextReuseMemory` does.

        register()
        memory = Memory.from_config({"reranker": {"provider": "warmprefix"}, ...})
        found = memory.search(question, filters={"user_id": "ann"}, rerank=True)

    Use it only if you cannot wrap the memory; the wrapper does more. This class works only in `Memory` and in
    `AsyncMemory`, which runs it in a thread, and only in searches with `rerank=True`. It does not render: put the
    memories into the prompt in the given order. It does not see the filters: searches whose results belong to the same
    users, or agents, or runs share a tenant. A memory has one reranker, so this one replaces one that improves
    relevance.
    """

    def __init__(self, config: ContextReuseRerankerConfig | Mapping[str, Any] | None = None) -> None:
        """Create a reranker from the object that Mem0's factory passes, or from a mapping of its fields."""
        if not isinstance(config, ContextReuseRerankerConfig):
            config = ContextReuseRerankerConfig(**(config or {}))
        self.config = config
        """The configuration that Mem0 passes."""
        self._arranger = MemoryArranger(config.planner, "none", config.order_locked, config.pinned)

    def rerank(self, query: str, documents: list[Entry], top_k: int | None = None) -> list[Entry]:
        """Return the memories in planned order, with falling `rerank_score`: sorting by it changes nothing.

        Args:
            query: Ignored.
            documents: Memories in relevance order.
            top_k: Maximum number of memories to return, the most relevant ones; None for all. Mem0 never passes more
                memories than it wants to get back.
        """
        kept = documents[: top_k or self.config.top_k]
        entries = self._arranger.arrange(kept, lambda: owners_of(kept, self.config.tenant)).entries
        return [{**entry, "rerank_score": 1 - i / len(entries)} for i, entry in enumerate(entries)]


def register(provider: str = "warmprefix") -> None:
    """Register `ContextReuseReranker` as a reranker provider in Mem0's configuration."""
    RerankerFactory.provider_to_class[provider] = (
        f"{ContextReuseReranker.__module__}.{ContextReuseReranker.__name__}",
        ContextReuseRerankerConfig,
    )
