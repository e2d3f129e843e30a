"""Scores of answers."""

from __future__ import annotations

import pytest

from warmprefix_tools.quality.scores import AnswerScores, score


@pytest.mark.parametrize(
    ("answer", "expected", "scores"),
    [
        ("The Mariana Trench.", ["mariana trench"], (1, 1, 1, 0)),
        ("It is the Mariana Trench, near Guam.", ["Mariana Trench"], (0, 0.5, 1, 0)),
        ("Atlantic", ["Mariana Trench", "the Atlantic"], (1, 1, 1, 0)),
        ("Marianas", ["Mariana"], (0, 0, 0, 0)),
        ("unanswerable", ["Guam"], (0, 0, 0, 1)),
        ("The context does not mention it.", [], (1, 1, 1, 1)),
        ("", [], (1, 1, 1, 1)),
        ("Guam", [], (0, 0, 0, 0)),
        ("马里亚纳海沟。", ["马里亚纳海沟"], (1, 1, 1, 0)),
        ("马里亚纳", ["马里亚纳海沟"], (0, 0.8, 0, 0)),
        ("Größe: 3,688 m", ["3688 m"], (0, 0.8, 1, 0)),
        ("an a the", ["a"], (1, 1, 0, 0)),
    ],
)
def test_scores(answer: str, expected: list[str], scores: tuple[float, ...]) -> None:
    assert score(answer, expected) == pytest.approx(AnswerScores(*map(float, scores)))
