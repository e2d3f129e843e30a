"""Labels and order note in the prompts of response synthesizers."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from inspect import getattr_static
from types import MappingProxyType
from typing import Any, NamedTuple

from llama_index.core.base.llms.types import TextBlock
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate, SelectorPromptTemplate
from llama_index.core.response_synthesizers import (
    BaseSynthesizer,
    CompactAndRefine,
    SimpleSummarize,
    TreeSummarize,
)
from llama_index.core.response_synthesizers.compact_and_accumulate import CompactAndAccumulate
from llama_index.core.response_synthesizers.context_only import ContextOnly
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle

from warmprefix_llamaindex.marks import is_blank, labelled, mark_of, rank_of, with_node

__all__ = ["PlannedNodes", "install_labels"]

_log = logging.getLogger("warmprefix")

_PACKERS = (CompactAndRefine, CompactAndAccumulate, TreeSummarize, SimpleSummarize)
"""Those that put all nodes into one prompt if they fit. `Refine` and `Accumulate` give each node its own."""

_PROMPTS = ("text_qa_template", "refine_template", "summary_template")
_PADDING = 5
"""The room that a prompt helper keeps free where it is not told otherwise."""

_lock = threading.Lock()
"""Guards the installation of the wrappers."""

_INSTALLED = "__warmprefix_labels__"
_failed = threading.Event()


class PlannedNodes(list[NodeWithScore]):
    """The postprocessor's own list, as long as no later step copies it."""

    def in_relevance_order(self) -> list[NodeWithScore]:
        """Return the nodes in their order before planning, followed by the nodes added since."""
        return sorted(self, key=lambda scored: math.inf if (rank := rank_of(scored)) is None else rank)


def install_labels() -> None:
    """Let response synthesizers read planned nodes with labels from now on.

    Labels and note are right only in a prompt that holds all of the nodes. A postprocessor does not know its reader,
    and a span handler sees the reader but can only change the nodes in place, under all threads that read them. So
    this wraps `BaseSynthesizer.synthesize` and `asynthesize`: they get copies of the nodes, and their response names
    the caller's own nodes as sources. Lists without planned nodes pass through unchanged.
    """
    with _lock:
        for name, wrap in (("synthesize", _synthesizing), ("asynthesize", _asynthesizing)):
            method = vars(BaseSynthesizer)[name]
            if not hasattr(method, _INSTALLED):
                wrapper = wrap(method)
                setattr(wrapper, _INSTALLED, True)
                setattr(BaseSynthesizer, name, wrapper)


def _synthesizing(method: Any) -> Callable[..., Any]:
    @wraps(method)
    def synthesize(self: BaseSynthesizer, query: Any, nodes: Any, *args: Any, **kwargs: Any) -> Any:
        reading = _read(self, query, nodes, kwargs)
        return reading.restore_sources(method.__get__(self)(query, reading.nodes, *args, **kwargs))

    return synthesize


def _asynthesizing(method: Any) -> Callable[..., Any]:
    @wraps(method)
    async def asynthesize(self: BaseSynthesizer, query: Any, nodes: Any, *args: Any, **kwargs: Any) -> Any:
        reading = _read(self, query, nodes, kwargs)
        return reading.restore_sources(await method.__get__(self)(query, reading.nodes, *args, **kwargs))

    return asynthesize


class _Reading(NamedTuple):
    nodes: Any
    """The list for the synthesizer."""
    originals: Mapping[int, NodeWithScore] = MappingProxyType({})
    """The caller's node by the `id()` of each labelled copy in `nodes`."""

    def restore_sources(self, response: Any) -> Any:
        """Put the caller's nodes in place of the labelled copies in a response, and return it."""
        sources = getattr(response, "source_nodes", None)
        if self.originals and isinstance(sources, list):
            sources[:] = [self.originals.get(id(scored), scored) for scored in sources]
        return response


def _read(synthesizer: BaseSynthesizer, query: Any, nodes: Any, options: Mapping[str, Any]) -> _Reading:
    """Choose the nodes for a synthesizer: labelled copies, or the prompt without us. Changes no node."""
    if not isinstance(nodes, list) or all(rank_of(scored) is None for scored in nodes):
        return _Reading(nodes)
    given = list(nodes)
    try:
        copies = _labelled([scored.node for scored in given])
        if copies is not None and _in_one_prompt(synthesizer, query, options, copies):
            shown = [with_node(scored, copy) for scored, copy in zip(given, copies, strict=True)]
            return _Reading(shown, {id(copy): scored for copy, scored in zip(shown, given, strict=True)})
    except Exception:
        # The one place where a failure degrades to the prompt that the application has without us.
        level = logging.DEBUG if _failed.is_set() else logging.WARNING
        _failed.set()
        _log.log(level, "nodes stay without labels, in relevance order", exc_info=True)
    return _Reading(nodes.in_relevance_order() if isinstance(nodes, PlannedNodes) else given)


