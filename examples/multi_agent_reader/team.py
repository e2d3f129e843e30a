"""The agents: one per engine, and a manager that answers from their notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from openai import OpenAI

from warmprefix_chain_of_agents import ChainOfAgents, Manager, Worker
from warmprefix_openai import Retries
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

__all__ = ["emulated_engines", "open_team"]


@contextmanager
def open_team(engines: Sequence[str], model: str, api_key: str = "none") -> Iterator[ChainOfAgents]:
    """Yield a team with an agent per engine; the manager is on the first one."""
    with ExitStack() as stack:
        clients = [stack.enter_context(OpenAI(base_url=url, api_key=api_key)) for url in engines]
        workers = [Worker(f"agent {number}", client, model) for number, client in enumerate(clients, 1)]
        # In mode "map" all agents read at the same time. If one can't be reached, the others read its documents.
        yield ChainOfAgents(workers, Manager(clients[0], model), mode="map", retries=Retries(count=1, longest=2.0))


@contextmanager
def emulated_engines(count: int) -> Iterator[list[str]]:
    """Yield the addresses of engines with a prefix cache and without a model: their answers mean nothing."""
    config = EmulatorConfig(kv_blocks=16_384, base_ttft_ms=0)
    with ExitStack() as stack:
        yield [stack.enter_context(EmulatorServer(config)).base_url for _ in range(count)]
