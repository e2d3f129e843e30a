"""llama.cpp's own server in a process of its own, on a free loopback port."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from warmprefix.errors import MissingExtraError
from warmprefix_tools.local import LocalModelError
from warmprefix_tools.local.weights import MODEL, fetch_weights

__all__ = ["LocalModel", "check_llama_cpp"]

_PROGRAM = Path(__file__).with_name("llama_process.py")
_PLATFORMS = {
    ("Linux", "x86_64"),
    ("Linux", "aarch64"),
    ("Darwin", "arm64"),
    ("Darwin", "x86_64"),
    ("Windows", "AMD64"),
}
"""For these, xllamacpp comes built."""
_START_SECONDS = 120.0
_STOP_SECONDS = 5.0


class LocalModel:
    """A server of one model, which runs until `close`, the end of a `with`, or the end of this process.

    Args:
        gguf: The model's weights; fetched if not given.
        threads: Most processors that it computes on.
        slots: Requests that it answers at once; each slot keeps its last prompt.
        context: Most tokens of a prompt and its answer together, in each slot.
        host_memory_mib: Most MiB of earlier prompts that it keeps besides; 0 keeps none.
        chat_template: Jinja template in place of the model's own.

    Raises:
        MissingExtraError: The extra `local` is not installed.
        LocalModelError: There is no llama.cpp for this machine, it does not start, or the weights cannot be fetched.
    """

    def __init__(
        self,
        gguf: Path | None = None,
        *,
        threads: int = 1,
        slots: int = 4,
        context: int = 2_048,
        host_memory_mib: int = 8_192,
        chat_template: str = "",
    ) -> None:
        check_llama_cpp()
        gguf = gguf or fetch_weights(lambda line: print(line, file=sys.stderr))  # noqa: T201
        self.model = MODEL if gguf.name.startswith(MODEL) else gguf.stem
        """Name that clients ask for."""
        self._options: dict[str, Any] = {
            "gguf": str(gguf),
            "model": self.model,
            "threads": threads,
            "slots": slots,
            "context": context,
            "host_memory_mib": host_memory_mib,
            "chat_template": chat_template,
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, str(_PROGRAM), json.dumps(self._options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={"OMP_WAIT_POLICY": "passive", **os.environ},  # spinning threads stop each other on a busy machine
            start_new_session=True,  # Ctrl-C is for this process, which then ends the server
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same, on Windows
        )
        try:
            self.url = self._first_line()
        except BaseException:
            self.close()
            raise
        self.base_url = f"{self.url}/v1"
        """Base URL for OpenAI clients."""

    def __enter__(self) -> LocalModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Id of the server's process."""
        return self._process.pid

    def close(self) -> None:
        """End the server. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _first_line(self) -> str:
        """Return the URL that the process prints once the model is loaded."""
        assert self._process.stdout is not None
        limit = threading.Timer(_START_SECONDS, self._process.kill)
        limit.daemon = True
        limit.start()
        try:
            url = self._process.stdout.readline().decode().strip()
        finally:
            limit.cancel()
        if not url:
            self._process.wait(_STOP_SECONDS)
            self._log.seek(0)
            printed = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
            reason = "; ".join([line.partition(" E ")[2] for line in printed if " E " in line][:2] or printed[-1:])
            raise LocalModelError(f"llama.cpp's server did not start (status {self._process.returncode}): {reason}")
        return url


def check_llama_cpp() -> None:
    """Raise an error, with the way out, if llama.cpp's server is not installed."""
    if find_spec("xllamacpp") is not None:
        return
    here = (platform.system(), platform.machine())
    if here in _PLATFORMS:
        raise MissingExtraError("local", "xllamacpp")
    raise LocalModelError(
        "llama.cpp's server comes built for Linux (x86-64 and ARM64, with glibc), macOS 13 or newer"
        f" and Windows on x86-64; this is {' on '.join(here)}. Any OpenAI-compatible server works with --endpoint."
    )
