"""The server of the emulator: in a thread for tests and the demo, or in the main thread for the command."""

from __future__ import annotations

import os
import socket
import threading
from types import TracebackType

from warmprefix.errors import MissingExtraError
from warmprefix_tools.emulator.app import create_app
from warmprefix_tools.emulator.engine import EmulatorConfig, Reader

try:
    import uvicorn
except ImportError as exc:
    raise MissingExtraError("cli", "uvicorn") from exc

__all__ = ["EmulatorServer"]


class EmulatorServer:
    """One emulated engine on a port; port 0 takes a free one, which is part of `base_url`.

    The constructor binds the port, so `base_url` is final, and an occupied port raises OSError. Then either use the
    server as a context manager, which serves from a thread until the block ends, or call `run`.

        with EmulatorServer(EmulatorConfig(kv_blocks=1024)) as server:
            client = openai.OpenAI(base_url=server.base_url, api_key="none")
    """

    def __init__(
        self,
        config: EmulatorConfig | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        reader: Reader | None = None,
    ) -> None:
        self.config = EmulatorConfig() if config is None else config
        """The size and speed of the engine."""
        self._socket = _listening_socket(host, port)
        bound_port = self._socket.getsockname()[1]
        self.url = f"http://[{host}]:{bound_port}" if ":" in host else f"http://{host}:{bound_port}"
        """Address of the server, without a path."""
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                create_app(self.config, reader),
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self.run, name=f"warmprefix-emulator-{bound_port}", daemon=True)

    @property
    def base_url(self) -> str:
        """URL for OpenAI clients; `url` is the root, for /metrics and the other routes."""
        return f"{self.url}/v1"

    def run(self) -> None:
        """Serve in this thread until `close`, or, in the main thread, until SIGINT or SIGTERM.

        Requests in progress get a second to finish. SIGINT is raised again as KeyboardInterrupt after closing.
        """
        self._uvicorn.run(sockets=[self._socket])

    def close(self) -> None:
        """Stop serving and free the port before returning. Closing twice is harmless."""
        self._uvicorn.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def __enter__(self) -> EmulatorServer:
        # The socket listens already: a request that arrives before the thread runs waits in its queue.
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _listening_socket(host: str, port: int) -> socket.socket:
    # If the protocol is named, asyncio turns Nagle's algorithm off for each connection. If it is not named (as by
    # socket.create_server), asyncio does not, and an answer can be 40 ms late.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener
