"""Compressed bodies, decompressed in small pieces, so that nothing grows beyond a limit. Pure: no I/O."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator

from warmprefix.errors import MissingExtraError
from warmprefix_openai import AnswerFacts, StreamedAnswer, WholeAnswer

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    try:
        from backports import zstd
    except ImportError as exc:
        raise MissingExtraError("serve", "backports.zstd") from exc

__all__ = ["BodyDecoder", "CompressedAnswer", "ReadAnswer", "is_plain", "reader_of", "zstd"]

_PIECE_BYTES = 256 * 1_024
_LARGEST_WINDOW = 23
"""Two to this power are the bytes of history that RFC 9659 allows for zstd on the web."""
_MOST_ANSWER_BYTES = 64 << 20
_MOST_PARTS = 16
"""Each part costs a copy of the bytes behind it."""


class _Zlib:
    """One member of gzip, or one stream of deflate."""

    def __init__(self, bits: int) -> None:
        self.inner = zlib.decompressobj(bits)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        while not self.inner.eof and (piece := self.inner.decompress(data, _PIECE_BYTES)):
            yield piece
            data = self.inner.unconsumed_tail


class _Zstd:
    """One frame of zstd."""

    def __init__(self) -> None:
        window = int(zstd.DecompressionParameter.window_log_max)
        self.inner = zstd.ZstdDecompressor(options={window: _LARGEST_WINDOW})

    def pieces(self, data: bytes) -> Iterator[bytes]:
        while not self.inner.eof and (piece := self.inner.decompress(data, _PIECE_BYTES)):
            yield piece
            data = b""


def is_plain(encoding: str) -> bool:
    """Return True if a value of `Content-Encoding` leaves the body as it is."""
    return encoding.strip().lower() in ("", "identity")


class BodyDecoder:
    """Decompresses one body: gzip, deflate or zstd.

    Raises:
        LookupError: The encoding is another one, or there are several.
    """

    def __init__(self, encoding: str) -> None:
        self._encoding = {"x-gzip": "gzip"}.get(encoding.strip().lower(), encoding.strip().lower())
        if self._encoding not in ("gzip", "deflate", "zstd"):
            raise LookupError(encoding)
        self._part: _Zlib | _Zstd | None = None
        self._parts = 0

    @property
    def is_complete(self) -> bool:
        """True if the body ends where a part of it ends."""
        return self._parts > 0 and self._part is None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what these bytes decompress to, in pieces of bounded size.

        Raises:
            ValueError: The bytes are not of this encoding.
        """
        try:
            while data:
                if self._part is None:
                    if self._parts == (1 if self._encoding == "deflate" else _MOST_PARTS):
                        raise ValueError("there are bytes behind the end")
                    self._part = self._begin(data)
                    self._parts += 1
                yield from self._part.pieces(data)
                if not self._part.inner.eof:
                    return
                data = self._part.inner.unused_data
                self._part = None  # gzip and zstd may have several parts
        except (zlib.error, zstd.ZstdError) as error:
            raise ValueError(f"the body is not {self._encoding}") from error

    def _begin(self, data: bytes) -> _Zlib | _Zstd:
        if self._encoding == "zstd":
            return _Zstd()
        if self._encoding == "gzip":
            return _Zlib(16 + zlib.MAX_WBITS)
        # Some clients send deflate without zlib's header, whose first byte ends in 8.
        return _Zlib(zlib.MAX_WBITS if data[0] & 0x0F == 8 else -zlib.MAX_WBITS)


class CompressedAnswer:
    """Reads an answer that passes on compressed, as it came; one in an unknown encoding stays unread."""

    def __init__(self, reader: StreamedAnswer | WholeAnswer, encoding: str) -> None:
        self._reader = reader
        self._decoder: BodyDecoder | None = None
        try:
            self._decoder = BodyDecoder(encoding)
        except LookupError:
            reader.facts.unread = True
        self._room = _MOST_ANSWER_BYTES

    @property
    def facts(self) -> AnswerFacts:
        """What the answer has reported so far."""
        return self._reader.facts

    def feed(self, chunk: bytes) -> bytes:
        """Read a piece and return it. What cannot be decompressed is not read any further."""
        if self._decoder is not None:
            try:
                for piece in self._decoder.feed(chunk):
                    self._room -= len(piece)
                    if self._room < 0:
                        raise ValueError("the answer is too large")
                    self._reader.feed(piece)
            except ValueError:
                self._decoder = None
                self._reader.facts.unread = True
        return chunk

    def finish(self) -> bytes:
        """End the answer; nothing is left to pass on."""
        self._reader.finish()
        return b""


ReadAnswer = StreamedAnswer | WholeAnswer | CompressedAnswer


def reader_of(encoding: str, streams: bool, *, hide_usage: bool = False) -> ReadAnswer:
    """Return the reader of an answer with this encoding; the usage of a compressed one cannot be hidden."""
    plain = is_plain(encoding)
    reader = StreamedAnswer(hide_usage=hide_usage and plain) if streams else WholeAnswer()
    return reader if plain else CompressedAnswer(reader, encoding)
