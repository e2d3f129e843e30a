"""An engine to develop against without a GPU: vLLM's prefix cache behind OpenAI's HTTP API, and no model.

The cache and the tokenizer need only the standard library. `EmulatorServer` and `create_app` need the extra `cli`, and
are imported at their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmprefix_tools.caches import KvSequence, PrefixCache, block_hashes
from warmprefix_tools.emulator.engine import EmulatorConfig
from warmprefix_tools.emulator.tokenizer import ChatMessage, encode, render_chat, split

if TYPE_CHECKING:
    from warmprefix_tools.emulator.app import create_app
    from warmprefix_tools.emulator.server import EmulatorServer

__all__ = [
    "ChatMessage",
    "EmulatorConfig",
    "EmulatorServer",
    "KvSequence",
    "PrefixCache",
    "block_hashes",
    "create_app",
    "encode",
    "render_chat",
    "split",
]


def __getattr__(name: str) -> object:
    if name == "create_app":
        from warmprefix_tools.emulator.app import create_app

        return create_app
    if name == "EmulatorServer":
        from warmprefix_tools.emulator.server import EmulatorServer

        return EmulatorServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
