"""LangChain: a retriever, a compressor, a Runnable and an agent middleware that keep prefixes warm."""

from typing import TYPE_CHECKING, Any

from warmprefix import MissingExtraError

try:
    import langchain_core as _  # noqa: F401
except ImportError as error:
    raise MissingExtraError("langchain", "langchain_core") from error

from warmprefix_langchain.compressor import ContextReuseCompressor
from warmprefix_langchain.prompt import context_prompt
from warmprefix_langchain.retriever import ContextReuseRetriever
from warmprefix_langchain.runnable import context_reuse

if TYPE_CHECKING:
    from warmprefix_langchain.middleware import ContextReuseMiddleware

__all__ = [
    "ContextReuseCompressor",
    "ContextReuseMiddleware",
    "ContextReuseRetriever",
    "context_prompt",
    "context_reuse",
]


def __getattr__(name: str) -> Any:
    # Agents bring LangGraph with them, twice as much to import as all else; chains need none of it.
    if name == "ContextReuseMiddleware":
        from warmprefix_langchain.middleware import ContextReuseMiddleware

        return ContextReuseMiddleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
