"""Server-sent events, cut out of a stream of bytes as it arrives."""

from __future__ import annotations

import re

__all__ = ["MAX_EVENT_BYTES", "EventSplitter", "event_data"]

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""Bytes kept of an event, or of an answer in one piece, that is not complete yet."""

_END = re.compile(rb"(?:\r\n|\r(?!\n)|\n)(?:\r\n|\r|\n)")
"""The end of a line followed by an empty line: `\\n`, `\\r\\n` or `\\r`, in any mixture."""


class EventSplitter:
    r"""Splitter that returns whole events, each with its final empty line; joined, they are the stream again.

    >>> splitter = EventSplitter()
    >>> splitter.feed(b"data: 1\n\ndata"), splitter.feed(b": 2\r\n\r"), splitter.feed(b"\ndata: 3"), splitter.rest()
    ([b'data: 1\n\n'], [b'data: 2\r\n\r'], [], b'\ndata: 3')
    """

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        """Start empty. An event longer than `max_bytes` is returned in unreadable parts."""
        self._max_bytes = max_bytes
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that `data` completes. Amortised linear in the bytes fed."""
        held = self._held
        searched = max(0, len(held) - 3)  # the last three bytes may be the first part of an end
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
        """Return and drop the bytes of the event that has no end yet."""
        rest = bytes(self._held)
        self._held.clear()
        return rest


def event_data(event: bytes) -> bytes:
    r"""Return the data lines of one event.

    >>> event_data(b"event: x\r\ndata: {\r\ndata:}\r\n\r\n")
    b'{\n}'
    """
    data = []
    for line in event.splitlines():
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value[1:] if value.startswith(b" ") else value)
    return b"\n".join(data)
