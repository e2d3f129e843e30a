"""No body of a tenant reaches an engine without the tenant's salt, whatever reads it there."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import orjson
import pydantic_core
import pytest
from tests.integrations.gateway.conftest import ScriptedUpstream, SeenRequest, send

from warmprefix.plan import tenant_salt
from warmprefix_gateway import Gateway, GatewayOptions, GatewayServer
from warmprefix_gateway.body_encodings import zstd

KEY = b"key"
TENANT, VICTIM = "acme", "initech"
CHOSEN = tenant_salt(KEY, VICTIM)
GIVEN: list[Any] = [CHOSEN, "x", "", None, 7, 1.5, True, [CHOSEN], {"cache_salt": CHOSEN}, "é", "\u2028"]
PLAIN = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"cache_salt":"%s"}' % CHOSEN.encode()
Make = Callable[..., GatewayServer]
PARSERS: dict[str, Callable[[bytes], Any]] = {
    "json, as Starlette reads bodies": json.loads,
    "orjson": orjson.loads,
    "pydantic_core": pydantic_core.from_json,
    "msgspec": msgspec.json.decode,
}
BEYOND = ("extra_key", "kv_transfer_params", "session_params", "rid", "data_parallel_rank", "nvext", "input_ids")
SPELLINGS = (
    *('"cache_salt"', '"cache\\u005fsalt"', '"\\u0063ache_salt"', '"Cache_Salt"', '"cacheSalt"', '"cache-salt"'),
    *('"cache_salt "', '"cache_salt\\u0000"', '"cache_\u017falt"', '"\ufeffcache_salt"', "'cache_salt'", "cache_salt"),
)
PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
    *("/chat/completions", "/openai/v1/chat/completions", "/v1/chat/completions/", "/v1//chat/completions"),
    *("/v1/./chat/completions", "/v1/x/../completions", "/v1/chat%2Fcompletions", "/v1/chat/completions;a"),
    *("/V1/chat/completions", "//v1/chat/completions", "/v1/%63hat/completions", "/v1/chat/completions%00"),
    *("/v1/chat\\completions", "/v1/chat/completions%3F", "/v1/chat/completions%2e", "/generate"),
    *("/v1/threads/t/messages", "/v1/audio/speech"),
)


class Attack(NamedTuple):
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


def attacks(seed: int) -> Iterator[Attack]:
    """Yield hostile requests without end; most have one or two faults, so that many come far."""
    r = random.Random(seed)
    while True:
        path = PATHS[r.randrange(5)] if r.random() < 0.8 else r.choice(PATHS)
        body = _edited(r, _encoded(r, _text(r)))
        headers = [(b"content-type", _content_type(r)), (b"x-tenant", TENANT.encode())]
        encoding, body = _compressed(r, body)
        if encoding:
            headers.append((b"content-encoding", encoding))
        if r.random() < 0.1:
            headers.append(r.choice([*HEADERS, (b"x-tenant", VICTIM.encode())]))
        yield Attack(path, headers, body)


HEADERS = [
    *[(b"x-body-compressed", b"zstd"), (b"x-http-method-override", b"PUT"), (b"x-data-parallel-rank", b"1")],
    *[(b"content-type", b"application/x-www-form-urlencoded"), (b"content-encoding", b"gzip")],
    *[(b"connection", b"content-type, content-encoding"), (b"cache-salt", CHOSEN.encode())],
]


def _text(r: random.Random) -> str:
    fields = ['"model":"m"', '"messages":[{"role":"user","content":"hi"}]', '"input":"hi"', '"max_tokens":9']
    names = [r.choice(SPELLINGS[: r.choice([1, 2, 3, 12])]) for _ in range(r.choice([0, 1, 1, 1, 1, 2]))]
    fields += [f"{name}:{json.dumps(r.choice(GIVEN))}" for name in names]
    if r.random() < 0.1:
        fields.append(f'"{r.choice(BEYOND)}":{r.choice(["1", "{}", "[1]", json.dumps(CHOSEN), "null"])}')
    if r.random() < 0.3:
        fields.append(f'"x":{r.choice(VALUES)}')
    r.shuffle(fields)
    text = "{" + r.choice([",", ", ", ",\n", ",\t"]).join(fields) + "}"
    return text if r.random() < 0.9 else r.choice(FRAMES).replace("{}", text)


FRAMES = (" {}", "\n\r\t{}", "\v{}", "{} ", "{}x", "{}{}", "[{}]", "\u00a0{}", "{}\x00", "/**/{}")
CODECS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "latin-1", "utf-7", "cp500")
PIECES = (b'"', b"\\", b"}", b"{", b",", b":", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80")
ENCODINGS = (b"identity", b"gzip", b"x-gzip", b"GZIP", b"deflate", b"zstd", b"br", b"gzip, gzip", b"gzip, identity")
VALUES = [
    *("NaN", "-Infinity", "1e999", "0123", "1.00", "9" * 5_000, '"\\ud800"', '"\\ud83d\\ude00"', '"a\tb"', '"\\u0000"'),
    *("[" * n + "]" * n for n in (50, 190, 500, 990, 1_020, 3_000)),
    *('{"cache_salt":"x"}', '{"a":1,"a":2}', '"}"', '"\\"}"', "[1,]", "// x\n1", "'x'", '"\\x41"', "TRUE", "{}"),
]


def _encoded(r: random.Random, text: str) -> bytes:
    if r.random() < 0.8:
        return text.encode("utf-8", "surrogatepass")
    return text.encode(r.choice(CODECS), "replace")


def _edited(r: random.Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(r.choice([0, 0, 0, 0, 1, 2])):
        at = r.randrange(len(changed) + 1)
        what = r.random()
        if what < 0.3:
            changed[at:at] = r.choice(PIECES)
        elif what < 0.6:
            del changed[at : at + r.randrange(1, 4)]
        elif what < 0.8:
            changed[at:at] = b'"cache_salt":"' + CHOSEN.encode() + b'",'
        else:
            changed[at : at + 1] = bytes([r.randrange(256)])
    return bytes(changed)


def _content_type(r: random.Random) -> bytes:
    if r.random() < 0.9:
        return b"application/json"
    kinds = [b"application/json; charset=utf-16", b"application/json;charset=UTF-8", b"text/plain", b"", b"text/json"]
    return r.choice([*kinds, b"multipart/form-data; boundary=x", b"application/x-www-form-urlencoded"])


PACKS: dict[bytes, Callable[[bytes], bytes]] = {
    b"gzip": gzip.compress,
    b"deflate": zlib.compress,
    b"zstd": zstd.compress,
}


def _compressed(r: random.Random, body: bytes) -> tuple[bytes, bytes]:
    if r.random() < 0.7:
        return b"", body
    name = r.choice(ENCODINGS)
    pack: dict[bytes, Callable[[bytes], bytes]] = {
        b"gzip": gzip.compress,
        b"deflate": zlib.compress,
        b"zstd": zstd.compress,
    }
    packed = pack.get(name.lower().removeprefix(b"x-"), bytes)(body)
    if name == b"gzip, gzip":
        packed = gzip.compress(gzip.compress(body))
    if r.random() < 0.2:
        packed = r.choice([body, packed[:-3], packed + b"x", packed + packed, b""])
    return name, packed


def unsalted(request: SeenRequest, attack: Attack) -> str | None:
    """Return what an engine reads that is not its tenant's; None if there is nothing of that kind."""
    if request.header("content-encoding") is not None:
        return "an encoding"
    if (request.header("content-type") or "application/json").partition(";")[0].strip().lower() != "application/json":
        return "another type"
    own = {tenant_salt(KEY, TENANT), *(tenant_salt(KEY, f"{TENANT}\0{given}") for given in _given(attack.body))}
    for name, body in _readings(request.body):
        if not isinstance(body, dict) or body.get("cache_salt") not in own:
            return name
        if any(body.get(field) is not None for field in BEYOND):
            return f"{name}: another's cache"
    return None


