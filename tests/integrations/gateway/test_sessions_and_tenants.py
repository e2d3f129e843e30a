"""Who sends a request, which session it belongs to, and what became of its tokens."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.gateway.conftest import ScriptedUpstream, answer, chat_answer, metric, send

from warmprefix import ContextPlanner
from warmprefix_gateway import GatewayBounds, GatewayOptions, GatewayServer
from warmprefix_gateway.sessions import SessionBook, prompt_parts, session_name
from warmprefix_gateway.tenant_keys import KeysError, TenantKeys
from warmprefix_tools.emulator import EmulatorServer

Make = Callable[..., GatewayServer]
CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "Be brief. " * 40}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def body(*messages: dict[str, str], **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [SYSTEM, *messages], **fields}).encode()


# -- tenants -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    digests = {name: hashlib.sha256(f"key of {name}".encode()).hexdigest() for name in ("acme", "initech")}
    lines = ["# tenants", *[f"{name}  {digest}" for name, digest in digests.items()], ""]
    (tmp_path / "keys").write_text("\n".join(lines))
    return tmp_path / "keys"


def test_a_key_decides_about_tenant_and_salt(upstream: ScriptedUpstream, gateway_of: Make, keys: Path) -> None:
    gateway = gateway_of(upstream.base_url, keys=keys, upstream_key="the engine's own")
    for tenant in ("acme", "initech", "acme"):
        assert send(gateway, "POST", CHAT, body(user("Why?")), authorization=f"Bearer key of {tenant}").status == 200
    salts = [json.loads(request.body)["cache_salt"] for request in upstream.prompts]
    assert salts[0] == salts[2] != salts[1]
    assert not {"acme", "initech"} & set(salts)
    assert {request.header("authorization") for request in upstream.prompts} == {"Bearer the engine's own"}


@pytest.mark.parametrize(
    "header", [{}, {"authorization": "Bearer wrong"}, {"authorization": "key of acme"}, {"x_api_key": ""}]
)
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/version"])
def test_no_request_passes_without_a_key(
    upstream: ScriptedUpstream, gateway_of: Make, keys: Path, path: str, header: dict[str, str]
) -> None:
    gateway = gateway_of(upstream.base_url, keys=keys)
    assert send(gateway, "POST", path, body(), **header).status == 401
    assert upstream.requests == []


def test_no_client_can_use_another_tenants_salt(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateways = [
        gateway_of(upstream.base_url, tenant_header="x-tenant", **more) for more in ({}, {}, {"salt_key": b"s"})
    ]
    for gateway in (*gateways, gateway_of(upstream.base_url, tenant_header="x-tenant", salt_key=b"s")):
        assert send(gateway, "POST", CHAT, body(user("Why?")), x_tenant="acme").status == 200
    salts = [json.loads(request.body)["cache_salt"] for request in upstream.prompts]
    assert len(set(salts)) == 3
    assert salts[2] == salts[3] == ContextPlanner(salt_key=b"s").plan([], tenant="acme").cache_salt
    for tenant in ("acme", "initech"):
        send(gateways[2], "POST", CHAT, body(user("Why?"), cache_salt=salts[2]), x_tenant=tenant)
    own = [json.loads(request.body)["cache_salt"] for request in upstream.prompts[4:]]
    assert len({*own, salts[2]}) == 3
    unwritable = b'{"messages": [], "cache_salt": "x", "temperature": NaN}'
    assert send(gateways[2], "POST", CHAT, unwritable, x_tenant="acme").status == 400
    assert len(upstream.prompts) == 6


def test_anthropics_header_holds_a_key_too(upstream: ScriptedUpstream, gateway_of: Make, keys: Path) -> None:
    gateway = gateway_of(upstream.base_url, keys=keys, upstream_key="own", engine="vllm")
    assert send(gateway, "POST", "/v1/messages", body(user("Why?")), x_api_key="key of acme").status == 200
    assert upstream.requests[0].header("x-api-key") == "own"


def test_a_trusted_header_names_the_tenant(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, tenant_header="X-Tenant")
    assert send(gateway, "POST", CHAT, body(user("Why?"))).status == 401
    assert send(gateway, "POST", CHAT, body(user("Why?")), x_tenant="acme").status == 200
    (request,) = upstream.prompts
    assert request.header("x-tenant") is None
    assert "cache_salt" in json.loads(request.body)


@pytest.mark.parametrize("text", ["", "acme", "acme 12", f"acme {'zz' * 32}", f"a b {'00' * 32}"])
def test_a_file_of_keys_that_is_wrong_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(KeysError):
        TenantKeys(tmp_path / "keys")


@pytest.mark.parametrize(
    "options",
    [
        {"upstreams": ()},
        {"upstreams": ("ftp://a",)},
        {"upstreams": ("http://user:secret@a/v1",)},
        {"upstreams": ("http://a/v1", "http://a/v1/")},
        {"upstreams": ("http://a/v1?x=1",)},
        {"host": "0.0.0.0"},
        {"host": "::"},
        {"host": "example.org"},
        {"port": 70_000},
        {"references": "all"},
        {"profile": "unheard-of"},
    ],
)
def test_options_that_are_wrong_are_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each has a message of its own
        GatewayOptions(**{"upstreams": ("http://a/v1",), **options})


@pytest.mark.parametrize("bound", ["max_body_bytes", "max_buffered_bytes", "max_in_flight", "silent_seconds"])
def test_bounds_must_be_above_0(bound: str) -> None:
    with pytest.raises(ValueError, match=f"{bound} must be above 0, got 0"):
        GatewayBounds(**{bound: 0})


def test_another_address_than_the_loopback_needs_a_reason(keys: Path) -> None:
    reasons: list[dict[str, Any]] = [{"keys": keys}, {"tenant_header": "x"}, {"no_auth": True}]
    for reason in reasons:
        GatewayOptions(("http://a/v1",), host="0.0.0.0", **reason)
    for host in ("localhost", "127.0.0.7", "::1"):
        GatewayOptions(("http://a/v1",), host=host)


# -- sessions ----------------------------------------------------------------------------------------------------------


def model(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def parts(*texts: str, system: Any = SYSTEM) -> Any:
    """Return the parts of a conversation in which user and model take turns."""
    return prompt_parts("chat", {"messages": [system, *[(user, model)[at % 2](text) for at, text in enumerate(texts)]]})


def chat(*messages: dict[str, Any]) -> Any:
    return prompt_parts("chat", {"messages": list(messages)})


def test_a_request_belongs_to_the_session_that_it_continues() -> None:
    book = SessionBook()
    one = book.find(None, None, parts("a"))
    two = book.find(None, None, parts("b"))
    assert one is not two
    assert book.find(None, None, parts("a", "answer", "c")) is one
    assert book.find(None, None, parts("b", "answer", "c")) is two
    assert book.find(None, None, parts("a", "answer", "c", "answer", "d")) is one
    assert book.find(None, None, parts("a", "answer", "c edited")) is one
    assert book.find("acme", None, parts("a", "answer", "c")) is not one
    assert book.find(None, "named", parts("a", "answer", "c")) is not one


def test_a_session_goes_on_if_its_last_message_is_replaced() -> None:
    book = SessionBook()
    first, second = (user(f"context of the {turn} turn") for turn in ("first", "second"))
    session = book.find(None, None, chat(SYSTEM, user("a"), first))
    assert book.find(None, None, chat(SYSTEM, user("a"), model("answer"), user("b"), second)) is session


def test_sessions_that_begin_alike_are_not_one() -> None:
    book = SessionBook()
    one = book.find(None, None, parts("hi"))
    one.requests = 1
    two = book.find(None, None, parts("hi"))
    assert one is not two
    two.requests = 1
    found = [
        book.find(None, None, parts("hi", "hello", "who am I?")),
        book.find(None, None, parts("hi", "yes?", "why?")),
    ]
    assert {id(session) for session in found} == {id(one), id(two)}
    for session, texts in zip(found, (("hi", "hello", "who am I?"), ("hi", "yes?", "why?")), strict=True):
        assert book.find(None, None, parts(*texts, "answer", "and then?")) is session
    third = book.find(None, None, parts("hi", "good day", "how are you?"))
    assert third not in found


@pytest.mark.parametrize("heads", [("Be brief.",), ("Of Ada: {}", "Of Bob: {}", "Of Eve: {}")])
def test_sessions_that_get_the_same_answers_are_not_one(heads: tuple[str, ...]) -> None:
    book = SessionBook()
    histories = [["hi"], ["hi"], ["hi"]]
    for turn in range(4):
        keys = []
        for number, history in enumerate(histories):
            system = {"role": "system", "content": heads[number % len(heads)].format(turn)}
            prompt = parts(*history, system=system)
            session = book.find(None, None, prompt)
            session.requests += 1
            keys.append(session.key)
            assert book.record(session, prompt, 100 + 10 * turn, 0).cut == 0
            history += ["Hello! How can I help?"] if turn == 0 else [f"answer {turn} to {number}"]
            history += [f"question {turn} of {number}"]
        assert len(set(keys)) == 3
    assert len(book) == 3


def test_one_short_message_is_no_evidence() -> None:
    book = SessionBook()
    session = book.find(None, None, parts("go on"))
    assert book.find(None, None, parts("go on", "done")) is session
    other = parts("go on", "another answer", "go on", "done", system={"role": "system", "content": "Other."})
    assert book.find(None, None, other) is not session


def test_what_a_changed_front_costs() -> None:
    """The estimate is near to the tokens that stood in the cache behind another front."""
    book, history = SessionBook(), list[dict[str, str]]()
    resent = front = new = 0
    for turn in range(12):
        memories = [f"Ada likes place {turn * number} by the sea, as she said." for number in range(8)]
        system = {"role": "system", "content": "\n".join(["You are Ada's assistant. " * 9, *memories])}
        history.append(user(f"How deep is the sea at place {turn * 7}, and why is it so deep there? " * 4))
        tokens = words("".join(message["content"] for message in (system, *history)))
        prompt = chat(system, *history)
        fates = book.record(book.find(None, None, prompt), prompt, tokens, 45)
        assert sum(fates) == tokens - 45
        front, new = front + fates.front, new + fates.new
        resent += words("".join(message["content"] for message in history[:-1])) if turn else 0
        history.append(model(f"It is {turn * 100} metres deep, because the plates move apart. " * 3))
    assert len(book) == 1
    assert 0.9 * resent < front + 12 * 33 < 1.1 * resent + 12 * 33
    assert new > 0


def test_a_tool_that_is_added_changes_the_front() -> None:
    book = SessionBook()
    tools = [{"type": "function", "function": {"name": f"tool_{n}"}} for n in range(3)]
    history = [SYSTEM, user("a " * 200), model("b " * 200)]
    first = prompt_parts("chat", {"messages": history[:2], "tools": tools[:2]})
    session = book.find(None, None, first)
    book.record(session, first, 300, 0)
    second = prompt_parts("chat", {"messages": [*history, user("c")], "tools": tools})
    assert book.find(None, None, second) is session
    fates = book.record(session, second, 520, 0)
    assert 50 < fates.front < 250
    assert fates.new == 520 - fates.front
    assert fates.cut == fates.lost == 0


def test_a_request_that_failed_is_asked_again_in_its_session() -> None:
    book = SessionBook()
    assert book.find(None, None, parts("hi")) is book.find(None, None, parts("hi"))


def test_questions_behind_the_same_examples_are_sessions_of_their_own() -> None:
    book = SessionBook()
    examples = ("2 + 2", "4", "3 + 3", "6")
    one, two = (book.find(None, None, parts(*examples, question)) for question in ("4 + 4", "5 + 5"))
    assert one is not two
    assert book.find(None, None, parts(*examples, "5 + 5", "10", "and 1?")) is two
    assert book.find(None, None, parts(*examples, "4 + 4", "8", "and 1?")) is one


def test_memories_in_the_system_prompt_change_no_session() -> None:
    book = SessionBook()
    histories: dict[str, list[str]] = {name: [f"I am {name}."] for name in ("Ada", "Bob")}
    sessions: dict[str, Any] = {}
    for turn in range(5):
        for name, history in histories.items():
            system = {"role": "system", "content": f"Be brief. Memories: {list(range(turn))} of {name}"}
            prompt = parts(*history, system=system)
            session = book.find(None, None, prompt)
            assert sessions.setdefault(name, session) is session
            fates = book.record(session, prompt, sum(map(len, history)), 0)
            assert sum(fates) == sum(map(len, history))
            assert fates.first == (0 if turn else len(history[0]))
            assert (fates.front > 0) == (turn > 0)
            assert fates.cut == fates.lost == 0
            history += [f"answer {turn} to {name}", f"question {turn}"]
            # The application extracts memories with prompts of their own.
            extraction = chat({"role": "system", "content": "Extract facts."}, user("\n".join(history)))
            assert book.find(None, None, extraction) is not session
    assert len(book) == 2 + 10


def test_texts_of_the_user_find_a_session_whose_results_were_cleared() -> None:
    book = SessionBook()
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    history: list[Any] = [SYSTEM, user("fix it"), {"role": "assistant", "tool_calls": [call]}]
    session = book.find(None, None, chat(*history[:2]))
    result = {"role": "tool", "tool_call_id": "1", "content": "a long text"}
    assert book.find(None, None, chat(*history, result)) is session
    more = [model("done"), user("now test it"), model("tested"), user("and now?")]
    assert book.find(None, None, chat(*history, result, *more[:2])) is session
    cleared = {**result, "content": "[Old tool result content cleared]"}
    changed = chat({"role": "system", "content": "Other."}, user("fix it"), model("read it"), cleared, *more)
    assert book.find(None, None, changed) is session


def test_a_title_takes_no_session() -> None:
    book = SessionBook()
    title = {"role": "system", "content": "Write a title."}
    small = book.find(None, None, parts("a", system=title))
    session = book.find(None, None, parts("a"))
    assert session is not small
    book.record(session, parts("a"), 1_000, 0)
    assert book.find(None, None, parts("a", "answer", "b")) is session
    other = book.find(None, None, chat(title, user("Write a title for this:"), user("a")))
    assert other not in (small, session)


def test_marks_and_shapes_change_no_session() -> None:
    def messages(marked: set[int], count: int) -> Any:
        given: list[Any] = []
        for at in range(count):
            text = {"type": "text", "text": f"message {at}"}
            content: Any = [{**text, "cache_control": {"type": "ephemeral"}}] if at in marked else f"message {at}"
            given.append({"role": ("user", "assistant")[at % 2], "content": content})
        system = [{"type": "text", "text": "Be brief.", **({"cache_control": {"type": "ephemeral"}} if marked else {})}]
        tools = [{"name": "read", **({"cache_control": {"type": "ephemeral"}} if marked else {})}]
        return prompt_parts("messages", {"messages": given, "system": system, "tools": tools})

    assert messages(set(), 5) == messages({2, 4}, 5)
    book = SessionBook()
    session = book.find(None, None, messages({0}, 1))
    for turn in range(1, 6):
        prompt = messages({2 * turn - 2, 2 * turn}, 2 * turn + 1)
        assert book.find(None, None, prompt) is session
        book.record(session, prompt, 100 * turn, 100 * turn - 100)
    assert session.fates[2:] == [0, 0, 0]


@pytest.mark.parametrize("named", [None, "one"])
def test_sub_agents_cut_nothing(named: str | None) -> None:
    book = SessionBook()
    agents = [["main task"], ["look into a"], ["look into b"]]
    for turn in range(4):
        for number, history in enumerate(agents):
            prompt = parts(*history, system={"role": "system", "content": "main" if number == 0 else "helper"})
            fates = book.record(book.find(None, named, prompt), prompt, 100 + 10 * turn, 100 + 10 * turn - 10)
            assert fates.lost == 0
            assert fates.cut == 0 or turn == 0
            history += [f"answer {turn} of {number}", f"result {turn}"]


@pytest.mark.slow
def test_memory_is_bounded() -> None:
    book = SessionBook()
    assert len(prompt_parts("chat", {"messages": [user("a")] * 50_000}).digests) == 10_001
    for number in range(150):
        many = prompt_parts("chat", {"messages": [user(str(number))] * 20_000})
        book.record(book.find(None, None, many), many, 100, 0)
    assert len(book) <= 100
    assert len(book.find(None, "x" * 1_000_000, parts("a")).key) == 128


def test_sessions_are_bounded() -> None:
    book = SessionBook(max_parts=100)
    for number in range(9):
        book.find(None, None, parts(str(number)))
    assert len(book) == 4
    assert [session.key for session in book] == ["session 9", "session 8", "session 7", "session 6"]


def test_no_tenant_takes_the_sessions_of_another_one() -> None:
    book = SessionBook(max_parts=10_000)
    sessions = [book.find("acme", None, parts(str(number))) for number in range(100)]
    for number in range(2_000):
        book.find("other", f"session {number}", parts(str(number)))
    found = [book.find("acme", None, parts(str(number), "answer", "more")) for number in range(100)]
    assert all(one is other for one, other in zip(found, sessions, strict=True))


@pytest.mark.parametrize(
    ("headers", "fields", "name"),
    [
        ({"x-session-id": "a"}, {"prompt_cache_key": "b"}, "a"),
        ({}, {"prompt_cache_key": "b"}, "b"),
        ({}, {"metadata": {"session_id": "c"}}, "c"),
        ({}, {"metadata": "c", "session_id": 7}, None),
    ],
)
def test_a_request_may_name_its_session(headers: dict[str, str], fields: dict[str, Any], name: str | None) -> None:
    assert session_name(headers, fields) == name


def test_uncached_tokens_have_a_cause() -> None:
    book = SessionBook()
    session = book.find(None, None, parts("a"))
    assert book.record(session, parts("a"), 1_000, 0) == (1_000, 0, 0, 0, 0)
    longer = parts("a", "x" * 400)
    assert book.record(session, longer, 2_000, 992) == (0, 1_008, 0, 0, 0)  # blocks of 16 or 32 tokens
    assert book.record(session, parts("a", "x" * 400, "b"), 2_100, 0) == (0, 116, 0, 0, 1_984)
    assert book.record(session, parts("a", "x" * 400, "b", "c"), 2_200, 2_096) == (0, 104, 0, 0, 0)
    cut = book.record(session, parts("other", "x" * 400), 2_000, 512)
    assert cut.cut > 0
    assert cut.new == 0


def words(text: str) -> int:
    """Return the length of a text in tokens: an application's tools have other tokens than its prose."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def common(one: str, other: str) -> int:
    """Return the number of characters that two texts begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize("volatile", [False, True])
@pytest.mark.parametrize("held", [1.0, 0.4])
def test_lost_tokens_are_those_that_the_cache_lost(block: int, volatile: bool, held: float) -> None:
    tools = [
        {"type": "function", "function": {"name": f"tool_{n}", "parameters": {"type": "object"}}} for n in range(40)
    ]
    book, history, sent = SessionBook(), list[dict[str, str]](), list[str]()
    lost = missing = 0
    for turn in range(20):
        history.append(
            user(f"Question {turn}: how deep is the sea at place {turn * 7}, and why is it so deep there? " * 4)
        )
        last = [user(f"<<<context of turn {turn}>>> " + "it is late and the weather is fine " * 20)] if volatile else []
        body: dict[str, Any] = {"tools": tools, "messages": [SYSTEM, *history, *last]}
        whole = json.dumps(tools) + "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
        shared = common(whole, sent[-1]) if sent else 0
        resident = words(whole[:shared]) // block * block
        cached = int(resident * held) // block * block
        session = book.find(None, None, prompt_parts("chat", body))
        fates = book.record(session, prompt_parts("chat", body), words(whole), cached)
        assert sum(fates) == words(whole) - cached
        lost += fates.lost
        missing += resident - cached
        sent.append(whole)
        history.append(model(f"It is {turn * 100} metres deep, because the plates move apart. " * 3))
    assert len(book) == 1
    if volatile:  # its tokens are estimated, rather too many
        assert 0.9 * missing <= lost <= missing + 20 * block
    else:
        assert abs(lost - missing) <= 40 + 8 * block


def test_a_title_in_the_same_session_cuts_nothing() -> None:
    book = SessionBook()
    title = chat({"role": "system", "content": "Write a title."}, user("Write a title for this:"), user("a"))
    session = book.find(None, "one", title)
    assert book.record(session, title, 100, 0) == (100, 0, 0, 0, 0)
    assert book.record(session, parts("a"), 1_000, 0) == (1_000, 0, 0, 0, 0)
    assert book.record(session, title, 100, 96).cut == 0
    assert book.record(session, parts("a", "answer", "b"), 1_100, 960).cut == 0
    changed = parts("a", "b", "c", system={"role": "system", "content": "New."})
    fates = book.record(session, changed, 1_000, 0)
    assert 0 < fates.front < 30  # one message
    assert fates.cut == 1_000 - fates.front


def test_ids_that_change_do_not_change_a_prompt() -> None:
    one, other = (prompt_parts("responses", {"input": [{"id": id, "role": "user", "content": "a"}]}) for id in "xy")
    assert one == other


# -- replicas and the page -------------------------------------------------------------------------------------------


def test_sessions_stay_at_their_replica(emulators: list[EmulatorServer], gateway_of: Make) -> None:
    gateway = gateway_of(*[emulator.base_url for emulator in emulators])
    histories = [[user(f"question {number} " * 50)] for number in range(6)]
    for _ in range(4):
        for history in histories:
            reply = send(gateway, "POST", CHAT, body(*history, model="warmprefix-emulator", max_tokens=4))
            assert reply.status == 200
            history += [reply.json["choices"][0]["message"], user("and then? " * 20)]
    assert metric(gateway, "uncached_tokens_total", cause="lost") < 0.05 * metric(gateway, "prompt_tokens_total")
    assert metric(gateway, "sessions") == 6
    assert metric(gateway, "failures_total") == 0


def test_memories_in_the_system_prompt_show_as_front(emulators: list[EmulatorServer], gateway_of: Make) -> None:
    gateway = gateway_of(emulators[0].base_url)
    history: list[Any] = []
    for turn in range(5):
        history.append(user(f"question {turn} " * 40))
        system = {"role": "system", "content": f"Be brief. Memories: {list(range(turn, 40))}"}
        asked = {"model": "warmprefix-emulator", "messages": [system, *history], "max_tokens": 4}
        reply = send(gateway, "POST", CHAT, json.dumps(asked).encode())
        history.append(reply.json["choices"][0]["message"])
    assert metric(gateway, "sessions") == 1
    front, total = metric(gateway, "uncached_tokens_total", cause="front"), metric(gateway, "prompt_tokens_total")
    assert 0.4 * total < front < 0.7 * total
    assert metric(gateway, "uncached_tokens_total", cause="cut") == 0
    assert "behind a system prompt or tools that changed" in send(gateway, "GET", "/").body.decode()


def test_repeated_results_are_references_unless_the_request_forbids_it(
    upstream: ScriptedUpstream, gateway_of: Make
) -> None:
    text = "The sea is 3,688 metres deep on average. " * 9
    messages: list[Any] = [user("Why?")]
    for number in ("1", "2"):
        call = {"id": number, "type": "function", "function": {"name": "read", "arguments": "{}"}}
        messages += [{"role": "assistant", "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": number, "content": text}]
    gateway = gateway_of(upstream.base_url)
    send(gateway, "POST", CHAT, body(*messages))
    send(gateway, "POST", CHAT, body(*messages), x_warmprefix_references="off")
    first, second = upstream.requests
    assert first.body.count(b"3,688") == 9
    assert b"[Word for word the result of the earlier call read({}).]" in first.body
    assert second.body == body(*messages)
    assert second.header("x-warmprefix-references") is None
    assert metric(gateway, "references_total") == 1


def test_a_request_chooses_whether_it_has_references(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    page = "\n".join([f"Line {number}: the sea is {number} metres deep here." for number in range(90)])
    gateway = gateway_of(upstream.base_url, references="off")
    messages: list[Any] = [user("Why?")]
    for number, result in enumerate([page, page, f"New.\n\n{page}"]):
        call = {"id": f"{number}", "type": "function", "function": {"name": "search", "arguments": f"{number}"}}
        messages += [{"role": "assistant", "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": f"{number}", "content": result}]
    for level in ("off", "exact", "passages"):
        send(gateway, "POST", CHAT, body(*messages), x_warmprefix_references=level)
    assert [request.body.count(b"[Word for word") for request in upstream.requests] == [0, 1, 2]


def test_the_page_shows_counts_and_no_text(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    upstream.handler = answer(chat_answer(cached=64))
    gateway = gateway_of(upstream.base_url)
    send(gateway, "POST", CHAT, body(user("a secret")), x_session_id="s3cret", user_agent="<b>opencode/1.18")
    page = send(gateway, "GET", "/")
    text = page.body.decode()
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "64.0 %" in text
    assert "&lt;b&gt;opencode" in text
    assert "secret" not in text
    assert "s3cret" not in text
    assert "http" not in text.replace('http-equiv="refresh"', "").replace(upstream.base_url, "")
    quoting = gateway_of(upstream.base_url, quote=True)
    send(quoting, "POST", CHAT, body(user("a secret")), x_session_id="s3cret")
    assert "s3cret" in send(quoting, "GET", "/").body.decode()


def test_metrics_and_logs_have_no_names(
    upstream: ScriptedUpstream, gateway_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = gateway_of(upstream.base_url, tenant_header="x-tenant")
    send(
        gateway, "POST", CHAT, body(user("a secret")), x_session_id="s3cret", x_tenant="acme", authorization="Bearer k"
    )
    text = send(gateway, "GET", "/metrics").body.decode() + caplog.text
    for name in ("secret", "s3cret", "acme", "Bearer"):
        assert name not in text
