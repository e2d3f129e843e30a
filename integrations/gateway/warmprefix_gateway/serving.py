"""Runs a gateway: in the main thread for the command, or in a thread for tests."""

from __future__ import annotations

import gc
import socket
import threading
from contextlib import suppress
from types import FrameType, TracebackType

from warmprefix.errors import MissingExtraError
from warmprefix_gateway.asgi import Gateway
from warmprefix_gateway.edge import IDLE_SECONDS, EdgeProtocol, WaitingRoom
from warmprefix_gateway.gateway_options import GatewayOptions, is_loopback

try:
    import uvicorn
except ImportError as exc:
    raise MissingExtraError("serve", "uvicorn") from exc

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

__all__ = ["GatewayServer", "serve"]

_DRAIN_SECONDS = 30
_BACKLOG = 2_048
_MORE_LISTENERS = 15
_LOOPBACK_SEGMENT_BYTES, _LOOPBACK_BUFFER_BYTES = 1_440, 64 * 1_024
"""What networks have anyway; on the loopback a segment has 64 KiB, and a buffer grows to 6 MB before it is full."""


class _DrainingServer(uvicorn.Server):
    """Fails health checks as soon as it is asked to stop."""

    gateway: Gateway

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.gateway.is_draining = True
        super().handle_exit(sig, frame)


class GatewayServer:
    """A gateway on a port; port 0 takes a free one, which is part of `base_url`.

    The constructor binds the port, so an occupied one raises OSError. Then use the server as a context manager, which
    serves from a thread until the block ends, or call `run`.
    """

    def __init__(self, options: GatewayOptions) -> None:
        self.gateway = Gateway(options)
        """The application that the server runs."""
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_loopback(options.host) and hasattr(socket, "TCP_MAXSEG"):
            # The kernel would take megabytes before a refusal reaches the sender.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _LOOPBACK_SEGMENT_BYTES)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOOPBACK_BUFFER_BYTES)
        try:
            self._socket.bind((options.host, options.port))
            self._socket.listen(_BACKLOG)  # clients that come before `run` wait
        except OSError:
            self._socket.close()
            raise
        port = self._socket.getsockname()[1]
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.url = f"http://{host}:{port}"
        """Address of the server, without a path."""
        waiting_room = WaitingRoom(self.gateway.metrics)

        class Connection(EdgeProtocol):
            room = waiting_room

        self._server = _DrainingServer(
            uvicorn.Config(
                self.gateway,
                http=Connection,
                backlog=_BACKLOG,
                timeout_keep_alive=IDLE_SECONDS,
                lifespan="on",
                ws="none",
                log_config=None,
                log_level="error",  # of the rest, each invalid request would be a line
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=_DRAIN_SECONDS,
                proxy_headers=False,
            )
        )
        self._server.gateway = self.gateway
        self._thread = threading.Thread(target=self.run, name="warmprefix-gateway", daemon=True)

    @property
    def base_url(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    def run(self) -> None:
        """Serve until a signal, or the end of the block."""
        if threading.current_thread() is threading.main_thread():
            gc.freeze()  # what is loaded stays, so full collections need not stop all requests to look at it
            _allow_files()
        # uvloop accepts one connection of each socket between two looks at all others.
        listeners = [self._socket, *[self._socket.dup() for _ in range(_MORE_LISTENERS)]]
        try:
            self._server.run(sockets=listeners)
        finally:
            for listener in listeners[1:]:
                listener.close()

    def stop(self) -> None:
        """Stop, after the requests that are under way."""
        self.gateway.is_draining = True
        self._server.should_exit = True

    def __enter__(self) -> GatewayServer:
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            self._thread.join(0.01)
        if not self._server.started:
            raise RuntimeError("the gateway did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._thread.join(_DRAIN_SECONDS + 5)
        self._socket.close()


def _allow_files() -> None:
    """Raise the soft bound on open files to the hard one, because a request holds two, and the usual bound is 1,024."""
    if resource is not None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def serve(options: GatewayOptions) -> None:
    """Serve a gateway in this process until SIGINT or SIGTERM; requests that are under way are finished.

    Raises:
        OSError: The port is occupied.
        KeysError: The file of keys could not be read.
    """
    GatewayServer(options).run()