def _readings(content: bytes) -> Iterator[tuple[str, Any]]:
    for name, parse in PARSERS.items():
        with suppress(ValueError, RecursionError):
            yield name, parse(content)


def _given(content: bytes) -> Iterator[Any]:
    """Yield each salt that a parser may read in what the client has sent."""
    for unpack in (bytes, gzip.decompress, zlib.decompress, zstd.decompress):
        with suppress(ValueError, OSError, EOFError, zlib.error, zstd.ZstdError):
            for _, body in _readings(unpack(content).removeprefix(BOM_UTF8)):
                if isinstance(body, dict):
                    yield body.get("cache_salt")


async def sent_through(upstream: ScriptedUpstream, number: int, seed: int) -> tuple[int, list[Any]]:
    """Send attacks to a gateway; return the number of requests that arrived, and those that broke the rule."""
    gateway = Gateway(GatewayOptions((upstream.base_url,), tenant_header="x-tenant", salt_key=KEY, engine="vllm"))
    await gateway._office.open()  # its lifespan without a server
    arrived, broken = 0, []
    for attack in islice(attacks(seed), number):
        await _send_one(gateway, attack)
        for request in upstream.prompts:
            arrived += 1
            fault = unsalted(request, attack)
            if fault is not None:
                broken.append((fault, attack, request))
        upstream.requests.clear()
    await gateway._office.close()
    assert len(asyncio.all_tasks()) == 1  # nothing waits for a client any more
    return arrived, broken


