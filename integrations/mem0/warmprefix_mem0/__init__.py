"""Mem0 plugins: memory search with a steady order, and a chat that never rewrites its history."""

from typing import TYPE_CHECKING, Any

from warmprefix_mem0.memory_chat import MemoryChat
from warmprefix_mem0.memory_order import SteadyOrder
from warmprefix_mem0.memory_search import AsyncContextReuseMemory, ContextReuseMemory

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
    # Only the reranker uses Mem0's own classes. The rest takes a memory whose class the caller has already imported.
    # Importing Mem0 takes seconds and creates a folder.
    if name in ("ContextReuseReranker", "register"):
        from warmprefix_mem0 import reranker

        return getattr(reranker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
