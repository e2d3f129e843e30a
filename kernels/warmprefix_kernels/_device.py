"""The choice of a device and of the implementation for it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from warmprefix_kernels._missing import missing_extra

__all__ = ["Device", "choose_device"]


class Device(NamedTuple):
    """A device that a kernel runs on."""

    name: str
    """"numpy", or a device as torch names it: "cpu", "cuda:0"."""
    implementation: Literal["naive", "torch", "triton"]
    """The module of a kernel that computes there."""

    @property
    def of_tensors(self) -> str:
        """The torch device of the tensors that are computed here."""
        return "cpu" if self.implementation == "naive" else self.name


def choose_device(device: object = "auto") -> Device:
    """Resolve a `device` argument on this machine.

    Args:
        device: "auto" is a CUDA device if torch finds one, else the CPU through torch, or numpy if torch is not
            installed. "numpy" is always available, and slow. Any other value is a torch device: "cpu", "cuda",
            "cuda:1", or a `torch.device`. Triton computes on CUDA devices if it is installed.

    Raises:
        ImportError: `device` is a torch device, and torch is not installed.
        ValueError: The device does not exist.
    """
    requested = str(device)
    if requested == "numpy":
        return Device("numpy", "naive")
    try:
        torch: Any = import_module("torch")
    except ImportError as error:
        if requested == "auto":
            return Device("numpy", "naive")
        command = missing_extra("torch").command
        raise ImportError(
            f"device={requested!r} needs torch, and device='numpy' does not; to install torch: {command}"
        ) from error
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(requested)
    except RuntimeError as error:
        raise ValueError(
            f"device must be auto, numpy, or a torch device such as cpu or cuda, got {requested!r}"
        ) from error
    if chosen.type != "cuda":
        return Device(str(chosen), "torch")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = chosen.index if chosen.index is not None else torch.cuda.current_device() if found else 0
    if number >= found:
        raise ValueError(f"device must be one of the {found} CUDA devices that torch finds, got {requested!r}")
    return Device(f"cuda:{number}", "triton" if find_spec("triton") else "torch")
