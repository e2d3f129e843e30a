"""Names of the applications that send requests, for the page: an SDK's name says little. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["application_of"]

_APPLICATION_HEADER = "x-warmprefix-application"
"""Header in which plugins name their application. It is not sent on."""

_AGENTS = {
    "claude-cli": "Claude Code",
    "codex_cli_rs": "Codex",
    "codex_exec": "Codex",
    "codex-tui": "Codex",
    "litellm": "LiteLLM",
    "opencode": "OpenCode",
}
"""Applications by the first word of their user agent."""

_OPENINGS = {
    "running inside OpenClaw": "OpenClaw",
    "You are Hermes Agent": "Hermes",
    "You are PageIndex": "PageIndex",
    "You are opencode": "OpenCode",
    "You are a Memory Extractor": "Mem0",
    "You are a Personal Information Organizer": "Mem0",
    "You are a smart memory manager which controls": "Mem0",
}
"""Applications that send the user agent of an SDK, by words in the beginning of their public system prompts."""

_OPENING_CHARACTERS = 240
_MOST_CHARACTERS = 40
_PREFIX = "x-openwebui-"
"""Open WebUI's headers, with `ENABLE_FORWARD_USER_INFO_HEADERS`."""


def application_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """Return the name of the application that sends a request: empty if nothing names it.

    >>> application_of({"user-agent": "claude-cli/2.1.197 (external, sdk-cli)"}, {})
    'Claude Code'
    >>> system = {"role": "system", "content": "You are a personal assistant running inside OpenClaw."}
    >>> application_of({"user-agent": "OpenAI/JS 6.1.0"}, {"messages": [system]})
    'OpenClaw'

    Args:
        headers: Of the request, with names in any case if the mapping ignores it, else in lower case.
        body: Of the request. Only the beginning of its system prompt counts.
    """
    given = headers.get(_APPLICATION_HEADER, "")[:_MOST_CHARACTERS]
    if given and given.isascii() and given.isprintable():
        return given
    agent = headers.get("user-agent", "").partition("/")[0].partition(" ")[0][:_MOST_CHARACTERS]
    if agent in _AGENTS:
        return _AGENTS[agent]
    if any(name.lower().startswith(_PREFIX) for name in headers):
        return "Open WebUI"
    opening = _opening(body)
    named = next((name for words, name in _OPENINGS.items() if words in opening), None)
    return named or (agent if agent.isprintable() else "")


def _opening(body: Mapping[str, Any]) -> str:
    """Return the beginning of the system prompt, wherever the API has it."""
    given = body.get("instructions") or body.get("system")
    messages = body.get("messages") or body.get("input")
    first = messages[0] if isinstance(messages, list) and messages else None
    if not given and isinstance(first, Mapping) and first.get("role") in ("system", "developer"):
        given = first.get("content")
    if isinstance(given, list):
        texts = [part.get("text") for part in given[:3] if isinstance(part, Mapping)]
        given = "\n".join([text[:_OPENING_CHARACTERS] for text in texts if isinstance(text, str)])
    return given[:_OPENING_CHARACTERS] if isinstance(given, str) else ""
