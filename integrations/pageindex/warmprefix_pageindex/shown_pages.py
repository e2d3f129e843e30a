"""A filter for agents that read documents: pages and trees that the prompt shows already become references. No I/O."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["pages_once"]

_LEAST_CHARACTERS = 256
"""A shorter page stays: the reference would save nothing."""

_TREE = "[Word for word the structure of this document in your instructions.]"


def pages_once(data: Any) -> Any:
    """Return the model's input with each page once; a `call_model_input_filter` of the OpenAI Agents SDK.

        run_config = RunConfig(call_model_input_filter=pages_once)
        result = Runner.run_sync(Agent(**client.openai_agent_config()), messages, run_config=run_config)

    A page that an earlier result of `get_page_content` shows becomes a reference to that call, and a tree that stands
    in the instructions one to them. The first occurrence keeps its bytes. Only the input decides, so edited, cut and
    forked histories need no care, and the input of a conversation that grows keeps its beginning. The agent's own
    history keeps all pages. O(bytes).

    Args:
        data: `CallModelData` of a call.

    Returns:
        Its `ModelInputData`: the given one if nothing comes again.
    """
    given = data.model_data
    shown: dict[tuple[object, ...], tuple[int, str]] = {}
    calls: dict[object, str] = {}
    changed: list[Any] | None = None
    for number, item in enumerate(given.input):
        if not isinstance(item, Mapping):
            continue
        if item.get("type") == "function_call":
            calls[item.get("call_id")] = f"{item.get('name')}({item.get('arguments')})"
        elif item.get("type") == "function_call_output":
            text = _text_of(item.get("output"))
            call = calls.get(item.get("call_id"))
            sent = None
            if text is not None and call is not None:
                sent = _sent(text, number, call, shown, given.instructions or "")
            if sent is not None and sent != text:
                changed = list(given.input) if changed is None else changed
                changed[number] = {**item, "output": _with_text(item["output"], sent)}
    return given if changed is None else dataclasses.replace(given, input=changed)


def _sent(
    text: str, number: int, call: str, shown: dict[tuple[object, ...], tuple[int, str]], instructions: str
) -> str:
    """Return what to send of a result, and remember the pages that it shows first."""
    if call.startswith("get_document_structure(") and len(text) >= _LEAST_CHARACTERS and text in instructions:
        return _TREE
    result = _json_object(text) if call.startswith("get_page_content(") else {}
    pages = result.get("content")
    if not isinstance(pages, list):
        return text
    sent = []
    for page in pages:
        body = page.get("text") if isinstance(page, dict) else None
        if isinstance(body, str) and len(body) >= _LEAST_CHARACTERS:
            place, first = shown.setdefault((result.get("doc_name"), _place(page), body), (number, call))
            if place < number:
                page = {**page, "text": f"[Word for word this page in the result of the earlier call {first}.]"}
        sent.append(page)
    return _dumped({**result, "content": sent}) if sent != pages else text


def _place(page: Mapping[str, object]) -> str:
    """Return all but the text of a page's entry."""
    return _dumped({name: value for name, value in page.items() if name != "text"})


def _json_object(text: str) -> dict[str, Any]:
    """Return the object that a text is, if writing it again gives the same text."""
    try:
        found = json.loads(text)
        return found if isinstance(found, dict) and _dumped(found) == text else {}
    except (ValueError, RecursionError):
        return {}


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text_of(output: object) -> str | None:
    """Return the text of a result that is one text, or one part with a text."""
    if isinstance(output, list) and len(output) == 1 and isinstance(output[0], Mapping):
        output = output[0].get("text")
    return output if isinstance(output, str) else None


def _with_text(output: object, text: str) -> object:
    return [{**output[0], "text": text}] if isinstance(output, list) else text
