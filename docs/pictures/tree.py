"""Draw docs/pictures/tree.svg: the prefix trees of real requests, in relevance order and as warmprefix plans them.

The requests are the demo's first questions about Python's own standard library, with the passages that BM25 finds. So
the picture depends on the version of Python, which its description names.

    python docs/pictures/tree.py
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drawing import Drawing

from warmprefix import ContextBlock, ContextPlanner
from warmprefix_tools.demo.corpus import read_standard_library
from warmprefix_tools.demo.questions import ask
from warmprefix_tools.retriever import Bm25Retriever

FILE = Path(__file__).with_suffix(".svg")
QUESTIONS = 120
PASSAGES_PER_QUESTION = 5
POLICIES = {"in relevance order": "relevance", "with warmprefix": "coaccess"}


@dataclass(slots=True)
class Node:
    """A block behind its prefix, and the requests that begin with both."""

    label: str = ""
    tokens: int = 0
    requests: int = 0
    children: dict[bytes, Node] = field(default_factory=dict)

    @property
    def computed_tokens(self) -> int:
        """Tokens of this block and all below, each computed once."""
        return self.tokens + sum(child.computed_tokens for child in self.children.values())

    @property
    def prompt_tokens(self) -> int:
        """Tokens of this block and all below in all requests."""
        return self.tokens * self.requests + sum(child.prompt_tokens for child in self.children.values())


def retrieved_contexts() -> list[Sequence[ContextBlock]]:
    """Return the passages of each question, in relevance order."""
    entries = read_standard_library()
    retriever = Bm25Retriever([block for entry in entries for block in entry.blocks])
    return [retriever.retrieve(asked.query, PASSAGES_PER_QUESTION) for asked in ask(entries, QUESTIONS, seed=0)]


def tree_of(contexts: Sequence[Sequence[ContextBlock]], policy: str) -> Node:
    """Return the tree of the orders in which a planner with this policy serves the contexts, one after the other."""
    planner = ContextPlanner(policy=policy, annotate="none")
    root = Node()
    for context in contexts:
        with planner.planning(context) as plan:
            node = root
            node.requests += 1
            for planned in plan.blocks:
                block = planned.block
                node = node.children.setdefault(block.fingerprint, Node(block.id or "", block.tokens))
                node.requests += 1
    return root


# -- the picture -----------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT = 720, 968
_LEFT, _RIGHT = 24, 696
_ROW = 3.2
"""Height of one request."""


def draw(trees: dict[str, Node]) -> Drawing:
    """Return one panel per tree: to the right the tokens of each prompt, downwards the requests."""
    most = max(_longest(tree) for tree in trees.values())
    described = "; ".join(f"{name}, {_hit_ratio(tree):.0%} of the tokens" for name, tree in trees.items())
    drawing = Drawing(
        _WIDTH,
        _HEIGHT,
        f"Prefix trees of {QUESTIONS} requests, in relevance order and planned by warmprefix",
        f"Requests that begin with the same passages share a branch, which is computed once. Found in the cache:"
        f" {described}. Texts of the standard library of Python {platform.python_version()}.",
    )
    drawing.text(_LEFT, 40, f"{QUESTIONS} questions, and the passages of each", 24, "bold")
    for left, look, meaning in ((0, "cached", "cached"), (110, "new", "computed")):
        drawing.box(_LEFT + left, 56, 18, 18, look, 3)
        drawing.text(_LEFT + left + 26, 71, meaning, 18)
    drawing.text(_RIGHT, 71, "one row per request, its beginning on the left", 16, "dim", "end")
    y = 112.0
    for name, tree in trees.items():
        drawing.text(_LEFT, y, name[0].upper() + name[1:], 19, "bold")
        drawing.text(_RIGHT, y, f"{_hit_ratio(tree):.0%} cached", 22, "bold good", "end")
        _draw_children(drawing, tree, _LEFT, y + 14, (_RIGHT - _LEFT) / most)
        y += 14 + QUESTIONS * _ROW + 44
    return drawing


def _draw_children(drawing: Drawing, node: Node, x: float, y: float, per_token: float) -> None:
    for child in sorted(node.children.values(), key=lambda each: (-each.requests, each.label)):
        width, height = child.tokens * per_token, child.requests * _ROW
        drawing.box(x, y, width - 1, _ROW, "new")
        if child.requests > 1:
            drawing.box(x, y + _ROW, width - 1, height - _ROW - 0.6, "cached")
        name = next((each for each in _names(child.label) if len(each) * 7.4 < width), None)
        if height >= 17 and name is not None:
            drawing.text(x + width / 2, y + _ROW / 2 + height / 2 + 5, name, 13, "on-cached", "middle")
        _draw_children(drawing, child, x + width, y, per_token)
        y += height


def _names(label: str) -> tuple[str, str]:
    """Return the name of a passage's function with its module, and without."""
    name = label.partition(":")[0]
    return name, name.rpartition(".")[2]


def _longest(node: Node) -> int:
    return node.tokens + max(map(_longest, node.children.values()), default=0)


def _hit_ratio(tree: Node) -> float:
    return 1 - tree.computed_tokens / tree.prompt_tokens


def picture() -> str:
    """Return the SVG; the same bytes each time on one version of Python."""
    contexts = retrieved_contexts()
    return str(draw({name: tree_of(contexts, policy) for name, policy in POLICIES.items()}))


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
