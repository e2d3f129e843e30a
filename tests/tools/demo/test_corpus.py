"""The library's text and the questions about it: every public docstring, asked about in users' words, seeded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from warmprefix import ContextBlock
from warmprefix.labels import label_candidates
from warmprefix_tools.demo import DemoError
from warmprefix_tools.demo.corpus import LEAST_TOKENS, LibraryEntry, read_standard_library
from warmprefix_tools.demo.questions import UserQuestion, ask
from warmprefix_tools.retriever import Bm25Retriever, content_words


def test_every_block_has_a_retrievable_size_and_a_label_of_its_own(entries: tuple[LibraryEntry, ...]) -> None:
    blocks = [block for entry in entries for block in entry.blocks]
    assert len(blocks) > 1_000
    assert all(LEAST_TOKENS - 2 <= block.tokens <= 450 for block in blocks)
    assert sum(block.tokens > 350 for block in blocks) < len(blocks) / 100
    assert [next(label_candidates(block)) for block in blocks] == [block.id for block in blocks]
    assert len(set(blocks)) == len({block.id for block in blocks}) == len(blocks)
    assert [entry.name for entry in entries] == sorted({entry.name for entry in entries})


def test_entries_match_the_sources(entries: tuple[LibraryEntry, ...]) -> None:
    by_name = {entry.name: entry for entry in entries}
    dumps = by_name["json.dumps"]
    assert (dumps.module, dumps.kind) == ("json", "function")
    assert dumps.parameters[0] == ("obj", False)
    assert ("skipkeys", True) in dumps.parameters
    assert dumps.blocks[0].text.startswith("json.dumps(obj, *, skipkeys=False")
    assert "Serialize ``obj`` to a JSON formatted ``str``." in dumps.blocks[0].text
    assert (by_name["json"].kind, by_name["threading.Condition"].kind) == ("module", "class")
    assert any(entry.module == "decimal" for entry in entries)  # its docstrings are in _pydecimal
    for entry in entries:
        parts = entry.name.split(".")
        assert not any(part.startswith("_") for part in parts), entry.name
        assert parts[0] not in {"test", "idlelib", "lib2to3", "site-packages", "turtledemo"}, entry.name
        assert all(name != "self" for name, _ in entry.parameters)


def test_unreadable_files_are_left_out(small_library: Path, tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="standard library's docstrings"):
        read_standard_library(tmp_path)
    shutil.copytree(small_library, tmp_path, dirs_exist_ok=True)
    whole = read_standard_library(tmp_path)
    (tmp_path / "broken.py").write_text("def broken(:\n")
    (tmp_path / "binary.py").write_bytes(b'"""\xff\xfe\x00"""')
    (tmp_path / "deep.py").write_text("(" * 10_000)
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    assert read_standard_library(tmp_path) == whole


# -- questions ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def questions(entries: tuple[LibraryEntry, ...]) -> tuple[UserQuestion, ...]:
    return ask(entries, 240, seed=0)


def test_questions_depend_on_the_seed_only(
    entries: tuple[LibraryEntry, ...], questions: tuple[UserQuestion, ...], small_library: Path
) -> None:
    assert ask(entries, 240, seed=0) == questions
    assert ask(entries, 240, seed=1) != questions
    assert [len(ask(entries, count, seed=3)) for count in (1, 2, 3, 50)] == [1, 2, 3, 50]
    script = textwrap.dedent(
        f"""
        import json
        from pathlib import Path
        from warmprefix_tools.demo.corpus import read_standard_library
        from warmprefix_tools.demo.questions import ask
        entries = read_standard_library(Path({str(small_library)!r}))
        print(json.dumps([question.query for question in ask(entries, 60, 0)]))
        """
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    there = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    here = ask(read_standard_library(small_library), 60, 0)
    assert (json.loads(there.stdout), there.stderr) == ([question.query for question in here], "")


def test_conversations_interleave_and_hardly_ever_repeat_a_question(questions: tuple[UserQuestion, ...]) -> None:
    conversations: defaultdict[int, list[UserQuestion]] = defaultdict(list)
    for question in questions:
        conversations[question.conversation].append(question)
    for turns in conversations.values():
        assert [turn.turn for turn in turns] == [1, 2, 3, 4][: len(turns)]
        assert len({turn.user for turn in turns}) == 1
    assert {len(turns) for turns in conversations.values()} == {1, 2, 3, 4}
    assert len({question.user for question in questions}) > 20
    pairs = list(pairwise(questions))
    assert sum(one.conversation != next_one.conversation for one, next_one in pairs) > 0.8 * len(pairs)
    words = Counter(frozenset(content_words(question.query)) for question in questions)
    assert len(words) > 0.95 * len(questions)


def test_questions_use_the_words_of_the_docstring_and_follow_ups_are_rewritten(
    entries: tuple[LibraryEntry, ...],
) -> None:
    (dumps,) = (entry for entry in entries if entry.name == "json.dumps")
    asked = ask([dumps] * 3, 60, 0)
    assert all(question.text == question.query for question in asked if question.turn == 1)
    wordings = {(question.text, question.query) for question in asked}
    first = "How do I serialize obj to a JSON formatted str in Python?"
    assert {(first, first), ("What does it return?", "What does json.dumps return?")} <= wordings


# -- retrieval ---------------------------------------------------------------------------------------------------------


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
    found = library.retrieve(query, k=10)
    assert label in [block.id for block in found[:3]]
    assert len(set(found)) == 10
    assert found[:4] == library.retrieve(query, k=4)


def test_blocks_with_equal_scores_keep_the_order_of_the_index() -> None:
    blocks = [ContextBlock(f"the same word, number {i}") for i in range(50)]
    assert Bm25Retriever(blocks).retrieve("number", k=50) == tuple(blocks)


@pytest.mark.parametrize("query", ["", "what is it", "zyzzyva"])
def test_query_without_a_match_finds_no_block(library: Bm25Retriever, query: str) -> None:
    assert library.retrieve(query, k=10) == ()
