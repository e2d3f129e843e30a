"""A small real model on this machine: SmolLM2-135M-Instruct behind llama.cpp's own server.

It needs no GPU and no account. The model shows what an engine really does with a prompt; its answers are often wrong.
"""

from __future__ import annotations

from warmprefix.errors import WarmprefixError

__all__ = ["LocalModelError"]


class LocalModelError(WarmprefixError):
    """A reason why the local model cannot be fetched or served, for the user."""
