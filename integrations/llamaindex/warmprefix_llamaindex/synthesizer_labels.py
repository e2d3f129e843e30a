"""Labels and the order note in the prompts of response synthesizers."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, wraps
from inspect import getattr_static
from types import MappingProxyType
from typing import Any, NamedTuple

from llama_index.core.base.llms.types import TextBlock
from llama_index.core.instrumentation.span import active_span_id
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

from warmprefix.forks import fork_safe_lock
from warmprefix.tokens import needs_note, order_note
from warmprefix_llamaindex.node_marks import (
    TURN,
    NodeMark,
    annotated,
    is_blank,
    mark_of,
    rank_of,
    with_node,
)
from warmprefix_llamaindex.tail_nodes import whole
from warmprefix_llamaindex.turn_events import warn_rebuilt

__all__ = ["PlannedNodes", "install_labels"]

_log = logging.getLogger("warmprefix")

_PACKERS = (CompactAndRefine, CompactAndAccumulate, TreeSummarize, SimpleSummarize)
"""Synthesizers that put all nodes into one prompt if they fit; `Refine` and `Accumulate` use one prompt per node."""

_PROMPTS = ("text_qa_template", "refine_template", "summary_template")
_PADDING_TOKENS = 5
"""Number of tokens that a prompt helper keeps free by default."""

_lock = fork_safe_lock()
"""Guards the installation of the wrappers."""

_INSTALLED = "__warmprefix_labels__"
_failed = threading.Event()


class PlannedNodes(list[NodeWithScore]):
    """List of nodes that the postprocessor returned; a later step may copy it into a plain list."""

    def in_relevance_order(self) -> list[NodeWithScore]:
        """Return the nodes in their order before planning, then the nodes added later."""
        return sorted(self, key=lambda scored: math.inf if (rank := rank_of(scored)) is None else rank)


def install_labels() -> None:
    """Make response synthesizers read planned nodes with labels and note from now on.

    Both are correct only in a prompt that holds all nodes. A postprocessor does not see its reader. A span
    handler does, but can only change the nodes in place, while other threads read them. So this function wraps
    `BaseSynthesizer.synthesize` and `asynthesize`: they get copies of the nodes, and their response names the caller's
    own nodes as sources. Lists without planned nodes pass through unchanged.
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


class _SynthesizerInput(NamedTuple):
    """The nodes that a synthesizer reads, and the nodes that the caller gave."""

    nodes: Any
    """List for the synthesizer."""
    originals: Mapping[int, NodeWithScore] = MappingProxyType({})
    """The caller's nodes, by the `id()` of their copies in `nodes`."""

    def restore_sources(self, response: Any) -> Any:
        """Replace the copies in a response by the caller's nodes, and return it."""
        sources = getattr(response, "source_nodes", None)
        if self.originals and isinstance(sources, list):
            sources[:] = [self.originals.get(id(scored), scored) for scored in sources]
        return response


def _read(synthesizer: BaseSynthesizer, query: Any, nodes: Any, options: Mapping[str, Any]) -> _SynthesizerInput:
    """Choose the nodes for a synthesizer: annotated copies, or those of a plain prompt. Changes no node."""
    if not isinstance(nodes, list) or all(rank_of(scored) is None for scored in nodes):
        return _SynthesizerInput(nodes)
    given = list(nodes)
    if any(TURN in scored.node.metadata for scored in given):
        return _read_tail(synthesizer, query, options, given)
    try:
        copies = _annotated([scored.node for scored in given])
        if copies is not None and _in_one_prompt(synthesizer, query, options, copies):
            shown = [with_node(scored, copy) for scored, copy in zip(given, copies, strict=True)]
            return _SynthesizerInput(shown, {id(copy): scored for copy, scored in zip(shown, given, strict=True)})
    except Exception:
        # The one place that degrades: the application gets the prompt that it has without the postprocessor.
        level = logging.DEBUG if _failed.is_set() else logging.WARNING
        _failed.set()
        _log.log(level, "nodes stay without annotation, in relevance order", exc_info=True)
    plain = nodes.in_relevance_order() if isinstance(nodes, PlannedNodes) else given
    shown = list(map(_escaped, plain))
    return _SynthesizerInput(shown, {id(copy): scored for copy, scored in zip(shown, plain, strict=True)})


