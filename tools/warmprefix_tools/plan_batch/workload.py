"""A trace as a batch, and what its requests would find in the cache if they ran as they came."""

from __future__ import annotations

import json
from collections.abc import Sequence

from warmprefix.batch.plan import BatchRequest
from warmprefix.blocks import ContextBlock
from warmprefix.prefix.tree import PrefixTree
from warmprefix.traces import Trace
from warmprefix_tools.replay.workload import DEFAULT_K

__all__ = ["as_batch", "saved_as_they_came"]


def as_batch(trace: Trace, k: int | None = None) -> list[BatchRequest]:
    """The trace's requests, called by their places in it, since its own ids may be 1 and "1".

    Each has its first `k` blocks, `DEFAULT_K` unless told, and its scope as tenant.
    """
    blocks = {id: ContextBlock(json.dumps(id), id=id, tokens=tokens) for id, tokens in trace.tokens.items()}
    most = DEFAULT_K if k is None else k
    return [
        BatchRequest(place, [blocks[id] for id in request.blocks[:most]], tenant=request.scope)
        for place, request in enumerate(trace.requests)
    ]


def saved_as_they_came(requests: Sequence[BatchRequest], capacity_tokens: int | None) -> int:
    """Tokens that a cache of this size holds if all run in the order given, with their blocks in relevance order."""
    cache = PrefixTree[tuple[str | None, bytes]](capacity_tokens, 2 * len(requests) + 1)
    return sum(
        cache.insert(
            [(request.tenant, block.fingerprint) for block in request.blocks],
            [block.tokens for block in request.blocks],
        ).tokens
        for request in requests
    )
