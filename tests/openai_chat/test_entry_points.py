"""Every way in which the SDK asks passes the link."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from warmprefix_openai import EngineLink, messages_for
from warmprefix_tools.emulator import encode


class Short(BaseModel):
    it: str


def chat(client: Any) -> Any:
    """Where `parse` and `stream` are: below `beta` before version 1.92."""
    completions = client.chat.completions
    return completions if hasattr(completions, "parse") else client.beta.chat.completions


def test_create_and_its_variants(emulated: Any, planner: Any, blocks: Any) -> None:
    link = emulated.link
    call = {"model": "warmprefix-emulator", "max_tokens": 200}  # enough for an answer to end by itself

    def marked() -> dict[str, Any]:
        plan = planner.plan(blocks, tenant="acme")
        return {**call, "messages": messages_for(plan, "Q?"), "extra_headers": link.headers(plan)}

    def blocking(client: openai.OpenAI) -> None:
        for create in (client.chat.completions.create, client.with_options(timeout=9).chat.completions.create):
            assert create(**marked()).usage.prompt_tokens > 0
        raw = client.chat.completions.with_raw_response.create(**marked())
        assert raw.parse().usage.prompt_tokens > 0
        with client.chat.completions.with_streaming_response.create(**marked()) as response:
            assert json.loads(b"".join(response.iter_bytes()))["usage"]
        with client.chat.completions.with_streaming_response.create(**marked(), stream=True) as response:
            assert b"".join(response.iter_bytes()).endswith(b"data: [DONE]\n\n")
        with chat(client).stream(**marked()) as stream:
            assert [event for event in stream if event.type == "content.delta"]
            assert stream.get_final_completion().choices[0].message.content

    async def awaited(client: openai.AsyncOpenAI) -> None:
        for create in (client.chat.completions.create, client.with_options(timeout=9).chat.completions.create):
            assert (await create(**marked())).usage.prompt_tokens > 0
        raw = await client.chat.completions.with_raw_response.create(**marked())
        assert raw.parse().usage.prompt_tokens > 0
        async with client.chat.completions.with_streaming_response.create(**marked()) as response:
            assert json.loads(b"".join([piece async for piece in response.iter_bytes()]))["usage"]
        async with client.chat.completions.with_streaming_response.create(**marked(), stream=True) as response:
            assert b"".join([piece async for piece in response.iter_bytes()]).endswith(b"data: [DONE]\n\n")
        async with chat(client).stream(**marked()) as stream:
            assert [event async for event in stream if event.type == "content.delta"]
            assert (await stream.get_final_completion()).choices[0].message.content

    emulated.run(blocking, awaited)
    assert planner.fates == ["commit"] * 6
    reports = [report for _, _, report in planner.outcomes]
    assert len({report.prompt_tokens for report in reports}) == 1
    assert all(report.cached_tokens > report.prompt_tokens - 32 for report in reports[1:])
    assert [report.ttft is not None for report in reports] == [False] * 4 + [True] * 2
    assert planner.stats().open_plans == 0
    assert link.stats().errors == 0


def test_parse(caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, completion: Any) -> None:
    completion["choices"][0]["message"]["content"] = '{"it": "is"}'
    scripted.script.append(reply([json.dumps(completion).encode()]))
    marked = {"model": "m", "messages": [{"role": "user", "content": "Q?"}], "response_format": Short}
    marked["extra_headers"] = caller.link.headers(planner.plan(blocks, tenant="acme"))
    answer = caller.run(lambda client: chat(client).parse(**marked), lambda client: chat(client).parse(**marked))
    assert answer.choices[0].message.parsed == Short(it="is")
    assert scripted.seen[0].body["cache_salt"]
    assert planner.last_report.cached_tokens == 64


def test_completions(caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, usage: Any) -> None:
    frame = {"id": "c", "object": "text_completion", "created": 1, "model": "m"}
    choice: dict[str, Any] = {
        "index": 0,
        "text": "It is.",
        "logprobs": None,
        "finish_reason": "stop",
        "prompt_token_ids": [1, 2],
    }
    whole = json.dumps({**frame, "choices": [choice], "usage": usage}).encode()
    chunks = [{**frame, "choices": [choice], "usage": None}, {**frame, "choices": [], "usage": usage}]
    events = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]
    scripted.script.extend([reply([whole]), reply(events, content_type="text/event-stream")])
    plans = [planner.plan(blocks) for _ in range(2)]
    calls = [
        {"model": "m", "prompt": f"{plan.render()}\n\nQ?", "extra_headers": caller.link.headers(plan)} for plan in plans
    ]

    def blocking(client: Any) -> Any:
        return [client.completions.create(**calls[0]), *client.completions.create(**calls[1], stream=True)]

    async def awaited(client: Any) -> Any:
        stream = await client.completions.create(**calls[1], stream=True)
        return [chunk async for chunk in stream] + [await client.completions.create(**calls[0])]

    if caller.is_async:
        scripted.script.reverse()
    answers = caller.run(blocking, awaited)
    assert [answer.choices[0].text for answer in answers] == ["It is."] * 2
    assert planner.fates == ["commit"] * 2
    for _, _, report in planner.outcomes:
        assert (report.cached_tokens, report.prompt_tokens, report.prompt_token_ids) == (64, 100, [1, 2])
        assert report.block_ends is not None
    assert sorted(report.ttft is None for _, _, report in planner.outcomes) == [False, True]


def test_responses(caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any) -> None:
    response = {
        "id": "r", "object": "response", "created_at": 1, "model": "m", "status": "completed", "output": [],
        "parallel_tool_calls": False, "tool_choice": "auto", "tools": [], "instructions": None, "metadata": {},
        "error": None, "incomplete_details": None, "temperature": 1, "top_p": 1,
        "usage": {"input_tokens": 100, "output_tokens": 2, "total_tokens": 102,
                  "input_tokens_details": {"cached_tokens": 64}, "output_tokens_details": {"reasoning_tokens": 0}},
    }  # fmt: skip
    delta = {"type": "response.output_text.delta", "delta": "It is.", "item_id": "i", "output_index": 0}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {**response, "status": "in_progress", "usage": None}},
        {**delta, "content_index": 0, "logprobs": []},
        {"type": "response.completed", "response": response},
    ]
    stream = [
        f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': n})}\n\n".encode()
        for n, event in enumerate(events)
    ]
    broken = [
        stream[0],
        stream[1],
        b'event: response.failed\ndata: {"type": "response.failed", "sequence_number": 2}\n\n',
    ]
    scripted.script.extend([reply([json.dumps(response).encode()]), reply(stream, content_type="text/event-stream")])
    plans = [planner.plan(blocks, tenant="acme") for _ in range(2)]
    calls = [
        {"model": "m", "input": messages_for(plan, "Q?"), "extra_headers": caller.link.headers(plan)} for plan in plans
    ]

    if find_spec("openai.resources.responses") is None:
        # The oldest SDKs have no method for it, but pass what is posted.
        def blocking(client: Any) -> Any:
            posted: Any = [{"path": "/responses", "body": {k: v for k, v in call.items() if k != "extra_headers"},
                       "options": {"headers": call["extra_headers"]}, "cast_to": object} for call in calls]  # fmt: skip
            posted[1]["body"]["stream"] = True
            first = client.post(**posted[0])
            raw = client.post(**posted[1], stream=True, stream_cls=openai.Stream[object])
            return [first, *raw]

        async def awaited(client: Any) -> Any:
            posted: Any = [{"path": "/responses", "body": {k: v for k, v in call.items() if k != "extra_headers"},
                       "options": {"headers": call["extra_headers"]}, "cast_to": object} for call in calls]  # fmt: skip
            posted[1]["body"]["stream"] = True
            first = await client.post(**posted[0])
            raw = await client.post(**posted[1], stream=True, stream_cls=openai.AsyncStream[object])
            return [first, *[event async for event in raw]]

    else:

        def blocking(client: Any) -> Any:
            return [client.responses.create(**calls[0]), *client.responses.create(**calls[1], stream=True)]

        async def awaited(client: Any) -> Any:
            first = await client.responses.create(**calls[0])
            return [first, *[event async for event in await client.responses.create(**calls[1], stream=True)]]

    assert len(caller.run(blocking, awaited)) == 4
    assert planner.fates == ["commit"] * 2
    assert [(r.cached_tokens, r.prompt_tokens, r.ttft is None) for _, _, r in planner.outcomes] == [
        (64, 100, True),
        (64, 100, False),
    ]
    assert [seen.body["cache_salt"] for seen in scripted.seen] == [plans[0].cache_salt] * 2
    assert not any("stream_options" in seen.body for seen in scripted.seen)
    # A response that fails after its first token has been seen; before that, it has not.
    for pieces, fate in ((broken, "commit"), ([broken[0], broken[2]], "abandon")):
        scripted.script.append(reply(pieces, content_type="text/event-stream"))
        scripted.script.popleft()
        headers = caller.link.headers(planner.plan(blocks))
        with caller.link.http_client() as client:
            body = {"model": "m", "input": "Q?", "stream": True}
            assert client.post(f"{scripted.base_url}/responses", json=body, headers=headers).content == b"".join(pieces)
        assert planner.fates[-1] == fate


@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_own_tokens_come_back(planner: Any, emulator: Any, blocks: Any, stream: bool) -> None:
    with EngineLink(planner, token_ids="vllm") as link:
        plan = planner.plan(blocks)
        with openai.OpenAI(base_url=emulator.base_url, api_key="none", http_client=link.http_client()) as client:
            answer: Any = client.chat.completions.create(
                model="warmprefix-emulator", messages=messages_for(plan, "Q?"), max_tokens=4, stream=stream,
                extra_headers=link.headers(plan),
            )  # fmt: skip
            if stream:
                assert all(chunk.choices for chunk in answer)
    report = planner.last_report
    assert len(report.prompt_token_ids) == report.prompt_tokens
    rendered = encode(plan.render())[:-1]  # the last one may go on with what follows
    ids = report.prompt_token_ids
    assert any(ids[i : i + len(rendered)] == rendered for i in range(len(ids)))
