"""Errors of the LangChain plugins for chains: they name the argument, the value and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda

from warmprefix_langchain import ContextReuseCompressor, ContextReuseRetriever, context_prompt, context_reuse

FIND_NOTHING: RunnableLambda[Any, list[Any]] = RunnableLambda(lambda _: [])
MISTAKES: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (
        lambda: context_prompt(placement="middle"),  # type: ignore[arg-type]
        ValueError,
        "placement must be 'head' or 'tail', got 'middle'",
    ),
    (
        lambda: context_reuse().invoke({"input": "?"}),
        ValueError,
        "input must have its documents under 'context', got the keys ['input']",
    ),
    (
        lambda: context_reuse().invoke("text"),  # type: ignore[arg-type]
        TypeError,
        "documents must be a sequence of Document, got one str",
    ),
    (
        lambda: ContextReuseCompressor(placement="tail", annotate="labels"),
        ValueError,
        "placement must be 'head' without a conversation, got 'tail': compressors get no history",
    ),
    (
        lambda: ContextReuseCompressor().compress_documents(7, "?"),  # type: ignore[arg-type]
        TypeError,
        "documents must be a sequence of Document, got one int",
    ),
    (
        lambda: ContextReuseRetriever(retriever=FIND_NOTHING).invoke("?", k=0),
        ValueError,
        "k must be 1 or more, got 0",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), MISTAKES)
def test_errors_name_the_argument_the_value_and_the_allowed_ones(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()
