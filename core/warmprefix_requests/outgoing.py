"""`OutgoingRequest`: a request with a prompt on its way to an engine, and the processors that change it. No I/O.

A processor is a function from one request to the next, or to None if it changes nothing. Link, batch runner and gateway
each have their own list of them, and write the body once, when all have run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from warmprefix.plan import ContextPlan
from warmprefix_requests.block_places import in_parts
from warmprefix_requests.marks.marker import CacheMarker, MarkedBody
from warmprefix_requests.prompts import Path
from warmprefix_requests.repeats import Rewritten, rewrite
from warmprefix_requests.splicing import spliced, survives
from warmprefix_requests.stored_history import StoredHistory
from warmprefix_requests.tool_lists import INLINE_TOOLS, SteadyTools

__all__ = [
    "OutgoingRequest",
    "Processor",
    "PromptRoute",
    "Splicer",
    "TokenIds",
    "prepared",
    "read_call",
    "route_of",
    "with_marks",
    "with_references",
    "with_salt",
    "with_texts",
    "with_token_ids",
    "with_tools",
    "with_tools_behind",
    "with_usage",
]

PromptRoute = Literal["chat", "completions", "messages", "responses"]

_ROUTES: Mapping[str, PromptRoute] = {
    "/chat/completions": "chat",
    "/completions": "completions",
    "/messages": "messages",
    "/responses": "responses",
}
"""The route of each end of a path; the first that matches counts."""

TokenIds = Literal["vllm", "sglang"]
"""The engine whose field asks for the prompt's tokens."""

_TOKEN_FIELDS: Mapping[TokenIds, tuple[str, bool]] = {
    "vllm": ("return_token_ids", True),
    "sglang": ("return_prompt_token_ids", False),
}
"""The field, and whether it is allowed in a stream."""

_ANSWER_ROUTES = ("chat", "completions")
"""Routes whose answers report usage and tokens if a field asks for it; other streams always have the usage."""


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """A request with a prompt: what the application sent, what goes out, and facts about the difference."""

    route: PromptRoute
    """The route of the API."""
    content: bytes
    """The application's own bytes, in which other texts may have taken the place of some."""
    body: Mapping[str, Any]
    """The body to send."""
    added: tuple[str, ...] = ()
    """Fields of `body` that `content` lacks; `encode` writes them behind the others."""
    is_rewritten: bool = False
    """True if `body` differs in other ways, so that `encode` writes all of it."""
    salt: object = None
    """The salt in the body; None without one."""
    hides_usage: bool = False
    """True if the application did not ask for the usage that the engine will now report."""
    rewritten: Rewritten | None = None
    """How references took the place of repeated results; None if it was not looked for any, or none was found."""
    marked: MarkedBody | None = None
    """The cache marks in the body; None if none were decided."""
    beta: str | None = None
    """Value that the header `anthropic-beta` needs for the body, besides those of the client."""
    optional: tuple[str, ...] = ()
    """Kinds of the fields that an endpoint may refuse; see `prepared`."""
    plain: OutgoingRequest | None = None
    """The request without these fields; None if it has none."""

    @property
    def prompt(self) -> str:
        """All text of the prompt in its order, without the chat template's parts. O(bytes)."""
        return "\n".join([text for text in _texts(self.route, self.body) if text is not None])

    @property
    def is_text(self) -> bool:
        """True if `prompt` is the whole prompt: an image has tokens and no characters. O(bytes)."""
        return None not in _texts(self.route, self.body)

    @property
    def streams(self) -> bool:
        """True if the answer is to be streamed."""
        return self.body.get("stream") is True

    def with_fields(self, fields: Mapping[str, Any]) -> OutgoingRequest:
        """Return the request with these fields of the body, in place of those that it has."""
        body = {**self.body, **fields}
        if self.is_rewritten or not self.body.keys().isdisjoint(fields):
            return replace(self, body=body, is_rewritten=True)
        return replace(self, body=body, added=(*self.added, *fields))

    def encode(self) -> bytes:
        """Return the body as bytes. The application's own bytes stay where nothing took their place. O(bytes)."""
        if self.is_rewritten:
            return json.dumps(self.body, separators=(",", ":")).encode()
        if not self.added:
            return self.content
        end = self.content.rindex(b"}")
        added = json.dumps({name: self.body[name] for name in self.added}).encode()
        return b"".join((memoryview(self.content)[:end], b",", added[1:-1], b"}"))


