"""Server-sent events, cut out of a stream of bytes as it comes."""

from __future__ import annotations

import re

__all__ = ["EventSplitter", "event_data"]

_END = re.compile(rb"(?:\r\n|\r(?!\n)|\n)(?:\r\n|\r|\n)")
"""A line's end, and that of an empty line: `\\n`, `\\r\\n` or `\\r`, mixed as it may be."""


class EventSplitter:
    r"""Gives out events whole, with the empty line that ends each; joined, they are the stream again.

    >>> splitter = EventSplitter()
    >>> splitter.feed(b"data: 1\n\ndata"), splitter.feed(b": 2\r\n\r"), splitter.feed(b"\ndata: 3"), splitter.rest()
    ([b'data: 1\n\n'], [b'data: 2\r\n\r'], [], b'\ndata: 3')
    """

    def __init__(self, max_bytes: int = 16 * 1024 * 1024) -> None:
        """A longer event is given out in parts, of which nothing can be read."""
        self._max_bytes = max_bytes
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes. Amortised linear in what is fed."""
        held = self._held
        searched = max(0, len(held) - 3)  # an end may have begun in these
        held += data
        events = []
        begin = 0
        for end in _END.finditer(held, searched):
            events.append(bytes(held[begin : end.end()]))
            begin = end.end()
        if len(held) - begin > self._max_bytes:
            events.append(bytes(held[begin:]))
            begin = len(held)
        del held[:begin]
        return events

    def rest(self) -> bytes:
        """What no empty line has ended; nothing is held after that."""
        rest = bytes(self._held)
        self._held.clear()
        return rest


def event_data(event: bytes) -> bytes:
    r"""The lines of data of one event.

    >>> event_data(b"event: x\r\ndata: {\r\ndata:}\r\n\r\n")
    b'{\n}'
    """
    data = []
    for line in event.splitlines():
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value[1:] if value.startswith(b" ") else value)
    return b"\n".join(data)
