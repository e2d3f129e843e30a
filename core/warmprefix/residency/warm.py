"""Prompts that fill an engine's cache before the first request needs it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Any

from warmprefix.blocks import ContextBlock
from warmprefix.prefix.tree import PrefixTree

__all__ = ["paths_to_warm", "warming_request"]


def paths_to_warm(tree: PrefixTree[bytes], blocks: Iterable[ContextBlock], count: int) -> list[list[ContextBlock]]:
    """The hottest paths of a tree, as far as their blocks are given; the empty one first, which is the preamble's."""
    given = {block.fingerprint: block for block in blocks}
    paths: list[list[ContextBlock]] = [[]]
    for keys in tree.hottest_paths(count) if given else ():
        path = [given[key] for key in takewhile(given.__contains__, keys)]
        if path not in paths:
            paths.append(path)
    return paths


def warming_request(model: str, preamble: str | None, context: str, cache_salt: str | None) -> dict[str, Any]:
    """The arguments of `chat.completions.create` for a prompt that begins as a real one does, and asks for one token.

    Args:
        model: The engine's name of the model.
        preamble: The system message; None for none.
        context: The rendered blocks, with which the user's message begins. If empty it says something else, since many
            chat templates want one.
        cache_salt: That of the tenant.
    """
    messages = [] if preamble is None else [{"role": "system", "content": preamble}]
    messages.append({"role": "user", "content": context or "."})
    request: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 1}
    if cache_salt is not None:
        request["extra_body"] = {"cache_salt": cache_salt}
    return request
