"""A callback for LiteLLM: what it sends to a gateway names the session.

LiteLLM forwards no session id of its clients, so a gateway behind it finds the session by its messages only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from warmprefix_plugins.gateway_headers import gateway_headers

try:
    from litellm.integrations.custom_logger import CustomLogger  # pyright: ignore[reportMissingImports]
except ImportError:  # only LiteLLM calls what is here; tests do, too
    CustomLogger = object

__all__ = ["GatewayCallback", "gateway_callback"]


class GatewayCallback(CustomLogger):  # pyright: ignore[reportGeneralTypeIssues]
    """A callback that adds headers to the requests that LiteLLM sends to a gateway, and to no other.

    Args:
        gateway: Where the gateway is; by default `WARMPREFIX_GATEWAY`, or else `http://127.0.0.1:8080`.
    """

    def __init__(self, gateway: str | None = None) -> None:
        super().__init__()
        self._gateway = (gateway or os.environ.get("WARMPREFIX_GATEWAY") or "http://127.0.0.1:8080").rstrip("/") + "/"

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> dict[str, Any] | None:
        """Return the arguments of a call with the headers; None for one that goes elsewhere."""
        base = kwargs.get("api_base") or kwargs.get("base_url") or ""
        if not f"{base}/".startswith(self._gateway):
            return None
        headers = {**(kwargs.get("extra_headers") or {}), **gateway_headers("LiteLLM", _session_id(kwargs))}
        return {**kwargs, "extra_headers": headers}


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
