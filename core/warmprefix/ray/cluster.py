"""The Ray cluster that does the work."""

from __future__ import annotations

from warmprefix.errors import MissingExtraError, WarmprefixError

try:
    import ray
except ImportError as exc:
    raise MissingExtraError("ray", "ray") from exc

__all__ = ["RayClusterError", "connect"]


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
        ray.init(address=address or "auto", log_to_driver=False)
    except ConnectionError as error:
        if not local:
            where = "on this machine" if address is None else f"at {address}"
            raise RayClusterError(
                f"No Ray cluster {where}: start one with `ray start --head`, or ask for a local one."
            ) from error
        ray.init(address="local", log_to_driver=False)
