"""Where to compute, and with which implementation."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from warmprefix_kernels._missing import missing_extra

__all__ = ["Device", "choose_device"]


class Device(NamedTuple):
    """Where a kernel runs."""

    name: str
    """"numpy", or a device as torch names it: "cpu", "cuda:0"."""
    implementation: Literal["naive", "torch", "triton"]
    """Which of a kernel's modules computes there."""

    @property
    def of_tensors(self) -> str:
        """Where a tensor lies that this computes."""
        return "cpu" if self.implementation == "naive" else self.name


def choose_device(device: object = "auto") -> Device:
    """What a `device` argument stands for on this machine.

    Args:
        device: "auto" is a CUDA device if torch finds one, else the CPU through torch, else, where torch is not
            installed, numpy. "numpy" is always there, and slow. Anything else is a device of torch's: "cpu", "cuda",
            "cuda:1", or a `torch.device`. A CUDA device is used through Triton if that is installed.

    Raises:
        ImportError: A device of torch's was asked for, and torch is not installed.
        ValueError: There is no such device.
    """
    asked = str(device)
    if asked == "numpy":
        return Device("numpy", "naive")
    try:
        torch: Any = import_module("torch")
    except ImportError as error:
        if asked == "auto":
            return Device("numpy", "naive")
        command = missing_extra("torch").command
        raise ImportError(
            f"device={asked!r} needs torch, and device='numpy' does not; to install torch: {command}"
        ) from error
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(asked)
    except RuntimeError as error:
        raise ValueError(
            f"device must be auto, numpy, or a device of torch's such as cpu or cuda, got {asked!r}"
        ) from error
    if chosen.type != "cuda":
        return Device(str(chosen), "torch")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = chosen.index if chosen.index is not None else torch.cuda.current_device() if found else 0
    if number >= found:
        raise ValueError(f"device must be one that torch finds, got {asked!r} where it finds {found} CUDA devices")
    return Device(f"cuda:{number}", "triton" if find_spec("triton") else "torch")
