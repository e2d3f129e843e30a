"""A reranker that Mem0's own configuration can name. It orders for the prefix cache, not by relevance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from warmprefix import ContextPlanner, MissingExtraError
from warmprefix_mem0.arrange import Arranger, Entry
from warmprefix_mem0.tenant import owners_of

try:
    from mem0.configs.rerankers.base import BaseRerankerConfig
    from mem0.reranker.base import BaseReranker
    from mem0.utils.factory import RerankerFactory
    from pydantic import ConfigDict
except ImportError as error:
    raise MissingExtraError("mem0", "mem0") from error

__all__ = ["ContextReuseReranker", "ContextReuseRerankerConfig", "register"]


class ContextReuseRerankerConfig(BaseRerankerConfig):
    """What stands under `config` of `"reranker"`; of Mem0's own fields only `top_k` has a meaning here."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    planner: ContextPlanner | None = None
    tenant: str | None = None


class ContextReuseReranker(BaseReranker):
    """Gives the memories of a search an order that stays across turns, as `ContextReuseMemory` does.

        register()
        memory = Memory.from_config({"reranker": {"provider": "warmprefix"}, ...})
        found = memory.search(question, filters={"user_id": "ann"}, rerank=True)

    For code that can't wrap its memory; the wrapper does more. This one works in `Memory` and `AsyncMemory` alone,
    which runs it in a thread, and only in searches with `rerank=True`. It does not render: put the memories into the
    prompt as they come. It does not see the filters, so it takes for one tenant the searches whose results belong to
    the same users, or agents, or runs. And a memory has one reranker, so it takes the place of one that improves
    relevance.
    """

    def __init__(self, config: ContextReuseRerankerConfig | Mapping[str, Any] | None = None) -> None:
        """Take what Mem0's factory makes of the configuration, or the same as a mapping."""
        if not isinstance(config, ContextReuseRerankerConfig):
            config = ContextReuseRerankerConfig(**(config or {}))
        self.config = config
        self._arranger = Arranger(config.planner)

    def rerank(self, query: str, documents: list[Entry], top_k: int | None = None) -> list[Entry]:
        """The memories in planned order, with a falling `rerank_score`, so that sorting by it changes nothing.

        Args:
            query: Of no account.
            documents: In relevance order.
            top_k: How many to keep, the most relevant; all by default. Mem0 hands over no more than it wants back.
        """
        kept = documents[: top_k or self.config.top_k]
        entries = self._arranger.arrange(kept, lambda: owners_of(kept, self.config.tenant)).entries
        return [{**entry, "rerank_score": 1 - i / len(entries)} for i, entry in enumerate(entries)]


def register(provider: str = "warmprefix") -> None:
    """Let `{"reranker": {"provider": "warmprefix"}}` in Mem0's configuration mean `ContextReuseReranker`."""
    RerankerFactory.provider_to_class[provider] = (
        f"{ContextReuseReranker.__module__}.{ContextReuseReranker.__name__}",
        ContextReuseRerankerConfig,
    )
