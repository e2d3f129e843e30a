"""The contract between this project and an engine: what a running one reports, separates and publishes.

    python benchmarks/engine_contract.py emulator llama.cpp vllm http://localhost:30000/v1 ...

asks each engine with the bodies that the link writes, and reads its answers as the link does. The first three are
started here: the emulator, llama.cpp with the extra `local`, and vLLM as `vllm_server.py` installs it. The script
prints the facts, and records them for the engine's version in `results/engine_contract.csv`, of which the table in
docs/engines.md is made. tests/engine/test_contract.py holds every engine that it finds to these rows. An engine that
runs already may have other requests meanwhile, but it must hold some prompts of 400 tokens, and its cache is emptied
once.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version as version_of
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from openai import OpenAI

from common import print_table
from gguf_layers import first_layers
from result_files import Row, write_rows
from vllm_server import VllmServer
from warmprefix import ContextBlock, ContextPlanner
from warmprefix.errors import EngineError
from warmprefix_kv_events import EngineTokenizer, KvEventFeed
from warmprefix_kv_events.spans import TokenizerError
from warmprefix_openai import EngineLink, messages_for
from warmprefix_openai.answer import AnswerFacts, StreamedAnswer, WholeAnswer
from warmprefix_openai.cache_metrics import capacity_from_metrics
from warmprefix_requests import (
    OutgoingRequest,
    Processor,
    prepared,
    read_call,
    with_salt,
    with_token_ids,
    with_usage,
)
from warmprefix_requests.engine_salts import recognised_engine
from warmprefix_requests.outgoing import PromptRoute, TokenIds
from warmprefix_requests.prefixes import one_token
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer
from warmprefix_tools.local.llama_server import LocalModel
from warmprefix_tools.local.weights import fetch_weights

__all__ = ["ContractEndpoint", "RefusedError", "contract_rows", "opened"]

PATHS: Mapping[PromptRoute, str] = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "responses": "/responses",
    "messages": "/messages",
}
TOKEN_IDS: Sequence[TokenIds] = get_args(TokenIds)
WORDS = ("river", "stone", "window", "garden", "letter", "winter", "bridge", "market", "harbour", "candle", "forest")
PROMPT_WORDS = 300
SECONDS = 300.0
"""Longest wait for an answer, and for an event."""


class RefusedError(Exception):
    """The engine answered with an error; the message has its status and text."""


@dataclass(frozen=True)
class Kind:
    """An engine with its version, as it names them."""

    engine: str
    version: str


class ContractEndpoint:
    """A running engine.

    Args:
        base_url: With `/v1`.
        kv_events: Address of its KV events, and that of their replay; by default those that it names itself.
        version: By default the one that it names itself.
    """

    def __init__(
        self, base_url: str, *, kv_events: tuple[str, str | None] | None = None, version: str | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.url = self.base_url.removesuffix("/v1")
        self._kv_events = kv_events
        self._version = version
        self._texts = random.Random(uuid.uuid4().int)  # so that no earlier run left them in the cache

    def get(self, path: str) -> bytes:
        """Return the content of a path next to `/v1`; empty if there is none."""
        try:
            with urlopen(f"{self.url}{path}", timeout=SECONDS) as answer:
                content: bytes = answer.read()
                return content
        except HTTPError:
            return b""

    def get_json(self, path: str) -> dict[str, Any]:
        with suppress(ValueError):
            found = json.loads(self.get(path))
            return found if isinstance(found, dict) else {}
        return {}

    @cached_property
    def model(self) -> str:
        name: str = self.get_json("/v1/models")["data"][0]["id"]
        return name

    @cached_property
    def kind(self) -> Kind:
        """The engine and its version.

        Raises:
            RefusedError: No engine that has a contract.
        """
        engine = recognised_engine(self.get("/v1/models"), self.get("/version"))
        if engine.name is None:
            raise RefusedError(f"{self.url} does not name its engine")
        found = (
            self._version or self.get_json("/version").get("version") or self.get_json("/server_info").get("version")
        )
        return Kind(engine.name, str(found or self.get_json("/props").get("build_info") or "any"))

    @cached_property
    def kv_events(self) -> tuple[str, str | None] | None:
        """Address of its KV events, and that of their replay; None if it publishes none."""
        if self._kv_events is not None:
            return self._kv_events
        # vLLM names them in its development mode, by rank; SGLang names its flag.
        named = self.get_json("/kv_event_sources").get("0") or self.get_json("/server_info").get("kv_events_config")
        found = json.loads(named) if isinstance(named, str) else named
        if not isinstance(found, dict):
            return None
        host = urlsplit(self.url).hostname or ""
        address, replay = found["endpoint"], found.get("replay_endpoint")
        return address.replace("*", host), replay and replay.replace("*", host)

    def text(self, words: int = PROMPT_WORDS) -> str:
        """Return words that no earlier prompt has in this order."""
        return " ".join(self._texts.choices(WORDS, k=words))

    def request(self, route: PromptRoute, text: str, *, stream: bool = False) -> OutgoingRequest:
        """Return a request as an application makes it."""
        messages = [{"role": "user", "content": text}]
        body: dict[str, Any] = {
            "chat": {"messages": messages, "max_tokens": 2},
            "completions": {"prompt": text, "max_tokens": 2},
            "responses": {"input": text, "max_output_tokens": 8},
            "messages": {"messages": messages, "max_tokens": 2},
        }[route]
        body |= {"model": self.model, "temperature": 0} | ({"stream": True} if stream else {})
        call = read_call("POST", PATHS[route], {}, json.dumps(body).encode())
        assert call is not None
        return call

    def ask(self, call: OutgoingRequest, *processors: Processor) -> AnswerFacts:
        """Send what the link would send, and return what it reads.

        Raises:
            RefusedError: The engine does not answer it.
        """
        outgoing = prepared(call, [*processors, with_usage])
        headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
        request = Request(f"{self.base_url}{PATHS[call.route]}", outgoing.encode(), headers, method="POST")
        reader = StreamedAnswer(hide_usage=False) if call.streams else WholeAnswer()
        try:
            with urlopen(request, timeout=SECONDS) as answer:
                reader.feed(answer.read())
                reader.finish()
        except HTTPError as error:
            raise RefusedError(f"{error.code} {error.read()[:500].decode(errors='replace')}") from error
        if reader.facts.failed or reader.facts.unread:
            raise RefusedError(f"{call.route}: an error in place of an answer")
        return reader.facts

    def empty_cache(self) -> bool:
        """Empty the prefix cache; return False if the engine does not allow it."""
        for path in ("/reset_prefix_cache", "/flush_cache"):
            with suppress(HTTPError), urlopen(Request(f"{self.url}{path}", b"", method="POST"), timeout=SECONDS):
                return True
        return False


@contextmanager
def opened(engine: str) -> Iterator[ContractEndpoint]:
    """Open an engine by its base URL, or start one by its name: "emulator", "llama.cpp" or "vllm".

    Raises:
        EngineUnavailableError: vLLM cannot be had here.
        LocalModelError: llama.cpp or its model cannot be had here.
    """
    with ExitStack() as stack:
        if engine == "emulator":
            config = EmulatorConfig(prefill_rate=math.inf, decode_rate=math.inf, base_ttft_ms=0)
            yield ContractEndpoint(stack.enter_context(EmulatorServer(config)).base_url)
        elif engine == "llama.cpp":
            folder = Path(stack.enter_context(TemporaryDirectory()))
            one_layer = first_layers(fetch_weights(announce=print), folder / "one-layer.gguf")
            llama = stack.enter_context(LocalModel(one_layer))
            yield ContractEndpoint(llama.base_url, version=version_of("xllamacpp"))
        elif engine == "vllm":
            vllm = stack.enter_context(VllmServer("smollm2-1"))
            yield ContractEndpoint(vllm.base_url, kv_events=(vllm.kv_events, vllm.kv_replay))
        else:
            yield ContractEndpoint(engine)


# -- facts -------------------------------------------------------------------------------------------------------------


def contract_rows(endpoint: ContractEndpoint) -> list[Row]:
    """Return all facts of an engine, one per row."""
    kind = endpoint.kind
    facts = [*route_facts(endpoint), *engine_facts(endpoint)]
    return [{"engine": kind.engine, "version": kind.version, "fact": fact, "value": value} for fact, value in facts]


def route_facts(endpoint: ContractEndpoint) -> Iterator[tuple[str, str]]:
    for route in PATHS:
        yield f"usage: {route}", answered(reports_usage, endpoint, route)
        yield f"usage of streams: {route}", answered(partial(reports_usage, stream=True), endpoint, route)
        yield f"salt: {route}", answered(salt_effect, endpoint, route)
        yield f"priority: {route}", answered(takes_priority, endpoint, route)


def answered(
    fact: Callable[[ContractEndpoint, PromptRoute], str], endpoint: ContractEndpoint, route: PromptRoute
) -> str:
    """Return a fact of a route, or why there is none."""
    try:
        return fact(endpoint, route)
    except RefusedError as error:
        return "no such route" if str(error).startswith("404") else "refused"


def engine_facts(endpoint: ContractEndpoint) -> Iterator[tuple[str, str]]:
    ways: dict[TokenIds, str] = {way: token_ids(endpoint, way) for way in TOKEN_IDS}
    for way, where in ways.items():
        yield f"token ids: {way}", where
    known: TokenIds | None = next((way for way, where in ways.items() if where != "no"), None)
    yield "tokenizer", tokenizer(endpoint)
    yield "prime", prime_shape(endpoint, known)
    yield "capacity", capacity(endpoint)
    yield from feed_facts(endpoint, known)


def reports_usage(endpoint: ContractEndpoint, route: PromptRoute, *, stream: bool = False) -> str:
    """Return "yes" if a repeated prompt is reported as mostly cached, and a new one as not."""
    call = endpoint.request(route, endpoint.text(), stream=stream)
    first, second = endpoint.ask(call).tokens, endpoint.ask(call).tokens
    if second.prompt_tokens is None or second.cached_tokens is None:
        return "no"
    is_right = second.cached_tokens > 0.8 * second.prompt_tokens and not (first.cached_tokens or 0) > 100
    return "yes" if is_right and first.prompt_tokens == second.prompt_tokens else "wrong"


def salt_effect(endpoint: ContractEndpoint, route: PromptRoute) -> str:
    """Return whether a prompt is found again under its salt, and neither under another one nor without any."""
    call = endpoint.request(route, endpoint.text())
    cached = [endpoint.ask(call, with_salt(salt)).tokens.cached_tokens for salt in ("one", "one", "two", None)]
    if cached[1] is None:
        return "unreported"
    own, other, without = (tokens is not None and tokens > 100 for tokens in cached[1:])
    if other or without:
        return "ignored"
    return "separates" if own else "wrong"


def takes_priority(endpoint: ContractEndpoint, route: PromptRoute) -> str:
    """Return "taken" if a request with a priority, a time in milliseconds, is answered."""
    endpoint.ask(endpoint.request(route, endpoint.text(20)).with_fields({"priority": 1_795_700_000_000}))
    return "taken"


def token_ids(endpoint: ContractEndpoint, way: TokenIds) -> str:
    """Return the answers that hold the prompt's tokens if the link asks for them in the way of an engine."""
    found = []
    for stream, where in ((False, "whole answers"), (True, "streams")):
        with suppress(RefusedError):
            facts = endpoint.ask(endpoint.request("chat", endpoint.text(), stream=stream), with_token_ids(way))
            if facts.prompt_token_ids is not None and len(facts.prompt_token_ids) == facts.tokens.prompt_tokens:
                found.append(where)
    return ", ".join(found) or "no"


