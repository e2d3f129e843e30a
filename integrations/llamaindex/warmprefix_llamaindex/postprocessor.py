"""A node postprocessor for query engines and chat engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from inspect import isawaitable
from typing import Any
from uuid import uuid4

from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_serializer, field_validator
from llama_index.core.callbacks import CBEventType, EventPayload
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.memory import BaseMemory
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.dispatcher import active_instrument_tags

from warmprefix import Branch, Choice, ContextBlock, ContextPlan, ContextPlanner, PlannedBlock
from warmprefix.annotate import Annotate
from warmprefix.plan import Placement
from warmprefix_llamaindex.conversations import (
    AFTER_TURN,
    Conversation,
    ConversationRule,
    check_rule,
    history_options,
    stored,
    surviving,
)
from warmprefix_llamaindex.node_marks import TURN, copied, marks, showing, with_node
from warmprefix_llamaindex.node_neighbours import follows_directly
from warmprefix_llamaindex.synthesizer_labels import PlannedNodes, install_labels
from warmprefix_llamaindex.tail_nodes import tail_nodes, whole
from warmprefix_llamaindex.turn_events import PendingTurn, install_turn_events, turns, warn_rebuilt
from warmprefix_requests.choices import usable_choice
from warmprefix_requests.neighbours import PinRule, neighbours, pin_of, with_kept_places

__all__ = ["ContextReusePostprocessor"]

_log = logging.getLogger("warmprefix")
_dispatcher = get_dispatcher(__name__)


class ContextReusePostprocessor(BaseNodePostprocessor):
    """Node postprocessor that orders nodes for the engine's prefix cache, and drops none unless it may `choose`.

    It takes the nodes in relevance order, so put it last:
    `node_postprocessors=[reranker, ContextReusePostprocessor()]`. Never put a `LongContextReorder` after it: that would
    sort by score again.

    It returns copies of the nodes with the same text and score, and with metadata that a model sees only in
    `MetadataMode.ALL`, such as `warmprefix_rank`. A response synthesizer that puts all nodes into one prompt gets the
    order note, if the order needs one, and labels, if `annotate` asks for them. Other synthesizers (the modes `refine`
    and `accumulate`, or a context that is split because of its length) get the same prompts as without the
    postprocessor. Both read copies: the list and its nodes never change, so threads and tasks may share them.

    Neighbours stay together and in order: nodes one behind the other in the list that also follow each other in their
    source, by their relationships, offsets or pages. So behind a `PrevNextNodePostprocessor` they keep reading order.
    Nodes without text, such as images, keep their places in the list.

    With `choose` the retriever returns more nodes than the prompt has places, and the planner feeds those of nearly
    equal score that the engine holds already. The nodes that are not fed are missing in the result. If the nodes do not
    come with falling scores, as behind a step that sorts by date, the first `k` are fed, and a warning is logged once.

    With placement `"head"` the planner learns the order at once, because the postprocessor does not see whether the
    model answers. At worst the planner expects a prefix that the cache does not hold.

    With placement `"tail"`, for prompts whose history keeps the context, a node that the history holds shows a
    reference; its own text stays whole. The history is known by its messages, or by a record: then nodes count as seen
    once a model call that shows them has been answered, as LlamaIndex's instrumentation reports it. Query engines
    and chat engines keep no context: there placement `"tail"` makes no references.

    A call may set `conversation_id`, `after_turn` and `tenant`: `with instrument_tags({"tenant": ...}):`.
    `after_turn` is the id of the turn that the request continues: the `warmprefix_turn` in the metadata of that
    turn's nodes, or None to begin. The constructor's values take precedence. The planner is not serialised:
    `from_dict(data, planner=planner)` restores it. Without that argument, or after unpickling, the postprocessor starts
    with a new planner. Deep copies share the planner.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    planner: ContextPlanner = Field(
        default_factory=ContextPlanner,
        exclude=True,
        repr=False,
        description="One planner for all engines of an application.",
    )
    placement: Placement = Field(
        default="head",
        description="Place of the context in the prompt: before the history, or after it if the history keeps it.",
    )
    tenant: str | None = Field(default=None, description="Tenant of the requests; tenants share nothing.")
    model: str | None = Field(default=None, description="Model that the prompts are for; models share no prefix.")
    preamble: str | None = Field(default=None, description="The text before the context, or its name.")
    conversation: ConversationRule | None = Field(
        default=None,
        description="What is known of the history: a name of the conversation, a memory, or a function of the query "
        "bundle that returns one of them, a Branch, messages, or None; an async function for async calls. Only a name "
        "is serialised.",
    )
    annotate: Annotate = Field(
        default="auto",
        description="What prompts show of the relevance order. 'note' or 'auto': if the order needs it, a note that "
        "quotes the most relevant node. 'labels': a label in front of each node. 'both': labels, and a "
        "note that names them. 'none': nothing; then every response mode gets the planned order, because nothing "
        "depends on the reader of the nodes.",
    )
    order_locked: bool = Field(default=False, description="Keep the order of the nodes: it is a fact, such as time.")
    pinned: PinRule[NodeWithScore] | None = Field(
        default=None,
        description="Nodes to keep at an end of the context: the metadata key of 'start' or 'end', or a function that "
        "returns one of them or None. Only a key is serialised.",
    )

    choose: Choice | None = Field(
        default=None,
        description="Feed `k` of the given nodes: the first ones, and in the last places perhaps others of nearly "
        "equal score that the engine holds already. Functions in it take a `NodeWithScore`, and are not serialised.",
    )

    _failed: bool = PrivateAttr(default=False)
    _unscored: bool = PrivateAttr(default=False)
    _rebuilt: bool = PrivateAttr(default=False)

    @field_validator("conversation", mode="before")
    @classmethod
    def _check_conversation(cls, conversation: Any) -> Any:
        check_rule(conversation)
        return conversation

    @field_serializer("choose")
    def _choice_values(self, choose: Choice | None) -> dict[str, Any] | None:
        if choose is None:
            return None
        return {**asdict(choose), "version": None, "twins": choose.twins is True}

    @field_serializer("conversation")
    def _conversation_name(self, conversation: ConversationRule | None) -> str | None:
        return conversation if isinstance(conversation, str) else None

    @field_serializer("pinned")
    def _pin_key(self, pinned: PinRule[NodeWithScore] | None) -> str | None:
        return pinned if isinstance(pinned, str) else None

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        if self.choose is not None and self.order_locked:
            raise ValueError("choose must be None with order_locked=True: a locked order has no nodes to exchange")
        if self.annotate != "none" or self.placement == "tail":
            install_labels()
        if self.placement == "tail":
            install_turn_events()

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
        with self._traced(nodes, query_bundle) as report:
            return report(self._arranged(_in_relevance_order(nodes), query_bundle))

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        with self._traced(nodes, query_bundle) as report:
            return report(await self._aarranged(_in_relevance_order(nodes), query_bundle))

    @contextmanager
    def _traced(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None
    ) -> Iterator[Callable[[list[NodeWithScore]], list[NodeWithScore]]]:
        """Emit the same events as the framework's rerankers, around a call of the yielded function with the result."""
        name, count = self.class_name(), len(nodes[: None if self.choose is None else self.choose.k])
        reported: list[NodeWithScore] = []

        def report(arranged: list[NodeWithScore]) -> list[NodeWithScore]:
            reported[:] = arranged
            return arranged

        if not nodes:
            yield report
            return
        _dispatcher.event(ReRankStartEvent(query=query_bundle, nodes=nodes, top_n=count, model_name=name))
        if self.callback_manager.handlers:
            payload: dict[str, Any] = {
                EventPayload.NODES: nodes,
                EventPayload.MODEL_NAME: name,
                EventPayload.QUERY_STR: None if query_bundle is None else query_bundle.query_str,
                EventPayload.TOP_K: count,
            }
            with self.callback_manager.event(CBEventType.RERANKING, payload=payload) as event:
                yield report
                event.on_end(payload={EventPayload.NODES: reported})
        else:  # an event takes time even without a handler
            yield report
        _dispatcher.event(ReRankEndEvent(nodes=reported))

    def _arranged(self, nodes: list[NodeWithScore], query: QueryBundle | None) -> list[NodeWithScore]:
        """Return the nodes in planned order; after a failure, as they came."""
        if not nodes:
            return nodes
        try:
            is_tail, known = self._is_tail(), self._conversation(query)
            request = self._request(nodes, is_tail)
            if is_tail and isinstance(known, BaseMemory):
                known = surviving(known, known.get_all(**stored(known)), request.first_blocks, query)
            options = {**self._plan_options(known, is_tail), "choose": request.choose}
            if is_tail:
                return self._followed(request, self.planner.plan(request.blocks, **options), known)
            with self.planner.planning(request.blocks, **options) as plan:
                pass
            return request.in_planned_order(plan)
        except Exception:
            return self._unarranged(nodes)

    async def _aarranged(self, nodes: list[NodeWithScore], query: QueryBundle | None) -> list[NodeWithScore]:
        """Do the same as `_arranged`; requests of other tasks that are ready are considered."""
        if not nodes:
            return nodes
        try:
            is_tail, known = self._is_tail(), self._conversation(query)
            known = await known if isawaitable(known) else known
            request = self._request(nodes, is_tail)
            if is_tail and isinstance(known, BaseMemory):
                known = surviving(known, await known.aget_all(**stored(known)), request.first_blocks, query)
            options = {**self._plan_options(known, is_tail), "choose": request.choose}
            if is_tail:
                return self._followed(request, await self.planner.aplan(request.blocks, **options), known)
            async with self.planner.planning(request.blocks, **options) as plan:
                pass
            return request.in_planned_order(plan)
        except Exception:
            return self._unarranged(nodes)

    def _request(self, nodes: list[NodeWithScore], is_tail: bool) -> _Request:
        """Return the request; if nothing can be chosen from the nodes, that of the first ones."""
        request = _Request(nodes, self.pinned, is_tail, self.choose)
        if request.error is None:
            return request
        level = logging.DEBUG if self._unscored else logging.WARNING
        self._unscored = True
        _log.log(level, "no choice, the first nodes are fed: %s", request.error)
        return _Request(request.first_nodes, self.pinned, is_tail)

    def _is_tail(self) -> bool:
        """Return whether the history keeps the context: not in an engine that rebuilds it for each question."""
        if self.placement == "head":
            return False
        engine = turns.engine_around()
        if engine is not None:
            warn_rebuilt(engine)
        return engine is None

    def _followed(self, request: _Request, plan: ContextPlan, known: Conversation) -> list[NodeWithScore]:
        """Return the nodes of a plan with placement `"tail"`, which LlamaIndex's events commit or abandon."""
        turn = PendingTurn(self.planner, plan, known if isinstance(known, str) else None, self._refuse)
        try:
            shown = request.in_tail(plan)
        except Exception:
            turn.settle()
            raise
        turns.follow(turn)
        return shown

    def _refuse(self, engine: str) -> None:
        """Make no references any more: a prompt did not hold what one named."""
        self._rebuilt = True
        warn_rebuilt(engine)

    def _conversation(self, query: QueryBundle | None) -> Any:
        """Return what is known of the history."""
        if self._rebuilt:
            return None
        rule = self.conversation
        known = rule(query) if callable(rule) else rule
        if known is not None:
            return known
        tags = active_instrument_tags.get()
        if AFTER_TURN in tags:
            return Branch(after=tags[AFTER_TURN])
        return _name(tags.get("conversation_id"))

    def _plan_options(self, known: Conversation, is_tail: bool) -> dict[str, Any]:
        """Return the options of a plan. With placement `"head"` a conversation is for a recorder of requests."""
        options: dict[str, Any] = {"conversation": known or None if isinstance(known, str) else None}
        tags = active_instrument_tags.get()
        tenant = _name(tags.get("tenant")) if self.tenant is None else self.tenant
        if is_tail:
            known = turns.alone(known, tenant) if isinstance(known, Branch) else known
            options = {**history_options(known), "placement": "tail"}
        return {
            **options,
            "tenant": tenant,
            "model": self.model,
            "preamble": self.preamble,
            "annotate": self.annotate,
            "order_locked": self.order_locked,
        }

    def _unarranged(self, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        """Log a failure, and return the nodes: the one place that degrades."""
        level = logging.DEBUG if self._failed else logging.WARNING
        self._failed = True
        _log.log(level, "nodes stay in relevance order", exc_info=True)
        nodes = nodes if self.choose is None else nodes[: self.choose.k]
        if self.placement == "head" or turns.engine_around() is not None:
            return nodes
        turn = {TURN: uuid4().hex}  # without a record: what the turn shows is unknown
        return [copied(scored, turn) for scored in nodes]


def _in_relevance_order(nodes: list[NodeWithScore]) -> list[NodeWithScore]:
    """Return the nodes as they came, or as they were before another ContextReusePostprocessor planned them."""
    ordered = nodes.in_relevance_order() if isinstance(nodes, PlannedNodes) else nodes
    return [whole(scored) for scored in ordered]


class _Request:
    """The nodes of one request, and their blocks; those of images are blank."""

    def __init__(
        self,
        nodes: list[NodeWithScore],
        pinned: PinRule[NodeWithScore] | None,
        is_tail: bool,
        choose: Choice | None = None,
    ) -> None:
        self._nodes = nodes
        self.blocks: list[ContextBlock] = []
        texts = [scored.node.get_content(MetadataMode.LLM) for scored in nodes]
        if is_tail:  # LlamaIndex strips a node that shows a label, and a later turn must find the same text
            texts = [text.strip() for text in texts]
        followed = neighbours([scored.node for scored in nodes], texts, follows_directly)
        for scored, text, before in zip(nodes, texts, followed, strict=True):
            follows = None if before is None else self.blocks[before]
            pin = pin_of(pinned, scored, scored.node.metadata)
            score = None if choose is None else scored.score
            self.blocks.append(ContextBlock(text, id=scored.node.node_id, score=score, pinned=pin, follows=follows))
        self.choose, self._first, self.error = choose, len(nodes), None
        if choose is not None:
            self.choose, self._first, self.error = usable_choice(choose, self.blocks, nodes)

    @property
    def first_nodes(self) -> list[NodeWithScore]:
        """The nodes that relevance alone feeds."""
        return self._nodes[: self._first]

    @property
    def first_blocks(self) -> list[ContextBlock]:
        """Their blocks."""
        return self.blocks[: self._first]

    def in_tail(self, plan: ContextPlan) -> PlannedNodes:
        """Return copies of the nodes that show labelled texts or references."""
        return PlannedNodes(tail_nodes(self._nodes, self._order(plan), plan))

    def _order(self, plan: ContextPlan) -> list[int]:
        """Return the places of the nodes in planned order: those of repeats behind, those without text as they were.

        With a choice, of the fed nodes; repeats are not among them.
        """
        order = [planned.rank for planned in plan.blocks]
        if self.choose is None:
            order += sorted([rank for planned in plan.blocks for rank in planned.positions[1:]])
        return with_kept_places(order, [rank for rank, block in enumerate(self.first_blocks) if block.is_blank])

    def in_planned_order(self, plan: ContextPlan) -> PlannedNodes:
        """Return copies of the nodes with their marks, which are empty if the plan has no annotation."""
        nodes, order = self._nodes, self._order(plan)
        if plan.annotation == "none":
            texts = {place: block for block in plan.blocks for place in block.positions}
            return PlannedNodes([_unmarked(nodes[rank], texts.get(rank)) for rank in order])
        # A note is about the places of relevance, whichever twin or version stands there.
        ranks: dict[int, int] = {}
        for left in plan.left_out:
            if left.instead is not None and left.reason != "exchanged":
                ranks[left.instead] = min(left.position, ranks.get(left.instead, left.instead))
        written = {
            position: marks(ranks.get(position, position), plan, planned)
            for planned in plan.blocks
            for position in planned.positions
        }
        return PlannedNodes([copied(nodes[rank], written.get(rank) or marks(rank)) for rank in order])


def _unmarked(scored: NodeWithScore, planned: PlannedBlock | None) -> NodeWithScore:
    """Return a copy without marks, whose text cannot pass for a note."""
    copy = copied(scored, {})
    if planned is None or planned.render() == planned.block.text:
        return copy
    return with_node(copy, showing(copy.node, planned.render()) or copy.node)


def _name(tag: object) -> str | None:
    return None if tag is None else str(tag)
