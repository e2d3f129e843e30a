"""A chain's step between retrieval and the prompt, for prompts that have a place of their own for the order note."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.documents import Document
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSerializable
from pydantic import ConfigDict

from warmprefix import ContextPlanner
from warmprefix.plan import Placement
from warmprefix_langchain.arrange import Annotate
from warmprefix_langchain.settings import ContextReuseSettings

__all__ = ["NOTE_KEY", "context_reuse"]

NOTE_KEY = "context_note"

Found = list[Document] | dict[str, Any]


def context_reuse(
    planner: ContextPlanner | None = None,
    *,
    placement: Placement = "head",
    annotate: Annotate = "prompt",
    tenant: str | None = None,
    model: str | None = None,
    preamble: str | None = None,
    context_key: str = "context",
    history_key: str = "chat_history",
) -> Runnable[Found, dict[str, Any]]:
    """Arrange documents, and hand the order note on by itself.

    From a dict, such as ``RunnablePassthrough.assign(context=itemgetter("input") | retriever)`` makes, it yields the
    same dict, its documents arranged and ``context_note`` added: an empty string where there is none. From a list of
    documents it yields ``{"documents": ..., "context": ..., "context_note": ...}``, the same list under both names and
    no question, which `context_prompt` needs.

    `context_prompt` has a place for the note next to the question. A stuff chain with any document prompt that prints
    ``{page_content}``, as the default one does, shows the labels. A function that joins ``page_content`` by itself
    wants `annotate="content"`, or the note names labels that stand nowhere. See `annotate` of `ContextReuseSettings`.

    Args:
        planner: One for the whole application knows the most; by default this step has one of its own.
        placement: `"head"` if the prompt is made anew each turn. `"tail"` if the documents are appended to a history
            that keeps them: those that the messages under `history_key` show become references.
        annotate: As for `ContextReuseSettings`, as are `tenant`, `model` and `preamble`.
        tenant: Whose documents; where it is None, the config may tell.
        model: Which model the prompt is for.
        preamble: The text in front of the documents, or its name.
        context_key: Where a dict has its documents.
        history_key: Where it may have the messages in front of them, in any form that LangChain takes messages in.
    """
    options: dict[str, Any] = {} if planner is None else {"planner": planner}
    return _ContextReuse(
        placement=placement,
        annotate=annotate,
        tenant=tenant,
        model=model,
        preamble=preamble,
        context_key=context_key,
        history_key=history_key,
        **options,
    )


class _ContextReuse(ContextReuseSettings, RunnableSerializable[Found, dict[str, Any]]):
    model_config = ConfigDict(extra="forbid")

    name: str | None = "context_reuse"
    context_key: str
    history_key: str

    def invoke(self, input: Found, config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:  # noqa: A002
        return self._call_with_config(self._arrange, input, config)

    async def ainvoke(self, input: Found, config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:  # noqa: A002
        return await self._acall_with_config(self._aarrange, input, config)

    def _arrange(self, found: Found, run_manager: CallbackManagerForChainRun, config: RunnableConfig) -> dict[str, Any]:
        documents, history = self._parts(found)
        return self._joined(found, *self.arranged(documents, config, metadata=run_manager.metadata, history=history))

    async def _aarrange(
        self, found: Found, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig
    ) -> dict[str, Any]:
        documents, history = self._parts(found)
        return self._joined(
            found, *await self.aarranged(documents, config, metadata=run_manager.metadata, history=history)
        )

    def _parts(self, found: Found) -> tuple[list[Document], Any]:
        if not isinstance(found, dict):
            return found, None
        if self.context_key not in found:
            raise ValueError(f"the dict needs its documents under {self.context_key!r}, got the keys {list(found)}")
        return found[self.context_key], found.get(self.history_key)

    def _joined(self, found: Found, documents: list[Document], note: str) -> dict[str, Any]:
        if isinstance(found, dict):
            return {**found, self.context_key: documents, NOTE_KEY: note}
        return {"documents": documents, self.context_key: documents, NOTE_KEY: note}
