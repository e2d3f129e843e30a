"""BM25, quiet and in a fixed order."""

from __future__ import annotations

import pytest

from warmprefix import ContextBlock
from warmprefix_tools.demo.corpus import LibraryEntry
from warmprefix_tools.retriever import Bm25Retriever


@pytest.fixture(scope="module")
def library(entries: tuple[LibraryEntry, ...]) -> Bm25Retriever:
    return Bm25Retriever([block for entry in entries for block in entry.blocks])


@pytest.mark.parametrize(
    ("query", "label"),
    [
        ("How do I serialize obj to a JSON formatted str in Python?", "json.dumps"),
        ("What does textwrap.dedent return?", "textwrap.dedent"),
        ("Which exceptions can Condition.wait_for raise?", "threading.Condition.wait_for"),
    ],
)
def test_retriever_finds_the_subject_of_a_query(library: Bm25Retriever, query: str, label: str) -> None:
    assert label in [block.id for block in library.retrieve(query, k=3)]


def test_retriever_returns_k_distinct_blocks_and_prints_nothing(
    library: Bm25Retriever, capfd: pytest.CaptureFixture[str]
) -> None:
    found = library.retrieve("Which exceptions can Condition.wait_for raise?", k=10)
    assert len(set(found)) == 10
    assert found[:4] == library.retrieve("Which exceptions can Condition.wait_for raise?", k=4)
    assert capfd.readouterr() == ("", "")


def test_blocks_with_equal_scores_keep_the_order_of_the_index() -> None:
    blocks = [ContextBlock(f"the same word, number {i}") for i in range(50)]
    assert Bm25Retriever(blocks).retrieve("number", k=50) == tuple(blocks)


@pytest.mark.parametrize("query", ["", "what is it", "zyzzyva"])
def test_query_without_a_match_finds_no_block(library: Bm25Retriever, query: str) -> None:
    assert library.retrieve(query, k=10) == ()
