"""A node postprocessor for query engines and chat engines."""

from __future__ import annotations

import logging
from typing import Any, Literal

from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_validator
from llama_index.core.callbacks import CBEventType, EventPayload
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import active_instrument_tags

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_llamaindex.node_marks import copied, marks
from warmprefix_llamaindex.synthesizer_labels import PlannedNodes, install_labels

__all__ = ["ContextReusePostprocessor"]

_log = logging.getLogger("warmprefix")
_dispatcher = get_dispatcher(__name__)


class ContextReusePostprocessor(BaseNodePostprocessor):
    """Node postprocessor that orders nodes for the engine's prefix cache, and drops none.

    It takes the nodes in relevance order, so put it last:
    `node_postprocessors=[reranker, ContextReusePostprocessor()]`. Never put a `LongContextReorder` after it: that would
    sort by score again.

    It returns copies of the nodes with the same text and score, and with two metadata keys, `warmprefix_label` and
    `warmprefix_rank`, that a model sees only in `MetadataMode.ALL`. A response synthesizer that puts all nodes into one
    prompt gets labels and the order note. Other synthesizers (the modes `refine` and `accumulate`, or a context that is
    split because of its length) get the same prompts as without the postprocessor. Both read copies: the list and its
    nodes never change, so threads and tasks may share them.

    The planner learns the order at once, because the postprocessor does not see whether the model answers. At worst the
    planner expects a prefix that the cache does not hold.

    A call may set `conversation_id` and `tenant`: `with instrument_tags({"tenant": ...}):`. The constructor's values
    take precedence. The planner is not serialised: `from_dict(data, planner=planner)` restores it. Without that
    argument, or after unpickling, the postprocessor starts with a new planner. Deep copies share the planner.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    planner: ContextPlanner = Field(
        default_factory=ContextPlanner,
        exclude=True,
        repr=False,
        description="One planner for all engines of an application.",
    )
    placement: Literal["head"] = Field(
        default="head", description="Place of the context in the prompt: before the history."
    )
    tenant: str | None = Field(default=None, description="Tenant of the requests; tenants share nothing.")
    model: str | None = Field(default=None, description="Model that the prompts are for; models share no prefix.")
    preamble: str | None = Field(default=None, description="The text before the context, or its name.")
    conversation_id: str | None = Field(
        default=None, min_length=1, description="Conversation, for a recorder of requests."
    )
    annotate: bool = Field(
        default=True,
        description="True to show the model labels and the relevance order. If False, every response mode gets the "
        "planned order, because nothing then depends on the reader of the nodes.",
    )

    _failed: bool = PrivateAttr(default=False)

    @field_validator("placement", mode="before")
    @classmethod
    def _check_placement(cls, placement: object) -> object:
        if placement == "tail":
            raise ValueError(
                "placement must be 'head': query engines and chat engines rebuild the context for each question and "
                "keep only questions and answers, so the text that a reference names would be missing. For agents, "
                "whose retrievals stay in the history as tool messages, use ContextReuseLLM"
            )
        return placement

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        if self.annotate:
            install_labels()

    @classmethod
    def class_name(cls) -> str:
        return "ContextReusePostprocessor"

    def __getstate__(self) -> dict[str, Any]:
        kept = self.model_copy()
        vars(kept).pop("planner")
        return super(ContextReusePostprocessor, kept).__getstate__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> ContextReusePostprocessor:
        memo = {} if memo is None else memo
        memo[id(self.planner)] = self.planner
        return super().__deepcopy__(memo)

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return self._traced(nodes, query_bundle)

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        # Planning is microseconds of work and waits for nothing.
        return self._traced(nodes, query_bundle)

    def _traced(self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None) -> list[NodeWithScore]:
        """Arrange the nodes, and emit the same events as the framework's rerankers."""
        if not nodes:
            return nodes
        name, count = self.class_name(), len(nodes)
        _dispatcher.event(ReRankStartEvent(query=query_bundle, nodes=nodes, top_n=count, model_name=name))
        if self.callback_manager.handlers:
            payload: dict[str, Any] = {
                EventPayload.NODES: nodes,
                EventPayload.MODEL_NAME: name,
                EventPayload.QUERY_STR: None if query_bundle is None else query_bundle.query_str,
                EventPayload.TOP_K: count,
            }
            with self.callback_manager.event(CBEventType.RERANKING, payload=payload) as event:
                arranged = self._arranged(nodes)
                event.on_end(payload={EventPayload.NODES: arranged})
        else:  # an event takes time even without a handler
            arranged = self._arranged(nodes)
        _dispatcher.event(ReRankEndEvent(nodes=arranged))
        return arranged

    def _arranged(self, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        """Return the nodes in planned order; after a failure, as they came: the one place that degrades."""
        if isinstance(nodes, PlannedNodes):  # another ContextReusePostprocessor made the list
            nodes = nodes.in_relevance_order()
        try:
            return PlannedNodes(self._planned(nodes))
        except Exception:
            level = logging.DEBUG if self._failed else logging.WARNING
            self._failed = True
            _log.log(level, "nodes stay in relevance order", exc_info=True)
            return nodes

    def _planned(self, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        blocks: list[ContextBlock] = []
        ranks: list[int] = []
        for rank, scored in enumerate(nodes):
            text = scored.node.get_content(MetadataMode.LLM)
            if text.strip():  # other nodes, such as images, show the model no text
                blocks.append(ContextBlock(text, id=scored.node.node_id))
                ranks.append(rank)
        tags = active_instrument_tags.get()
        with self.planner.planning(
            blocks,
            conversation=self.conversation_id or _name(tags.get("conversation_id")) or None,
            tenant=_name(tags.get("tenant")) if self.tenant is None else self.tenant,
            model=self.model,
            preamble=self.preamble,
        ) as plan:
            pass
        order = [ranks[planned.rank] for planned in plan.blocks]
        placed = set(order)
        order += [rank for rank in range(len(nodes)) if rank not in placed]  # repeats, and nodes without a text
        if not self.annotate:
            return [copied(nodes[rank], {}) for rank in order]
        written = {
            ranks[position]: marks(ranks[position], planned.label, planned.templates)
            for planned in plan.blocks
            for position in planned.positions
        }
        return [copied(nodes[rank], written.get(rank) or marks(rank)) for rank in order]


def _name(tag: object) -> str | None:
    return None if tag is None else str(tag)
