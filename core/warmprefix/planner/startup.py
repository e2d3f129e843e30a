"""Work before the first request: learn from other workers, warm the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

from warmprefix.annotate import has_labels
from warmprefix.blocks import ContextBlock, as_blocks
from warmprefix.notes import NoteWriter
from warmprefix.plan import PlannedBlock, Scope
from warmprefix.planner.scope import ScopeRegistry, make_scope
from warmprefix.residency.report import paths_to_warm, warming_request

__all__ = ["Startup", "WarmOptions"]

_POLL_SECONDS = 0.005


class _RequiredWarmOptions(TypedDict):
    model: str


class WarmOptions(_RequiredWarmOptions, total=False):
    """The keyword arguments of `ContextPlanner.warm`, which documents them."""

    tenant: str | None
    max_paths: int


@dataclass(frozen=True, slots=True)
class Startup:
    """Prepares scopes for their first requests."""

    writer: NoteWriter
    lock: threading.RLock
    scopes: ScopeRegistry

    def catch_up(self, scope: Scope, timeout: float) -> bool:
        """Wait until the orders of other workers are learned; True if they are."""
        for seconds in self._pauses(scope, timeout):
            time.sleep(seconds)
        return self.scopes.sharing.has_caught_up(scope)

    async def acatch_up(self, scope: Scope, timeout: float) -> bool:
        import asyncio  # importing it takes long, and the caller has it already

        for seconds in self._pauses(scope, timeout):
            await asyncio.sleep(seconds)
        return self.scopes.sharing.has_caught_up(scope)

    def _pauses(self, scope: Scope, timeout: float) -> Iterator[float]:
        with self.lock:
            self.scopes.use(scope)
        deadline = time.monotonic() + timeout
        while not self.scopes.sharing.has_caught_up(scope) and time.monotonic() < deadline:
            yield _POLL_SECONDS

    def warming_requests(
        self,
        preamble: str | None,
        blocks: Iterable[ContextBlock | str] | None,
        *,
        model: str,
        tenant: str | None = None,
        max_paths: int = 8,
    ) -> Iterator[dict[str, Any]]:
        """Yield the requests that warm a scope, one per path, the empty path first.

        Send each before you take the next: a path counts as resident from then on. For an engine that keeps
        checkpoints they end one token behind the path.
        """
        scope = make_scope(tenant, model, preamble)
        given = as_blocks(() if blocks is None else blocks)
        with self.lock:
            state = self.scopes.use(scope)
            paths = paths_to_warm(state.tree, given, max_paths)
            labels = [state.labels.labels(path) for path in paths]
        is_labelled = has_labels(self.writer.opening_annotation(model))
        for path, names in zip(paths, labels, strict=True):
            shown = zip(path, names if is_labelled else [""] * len(path), strict=True)
            written = self.writer.templates, frozenset(names if is_labelled else ())
            context = "\n\n".join([PlannedBlock(block, (), label, None, *written).render() for block, label in shown])
            exact = self.scopes.profile.current.checkpoints is not None
            yield warming_request(model, preamble, context, state.cache_salt, exact=exact)
            with self.lock:
                tree = self.scopes.use(scope).tree
                tree.insert([block.fingerprint for block in path], [block.tokens for block in path])