def _read_tail(
    synthesizer: BaseSynthesizer, query: Any, options: Mapping[str, Any], nodes: list[NodeWithScore]
) -> _SynthesizerInput:
    """Choose the nodes of a plan with placement `"tail"`: as they are if the template holds what references name.

    Else their whole texts: the synthesizers of query engines and chat engines rebuild the context for each question.
    """
    restored = [whole(scored) for scored in nodes]
    texts = [scored.node.get_content(MetadataMode.LLM).strip() for scored in restored]
    missing = [
        text for scored, text in zip(nodes, texts, strict=True) if text not in scored.node.get_content(MetadataMode.LLM)
    ]
    history = _template_text(synthesizer) if missing else ""
    if all(text in history for text in missing) and _in_one_prompt(
        synthesizer, query, options, [scored.node for scored in nodes]
    ):
        return _SynthesizerInput(nodes)
    if missing:
        warn_rebuilt((active_span_id.get() or type(synthesizer).__name__).partition(".")[0])
    return _SynthesizerInput(restored, {id(copy): scored for copy, scored in zip(restored, nodes, strict=True)})


def _template_text(synthesizer: BaseSynthesizer) -> str:
    """Return the text of the messages of the template that the context is put into."""
    prompts = synthesizer._get_prompts()  # noqa: SLF001
    template = prompts.get("text_qa_template") or prompts.get("summary_template")
    if isinstance(template, SelectorPromptTemplate):
        template = template.select(llm=synthesizer._llm)  # noqa: SLF001
    messages = template.message_templates if isinstance(template, ChatPromptTemplate) else ()
    return "\n\n".join([block.text for message in messages for block in message.blocks if isinstance(block, TextBlock)])


def _escaped(scored: NodeWithScore) -> NodeWithScore:
    """Return a node without annotation, whose text cannot pass for one: itself unless it must be escaped."""
    mark = mark_of(scored.node)
    copy = None if mark is None else annotated(scored.node, mark._replace(label=""), ())
    return scored if copy is None or copy is scored.node else with_node(scored, copy)


def _annotated(nodes: Sequence[BaseNode]) -> list[BaseNode] | None:
    """Return the nodes with annotated copies of the marked ones; the last of these shows the order note.

    None if one context cannot hold the annotations: the nodes come from two plans, an unlabelled text follows a
    labelled one and would read as a part of it, or the best text cannot be quoted.
    """
    marked = {i: mark for i, node in enumerate(nodes) if (mark := mark_of(node)) is not None}
    if not marked or not _of_one_plan(marked.values()):
        return None
    first, last = min(marked), max(marked)
    shown = [i for i, node in enumerate(nodes) if i in marked or not is_blank(node)]
    if marked[first].label:
        if any(i > first and i not in marked for i in shown):
            return None
        note = _label_note(list(marked.values()))
    else:
        mark = marked[first]
        ranks = _ranks([(i, nodes[i].get_content(MetadataMode.LLM)) for i in shown], marked)
        note = order_note(mark.templates, mark.annotation, list(ranks.values()), (), list(ranks))
        if note is None and needs_note(mark.templates, mark.annotation, [r for r in ranks.values() if r is not None]):
            return None
    names = frozenset([mark.label for mark in marked.values()])
    copies = list(nodes)
    for i, mark in marked.items():
        copy = annotated(nodes[i], mark, names, note if i == last else None)
        if copy is None:
            return None
        copies[i] = copy
    return copies