def tokenizer(endpoint: ContractEndpoint) -> str:
    """Return "yes" if the engine tokenizes a chat to as many tokens as it reports of it."""
    call = endpoint.request("chat", endpoint.text())
    try:
        tokens = EngineTokenizer(endpoint.url, endpoint.model).of_request(call.body)
    except TokenizerError:
        return "no"
    return "yes" if len(tokens) == endpoint.ask(call).tokens.prompt_tokens else "wrong"


def prime_shape(endpoint: ContractEndpoint, way: TokenIds | None) -> str:
    """Return whether the prompt of a prime ends where its text ends, or behind tokens of the chat template."""
    call = endpoint.request("chat", endpoint.text())
    processors = [] if way is None else [with_token_ids(way)]
    try:
        exact = endpoint.ask(one_token("chat", call.body), *processors)
    except RefusedError:
        return "refused"
    whole = endpoint.ask(call, *processors)
    ids, count = whole.prompt_token_ids, exact.tokens.prompt_tokens
    if count is None or (ids is not None and exact.prompt_token_ids != ids[:count]):
        return "wrong"
    return "exact" if count < (whole.tokens.prompt_tokens or 0) else "ends in the template"


def capacity(endpoint: ContractEndpoint) -> str:
    try:
        return "yes" if capacity_from_metrics(endpoint.url) > PROMPT_WORDS else "wrong"
    except EngineError:
        return "no"


