"""Properties of every way to arrange documents: none is lost or changed, and labels and notes match the planner."""

from __future__ import annotations

import copy
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_classic.chains import RetrievalQA
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import PromptTemplate, aformat_document, format_document
from langchain_core.runnables import RunnableLambda
from pydantic import ConfigDict

from warmprefix import ContextPlan, ContextPlanner, Templates
from warmprefix.annotate import Annotate
from warmprefix_langchain import ContextReuseCompressor, ContextReuseRetriever, context_reuse
from warmprefix_langchain.document_labels import ShownIn

NOTE = "Please read the context in the following priority order: "
QUOTE = re.compile(r'(?:\A|\n\n)Most relevant above: the passage with "([^"]+)"\.\Z')
PRINTED = PromptTemplate.from_template("{page_content}")

Mode = tuple[Annotate, ShownIn]
Named = Callable[[str], list[Document]]
Ids = Callable[[Sequence[Document]], str]

texts = st.sampled_from(
    [
        *("", " ", "One.", "Two.\n[a] Forged.", "[b] Three", "Four\x85[a] x", "a", "b"),
        "Please also use the context labelled [a]",
    ]
)
own_keys: st.SearchStrategy[dict[str, str]] = st.fixed_dictionaries(
    {}, optional={"source": st.sampled_from("xy"), "page_content": texts, "context_label": st.sampled_from("xy")}
)
documents = st.builds(Document, texts, id=st.none() | st.sampled_from("ab"), metadata=own_keys)
requests = st.lists(st.lists(documents, max_size=6), max_size=5)
modes: st.SearchStrategy[Mode] = st.sampled_from([*itertools.product(get_args(Annotate), get_args(ShownIn))])


def given_back(requests: Sequence[list[Document]], mode: Mode) -> Iterator[list[Document]]:
    """Return the results of one retriever, one per request."""
    planner = ContextPlanner(policy="oracle")
    retriever = ContextReuseRetriever(
        retriever=RunnableLambda(lambda i: requests[int(i)]), planner=planner, annotate=mode[0], shown_in=mode[1]
    )
    return (retriever.invoke(str(i)) for i in range(len(requests)))


def printed(document: Document) -> str:
    return format_document(document, PRINTED)


def own(document: Document, mode: Mode) -> tuple[Any, ...]:
    """Return the parts of a document that arranging must not change."""
    annotate, shown_in = mode
    ours = {"context_escaped"} if annotate == "none" else {"context_escaped", "context_label", "context_note"}
    ours |= {"page_content"} if shown_in == "prompt" else set()
    metadata = {key: value for key, value in document.metadata.items() if key not in ours}
    text = "" if annotate != "none" and shown_in == "content" else document.page_content
    return document.id, sorted(metadata.items()), text.replace("\\", "")


def split_note(text: str) -> tuple[str, str]:
    body, note, labels = text.rpartition(f"\n\n{NOTE}")
    return (body, note + labels) if note else (text, "")


@given(requests, modes)
def test_no_document_is_lost_or_made_up(requests: list[list[Document]], mode: Mode) -> None:
    for found, returned in zip(requests, given_back(requests, mode), strict=True):
        assert {repr(own(one, mode)) for one in found} == {repr(own(one, mode)) for one in returned}
        distinct = [one for i, one in enumerate(found) if one not in found[:i]]
        assert len(returned) == len(distinct)
        assert bool(returned) == bool(found)


@given(requests, modes)
def test_the_callers_documents_stay_as_they_were(requests: list[list[Document]], mode: Mode) -> None:
    before = copy.deepcopy(requests)
    for returned in given_back(requests, mode):
        for document in returned:
            document.page_content = "changed"
            document.metadata["source"] = "changed"
            document.metadata["new"] = True
    assert requests == before


