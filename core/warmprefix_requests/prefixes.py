"""Requests for one token over the beginning of another request's prompt. No I/O.

They have the other prompt's very bytes up to where they end, so that the engine reads the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from warmprefix.plan import ContextPlan
from warmprefix_requests.outgoing import OutgoingRequest, PromptRoute

__all__ = ["ANSWER_FIELDS", "EXACT_END", "TextPath", "end_of_blocks", "one_token", "prefix_request", "visible_end"]

TextPath = tuple[str | int, ...]
"""Where a text stands in a body, such as `("messages", 0, "content")`."""

EXACT_END: Mapping[str, bool] = {"continue_final_message": True, "add_generation_prompt": False}
"""Fields of a chat request that make its prompt end with the text of the last message, without template tokens."""

ANSWER_FIELDS = frozenset(
    {
        *("stream", "stream_options", "n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens"),
        *("response_format", "text", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "stop", "stop_sequences"),
        *("return_token_ids", "return_prompt_token_ids", "min_tokens", "background", "store", "request_id"),
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "kv_transfer_params"),
    }
)
"""Fields of a request that are about its answer or about itself, not about its prompt."""

_LIMITS: Mapping[PromptRoute, Mapping[str, Any]] = {"responses": {"max_output_tokens": 1, "store": False}}
_LIMIT: Mapping[str, Any] = {"max_tokens": 1}
_PROMPTS: Mapping[PromptRoute, str] = {"responses": "input", "completions": "prompt"}
"""The field with the prompt, where it is not `messages`."""
_ELSEWHERE = ("previous_response_id", "conversation")
"""Fields whose value is a part of the prompt that the server has."""


def one_token(route: PromptRoute, body: Mapping[str, Any]) -> OutgoingRequest:
    """Return a request for one token with the fields of a body that are about its prompt.

    Fields that end a chat's prompt exactly are optional. It is not encoded yet.
    """
    kept = {name: value for name, value in body.items() if name not in ANSWER_FIELDS}
    content = repr(kept.get(_PROMPTS.get(route, "messages"))).encode("utf-8", "surrogatepass")
    plain = OutgoingRequest(route, content, {**kept, **_LIMITS.get(route, _LIMIT)}, is_rewritten=True)
    if route != "chat":
        return plain
    return replace(plain.with_fields(EXACT_END), optional=("exact end",), plain=plain)


def prefix_request(request: OutgoingRequest, path: TextPath, characters: int) -> OutgoingRequest:
    """Return a request for one token over a prompt up to this many characters of the text at a path.

    What follows the text is left out, and so are lists' later values. The first visible character behind the end is
    the prompt's last one, if the text has it: where a text is cut, its last token may change.

    Raises:
        LookupError: The body has no such path.
    """
    return one_token(request.route, _cut(request.body, path, characters))


def end_of_blocks(request: OutgoingRequest, plan: ContextPlan, blocks: int) -> tuple[TextPath, int] | None:
    """Return the text with the end of a plan's first blocks, and the characters of it up to there.

    None if the blocks do not open the prompt, if the request does not show all of the prompt in front of them, or if
    they are not found in planned order: as the plan renders them, or bare. O(text).
    """
    if not plan.opens_prompt or not 0 < blocks <= len(plan.blocks) or plan.references:
        return None
    if any(request.body.get(name) is not None for name in _ELSEWHERE):
        return None
    leaves = list(_leaves(request))
    bare = [planned.text for planned in plan.blocks[:blocks]]
    return _end(leaves, plan.paragraphs()[:blocks]) or _end(leaves, bare)


def visible_end(text: str, end: int) -> int:
    """Return the place behind the first visible character from `end` on; `end` itself without one."""
    rest = text[end:]
    visible = rest.lstrip()
    return end + len(rest) - len(visible) + 1 if visible else end


def _end(leaves: Sequence[tuple[TextPath, str]], texts: Sequence[str]) -> tuple[TextPath, int] | None:
    at = end = 0
    begin = -1
    for text in texts:
        while at < len(leaves) and (begin := leaves[at][1].find(text, end)) < 0:
            at, end = at + 1, 0
        if at == len(leaves):
            return None
        end = begin + len(text)
    return leaves[at][0], end


def _leaves(request: OutgoingRequest) -> Iterator[tuple[TextPath, str]]:
    """Yield the texts of the messages with their paths, in the prompt's order, up to the first part without a text."""
    name = _PROMPTS.get(request.route, "messages")
    for path, content in _contents((name,), request.body.get(name)):
        if isinstance(content, str):
            yield path, content
            continue
        for place, part in enumerate(content if isinstance(content, list) else ()):
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                return
            yield (*path, place, "text"), text


def _contents(path: TextPath, prompt: object) -> Iterator[tuple[TextPath, object]]:
    if not isinstance(prompt, list):
        yield path, prompt
        return
    for place, message in enumerate(prompt):
        if not isinstance(message, dict):
            yield (*path, place), message
            return  # of several prompts, only the first one is read for its plan
        for field in ("content", "output"):
            if message.get(field) is not None:
                yield (*path, place, field), message[field]


def _cut(value: Any, path: TextPath, characters: int) -> Any:
    if not path:
        return value[: visible_end(value, characters)]
    step = path[0]
    if isinstance(step, int):
        return [*value[:step], _cut(value[step], path[1:], characters)]
    return {**value, step: _cut(value[step], path[1:], characters)}
