"""The questions: seeded, interleaved, in users' words, and hardly ever repeated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from warmprefix_tools.demo.corpus import LibraryEntry, read_standard_library
from warmprefix_tools.demo.demo_options import DemoOptions
from warmprefix_tools.demo.questions import QuestionWording, UserQuestion, ask, follow_up_wordings, goal
from warmprefix_tools.demo.session import prepare_turns
from warmprefix_tools.retriever import content_words


@pytest.fixture(scope="module")
def questions(entries: tuple[LibraryEntry, ...]) -> tuple[UserQuestion, ...]:
    return ask(entries, 240, seed=0)


def test_questions_depend_on_the_seed_only(
    entries: tuple[LibraryEntry, ...], questions: tuple[UserQuestion, ...]
) -> None:
    assert ask(entries, 240, seed=0) == questions
    assert ask(entries, 240, seed=1) != questions


def test_hash_seed_changes_neither_questions_nor_retrievals(small_library: Path) -> None:
    script = textwrap.dedent(
        f"""
        import json
        from pathlib import Path
        from warmprefix_tools.demo.corpus import read_standard_library
        from warmprefix_tools.demo.demo_options import DemoOptions
        from warmprefix_tools.demo.session import prepare_turns
        turns = prepare_turns(read_standard_library(Path({str(small_library)!r})), DemoOptions(questions=60))
        print(json.dumps([(turn.question.query, [block.id for block in turn.blocks]) for turn in turns]))
        """
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    there = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert there.stderr == ""
    here = prepare_turns(read_standard_library(small_library), DemoOptions(questions=60))
    assert json.loads(there.stdout) == [[turn.question.query, [block.id for block in turn.blocks]] for turn in here]


@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_number_of_questions_is_exact(entries: tuple[LibraryEntry, ...], count: int) -> None:
    assert len(ask(entries, count, seed=3)) == count


def test_conversations_have_one_user_and_up_to_four_turns_in_order(questions: tuple[UserQuestion, ...]) -> None:
    conversations: defaultdict[int, list[UserQuestion]] = defaultdict(list)
    for question in questions:
        conversations[question.conversation].append(question)
    for turns in conversations.values():
        assert [turn.turn for turn in turns] == [1, 2, 3, 4][: len(turns)]
        assert len({turn.user for turn in turns}) == 1
    assert {len(turns) for turns in conversations.values()} == {1, 2, 3, 4}
    assert len({question.user for question in questions}) > 20


def test_conversations_interleave(questions: tuple[UserQuestion, ...]) -> None:
    pairs = list(pairwise(questions))
    assert sum(one.conversation != next_one.conversation for one, next_one in pairs) > 0.8 * len(pairs)


def test_hardly_any_two_queries_have_the_same_words(questions: tuple[UserQuestion, ...]) -> None:
    words = Counter(frozenset(content_words(question.query)) for question in questions)
    assert len(words) > 0.95 * len(questions)


def test_most_follow_ups_are_rewritten_for_retrieval(questions: tuple[UserQuestion, ...]) -> None:
    assert all(question.text == question.query for question in questions if question.turn == 1)
    rewritten = [question for question in questions if question.turn > 1 and question.text != question.query]
    assert len(rewritten) > 0.8 * sum(question.turn > 1 for question in questions)


def test_query_of_a_follow_up_names_its_subject(entries: tuple[LibraryEntry, ...]) -> None:
    (dumps,) = (entry for entry in entries if entry.name == "json.dumps")
    assert QuestionWording("What does it return?", "What does json.dumps return?") in follow_up_wordings(dumps)


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("json.dumps", "serialize obj to a JSON formatted str"),
        ("collections.namedtuple", "get a new subclass of tuple with named fields"),
        ("textwrap.dedent", "remove any common leading whitespace from every line in text"),
        ("os.walk", None),  # "Directory tree generator."
        ("json", None),
    ],
)
def test_goals_use_the_words_of_the_docstring(entries: tuple[LibraryEntry, ...], name: str, phrase: str | None) -> None:
    (entry,) = (entry for entry in entries if entry.name == name)
    assert goal(entry) == phrase