def _labelled(nodes: Sequence[BaseNode]) -> list[BaseNode] | None:
    """Return the nodes with labelled copies in place of the marked ones, the last of these with the order note.

    None if one context cannot hold all labels: the nodes come from two plans, or a text without a label follows a
    labelled one and would read as a part of it.
    """
    marked = {i: mark for i, node in enumerate(nodes) if (mark := mark_of(node)) is not None}
    if not marked:
        return None
    first, last = min(marked), max(marked)
    for i, node in enumerate(nodes):
        if i > first and i not in marked and not is_blank(node):
            return None
    labels: dict[int, str] = {}
    for mark in marked.values():
        if labels.setdefault(mark.rank, mark.label) != mark.label:
            return None
    in_relevance_order = list(dict.fromkeys(labels[rank] for rank in sorted(labels)))
    reordered = list(dict.fromkeys(mark.label for mark in marked.values())) != in_relevance_order
    names = frozenset(in_relevance_order)
    copies = list(nodes)
    for i, mark in marked.items():
        note = mark.templates.order_annotation(in_relevance_order) if reordered and i == last else None
        copy = labelled(nodes[i], mark, names, note)
        if copy is None:
            return None
        copies[i] = copy
    return copies


def _in_one_prompt(
    synthesizer: BaseSynthesizer, query: Any, options: Mapping[str, Any], nodes: Sequence[BaseNode]
) -> bool:
    """Return whether the synthesizer will put all nodes into one prompt."""
    if getattr(synthesizer, "_multimodal", False):  # reads content blocks, which know no template
        return False
    if options.get("prev_response") is not None:  # takes room in another template
        return False
    kind = type(synthesizer)
    if _works_as(kind, ContextOnly):
        return True
    if not any(_works_as(kind, packer) for packer in _PACKERS):
        return False
    question = query.query_str if isinstance(query, QueryBundle) else str(query)
    texts = [node.get_content(MetadataMode.LLM) for node in nodes]
    if _works_as(kind, SimpleSummarize):
        return _fits(synthesizer, question, "\n".join(texts))
    return _fits(synthesizer, question, "\n\n".join([stripped for text in texts if (stripped := text.strip())]))


@lru_cache
def _works_as(kind: type[BaseSynthesizer], known: type[BaseSynthesizer]) -> bool:
    """Whether a class is that synthesiser, or one that leaves to it what it does with the texts."""
    return issubclass(kind, known) and all(
        getattr_static(kind, method, None) is getattr_static(known, method, None)
        for method in ("get_response", "aget_response", "_make_compact_text_chunks")
    )


def _fits(synthesizer: BaseSynthesizer, query: str, context: str) -> bool:
    """Whether the synthesiser's own prompt helper will leave the context in one piece."""
    # There is no other way to these, or in the case of the prompts none that does not copy a chat's whole history.
    helper, llm, prompts = synthesizer._prompt_helper, synthesizer._llm, synthesizer._get_prompts()  # noqa: SLF001
    templates = [prompts[name] for name in _PROMPTS if name in prompts]
    padding = getattr(synthesizer, "_response_padding_size", _PADDING)
    if helper.chunk_size_limit is None and not isinstance(llm, StructuredLLM):
        # Counting tokens takes milliseconds, and no token is shorter than a byte.
        longest = max(_most_bytes(template, llm, query) for template in templates)
        most = longest + _bytes(llm.system_prompt or "") + _bytes(context)
        if most <= helper.context_window - helper.num_output - padding:
            return True
    tokens = helper._token_counter.get_string_tokens(context)  # noqa: SLF001
    for template in templates:
        prompt = template.partial_format(query_str=query)
        if tokens > helper.get_text_splitter_given_prompt(prompt, padding=padding, llm=llm).chunk_size:
            return False
    return True


def _most_bytes(template: BasePromptTemplate, llm: LLM, query: str) -> float:
    """What a prompt without its context takes at most: infinity if that isn't known without formatting it."""
    if isinstance(template, SelectorPromptTemplate):
        template = template.select(llm=llm)
    if template.kwargs or template.function_mappings or template.template_var_mappings or template.output_parser:
        return math.inf
    if type(template) is ChatPromptTemplate:
        blocks = (block for message in template.message_templates for block in message.blocks)
        if not all(isinstance(block, TextBlock) for block in blocks):
            return math.inf
    elif type(template) is not PromptTemplate:
        return math.inf
    return _bytes(template.get_template(llm=llm)) + template.template_vars.count("query_str") * _bytes(query)


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
