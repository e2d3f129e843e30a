"""A plugin for Hermes Agent: repeated tool results become references, in the agent's own process.

Hermes finds it by the entry point `hermes_agent.plugins`, and uses it if `plugins.enabled` names it.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from warmprefix.forks import fork_safe_lock
from warmprefix_plugins.gateway_headers import gateway_headers
from warmprefix_requests import Echoes, RewriteRoute, rewrite

__all__ = ["HermesMiddleware", "register"]

_log = logging.getLogger("warmprefix.hermes")

_ROUTES: dict[str, RewriteRoute] = {
    "anthropic_messages": "messages",
    "chat_completions": "chat",
    "codex_responses": "responses",
}
_MAX_SESSIONS = 256


def register(context: Any) -> None:
    """Register the middleware of this plugin.

    A Hermes that could not undo a copied reference gets no references: a warning names the reason.

    Args:
        context: Hermes' `PluginContext`.
    """
    try:
        kinds = import_module("hermes_cli.middleware").VALID_MIDDLEWARE
        add = context.register_middleware
    except (ImportError, AttributeError) as error:
        _log.warning("warmprefix changes nothing in this version of Hermes: %s", error)
        return
    if not {"llm_request", "tool_request"} <= set(kinds):
        _log.warning("warmprefix changes nothing in this version of Hermes: it has the middleware %s", sorted(kinds))
        return
    middleware = HermesMiddleware()
    add("llm_request", middleware.on_request)
    add("tool_request", middleware.on_tool_call)


class HermesMiddleware:
    """What changes in the requests and tool calls of a Hermes. Its methods may run in several threads.

    Each takes what Hermes knows as keywords, and returns None where nothing changes.
    """

    def __init__(self) -> None:
        self._echoes: dict[str, Echoes] = {}
        """For each session, the references in its prompts; the session that was asked last stands last."""
        self._lock = fork_safe_lock()

    def on_request(
        self,
        *,
        request: dict[str, Any],
        session_id: str = "",
        api_mode: str = "chat_completions",
        **_: Any,
    ) -> dict[str, Any] | None:
        """Return a request to the model with references and the session's id. The given one is not changed."""
        route = _ROUTES.get(api_mode)
        if route is None or not session_id:
            return None
        # What the SDK merges into the body decides about references, too.
        rewritten = rewrite(route, {**(request.get("extra_body") or {}), **request})
        prompt = {name: rewritten.body[name] for name in ("messages", "input") if name in request}
        if rewritten.echoes:
            with self._lock:
                before = self._echoes.pop(session_id, Echoes({}))
                self._echoes[session_id] = Echoes({**before.texts, **rewritten.echoes.texts})
                if len(self._echoes) > _MAX_SESSIONS:
                    del self._echoes[next(iter(self._echoes))]
        headers = {**(request.get("extra_headers") or {}), **gateway_headers("Hermes", session_id)}
        return {"request": {**request, **prompt, "extra_headers": headers}, "source": "warmprefix"}

    def on_tool_call(self, *, args: dict[str, Any], session_id: str = "", **_: Any) -> dict[str, Any] | None:
        """Return the arguments of a call with the texts that references in them stand for."""
        echoes = self._echoes.get(session_id)
        if echoes is None:
            return None
        restored, number, _unresolved = echoes.in_value(args)
        return {"args": restored, "source": "warmprefix"} if number else None