Splicer = Callable[[bytes, Mapping[Path, str]], bytes]
"""Puts new texts in their places in a JSON text, as `spliced` does."""

Processor = Callable[[OutgoingRequest], OutgoingRequest | None]
"""A step in the preparation of a request; None if it changes nothing."""


def route_of(path: str) -> PromptRoute | None:
    """Return the route of the API that a path ends with; None for any other path."""
    return next((route for end, route in _ROUTES.items() if path.rstrip("/").endswith(end)), None)


def read_call(
    method: str, path: str, headers: Mapping[str, str], content: bytes, body: object = None
) -> OutgoingRequest | None:
    """Return the request with a prompt that this is; None for any other request, and for an unreadable one.

    `body` is the content, if it is parsed already.
    """
    route = route_of(path)
    if route is None or method != "POST" or headers.get("content-encoding", "identity") != "identity":
        return None
    try:
        body = json.loads(content.decode()) if body is None else body
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or not body:
        return None
    return OutgoingRequest(route, content, body)


def prepared(
    request: OutgoingRequest, processors: Sequence[Processor], optional: Mapping[str, Processor] | None = None
) -> OutgoingRequest:
    """Return the request that all processors have changed in turn, with its body written once.

    Args:
        request: As the application made it.
        processors: The request never goes out without what these change.
        optional: Run after them, by the kind of the fields that they add and that an endpoint may refuse; then
            `plain` goes out. See `Attempt`.
    """
    for process in processors:
        request = process(request) or request
    plain, kinds = request, list[str]()
    for kind, process in (optional or {}).items():
        if (changed := process(request)) is not None:
            request = changed
            kinds.append(kind)
    content = request.encode()
    sent = replace(request, content=content, added=(), is_rewritten=False)
    return replace(sent, optional=tuple(kinds), plain=plain) if kinds else sent


# -- processors --------------------------------------------------------------------------------------------------------


def with_salt(salt: str | None, field: str = "cache_salt") -> Processor:
    """Return a processor that adds a salt, unless the request has one; None only notes the request's own.

    `field` gets the salt, such as OpenAI's `prompt_cache_key`. Requests of the Messages API have none but vLLM's
    `cache_salt`, so they get no other field.
    """

    def process(request: OutgoingRequest) -> OutgoingRequest | None:
        if request.route == "messages" and field != "cache_salt":
            return None
        if salt is not None and field not in request.body:
            request = request.with_fields({field: salt})
        return replace(request, salt=request.body.get(field))

    return process


def with_token_ids(engine: TokenIds) -> Processor:
    """Return a processor that asks an engine for the prompt's tokens."""
    field, may_stream = _TOKEN_FIELDS[engine]

    def process(request: OutgoingRequest) -> OutgoingRequest | None:
        if request.route not in _ANSWER_ROUTES or field in request.body or (request.streams and not may_stream):
            return None
        return request.with_fields({field: True})

    return process


def with_usage(request: OutgoingRequest) -> OutgoingRequest | None:
    """Have a stream report its usage. This is a processor."""
    options = request.body.get("stream_options")
    is_set = options is not None and (not isinstance(options, dict) or "include_usage" in options)
    if request.route not in _ANSWER_ROUTES or not request.streams or is_set:
        return None
    changed = request.with_fields({"stream_options": {**(options or {}), "include_usage": True}})
    return replace(changed, hides_usage=True)


