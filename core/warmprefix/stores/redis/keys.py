"""The name of a conversation's key."""

from __future__ import annotations

import hashlib

from warmprefix.stores.operations import Conversation

__all__ = ["check_prefix", "conversation_key", "keys_pattern"]


def conversation_key(prefix: str, conversation: Conversation) -> bytes:
    """The key of all that is known of a conversation, `PREFIX:{DIGEST}:seen`.

    The digest has a fixed alphabet, so no id can end the braces that choose the Cluster's slot, and no two
    conversations share a key: the tenant's length is part of what is hashed.

    >>> conversation_key("wp", Conversation("acme", "chat"))
    b'wp:{c3c378e4f8cf000b27f719773db16536}:seen'
    """
    if conversation.tenant is None:
        named = b""
    else:
        tenant = conversation.tenant.encode("utf-8", "surrogatepass")
        named = b"%d:%b" % (len(tenant), tenant)
    named += b"|" + conversation.id.encode("utf-8", "surrogatepass")
    return f"{prefix}:{{{hashlib.blake2b(named, digest_size=16).hexdigest()}}}:seen".encode()


def keys_pattern(prefix: str) -> str:
    """What SCAN finds those keys by, and no others."""
    escaped = "".join(f"\\{letter}" if letter in "*?[]\\^-" else letter for letter in prefix)
    return f"{escaped}:{{{'?' * 32}}}:seen"


def check_prefix(prefix: str) -> str:
    """Hand over a prefix that is one."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a str, got {type(prefix).__name__}")
    if not prefix or "{" in prefix or "}" in prefix:
        raise ValueError(f"prefix must not be empty, nor have braces, which choose the Cluster's slot; got {prefix!r}")
    return prefix
