"""What is known of a session's beginning changes nothing that goes out."""

from __future__ import annotations

import asyncio
import json
import random
import tracemalloc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from warmprefix_gateway import GatewayOptions
from warmprefix_gateway.gateway_options import References
from warmprefix_gateway.office import Office
from warmprefix_gateway.shared_beginnings import GrownRequest, SharedBeginning, SharedBeginnings
from warmprefix_gateway.tenant_bodies import BodyRefusedError
from warmprefix_requests import restored, rewrite
from warmprefix_requests.splicing import spliced

WORDS = ["prefix", "Größe", "of", "\U0001f600", '"quoted"', "a\\b", "tab\t", "<end>", "\x7f", "漢字", "{[,"]
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def turn(route: str, rng: random.Random, results: list[str], number: int) -> list[dict[str, Any]]:
    """Return the messages of a call and its result, which repeats an earlier one now and then."""
    result = rng.choice(results) if results and rng.random() < 0.4 else text(rng, rng.randrange(20, 400))
    if results and rng.random() < 0.2:
        result = "\n\n".join([text(rng, 90), *rng.choice(results).split("\n\n")])
    results.append(result)
    name, arguments, id = "read", f"file{rng.randrange(6)}", f"call{number if rng.random() < 0.95 else 1}"
    if route == "chat":
        call = {"id": id, "function": {"name": name, "arguments": arguments}, "temperature": 1e30}
        return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": id, "content": result}]
    if route == "messages":
        call = {"type": "tool_use", "id": id, "name": name, "input": {"path": arguments, "n": 10**30}}
        given = {"type": "tool_result", "tool_use_id": id, "content": result}
        return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [given]}]
    call = {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}
    return [call, {"type": "function_call_output", "call_id": id, "output": result}]


def written(message: object, rng: random.Random) -> str:
    """Write a message as a client may: with white space, escapes, numbers in long form, and keys that are repeated."""
    content = json.dumps(message, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 1]))
    if rng.random() < 0.02:
        content = content.replace("{", '{"role": "x", "content": "y", ', 1)
    if rng.random() < 0.2:
        content = content.replace("of", "\\u006ff").replace("1e+30", "1.00E+30")
    return content


def bodies(route: str, rng: random.Random, requests: int) -> Iterator[bytes]:
    """Yield the requests of a session that grows, and is edited, cut and forked."""
    name = "input" if route == "responses" else "messages"
    results: list[str] = []
    first = {"role": "user", "content": text(rng, 30)}
    messages, tools = [written(first, rng)], "[]"
    branches = [messages]
    for number in range(requests):
        for _ in range(rng.randrange(1, 4)):
            messages = [*messages, *[written(message, rng) for message in turn(route, rng, results, len(messages))]]
        chance = rng.random()
        if chance < 0.05:
            messages = messages[: rng.randrange(1, len(messages))]
        elif chance < 0.1:
            at = rng.randrange(len(messages))
            messages = [*messages[:at], written({"role": "user", "content": text(rng, 9)}, rng), *messages[at + 1 :]]
        elif chance < 0.15:
            messages = rng.choice(branches)
        elif chance < 0.2:
            tools = json.dumps([{"type": "function", "function": {"name": text(rng, 3)}}])
        branches.append(messages)
        stream = (
            ', "stream": true'
            if rng.random() < 0.9
            else rng.choice([', "x": NaN', ', "stream": 1, "stream": 2', ", 1"])
        )
        sent = (
            messages if rng.random() < 0.9 else [*messages, written({"role": "user", "content": f"once {number}"}, rng)]
        )
        comma = rng.choice([",", ", "]) if rng.random() < 0.05 else ","
        content = f'{{"model": "m", "{name}": [{comma.join(sent)}], "tools": {tools}{stream}}}'.encode()
        if rng.random() < 0.03:
            content = content[:-9] + b"\xff" + content[-9:]
        if rng.random() < 0.03:
            content = content[: rng.randrange(len(content))]
        yield content
        if rng.random() < 0.1:
            yield content


