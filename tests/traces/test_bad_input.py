"""Messages of a recorder for bad arguments: they name the argument, what is allowed, and the value."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from warmprefix_telemetry.trace_recorder import TraceRecorder


@pytest.mark.parametrize(
    ("name", "value", "error", "allowed"),
    [
        ("target", 5, TypeError, "a path or a text stream"),
        ("target", None, TypeError, "a path or a text stream"),
        ("name", 5, TypeError, "a str or None"),
        ("max_blocks", 0, ValueError, "1 or more"),
        ("max_conversations", -1, ValueError, "1 or more"),
    ],
)
def test_a_recorder_names_the_argument(name: str, value: Any, error: type[Exception], allowed: str) -> None:
    with pytest.raises(error, match=f"^{name} must be {re.escape(f'{allowed}, got {value!r}')}$"):
        TraceRecorder(**{"target": io.StringIO(), name: value})


@pytest.mark.parametrize(
    ("name", "value", "error", "allowed"),
    [
        ("conversation", 3, TypeError, "a str or None"),
        ("tenant", b"x", TypeError, "a str or None"),
        ("model", ["m"], TypeError, "a str or None"),
        ("preamble", 1.5, TypeError, "a str or None"),
        ("query_tokens", 1.5, TypeError, "an int"),
        ("query_tokens", True, TypeError, "an int"),
        ("query_tokens", -1, ValueError, "from 0 to 1000000000"),
        ("query_tokens", 10**10, ValueError, "from 0 to 1000000000"),
        ("k", "8", TypeError, "an int"),
        ("k", 0, ValueError, "from 1 to 1000000000"),
        ("request", 7, TypeError, "a str or None"),
    ],
)
def test_record_names_the_argument(name: str, value: Any, error: type[Exception], allowed: str) -> None:
    recorder = TraceRecorder(io.StringIO())
    with pytest.raises(error, match=f"^{name} must be {re.escape(f'{allowed}, got {value!r}')}$"):
        recorder.record([], **{name: value})
    assert (recorder.requests, recorder.lost) == (0, 0)


@pytest.mark.parametrize("name", ["", "x" * 257, "\ud800"])
def test_record_refuses_names_of_requests_that_no_trace_can_hold(name: str) -> None:
    recorder = TraceRecorder(io.StringIO())
    with pytest.raises(ValueError, match="request must have 1 to 256 characters"):
        recorder.record([], request=name)
    assert (recorder.requests, recorder.lost) == (0, 0)
