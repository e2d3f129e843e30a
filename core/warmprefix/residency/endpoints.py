"""The ZeroMQ addresses of engines and their data-parallel ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Endpoint", "endpoints_of"]


class Endpoint(NamedTuple):
    """One publisher's addresses."""

    publishes: str
    replays: str | None
    """Where it answers for what was missed."""


def endpoints_of(
    publish: str | Sequence[str], replay: str | Sequence[str | None] | None, ranks: int = 1
) -> tuple[Endpoint, ...]:
    """The addresses of all publishers: each engine's, and those of its further ranks, whose ports follow its own.

    >>> endpoints_of("tcp://a:5557", "tcp://a:5558", ranks=1)
    (Endpoint(publishes='tcp://a:5557', replays='tcp://a:5558'),)
    >>> [endpoint.publishes for endpoint in endpoints_of(["tcp://a:5557", "tcp://b:5557"], None, ranks=2)]
    ['tcp://a:5557', 'tcp://a:5558', 'tcp://b:5557', 'tcp://b:5558']

    Raises:
        ValueError: There is no address, or one that ZeroMQ does not know; there are as many `replay` as engines, or
            none; or ranks are asked for where addresses have no port.
    """
    engines = [publish] if isinstance(publish, str) else list(publish)
    if not engines:
        raise ValueError("endpoint must name one address at least")
    answers = [replay] * len(engines) if replay is None else [replay] if isinstance(replay, str) else list(replay)
    if len(answers) != len(engines):
        raise ValueError(f"replay must have one address an endpoint, got {len(answers)} for {len(engines)}")
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, got {ranks}")
    return tuple(
        Endpoint(_of_rank("endpoint", address, rank), None if answer is None else _of_rank("replay", answer, rank))
        for address, answer in zip(engines, answers, strict=True)
        for rank in range(ranks)
    )


def _of_rank(name: str, address: str, rank: int) -> str:
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if scheme == "ipc" and place and not rank:
        return address
    if scheme == "tcp" and host and port.isdecimal() and int(port) + rank < 65_536:
        return f"tcp://{host}:{int(port) + rank}"
    allowed = "tcp://host:port" if rank else "tcp://host:port or ipc://path"
    raise ValueError(f"{name} must be {allowed}, got {address!r}" + (f" for rank {rank}" if rank else ""))
