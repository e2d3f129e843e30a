"""A callback for LiteLLM: what it sends to a gateway names the session.

LiteLLM forwards no session id of its clients, so a gateway behind it finds the session by its messages only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError

from warmprefix_plugins.gateway_headers import gateway_headers

try:
    from litellm.integrations.custom_logger import CustomLogger  # pyright: ignore[reportMissingImports]
except ImportError:  # only LiteLLM calls what is here; tests do, too
    CustomLogger = object

__all__ = ["GatewayCallback", "gateway_callback"]

_LOG = logging.getLogger("warmprefix.litellm")
_PROBE_SECONDS = 2


class GatewayCallback(CustomLogger):  # pyright: ignore[reportGeneralTypeIssues]
    """A callback that adds headers to the requests that LiteLLM sends to a gateway, and to no other.

    If such a request fails because no gateway answers, one warning says so, until a request is answered again.

    Args:
        gateway: Where the gateway is; by default `WARMPREFIX_GATEWAY`, or else `http://127.0.0.1:8080`.
    """

    def __init__(self, gateway: str | None = None) -> None:
        super().__init__()
        self._gateway = (gateway or os.environ.get("WARMPREFIX_GATEWAY") or "http://127.0.0.1:8080").rstrip("/") + "/"
        self._is_warned = False

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> dict[str, Any] | None:
        """Return the arguments of a call with the headers; None for one that goes elsewhere."""
        if not self._is_asked(kwargs):
            return None
        headers = {**(kwargs.get("extra_headers") or {}), **gateway_headers("LiteLLM", _session_id(kwargs))}
        return {**kwargs, "extra_headers": headers}

    async def async_log_success_event(self, kwargs: dict[str, Any], *_: Any, **__: Any) -> None:
        """Note that a gateway answers."""
        if self._is_asked(kwargs.get("litellm_params") or {}):
            self._is_warned = False

    async def async_log_failure_event(self, kwargs: dict[str, Any], *_: Any, **__: Any) -> None:
        """Warn if a call failed because no gateway answers. LiteLLM has one error for this and for many others."""
        if not self._is_warned and self._is_asked(kwargs.get("litellm_params") or {}):
            self._is_warned = True  # before others fail while this one looks
            self._is_warned = not await asyncio.to_thread(self._answers)
            if self._is_warned:
                _LOG.warning("no gateway at %s: its models fail, or LiteLLM asks their fallbacks", self._gateway)

    def _is_asked(self, where: Mapping[str, Any]) -> bool:
        return f"{where.get('api_base') or where.get('base_url')}/".startswith(self._gateway)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._gateway}health", timeout=_PROBE_SECONDS):  # noqa: S310
                return True
        except HTTPError:  # it is there, but its upstreams may not be
            return True
        except OSError:
            return False


gateway_callback = GatewayCallback()
"""The callback for `litellm_settings.callbacks`."""


def _session_id(kwargs: Mapping[str, Any]) -> str | None:
    # The proxy has the id in the first field; a library's caller may have it in the metadata.
    for holder in (kwargs, kwargs.get("metadata"), kwargs.get("litellm_metadata")):
        if isinstance(holder, Mapping):
            for name in ("litellm_session_id", "session_id"):
                if isinstance(value := holder.get(name), str) and value:
                    return value
    return None
