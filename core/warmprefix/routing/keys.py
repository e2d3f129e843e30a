"""What a router is told instead of names and texts: digests that keep what belongs together together."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from warmprefix.plan import ContextPlan

__all__ = ["head_key", "session_key", "tenant_key"]


def session_key(plan: ContextPlan) -> str | None:
    """Names a plan's conversation: 32 hexadecimal digits; None without one.

    As hard to guess as its `cache_salt`, or, where no tenant is named, as the conversation's name.
    """
    if plan.conversation is None:
        return None
    return _digest(plan.cache_salt, b"warmprefix", [plan.conversation.encode("utf-8", "surrogatepass")])


def tenant_key(plan: ContextPlan) -> str | None:
    """Names a plan's tenant, and is not its `cache_salt`; None without one."""
    return None if plan.cache_salt is None else _digest(plan.cache_salt, b"warmprefix-ten", ())


def head_key(plan: ContextPlan, blocks: int = 1) -> str | None:
    """Names what a plan's prompt begins with: its preamble and the first so many blocks, in planned order.

    Two plans of one tenant have the same if and only if they begin alike. None where the context does not open the
    prompt, or there is none.
    """
    if not plan.opens_prompt or not plan.blocks:
        return None
    first = [planned.block.fingerprint for planned in plan.blocks[:blocks]]
    return _digest(plan.cache_salt, b"warmprefix-head", [plan.scope.preamble or b"", *first])


def _digest(salt: str | None, purpose: bytes, parts: Iterable[bytes]) -> str:
    key = b"" if salt is None else salt.encode()
    return blake2b(b"".join(parts), digest_size=16, key=key[:64], person=purpose).hexdigest()
