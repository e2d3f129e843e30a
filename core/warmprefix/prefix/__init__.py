"""The prefix tree, which predicts the content of the engine's prefix cache."""

from __future__ import annotations

from warmprefix.prefix.tree import SEARCH_BUDGET, PrefixMatch, PrefixTree, may_stand, ranks_of_children

__all__ = ["SEARCH_BUDGET", "PrefixMatch", "PrefixTree", "may_stand", "ranks_of_children"]
