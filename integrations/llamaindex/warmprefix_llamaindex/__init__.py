"""LlamaIndex plugins: a node postprocessor, a memory, and a language model and a retriever tool for agents."""

from warmprefix import MissingExtraError

try:
    import llama_index.core  # noqa: F401
except ImportError as exc:
    raise MissingExtraError("llamaindex", "llama_index.core") from exc

from warmprefix_llamaindex.agent_llm import ContextReuseLLM, ContextReuseRetrieverTool
from warmprefix_llamaindex.postprocessor import ContextReusePostprocessor
from warmprefix_llamaindex.tail_memory import TailMemory

__all__ = ["ContextReuseLLM", "ContextReusePostprocessor", "ContextReuseRetrieverTool", "TailMemory"]
