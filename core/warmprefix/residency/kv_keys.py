"""What a KV block is called here: a digest of its tokens, of all tokens before it, and of who may share them.

An engine's own hashes are not used for that: other engines, or the same one after a restart, have others for the same
tokens, and they may be cut so short that two blocks have one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

__all__ = ["KEY_BYTES", "TOKEN_BYTES", "chain", "pack_tokens", "root_key"]

KEY_BYTES = 16

TOKEN_BYTES = array("I").itemsize


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """The ids, `TOKEN_BYTES` each. Raises TypeError or OverflowError if one is no unsigned integer of that size."""
    return array("I", token_ids).tobytes()


def root_key(salt: str | None, adapter: str | None) -> bytes:
    """The key of nothing yet, from which all chains of KV blocks begin that may share each other's beginnings.

    Args:
        salt: The requests' `cache_salt`.
        adapter: The name of the LoRA adapter that computes them.
    """
    digest = blake2b(digest_size=KEY_BYTES)
    for part in (salt, adapter):
        encoded = None if part is None else part.encode("utf-8", "surrogatepass")
        digest.update(b"\0" if encoded is None else b"\1%d:%s" % (len(encoded), encoded))
    return digest.digest()


def chain(tokens: bytes, block_size: int, root: bytes) -> Iterator[bytes]:
    """The keys of a prompt's full KV blocks, of `block_size` tokens each, first to last."""
    key, step = root, block_size * TOKEN_BYTES
    for start in range(0, len(tokens) - step + 1, step):
        key = blake2b(key + tokens[start : start + step], digest_size=KEY_BYTES).digest()
        yield key
