"""Where the labels and the order annotation get into the prompt: when a response synthesiser reads the nodes."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from inspect import BoundArguments, getattr_static
from typing import Any

from llama_index.core.llms.structured_llm import StructuredLLM
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
from pydantic import PrivateAttr

from warmprefix_llamaindex.marks import labelled, mark_of, rank_of

__all__ = ["PlannedNodes", "watch_synthesis"]

_log = logging.getLogger("warmprefix")

_PACKERS = (CompactAndRefine, CompactAndAccumulate, TreeSummarize, SimpleSummarize)
"""Those that put all nodes into one prompt if they fit. `Refine` and `Accumulate` give each node its own."""

_PROMPTS = ("text_qa_template", "refine_template", "summary_template")
_PADDING = 5
"""The room that a prompt helper keeps free where it is not told otherwise."""

_lock = threading.Lock()


class PlannedNodes(list[NodeWithScore]):
    """The list that the postprocessor returned, as long as it is handed on as it is."""

    def restore_relevance_order(self) -> None:
        """Undo the planned order; nodes that were added since stay behind."""
        self.sort(key=lambda scored: math.inf if (rank := rank_of(scored)) is None else rank)


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


class _Reading(BaseSpan):
    plain: list[tuple[NodeWithScore, BaseNode]]
    """The nodes that show labels until the span ends, and what they were before."""


class _LabelsWhileRead(BaseSpanHandler[_Reading]):
    _failed: bool = PrivateAttr(default=False)

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
        nodes, query = bound_args.arguments.get("nodes"), bound_args.arguments.get("query")
        if not isinstance(instance, BaseSynthesizer) or not isinstance(nodes, list):
            return None
        plain = [(scored, scored.node) for scored in nodes if rank_of(scored) is not None]
        if not plain:
            return None
        try:
            if _show_labels(nodes) and _in_one_prompt(instance, query, nodes):
                return _Reading(id_=id_, parent_id=parent_span_id, plain=plain)
        except Exception:
            self._report()
        _hide_labels(plain)
        if isinstance(nodes, PlannedNodes):
            nodes.restore_relevance_order()
        return None

    def prepare_to_exit_span(
        self,
        id_: str,
        bound_args: BoundArguments,
        instance: Any | None = None,
        result: Any | None = None,
        **kwargs: Any,
    ) -> _Reading | None:
        reading = self.open_spans.get(id_)
        if reading is not None:
            _hide_labels(reading.plain)
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


def _show_labels(nodes: Sequence[NodeWithScore]) -> bool:
    """Let the marked nodes show their labels, and the last of them the order annotation.

    False if they can't all be labelled as one context.
    """
    marked = [(scored, mark) for scored in nodes if (mark := mark_of(scored)) is not None]
    labels: dict[int, str] = {}
    for _, mark in marked:
        if labels.setdefault(mark.rank, mark.label) != mark.label:
            return False  # they come from two plans
    in_relevance_order = list(dict.fromkeys(labels[rank] for rank in sorted(labels)))
    reordered = list(dict.fromkeys(mark.label for _, mark in marked)) != in_relevance_order
    for i, (scored, mark) in enumerate(marked):
        last = i == len(marked) - 1
        note = mark.templates.order_annotation(in_relevance_order) if reordered and last else None
        shown = labelled(scored.node, mark, note)
        if shown is None:
            return False
        scored.node = shown
    return bool(marked)


def _hide_labels(plain: Sequence[tuple[NodeWithScore, BaseNode]]) -> None:
    for scored, node in plain:
        scored.node = node


def _in_one_prompt(synthesizer: BaseSynthesizer, query: object, nodes: Sequence[NodeWithScore]) -> bool:
    if getattr(synthesizer, "_multimodal", False):  # reads content blocks, which know no template
        return False
    kind = type(synthesizer)
    if _works_as(kind, ContextOnly):
        return True
    if not any(_works_as(kind, packer) for packer in _PACKERS):
        return False
    question = query.query_str if isinstance(query, QueryBundle) else str(query)
    return _fits(synthesizer, question, "\n\n".join([scored.node.get_content(MetadataMode.LLM) for scored in nodes]))


@lru_cache
def _works_as(kind: type[BaseSynthesizer], known: type[BaseSynthesizer]) -> bool:
    """Whether a class is that synthesiser, or one that leaves to it what it does with the texts."""
    return issubclass(kind, known) and all(
        getattr_static(kind, method) is getattr_static(known, method) for method in ("get_response", "aget_response")
    )


def _fits(synthesizer: BaseSynthesizer, query: str, context: str) -> bool:
    """Whether the synthesiser's own prompt helper will leave the context in one piece."""
    # There is no other way to these, or in the case of the prompts none that does not copy a chat's whole history.
    helper, llm, prompts = synthesizer._prompt_helper, synthesizer._llm, synthesizer._get_prompts()  # noqa: SLF001
    templates = [prompts[name] for name in _PROMPTS if name in prompts]
    padding = getattr(synthesizer, "_response_padding_size", _PADDING)
    if helper.chunk_size_limit is None and not isinstance(llm, StructuredLLM):
        # Counting tokens takes milliseconds, and no token is shorter than a byte.
        longest = max(_bytes(template.get_template(llm=llm)) for template in templates)
        most = longest + _bytes(query) + _bytes(llm.system_prompt or "") + _bytes(context)
        if most <= helper.context_window - helper.num_output - padding:
            return True
    tokens = helper._token_counter.get_string_tokens(context)  # noqa: SLF001
    for template in templates:
        prompt = template.partial_format(query_str=query)
        if tokens > helper.get_text_splitter_given_prompt(prompt, padding=padding, llm=llm).chunk_size:
            return False
    return True


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
