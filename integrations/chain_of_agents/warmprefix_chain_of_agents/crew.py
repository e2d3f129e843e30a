"""The workers of a chain, and which of them live."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from warmprefix import Agent, AgentRouter, Assignment, ContextBlock, EngineError
from warmprefix_chain_of_agents.agents import Worker

__all__ = ["Crew"]


class Crew:
    """Workers by name, and the router that knows them. Thread-safe."""

    def __init__(
        self,
        workers: Iterable[Worker],
        router: AgentRouter | None,
        recovery: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Join the workers that the router does not know.

        Args:
            workers: At least one, with different names.
            router: One of its own if None.
            recovery: Seconds after which an agent that was lost is given another chance.
            clock: Seconds, from anywhere on.

        Raises:
            TypeError: `workers` holds something else, or `router` is none.
            ValueError: There is no worker, or two have one name.
        """
        self.workers: dict[str, Worker] = {}
        for worker in workers:
            if not isinstance(worker, Worker):
                raise TypeError(f"workers must be Workers, got {type(worker).__name__}")
            if worker.name in self.workers:
                raise ValueError(f"two workers are called {worker.name!r}")
            self.workers[worker.name] = worker
        if not self.workers:
            raise ValueError("workers must not be empty")
        if router is not None and not isinstance(router, AgentRouter):
            raise TypeError(f"router must be an AgentRouter or None, got {type(router).__name__}")
        self.router = AgentRouter() if router is None else router
        self._recovery = recovery
        self._clock = clock
        self._lock = threading.Lock()
        self._lost: dict[str, float] = {}
        """When each was lost, or was first seen to be, that has not joined again."""
        known = {agent.name for agent in self.router.agents}
        for name in self.workers:
            if name not in known:
                self._join(name)

    def live(self) -> list[str]:
        """Who can be given documents."""
        return [agent.name for agent in self.router.agents if agent.name in self.workers]

    def recover(self) -> None:
        """Let in again who was lost long enough ago; everybody, if nobody is left: there is nothing to lose.

        Others who have this router may have said who failed. They may be gone, so those are let in again as well.
        """
        with self._lock:
            for name, since in list(self._lost.items()):
                if self._clock() - since >= self._recovery:
                    self._join(name)
            for agent in self.router.failed:
                if agent.name in self.workers:
                    self._lost.setdefault(agent.name, self._clock())
            if not self.live():
                for name in list(self._lost):
                    self._join(name)

    def lost(self, name: str) -> None:
        """It can't be reached. Others may have said so already."""
        with self._lock, suppress(ValueError):  # it has left meanwhile
            self.router.fail(name)
            self._lost[name] = self._clock()

    def assign(
        self,
        blocks: Sequence[ContextBlock],
        among: Collection[str],
        *,
        conversation: str | None,
        tenant: str | None,
        together: bool,
    ) -> Assignment | None:
        """Share blocks out over those of some workers who live; None if none does."""
        names = [name for name in self.live() if name in among]
        if not names:
            return None
        try:
            return self.router.assign(blocks, names, conversation=conversation, tenant=tenant, together=together)
        except (EngineError, ValueError):
            if set(names) <= set(self.live()):
                raise
        # Somebody has left or failed meanwhile.
        return self.assign(blocks, among, conversation=conversation, tenant=tenant, together=together)

    def _join(self, name: str) -> None:
        worker = self.workers[name]
        self._lost.pop(name, None)
        agent = Agent(name, worker.capacity_tokens, worker.weight)
        with suppress(ValueError):  # somebody else who has this router let it in
            self.router.join(agent)
