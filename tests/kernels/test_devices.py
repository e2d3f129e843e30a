"""The choice of a device, with and without torch and numpy."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from warmprefix import MissingExtraError
from warmprefix_kernels import choose_device

USE = "from warmprefix_kernels import choose_device, context_distance, top_overlap\n"
WITHOUT_TORCH = "import sys\nsys.modules['torch'] = None  # as if it were not installed\n" + USE


def in_fresh_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)


def test_import_needs_only_numpy() -> None:
    done = in_fresh_python("import sys, warmprefix_kernels; print('torch' in sys.modules, 'triton' in sys.modules)")
    assert done.stdout == "False False\n", done.stderr


def test_numpy_and_cpu_are_chosen_by_name() -> None:
    assert choose_device("numpy") == ("numpy", "naive")
    assert choose_device("cpu") == ("cpu", "torch")
    assert choose_device(torch.device("cpu")) == ("cpu", "torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_auto_is_the_cpu_without_a_cuda_device() -> None:
    assert choose_device() == ("cpu", "torch")
    with pytest.raises(ValueError, match="device must be one of the 0 CUDA devices that torch finds, got 'cuda'"):
        choose_device("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_auto_is_the_cuda_device() -> None:
    assert choose_device() == choose_device("cuda") == ("cuda:0", "triton")
    with pytest.raises(ValueError, match="CUDA devices that torch finds, got 'cuda:99'"):
        choose_device("cuda:99")


def test_numpy_computes_without_torch() -> None:
    code = WITHOUT_TORCH + (
        "print(choose_device().name)\n"
        "print(top_overlap([0, 2, 4], [0, 1, 1, 2], [5, 6, 7], 1)[1].tolist())\n"
        "print(context_distance([0, 2, 4], [0, 1, 1, 0], [0, 1, 0, 1], 0.01).tolist())\n"
    )
    done = in_fresh_python(code)
    assert done.stdout.splitlines() == ["numpy", "[[6], [6]]", "[0.009999999776482582]"], done.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torch_devices_name_the_install_command_without_torch(device: str) -> None:
    done = in_fresh_python(WITHOUT_TORCH + f"top_overlap([0, 1], [0], [5], 1, device={device!r})")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: device='{device}' needs torch, and device='numpy' does not; ")
    assert last.endswith(f"to install torch: {MissingExtraError('gpu', 'torch').command}")


def test_a_kernel_without_numpy_raises_the_same_error_as_the_core() -> None:
    done = in_fresh_python("import sys\nsys.modules['numpy'] = None\nfrom warmprefix_kernels import top_overlap")
    assert done.stderr.splitlines()[-1].endswith(f"MissingExtraError: {MissingExtraError('gpu', 'numpy')}")
