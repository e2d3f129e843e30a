"""Scores of answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix_tools.quality.scores import AnswerScores, score


@pytest.mark.parametrize(
    ("answer", "expected", "scores"),
    [
        ("The Mariana Trench.", ["mariana trench"], (1, 1, 1, 1, 0, 2)),
        ("It is the Mariana Trench, near Guam.", ["Mariana Trench"], (1, 1, 0.5, 0, 0, 6)),
        ("Atlantic", ["Mariana Trench", "the Atlantic"], (1, 1, 1, 1, 0, 1)),
        ("Marianas", ["Mariana"], (0, 0, 0, 0, 0, 1)),
        ("unanswerable", ["Guam"], (0, 0, 0, 0, 1, 1)),
        ("The context does not mention it.", [], (1, 1, 1, 1, 1, 5)),
        ("", [], (1, 1, 1, 1, 1, 0)),
        ("Guam", [], (0, 0, 0, 0, 0, 1)),
        ("马里亚纳海沟。", ["马里亚纳海沟"], (1, 1, 1, 1, 0, 6)),
        ("马里亚纳", ["马里亚纳海沟"], (0, 0.8, 0.8, 0, 0, 4)),
        ("Größe: 3,688 m", ["3688 m"], (1, 1, 0.8, 0, 0, 3)),
        # An article alone may be the letter of a choice.
        ("A.", ["A"], (1, 1, 1, 1, 0, 1)),
        ("B", ["A"], (0, 0, 0, 0, 0, 1)),
        ("", ["A"], (0, 0, 0, 0, 1, 0)),
        # Style moves F1 and exact match, and nothing else.
        ("Farmer", ["farmer"], (1, 1, 1, 1, 0, 1)),
        ("Brook is a farmer.", ["farmer"], (1, 1, 0.5, 0, 0, 3)),
        # A list of all that might be right contains it: only F1 and the number of words show that.
        ("Farmer, baker, miller or smith", ["farmer"], (1, 1, 1 / 3, 0, 0, 5)),
        # A part of the answer counts for the best span only.
        ("It was the Bank of England", ["Bank of old England"], (0, 6 / 7, 2 / 3, 0, 0, 5)),
    ],
)
def test_scores(answer: str, expected: list[str], scores: tuple[float, ...]) -> None:
    assert score(answer, expected) == pytest.approx(AnswerScores(*map(float, scores)))


@given(st.lists(st.sampled_from("xyz"), max_size=12), st.lists(st.sampled_from("wxyz"), min_size=1, max_size=5))
def test_the_best_span_is_the_best_of_all(letters: list[str], wanted: list[str]) -> None:
    answer, expected = (" ".join(words) for words in (letters, wanted))
    words = answer.split()
    spans = [words[start:end] for start in range(len(words)) for end in range(start + 1, len(words) + 1)]
    best = max([score(" ".join(span), [expected]).f1 for span in spans], default=0.0)
    found = score(answer, [expected])
    assert found.span == pytest.approx(best)
    assert max(found.f1, found.contains) <= found.span
