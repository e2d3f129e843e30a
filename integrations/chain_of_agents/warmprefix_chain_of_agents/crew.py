"""The workers of a chain, and which of them are live."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

from warmprefix import Choice, ContextBlock
from warmprefix.errors import EngineError
from warmprefix.forks import fork_safe_lock
from warmprefix_chain_of_agents.agents import Worker
from warmprefix_routing import Agent, AgentRouter, Assignment

__all__ = ["Crew"]


class Crew:
    """Workers by name, and their router. Thread-safe."""

    def __init__(self, workers: Iterable[Worker], router: AgentRouter | None, recovery: float) -> None:
        """Let the workers join that the router does not have. A lost one gets another chance after `recovery` seconds.

        Raises:
            TypeError: `workers` holds another object, or `router` is no `AgentRouter`.
            ValueError: There is no worker, or two have one name.
        """
        self.workers: dict[str, Worker] = {}
        for worker in workers:
            if not isinstance(worker, Worker):
                raise TypeError(f"workers must be Workers, got {type(worker).__name__}")
            if worker.name in self.workers:
                raise ValueError(f"names of workers must differ, got {worker.name!r} twice")
            self.workers[worker.name] = worker
        if not self.workers:
            raise ValueError("workers must be one or more, got none")
        if router is not None and not isinstance(router, AgentRouter):
            raise TypeError(f"router must be an AgentRouter or None, got {type(router).__name__}")
        self.router = AgentRouter() if router is None else router
        self._recovery = recovery
        self._lock = fork_safe_lock()
        self._lost: dict[str, float] = {}
        """Time at which each worker that has not joined again was lost, or first seen to be."""
        joined = {agent.name for agent in self.router.agents}
        for name in self.workers:
            if name not in joined:
                self._join(name)

    def live(self) -> list[str]:
        """Return the names of the workers that can get documents."""
        return [agent.name for agent in self.router.agents if agent.name in self.workers]

    def recover(self) -> None:
        """Let workers join again that were lost long enough ago; all of them, if none is left.

        Another chain with this router may have reported failures and be gone since, so those workers join again too.
        """
        with self._lock:
            for name, since in list(self._lost.items()):
                if time.monotonic() - since >= self._recovery:
                    self._join(name)
            for agent in self.router.failed:
                if agent.name in self.workers:
                    self._lost.setdefault(agent.name, time.monotonic())
            if not self.live():
                for name in list(self._lost):
                    self._join(name)

    def lost(self, name: str) -> None:
        """Report that a worker can't be reached. Another chain may have done so already."""
        with self._lock, suppress(ValueError):  # it has left meanwhile
            self.router.fail(name)
            self._lost[name] = time.monotonic()

    def assign(
        self,
        blocks: Sequence[ContextBlock],
        among: Collection[str],
        conversation: str | None,
        tenant: str | None,
        *,
        together: bool,
        choose: Choice | None = None,
    ) -> Assignment | None:
        """Share blocks out over the live ones among some workers; None without any."""
        names = [name for name in self.live() if name in among]
        if not names:
            return None
        try:
            return self.router.assign(
                blocks, names, conversation=conversation, tenant=tenant, together=together, choose=choose
            )
        except (EngineError, ValueError):
            if set(names) <= set(self.live()):
                raise
        # A worker has left or failed meanwhile.
        return self.assign(blocks, among, conversation, tenant, together=together, choose=choose)

    def _join(self, name: str) -> None:
        worker = self.workers[name]
        self._lost.pop(name, None)
        agent = Agent(name, worker.capacity_tokens, worker.weight)
        with suppress(ValueError):  # another chain with this router let it join
            self.router.join(agent)
