"""A streamed chat completion, put together again.

The `openai` package has a helper for this. It copies the message for every chunk, and keeps no field that OpenAI does
not know once the first chunk is through, such as vLLM's `stop_reason`; batches are long, and engines have such fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Assembly"]

_WHOLE = frozenset({"role", "type", "id", "finish_reason", "stop_reason"})
"""Strings that come in one piece, by some servers with every chunk; all others come piece by piece."""


class Assembly:
    """Takes the chunks of one answer in order.

    >>> assembly = Assembly()
    >>> for piece, reason in (("War", None), ("m", "stop")):
    ...     assembly.add({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": reason}]})
    >>> assembly.completion()["choices"][0]["message"]
    {'role': 'assistant', 'content': 'Warm'}
    """

    def __init__(self) -> None:
        self._frame: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self.started = False
        """Whether a token has come: text, a tool call, or the end. A role alone can come before the prefill."""

    @property
    def complete(self) -> bool:
        """Whether the answer has come to its end."""
        return bool(self._choices) and all(choice.get("finish_reason") for choice in self._choices.values())

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take the next chunk, as JSON."""
        for name, value in chunk.items():
            if name != "choices" and (value is not None or name not in self._frame):
                self._frame[name] = value
        for piece in chunk.get("choices") or ():
            delta = piece.get("delta") or {}
            known = self._choices.setdefault(piece.get("index", 0), {"message": {}})
            _merge(known["message"], delta)
            _merge(known, {name: value for name, value in piece.items() if name not in ("index", "delta")})
            self.started = (
                self.started
                or bool(piece.get("finish_reason"))
                or any(value for name, value in delta.items() if name != "role")
            )

    def completion(self) -> dict[str, Any]:
        """The answer as it would have come in one piece."""
        choices = [
            {
                "index": index,
                **choice,
                "message": _message(choice["message"]),
                "finish_reason": choice.get("finish_reason"),
            }
            for index, choice in sorted(self._choices.items())
        ]
        return {"usage": None, **self._frame, "object": "chat.completion", "choices": choices}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    whole = {"role": "assistant", "content": None, **message}
    if whole.get("tool_calls"):
        whole["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in whole["tool_calls"]]
    return whole


def _merge(into: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name, value in delta.items():
        known = into.get(name)
        if known is None:
            into[name] = _copy(value)
        elif value is None:
            continue
        elif isinstance(value, str) and isinstance(known, str) and name not in _WHOLE:
            into[name] = known + value
        elif isinstance(value, dict) and isinstance(known, dict):
            _merge(known, value)
        elif isinstance(value, list) and isinstance(known, list):
            _extend(known, value)
        else:
            into[name] = value


def _extend(known: list[Any], items: list[Any]) -> None:
    """Items with an index, such as tool calls, go on where that index began; all others follow."""
    for item in items:
        index = item.get("index") if isinstance(item, dict) else None
        begun = None if index is None else next((entry for entry in known if entry.get("index") == index), None)
        if begun is None:
            known.append(_copy(item))
        else:
            _merge(begun, item)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copy(item) for name, item in value.items()}
    if isinstance(value, list):
        whole: list[Any] = []
        _extend(whole, value)
        return whole
    return value
