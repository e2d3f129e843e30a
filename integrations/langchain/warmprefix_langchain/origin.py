"""Whose call it is: the conversation and the tenant that a LangChain config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from langchain_core.runnables import RunnableConfig

__all__ = ["Origin", "origin"]

_CONVERSATION_KEYS = ("thread_id", "session_id", "conversation_id")


class Origin(NamedTuple):
    """None for what the config does not tell."""

    conversation: str | None
    tenant: str | None


def origin(config: RunnableConfig, metadata: Mapping[str, Any] | None = None) -> Origin:
    """What the config's `configurable` names, else its metadata, else the run's own `metadata`.

    >>> origin({"configurable": {"thread_id": 7}, "metadata": {"tenant": "acme"}})
    Origin(conversation='7', tenant='acme')
    """
    sources = (config.get("configurable") or {}, config.get("metadata") or {}, metadata or {})
    conversations = (source.get(key) for source in sources for key in _CONVERSATION_KEYS)
    tenants = (source.get("tenant") for source in sources)
    return Origin(
        next((str(name) for name in conversations if name is not None and name != ""), None),
        next((str(name) for name in tenants if name is not None), None),
    )
