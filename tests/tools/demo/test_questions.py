"""The questions: seeded, interleaved, in people's words, and not the same one over and over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from warmprefix_tools.demo.corpus import Entry
from warmprefix_tools.demo.options import DemoOptions
from warmprefix_tools.demo.phrases import goal
from warmprefix_tools.demo.questions import Question, ask
from warmprefix_tools.demo.session import prepare_turns
from warmprefix_tools.demo.wording import Wording, follow_up_wordings
from warmprefix_tools.demo.words import content_words


@pytest.fixture(scope="module")
def questions(entries: tuple[Entry, ...]) -> tuple[Question, ...]:
    return ask(entries, 240, seed=0)


def test_the_seed_alone_decides(entries: tuple[Entry, ...], questions: tuple[Question, ...]) -> None:
    assert ask(entries, 240, seed=0) == questions
    assert ask(entries, 240, seed=1) != questions


def test_other_hash_seeds_give_the_same_questions_and_retrievals(entries: tuple[Entry, ...]) -> None:
    script = textwrap.dedent(
        """
        import json
        from warmprefix_tools.demo.corpus import read_standard_library
        from warmprefix_tools.demo.options import DemoOptions
        from warmprefix_tools.demo.session import prepare_turns
        turns = prepare_turns(read_standard_library(), DemoOptions(questions=60))
        print(json.dumps([(turn.question.query, [block.id for block in turn.blocks]) for turn in turns]))
        """
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    there = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert there.stderr == ""
    here = prepare_turns(entries, DemoOptions(questions=60))
    assert json.loads(there.stdout) == [[turn.question.query, [block.id for block in turn.blocks]] for turn in here]


@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_there_are_as_many_as_asked_for(entries: tuple[Entry, ...], count: int) -> None:
    assert len(ask(entries, count, seed=3)) == count


def test_conversations_have_one_user_and_up_to_four_turns_in_order(questions: tuple[Question, ...]) -> None:
    conversations: defaultdict[int, list[Question]] = defaultdict(list)
    for question in questions:
        conversations[question.conversation].append(question)
    for turns in conversations.values():
        assert [turn.turn for turn in turns] == [1, 2, 3, 4][: len(turns)]
        assert len({turn.user for turn in turns}) == 1
    assert {len(turns) for turns in conversations.values()} == {1, 2, 3, 4}
    assert len({question.user for question in questions}) > 20


def test_conversations_interleave(questions: tuple[Question, ...]) -> None:
    pairs = list(pairwise(questions))
    assert sum(one.conversation != next_one.conversation for one, next_one in pairs) > 0.8 * len(pairs)


def test_hardly_two_queries_mean_the_same_words(questions: tuple[Question, ...]) -> None:
    words = Counter(frozenset(content_words(question.query)) for question in questions)
    assert len(words) > 0.95 * len(questions)


def test_most_follow_ups_are_typed_otherwise_than_they_are_retrieved(questions: tuple[Question, ...]) -> None:
    assert all(question.text == question.query for question in questions if question.turn == 1)
    rewritten = [question for question in questions if question.turn > 1 and question.text != question.query]
    assert len(rewritten) > 0.8 * sum(question.turn > 1 for question in questions)


def test_what_a_follow_up_leaves_out_its_query_names(entries: tuple[Entry, ...]) -> None:
    (dumps,) = (entry for entry in entries if entry.name == "json.dumps")
    assert Wording("What does it return?", "What does json.dumps return?") in follow_up_wordings(dumps)


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
def test_goals_are_the_docstrings_own_words(entries: tuple[Entry, ...], name: str, phrase: str | None) -> None:
    (entry,) = (entry for entry in entries if entry.name == name)
    assert goal(entry) == phrase
