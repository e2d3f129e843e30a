"""Choosing documents in view of the cache: where scores come from, what is fed without them, and what stays visible."""

from __future__ import annotations

import logging
import math
import re
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from langchain_classic.retrievers import ContextualCompressionRetriever, EnsembleRetriever
from langchain_classic.retrievers.document_compressors import CrossEncoderReranker, DocumentCompressorPipeline
from langchain_classic.retrievers.document_compressors.cross_encoder import BaseCrossEncoder
from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun, Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import HumanMessage
from langchain_core.runnables import ConfigurableField, Runnable, RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore, VectorStoreRetriever

from warmprefix import Choice, ContextPlanner
from warmprefix_langchain import ContextReuseCompressor, ContextReuseRetriever, context_reuse

Make = Callable[..., Any]
Run = Callable[..., Awaitable[Any]]

CHOICE = Choice(k=4, keep=1)
FILLER = "It lies far from the coast and is described at length. " * 12


@pytest.fixture
def planner() -> ContextPlanner:
    return ContextPlanner()


def passages(names: str, scores: Sequence[float] | None = None, key: str = "relevance_score") -> list[Document]:
    """Return documents with these ids, best first; scores fall slowly behind the first."""
    if scores is None:
        scores = [1.0, *[0.5 - 0.001 * place for place in range(len(names) - 1)]]
    return [
        Document(f"All about {name}. {FILLER}", id=name, metadata={"source": name, key: score})
        for name, score in zip(names, scores, strict=True)
    ]


EARLIER = ("xpqr", "ypqr", "zpqr", "abcd")
"""Requests after which the path of a, b, c and d is resident, and the others were fed before."""


async def sync(step: Any, method: str, *arguments: Any, **options: Any) -> Any:
    return getattr(step, method)(*arguments, **options)


async def a_sync(step: Any, method: str, *arguments: Any, **options: Any) -> Any:
    return await getattr(step, f"a{method}")(*arguments, **options)


both = pytest.mark.parametrize("run", [sync, a_sync])


# -- what is fed -------------------------------------------------------------------------------------------------------


@both
async def test_a_compressor_feeds_what_is_resident(run: Run, planner: ContextPlanner, ids: Make) -> None:
    compressor = ContextReuseCompressor(planner=planner, choose=CHOICE)
    for names in EARLIER:
        assert {*ids(await run(compressor, "compress_documents", passages(names), "?"))} == {*names}
    found = await run(compressor, "compress_documents", passages("axyzbcd"), "?")
    assert ids(found) == "abcd"
    assert found == [passages("axyzbcd")["axyzbcd".index(name)] for name in "abcd"]  # with their own metadata


def test_a_pipeline_chooses_behind_its_reranker(planner: ContextPlanner, shelf: Make, ids: Make) -> None:
    class Reranker(BaseDocumentCompressor):
        """Writes scores as those of Cohere, Flashrank and Voyage do."""

        def compress_documents(
            self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
        ) -> Sequence[Document]:
            by_id = {document.id: document for document in documents}
            return [
                by_id[found.id].model_copy(update={"metadata": found.metadata})  # with a score
                for found in passages(query)
            ]

    raw = [Document(f"All about {name}. {FILLER}", id=name) for name in "abcdpqrxyz"]
    compressor = DocumentCompressorPipeline(
        transformers=[Reranker(), ContextReuseCompressor(planner=planner, choose=CHOICE)]
    )
    retriever = ContextualCompressionRetriever(
        base_compressor=compressor, base_retriever=RunnableLambda(lambda query: raw)
    )
    assert ids([retriever.invoke(names) for names in (*EARLIER, "axyzbcd")][-1]) == "abcd"


