"""A streamed answer, read piece by piece; no I/O."""

from __future__ import annotations

from typing import Any

from warmprefix_chain_of_agents.results import Usage

__all__ = ["BrokenAnswerError", "NoTextError", "Reading", "SlowAnswerError"]


_REASONING = ("reasoning", "reasoning_content")
"""Fields in which servers tell what a model thinks before it answers."""


class BrokenAnswerError(Exception):
    """An answer began and did not come to its end."""


class SlowAnswerError(TimeoutError):
    """An answer did not come to its end in time, though it was still coming: whoever gives it is alive."""


class NoTextError(Exception):
    """An answer came to its end and is no text: a tool call, a refusal, or nothing."""


class Reading:
    """Takes an answer's chunks, as the `openai` package gives them, in order.

    Fields that are missing or of another type are passed over: servers differ, and the package checks nothing.
    """

    def __init__(self) -> None:
        self.usage = Usage()
        self.started = False
        """Whether a token has come, of text or anything else, or the end. A role alone can come before the prefill."""
        self._pieces: list[str] = []
        self._instead = ""
        """What came instead of text."""
        self.finish_reason = ""
        """Why the answer ended, in the server's word; empty until it has."""

    def add(self, chunk: Any) -> str:
        """Take the next chunk and return the text that it brings, which may be none."""
        usage = getattr(chunk, "usage", None)
        if usage is not None:
            self.usage = _usage(usage)
        text = ""
        for choice in getattr(chunk, "choices", None) or ():
            delta = getattr(choice, "delta", None)
            content = getattr(delta, "content", None)
            if isinstance(content, str):
                text += content
            self._instead = self._instead or _instead_of_text(delta)
            self.started = self.started or any(getattr(delta, name, None) for name in _REASONING)
            self.finish_reason = getattr(choice, "finish_reason", None) or self.finish_reason
        if text:
            self._pieces.append(text)
        self.started = self.started or bool(text or self._instead or self.finish_reason)
        return text

    def text(self) -> str:
        """The whole answer.

        Raises:
            BrokenAnswerError: It has not come to its end.
            NoTextError: It is no text.
        """
        if not self.finish_reason:
            raise BrokenAnswerError("the stream ended before the answer did")
        text = "".join(self._pieces)
        if self._instead:
            raise NoTextError(f"the answer is no text but {self._instead}")
        if not text.strip():
            raise NoTextError(f"the answer holds no text; it ended for the reason {self.finish_reason!r}")
        return text


def _instead_of_text(delta: Any) -> str:
    refusal = getattr(delta, "refusal", None)
    if refusal:
        return f"a refusal: {refusal}"
    return "a tool call" if getattr(delta, "tool_calls", None) or getattr(delta, "function_call", None) else ""


def _usage(usage: Any) -> Usage:
    details = getattr(usage, "prompt_tokens_details", None)
    return Usage(
        _count(getattr(usage, "prompt_tokens", None)),
        _count(getattr(details, "cached_tokens", None)),
        _count(getattr(usage, "completion_tokens", None)),
    )


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
