"""Streamed chat completions, put together again without I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from warmprefix.errors import WarmprefixError
from warmprefix_openai.answer import AnswerFacts, EventSplitter
from warmprefix_requests.usage import TokenUsage, reported_usage, token_usage

__all__ = [
    "AnswerError",
    "Assembly",
    "BrokenStreamError",
    "ChatAnswer",
    "ChatFields",
    "ChatReader",
    "EngineFailedError",
    "chat_options",
]

_WHOLE = frozenset({"role", "type", "id", "finish_reason", "stop_reason"})
"""Strings that come in one piece, from some servers with every event; all others come piece by piece."""


def chat_options(
    model: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], cache_salt: str | None
) -> dict[str, Any]:
    """Return the arguments of `chat.completions.create` for a streamed chat that reports its usage."""
    made = {"stream_options": {"include_usage": True}, **options}
    made |= {"model": model, "messages": list(messages), "stream": True}
    if cache_salt is not None:
        made["extra_body"] = {**(options.get("extra_body") or {}), "cache_salt": cache_salt}
    return made


class AnswerError(WarmprefixError):
    """An answer began and is of no use."""


class BrokenStreamError(AnswerError):
    """A stream broke, or ended before its answer was complete."""


class EngineFailedError(AnswerError):
    """The engine reported an error within the stream; `code` is the status it would have answered with."""

    def __init__(self, error: object) -> None:
        reported = error if isinstance(error, dict) else {"message": error}
        super().__init__(reported.get("message"))
        self.code = reported.get("code")


class ChatFields:
    """The fields of a chat completion's first choice and of its usage; None where the engine reported none."""

    __slots__ = ()

    completion: Mapping[str, Any] | None

    @property
    def text(self) -> str | None:
        """The text; None without an answer, or if it has no text, as with tool calls."""
        text = self.message.get("content")
        return text if isinstance(text, str) else None

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls."""
        return self.message.get("tool_calls") or ()

    @property
    def finish_reason(self) -> str | None:
        """The engine's reason for ending the answer."""
        reason: str | None = self._choice.get("finish_reason")
        return reason

    @property
    def prompt_tokens(self) -> int | None:
        """Number of tokens of the prompt."""
        return self.tokens.prompt_tokens

    @property
    def completion_tokens(self) -> int | None:
        """Number of tokens of the answer."""
        return self.tokens.completion_tokens

    @property
    def cached_tokens(self) -> int | None:
        """Number of tokens of the prompt that the engine's prefix cache held."""
        return self.tokens.cached_tokens

    @property
    def tokens(self) -> TokenUsage:
        """All counts of the usage."""
        return token_usage(reported_usage(self.completion))

    @property
    def message(self) -> Mapping[str, Any]:
        """The message; empty without an answer."""
        return self._choice.get("message") or {}

    @property
    def _choice(self) -> Mapping[str, Any]:
        choices = (self.completion or {}).get("choices")
        return choices[0] if choices else {}


@dataclass(frozen=True, slots=True)
class ChatAnswer(ChatFields):
    """A chat completion that was streamed."""

    # Narrower than in the base class, which is safe because the dataclass is frozen.
    completion: Mapping[str, Any] = field(repr=False)  # pyright: ignore[reportIncompatibleVariableOverride]
    """The chat completion as JSON, as it would have come without streaming."""
    ttft: float | None
    """Seconds from sending the request to the first token."""