async def _send_one(gateway: Gateway, attack: Attack) -> None:
    raw = attack.path.encode("latin-1")
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": raw.decode(),
        "raw_path": raw,
        "query_string": b"",
    }
    scope["headers"] = [*attack.headers, (b"host", b"gateway"), (b"content-length", b"%d" % len(attack.body))]
    waiting = [{"type": "http.request", "body": attack.body, "more_body": False}]
    answered: list[Any] = []

    async def receive() -> Any:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop()

    async def send(message: Any) -> None:
        answered.append(message)

    await gateway(scope, receive, send)
    assert answered[0]["status"] < 500, (attack, answered)


@pytest.mark.parametrize("number", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_tenants_request_arrives_without_its_salt(upstream: ScriptedUpstream, number: int) -> None:
    arrived, broken = asyncio.run(sent_through(upstream, number, seed=number))
    assert broken == []
    assert arrived > number / 5  # the others are refused


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (PLAIN, 200),
        (PLAIN.decode().encode("utf-8-sig"), 200),
        (PLAIN.decode().encode("utf-16"), 400),
        (PLAIN[:-1] + b',"x":' + b"[" * 5_000 + b"]" * 5_000 + b"}", 400),
        (PLAIN[:-1] + b',"cache_salt":null}', 400),
    ],
)
def test_a_body_is_understood_or_refused(
    upstream: ScriptedUpstream, gateway_of: Make, body: bytes, status: int
) -> None:
    gateway = gateway_of(upstream.base_url, tenant_header="x-tenant", salt_key=KEY)
    assert send(gateway, "POST", PATHS[0], body, x_tenant=TENANT, content_encoding="identity").status == status
    assert [json.loads(request.body)["cache_salt"] for request in upstream.prompts] == [
        tenant_salt(KEY, f"{TENANT}\0{CHOSEN}") for _ in range(status == 200)
    ]


def test_the_check_sees_a_body_without_a_salt() -> None:
    attack = Attack("/", [], b"{}")
    own = b'{"cache_salt": "%s"}' % tenant_salt(KEY, TENANT).encode()
    for body in (b"{}", b'{"cache_salt": null}', b'{"cache_salt": "%s"}' % CHOSEN.encode(), own[:-1] + b', "rid": 1}'):
        assert unsalted(SeenRequest("POST", "/", [], body), attack) is not None
    assert unsalted(SeenRequest("POST", "/", [], own), attack) is None
    assert unsalted(SeenRequest("POST", "/", [("content-encoding", "gzip")], own), attack) is not None