@both
async def test_a_chain_step_names_what_it_left_out(run: Run, planner: ContextPlanner, ids: Make) -> None:
    step = context_reuse(planner, choose=CHOICE, annotate="none")
    for names in EARLIER:
        await run(step, "invoke", passages(names))
    for names, fed, others in (("abcdef", "abcd", "ef"), ("axyzbcd", "abcd", "xyz")):
        result = await run(step, "invoke", {"context": passages(names), "input": "?"})
        assert (ids(result["context"]), ids(result["context_left_out"])) == (fed, others)
        assert result["input"] == "?"
        assert ids((await run(step, "invoke", passages(names)))["context_left_out"]) == others


@both
async def test_batches_choose_what_plans_in_flight_hold(run: Run, planner: ContextPlanner, ids: Make) -> None:
    step = context_reuse(planner, choose=CHOICE, annotate="none")
    inputs = [passages(names) for names in (*EARLIER, "axyzbcd", "axyzbcd")]
    results = await run(step, "batch", inputs, {"max_concurrency": 1})
    assert [ids(result["context"]) for result in results[-3:]] == ["abcd"] * 3
    assert planner.stats().queued_requests == 0


@both
async def test_without_a_resident_path_it_is_as_if_only_the_first_were_found(run: Run, ids: Make) -> None:
    alone, chosen = ContextPlanner(), ContextPlanner()
    for names in ("abcdef", "cdefgh", "fghijk", "hijabc"):
        found = passages(names, [1.0, 0.9, 0.8, 0.7, 0.3, 0.2])  # no candidate is within the tolerance
        plain = await run(context_reuse(alone), "invoke", found[:4])
        result = await run(context_reuse(chosen, choose=CHOICE), "invoke", found)
        assert (result["context"], result["context_note"]) == (plain["context"], plain["context_note"])


def test_blank_and_equal_documents_take_no_place(planner: ContextPlanner, ids: Make) -> None:
    compressor = ContextReuseCompressor(planner=planner, choose=CHOICE)
    blank, again = Document(" ", id="-"), Document(passages("a")[0].page_content, id="A", metadata={"source": "copy"})
    found = compressor.compress_documents([blank, *passages("a"), again, *passages("abcdef")[1:]], "?")
    assert ids(found) == "abcd"
    only_blank = compressor.compress_documents([blank], "?")
    assert ids(only_blank) == "-"
    assert compressor.compress_documents([], "?") == []


def test_versions_and_twins_are_those_of_documents(planner: ContextPlanner, ids: Make) -> None:
    def version(document: Document) -> tuple[str, int] | None:
        return document.metadata.get("version")

    documents = passages("abcdef")
    documents[1].metadata["version"], documents[4].metadata["version"] = ("handbook", 1), ("handbook", 2)
    result = context_reuse(planner, choose=Choice(k=4, version=version)).invoke(documents)
    assert (ids(result["context"]), ids(result["context_left_out"])) == ("aecd", "bf")
    alike = Choice(k=4, twins=lambda document: document.id in "bc" or None)
    assert ids(context_reuse(choose=alike).invoke(passages("abcdef"))["context_left_out"]) == "cef"


@pytest.mark.parametrize("name", ["version", "twins"])
def test_a_function_that_fails_feeds_the_first(name: str, planner: ContextPlanner, ids: Make) -> None:
    def failing(document: Document) -> Any:
        raise KeyError(name)

    result = context_reuse(planner, choose=replace(CHOICE, **{name: failing})).invoke(passages("abcdef"))  # type: ignore[arg-type]
    assert (ids(result["context"]), ids(result["context_left_out"])) == ("abcd", "ef")


def test_a_history_gets_the_first_documents(planner: ContextPlanner, shelf: Make, ids: Make) -> None:
    retriever = ContextReuseRetriever(
        retriever=shelf({"?": passages("abcdef"), "!": passages("axyzbcd")}),
        planner=planner,
        placement="tail",
        choose=CHOICE,
    )
    assert ids(retriever.invoke("?", history=[])) == "abcd"
    assert ids(retriever.invoke("!", history=[HumanMessage("Hello."), HumanMessage("All is well.")])) == "axyz"


