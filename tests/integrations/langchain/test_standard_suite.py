"""LangChain's own tests of retrievers, on ours around one that takes `k` and one that does not."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests

from warmprefix_langchain import ContextReuseRetriever, thread_conversation

DOCUMENTS = [Document(f"Passage {i}.", id=str(i)) for i in range(10)]


class OursTests(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[ContextReuseRetriever]:
        return ContextReuseRetriever

    @property
    def retriever_query_example(self) -> str:
        return "Which passage?"


class TestAroundVectorStore(OursTests):
    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        store = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
        store.add_documents(DOCUMENTS)
        return {"retriever": store.as_retriever(search_kwargs={"k": 2})}


class TestAroundRunnable(OursTests):
    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"retriever": RunnableLambda(lambda _: DOCUMENTS)}


class TestInTailPlacement(TestAroundRunnable):
    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {**super().retriever_constructor_params, "placement": "tail", "annotate": "both", "shown_in": "content"}


class TestInConversations(TestInTailPlacement):
    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {**super().retriever_constructor_params, "conversation": thread_conversation}


@pytest.mark.parametrize("base", [TestAroundVectorStore, TestAroundRunnable, TestInTailPlacement, TestInConversations])
def test_the_suite_is_there(base: type[RetrieversIntegrationTests]) -> None:
    assert {"test_k_constructor_param", "test_invoke_with_k_kwarg", "test_ainvoke_returns_documents"} <= set(dir(base))
