"""The Lua scripts, each sent by its digest; and in full to a server that does not know it."""

from __future__ import annotations

import hashlib
from functools import partial
from importlib import resources
from typing import Any

from redis.exceptions import NoScriptError

from warmprefix.stores.operations import Steps

__all__ = ["ABANDON", "COMMIT", "FORGET", "PREPARE", "SEAL_SIZE", "Script", "seal"]

SEAL_SIZE = 16


def seal(*parts: bytes) -> bytes:
    """What damage on the way can't pass: TCP's own sum is weak, and a proxy makes a new one for what it has mixed up.

    >>> seal(b"ab", b"c") == seal(b"abc") != seal(b"acb")
    True
    """
    return hashlib.sha1(b"".join(parts), usedforsecurity=False).hexdigest()[:SEAL_SIZE].encode()


class Script:
    """One atomic operation on one key; the client that it is given says whether that runs at once or is awaited.

    A command has one way back after NOSCRIPT, which is EVAL: it runs the script and teaches it to the server, in a
    Cluster to the one that owns the key.
    """

    def __init__(self, name: str) -> None:
        folder = resources.files("warmprefix.stores.redis") / "lua"
        self.name = name
        self.text = "\n".join(
            (folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("prelude", name)
        ).encode()
        self.digest = hashlib.sha1(self.text, usedforsecurity=False).hexdigest()

    def steps(self, client: Any, key: bytes, *arguments: bytes) -> Steps[Any]:
        """Run the script on the client's server and return its answer."""
        sealed = (1, key, *arguments, seal(*arguments, key))
        try:
            return (yield partial(client.execute_command, "EVALSHA", self.digest, *sealed))
        except NoScriptError:
            return (yield partial(client.execute_command, "EVAL", self.text, *sealed))


PREPARE = Script("prepare")
COMMIT = Script("commit")
ABANDON = Script("abandon")
FORGET = Script("forget")
