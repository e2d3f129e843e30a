"""LangChain plugins: a retriever, a compressor, a chain step and agent middlewares."""

from typing import TYPE_CHECKING, Any

from warmprefix import MissingExtraError

try:
    import langchain_core as _  # noqa: F401
except ImportError as error:
    raise MissingExtraError("langchain", "langchain_core") from error

from warmprefix_langchain.chain_step import context_prompt, context_reuse
from warmprefix_langchain.compressor import ContextReuseCompressor
from warmprefix_langchain.conversations import thread_conversation
from warmprefix_langchain.document_retriever import ContextReuseRetriever
from warmprefix_langchain.forks import fork_messages

if TYPE_CHECKING:
    from warmprefix_langchain.memories import MemoryMiddleware
    from warmprefix_langchain.middleware import ContextReuseMiddleware

__all__ = [
    "ContextReuseCompressor",
    "ContextReuseMiddleware",
    "ContextReuseRetriever",
    "MemoryMiddleware",
    "context_prompt",
    "context_reuse",
    "fork_messages",
    "thread_conversation",
]


def __getattr__(name: str) -> Any:
    # Agents import LangGraph, which takes twice as long as everything else. Chains do not need it.
    if name == "ContextReuseMiddleware":
        from warmprefix_langchain.middleware import ContextReuseMiddleware

        return ContextReuseMiddleware
    if name == "MemoryMiddleware":
        from warmprefix_langchain.memories import MemoryMiddleware

        return MemoryMiddleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
