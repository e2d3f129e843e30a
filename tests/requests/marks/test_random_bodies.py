"""Random bodies with marks of the application, against the rules of the emulator and its caches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix.cache_profiles import CacheProfile, as_profile
from warmprefix_requests.marks.bodies import ApiShape, without_marks
from warmprefix_requests.marks.mark_planner import CacheUsage
from warmprefix_requests.marks.marker import CacheMarker
from warmprefix_requests.usage import token_usage
from warmprefix_tools.caches import CacheUse, MarksRefusedError, SimulatedCache, serve, simulated_cache
from warmprefix_tools.emulator.anthropic_bodies import MessagesRequest
from warmprefix_tools.emulator.openai_bodies import ChatCompletionRequest, ResponsesRequest
from warmprefix_tools.emulator.serving import RefusedError

Body = dict[str, Any]

WORDS = ["", " ", "warm ", "prefix " * 40, "a block of some length. " * 90, "another one, which is longer. " * 200]
texts = st.sampled_from(WORDS)
lifetimes = st.sampled_from([None, "5m", "1h"])


def control(ttl: str | None) -> Body:
    return {"type": "ephemeral"} if ttl is None else {"type": "ephemeral", "ttl": ttl}


@st.composite
def anthropic_parts(draw: st.DrawFn, *, thinking: bool = False) -> list[Body]:
    parts: list[Body] = []
    for _ in range(draw(st.integers(1, 8))):
        kinds = ["text", "tool_result", *(["thinking"] if thinking else [])]
        kind = draw(st.sampled_from(kinds))
        if kind == "text":
            part: Body = {"type": "text", "text": draw(texts)}
        elif kind == "thinking":
            part = {"type": "thinking", "thinking": draw(texts), "signature": "s"}
        else:
            part = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": draw(texts)}]}
        can_have_mark = kind == "tool_result" or (kind == "text" and part["text"].strip())
        if can_have_mark and draw(st.integers(0, 9)) == 0:
            part["cache_control"] = control(draw(lifetimes))
        parts.append(part)
    return parts


@st.composite
def messages_bodies(draw: st.DrawFn) -> Body:
    turns = [
        {"role": role, "content": draw(st.one_of(texts, anthropic_parts(thinking=role == "assistant")))}
        for role in ["user", "assistant"] * draw(st.integers(0, 3)) + ["user"]
    ]
    body: Body = {"model": "m", "max_tokens": 5, "messages": turns}
    if draw(st.booleans()):
        body["system"] = draw(st.one_of(texts, anthropic_parts()))
    if draw(st.booleans()):
        body["tools"] = [{"name": f"t{number}", "input_schema": {}} for number in range(draw(st.integers(1, 3)))]
    if draw(st.integers(0, 9)) == 0:
        body["cache_control"] = control(draw(lifetimes))
    return body


@st.composite
def openai_parts(draw: st.DrawFn, kind: str, *, can_have_marks: bool) -> list[Body]:
    parts: list[Body] = []
    for _ in range(draw(st.integers(1, 8))):
        part: Body = {"type": kind, "text": draw(texts)}
        if can_have_marks and part["text"].strip() and draw(st.integers(0, 9)) == 0:
            part["prompt_cache_breakpoint"] = {"mode": "explicit"}
        parts.append(part)
    return parts


@st.composite
def cache_options(draw: st.DrawFn) -> Body:
    modes: list[Body] = [{"prompt_cache_options": {"mode": mode}} for mode in ("implicit", "explicit")]
    return draw(st.sampled_from([{}, {}, *modes, {"prompt_cache_retention": "24h"}, {"prompt_cache_key": "k"}]))


@st.composite
def chat_bodies(draw: st.DrawFn) -> Body:
    roles = ["system"] * draw(st.integers(0, 1)) + ["user", "assistant"] * draw(st.integers(0, 3)) + ["user"]
    messages = [
        {"role": role, "content": draw(st.one_of(texts, openai_parts("text", can_have_marks=role != "assistant")))}
        for role in roles
    ]
    return {"model": "m", "messages": messages, **draw(cache_options())}


@st.composite
def responses_bodies(draw: st.DrawFn) -> Body:
    items = [
        {"role": role, "content": draw(st.one_of(texts, openai_parts(kind, can_have_marks=role != "assistant")))}
        for role, kind in [("user", "input_text"), ("assistant", "output_text")] * draw(st.integers(0, 2))
        + [("user", "input_text")]
    ]
    given_input = draw(st.one_of(texts, st.just(items)))
    body: Body = {"model": "m", "input": given_input, **draw(cache_options())}
    return body | ({"instructions": draw(texts)} if draw(st.booleans()) else {})


@st.composite
def conversations(draw: st.DrawFn, bodies: st.SearchStrategy[Body]) -> list[tuple[Body, float]]:
    """Draw bodies of which some come again, and the seconds between them."""
    drawn = draw(st.lists(bodies, min_size=1, max_size=4))
    chosen = draw(st.lists(st.sampled_from(drawn), min_size=1, max_size=12))
    return [(copy.deepcopy(body), draw(st.sampled_from([0.0, 1.0, 200.0, 400.0, 4000.0, -50.0]))) for body in chosen]


def served(cache: SimulatedCache, profile: CacheProfile, shape: ApiShape, body: Body, now: float) -> CacheUse:
    """Check a body by the rules of the API, and serve it."""
    if shape == "messages":
        prompt = MessagesRequest(**body).prompt_for(profile, "key")
    elif shape == "chat":
        prompt = ChatCompletionRequest(**body).prompt_for(profile)
    else:
        request = ResponsesRequest(**body)
        prompt = request.rendered(profile, request.messages_for(profile, ())[0])
    return serve(cache, prompt, now)


def read_by_the_model(shape: ApiShape, body: Body) -> object:
    """Return what the model reads of a body, with single texts in one form."""

    def in_one_form(value: object) -> object:
        if isinstance(value, dict):
            return {name: in_one_form(inner) for name, inner in value.items() if name != "prompt_cache_options"}
        if isinstance(value, list):
            inner = [in_one_form(each) for each in value]
            if len(inner) == 1 and isinstance(inner[0], dict):
                if inner[0].get("type") in ("text", "input_text"):
                    return inner[0]["text"]
                if shape == "responses" and set(inner[0]) == {"role", "content"} and inner[0]["role"] == "user":
                    return inner[0]["content"]
            return inner
        return value

    return in_one_form(without_marks(body))


@pytest.mark.parametrize(
    ("shape", "profile", "bodies"),
    [
        ("messages", "anthropic", messages_bodies()),
        ("chat", "openai", chat_bodies()),
        ("responses", "openai", responses_bodies()),
    ],
)
@given(data=st.data())
def test_no_mark_makes_the_api_refuse_a_request(
    data: st.DataObject, shape: ApiShape, profile: str, bodies: st.SearchStrategy[Body]
) -> None:
    rules = as_profile(profile)
    now = 0.0
    marker = CacheMarker(rules, clock=lambda: now)
    cache, plain_cache = simulated_cache(rules), simulated_cache(rules)
    for body, pause in data.draw(conversations(bodies)):
        now += pause
        before = copy.deepcopy(body)
        try:
            served(plain_cache, rules, shape, body, now)
        except (RefusedError, MarksRefusedError):
            continue  # the application's own mistake
        marked = marker.mark(shape, body, tenant="t")
        assert body == before
        assert read_by_the_model(shape, marked.body) == read_by_the_model(shape, body)
        use = served(cache, rules, shape, marked.body, now)
        assert len(use.written) == len(rules.marks.lifetimes if rules.marks else ())
        if marked.decision is not None and data.draw(st.booleans()):
            own = CacheUsage(use.read, sum(use.written), use.uncached)
            marker.report(marked, reported(shape, own) if data.draw(st.booleans()) else None)
    assert marker.stats().errors == 0


def reported(shape: ApiShape, use: CacheUsage) -> Body:
    """Return the usage as the API reports it."""
    if shape == "messages":
        fields = {"cache_read_input_tokens": use.read, "cache_creation_input_tokens": use.written}
        usage: Body = {"input_tokens": use.uncached, **fields}
    else:
        total = {"chat": "prompt_tokens", "responses": "input_tokens"}[shape]
        details = {"cached_tokens": use.read, "cache_write_tokens": use.written}
        usage = {total: sum(use), f"{total}_details": details}
    tokens = token_usage(usage)
    assert (tokens.cached_tokens, tokens.written_tokens, tokens.uncached_tokens) == use
    return usage
