"""Work before the first request: learn what other workers served, and fill the engine's cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from warmprefix.annotate import Templates
from warmprefix.blocks import ContextBlock, as_blocks
from warmprefix.plan import Scope
from warmprefix.planner.scope import ScopeRegistry
from warmprefix.residency.warm import paths_to_warm, warming_request

__all__ = ["Startup"]

_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Startup:
    """Prepares scopes for their first requests."""

    templates: Templates
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

    def warm(
        self,
        client: Any,
        scope: Scope,
        preamble: str | None,
        blocks: Iterable[ContextBlock | str] | None,
        max_paths: int,
    ) -> int:
        """Send the prompts that warm a scope, and return their number."""
        sent = 0
        for path, request in self._warming_requests(scope, preamble, blocks, max_paths):
            client.chat.completions.create(**request)
            self._add_resident(scope, path)
            sent += 1
        return sent

    async def awarm(
        self,
        client: Any,
        scope: Scope,
        preamble: str | None,
        blocks: Iterable[ContextBlock | str] | None,
        max_paths: int,
    ) -> int:
        sent = 0
        for path, request in self._warming_requests(scope, preamble, blocks, max_paths):
            await client.chat.completions.create(**request)
            self._add_resident(scope, path)
            sent += 1
        return sent

    def _warming_requests(
        self, scope: Scope, preamble: str | None, blocks: Iterable[ContextBlock | str] | None, max_paths: int
    ) -> Iterator[tuple[list[ContextBlock], dict[str, Any]]]:
        """Yield each path to warm, the empty one first, with the request that warms it."""
        given = as_blocks(() if blocks is None else blocks)
        with self.lock:
            state = self.scopes.use(scope)
            paths = paths_to_warm(state.tree, given, max_paths)
            labelled = [list(zip(path, state.labels.labels(path), strict=True)) for path in paths]
        for path in labelled:
            names = [label for _, label in path]
            context = "\n\n".join([self.templates.block(label, block.text, names) for block, label in path])
            assert scope.model is not None
            yield [block for block, _ in path], warming_request(scope.model, preamble, context, state.cache_salt)

    def _add_resident(self, scope: Scope, path: Sequence[ContextBlock]) -> None:
        with self.lock:
            tree = self.scopes.use(scope).tree
            tree.insert([block.fingerprint for block in path], [block.tokens for block in path])
