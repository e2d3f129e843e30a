"""What references do to whole sessions of agents whose cache marks move, on an exact prefix cache."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from tests.requests.agent_sessions import AgentSession, MarkPattern
from tests.requests.test_requests import ROUTES

from warmprefix_requests import RewriteRoute, restored, rewrite
from warmprefix_requests.prompts import canonical_front, canonical_messages

PATTERNS: tuple[MarkPattern, ...] = get_args(MarkPattern)


class PrefixCache:
    """An unbounded prefix cache that matches single tokens, which are words and signs."""

    def __init__(self) -> None:
        self.computed = self.prompt = 0
        self._root: dict[str, Any] = {}
        self._tokens: dict[str, list[str]] = {}

    def run(self, texts: list[str]) -> None:
        """Read a prompt, and keep it."""
        node, is_held = self._root, True
        for text in texts:
            tokens = self._tokens_of(text)
            self.prompt += len(tokens)
            if is_held and text not in node:
                is_held = False
                held = [_common(tokens, self._tokens_of(other)) for other in node]
                self.computed += len(tokens) - max(held, default=0)
            elif not is_held:
                self.computed += len(tokens)
            node = node.setdefault(text, {})

    def _tokens_of(self, text: str) -> list[str]:
        if text not in self._tokens:
            self._tokens[text] = re.findall(r"\w+|[^\w\s]|\s+", text)
        return self._tokens[text]


def _common(one: list[str], other: list[str]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def check(seed: int, route: RewriteRoute, pattern: MarkPattern) -> tuple[int, int, int]:
    """Run a session with and without references; return its references, and what was computed with and without."""
    plain, referring = PrefixCache(), PrefixCache()
    before: list[str] = []
    references = 0
    for body in AgentSession(seed).requests(route, pattern):
        rewritten = rewrite(route, body)
        assert restored(route, rewritten.body) == body
        sent = texts(route, rewritten.body)
        assert sent[: len(before)] == before, "a text that was sent has changed"
        before, references = sent, rewritten.references
        plain.run(texts(route, body))
        referring.run(sent)
    assert referring.computed <= plain.computed * 1.001
    return references, referring.computed, plain.computed


def texts(route: RewriteRoute, body: Any) -> list[str]:
    front, messages = canonical_front(body), canonical_messages(route, body)
    return [front, *[message.text for message in messages]]


def check_all(seeds: range) -> None:
    found = [check(seed, ROUTES[seed % len(ROUTES)], PATTERNS[seed // len(ROUTES) % len(PATTERNS)]) for seed in seeds]
    references, referring, plain = map(sum, zip(*found, strict=True))
    assert references > 2 * len(seeds)
    assert referring < 0.95 * plain


def test_marks_that_move_change_no_text_that_was_sent() -> None:
    check_all(range(30))


@pytest.mark.slow
def test_marks_that_move_change_nothing_in_a_thousand_sessions() -> None:
    check_all(range(30, 1_030))


def test_the_pattern_of_marks_decides_nothing() -> None:
    for route in ROUTES:
        bodies = [list(AgentSession(7).requests(route, pattern))[-1] for pattern in PATTERNS]
        assert len({tuple(texts(route, rewrite(route, body).body)) for body in bodies}) == 1
