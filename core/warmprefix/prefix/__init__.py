"""The prefix tree, which predicts the content of the engine's prefix cache."""

from __future__ import annotations

from warmprefix.prefix.tree import PrefixMatch, PrefixTree

__all__ = ["PrefixMatch", "PrefixTree"]