def test_nothing_chosen_crosses_a_tenant(planner: ContextPlanner, ids: Make) -> None:
    step = context_reuse(planner, choose=CHOICE, annotate="none")
    acme, other = ({"configurable": {"tenant": name}} for name in ("acme", "other"))
    for names in EARLIER:
        step.invoke(passages(names), acme)  # type: ignore[arg-type]
    assert ids(step.invoke(passages("axyzbcd"), other)["context"]) == "axyz"  # type: ignore[arg-type]
    assert ids(step.invoke(passages("axyzbcd"), acme)["context"]) == "abcd"  # type: ignore[arg-type]


# -- vector stores -----------------------------------------------------------------------------------------------------


class HashedWords(Embeddings):
    """Embeddings by the hashing trick: the counts of a text's words."""

    def embed_query(self, text: str) -> list[float]:
        vector = [0.0] * 512
        for word in re.findall(r"\w+", text.lower()):
            vector[zlib.crc32(word.encode()) % 512] += 1.0
        return vector

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


class Distances(InMemoryVectorStore):
    """A store whose scores are distances, as those of Chroma and FAISS are."""

    def similarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> list[tuple[Document, float]]:
        return [(document, 1.0 - score) for document, score in super().similarity_search_with_score(query, k, **kwargs)]

    async def asimilarity_search_with_score(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        return self.similarity_search_with_score(query, k, **kwargs)

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return self._cosine_relevance_score_fn


WORDS = ("anchor", "beacon", "cable", "dock", "engine", "ferry", "gale", "harbour", "island", "jetty", "keel", "lock")


def filled(store: type[InMemoryVectorStore] = InMemoryVectorStore) -> InMemoryVectorStore:
    """Return a store with twelve passages on one subject, which are about equally near; each has a word of its own."""
    made = store(HashedWords())
    made.add_documents(
        [
            Document(f"{'ship ' * (20 + place)}{word} {'sea ' * 8}", id=word[0], metadata={"source": word})
            for place, word in enumerate(WORDS)
        ]
    )
    return made


FIRST, SECOND = f"{'anchor ' * 8} ship sea", f"{'anchor ' * 8} gale ship sea"


@both
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("kind", ["similarity", "similarity_score_threshold", "distance"])
async def test_a_vector_store_is_asked_for_scores(
    run: Run, kind: str, bound: bool, planner: ContextPlanner, ids: Make, caplog: pytest.LogCaptureFixture
) -> None:
    store = filled(InMemoryVectorStore if kind == "similarity" else Distances)
    found: Runnable[str, list[Document]] = store.as_retriever(search_kwargs={"k": 2})
    if kind == "similarity_score_threshold":
        found = store.as_retriever(search_type=kind, search_kwargs={"k": 2, "score_threshold": 0.01})
    if bound:
        found = found.with_config(tags=["bound"]).with_retry()
    choose = replace(CHOICE, scores="distance") if kind == "distance" else CHOICE
    retriever = ContextReuseRetriever(retriever=found, planner=planner, choose=choose)
    assert "g" in ids(await run(retriever, "invoke", "gale"))
    assert ids(await run(retriever, "invoke", FIRST)) == "abcd"
    assert ids(found.invoke(SECOND, k=5)) == "abgcd"
    fed = await run(retriever, "invoke", SECOND)
    assert ids(fed) == "abcd"
    assert sorted(fed, key=lambda document: document.id) == found.invoke(FIRST, k=4)  # with their own metadata
    assert not caplog.records


@both
async def test_distances_that_are_not_named_feed_the_first(
    run: Run, planner: ContextPlanner, ids: Make, caplog: pytest.LogCaptureFixture
) -> None:
    retriever = ContextReuseRetriever(retriever=filled(Distances).as_retriever(), planner=planner, choose=CHOICE)
    fed = [ids(await run(retriever, "invoke", question)) for question in ("gale", FIRST, SECOND)]
    assert fed[1:] == ["abcd", "abcg"]
    [warning] = [record.getMessage() for record in caplog.records]
    assert "candidates must come with descending scores" in warning
    assert warning.endswith("Scores come from the store.")


def test_a_search_keeps_its_place_in_traces(planner: ContextPlanner) -> None:
    names: list[str] = []

    class Names(BaseCallbackHandler):
        def on_retriever_start(self, serialized: Any, query: str, **kwargs: Any) -> None:
            names.append(kwargs["name"])

    found = filled().as_retriever()
    for choose in (None, CHOICE):
        ContextReuseRetriever(retriever=found, planner=planner, choose=choose).invoke("ship", {"callbacks": [Names()]})
    assert names == ["ContextReuseRetriever", "VectorStoreRetriever"] * 2


@both
async def test_search_options_of_a_call_hold(
    run: Run, planner: ContextPlanner, ids: Make, caplog: pytest.LogCaptureFixture
) -> None:
    found = filled().as_retriever().configurable_fields(search_kwargs=ConfigurableField("search"))
    retriever = ContextReuseRetriever(retriever=found, planner=planner, choose=CHOICE)
    for names in ("abc", "def"):
        search = {"filter": lambda document, names=names: document.id in names}
        assert {*ids(await run(retriever, "invoke", "ship", {"configurable": {"search": search}}))} == {*names}
    assert len(await run(retriever, "invoke", "ship")) == 4
    assert not caplog.records


def test_search_options_that_change_later_hold(planner: ContextPlanner, ids: Make) -> None:
    found = filled().as_retriever()
    retriever = ContextReuseRetriever(retriever=found, planner=planner, choose=CHOICE)
    retriever.invoke("ship")
    found.search_kwargs["filter"] = lambda document: document.id in "abc"
    assert {*ids(retriever.invoke("ship"))} == {*"abc"}


@pytest.mark.parametrize(
    ("options", "k", "asked"),
    [({}, None, 10), ({"fetch_k": 7}, None, 7), ({}, 2, 5), ({"fetch_k": 7}, 2, 7), ({"fetch_k": 5}, 9, 9)],
)
def test_the_number_of_candidates(options: dict[str, Any], k: int | None, asked: int, planner: ContextPlanner) -> None:
    class Counted(InMemoryVectorStore):
        def similarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> list[tuple[Document, float]]:
            counts.append(k)
            return super().similarity_search_with_score(query, k, **kwargs)

    counts: list[int] = []
    retriever = ContextReuseRetriever(
        retriever=filled(Counted).as_retriever(), planner=planner, choose=Choice(k=4, keep=4), **options
    )
    found = retriever.invoke("ship") if k is None else retriever.invoke("ship", k=k)
    assert (counts, len(found)) == ([asked], k or 4)


def test_a_search_of_its_own_is_not_replaced(planner: ContextPlanner, ids: Make) -> None:
    class Own(VectorStoreRetriever):
        def _get_relevant_documents(
            self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
        ) -> list[Document]:
            return passages("abcdef")

    retriever = ContextReuseRetriever(retriever=Own(vectorstore=filled()), planner=planner, choose=CHOICE)
    assert ids(retriever.invoke("?")) == "abcd"


# -- without scores ----------------------------------------------------------------------------------------------------


class SharedWords(BaseCrossEncoder):
    """Scores a pair by the number of words that question and text share."""

    def score(self, text_pairs: Any) -> list[float]:
        return [float(len({*question.split()} & {*text.split()})) for question, text in text_pairs]


def without_scores(planner: ContextPlanner) -> Runnable[str, list[Document]]:
    compressor = DocumentCompressorPipeline(
        transformers=[
            CrossEncoderReranker(model=SharedWords(), top_n=6),  # drops its scores
            ContextReuseCompressor(planner=planner, choose=CHOICE),
        ]
    )
    return ContextualCompressionRetriever(
        base_compressor=compressor, base_retriever=filled().as_retriever(search_kwargs={"k": 8})
    )


def fused(planner: ContextPlanner) -> Runnable[str, list[Document]]:
    found = filled()
    ensemble = EnsembleRetriever(
        retrievers=[found.as_retriever(), found.as_retriever(search_type="mmr")], weights=[0.5, 0.5]
    )
    return ContextReuseRetriever(retriever=ensemble, planner=planner, choose=CHOICE)


@pytest.mark.parametrize("make", [without_scores, fused])
@both
async def test_without_scores_the_first_are_fed_and_one_warning_says_so(
    run: Run, make: Callable[[ContextPlanner], Any], planner: ContextPlanner, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "warmprefix")
    chain = make(planner)
    for _ in range(3):
        assert len(await run(chain, "invoke", "ship anchor beacon")) == 4
    [message] = [record.getMessage() for record in caplog.records]
    assert message == (
        "the first 4 documents are fed: candidate 0 must have a finite score to choose by, got None. "
        "Scores come from metadata['relevance_score'], which score_key can change."
    )


@pytest.mark.parametrize(
    "scores",
    [
        [1.0, 0.9, math.nan, 0.7, 0.6, 0.5],
        [math.inf, 0.9, 0.8, 0.7, 0.6, 0.5],
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
        ["best", None, {}, 10**400, object(), []],
    ],
)
def test_unusable_scores_break_no_call(scores: list[Any], planner: ContextPlanner, ids: Make) -> None:
    compressor = ContextReuseCompressor(planner=planner, choose=CHOICE)
    assert ids(compressor.compress_documents(passages("abcdef", scores), "?")) == "abcd"
    assert ids(compressor.compress_documents(passages("dcbaxyz"), "?")) == "abcd"  # the plan was committed
    plain = ContextReuseCompressor(planner=planner)
    assert len(plain.compress_documents(passages("abcdef", scores), "?")) == 6


def test_another_key_may_hold_the_scores(planner: ContextPlanner, ids: Make) -> None:
    compressor = ContextReuseCompressor(planner=planner, choose=CHOICE, score_key="score")
    for names in EARLIER:
        compressor.compress_documents(passages(names, key="score"), "?")
    assert ids(compressor.compress_documents(passages("axyzbcd", key="score"), "?")) == "abcd"


# -- wrong configurations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"order_locked": True}, "order_locked must be False with choose"),
        ({"k": 4}, "k must be None with choose, which has a k, got 4"),
        ({"fetch_k": 3}, "fetch_k must be at least the k of choose, 4, got 3"),
        ({"fetch_k": 3, "choose": None}, "fetch_k must be None without choose, got 3"),
        ({"fetch_k": 0}, "greater than or equal to 1"),
        ({"choose": "k=4"}, "choose"),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any], match: str, shelf: Make) -> None:
    with pytest.raises(ValueError, match=match):
        ContextReuseRetriever(retriever=shelf({}), **{"choose": CHOICE, **options})


def test_searches_without_such_scores_are_refused_at_once() -> None:
    store = filled()
    with pytest.raises(ValueError, match="search_type must be 'similarity' with choose, got 'mmr'"):
        ContextReuseRetriever(retriever=store.as_retriever(search_type="mmr").with_retry(), choose=CHOICE)
    threshold = store.as_retriever(search_type="similarity_score_threshold", search_kwargs={"score_threshold": 0.5})
    with pytest.raises(ValueError, match="scores must be 'similarity' for a search with a score threshold"):
        ContextReuseRetriever(retriever=threshold, choose=Choice(k=4, scores="distance"))


def test_the_long_context_mode_chooses_nothing() -> None:
    with pytest.raises(ValueError, match="mode must be 'reuse' with choose"):
        ContextReuseCompressor(mode="long_context", choose=CHOICE)
