"""Mem0: memory search with an order that stays, and a chat that never rewrites its history."""

from typing import TYPE_CHECKING, Any

from warmprefix_mem0.chat import MemoryChat
from warmprefix_mem0.memory import AsyncContextReuseMemory, ContextReuseMemory
from warmprefix_mem0.steady import SteadyOrder

if TYPE_CHECKING:
    from warmprefix_mem0.reranker import ContextReuseReranker, register

__all__ = [
    "AsyncContextReuseMemory",
    "ContextReuseMemory",
    "ContextReuseReranker",
    "MemoryChat",
    "SteadyOrder",
    "register",
]


def __getattr__(name: str) -> Any:
    # Only the reranker is made of Mem0's own classes. All else takes a memory that its user has imported already, and
    # importing Mem0 takes seconds and creates its folder.
    if name in ("ContextReuseReranker", "register"):
        from warmprefix_mem0 import reranker

        return getattr(reranker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
