"""A gateway in front of inference engines, for applications that stay as they are: only their base URL changes.

It passes requests and answers on, keeps each session at one replica, replaces exactly repeated tool results by
references, sets cache marks for hosted APIs, and shows which prompt tokens were computed again and why.
"""

from __future__ import annotations

from warmprefix_gateway.asgi import Gateway
from warmprefix_gateway.gateway_options import GatewayBounds, GatewayOptions
from warmprefix_gateway.serving import GatewayServer, serve

__all__ = ["Gateway", "GatewayBounds", "GatewayOptions", "GatewayServer", "serve"]
