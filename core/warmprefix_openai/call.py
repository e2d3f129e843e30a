"""Calls with a prompt: how they are made, how they are recognised, and what is added to them. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from warmprefix.plan import ContextPlan

__all__ = [
    "Additions",
    "PromptCall",
    "TokenIds",
    "block_ends",
    "chat_options",
    "completed",
    "holds_blocks",
    "in_parts",
    "read_call",
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


def chat_options(
    model: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], cache_salt: str | None
) -> dict[str, Any]:
    """Return the arguments of `chat.completions.create` for a streamed chat that reports its usage."""
    made = {"stream_options": {"include_usage": True}, **options}
    made |= {"model": model, "messages": list(messages), "stream": True}
    if cache_salt is not None:
        made["extra_body"] = {**(options.get("extra_body") or {}), "cache_salt": cache_salt}
    return made


class PromptCall(NamedTuple):
    """A request with a prompt, as it goes out."""

    route: PromptRoute
    """The route of the API."""
    content: bytes
    """The body as bytes."""
    body: Mapping[str, Any]
    """`content`, parsed."""

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


def read_call(
    method: str, path: str, headers: Mapping[str, str], content: bytes, body: object = None
) -> PromptCall | None:
    """Return the call that a request makes; None for any other request, and for an unreadable one.

    `body` is the content, if it is parsed already.
    """
    route: PromptRoute | None = next((route for end, route in _ROUTES.items() if path.rstrip("/").endswith(end)), None)
    if route is None or method != "POST" or headers.get("content-encoding", "identity") != "identity":
        return None
    try:
        body = json.loads(content.decode()) if body is None else body
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or not body:
        return None
    return PromptCall(route, content, body)


class Additions(NamedTuple):
    """A call's body with the fields that were added to it."""

    content: bytes
    """The body to send."""
    hide_usage: bool
    """True if the application did not ask for the usage that the engine will now report."""
    cache_salt: object
    """The salt in the body; None without one."""


def completed(
    call: PromptCall,
    *,
    cache_salt: str | None,
    stream_usage: bool,
    token_ids: TokenIds | None,
    salt_field: str = "cache_salt",
) -> Additions:
    """Add the fields that the call does not set itself. Its own bytes stay, except its stream options.

    `salt_field` is the field that gets the salt, such as OpenAI's `prompt_cache_key`. Calls of the Messages API have
    none but vLLM's `cache_salt`, so they get no other field.
    """
    body, added = call.body, dict[str, Any]()
    if call.route == "messages" and salt_field != "cache_salt":
        return Additions(call.content, False, None)
    if cache_salt is not None and salt_field not in body:
        added[salt_field] = cache_salt
    salt_sent = added.get(salt_field, body.get(salt_field))
    has_options = call.route in ("chat", "completions")
    if has_options and token_ids is not None:
        name, may_stream = _TOKEN_FIELDS[token_ids]
        if name not in body and (may_stream or not call.streams):
            added[name] = True
    hide_usage = False
    if has_options and call.streams and stream_usage:  # other streams always have the usage
        options = body.get("stream_options")
        hide_usage = options is None or (isinstance(options, dict) and "include_usage" not in options)
        if hide_usage:
            added["stream_options"] = {**(options or {}), "include_usage": True}
    if not added:
        return Additions(call.content, False, salt_sent)
    if any(name in body for name in added):
        return Additions(json.dumps({**body, **added}).encode(), hide_usage, salt_sent)
    end = call.content.rindex(b"}")
    content = b"".join((memoryview(call.content)[:end], b",", json.dumps(added).encode()[1:-1], b"}"))
    return Additions(content, hide_usage, salt_sent)


def holds_blocks(prompt: str, plan: ContextPlan) -> bool:
    """Return True if every block of the plan is in the prompt, in full or as its reference."""
    return all(
        paragraph in prompt or planned.render() in prompt or planned.text in prompt
        for planned, paragraph in zip(plan.blocks, plan.paragraphs(), strict=True)
    )


def block_ends(prompt: str, plan: ContextPlan) -> list[float] | None:
    """Return for each planned block the share of the prompt's characters up to its end; None if one is missing.

    The blocks must follow one another in planned order, labelled as the plan renders them, or bare.
    """
    ends = _block_ends(prompt, plan)
    if ends is None:
        return None
    return [end / len(prompt) for end in ends] if prompt else []


def in_parts(route: PromptRoute, body: Mapping[str, Any], plan: ContextPlan) -> Mapping[str, Any]:
    """Return the body with its context in content parts, one per block, so that a cache mark can stand between them.

    The texts of the parts join to the same text. Returns the body itself if no text of a user holds all blocks in
    planned order, or if the context is in parts already.
    """
    name = "input" if route == "responses" else "messages"
    given = body.get(name)
    messages: list[Any] = given if isinstance(given, list) else [{"role": "user", "content": given}]
    kind = "input_text" if route == "responses" else "text"
    for at, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) and message.get("role") == "user" else None
        if not isinstance(content, str):
            continue
        ends = _block_ends(content, plan)
        if ends:
            cuts = [0, *ends, len(content)]
            texts = [content[start:end] for start, end in pairwise(cuts) if start < end]
            parts = [{"type": kind, "text": text} for text in texts]
            return {**body, name: [*messages[:at], {**message, "content": parts}, *messages[at + 1 :]]}
    return body


def _block_ends(prompt: str, plan: ContextPlan) -> list[int] | None:
    each = [planned.render() for planned in plan.blocks]
    found = (
        _ends(prompt, texts, from_start=plan.opens_prompt)
        for texts in (plan.paragraphs(), each, [planned.text for planned in plan.blocks])
    )
    return next((ends for ends in found if ends is not None), None)


def _ends(prompt: str, texts: Sequence[str], *, from_start: bool) -> list[int] | None:
    """Return the end of each text in the prompt; None if one is missing.

    A context at the end of a prompt is searched from there: the history in front may hold the same texts.
    """
    ends = []
    begin = end = 0 if from_start else len(prompt)
    for text in texts if from_start else reversed(texts):
        begin = prompt.find(text, end) if from_start else prompt.rfind(text, 0, begin)
        if begin < 0:
            return None
        end = begin + len(text)
        ends.append(end)
    return ends if from_start else ends[::-1]


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
