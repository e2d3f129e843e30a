"""Opaque session, tenant and prefix keys for external routers."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from warmprefix.plan import ContextPlan

__all__ = ["head_key", "session_key", "tenant_key"]


def session_key(plan: ContextPlan) -> str | None:
    """Return 32 hexadecimal digits that stand for a plan's conversation; None without one.

    As hard to guess as the plan's `cache_salt`, or, without a tenant, as the conversation's name.
    """
    if plan.conversation is None:
        return None
    return _digest(plan.cache_salt, b"warmprefix", [plan.conversation.encode("utf-8", "surrogatepass")])


def tenant_key(plan: ContextPlan) -> str | None:
    """Return a key for a plan's tenant, which is not its `cache_salt`; None without one."""
    return None if plan.cache_salt is None else _digest(plan.cache_salt, b"warmprefix-ten", ())


def head_key(plan: ContextPlan, blocks: int = 1) -> str | None:
    """Return a key for the beginning of a plan's prompt: its preamble and first blocks, in planned order.

    Two plans of one tenant have the same key if and only if they begin alike. None if the context does not open the
    prompt, or is empty.
    """
    if not plan.opens_prompt or not plan.blocks:
        return None
    first = [planned.block.fingerprint for planned in plan.blocks[:blocks]]
    return _digest(plan.cache_salt, b"warmprefix-head", [plan.scope.preamble or b"", *first])


def _digest(salt: str | None, purpose: bytes, parts: Iterable[bytes]) -> str:
    key = b"" if salt is None else salt.encode()
    return blake2b(b"".join(parts), digest_size=16, key=key[:64], person=purpose).hexdigest()