def _of_one_plan(marks: Collection[NodeMark]) -> bool:
    """Return whether each rank stands for one block and one label. A node may be cut into several pieces."""
    identities = {(mark.rank, mark.label, mark.block) for mark in marks}
    kinds = {mark.annotation for mark in marks}
    return len(identities) == len({mark.rank for mark in marks}) and len(kinds) == 1


def _label_note(marks: Sequence[NodeMark]) -> str | None:
    """Return the note that names labels; None if the order needs none. Nodes with equal texts have one label."""
    ranks: dict[str, int] = {}
    for mark in marks:
        ranks[mark.label] = min(mark.rank, ranks.get(mark.label, mark.rank))
    joined = {mark.label for mark in marks if mark.joined}
    shown = [None if label in joined else rank for label, rank in ranks.items()]
    return order_note(marks[0].templates, marks[0].annotation, shown, list(ranks), ())


def _ranks(shown: Sequence[tuple[int, str]], marked: Mapping[int, NodeMark]) -> dict[str, int | None]:
    """Return the relevance rank of each distinct text, in the order in which they are shown; None within a run.

    Texts that the application added keep their places in relevance order, as they would without the planner.
    """
    by_relevance = sorted(marked, key=lambda i: marked[i].rank)
    best = dict(zip(marked, by_relevance, strict=True))  # in relevance order, the second stands at the first's place
    places = {best.get(i, i): place for place, (i, _) in enumerate(shown)}
    ranks: dict[str, int | None] = {}
    for i, text in shown:
        rank, earlier = None if i in marked and marked[i].joined else places[i], ranks.get(text)
        ranks[text] = earlier if rank is None else rank if earlier is None else min(rank, earlier)
    return ranks


def _in_one_prompt(
    synthesizer: BaseSynthesizer, query: Any, options: Mapping[str, Any], nodes: Sequence[BaseNode]
) -> bool:
    """Return whether the synthesizer will put all nodes into one prompt."""
    if getattr(synthesizer, "_multimodal", False):  # it reads content blocks, which ignore the template
        return False
    if options.get("prev_response") is not None:  # it takes up space in another template
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
def _works_as(kind: type[BaseSynthesizer], base: type[BaseSynthesizer]) -> bool:
    """Return whether a class inherits the base class's handling of the texts."""
    return issubclass(kind, base) and all(
        getattr_static(kind, method, None) is getattr_static(base, method, None)
        for method in ("get_response", "aget_response", "_make_compact_text_chunks")
    )


def _fits(synthesizer: BaseSynthesizer, query: str, context: str) -> bool:
    """Return whether the synthesizer's own prompt helper will not split the context."""
    # No public way leads to the first two, and the public way to the prompts copies a chat's whole history.
    helper, llm, prompts = synthesizer._prompt_helper, synthesizer._llm, synthesizer._get_prompts()  # noqa: SLF001
    templates = [prompts[name] for name in _PROMPTS if name in prompts]
    padding = getattr(synthesizer, "_response_padding_size", _PADDING_TOKENS)
    if helper.chunk_size_limit is None and not isinstance(llm, StructuredLLM):
        # Counting tokens takes milliseconds. Every token has at least one byte, so bytes are an upper bound.
        longest = max(_max_bytes(template, llm, query) for template in templates)
        most = longest + _bytes(llm.system_prompt or "") + _bytes(context)
        if most <= helper.context_window - helper.num_output - padding:
            return True
    tokens = helper._token_counter.get_string_tokens(context)  # noqa: SLF001
    for template in templates:
        prompt = template.partial_format(query_str=query)
        if tokens > helper.get_text_splitter_given_prompt(prompt, padding=padding, llm=llm).chunk_size:
            return False
    return True


def _max_bytes(template: BasePromptTemplate, llm: LLM, query: str) -> float:
    """Return an upper bound for a prompt without its context; infinity if only formatting it would show that."""
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
