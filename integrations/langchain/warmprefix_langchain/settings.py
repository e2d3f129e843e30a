"""What the retriever, the compressor and the Runnable have in common: their options, and one way to use them."""

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
from warmprefix.plan import Placement
from warmprefix_langchain.arrange import Annotate, Arranged, arrange, as_blocks, as_list
from warmprefix_langchain.origin import origin

__all__ = ["ContextReuseSettings"]

_log = logging.getLogger("warmprefix")
_failures = itertools.count()


class ContextReuseSettings(BaseModel):
    """How documents are arranged. Arrange them once: the next to do it would take the planned order for relevance.

    A plan is committed at once, for nothing here learns whether the model answered. That is safe: only messages that
    are shown ever lead to a reference, and an order learned from a failed call costs at most a cache hit.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    planner: ContextPlanner = Field(default_factory=ContextPlanner, repr=False, exclude=True)
    """One for the whole application knows the most; by default this object has one of its own."""

    placement: Placement = "head"
    """`"head"` if the documents are put into each prompt anew: nothing is de-duplicated. `"tail"` if they are appended
    to a history that keeps them: those that the history shows become references, if the call shows the history. Without
    it nothing is de-duplicated either: what was sent earlier is not remembered, since a call that failed, was retried
    or was cut from the history would leave the model a reference to a text that it never saw."""

    annotate: Annotate = "none"
    """Where labels and the note of the relevance order stand. `"none"`: nowhere, the order is all there is, which is
    right in every chain. `"prompt"`, for chains that put all documents into one prompt: in `metadata["page_content"]`,
    which `format_document`, and so any document prompt with `{page_content}`, prints in place of the text;
    `page_content` stays as it was. What makes other documents with the same metadata, as splitters and map-reduce
    chains do, would show these texts in place of its own. `"content"`, for chains that join it by themselves: in
    `page_content`. In each case `metadata["context_label"]` tells the label, unless the document has an entry of that
    name already."""

    tenant: str | None = None
    """Nothing is shared between tenants. Where this is None, a call's config may name one, as `tenant` in
    `configurable` or `metadata`; where it is not, no call can have another."""

    model: str | None = None
    """Which model the prompt is for, if the planner serves several."""

    preamble: str | None = None
    """The text in front of the documents, or its name, if the planner serves prompts that begin differently."""

    @model_validator(mode="after")
    def _references_need_labels(self) -> Self:
        if self.placement == "tail" and self.annotate == "none":
            raise ValueError("placement='tail' needs labels to refer to: annotate must be 'prompt' or 'content'")
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy that shares the planner."""
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
    ) -> Arranged:
        """The documents as planned; as they came if planning fails.

        Raises:
            TypeError: `documents` is no sequence of documents.
        """
        listed = as_list(documents)
        try:
            options = self._options(config, metadata, history)
            with self.planner.planning(as_blocks(listed, self.annotate), **options) as plan:
                return arrange(listed, plan, self.annotate)
        except Exception:
            return _unarranged(listed)

    async def aarranged(
        self,
        documents: Iterable[Document],
        config: RunnableConfig,
        *,
        metadata: Mapping[str, Any] | None = None,
        history: Iterable[MessageLikeRepresentation] | None = None,
    ) -> Arranged:
        """`arranged`, for tasks."""
        listed = as_list(documents)
        try:
            options = self._options(config, metadata, history)
            async with self.planner.aplanning(as_blocks(listed, self.annotate), **options) as plan:
                return arrange(listed, plan, self.annotate)
        except Exception:
            return _unarranged(listed)

    def _options(
        self,
        config: RunnableConfig,
        metadata: Mapping[str, Any] | None,
        history: Iterable[MessageLikeRepresentation] | None,
    ) -> dict[str, Any]:
        conversation, tenant = origin(config, metadata)
        options: dict[str, Any] = {
            "conversation": conversation,
            "tenant": tenant if self.tenant is None else self.tenant,
            "model": self.model,
            "preamble": self.preamble,
        }
        if self.placement == "tail" and history is not None:
            messages = convert_to_messages([history] if isinstance(history, str) else history)
            shown = [{"role": message.type, "content": message.content} for message in messages]
            options |= {"placement": "tail", "history": shown}
        return options


def _unarranged(documents: Sequence[Document]) -> Arranged:
    """The one place where a failure to plan degrades to the documents as they came."""
    first = next(_failures) == 0
    _log.log(logging.WARNING if first else logging.DEBUG, "documents could not be arranged", exc_info=True)
    return Arranged(list(documents), "")
