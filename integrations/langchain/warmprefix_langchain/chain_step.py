"""A chain step between retrieval and the prompt, and a chat prompt with a place for the order note."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice, repeat
from typing import Any, get_args

from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.documents import Document
from langchain_core.prompts import (
    ChatPromptTemplate,
    HumanMessagePromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
    StringPromptTemplate,
    SystemMessagePromptTemplate,
)
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSerializable, ensure_config
from pydantic import ConfigDict
from typing_extensions import Self

from warmprefix import Branch, Choice, ContextPlanner
from warmprefix.annotate import Annotate
from warmprefix.forks import fork_safe_lock
from warmprefix.plan import Placement
from warmprefix_langchain.conversations import ConversationRule
from warmprefix_langchain.document_labels import LEFT_OUT_KEY, NOTE_KEY, ShownIn
from warmprefix_langchain.plugin_options import ContextReuseOptions
from warmprefix_requests.neighbours import PinRule

__all__ = ["context_prompt", "context_reuse"]

_MOST_WAITING = 32
"""Inputs that wait, announced at one time: a plan considers no more."""

StepInput = list[Document] | dict[str, Any]


def context_reuse(
    planner: ContextPlanner | None = None,
    *,
    placement: Placement = "head",
    conversation: ConversationRule | Branch | str | None = None,
    annotate: Annotate = "auto",
    shown_in: ShownIn = "prompt",
    order_locked: bool = False,
    pinned: PinRule[Document] | None = None,
    choose: Choice | None = None,
    score_key: str = "relevance_score",
    tenant: str | None = None,
    model: str | None = None,
    preamble: str | None = None,
    context_key: str = "context",
    history_key: str = "chat_history",
) -> Runnable[StepInput, dict[str, Any]]:
    """Return a chain step that arranges documents and yields the order note separately.

    The step takes a dict, for example from ``RunnablePassthrough.assign(context=itemgetter("input") | retriever)``. It
    yields the same dict with arranged documents and an added ``context_note``, which is an empty string if the order
    needs no note. It also takes a list of documents, and yields
    ``{"documents": ..., "context": ..., "context_note": ...}`` with the same list under both names. That dict holds no
    question, which `context_prompt` needs.

    `context_prompt` puts the note next to the question. By default the note quotes the most relevant document, and
    texts keep their bytes, but for lines that read like a note. A stuff chain shows labels (`annotate="labels"` or
    `"both"`) and references (`placement="tail"`) with every document prompt that prints ``{page_content}``, as the
    default one does. For a function that joins ``page_content`` itself, use `shown_in="content"`, or the prompt does
    not show them.

    Args:
        planner: By default this step creates its own. One planner for the whole application reuses most.
        placement: `"head"` if each turn builds the prompt again. `"tail"` if the documents are appended to a history
            that keeps them: documents that the messages under `history_key` show become references.
        conversation: What the prompt continues, if there are no messages under `history_key`: `thread_conversation`, or
            another value of `ContextReuseOptions.conversation`.
        annotate, shown_in, order_locked, pinned: See `ContextReuseOptions`, as for `tenant`, `model` and `preamble`.
        choose: Which of the documents are fed; see `ContextReuseOptions`, as for `score_key`. The dict then has the
            others, too, as ``context_left_out``.
        tenant: Tenant of the documents; if None, the config may name one.
        model: Model that the prompt is for.
        preamble: The text before the documents, or its name.
        context_key: Key of the documents in a dict.
        history_key: Key of the earlier messages in a dict, in any form that LangChain takes messages in.
    """
    options: dict[str, Any] = {} if planner is None else {"planner": planner}
    return _ContextReuseStep(
        placement=placement,
        conversation=conversation,
        annotate=annotate,
        shown_in=shown_in,
        order_locked=order_locked,
        pinned=pinned,
        choose=choose,
        score_key=score_key,
        tenant=tenant,
        model=model,
        preamble=preamble,
        context_key=context_key,
        history_key=history_key,
        **options,
    )


class _ContextReuseStep(ContextReuseOptions, RunnableSerializable[StepInput, dict[str, Any]]):
    model_config = ConfigDict(extra="forbid")

    name: str | None = "context_reuse"
    context_key: str
    history_key: str

    def batch(
        self,
        inputs: list[StepInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """Do the same as LangChain's `batch`; each input is arranged in view of those behind it."""
        with _WaitingInputs(self, inputs, config) as waiting:
            return super().batch(inputs, config, return_exceptions=return_exceptions, waiting=waiting, **kwargs)

    async def abatch(
        self,
        inputs: list[StepInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """Do the same as LangChain's `abatch`; each input is arranged in view of those behind it."""
        with _WaitingInputs(self, inputs, config) as waiting:
            return await super().abatch(inputs, config, return_exceptions=return_exceptions, waiting=waiting, **kwargs)

    def invoke(
        self,
        input: StepInput,  # noqa: A002
        config: RunnableConfig | None = None,
        *,
        waiting: _WaitingInputs | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if waiting is not None:
            waiting.announce_next()
        return self._call_with_config(self._arrange, input, config)

    async def ainvoke(
        self,
        input: StepInput,  # noqa: A002
        config: RunnableConfig | None = None,
        *,
        waiting: _WaitingInputs | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if waiting is not None:
            waiting.announce_next()
        return await self._acall_with_config(self._aarrange, input, config)

    def _arrange(
        self, given: StepInput, run_manager: CallbackManagerForChainRun, config: RunnableConfig
    ) -> dict[str, Any]:
        documents, history = self._parts(given)
        return self._joined(given, *self.arranged(documents, config, run_manager, history))

    async def _aarrange(
        self, given: StepInput, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig
    ) -> dict[str, Any]:
        documents, history = self._parts(given)
        return self._joined(given, *await self.aarranged(documents, config, run_manager, history))

    def _parts(self, given: StepInput) -> tuple[list[Document], Any]:
        if not isinstance(given, dict):
            return given, None
        if self.context_key not in given:
            raise ValueError(f"input must have its documents under {self.context_key!r}, got the keys {list(given)}")
        return given[self.context_key], given.get(self.history_key)

    def _joined(
        self, given: StepInput, documents: list[Document], note: str, left_out: Sequence[Document]
    ) -> dict[str, Any]:
        others = given if isinstance(given, dict) else {"documents": documents}
        added = {} if self.choose is None else {LEFT_OUT_KEY: list(left_out)}
        return {**others, self.context_key: documents, NOTE_KEY: note, **added}


class _WaitingInputs:
    """The inputs of one batch, of which those next in line are announced. Ends with its block."""

    def __init__(
        self, step: _ContextReuseStep, inputs: Sequence[StepInput], config: RunnableConfig | list[RunnableConfig] | None
    ) -> None:
        configs = config if isinstance(config, list) else repeat(config)
        self._inputs = zip(inputs, configs, strict=False)  # LangChain refuses lists of another length
        self._step = step
        self._lock = fork_safe_lock()
        self._announced = ExitStack()

    def announce_next(self) -> None:
        """Announce the next input, if there is one."""
        with self._lock:
            for given, config in islice(self._inputs, 1):
                documents: Any = given.get(self._step.context_key) if isinstance(given, dict) else given
                self._announced.enter_context(self._step.announced(documents, ensure_config(config)))

    def __enter__(self) -> Self:
        for _ in range(_MOST_WAITING):
            self.announce_next()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._announced.close()


def context_prompt(
    system: str = "Answer the question from the context. If the context does not contain the answer, point that out.",
    *,
    placement: Placement = "head",
) -> ChatPromptTemplate:
    """Return a prompt for `create_stuff_documents_chain` after `context_reuse`.

    It takes ``context`` and ``input``, and optionally ``chat_history`` and ``context_note``. An empty value leaves no
    blank line.

    Args:
        system: The instructions: a template, which may use variables of your own. A variable that differs in each
            request, such as the time, keeps the prefix cache cold.
        placement: `"head"` puts the documents after the instructions, `"tail"` into the last message, before the
            question. With `"tail"`, keep that message in the history as it was sent.

    Raises:
        ValueError: `placement` has another value.

    >>> prompt = context_prompt("Be brief.")
    >>> for message in prompt.format_messages(context="[a] Water boils at 100 °C.", input="When does it boil?"):
    ...     print(f"{message.type}: {message.content}")
    system: Be brief.
    <BLANKLINE>
    [a] Water boils at 100 °C.
    human: When does it boil?
    """
    if placement not in get_args(Placement):
        raise ValueError(f"placement must be 'head' or 'tail', got {placement!r}")
    head, tail = ((system, "{context}"), ()) if placement == "head" else ((system,), ("{context}",))
    messages = [
        SystemMessagePromptTemplate(prompt=_Paragraphs.of(*head)),
        MessagesPlaceholder("chat_history", optional=True),
        HumanMessagePromptTemplate(prompt=_Paragraphs.of(*tail, f"{{{NOTE_KEY}}}", "{input}")),
    ]
    return ChatPromptTemplate.from_messages(messages).partial(**{NOTE_KEY: ""})


class _Paragraphs(StringPromptTemplate):
    """Templates joined by blank lines, without those that format to an empty text."""

    paragraphs: tuple[PromptTemplate, ...]

    @classmethod
    def of(cls, *templates: str) -> _Paragraphs:
        paragraphs = tuple(map(PromptTemplate.from_template, templates))
        variables = dict.fromkeys(name for paragraph in paragraphs for name in paragraph.input_variables)
        return cls(paragraphs=paragraphs, input_variables=list(variables))

    def format(self, **kwargs: Any) -> str:
        return "\n\n".join(filter(None, [paragraph.format(**kwargs) for paragraph in self.paragraphs]))
