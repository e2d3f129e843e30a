"""Options and planning that the retriever, the compressor and the chain step share."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from langchain_core.chat_history import BaseChatMessageHistory
from langchain_core.documents import Document
from langchain_core.messages import MessageLikeRepresentation, convert_to_messages
from langchain_core.runnables import RunnableConfig
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from typing_extensions import Self

from warmprefix import Branch, Choice, ContextBlock, ContextPlanner
from warmprefix.annotate import Annotate
from warmprefix.plan import Placement
from warmprefix_langchain.conversations import ConversationRule, first_name, metadata_of
from warmprefix_langchain.document_labels import PromptDocuments, ShownIn, arrange, as_blocks, as_list
from warmprefix_langchain.run_plans import RecordedPlan, follow_runs
from warmprefix_requests.choices import usable_choice
from warmprefix_requests.neighbours import PinRule

__all__ = ["ContextReuseOptions"]

_log = logging.getLogger("warmprefix")
_failures = itertools.count()


class ContextReuseOptions(BaseModel):
    """Options for arranging documents.

    Arrange documents only once: a second step would read the planned order as the relevance order.

    With a `conversation` that is recorded, a plan is committed once the model has answered, in the same run. All other
    plans are committed at once: only messages that are shown lead to references, and an order learned from a failed
    call costs at most a cache hit.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    planner: ContextPlanner = Field(default_factory=ContextPlanner, repr=False, exclude=True)
    """The planner; by default each object creates its own. One planner for the whole application reuses most."""

    placement: Placement = "head"
    """Where the chain puts the documents.

    `"head"` if it builds them into each prompt again: nothing is de-duplicated. `"tail"` if it appends them to a
    history that it keeps: documents that the history holds become references, if the call passes the history or there
    is a `conversation`. Without both, nothing is de-duplicated."""

    conversation: ConversationRule | Branch | str | None = None
    """With `placement="tail"`: what the prompt continues, where a call passes no history.

    `thread_conversation`, or your own function of the call's config. A list of messages or a `BaseChatMessageHistory`
    decides by itself. A `Branch` names the answer that the prompt continues: the `id` of its message, or of its stored
    response. A str names a linear history, which has obligations for the application. None: what the prompt continues
    is unknown, so every document is sent in full."""

    annotate: Annotate = "none"
    """What the prompt shows of the relevance order: the words of `ContextPlanner`.

    `"none"`: nothing. Only the order changes, which is safe in every chain. `"note"` or `"auto"`: if the order needs
    it, a note that quotes the most relevant document. `"labels"`: each
    document begins with its label. `"both"`: labels, and a note that names them.

    All but `"none"` are for chains that put all documents into one prompt. With labels, `metadata["context_label"]`
    holds the label, unless the document already has an entry of that name."""

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

    choose: Choice | None = None
    """Which of the documents are fed, in view of the cache, as for `ContextPlanner.plan`; None feeds all of them.

    The documents are then candidates, best first, and each needs a score. If the scores of a request can't be used,
    its first `k` documents are fed, and a warning says why. The `version` of the choice gets a `Document`."""

    score_key: str = "relevance_score"
    """Metadata key of a document's score. Rerankers write the default."""

    tenant: str | None = None
    """Tenant of every call; tenants share nothing. If None, a call's config may name one, as `tenant` in `configurable`
    or `metadata`."""

    model: str | None = None
    """Model that the prompt is for, if the planner serves several."""

    preamble: str | None = None
    """The text before the documents, or its name, if the planner serves prompts that begin differently."""

    _has_no_scores: bool = PrivateAttr(default=False)
    """True once the documents of a request had no usable scores."""
    _is_distrusted: bool = PrivateAttr(default=False)
    """True once a prompt did not hold what the conversation had shown."""

    @model_validator(mode="after")
    def _check_placement(self) -> Self:
        if self.conversation is not None:
            if self.placement == "head":
                raise ValueError("placement must be 'tail' with a conversation, got 'head'")
            follow_runs()
        return self

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        if self.choose is not None and self.order_locked:
            raise ValueError("order_locked must be False with choose: a locked order feeds all documents")
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
        run: object,
        history: Iterable[MessageLikeRepresentation] | None = None,
        choose: Choice | None = None,
        scores: Sequence[float] | None = None,
    ) -> PromptDocuments:
        """Return the documents as planned; in the given order if planning fails.

        Args:
            documents: The documents, in relevance order.
            config: The running config.
            run: The manager of the run, or of its children.
            history: The messages in front of the documents.
            choose: By default the option of this name.
            scores: Those of the documents; by default in their metadata.

        Raises:
            TypeError: `documents` is not a sequence of documents.
        """
        listed = as_list(documents)
        choose = self.choose if choose is None else choose
        try:
            earlier = self._earlier(config, run, history)
            if isinstance(earlier, BaseChatMessageHistory):
                earlier = earlier.messages
            request = self._request(listed, choose, scores)
            with self._planning(*request, config, run, earlier) as plan:
                return arrange(listed, plan, self.shown_in, chosen=choose is not None)
        except Exception:
            return _unarranged(listed, choose)

    async def aarranged(
        self,
        documents: Iterable[Document],
        config: RunnableConfig,
        run: object,
        history: Iterable[MessageLikeRepresentation] | None = None,
        choose: Choice | None = None,
        scores: Sequence[float] | None = None,
    ) -> PromptDocuments:
        """Do the same as `arranged`, without blocking the event loop."""
        listed = as_list(documents)
        choose = self.choose if choose is None else choose
        try:
            earlier = self._earlier(config, run, history)
            if isinstance(earlier, BaseChatMessageHistory):
                earlier = await earlier.aget_messages()
            request = self._request(listed, choose, scores)
            async with self._planning(*request, config, run, earlier) as plan:
                return arrange(listed, plan, self.shown_in, chosen=choose is not None)
        except Exception:
            return _unarranged(listed, choose)

    def _request(
        self, documents: Sequence[Document], choose: Choice | None, scores: Sequence[float] | None
    ) -> tuple[list[ContextBlock], Choice | None]:
        """Return blocks to plan and the choice among them; without usable scores, the first `k` and no choice."""
        found = [_score(document, self.score_key) for document in documents] if scores is None else scores
        blocks = as_blocks(documents, self.shown_in, self.pinned, found)
        if choose is None:
            return blocks, None
        usable, first, error = usable_choice(choose, blocks, documents)
        if usable is None:
            level = logging.DEBUG if self._has_no_scores else logging.WARNING
            self._has_no_scores = True
            source = f"metadata[{self.score_key!r}], which score_key can change" if scores is None else "the store"
            _log.log(level, "the first %d documents are fed: %s. Scores come from %s.", choose.k, error, source)
            blocks = blocks[:first]
        return blocks, usable

    def _earlier(self, config: RunnableConfig, run: object, history: Iterable[MessageLikeRepresentation] | None) -> Any:
        """Return what the prompt continues: a str or a `Branch` for a record, None if unknown, else the messages."""
        if history is not None:
            return [history] if isinstance(history, str) else history
        if self._is_distrusted:
            return None
        if not callable(self.conversation):
            return self.conversation
        return self.conversation({**config, "metadata": {**metadata_of(run), **(config.get("metadata") or {})}})

    def announced(self, documents: Iterable[Document], config: RunnableConfig) -> AbstractContextManager[object]:
        """Announce documents that are arranged later, so that calls before consider them; see `ContextPlanner.queued`.

        Nothing is announced if their place in the prompt may be behind a history, or if that fails.
        """
        if self.placement == "tail" or not isinstance(documents, Sequence):  # an iterator can be read once only
            return nullcontext()
        try:
            blocks = as_blocks(as_list(documents), self.shown_in, self.pinned)
            if self.choose is not None:
                blocks = blocks[: usable_choice(self.choose, blocks, documents).first]
            scope = {"tenant": self._tenant(_sources(config)), "model": self.model, "preamble": self.preamble}
            return self.planner.queued(blocks, **scope)
        except Exception:  # the call itself reports what is wrong with its documents
            return nullcontext()

    def _tenant(self, sources: Sequence[Mapping[str, Any]]) -> str | None:
        if self.tenant is not None:
            return self.tenant
        return next((str(name) for source in sources if (name := source.get("tenant")) is not None), None)

    def _planning(
        self, blocks: Sequence[ContextBlock], choose: Choice | None, config: RunnableConfig, run: object, earlier: Any
    ) -> Any:
        sources = (*_sources(config), metadata_of(run))
        name = first_name(sources)
        options: dict[str, Any] = {
            "conversation": None if name is None else str(name),
            "tenant": self._tenant(sources),
            "model": self.model,
            "preamble": self.preamble,
            "order_locked": self.order_locked,
            "annotate": self.annotate,
            "choose": choose,
        }
        if self.placement == "head" or (earlier is None and self.conversation is None):
            return self.planner.planning(blocks, **options)
        options["placement"] = "tail"
        if earlier is None or isinstance(earlier, str | Branch):
            options["conversation"] = earlier
        else:
            messages = convert_to_messages(earlier)
            options["history"] = [{"role": message.type, "content": message.content} for message in messages]
        if self.conversation is None:
            return self.planner.planning(blocks, **options)
        return RecordedPlan(self.planner, blocks, options, run, self._distrust)

    def _distrust(self) -> None:
        if not self._is_distrusted:
            self._is_distrusted = True
            _log.warning(
                "a prompt lacks a document that its reference names: a step cut it from the history, or never put it "
                "there. From now on, all documents are sent in full."
            )


def _sources(config: RunnableConfig) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return where a config names tenants and conversations; `configurable` comes first."""
    return config.get("configurable") or {}, config.get("metadata") or {}


def _unarranged(documents: Sequence[Document], choose: Choice | None) -> PromptDocuments:
    """Log a planning failure, and return the documents in the given order: the one place that degrades."""
    first = next(_failures) == 0
    _log.log(logging.WARNING if first else logging.DEBUG, "documents could not be arranged", exc_info=True)
    end = len(documents) if choose is None else choose.k
    return PromptDocuments(list(documents[:end]), "", documents[end:])


def _score(document: Document, key: str) -> float | None:
    """Return the score in a document's metadata; None without one, or for a value that is no number."""
    with suppress(TypeError, ValueError, OverflowError):
        return float(document.metadata.get(key))  # type: ignore[arg-type]
    return None
