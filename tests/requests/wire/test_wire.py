"""Every answer and request of the corpus, in every reader: all read the same."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from tests.integrations.gateway.conftest import ScriptedUpstream, answer, metric, send
from tests.requests.wire.corpus import WireAnswer, WireRequest, wire_answers, wire_requests

from warmprefix import BatchRequest, ContextBlock, ContextPlanner
from warmprefix_gateway import GatewayOptions, GatewayServer
from warmprefix_gateway.sessions import prompt_parts
from warmprefix_openai import PLAN_HEADER, AnswerError, BatchRunner, EngineLink, StreamedAnswer, WholeAnswer
from warmprefix_openai.completion import ChatReader
from warmprefix_requests import read_call, restored, rewrite
from warmprefix_requests.usage import reported_usage, token_usage
from warmprefix_tools.doctor.log_reader import read_log

ANSWERS = wire_answers()
REQUESTS = wire_requests()
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
QUESTION: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a question"}]}


def named(entries: Sequence[WireAnswer] | Sequence[WireRequest]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("entry", entries, ids=[entry.id for entry in entries])


on_the_wire = named([entry for entry in ANSWERS if entry.route != "log"])
chat_streams = named([entry for entry in ANSWERS if entry.route == "chat" and entry.streams])


def kind_of(entry: WireAnswer) -> str:
    return "text/event-stream" if entry.streams else "application/json"


def cut_up(data: bytes, seed: int) -> list[bytes]:
    """Cut bytes at random places: 0 for one piece, 1 for single bytes."""
    if seed < 2:
        return [data] if seed == 0 else [data[at : at + 1] for at in range(len(data))]
    generator = random.Random(seed)
    places = sorted({0, len(data), *[generator.randrange(len(data) + 1) for _ in range(12)]})
    return [data[begin:end] for begin, end in pairwise(places)]


@pytest.fixture(scope="module")
def upstream() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def gateway(upstream: ScriptedUpstream) -> Iterator[GatewayServer]:
    with GatewayServer(GatewayOptions((upstream.base_url,), port=0)) as gateway:
        yield gateway


def test_the_corpus_is_large_and_names_its_sources() -> None:
    for ids in ([entry.id for entry in ANSWERS], [entry.id for entry in REQUESTS]):
        assert len(ids) == len(set(ids))
    assert all(entry.source for entry in ANSWERS)
    assert all(entry.source for entry in REQUESTS)


# -- answers ---------------------------------------------------------------------------------------------------------


@named(ANSWERS)
def test_the_usage_is_read(entry: WireAnswer) -> None:
    usage: dict[str, Any] = {}
    for event in entry.events or ([] if entry.streams else [entry.payload]):
        usage = reported_usage(event, usage)
    if usage or entry.raw is None:
        assert token_usage(usage) == entry.tokens
        assert token_usage(json.loads(json.dumps(usage))) == entry.tokens  # as a record keeps it


@on_the_wire
def test_an_answer_is_read_while_it_passes_on(entry: WireAnswer) -> None:
    for seed in range(5):
        reader = StreamedAnswer(hide_usage=False) if entry.streams else WholeAnswer()
        passed = b"".join([reader.feed(piece) for piece in cut_up(entry.content, seed)]) + reader.finish()
        assert passed == entry.content
        assert reader.facts.tokens == entry.tokens
        assert reader.facts.failed == (entry.end == "failed")
        assert reader.facts.complete == (entry.end == "well") or entry.end == "failed"
        assert reader.facts.started or entry.end == "failed"
        assert not reader.facts.unread


@on_the_wire
def test_the_gateway_counts_what_is_reported(
    entry: WireAnswer, upstream: ScriptedUpstream, gateway: GatewayServer
) -> None:
    names = ("prompt_tokens_total", "cached_tokens_total", "unreported_tokens_total", "failures_total")
    before = [metric(gateway, name) for name in names]
    upstream.handler = answer(entry.content, kind=kind_of(entry))
    asked = {**QUESTION, "model": entry.id, "stream": entry.streams, "stream_options": {"include_usage": True}}
    reply = send(gateway, "POST", PATHS[entry.route], json.dumps(asked).encode())
    assert (reply.status, reply.body) == (200, entry.content)
    prompt, cached = entry.tokens.prompt_tokens or 0, entry.tokens.cached_tokens
    counted = [prompt, cached or 0, prompt if cached is None else 0, 0]
    counts = [metric(gateway, name) - earlier for name, earlier in zip(names, before, strict=True)]
    assert counts == ([0] * 4 if entry.end == "failed" else counted)


@on_the_wire
def test_a_link_reports_it_to_the_planner(entry: WireAnswer, upstream: ScriptedUpstream) -> None:
    planner = ContextPlanner()
    plan = planner.plan([ContextBlock("a passage " * 50, id="a")], preamble="P", conversation="c", placement="tail")
    upstream.handler = answer(entry.content, kind=kind_of(entry))
    body = {"model": "m", "stream": entry.streams, "messages": [{"role": "user", "content": plan.render()}]}
    if entry.streams and entry.route in ("chat", "completions"):
        body["stream_options"] = {"include_usage": True}
    if entry.route == "responses":
        body["input"] = body.pop("messages")
    if entry.route == "completions":
        body["prompt"] = plan.render()
    with EngineLink(planner) as link, link.http_client(httpx.Client) as client:
        url = upstream.base_url.removesuffix("/v1") + PATHS[entry.route]
        reply = client.post(url, json=body, headers=link.headers(plan))
        assert reply.content == entry.content
        assert upstream.requests[-1].header(PLAN_HEADER) is None
        assert link.stats().commits == (entry.end == "well")
        assert link.stats().errors == link.stats().unread_answers == 0
    stats = planner.stats()
    reported = entry.end == "well" and entry.tokens.cached_tokens is not None
    assert stats.reports == reported
    assert stats.reported_cached_tokens == (entry.tokens.cached_tokens if reported else 0)


@chat_streams
def test_a_streamed_chat_is_put_together(entry: WireAnswer) -> None:
    for seed in range(5):
        reader = ChatReader()
        try:
            text = "".join([reader.feed(piece) for piece in cut_up(entry.content, seed)])
            whole = reader.answer()
        except AnswerError:
            assert entry.end != "well"
            continue
        assert entry.end == "well"
        assert text == (whole.text or "") == (entry.text or "")
        assert whole.tokens == entry.tokens


@chat_streams
def test_hidden_usage_hides_nothing_else(entry: WireAnswer) -> None:
    for seed in range(5):
        reader, shown = StreamedAnswer(hide_usage=True), ChatReader()
        passed = b"".join([reader.feed(piece) for piece in cut_up(entry.content, seed)]) + reader.finish()
        assert reader.facts.tokens == entry.tokens
        try:
            assert shown.feed(passed) == (entry.text or "")
            shown.answer()
        except AnswerError:
            assert entry.end != "well"
        else:
            assert entry.end == "well"


@chat_streams
def test_the_sdk_reads_the_same(entry: WireAnswer, upstream: ScriptedUpstream) -> None:
    upstream.handler = answer(entry.content, kind=kind_of(entry))
    text = ""
    with openai.OpenAI(base_url=upstream.base_url, api_key="key", max_retries=0) as client:
        try:
            for chunk in client.chat.completions.create(**QUESTION, stream=True):
                for choice in getattr(chunk, "choices", None) or ():
                    text += (not choice.index and choice.delta and choice.delta.content) or ""
        except (openai.APIError, json.JSONDecodeError):
            assert entry.end == "failed"
            return
    assert text == (entry.text or "")


@named([entry for entry in ANSWERS if entry.route == "messages" and entry.streams])
def test_the_sdk_of_anthropic_reads_the_same(entry: WireAnswer, upstream: ScriptedUpstream) -> None:
    upstream.handler = answer(entry.content, kind=kind_of(entry))
    base_url = upstream.base_url.removesuffix("/v1")
    asked: dict[str, Any] = {**QUESTION, "max_tokens": 5, "stream": True}
    with anthropic.Anthropic(base_url=base_url, api_key="key", max_retries=0) as client:
        try:
            kinds = [event.type for event in client.messages.create(**asked)]
        except anthropic.APIStatusError:
            assert entry.end == "failed"
            return
    assert (kinds[-1] == "message_stop") == (entry.end == "well")


@named([entry for entry in ANSWERS if entry.route == "responses" and entry.streams])
def test_the_sdk_reads_responses(entry: WireAnswer, upstream: ScriptedUpstream) -> None:
    upstream.handler = answer(entry.content, kind=kind_of(entry))
    with openai.OpenAI(base_url=upstream.base_url, api_key="key", max_retries=0) as client:
        kinds = [event.type for event in client.responses.create(model="m", input="a question", stream=True)]
    assert (kinds[-1] in ("response.completed", "response.incomplete")) == (entry.end == "well")
    assert (kinds[-1] in ("response.failed", "error")) == (entry.end == "failed")


@chat_streams
async def test_the_batch_runner_commits_what_ended_well(entry: WireAnswer, upstream: ScriptedUpstream) -> None:
    upstream.handler = answer(entry.content, kind=kind_of(entry))
    planner = ContextPlanner()
    batch = planner.plan_batch([BatchRequest("one", [ContextBlock("a passage " * 50)])])
    async with openai.AsyncOpenAI(base_url=upstream.base_url, api_key="key") as client:
        (result,) = [result async for result in BatchRunner(batch).run(client, "m", retries=0)]
    assert (result.error is None) == (entry.end == "well")
    assert planner.stats().commits == (entry.end == "well")
    if entry.end == "well":
        assert ((result.text or ""), result.tokens) == ((entry.text or ""), entry.tokens)


@named([entry for entry in ANSWERS if entry.route == "chat" and not entry.streams and entry.end == "well"])
def test_a_whole_chat_is_read_from_a_batch_file(entry: WireAnswer, tmp_path: Path) -> None:
    batch = ContextPlanner().plan_batch([BatchRequest("one", [ContextBlock("a passage")])])
    line = {"custom_id": "one", "response": {"status_code": 200, "body": entry.payload}, "error": None}
    (tmp_path / "out.jsonl").write_text(json.dumps(line))
    (result,) = BatchRunner(batch).read_jsonl(tmp_path / "out.jsonl")
    assert (result.text, result.tokens) == (entry.text, entry.tokens)


def recorded(entry: WireAnswer) -> Iterator[list[Any]]:
    """Yield the answer as loggers write it: in its request's record, and in records of its own."""
    if not entry.streams:
        yield [{"request": QUESTION, "response": entry.payload}]
        yield [{"request": QUESTION, "response": entry.content.decode()}]
    else:
        yield [{"request": QUESTION, "response": entry.content.decode()}]
        if entry.events is not None:
            yield [{"request": QUESTION, "chunks": [event for event in entry.events if isinstance(event, dict)]}]


