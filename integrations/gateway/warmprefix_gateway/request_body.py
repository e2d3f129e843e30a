"""The body of a request as a gateway reads it: bounded, and without its compression."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from warmprefix_gateway.body_encodings import BodyDecoder, is_plain
from warmprefix_gateway.office import Office
from warmprefix_gateway.tenant_bodies import BodyRefusedError

__all__ = ["ClientLeftError", "Receive", "RequestBody"]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientLeftError(Exception):
    """The client closed its connection before the end of the answer."""


class RequestBody:
    """The body of one request. Its bytes, and those of an answer that waits, count as buffered until `release`."""

    def __init__(self, office: Office, tenant: str | None, receive: Receive) -> None:
        self._office = office
        self._tenant = tenant
        self._receive = receive
        self._held_bytes = 0
        self._is_read = asyncio.Event()

    @property
    def is_read(self) -> bool:
        """True once the last piece has come."""
        return self._is_read.is_set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the pieces as they come.

        Raises:
            ClientLeftError: The client left before the last one.
        """
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                self._is_read.set()
                return

    async def whole(self, length: str) -> bytes:
        """Return the whole body; `length` is the value of its header.

        Raises:
            BodyRefusedError: It is too large, or there is no room for it now.
            ClientLeftError: The client left before its end.
        """
        pieces: list[bytes] = []
        if length.isascii() and length.isdigit():
            self._check_size(int(length))
        async for piece in self.pieces():
            self._hold(len(piece))
            pieces.append(piece)
            self._check_size(self._held_bytes)
        return b"".join(pieces)

    async def decoded(self, content: bytes, encoding: str) -> bytes | None:
        """Return the body without its compression; None if it cannot be read.

        Raises:
            BodyRefusedError: It is too large, or there is no room for it now.
        """
        if is_plain(encoding):
            return content
        decoded = bytearray()
        try:
            decoder = BodyDecoder(encoding)
            for piece in decoder.feed(content):
                self._hold(len(piece))
                decoded += piece
                self._check_size(len(decoded))
                await asyncio.sleep(0)  # others go on meanwhile
        except (LookupError, ValueError):
            return None
        return bytes(decoded) if decoder.is_complete else None

    def takes(self, size: int) -> bool:
        """Count more bytes as buffered; return False, and count none, if there is no room for them now."""
        if not self._office.buffers.take(self._tenant, size):
            return False
        self._held_bytes += size
        return True

    def release(self) -> None:
        """Let others have the room."""
        self._office.buffers.give_back(self._tenant, self._held_bytes)
        self._held_bytes = 0

    async def until_client_leaves(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work while the client is there; what it raises goes on.

        Raises:
            ClientLeftError: The client left; the work was cancelled.
        """
        doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(self._client_leaves())
        try:
            await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise ClientLeftError
            doing.result()
        finally:
            doing.cancel()
            leaving.cancel()
            await asyncio.gather(doing, leaving, return_exceptions=True)

    async def _client_leaves(self) -> None:
        await self._is_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _check_size(self, size: int) -> None:
        most = self._office.options.bounds.max_body_bytes
        if size > most:
            raise BodyRefusedError(413, "size", f"the body is larger than {most} bytes")

    def _hold(self, size: int) -> None:
        if not self.takes(size):
            raise BodyRefusedError(429, "size", "too many large requests at one time; try again")
