"""Where the labels and the order annotation get into the prompt: when a response synthesiser reads the nodes."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from inspect import BoundArguments, getattr_static
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
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.span import BaseSpan
from llama_index_instrumentation.span_handlers import BaseSpanHandler
from pydantic import Field, PrivateAttr

from warmprefix_llamaindex.marks import labelled, mark_of, rank_of

__all__ = ["PlannedNodes", "watch_synthesis"]

_log = logging.getLogger("warmprefix")

_PACKERS = (CompactAndRefine, CompactAndAccumulate, TreeSummarize, SimpleSummarize)
"""Those that put all nodes into one prompt if they fit. `Refine` and `Accumulate` give each node its own."""

_PROMPTS = ("text_qa_template", "refine_template", "summary_template")
_PADDING = 5
"""The room that a prompt helper keeps free where it is not told otherwise."""

_lock = threading.RLock()
"""Guards the handler, and what it shows. Re-entrant, because the garbage collector may end a span at any time."""


class PlannedNodes(list[NodeWithScore]):
    """The list that the postprocessor returned, as long as it is handed on as it is."""

    def in_relevance_order(self) -> list[NodeWithScore]:
        """The nodes as they were before planning; those that were added since stay behind."""
        return sorted(self, key=lambda scored: math.inf if (rank := rank_of(scored)) is None else rank)


def watch_synthesis() -> None:
    """From now on, let marked nodes show their labels to the synthesisers that put all of them into one prompt.

    A postprocessor isn't told who will read its nodes. The span around `synthesize` knows: it names the synthesiser
    and its nodes just before they are read. So the labels and the note appear only in a prompt that holds them all,
    and are gone when the nodes are back in the application's hands.
    """
    dispatcher = get_dispatcher(BaseSynthesizer.__module__)
    with _lock:
        if not any(isinstance(handler, _LabelsWhileRead) for handler in dispatcher.span_handlers):
            dispatcher.add_span_handler(_LabelsWhileRead())


class _Shown(NamedTuple):
    scored: NodeWithScore
    plain: BaseNode
    copy: BaseNode
    """Stands in the place of the plain one, and shows its label."""


class _Reading(BaseSpan):
    nodes_id: int
    """The `id()` of the list that is read."""
    shown: list[_Shown] = Field(default_factory=list)
    """The nodes that show labels until the span ends."""


class _LabelsWhileRead(BaseSpanHandler[_Reading]):
    """Several may read the same nodes at once; each is shown what is right for itself."""

    _failed: bool = PrivateAttr(default=False)
    _plain: dict[int, BaseNode] = PrivateAttr(default_factory=dict)
    """What each copy that is shown now stands for, by the copy's `id()`."""
    _readers: Counter[int] = PrivateAttr(default_factory=Counter)
    """How many read each list now, by its `id()`."""

    @classmethod
    def class_name(cls) -> str:
        return "ContextReuseLabels"

    def new_span(
        self,
        id_: str,
        bound_args: BoundArguments,
        instance: Any | None = None,
        parent_span_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> _Reading | None:
        nodes = bound_args.arguments.get("nodes")
        if not isinstance(instance, BaseSynthesizer) or not isinstance(nodes, list):
            return None
        if all(rank_of(scored) is None for scored in nodes):
            return None
        reading = _Reading(id_=id_, parent_id=parent_span_id, nodes_id=id(nodes))
        with _lock:
            self._readers[id(nodes)] += 1
            plain: list[tuple[NodeWithScore, BaseNode]] = [
                (scored, self._plain.get(id(scored.node)) or scored.node) for scored in nodes
            ]
        try:
            copies = _labelled([node for _, node in plain])
            if copies is not None and _in_one_prompt(instance, bound_args.arguments, copies):
                pairs = zip(plain, copies, strict=True)
                reading.shown = [_Shown(scored, node, copy) for (scored, node), copy in pairs if copy is not node]
        except Exception:
            self._report()
        with _lock:
            for scored, node in plain:
                scored.node = node
            for scored, node, copy in reading.shown:
                self._plain[id(copy)] = node
                scored.node = copy
            if not reading.shown and isinstance(nodes, PlannedNodes) and self._readers[id(nodes)] == 1:
                nodes[:] = nodes.in_relevance_order()
        return reading

    def prepare_to_exit_span(
        self,
        id_: str,
        bound_args: BoundArguments,
        instance: Any | None = None,
        result: Any | None = None,
        **kwargs: Any,
    ) -> _Reading | None:
        reading = self.open_spans.get(id_)
        if reading is None:
            return None
        with _lock:
            self._readers[reading.nodes_id] -= 1
            self._readers += Counter()  # drops what is at 0
            for scored, node, copy in reading.shown:
                del self._plain[id(copy)]
                if scored.node is copy:  # and not one that another reader was shown since
                    scored.node = node
        return reading

    def prepare_to_drop_span(
        self,
        id_: str,
        bound_args: BoundArguments,
        instance: Any | None = None,
        err: BaseException | None = None,
        **kwargs: Any,
    ) -> _Reading | None:
        return self.prepare_to_exit_span(id_, bound_args, instance)

    def _report(self) -> None:
        """The one place where a failure degrades to the prompt that the application had without us."""
        level = logging.DEBUG if self._failed else logging.WARNING
        self._failed = True
        _log.log(level, "nodes stay without labels, in relevance order", exc_info=True)


def _labelled(nodes: Sequence[BaseNode]) -> list[BaseNode] | None:
    """The nodes, the marked ones as copies that show their labels, and the last of these the order annotation.

    None if they can't all be labelled as one context.
    """
    marked = [(i, mark) for i, node in enumerate(nodes) if (mark := mark_of(node)) is not None]
    labels: dict[int, str] = {}
    for _, mark in marked:
        if labels.setdefault(mark.rank, mark.label) != mark.label:
            return None  # they come from two plans
    in_relevance_order = list(dict.fromkeys(labels[rank] for rank in sorted(labels)))
    reordered = list(dict.fromkeys(mark.label for _, mark in marked)) != in_relevance_order
    copies = list(nodes)
    for i, mark in marked:
        last = i == marked[-1][0]
        note = mark.templates.order_annotation(in_relevance_order) if reordered and last else None
        copy = labelled(nodes[i], mark, note)
        if copy is None:
            return None
        copies[i] = copy
    return copies if marked else None


def _in_one_prompt(synthesizer: BaseSynthesizer, arguments: Mapping[str, Any], nodes: Sequence[BaseNode]) -> bool:
    if getattr(synthesizer, "_multimodal", False):  # reads content blocks, which know no template
        return False
    if arguments.get("response_kwargs", {}).get("prev_response") is not None:  # takes room in another template
        return False
    kind = type(synthesizer)
    if _works_as(kind, ContextOnly):
        return True
    if not any(_works_as(kind, packer) for packer in _PACKERS):
        return False
    query = arguments.get("query")
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
