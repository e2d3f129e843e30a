"""The retry rule: the failures that are retried, and the waits between attempts."""

from __future__ import annotations

import time
from email.utils import formatdate
from typing import Any

import httpx
import openai
import pytest

from warmprefix_openai import BrokenStreamError, CallFailedError, Retries, ask_with_retries, may_pass, status_of
from warmprefix_openai.completion import EngineFailedError
from warmprefix_openai.retry import retry_after


def test_waits_are_drawn_from_a_doubling_range_and_follow_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    retries, short = Retries(), Retries(count=9, longest=5.0)
    monkeypatch.setattr("random.random", lambda: 0.0)
    assert [retries.delay(n, None) for n in (1, 5, 5000)] == [0, 0, 0]
    assert retries.delay(1, 7.0) == 7.0
    monkeypatch.setattr("random.random", lambda: 1.0)
    assert [retries.delay(n, None) for n in (1, 2, 3, 8, 5000)] == [0.5, 1, 2, 64, 120]
    assert [retries.delay(4, 7.0), retries.delay(1, 3600.0)] == [7.5, 120.0]
    assert [short.delay(failures, None) for failures in (1, 2, 3, 4, 5, 900)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert [short.delay(1, requested) for requested in (0.0, 3.0, 600.0)] == [0.5, 3.5, 5.0]


@pytest.mark.parametrize(
    "wrong", [{"count": -1}, {"longest": -1.0}, {"longest": float("inf")}, {"longest": float("nan")}]
)
def test_waits_are_finite_and_ordered(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Retries(**wrong)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.25"}, 0.25),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": formatdate(0, usegmt=True)}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
    ],
)
def test_retry_after_is_read_in_every_form(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


def test_retry_after_may_be_a_date() -> None:
    seconds = retry_after({"retry-after": formatdate(time.time() + 30, usegmt=True)})
    assert seconds is not None
    assert 28 <= seconds <= 30


REQUEST: Any = httpx.Request("POST", "http://engine")


def refused(status: int, code: str | None = None) -> openai.APIStatusError:
    response: Any = httpx.Response(status, request=REQUEST)
    return openai.APIStatusError("no", response=response, body={"code": code})


@pytest.mark.parametrize(
    ("error", "status", "passes"),
    [
        *((refused(status), status, True) for status in (408, 409, 425, 429, 500, 503)),
        *((refused(status), status, False) for status in (400, 401, 403, 404, 413, 422)),
        (refused(429, "insufficient_quota"), 429, False),
        (openai.APIConnectionError(request=REQUEST), None, True),
        (TimeoutError(), None, True),
        (BrokenStreamError(), None, True),
        (EngineFailedError({"message": "no", "code": 500}), 500, True),
        (EngineFailedError({"message": "no", "code": 400}), 400, False),
        (EngineFailedError({"message": "no", "code": "server_error"}), None, True),
        (UnicodeEncodeError("utf-8", "x", 0, 1, "torn"), None, False),
    ],
)
def test_failures_that_may_pass_are_retried(error: Exception, status: int | None, passes: bool) -> None:
    assert (status_of(error), may_pass(error)) == (status, passes)


@pytest.mark.parametrize("failing", [0, 1, 2, 3, 9])
async def test_a_call_is_repeated_until_it_succeeds_or_no_attempt_is_left(failing: int) -> None:
    calls, reported = 0, list[Exception]()

    async def ask() -> str:
        nonlocal calls
        calls += 1
        if calls <= failing:
            raise BrokenStreamError(str(calls))
        return "answer"

    retries = Retries(count=3, longest=0.0)
    if failing <= 3:
        assert await ask_with_retries(ask, retries, on_retry=reported.append) == ("answer", failing + 1)
    else:
        with pytest.raises(CallFailedError, match="4") as failed:
            await ask_with_retries(ask, retries, on_retry=reported.append)
        assert (failed.value.attempts, failed.value.__cause__) == (4, failed.value.error)
    assert [str(error) for error in reported] == ["1", "2", "3"][:failing]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
async def test_other_exceptions_are_raised_as_they_are(error: BaseException) -> None:
    async def ask() -> None:
        raise error

    with pytest.raises(type(error)):
        await ask_with_retries(ask, Retries(longest=0.0))
