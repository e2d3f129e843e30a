"""Prompts that fill an engine's cache before the first request needs it."""

from __future__ import annotations

from typing import Any

__all__ = ["warming_request"]


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
