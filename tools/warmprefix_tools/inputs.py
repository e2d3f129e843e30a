"""Input files of commands, read in bounded memory; gzipped or not, in UTF-8, 16 or 32, whatever their names."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["MAX_RECORD_BYTES", "InputError", "InputFile", "opened"]

MAX_RECORD_BYTES = 64 * 1024 * 1024
"""Limit for the bytes of a line, and for the characters of one value in a JSON document."""
_FIRST_READ = 64 * 1024
_GZIP_MAGIC = b"\x1f\x8b"
_SYNC_FLUSH = b"\x00\x00\xff\xff"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
_LONGEST_TOKEN = len("-Infinity") + 1
_JSON_SPACE = " \t\r\n"


class InputError(Exception):
    """A file that can't be read any further; the message gives the reason, without the place."""

    def __init__(self, problem: str, line: int | None, *, unfinished: bool = False) -> None:
        super().__init__(problem)
        self.line = line
        """Number of the line, from 1; None for the file as a whole."""
        self.unfinished = unfinished
        """True if the file ends too early."""


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[InputFile]:
    """Open a file for reading.

    Raises:
        InputError: It can't be opened or read.
    """
    try:
        with open(path, "rb") as file:
            yield InputFile(file)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", None) from error


class InputFile:
    """An open file, for reading either its lines or its JSON values once."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._unpacked = _Unpacked(file) if file.peek(2)[:2] == _GZIP_MAGIC else None
        self._line = 0
        """Number of the last line that was read completely."""
        self._data: io.BufferedReader[Any] = (
            file if self._unpacked is None else io.BufferedReader(self._unpacked, _FIRST_READ)
        )
        with self._gzip_errors():
            head = self._data.peek(4)[:4]
        encoding = json.detect_encoding(head)
        is_wide = head.startswith(_WIDE_MARKS) or head.decode(encoding, "replace")[:1] in ("{", "[")
        if not encoding.startswith("utf-8") and is_wide:  # as redirections of PowerShell write it
            self._data = io.BufferedReader(_Recoded(self._data, encoding), _FIRST_READ)

    def is_json_document(self) -> bool:
        """Return whether the file looks like a JSON array of objects, or an object over several lines."""
        with self._gzip_errors():
            head = self._data.peek(_FIRST_READ).removeprefix(_BYTE_ORDER_MARK).lstrip()
        first, following = head[:1], head[1:].lstrip()[:1]
        if first == b"{":
            line, line_feed, _ = head.partition(b"\n")
            return following == b'"' and bool(line_feed) and line.rstrip()[-1:] in (b"{", b"[", b",", b":")
        return first == b"[" and following in (b"{", b"]", b"")

    def lines(self) -> Iterator[bytes]:
        """Yield the lines without a byte order mark; of a truncated gzip file, the complete ones.

        Raises:
            InputError: A line has more than `MAX_RECORD_BYTES`, or the gzip data is damaged or ends early.
        """
        whole = True
        with self._gzip_errors():
            while line := self._data.readline(MAX_RECORD_BYTES):
                whole = line.endswith(b"\n")
                if len(line) == MAX_RECORD_BYTES and not whole:
                    raise InputError(f"longer than {MAX_RECORD_BYTES:,} bytes", self._line + 1)
                if whole or self._unpacked is None or not self._unpacked.cut_off:
                    line = line if self._line else line.removeprefix(_BYTE_ORDER_MARK)
                    self._line += 1
                    yield line
        self._check_end(whole)

    def json_values(self) -> Iterator[tuple[int, object]]:
        """Yield line number and value of each JSON value; an array counts as its elements.

        The document is an array or any number of values, over any number of lines. It may be larger than memory,
        because only one value at a time is kept.

        Raises:
            InputError: The rest of the file is not JSON, or a value has more than `MAX_RECORD_BYTES` characters.
        """
        text = _JsonText(self._data)
        with self._gzip_errors(text):
            in_array = False
            while first := text.peek():
                if first == ("]" if in_array else "["):
                    in_array = not in_array
                    text.skip()
                    continue
                yield text.line, text.value()
                if in_array:
                    text.expect_separator()
            if in_array:
                raise InputError("the JSON array has no end", text.line, unfinished=True)
        self._check_end(True)

    @contextmanager
    def _gzip_errors(self, text: _JsonText | None = None) -> Iterator[None]:
        try:
            yield
        except (gzip.BadGzipFile, zlib.error) as error:
            line = self._line + 1 if text is None else text.line
            raise InputError(f"the gzip data is damaged: {error}", line) from error

    def _check_end(self, whole: bool) -> None:
        """Raise an InputError if the gzip data ends early, unless its writer was killed after flushing a line."""
        if self._unpacked is not None and self._unpacked.cut_off and not (whole and _ends_flushed(self._file)):
            problem = "the gzip data ends early, as if the file had been cut off; `zcat` unpacks the part before"
            raise InputError(problem, self._line + 1, unfinished=True)


class _JsonText:
    """Text of a file with one JSON value at a time in memory."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file = file
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._decoder = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._ended = False
        self.line = 1
        """Line where the next value begins."""

    def peek(self) -> str:
        """Return the next character that is not white space; "" at the end."""
        while True:
            start = self._at
            while self._at < len(self._text) and self._text[self._at] in _JSON_SPACE:
                self._at += 1
            self.line += self._text.count("\n", start, self._at)
            if self._at < len(self._text) or not self._read(1):
                return self._text[self._at : self._at + 1]

    def skip(self) -> None:
        """Skip one character."""
        self._at += 1

    def value(self) -> object:
        """Parse the next value."""
        while True:
            found = self._attempt()
            held = len(self._text) - self._at
            if isinstance(found, ValueError):
                if not (_may_go_on(found, len(self._text)) and self._read(min(held, MAX_RECORD_BYTES - held))):
                    raise InputError(*self._problem(found, held)) from None
                continue
            value, end = found
            if end < len(self._text) or not self._read(held):  # a number at the end of the text may continue
                self.line += self._text.count("\n", self._at, end)
                self._at = end
                return value

    def _attempt(self) -> tuple[object, int] | ValueError:
        """Parse the text in memory; return the value and its end, or the error."""
        try:
            return self._decoder.raw_decode(self._text, self._at)
        except RecursionError:
            raise InputError("not JSON that can be read: nested too deeply", self.line) from None
        except ValueError as error:
            return error

    def _problem(self, error: ValueError, held: int) -> tuple[str, int]:
        """Return the reason why a value can't be read, and its line."""
        if held >= MAX_RECORD_BYTES:
            return f"a JSON value of more than {MAX_RECORD_BYTES:,} characters", self.line
        if isinstance(error, json.JSONDecodeError):
            return f"not JSON: {error.msg}", self.line + self._text.count("\n", self._at, error.pos)
        return f"not JSON that can be read: {error}", self.line

    def expect_separator(self) -> None:
        """Skip a comma, but not a closing bracket."""
        if (found := self.peek()) == ",":
            self.skip()
        elif found not in ("]", ""):
            raise InputError(f"not JSON: expected a comma or a bracket, found {found!r}", self.line)

    def _read(self, count: int) -> bool:
        """Read more text and drop the parsed part; return whether there was more."""
        if count <= 0 or self._ended:
            return False
        data = self._file.read(max(count, _FIRST_READ))
        self._ended = not data
        if self._ended:
            self._text += self._utf8.decode(b"", final=True)
            return False
        self._text = self._text[self._at :] + self._utf8.decode(data)
        self._at = 0
        return True


