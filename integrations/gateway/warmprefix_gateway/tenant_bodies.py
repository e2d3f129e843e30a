"""Bodies of tenants: read strictly, and refused where an engine could read something else. Pure: no I/O."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from warmprefix_requests.beginnings import separators
from warmprefix_requests.splicing import distinct, refuse_constant

__all__ = [
    "CLOSED_FIELDS",
    "BodyRefusedError",
    "check_parts",
    "check_type",
    "read_strictly",
    "refuse_fields",
    "refused_response_id",
]

_MAX_PARTS = 2_000_000
"""The parser of JSON stops all threads: for half a second with this number, for five seconds with 64 MiB of lists."""

_FIELDS = {
    **dict.fromkeys(("extra_key", "kv_transfer_params", "ec_transfer_params"), "chooses a cache"),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"), "chooses a cache"),
    **dict.fromkeys(("disaggregated_params", "ngram_corpus_id", "multi_modal_uuids"), "chooses a cache"),
    **dict.fromkeys(("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"), "chooses a replica"),
    **dict.fromkeys(("id_slot", "slot_id"), "chooses a slot"),
    **dict.fromkeys(("session_id", "session_params"), "continues a session of the engine"),
    **dict.fromkeys(("previous_response_id", "conversation", "container"), "continues what the API has stored"),
    **dict.fromkeys(("rid", "request_id"), "chooses the engine's own id of the request"),
    **dict.fromkeys(("input_ids", "input_embeds", "prompt_embeds", "prompt_token_ids"), "replaces the prompt"),
    **dict.fromkeys(("lora_path", "lora_request"), "loads an adapter"),
    **dict.fromkeys(("custom_logit_processor", "custom_params", "vllm_xargs"), "reaches the engine's extensions"),
    **dict.fromkeys(("nvext", "extra_body", "extra_headers"), "holds further fields"),
    "priority": "takes precedence over other tenants",
}
"""Fields of vLLM, SGLang, llama.cpp, Dynamo and OpenAI that reach beyond a tenant's own requests."""


def _bare(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


_SPELLINGS = {_bare(name): name for name in (*_FIELDS, "cache_salt", "prompt_cache_key")}

_IN_PARTS = {
    **dict.fromkeys(("uuid", "content_hash"), "names an image in the engine's cache"),
    **dict.fromkeys(("file_id", "file_ids", "vector_store_ids"), "names what the account has stored"),
    **dict.fromkeys(("container", "container_id"), "names what the account has stored"),
}
"""The same in parts of messages, and in tools."""

CLOSED_FIELDS = frozenset({*_FIELDS, *_IN_PARTS, "item_reference"})
"""Fields that tenants may send only if the operator allows it."""


class BodyRefusedError(Exception):
    """A body is not passed on; the message is for the client.

    Args:
        status: Status of the answer.
        reason: What the metrics count.
        message: What is wrong, without a text of the body.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


def check_type(headers: Mapping[str, str]) -> None:
    """Check that a body claims to be JSON in UTF-8.

    Raises:
        BodyRefusedError: It claims to be something else.
    """
    kind, _, options = headers.get("content-type", "application/json").lower().partition(";")
    charset = options.partition("charset=")[2].strip(' "')
    if kind.strip() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise BodyRefusedError(415, "body", "the body must be JSON in UTF-8, with content type application/json")


def check_parts(content: bytes, known: int = 0) -> None:
    """Check that a body is read quickly enough that other requests do not have to wait. O(bytes).

    `known` is the number of parts in front of the content.

    Raises:
        BodyRefusedError: It has too many.
    """
    if known + separators(content) > _MAX_PARTS:
        raise BodyRefusedError(413, "size", f"the body has more than {_MAX_PARTS} lists, objects and commas")


def read_strictly(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a body that all parsers read in the same way. O(bytes).

    Raises:
        BodyRefusedError: It is something else.
    """
    check_parts(content)
    try:
        text = content.decode()
        body = json.loads(text, object_pairs_hook=distinct, parse_constant=refuse_constant)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(body, ensure_ascii=False).encode()  # fails for one half of a surrogate pair
    except (ValueError, RecursionError) as error:
        message = "the body must be a JSON object in UTF-8, without a repeated key, NaN or half of a surrogate pair"
        raise BodyRefusedError(400, "body", message) from error
    if not isinstance(body, dict) or not body:
        raise BodyRefusedError(400, "body", "the body must be a JSON object with a field or more")
    return body


def refuse_fields(body: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Check that a body stays within its tenant's own requests. O(parts of messages).

    Raises:
        BodyRefusedError: A field reaches beyond them.
    """
    for key, value in body.items():
        name = _SPELLINGS.get(_bare(key))
        if name is None or value is None or name in allowed:
            continue
        if key != name:  # routers in other languages read names without regard to case, or in camel case
            raise BodyRefusedError(400, "field", f"{name} has another spelling")
        if name in _FIELDS:
            raise _refused(name, _FIELDS[name])
    for part in _parts(body):
        for name, why in _IN_PARTS.items():
            if part.get(name) not in (None, []) and not isinstance(part[name], dict) and name not in allowed:
                raise _refused(name, why)
        if part.get("type") == "item_reference" and "item_reference" not in allowed:
            raise _refused("item_reference", "continues what the API has stored")


def refused_response_id() -> BodyRefusedError:
    """Return the refusal of a response id that is not known to be the tenant's own."""
    return BodyRefusedError(400, "field", "previous_response_id names no response that is known here")


def _refused(name: str, why: str) -> BodyRefusedError:
    return BodyRefusedError(400, "field", f"{name} {why}, so it is not open to tenants")


def _parts(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield messages, items, tools and parts of contents, and the objects in these parts that name their sources.

    Schemas of tools and arguments of calls are their owners' own: their names are not looked at.
    """
    waiting = [body.get(name) for name in _PLACES]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            yield value
            waiting += [value[name] for name in _SOURCES if name in value]
            if isinstance(value.get("variables"), dict):  # of a stored prompt, by their names
                waiting += value["variables"].values()


_PLACES = (
    *("messages", "input", "system", "tools", "prompt", "query", "queries", "documents", "items"),
    *("text_1", "text_2", "data_1", "data_2"),
)
"""Fields with parts: of prompts, and of what engines embed and rank."""
_SOURCES = (
    *("content", "output", "source", "file", "container", "environment"),
    *("image_url", "video_url", "audio_url", "input_audio", "audio", "input_image_mask"),
)