class ChatReader:
    """Reader of one streamed chat completion."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start reading the answer to a request that is sent now."""
        self.facts = AnswerFacts(clock=clock)
        self.latest: float | None = None
        """Time on `clock` of the latest event, from the first token on."""
        self._clock = clock
        self._events = EventSplitter()
        self._assembly = Assembly()

    def feed(self, data: bytes) -> str:
        """Read a piece of the stream; return the text that it adds to the first choice.

        Raises:
            BrokenStreamError: The stream holds something else than JSON objects.
            EngineFailedError: The engine reported an error.
        """
        text = "".join([self._read(event) for event in self._events.feed(data)])
        if self.facts.started:
            self.latest = self._clock()
        return text

    def answer(self) -> ChatAnswer:
        """Return the answer, at the end of the stream.

        Raises:
            BrokenStreamError: The answer is not complete.
        """
        self._read(self._events.rest())
        # Some engines end a stream by `[DONE]` alone.
        if not self._assembly.complete and not (self.facts.ended and self.facts.started):
            raise BrokenStreamError("the stream ended before the answer did")
        completion = self._assembly.completion()
        return ChatAnswer({**completion, "usage": self.facts.usage or completion["usage"]}, self.facts.ttft)

    def _read(self, event: bytes) -> str:
        if self.facts.ended:  # bytes after the end
            return ""
        try:
            chunk = self.facts.read_event(event)
        except ValueError as error:
            raise BrokenStreamError(f"the stream broke: {type(error).__name__}: {error}") from error
        if self.facts.failed:
            raise EngineFailedError((chunk or {}).get("error") or chunk)
        return "" if chunk is None else self._assembly.add(chunk)


class Assembly:
    """Chat completion under assembly from the events of a stream, in their order.

    The `openai` package has a helper for this. It copies the message for every event, and after the first event it
    drops fields that OpenAI does not define, such as vLLM's `stop_reason`.

    >>> assembly = Assembly()
    >>> for piece, reason in (("War", None), ("m", "stop")):
    ...     assembly.add({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": reason}]})
    'War'
    'm'
    >>> assembly.completion()["choices"][0]["message"]
    {'role': 'assistant', 'content': 'Warm'}
    """

    def __init__(self) -> None:
        self._frame: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    @property
    def complete(self) -> bool:
        """True if every choice has a finish reason."""
        return bool(self._choices) and all(choice.get("finish_reason") for choice in self._choices.values())

    def add(self, chunk: Mapping[str, Any]) -> str:
        """Add the next event; return the text that it adds to the first choice. Skips fields of another type."""
        text = ""
        for name, value in chunk.items():
            if name != "choices" and (value is not None or name not in self._frame):
                self._frame[name] = value
        choices = chunk.get("choices")
        for piece in choices if isinstance(choices, list) else ():
            if not isinstance(piece, dict):
                continue
            index = piece.get("index") or 0
            if type(index) is not int:
                continue
            delta = piece.get("delta")
            choice = self._choices.setdefault(index, {"message": {}})
            if isinstance(delta, dict):
                _merge(choice["message"], delta)
                if index == 0 and isinstance(delta.get("content"), str):
                    text += delta["content"]
            _merge(choice, {name: value for name, value in piece.items() if name not in ("index", "delta", "message")})
        return text

    def completion(self) -> dict[str, Any]:
        """Return the answer as it would have come in one piece."""
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
    calls = whole.get("tool_calls")
    if isinstance(calls, list):
        whole["tool_calls"] = [{**call} for call in calls if isinstance(call, dict)]
        for call in whole["tool_calls"]:
            call.pop("index", None)
    return whole


def _merge(into: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name, value in delta.items():
        before = into.get(name)
        if before is None:
            into[name] = _copy(value)
        elif value is None:
            continue
        elif isinstance(value, str) and isinstance(before, str) and name not in _WHOLE:
            into[name] = before + value
        elif isinstance(value, dict) and isinstance(before, dict):
            _merge(before, value)
        elif isinstance(value, list) and isinstance(before, list):
            _extend(before, value)
        else:
            into[name] = value


def _extend(into: list[Any], items: list[Any]) -> None:
    """Continue the items with an index, such as tool calls, at that index; append all others."""
    for item in items:
        index = item.get("index") if isinstance(item, dict) else None
        same = (entry for entry in into if isinstance(entry, dict) and entry.get("index") == index)
        begun = None if index is None else next(same, None)
        if begun is None:
            into.append(_copy(item))
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