async def outcome(office: Office, content: bytes, path: str, tenant: str | None) -> object:
    """Return all that a gateway decides about a request."""
    try:
        asked = await office.ask(content, path, {"content-type": "application/json"}, tenant)
    except BodyRefusedError as error:
        return error.status, error.reason, str(error)
    if asked is None:
        return None
    sent, plain = asked.sent, asked.sent.plain or asked.sent
    made = sent.rewritten
    found = None if made is None else (made.references, made.saved_tokens, made.texts, made.echoes.texts)
    bytes_sent = sent.encode(), plain.encode(), repr(sent.body)
    return bytes_sent, repr(asked.call.body), asked.call.content, asked.parts, asked.session.key, found


def check(seed: int, requests: int = 30, references: References = "exact") -> int:
    """Compare gateways that remember and forget beginnings; return how many requests began with a known one."""
    rng = random.Random(seed)
    options = GatewayOptions(("http://127.0.0.1:9/v1",), salt_key=b"k" * 32, references=references)
    offices = Office(options), Office(options)
    offices[1].beginnings = SharedBeginnings(0)
    sessions = [
        (tenant, route, bodies(route, random.Random(seed if rng.random() < 0.3 else rng.random()), requests))
        for tenant in (None, "one", "other")
        for route in PATHS
    ]
    known = 0

    async def run() -> None:
        nonlocal known
        while sessions:
            session = rng.choice(sessions)
            tenant, route, contents = session
            content = next(contents, None)
            if content is None:
                sessions.remove(session)
                continue
            known += offices[0].beginnings.find(tenant, f"{route} None", content)[1] is not SharedBeginnings.none
            results = [await outcome(office, content, PATHS[route], tenant) for office in offices]
            assert results[0] == results[1]
        for office in offices:
            await office.close()

    asyncio.run(run())
    assert len(offices[1].beginnings) == 0
    return known


def test_known_beginnings_change_no_byte() -> None:
    assert sum(map(check, range(3))) > 150


def test_known_beginnings_change_no_byte_with_passages() -> None:
    assert sum([check(seed, references="passages") for seed in range(3)]) > 150


@pytest.mark.slow
def test_known_beginnings_change_no_byte_in_many_sessions() -> None:
    assert sum(map(check, range(3, 100))) > 5_000


def grown(contents: Sequence[bytes]) -> tuple[SharedBeginning, GrownRequest]:
    """Return what the first of two requests leaves for the second, and the second."""
    known = before = SharedBeginnings.none
    request: GrownRequest | None = None
    for content in contents:
        request = GrownRequest.read("chat", content, known, strictly=False)
        assert request is not None
        request.spliced(content, rewrite("chat", request.body).texts)
        known, before = request.beginning() or SharedBeginnings.none, known
    assert request is not None
    return before, request


def growing(seed: int, turns: int = 30) -> list[bytes]:
    rng, results = random.Random(seed), list[str]()
    messages = [{"role": "user", "content": f"session {seed}"}]
    for number in range(turns):
        messages += turn("chat", rng, results, number)
    return [json.dumps({"messages": part}).encode() for part in (messages[:-2], messages)]


def test_requests_that_share_a_beginning_run_in_threads_at_one_time() -> None:
    contents = growing(1)
    known, _ = grown(contents)

    def sent(_: int) -> bytes:
        request = GrownRequest.read("chat", contents[1], known, strictly=False)
        assert request is not None
        return request.spliced(contents[1], rewrite("chat", request.body).texts)

    expected = spliced(contents[1], rewrite("chat", json.loads(contents[1])).texts)
    assert restored("chat", json.loads(expected)) == json.loads(contents[1])
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(sent, range(64))) == {expected}


