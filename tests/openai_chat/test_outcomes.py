"""Outcomes of a plan whose request was sent, for every way in which an answer can come or fail to come."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from warmprefix_openai import PLAN_HEADER, EngineLink


def wait_for(holds: Any) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_answer_commits_with_the_engines_report(
    caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, completion: Any
) -> None:
    scripted.script.append(reply([json.dumps({**completion, "prompt_token_ids": [1, 2, 3]}).encode()]))
    plan = planner.plan(blocks, tenant="acme", conversation="chat-42")
    messages = [{"role": "user", "content": f"{plan.render()}\n\nQ?"}]
    answer = caller.ask(messages=messages, extra_headers=caller.link.headers(plan))
    assert answer.choices[0].message.content == "It is."
    assert planner.fates == ["commit"]
    report = planner.last_report
    assert (report.cached_tokens, report.prompt_tokens, report.prompt_token_ids) == (64, 100, [1, 2, 3])
    assert report.ttft is None
    assert [round(end * len(messages[0]["content"])) for end in report.block_ends][-1] == len(plan.render())
    (seen,) = scripted.seen
    assert PLAN_HEADER not in seen.headers
    assert plan.id.encode() not in seen.content
    assert seen.body["cache_salt"] == plan.cache_salt
    assert "stream_options" not in seen.body
    assert planner.stats().open_plans == 0


def test_a_stream_commits_with_the_engines_report_and_hides_usage_that_only_we_asked_for(
    caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, sse: Any, usage: Any
) -> None:
    scripted.script.append(reply(sse("It ", "is.", usage=usage), content_type="text/event-stream; charset=utf-8"))
    plan = planner.plan(blocks)
    chunks = caller.ask(stream=True, extra_headers=caller.link.headers(plan))
    assert all(chunk.choices for chunk in chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "It is."
    assert scripted.seen[0].body["stream_options"] == {"include_usage": True}
    assert "cache_salt" not in scripted.seen[0].body
    assert planner.fates == ["commit"]
    report = planner.last_report
    assert (report.cached_tokens, report.prompt_tokens) == (64, 100)
    assert report.ttft > 0
    # The application asks for it, and sees it.
    plan = planner.plan(blocks)
    options = {"stream_options": {"include_usage": True}}
    chunks = caller.ask(stream=True, extra_headers=caller.link.headers(plan), **options)
    assert chunks[-1].usage.prompt_tokens == 100
    assert planner.last_report.cached_tokens == 64


def test_requests_without_a_plan_pass_byte_for_byte(
    caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, sse: Any, usage: Any
) -> None:
    scripted.script.append(reply(sse("It is.", usage=usage), content_type="text/event-stream"))
    call: Any = {"stream": True, "messages": [{"role": "user", "content": "ß?"}], "extra_body": {"own": 1.50}}
    with openai.OpenAI(base_url=scripted.base_url, api_key="none") as plain:
        expected = list(plain.chat.completions.create(model="m", **call))
    with caller.link.sending(planner.plan(blocks)):
        pass
    assert caller.ask(**{"model": "m", "max_tokens": openai.NOT_GIVEN, **call}) == expected
    first, second = scripted.seen
    assert first.content == second.content
    assert second.headers.keys() - {"x-stainless-async"} == first.headers.keys() - {"x-stainless-async"}
    assert caller.link.stats().requests == 0


@pytest.mark.parametrize(
    ("status", "tried_again"), [(400, False), (401, False), (404, False), (429, True), (500, True)]
)
def test_an_error_abandons_if_clients_do_not_retry_it(
    caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, completion: Any, status: int, tried_again: bool
) -> None:
    refusal = reply([b'{"error": {"message": "no"}}'], status, headers=(("retry-after-ms", "1"),))
    scripted.script.append(refusal)
    plan = planner.plan(blocks)
    with pytest.raises(openai.APIStatusError):
        caller.ask(extra_headers=caller.link.headers(plan))
    assert planner.fates == ([] if tried_again else ["abandon"])
    assert caller.link.stats().waiting == tried_again
    caller.link.close()
    assert planner.fates == ["abandon"]
    # With another attempt that succeeds, it is the same plan that is committed.
    scripted.seen.clear()
    scripted.script.extend([refusal, reply([json.dumps(completion).encode()])])
    plan = planner.plan(blocks, tenant="acme")
    if tried_again:
        caller.ask(sdk={"max_retries": 2}, extra_headers=caller.link.headers(plan))
        assert [seen.body["cache_salt"] for seen in scripted.seen[-2:]] == [plan.cache_salt] * 2
        assert planner.outcomes[-1][:2] == (plan.id, "commit")
        assert caller.link.stats().waiting == 0
        assert planner.stats().late_commits == 0


def test_a_failure_waits_for_another_attempt_for_the_grace_period(
    scripted: Any, planner: Any, blocks: Any, reply: Any, is_async: bool, completion: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("warmprefix_openai.tracker._GRACE_SECONDS", 0.05)
    with EngineLink(planner) as link:
        ask = asker(link, scripted.base_url, is_async=is_async)
        scripted.script.append(reply([], 503))
        plan = planner.plan(blocks)
        headers = link.headers(plan)
        with pytest.raises(openai.InternalServerError):
            ask(extra_headers=headers)
        wait_for(lambda: planner.fates == ["abandon"])
        assert link.stats().waiting == 0
        # A later request still gets the tenant's salt, and nothing else.
        scripted.script.append(reply([json.dumps(completion).encode()]))
        scripted.script.popleft()
        ask(extra_headers=headers)
        assert planner.fates == ["abandon"]
        assert link.stats().repeated_plans == 1


def test_the_number_of_waiting_plans_is_bounded(
    planner: Any, scripted: Any, blocks: Any, reply: Any, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmprefix_openai.plans._MAX_PLANS", 2)
    scripted.script.append(reply([], 503))
    with EngineLink(planner) as link:
        ask = asker(link, scripted.base_url, is_async=is_async)
        plans = [planner.plan(blocks) for _ in range(5)]
        for number, plan in enumerate(plans, 1):
            with pytest.raises(openai.InternalServerError):
                ask(extra_headers=link.headers(plan))
            assert link.stats().waiting == min(number, 2)
        assert planner.outcomes == [(plan.id, "abandon", None) for plan in plans[:3]]
        assert link.stats().abandons == 3
    assert planner.fates == ["abandon"] * 5
    assert planner.stats().open_plans == 0


def asker(link: EngineLink, base_url: str, *, is_async: bool) -> Any:
    call: Any = {"model": "m", "messages": [{"role": "user", "content": "Q?"}]}
    options: Any = {"base_url": base_url, "api_key": "none", "max_retries": 0}

    def ask(**more: Any) -> Any:
        if not is_async:
            with openai.OpenAI(http_client=link.http_client(), **options) as client:
                return client.chat.completions.create(**call, **more)

        async def within() -> Any:
            async with openai.AsyncOpenAI(http_client=link.async_http_client(), **options) as client:
                return await client.chat.completions.create(**call, **more)

        return asyncio.run(within())

    return ask


@pytest.mark.parametrize("where", ["no answer", "in the body"])
def test_a_connection_lost_before_the_answer_waits_for_another_attempt(
    caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, cut: Any, completion: Any, where: str
) -> None:
    lost = [cut] if where == "no answer" else [b'{"id": ', cut]
    scripted.script.extend([reply(lost), reply([json.dumps(completion).encode()])])
    plan = planner.plan(blocks)
    caller.ask(sdk={"max_retries": 1}, extra_headers=caller.link.headers(plan))
    assert len(scripted.seen) == 2
    assert planner.fates == ["commit"]
    scripted.script.append(reply(lost))
    scripted.script.popleft()
    plan = planner.plan(blocks)
    with caller.link.sending(plan), pytest.raises(openai.APIConnectionError):
        caller.ask(messages=[{"role": "user", "content": plan.render()}])
    assert planner.fates == ["commit", "abandon"]


def test_a_time_out_abandons(caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, sse: Any) -> None:
    never = threading.Event()
    try:
        scripted.script.append(reply([never]))
        plan = planner.plan(blocks)
        with caller.link.sending(plan), pytest.raises(openai.APITimeoutError):
            caller.ask(messages=[{"role": "user", "content": plan.render()}], timeout=0.1)
        assert planner.fates == ["abandon"]
        # In the middle of a stream, the model has read the prompt, and the application drops the turn.
        role, word, *_ = sse("It ")
        for pieces, conversation, fate in (
            ([role, never], None, "abandon"),
            ([role, word, never], None, "commit"),
            ([role, word, never], "chat-42", "abandon"),
        ):
            scripted.script.append(reply(pieces, content_type="text/event-stream"))
            scripted.script.popleft()
            plan = planner.plan(blocks, conversation=conversation, placement="tail" if conversation else "head")
            assert plan.tracked == (conversation is not None)
            with pytest.raises((openai.APITimeoutError, httpx.TimeoutException)):  # the latter before version 2
                caller.ask(stream=True, timeout=0.3, extra_headers=caller.link.headers(plan))
            assert planner.outcomes[-1][:2] == (plan.id, fate)
    finally:
        never.set()


@pytest.mark.parametrize("tracked", [False, True], ids=["untracked", "tracked"])
def test_a_stream_that_breaks_is_no_turn_of_a_conversation(
    caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, sse: Any, cut: Any, tracked: bool
) -> None:
    role, word, *_ = sse("It ", done=False)
    broken = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
    for pieces, fate in (
        ([role, cut], "abandon"),
        ([role, broken], "abandon"),
        ([broken], "abandon"),
        ([role], "abandon"),
        ([], "abandon"),
        ([role, word, cut], "abandon" if tracked else "commit"),
        ([role, word, broken], "abandon" if tracked else "commit"),
        ([role, word, broken + word], "abandon" if tracked else "commit"),
        ([role, word], "abandon" if tracked else "commit"),  # the engine has not ended the answer
        ([role, word[:-30], cut], "abandon"),
    ):
        scripted.script.append(reply(pieces, content_type="text/event-stream"))
        if len(scripted.script) > 1:
            scripted.script.popleft()
        options = {"conversation": "chat-42", "placement": "tail"} if tracked else {}
        plan = planner.plan(blocks, **options)
        assert plan.tracked is tracked
        raises = any(piece is cut or broken in piece for piece in pieces)
        expected = pytest.raises((openai.APIError, httpx.HTTPError)) if raises else contextlib.nullcontext()
        with expected:
            caller.ask(stream=True, extra_headers=caller.link.headers(plan))
        assert planner.outcomes[-1][:2] == (plan.id, fate), pieces
        if fate == "commit":
            assert planner.last_report.cached_tokens is None
            assert planner.last_report.ttft > 0
        if tracked:  # what the application has no answer to is shown again, in full
            again = planner.plan(blocks, **options)
            assert bool(again.references) is (fate == "commit"), pieces
            planner.abandon(again)
            planner.forget("chat-42")
    assert planner.stats().open_plans == 0
    assert caller.link.stats().errors == 0


def test_a_stream_that_the_application_closes_counts_as_seen_from_its_first_token_on(
    caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, sse: Any
) -> None:
    role, word, *rest = sse("It ", "is.")
    go_on = threading.Event()
    call = {"model": "m", "messages": [{"role": "user", "content": "Q?"}], "stream": True}
    try:
        for read, fate in ((0, "abandon"), (1, "abandon"), (2, "commit")):
            pieces = [*[role, word][:read], go_on, *[role, word][read:], *rest]
            if read == 0:
                pieces = [b": nothing yet\n\n", *pieces]  # so that the head comes
            scripted.script.append(reply(pieces, content_type="text/event-stream"))
            if len(scripted.script) > 1:
                scripted.script.popleft()
            plan = planner.plan(blocks)
            marked = {**call, "extra_headers": caller.link.headers(plan)}

            def blocking(client: Any, marked: Any = marked, read: int = read) -> None:
                with client.chat.completions.create(**marked) as stream:
                    for _ in range(read):
                        next(stream)

            async def awaited(client: Any, marked: Any = marked, read: int = read) -> None:
                async with await client.chat.completions.create(**marked) as stream:
                    for _ in range(read):
                        await stream.__anext__()

            caller.run(blocking, awaited)
            assert planner.outcomes[-1][:2] == (plan.id, fate), read
    finally:
        go_on.set()


@pytest.mark.parametrize("way", ["header", "sending", "a task that outlives its block"])
async def test_a_stream_that_came_in_one_piece_is_not_seen_before_it_was_read(
    planner: Any, link: EngineLink, scripted: Any, blocks: Any, reply: Any, sse: Any, way: str
) -> None:
    scripted.script.append(reply([b"".join(sse("It ", "is."))], content_type="text/event-stream"))
    plan = planner.plan(blocks, conversation="c", placement="tail")
    call: Any = {"model": "m", "messages": [{"role": "user", "content": plan.render()}], "stream": True}
    http = link.async_http_client()

    async def read(stop_after: int) -> None:
        stream: Any = await client.chat.completions.create(**call)
        async with stream:
            for _ in range(stop_after):
                await stream.__anext__()
            if stop_after > 1:
                _ = [chunk async for chunk in stream]

    async def read_and_hang_up() -> None:
        async with link.sending(plan):
            await read(1)
            raise HungUpError

    async def hang_up_meanwhile(reading: list[asyncio.Task[None]]) -> None:
        async with link.sending(plan):
            reading.append(asyncio.ensure_future(read(2)))
            while not scripted.seen:
                await asyncio.sleep(0)
            raise HungUpError

    async with openai.AsyncOpenAI(base_url=scripted.base_url, api_key="none", http_client=http) as client:
        if way == "header":
            call["extra_headers"] = link.headers(plan)
            await read(1)
        elif way == "sending":
            with pytest.raises(HungUpError):
                await read_and_hang_up()
        else:
            reading: list[asyncio.Task[None]] = []
            with pytest.raises(HungUpError):
                await hang_up_meanwhile(reading)
            await reading[0]
    assert planner.fates == ["abandon"]
    assert not planner.plan(blocks, conversation="c", placement="tail").references


def test_nothing_of_a_plan_is_kept_behind_its_block(
    caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, completion: Any
) -> None:
    scripted.script.append(reply([json.dumps(completion).encode()]))
    plan = planner.plan(blocks, conversation="c", placement="tail")
    with caller.link.sending(plan):
        caller.ask(messages=[{"role": "user", "content": plan.render()}])
    assert planner.fates == ["commit"]
    sent = caller.link._tracker.book.find(plan.id)
    assert (sent.plan, sent.answer) == (None, None)


class HungUpError(Exception):
    """Raised where an application finds that its own client has left."""


@pytest.mark.parametrize(
    ("way", "fate"), [("header", "abandon"), ("sending", "commit"), ("sending, then an exception", "abandon")]
)
def test_a_stream_of_a_conversation_that_is_closed_early_counts_as_seen_only_within_sending(
    caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, sse: Any, way: str, fate: str
) -> None:
    role, word, *rest = sse("It ", "is.")
    go_on = threading.Event()
    scripted.script.append(reply([role, word, go_on, *rest], content_type="text/event-stream"))
    plan = planner.plan(blocks, conversation="chat-42", placement="tail")
    call: Any = {"model": "m", "messages": [{"role": "user", "content": plan.render()}], "stream": True}
    sends = way != "header"
    if not sends:
        call["extra_headers"] = caller.link.headers(plan)

    def end() -> None:
        if way.endswith("exception"):
            raise HungUpError

    def blocking(client: Any) -> None:
        with caller.link.sending(plan) if sends else contextlib.nullcontext():
            with client.chat.completions.create(**call) as stream:
                next(stream), next(stream)
            assert planner.fates == ([] if sends else [fate]), "the end of the block decides"
            end()

    async def awaited(client: Any) -> None:
        async with caller.link.sending(plan) if sends else contextlib.nullcontext():
            async with await client.chat.completions.create(**call) as stream:
                await stream.__anext__()
                await stream.__anext__()
            assert planner.fates == ([] if sends else [fate]), "the end of the block decides"
            end()

    try:
        with pytest.raises(HungUpError) if way.endswith("exception") else contextlib.nullcontext():
            caller.run(blocking, awaited)
    finally:
        go_on.set()
    assert planner.fates == [fate]
    again = planner.plan(blocks, conversation="chat-42", placement="tail")
    assert bool(again.references) == (fate == "commit")
    assert caller.link.stats().early_closes == (not sends)


def test_a_stream_that_is_not_closed_ends_when_it_is_garbage(
    caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, sse: Any
) -> None:
    scripted.script.append(reply(sse("It ", "is."), content_type="text/event-stream"))
    call = {"model": "m", "messages": [{"role": "user", "content": "Q?"}], "stream": True}
    unread, begun = planner.plan(blocks), planner.plan(blocks)

    def blocking(client: Any) -> None:
        client.chat.completions.create(**call, extra_headers=caller.link.headers(unread))
        stream = client.chat.completions.create(**call, extra_headers=caller.link.headers(begun))
        while not next(stream).choices[0].delta.content:
            pass
        del stream
        gc.collect()

    async def awaited(client: Any) -> None:
        await client.chat.completions.create(**call, extra_headers=caller.link.headers(unread))
        stream = await client.chat.completions.create(**call, extra_headers=caller.link.headers(begun))
        while not (await stream.__anext__()).choices[0].delta.content:
            pass
        del stream
        gc.collect()
        for _ in range(10):  # what the garbage collector ends, the event loop closes
            await asyncio.sleep(0)

    caller.run(blocking, awaited)
    assert {plan: fate for plan, fate, _ in planner.outcomes} == {unread.id: "abandon", begun.id: "commit"}
    assert planner.stats().open_plans == 0


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_streams_are_read_however_they_are_cut_and_compressed(
    caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, sse: Any, usage: Any, end: str, size: int
) -> None:
    words = ["日本語", " – ß", " 🎉\u2028", "."]
    stream = b"".join(sse(*words, usage=usage, end=end))
    for data, headers in ((stream, ()), (gzip.compress(stream), (("content-encoding", "gzip"),))):
        pieces = [data[i : i + size] for i in range(0, len(data), size)]
        scripted.script.append(reply(pieces, content_type="text/event-stream", headers=headers))
        if len(scripted.script) > 1:
            scripted.script.popleft()
        chunks = caller.ask(stream=True, extra_headers=caller.link.headers(planner.plan(blocks)))
        assert all(chunk.choices for chunk in chunks)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "".join(words)
        assert planner.last_report.cached_tokens == 64
    assert planner.fates == ["commit", "commit"]


def test_a_compressed_answer_is_read(
    caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, completion: Any
) -> None:
    data = gzip.compress(json.dumps(completion).encode())
    scripted.script.append(reply([data[:40], data[40:]], headers=(("content-encoding", "gzip"),)))
    answer = caller.ask(extra_headers=caller.link.headers(planner.plan(blocks)))
    assert answer.choices[0].message.content == "It is."
    assert planner.last_report.cached_tokens == 64


async def test_a_cancelled_stream_is_no_turn_of_a_conversation(
    planner: Any, link: EngineLink, scripted: Any, blocks: Any, reply: Any, sse: Any
) -> None:
    role, word, *_ = sse("It ")
    go_on = threading.Event()
    scripted.script.append(reply([role, word, go_on], content_type="text/event-stream"))
    http = link.async_http_client()
    try:
        async with openai.AsyncOpenAI(base_url=scripted.base_url, api_key="none", http_client=http) as client:
            for options, fate in (({}, "commit"), ({"conversation": "c", "placement": "tail"}, "abandon")):
                plan = planner.plan(blocks, **options)
                call: Any = {"model": "m", "messages": [{"role": "user", "content": "Q?"}], "stream": True}
                stream: Any = await client.chat.completions.create(**call, extra_headers=link.headers(plan))
                for _ in range(2):
                    await stream.__anext__()
                reading = asyncio.ensure_future(stream.__anext__())
                await asyncio.sleep(0.05)
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
                assert planner.outcomes[-1][:2] == (plan.id, fate)
    finally:
        go_on.set()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tokens_are_reported_for_a_prompt_under_its_plans_salt_only(
    scripted: Any, planner: Any, blocks: Any, reply: Any, completion: Any, sse: Any, stream: bool
) -> None:
    answer = reply([json.dumps({**completion, "prompt_token_ids": [1, 2, 3]}).encode()])
    if stream:
        first, *rest = sse("It is.", usage=completion["usage"])
        chunk = {**json.loads(first.removeprefix(b"data: ")), "prompt_token_ids": [1, 2, 3]}
        pieces = [b"data: " + json.dumps(chunk).encode() + b"\n\n", *rest]
        answer = reply(pieces, content_type="text/event-stream")
    scripted.script.append(answer)
    for salted, tenant, own, expected in (
        (True, "acme", {}, [1, 2, 3]),
        (True, None, {}, [1, 2, 3]),
        (False, None, {}, [1, 2, 3]),
        (False, "acme", {}, None),
        (True, "acme", {"cache_salt": "mine"}, None),
        (True, "acme", {"cache_salt": None}, None),
        (True, None, {"cache_salt": "mine"}, None),
    ):
        plan = planner.plan(blocks, tenant=tenant)
        body = {"messages": [{"role": "user", "content": plan.render()}], "stream": stream, **own}
        with EngineLink(planner, cache_salt=salted, token_ids="vllm") as link, link.http_client() as client:
            client.post(f"{scripted.base_url}/chat/completions", headers=link.headers(plan), json=body)
        assert planner.outcomes[-1][:2] == (plan.id, "commit")
        assert planner.last_report.prompt_token_ids == expected, (salted, tenant, own)
        assert planner.last_report.cached_tokens == 64
        assert planner.last_report.block_ends is not None


def test_places_are_reported_for_a_prompt_that_is_all_text_only(
    link: EngineLink, scripted: Any, planner: Any, blocks: Any, reply: Any, completion: Any
) -> None:
    scripted.script.append(reply([json.dumps(completion).encode()]))
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with link.http_client() as client:
        for before, after, found in (([], [], True), ([picture], [], False), ([], [picture], False)):
            plan = planner.plan(blocks)
            text = {"type": "text", "text": plan.render()}
            messages = [{"role": "user", "content": [*before, text]}, {"role": "user", "content": ["Q?", *after]}]
            with link.sending(plan):
                client.post(f"{scripted.base_url}/chat/completions", json={"messages": messages})
            assert planner.outcomes[-1][:2] == (plan.id, "commit")
            assert (planner.last_report.block_ends is not None) is found


def test_an_answer_that_is_no_json_passes_and_is_counted(
    caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any
) -> None:
    scripted.script.append(reply([b"plain text"], content_type="text/plain"))
    assert caller.ask(extra_headers=caller.link.headers(planner.plan(blocks))) == "plain text"
    assert planner.fates == ["commit"]
    assert planner.last_report.cached_tokens is None
    assert caller.link.stats().unread_answers == 1


def test_an_error_in_an_answers_place_abandons(
    caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any
) -> None:
    scripted.script.append(reply([b'{"error": {"message": "out of memory"}}']))
    caller.ask(extra_headers=caller.link.headers(planner.plan(blocks)))
    assert planner.fates == ["abandon"]


def test_a_redirected_request_keeps_its_plan(
    caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, completion: Any
) -> None:
    moved = reply([], 307, headers=(("location", f"{scripted.base_url}/there/chat/completions"),))
    scripted.script.extend([moved, reply([json.dumps(completion).encode()])])
    plan = planner.plan(blocks, tenant="acme")
    if caller._own_kind:  # httpx follows redirects only if asked to
        with pytest.raises(openai.APIStatusError):
            caller.ask(extra_headers=caller.link.headers(plan))
        assert planner.fates == []
        return
    caller.ask(extra_headers=caller.link.headers(plan))
    assert [seen.body["cache_salt"] for seen in scripted.seen] == [plan.cache_salt] * 2
    assert not any(PLAN_HEADER in seen.headers for seen in scripted.seen)
    assert planner.fates == ["commit"]


def test_a_planner_that_fails_fails_no_request(
    scripted: Any, planner: Any, blocks: Any, reply: Any, completion: Any, is_async: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("broken")

    for name in ("commit", "acommit", "abandon", "aabandon"):
        monkeypatch.setattr(planner, name, broken)
    scripted.script.append(reply([json.dumps(completion).encode()]))
    with EngineLink(planner) as link:
        ask = asker(link, scripted.base_url, is_async=is_async)
        for _ in range(2):
            assert ask(extra_headers=link.headers(planner.plan(blocks))).usage.prompt_tokens == 100
        assert link.stats().errors == 2
    assert [record.levelname for record in caplog.records if record.name == "warmprefix"] == ["WARNING"]


def test_a_mistake_of_ours_fails_no_request(
    caller: Any, scripted: Any, planner: Any, blocks: Any, reply: Any, sse: Any, usage: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("broken")

    scripted.script.append(reply([b"".join(sse("It is.", usage=usage))], content_type="text/event-stream"))
    names = (
        "answer.StreamedAnswer.feed", "answer.AnswerFacts.read_prompt", "exchange.StreamedAnswer",
        "writer.read_call", "writer.prepared", "tracker.PlanBook.find", "clients._pass_through",
        "exchange.block_ends",
    )  # fmt: skip
    for number, name in enumerate(names, 1):
        with monkeypatch.context() as patched:
            patched.setattr(f"warmprefix_openai.{name}", broken)
            chunks = caller.ask(stream=True, extra_headers=caller.link.headers(planner.plan(blocks)))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "It is.", name
        assert caller.link.stats().errors == number, name
        assert PLAN_HEADER not in scripted.seen[-1].headers