@named(ANSWERS)
def test_the_doctor_reads_it_in_a_record(entry: WireAnswer, tmp_path: Path) -> None:
    for lines in recorded(entry):
        (tmp_path / "log.jsonl").write_text("".join([json.dumps(line) + "\n" for line in lines]))
        (request,) = read_log([tmp_path / "log.jsonl"]).log.requests
        assert (request.reported_prompt_tokens, request.reported_cached_tokens) == entry.tokens[:2]


# -- requests --------------------------------------------------------------------------------------------------------


@named([entry for entry in REQUESTS if entry.route != "log"])
def test_a_call_is_read(entry: WireRequest) -> None:
    content = json.dumps(entry.body).encode()
    call = read_call("POST", PATHS[entry.route], entry.headers, content)
    assert call is not None
    assert call.route == entry.route
    texts = [json.dumps(entry.body["tools"])] if entry.body.get("tools") else []
    assert call.prompt == "\n".join([*texts, *entry.prompt])
    assert call.is_text == entry.is_text


@named([entry for entry in REQUESTS if entry.route != "log"])
def test_a_gateway_reads_the_parts_and_rewrites_reversibly(entry: WireRequest) -> None:
    parts = prompt_parts(entry.route, entry.body)
    assert len(parts.digests) == len(parts.characters)
    assert list(parts.characters) == sorted(parts.characters)
    assert 1 <= parts.begin <= len(parts.digests)
    if entry.route != "completions":
        route: Any = entry.route
        rewritten = rewrite(route, entry.body)
        assert rewritten.references == entry.references
        assert restored(route, rewritten.body) == entry.body


@named([entry for entry in REQUESTS if entry.route != "log"])
def test_a_gateway_sends_the_same_request(
    entry: WireRequest, upstream: ScriptedUpstream, gateway: GatewayServer
) -> None:
    failures = metric(gateway, "failures_total")
    upstream.handler = answer(b"{}")
    content = json.dumps(entry.body).encode()
    assert send(gateway, "POST", PATHS[entry.route], content, **entry.headers).status == 200
    sent = json.loads(upstream.requests[-1].body)
    route: Any = entry.route
    if entry.references:
        sent = restored(route, sent)
    added = sent.keys() - entry.body.keys()
    assert {name: value for name, value in sent.items() if name not in added} == entry.body
    assert added <= {"stream_options"}
    assert metric(gateway, "failures_total") == failures


@named(REQUESTS)
def test_the_doctor_reads_the_messages(entry: WireRequest, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps({"request": entry.body}) + "\n" + json.dumps(entry.body) + "\n")
    read = read_log([tmp_path / "log.jsonl"])
    for request in read.log.requests:
        found = [[message.role, read.log.text(message)] for message in request.messages if message.role != "tools"]
        assert found == entry.messages
    assert len(read.log.requests) == 2
