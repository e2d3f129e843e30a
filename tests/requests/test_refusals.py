"""Fields that endpoints refuse: what is sent instead, and for how long that is remembered."""

from __future__ import annotations

import json
from typing import Any

from warmprefix_requests import Attempt, FieldRefusals, OutgoingRequest, Processor, prepared, read_call, with_usage

NOTHING: Processor = lambda request: request  # noqa: E731 - a kind of field of its own


def request_of(text: str, model: str, **optional: Processor) -> OutgoingRequest:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "stream": True}
    request = read_call("POST", "/v1/chat/completions", {}, json.dumps(body).encode())
    assert request is not None
    return prepared(request, (), optional or {"stream_options": with_usage})


def attempt(
    refusals: FieldRefusals, text: str, *, base: str = "http://a", model: str = "m", tenant: str = "acme", **kinds: Any
) -> Attempt:
    return refusals.attempt(request_of(text, model, **kinds), base, tenant)


def refuse(refusals: FieldRefusals, text: str) -> None:
    tried = attempt(refusals, text)
    plain = tried.answered(400)
    assert plain is not None
    assert plain is tried.request
    assert b"stream_options" not in plain.encode()
    assert tried.answered(200) is None
    assert tried.is_refused


def test_a_refusal_is_one_tenants_and_ends() -> None:
    now = [0.0]
    refusals = FieldRefusals(lambda: now[0])
    refuse(refusals, "a")
    refuse(refusals, "a")
    assert attempt(refusals, "c").is_open  # the same request again shows nothing more
    refuse(refusals, "b")
    one = attempt(refusals, "c")
    assert not one.is_open
    assert b"stream_options" not in one.request.encode()
    assert refusals.refuses("http://a", "m", "acme", ("stream_options",))
    changes: list[dict[str, Any]] = [{"base": "http://b"}, {"model": "n"}, {"tenant": "b"}, {"marks": NOTHING}]
    assert all(attempt(refusals, "c", **change).is_open for change in changes)
    now[0] = 600.0
    assert attempt(refusals, "c").is_open
    refuse(refusals, "a")
    attempt(refusals, "b").answered(200)
    assert not attempt(refusals, "c").is_open
    assert b"stream_options" in attempt(refusals, "c").request.encode()
    for number in range(5_000):
        attempt(refusals, "c", model=str(number)).answered(200)
    assert len(refusals._states) <= 4_096


def test_a_request_that_fails_without_the_fields_too_shows_nothing() -> None:
    refusals = FieldRefusals()
    for text in "abc":
        tried = attempt(refusals, text)
        assert tried.answered(422) is not None
        assert tried.answered(422) is None
        assert not tried.is_refused
    assert attempt(refusals, "d").is_open


def test_other_failures_are_not_the_fields() -> None:
    for status in (401, 404, 429, 500):
        tried = attempt(FieldRefusals(), "a")
        assert tried.answered(status) is None