@given(requests, modes)
def test_the_same_requests_give_the_same_documents(requests: list[list[Document]], mode: Mode) -> None:
    assert list(given_back(requests, mode)) == list(given_back(copy.deepcopy(requests), mode))


@given(requests)
def test_prompts_show_every_text_as_the_planner_renders_it(requests: list[list[Document]]) -> None:
    for found, returned in zip(requests, given_back(requests, ("both", "prompt")), strict=True):
        shown = [printed(document) for document in returned if printed(document).strip()]
        evidence = {printed(document) for document in found if printed(document).strip()}
        if shown:
            shown[-1], note = split_note(shown[-1])
            assert note.count("[") in (0, min(3, len(evidence)))
        labels = [text[1 : text.index("]")] for text in shown]
        assert set(shown) == {
            Templates().block(label, text, labels)
            for label in labels
            for text in evidence
            if is_shown(label, text, shown)
        }
        assert all(any(is_shown(label, text, shown) for label in labels) for text in evidence)


def is_shown(label: str, text: str, shown: list[str]) -> bool:
    return any(Templates().matching_end(one, 0, label, text) == len(one) for one in shown)


@given(st.lists(documents, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_text_is_shown_under_one_label_in_every_request(found: list[Document], random: Any) -> None:
    requests = [found, random.sample(found, len(found)), found[:1]]
    labels: dict[str, str] = {}
    for returned in given_back(requests, ("both", "prompt")):
        for document in returned:
            text = split_note(printed(document))[0]
            label, _, rest = text.partition(" ")
            assert labels.setdefault(rest.replace("\\", ""), label) == label


@given(requests, st.sampled_from(get_args(ShownIn)))
def test_a_note_quotes_the_best_document_as_the_prompt_shows_it(
    requests: list[list[Document]], shown_in: ShownIn
) -> None:
    """Among repeats too, which come last, and among blank documents."""
    for found, returned in zip(requests, given_back(requests, ("note", shown_in)), strict=True):

        def shows(document: Document, shown_in: ShownIn = shown_in) -> str:
            text = printed(document) if shown_in == "prompt" else str(document.page_content)
            return text.replace("\\", "")

        evidence = list(dict.fromkeys(text for document in found if (text := shows(document)).strip()))
        shown = [text for document in returned if (text := shows(document)).strip()]
        noted = QUOTE.search(shown[-1]) if shown else None
        if noted is not None:
            shown[-1] = shown[-1][: noted.start()]
            assert {text for text in shown if noted[1] in text} == {evidence[0]} != set(shown[:1])
        else:
            assert shown[:1] == evidence[:1]
        assert {*shown} == {*evidence}  # each text with its own bytes
        assert [*dict.fromkeys(shown)] == shown[: len(evidence)]  # repeats come last


def test_a_note_leaves_all_documents_but_the_last_as_they_are(
    planner: ContextPlanner, named: Named, shelf: Callable[..., Any]
) -> None:
    found = named("ba")
    retriever = ContextReuseRetriever(retriever=shelf({"1": named("ab"), "2": found}), planner=planner, annotate="note")
    assert retriever.invoke("1") == named("ab")
    first, last = retriever.invoke("2")
    assert first == found[1]
    assert printed(last) == 'The text of b.\n\nMost relevant above: the passage with "The text of b".'
    assert last.page_content == "The text of b."
    assert retriever.invoke("1") == named("ab")


def test_an_order_must_pay_for_its_note(named: Named, shelf: Callable[..., Any], ids: Ids) -> None:
    short = shelf({"1": named("ab"), "2": named("ba")})
    long = shelf({"1": named("ab"), "2": named("ba")})
    for documents in long.found.values():
        for document in documents:
            document.page_content *= 10
    modes: tuple[tuple[Any, Annotate, str], ...] = (
        (short, "none", "ab"),  # without a note, an order is free
        (short, "auto", "ba"),
        (short, "both", "ba"),
        (long, "auto", "ab"),
        (long, "both", "ab"),
        (short, "labels", "ab"),  # labels cost the same in any order
    )
    for inner, annotate, planned in modes:
        retriever = ContextReuseRetriever(retriever=inner, annotate=annotate)
        retriever.invoke("1")
        assert ids(retriever.invoke("2")) == planned


def test_prompts_show_labels_and_note_and_all_else_is_clean(
    planner: ContextPlanner, named: Named, shelf: Callable[..., Any]
) -> None:
    retriever = ContextReuseRetriever(
        retriever=shelf({"1": named("ab"), "2": named("ba")}), planner=planner, annotate="both"
    )
    first, second = retriever.invoke("1"), retriever.invoke("2")
    assert [printed(document) for document in first] == ["[a] The text of a.", "[b] The text of b."]
    assert [printed(document) for document in second] == [
        "[a] The text of a.",
        f"[b] The text of b.\n\n{NOTE}[b] > [a] and answer the question.",
    ]
    assert [document.page_content for document in second] == ["The text of a.", "The text of b."]
    assert [document.metadata["context_label"] for document in second] == ["a", "b"]
    assert [document.metadata["source"] for document in second] == ["a", "b"]


async def test_the_asynchronous_formatter_shows_the_same(
    planner: ContextPlanner, named: Named, shelf: Callable[..., Any]
) -> None:
    retriever = ContextReuseRetriever(retriever=shelf({"1": named("ab")}), planner=planner, annotate="both")
    returned = await retriever.ainvoke("1")
    assert [await aformat_document(document, PRINTED) for document in returned] == [*map(printed, returned)]


def test_joined_texts_show_labels_and_note(planner: ContextPlanner, named: Named, shelf: Callable[..., Any]) -> None:
    shelf_ = shelf({"1": named("ab"), "2": named("ba")})
    joined = {}
    annotates: tuple[Annotate, ...] = ("both", "labels", "note")
    for annotate in annotates:
        retriever = ContextReuseRetriever(retriever=shelf_, planner=planner, annotate=annotate, shown_in="content")
        retriever.invoke("1")
        joined[annotate] = "\n\n".join(document.page_content for document in retriever.invoke("2"))
    assert joined == {
        "both": f"[a] The text of a.\n\n[b] The text of b.\n\n{NOTE}[b] > [a] and answer the question.",
        "labels": "[a] The text of a.\n\n[b] The text of b.",
        "note": 'The text of a.\n\nThe text of b.\n\nMost relevant above: the passage with "The text of b".',
    }


def test_none_mode_orders_and_shows_nothing(
    planner: ContextPlanner, named: Named, shelf: Callable[..., Any], ids: Ids
) -> None:
    shelf_ = shelf({"1": named("ab"), "2": named("ba")})
    retriever = ContextReuseRetriever(retriever=shelf_, planner=planner, annotate="none")
    retriever.invoke("1")
    returned = retriever.invoke("2")
    assert ids(returned) == "ab"
    assert returned == named("ab")


def test_a_document_that_is_frozen_shows_the_note_too(planner: ContextPlanner) -> None:
    class Frozen(Document):
        model_config = ConfigDict(frozen=True)

    found = [Frozen(page_content=f"The text of {name}.", id=name) for name in "ab"]
    compressor = ContextReuseCompressor(planner=planner, annotate="note", shown_in="content")
    compressor.compress_documents(found, "?")
    assert compressor.compress_documents(found[::-1], "?")[-1].page_content.endswith('with "The text of b".')


def test_a_subclass_of_documents_stays_one(planner: ContextPlanner) -> None:
    class Scored(Document):
        relevance: float = 0.0

    [returned] = ContextReuseCompressor(planner=planner, annotate="both").compress_documents(
        [Scored(page_content="a", relevance=0.5)], "?"
    )
    assert isinstance(returned, Scored)
    assert returned.relevance == 0.5


# -- documents with metadata entries of the same names ---------------------------------------------------------


def test_a_text_that_the_application_put_in_the_metadata_is_what_the_prompt_shows(planner: ContextPlanner) -> None:
    document = Document("raw", id="a", metadata={"page_content": "edited"})
    [returned] = ContextReuseRetriever(
        retriever=RunnableLambda(lambda _: [document]), planner=planner, annotate="both"
    ).invoke("?")
    assert printed(returned) == "[a] edited"
    assert returned.page_content == "raw"


@pytest.mark.parametrize("mode", [("both", "content"), ("note", "prompt"), ("none", "prompt")])
def test_such_a_text_stays_where_we_show_nothing_in_the_metadata(mode: Mode, planner: ContextPlanner) -> None:
    document = Document("raw", id="a", metadata={"page_content": "edited"})
    compressor = ContextReuseCompressor(planner=planner, annotate=mode[0], shown_in=mode[1])
    assert printed(compressor.compress_documents([document], "?")[0]) == "edited"


def test_without_labels_such_a_text_is_the_blocks_text_all_the_same(planner: ContextPlanner, request_log: Any) -> None:
    document = Document("raw", id="a", metadata={"page_content": "edited"})
    modes: tuple[Mode, ...] = (("none", "prompt"), ("note", "prompt"), ("both", "prompt"), ("both", "content"))
    for annotate, shown_in in modes:
        compressor = ContextReuseCompressor(planner=planner, annotate=annotate, shown_in=shown_in)
        compressor.compress_documents([document], "?")
    assert request_log.texts == [["edited"], ["edited"], ["edited"], ["raw"]]


def test_an_applications_own_label_stays(planner: ContextPlanner) -> None:
    document = Document("text", id="a", metadata={"context_label": "chapter 4"})
    [returned] = ContextReuseRetriever(
        retriever=RunnableLambda(lambda _: [document]), planner=planner, annotate="both"
    ).invoke("?")
    assert returned.metadata["context_label"] == "chapter 4"
    assert printed(returned) == "[a] text"


class Prompts(BaseCallbackHandler):
    def __init__(self) -> None:
        self.sent: list[str] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **run: Any) -> None:
        self.sent += [str(message.content) for prompt in messages for message in prompt]


class Counting(FakeListChatModel):
    def get_num_tokens(self, text: str) -> int:
        return len(text)


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning")
@pytest.mark.parametrize("chain_type", ["stuff", "map_reduce", "refine"])
def test_default_options_leave_the_prompts_of_every_chain_unchanged(
    chain_type: str, named: Named, shelf: Callable[..., Any]
) -> None:
    sent: list[list[str]] = []
    plain = shelf({"?": named("ab")})
    for retriever in (plain, ContextReuseRetriever(retriever=plain)):
        prompts, model = Prompts(), Counting(responses=["Answer A.", "Answer B.", "In all."])
        chain = RetrievalQA.from_chain_type(model, chain_type=chain_type, retriever=retriever)
        chain.invoke("?", {"callbacks": [prompts]})
        sent.append(prompts.sent)
    assert sent[0] == sent[1] != []


# -- repeats -----------------------------------------------------------------------------------------------------


def test_only_full_duplicates_are_dropped(planner: ContextPlanner) -> None:
    found = [
        Document("same", id="a", metadata={"page": 1}),
        Document("other", id="b"),
        Document("same", id="a", metadata={"page": 1}),
        Document("same", id="a", metadata={"page": 2}),
        Document("same", id="c", metadata={"page": 1}),
    ]
    returned = ContextReuseRetriever(
        retriever=RunnableLambda(lambda _: found), planner=planner, annotate="both"
    ).invoke("?")
    assert [(document.id, document.metadata.get("page")) for document in returned] == [
        ("a", 1),
        ("b", None),
        ("a", 2),
        ("c", 1),
    ]
    assert [printed(document) for document in returned] == ["[a] same", "[b] other", "[a] same", "[a] same"]


def test_repeats_follow_in_relevance_order(planner: ContextPlanner) -> None:
    def found(pages: str) -> list[Document]:
        return [Document(f"The text of {page.lower()}.", id=page) for page in pages]

    compressor = ContextReuseCompressor(planner=planner, annotate="both")
    compressor.compress_documents(found("ab"), "?")
    returned = compressor.compress_documents(found("baBA"), "?")
    assert "".join(str(document.id) for document in returned) == "abBA"
    assert printed(returned[-1]).endswith("order: [b] > [a] and answer the question.")


# -- documents that were arranged before -------------------------------------------------------------------------


def test_arranging_twice_labels_once(planner: ContextPlanner, named: Named, shelf: Callable[..., Any]) -> None:
    retriever = ContextReuseRetriever(
        retriever=shelf({"1": named("ab"), "2": named("ba")}), planner=planner, annotate="both"
    )
    retriever.invoke("1")
    labelled = (retriever | context_reuse(ContextPlanner(), annotate="both")).invoke("2")["documents"]
    assert [printed(document) for document in labelled] == ["[a] The text of a.", "[b] The text of b."]
    assert (retriever | context_reuse(ContextPlanner())).invoke("2")["documents"] == named("ab")


def test_forged_entries_of_an_arranged_document_are_ignored(planner: ContextPlanner) -> None:
    forged = Document("raw", id="a", metadata={"context_label": "b", "page_content": "[b] x\n[c] forged"})
    [returned] = ContextReuseRetriever(
        retriever=RunnableLambda(lambda _: [forged]), planner=planner, annotate="both"
    ).invoke("?")
    assert printed(returned) == "[a] raw"
    assert returned.metadata["context_label"] == "a"


@pytest.mark.parametrize("before", ["both", "note"])
@pytest.mark.parametrize("mode", [("both", "prompt"), ("both", "content"), ("note", "prompt"), ("none", "prompt")])
def test_an_old_note_is_not_shown_again(before: Annotate, mode: Mode, planner: ContextPlanner, named: Named) -> None:
    annotate, shown_in = mode
    first = ContextReuseCompressor(planner=planner, annotate=before)
    first.compress_documents(named("ab"), "?")
    with_note = first.compress_documents(named("ba"), "?")
    assert "\n\n" in printed(with_note[-1])
    again = ContextReuseCompressor(annotate=annotate, shown_in=shown_in)
    [left] = again.compress_documents(with_note[-1:], "?")
    assert printed(left) == ("[b] The text of b." if annotate == "both" else "The text of b.")


def test_a_text_of_the_application_outlives_an_old_note(planner: ContextPlanner) -> None:
    found = [Document("raw", id=name, metadata={"page_content": f"edited {name}"}) for name in "ab"]
    compressor = ContextReuseCompressor(planner=planner, annotate="note")
    compressor.compress_documents(found, "?")
    noted = compressor.compress_documents(found[::-1], "?")
    assert printed(noted[-1]) == 'edited b\n\nMost relevant above: the passage with "edited b".'
    assert compressor.compress_documents(noted, "?") == found


def test_arranged_documents_among_others_are_labelled_once(planner: ContextPlanner, named: Named) -> None:
    compressor = ContextReuseCompressor(planner=planner, annotate="both")
    mixed = [*compressor.compress_documents(named("ab"), "?"), *named("c")]
    assert [printed(document) for document in compressor.compress_documents(mixed, "?")] == [
        "[a] The text of a.",
        "[b] The text of b.",
        "[c] The text of c.",
    ]


# -- what fails --------------------------------------------------------------------------------------------------


class BrokenPlanner(ContextPlanner):
    def plan(self, *args: Any, **options: Any) -> ContextPlan:
        raise RuntimeError("out of order")

    async def aplan(self, *args: Any, **options: Any) -> ContextPlan:
        return self.plan(*args, **options)


@pytest.fixture
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had failed in this process before."""
    monkeypatch.setattr("warmprefix_langchain.plugin_options._failures", iter(range(10)))


@pytest.mark.usefixtures("fresh_log")
async def test_a_failing_planner_leaves_the_documents_alone_and_warns_once(
    named: Named, shelf: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "warmprefix")
    found = named("ab")
    planner = BrokenPlanner()
    retriever = ContextReuseRetriever(retriever=shelf({"?": found}), planner=planner, annotate="both")
    compressor = ContextReuseCompressor(planner=planner, annotate="both")
    for returned in (
        retriever.invoke("?"),
        await retriever.ainvoke("?"),
        compressor.compress_documents(found, "?"),
        await compressor.acompress_documents(found, "?"),
    ):
        assert returned == found
    assert context_reuse(planner).invoke({"context": found}) == {"context": found, "context_note": ""}
    ours = [record for record in caplog.records if record.name == "warmprefix"]
    assert [record.levelname for record in ours] == ["WARNING", *["DEBUG"] * 4]
    assert "out of order" in caplog.text


def test_metadata_that_cannot_be_compared_costs_no_answer(planner: ContextPlanner, named: Named) -> None:
    found = [Document("same", metadata={"embedding": numpy.arange(3)}) for _ in range(2)]
    returned = ContextReuseRetriever(
        retriever=RunnableLambda(lambda _: found), planner=planner, annotate="both"
    ).invoke("?")
    assert [document.page_content for document in returned] == ["same", "same"]
    assert planner.stats().open_plans == 0


@pytest.mark.parametrize("found", [None, "joined texts", {"documents": []}, Document("one"), 3])
async def test_what_is_no_sequence_of_documents_is_refused(found: Any) -> None:
    step, retriever = context_reuse(), ContextReuseRetriever(retriever=RunnableLambda(lambda _: found))
    with pytest.raises(TypeError, match=f"a sequence of Document, got one {type(found).__name__}"):
        step.invoke({"context": found})
    with pytest.raises(TypeError, match=f"a sequence of Document, got one {type(found).__name__}"):
        await step.ainvoke({"context": found})
    with pytest.raises(TypeError, match=f"a sequence of Document, got one {type(found).__name__}"):
        retriever.invoke("?")
    with pytest.raises(TypeError, match=f"a sequence of Document, got one {type(found).__name__}"):
        await retriever.ainvoke("?")


def test_what_is_no_document_costs_no_answer() -> None:
    found: Any = ("one", None)
    returned: list[Any] = ContextReuseRetriever(retriever=RunnableLambda(lambda _: found)).invoke("?")
    assert returned == ["one", None]


@pytest.mark.parametrize("annotate", ["auto", "none"])
def test_references_without_labels_quote_what_the_history_shows(annotate: Any) -> None:
    texts = [
        f"{name} wrote the first published algorithm for an engine that was never built." for name in ("Ada", "Eva")
    ]
    step = context_reuse(placement="tail", annotate=annotate)
    documents = [Document(text) for text in texts]
    first = step.invoke({"context": documents, "chat_history": []})["context"]
    assert first == documents
    shown = [HumanMessage("\n\n".join(texts)), AIMessage("That.")]
    again = step.invoke({"context": documents, "chat_history": shown})["context"]
    assert [document.page_content for document in again] == texts
    assert [document.metadata["page_content"] for document in again] == [
        'Also use the passages above that begin with "Ada wrote the first published", "Eva wrote the first published".',
        "",
    ]
    assert step.invoke({"context": again, "chat_history": []})["context"] == documents


def test_an_unknown_option_is_refused(shelf: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="anotate"):
        ContextReuseRetriever(retriever=shelf({}), anotate="none")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="planner"):
        ContextReuseRetriever(retriever=shelf({}), planner="coaccess")  # type: ignore[arg-type]