def with_references(
    keep_tools: Collection[str] = (),
    check: Callable[[], object] | None = None,
    earlier: StoredHistory | None = None,
    splice: Splicer = spliced,
    rewriting: Callable[..., Rewritten] = rewrite,
    *,
    passages: bool = False,
) -> Processor:
    """Return a processor that puts references in place of repeated results of tools; see `rewrite`.

    They take the place of the texts' own bytes, as `splice` puts them there. With `earlier`, the request always has
    `rewritten`. `rewriting` returns what `rewrite` does. O(bytes).
    """

    def process(request: OutgoingRequest) -> OutgoingRequest | None:
        if request.route == "completions":
            return None
        rewritten = rewriting(
            request.route, request.body, keep_tools=keep_tools, check=check, earlier=earlier, passages=passages
        )
        if not rewritten.references:
            return None if earlier is None else replace(request, rewritten=rewritten)
        return replace(with_texts(request, rewritten, splice), rewritten=rewritten)

    return process


def with_texts(request: OutgoingRequest, rewritten: Rewritten, splice: Splicer = spliced) -> OutgoingRequest:
    """Return a request with new texts in place of old ones. O(bytes)."""
    content = splice(request.encode(), rewritten.texts)
    return replace(request, content=content, body=rewritten.body, added=(), is_rewritten=False)


def with_tools(steady: SteadyTools) -> Processor:
    """Return a processor that sends all tools in front, in their steady order."""

    def process(request: OutgoingRequest) -> OutgoingRequest | None:
        tools = list(steady.tools)
        if steady.tools is request.body.get("tools"):
            return None
        content = spliced(request.encode(), {("tools",): tools})
        return replace(request, content=content, body={**request.body, "tools": tools}, added=(), is_rewritten=False)

    return process


def with_tools_behind(steady: SteadyTools) -> Processor:
    """Return a processor that sends tools that came or went behind the history, if there are any."""

    def process(request: OutgoingRequest) -> OutgoingRequest | None:
        if steady.front is None or request.route == "completions" or not survives(request.content):
            return None
        body = steady.placed(request.route, request.body)
        return replace(
            request, body=body, is_rewritten=True, beta=INLINE_TOOLS if request.route == "messages" else None
        )

    return process


def with_marks(marker: CacheMarker, tenant: str | None, plan: ContextPlan | None = None) -> Processor:
    """Return a processor that sets cache marks.

    With a plan, its blocks become parts of the content first, so that marks can stand between them.
    """

    def process(request: OutgoingRequest) -> OutgoingRequest | None:
        if request.route == "completions":
            return None
        body = request.body if plan is None else in_parts(request.route, request.body, plan)
        marked = marker.mark(request.route, body, tenant=tenant)
        if marked.decision is None:
            return None
        is_rewritten = request.is_rewritten or marked.body != request.body
        return replace(request, body=marked.body, is_rewritten=is_rewritten, marked=marked)

    return process


# -- the prompt --------------------------------------------------------------------------------------------------------

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def _texts(route: PromptRoute, body: Mapping[str, Any]) -> Iterator[str | None]:
    """Yield the parts of the prompt; None stands for a part that is not text."""
    if body.get("tools"):  # chat templates put them first
        yield json.dumps(body["tools"])
    if route == "completions":
        prompt = body.get("prompt")
        yield from _content(prompt[:1] if isinstance(prompt, list) else prompt)
        return
    if route in ("messages", "responses"):
        yield from _content(body.get("system" if route == "messages" else "instructions"))
    messages = body.get("input" if route == "responses" else "messages")
    if isinstance(messages, str):
        yield messages
    elif isinstance(messages, list):
        for message in messages:
            if isinstance(message, dict):
                for name in ("content", "output"):
                    yield from _content(message.get(name))


def _content(content: object) -> Iterator[str | None]:
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, dict) and part.get("type") == "tool_result":
            yield from _content(part.get("content"))
        elif isinstance(part, dict):
            text = part.get("text", part.get("refusal"))
            if isinstance(text, str):
                yield text
            if not isinstance(text, str) or part.get("type", "text") not in _TEXT_PARTS:
                yield None
        elif isinstance(part, str):
            yield part
        elif part is not None:
            yield None
