"""Options and planning that the retriever, the compressor and the chain step share."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import MessageLikeRepresentation, convert_to_messages
from langchain_core.runnables import RunnableConfig
from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from warmprefix import ContextPlanner
from warmprefix.annotate import Annotate, annotation_for
from warmprefix.plan import Placement
from warmprefix_langchain.document_labels import PromptDocuments, ShownIn, arrange, as_blocks, as_list
from warmprefix_requests.neighbours import PinRule

__all__ = ["ContextReuseOptions"]

_log = logging.getLogger("warmprefix")
_failures = itertools.count()

_CONVERSATION_KEYS = ("thread_id", "session_id", "conversation_id")


class ContextReuseOptions(BaseModel):
    """Options for arranging documents.

    Arrange documents only once: a second step would read the planned order as the relevance order.

    Plans are committed at once, because a retriever does not learn whether the model answered. This is safe: only
    messages in the given history lead to references, and an order learned from a failed call costs at most a cache hit.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    planner: ContextPlanner = Field(default_factory=ContextPlanner, repr=False, exclude=True)
    """The planner; by default each object creates its own. One planner for the whole application reuses most."""

    placement: Placement = "head"
    """Where the chain puts the documents.

    `"head"` if it builds them into each prompt again: nothing is de-duplicated. `"tail"` if it appends them to a
    history that it keeps: documents that the history shows become references, if the call passes the history. Without
    a history nothing is de-duplicated. Earlier retrievals are not remembered: after a call that failed, was retried or
    was cut from the history, the model would get a reference to text that it never saw."""

    annotate: Annotate = "none"
    """What the prompt shows of the relevance order: the words of `ContextPlanner`.

    `"none"`: nothing. Only the order changes, which is safe in every chain. `"note"` or `"auto"`: if the order needs
    it, a note that quotes the most relevant document. `"labels"`: each
    document begins with its label. `"both"`: labels, and a note that names them.

    All but `"none"` are for chains that put all documents into one prompt. `placement="tail"` needs labels, so `"note"`
    and `"auto"` are `"both"` there. With labels, `metadata["context_label"]` holds the label, unless the document
    already has an entry of that name."""

    shown_in: ShownIn = "prompt"
    """Where the documents show labels, note and references.

    `"prompt"`: in `metadata["page_content"]`. `format_document`, and so every document prompt with `{page_content}`,
    prints this entry in place of the text; `page_content` stays as it was. Do not use it with splitters or map-reduce
    chains: they make other documents with the same metadata, which would show these texts in place of their own.

    `"content"`, for chains that join the texts themselves: in `page_content`."""

    order_locked: bool = False
    """Keep the order of the documents: it is a fact, such as time.

    Without it, documents one behind the other that also follow each other in their source stay together and in order.
    Metadata decide about that: `source`, and `start_index` or `page`."""

    pinned: PinRule[Document] | None = None
    """Documents to keep at an end of the context: the metadata key of `"start"` or `"end"`, or a function that returns
    one of them or None."""

    tenant: str | None = None
    """Tenant of every call; tenants share nothing. If None, a call's config may name one, as `tenant` in `configurable`
    or `metadata`."""

    model: str | None = None
    """Model that the prompt is for, if the planner serves several."""

    preamble: str | None = None
    """The text before the documents, or its name, if the planner serves prompts that begin differently."""

    @model_validator(mode="after")
    def _check_references_have_labels(self) -> Self:
        if self.placement == "tail" and self.annotate == "none":
            raise ValueError(
                "annotate must be 'auto', 'note', 'labels' or 'both' with placement='tail', which needs labels to "
                "refer to, got 'none'"
            )
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Return a copy that shares the planner."""
        memo = {} if memo is None else memo
        memo[id(self.planner)] = self.planner
        return super().__deepcopy__(memo)

    def arranged(
        self,
        documents: Iterable[Document],
        config: RunnableConfig,
        *,
        metadata: Mapping[str, Any] | None = None,
        history: Iterable[MessageLikeRepresentation] | None = None,
    ) -> PromptDocuments:
        """Return the documents as planned; in the given order if planning fails.

        Raises:
            TypeError: `documents` is not a sequence of documents.
        """
        listed = as_list(documents)
        try:
            options = self._plan_options(config, metadata, history)
            with self.planner.planning(as_blocks(listed, self.shown_in, self.pinned), **options) as plan:
                return arrange(listed, plan, self.shown_in)
        except Exception:
            return _unarranged(listed)

    async def aarranged(
        self,
        documents: Iterable[Document],
        config: RunnableConfig,
        *,
        metadata: Mapping[str, Any] | None = None,
        history: Iterable[MessageLikeRepresentation] | None = None,
    ) -> PromptDocuments:
        """Do the same as `arranged`, without blocking the event loop."""
        listed = as_list(documents)
        try:
            options = self._plan_options(config, metadata, history)
            async with self.planner.planning(as_blocks(listed, self.shown_in, self.pinned), **options) as plan:
                return arrange(listed, plan, self.shown_in)
        except Exception:
            return _unarranged(listed)

    def _plan_options(
        self,
        config: RunnableConfig,
        metadata: Mapping[str, Any] | None,
        history: Iterable[MessageLikeRepresentation] | None,
    ) -> dict[str, Any]:
        # The config's `configurable` comes first, then its metadata, then the metadata of the run itself.
        sources = (config.get("configurable") or {}, config.get("metadata") or {}, metadata or {})
        tenant = next((str(name) for source in sources if (name := source.get("tenant")) is not None), None)
        options: dict[str, Any] = {
            "conversation": _conversation(sources),
            "tenant": tenant if self.tenant is None else self.tenant,
            "model": self.model,
            "preamble": self.preamble,
            "order_locked": self.order_locked,
            # Without a history the plan has head placement, but later turns refer to its labels.
            "annotate": annotation_for(self.annotate, self.placement),
        }
        if self.placement == "tail" and history is not None:
            messages = convert_to_messages([history] if isinstance(history, str) else history)
            shown = [{"role": message.type, "content": message.content} for message in messages]
            options |= {"placement": "tail", "history": shown}
        return options


def _conversation(sources: Iterable[Mapping[str, Any]]) -> str | None:
    names = (source.get(key) for source in sources for key in _CONVERSATION_KEYS)
    return next((str(name) for name in names if name is not None and name != ""), None)


def _unarranged(documents: Sequence[Document]) -> PromptDocuments:
    """Log a planning failure, and return the documents in the given order: the one place that degrades."""
    first = next(_failures) == 0
    _log.log(logging.WARNING if first else logging.DEBUG, "documents could not be arranged", exc_info=True)
    return PromptDocuments(list(documents), "")
