"""LlamaIndex: a node postprocessor and an agent that keep prefixes warm."""

from warmprefix import MissingExtraError

try:
    import llama_index.core  # noqa: F401
except ImportError as exc:
    raise MissingExtraError("llamaindex", "llama_index.core") from exc

from warmprefix_llamaindex.agent import ContextReuseLLM
from warmprefix_llamaindex.postprocessor import ContextReusePostprocessor
from warmprefix_llamaindex.tool import ContextReuseRetrieverTool

__all__ = ["ContextReuseLLM", "ContextReusePostprocessor", "ContextReuseRetrieverTool"]