# -- KV events ---------------------------------------------------------------------------------------------------------


def feed_facts(endpoint: ContractEndpoint, way: TokenIds | None) -> Iterator[tuple[str, str]]:
    """Yield what a feed of the engine's KV events shows: prompts, tenants apart, an emptied cache."""
    names = ("feed", "feed: tenants", "feed: emptied cache")
    if endpoint.kv_events is None or way is None:
        yield from [(name, "no") for name in names]
        return
    address, replay = endpoint.kv_events
    feed = KvEventFeed(address, replay=replay, tokenizer=EngineTokenizer(endpoint.url, endpoint.model))
    blocks, other = ([ContextBlock(endpoint.text(100), id=number) for number in range(4)] for _ in range(2))
    with (
        ContextPlanner(feed=feed) as planner,
        EngineLink(planner, token_ids=way) as link,
        OpenAI(base_url=endpoint.base_url, api_key="none", http_client=link.http_client(timeout=SECONDS)) as client,
    ):

        def serve(blocks: Sequence[ContextBlock]) -> None:
            plan = planner.plan(blocks, tenant="one", preamble="Answer.")
            messages: Any = messages_for(plan, "What is it?", preamble="Answer.")
            with link.sending(plan):
                client.chat.completions.create(model=endpoint.model, messages=messages, max_tokens=2)

        def held(tenant: str | None) -> int:
            plan = planner.plan(blocks, tenant=tenant, preamble="Answer.")
            planner.abandon(plan)
            return plan.resident_tokens

        serve(blocks)
        is_found = waited(lambda: planner.stats().feed.prompts == 1 and held("one") > 0)
        stats = planner.stats().feed
        is_sound = stats.connected and not (stats.gaps or stats.malformed or stats.unknown or stats.unmapped)
        yield names[0], "yes" if is_found and is_sound else "wrong"
        yield names[1], "apart" if held("two") == held(None) == 0 < held("one") else "wrong"
        if endpoint.empty_cache():
            serve(other)  # engines publish it with their next step
            yield names[2], "seen" if waited(lambda: held("one") == 0) else "wrong"
        else:
            yield names[2], "no"


def waited(condition: Callable[[], bool]) -> bool:
    """Wait until a condition holds; return False if it does not in time."""
    deadline = time.monotonic() + SECONDS / 5
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", nargs="+", help="emulator, llama.cpp, vllm, or a base URL")
    options = parser.parse_args()
    rows: list[Row] = []
    for engine in options.engine:
        with opened(engine) as endpoint:
            rows += contract_rows(endpoint)
    print_table(["engine", "version", "fact", "value"], [[*row.values()] for row in rows])
    write_rows("engine_contract", rows, ("engine", "version", "fact"))


if __name__ == "__main__":
    main()