def test_only_new_messages_are_read() -> None:
    contents = growing(1, 200)
    known, request = grown(contents)
    assert len(request.new_body["messages"]) < 10
    assert known.read.items[0] is request.body["messages"][0]


def test_memory_is_bounded_and_fair() -> None:
    beginnings = SharedBeginnings(4_000_000)
    for seed in range(60):
        contents = growing(seed)
        known, _ = grown(contents)
        tenant = "small" if seed == 0 else "large"
        keys, before = beginnings.find(tenant, "chat", contents[1])
        assert before is SharedBeginnings.none
        beginnings.keep(keys, before, known)
        assert beginnings.find(tenant, "chat", contents[1]) == (keys, known)
        assert beginnings.find("third", "chat", contents[1])[1] is SharedBeginnings.none
        assert beginnings.find(tenant, "responses", contents[1])[1] is SharedBeginnings.none
        assert beginnings.size <= 4_000_000
    assert 3 < len(beginnings) < 60
    assert beginnings.find("small", "chat", growing(0)[1])[1] is not SharedBeginnings.none
    contents = growing(59)
    keys, last = beginnings.find("large", "chat", contents[1])
    assert last is not SharedBeginnings.none
    beginnings.keep(keys, last, None)
    assert beginnings.find("large", "chat", contents[1]) == (keys, SharedBeginnings.none)


@pytest.mark.parametrize(
    "value", ['{"a":' * 300 + "1" + "}" * 300, "[" * 300 + "]" * 300, '{"a":{},"b":[{"c":0}]}', '"漢"']
)
def test_a_beginning_takes_no_more_memory_than_it_counts(value: str) -> None:
    message = f'{{"role": "user", "content": "q", "x": [{",".join([value] * (120_000 // len(value)))}]}}'
    content = f'{{"messages": [{",".join([message] * 8)}]}}'.encode()
    tracemalloc.start()
    try:
        request = GrownRequest.read("chat", content, SharedBeginnings.none, strictly=False)
        known = None if request is None else request.beginning()
        del request
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert known is not None
    assert used <= known.size


def session_with_results(rng: random.Random, kind: str) -> bytes:
    """Return a request with calls and results of one kind, of which some are repeated."""
    paragraphs = [text(rng, 60) + "." * 200 for _ in range(200)]
    contents = {
        "long": lambda: text(rng, 900),
        "short": lambda: f"{rng.random()}",
        "outputs": lambda: f" {rng.random()} {'漢' * 400}\n",
        "paragraphs": lambda: "\n\n".join(rng.choices(paragraphs, k=6)),
        "in JSON": lambda: json.dumps({"output": text(rng, 90), "exit": rng.random()}, ensure_ascii=False),
    }
    results, messages = list[str](), list[dict[str, Any]]()
    for number in range(300):
        results.append(rng.choice(results) if number % 4 == 3 else contents[kind]())
        function = {"name": "read", "arguments": json.dumps({"path": f"{number % 200} {'x' * rng.randrange(300)}"})}
        messages.append({"role": "assistant", "tool_calls": [{"id": f"call{number}", "function": function}]})
        messages.append({"role": "tool", "tool_call_id": f"call{number}", "content": results[-1]})
    return json.dumps({"messages": messages}).encode()


@pytest.mark.parametrize("passages", [False, True])
@pytest.mark.parametrize("kind", ["long", "short", "outputs", "paragraphs", "in JSON"])
def test_what_was_rewritten_takes_no_more_memory_than_it_counts(kind: str, passages: bool) -> None:
    content = session_with_results(random.Random(1), kind)
    tracemalloc.start()
    try:
        request = GrownRequest.read("chat", content, SharedBeginnings.none, strictly=False)
        assert request is not None
        made = request.rewritten("chat", request.body, check=None, earlier=None, keep_tools=(), passages=passages)
        request.spliced(content, made.texts)
        known = request.beginning()
        del request, made
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert known is not None
    assert known.rewriting is not None
    assert used <= known.size