def _may_go_on(error: ValueError, length: int) -> bool:
    """Return whether JSON text of a length may become valid with more text."""
    if not isinstance(error, json.JSONDecodeError):  # such as a number of too many digits
        return False
    return error.msg.startswith("Unterminated string") or error.pos + _LONGEST_TOKEN > length


class _Unpacked(io.RawIOBase):
    """Contents of a gzip file, up to its end or to where it was cut off."""

    def __init__(self, file: BinaryIO) -> None:
        self._gzip = gzip.GzipFile(fileobj=file)
        self.cut_off = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        try:
            data = self._gzip.read1(len(view))
        except EOFError:
            self.cut_off = True
            return 0
        view[: len(data)] = data
        return len(data)


class _Recoded(io.RawIOBase):
    """Contents of a file of another encoding, in UTF-8."""

    def __init__(self, file: io.BufferedReader[Any], encoding: str) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        self._is_whole = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        data = b""
        while not data and not self._is_whole:
            part = self._file.read1(max(len(view) // 2 - 8, 1))  # UTF-8 has at most 3 bytes for 2 of UTF-16
            self._is_whole = not part
            data = self._decoder.decode(part, final=self._is_whole).encode()
        view[: len(data)] = data
        return len(data)


def _ends_flushed(file: io.BufferedReader) -> bool:
    if not file.seekable():
        return False
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - len(_SYNC_FLUSH)))
    return file.read() == _SYNC_FLUSH
