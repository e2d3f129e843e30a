"""The Ray cluster that does the work."""

from __future__ import annotations

import os
import socket

from warmprefix.errors import MissingExtraError, WarmprefixError

try:
    import ray
except ImportError as exc:
    raise MissingExtraError("ray", "ray") from exc

__all__ = ["RayClusterError", "connect"]


_SECONDS = 5.0
"""How long a cluster may take to accept a connection."""


class RayClusterError(WarmprefixError):
    """There is no Ray cluster at the address."""


def connect(address: str | None = None, *, local: bool = False) -> None:
    """Connect this process to a Ray cluster; do nothing if it is connected.

    Args:
        address: The cluster's address; None for `RAY_ADDRESS`, or else the cluster that runs on this machine.
        local: If there is no cluster, start one in this process, with all its cores.

    Raises:
        RayClusterError: There is no cluster, and `local` is False.
    """
    if ray.is_initialized():
        return
    try:
        _check_port(address or os.environ.get("RAY_ADDRESS", ""))
        ray.init(address=address or "auto", log_to_driver=False)
    except OSError as error:
        if not local:
            where = "on this machine" if address is None else f"at {address}"
            raise RayClusterError(
                f"No Ray cluster {where}: start one with `ray start --head`, or ask for a local one."
            ) from error
        ray.init(address="local", log_to_driver=False)


def _check_port(address: str) -> None:
    """Raise an OSError if an address of the form HOST:PORT has no server; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in address:
        socket.create_connection((host, int(port)), _SECONDS).close()
