"""Lengths in tokens of the short texts that the planner writes: notes, labels and references."""

from __future__ import annotations

import inspect
import logging
import operator
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sized
from functools import lru_cache
from string import ascii_lowercase, ascii_uppercase, digits, punctuation
from typing import Any, Protocol, SupportsIndex

from warmprefix.errors import check_count, log_failure
from warmprefix.forks import fork_safe_lock, in_each_process
from warmprefix.ticker import Ticker

__all__ = ["BackgroundCounter", "CheckedCounter", "TokenCounter", "as_counter", "estimated_tokens"]

_log = logging.getLogger(__name__)


class TokenCounter(Protocol):
    """Counts the tokens of a text."""

    def __call__(self, text: str, /) -> int:
        """Return the number of tokens, without those that begin or end a prompt."""
        ...


# -- the estimate ------------------------------------------------------------------------------------------------------

# Tokenizers cut a text at the borders between words, numbers and signs. A space belongs to the word or sign after it,
# but not to a digit. `bytes.translate` and `split` are five times faster than a regular expression here.
# `benchmarks/token_estimates.py` measures the errors.
_MAX_WORD = 7
"""Letters of a word that is one token."""
_TOKENS_PER_LETTER = 0.2
"""Of each further letter."""
_TOKENS_PER_DIGIT = 0.9
_FREE_TOKENS = 0.4
"""Of a number. Some tokenizers have one token per digit, others one per three digits. Notes in the tokens of the first
kind must not be underestimated by more than a tenth, so the estimate of a number is above the mean."""
_TOKENS_PER_SIGN = 0.05
"""Of each sign right after another sign."""
_TOKENS_PER_CHARACTER = (
    (r"[\u0080-\u00bf\u2000-\u2bff]", 0.9),  # typographic signs
    (r"[\u00c0-\u024f]", 1.1),  # Latin letters with marks
    (r"[\u1e00-\u1eff]", 0.3),  # the same, of Vietnamese
    (r"[\u0400-\u052f]", 0.33),  # Cyrillic
    (r"[\u0250-\u03ff\u0530-\u07ff]", 0.55),  # Greek, Arabic, Hebrew and others
    (r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]", 0.87),  # Chinese, Japanese, Korean
    (r"[\u0800-\u1dff\u2c00-\u303f\ua000-\uabff\ud7b0-\uffff]", 0.66),  # Devanagari, Thai and others
    (r"[\U00010000-\U0010ffff]", 2.0),  # emoji and others
)
_CHARACTERS = [(re.compile(pattern).findall, tokens) for pattern, tokens in _TOKENS_PER_CHARACTER]


def _table(classes: Mapping[str, str]) -> bytes:
    """Return a table for `bytes.translate` from characters to a letter for their class, and from others to a space."""
    found = {ord(character): ord(name) for name, characters in classes.items() for character in characters}
    return bytes(found.get(byte, ord(" ")) for byte in range(256))


_LETTERS = _table({"a": ascii_lowercase, "A": ascii_uppercase})
_DIGITS = _table({"0": digits})
_SIGNS = _table({".": punctuation})
_GAPS = _table({"s": " ", "n": "\t\n\v\f\r", "0": digits})


def estimated_tokens(text: str) -> int:
    """Return roughly the tokens of a short text, for common tokenizers.

    Calibrated on notes and labels; `docs/tokens.md` has the error on these and on other texts. O(len(text)).

    >>> estimated_tokens("[12] "), estimated_tokens("[Doc_1] "), estimated_tokens("Best first: 4, 1, 7.")
    (3, 5, 12)
    """
    data = text.rstrip().encode("ascii", "ignore")
    letters = data.translate(_LETTERS)
    words = letters.split()
    total = float(len(words) + letters.count(b"aA") + letters.count(b"AAa"))  # camelCase, JSONText
    for word in words:
        if len(word) > _MAX_WORD:
            total += _TOKENS_PER_LETTER * (len(word) - _MAX_WORD)
    for number in data.translate(_DIGITS).split():
        total += max(_TOKENS_PER_DIGIT * len(number) - _FREE_TOKENS, 1.0)
    signs = data.translate(_SIGNS)
    runs = len(signs.split())
    total += runs + _TOKENS_PER_SIGN * (signs.count(b".") - runs)
    gaps = data.translate(_GAPS)
    total += gaps.count(b"s0")
    if b"ss" in gaps or b"n" in gaps:
        blanks = gaps.replace(b"0", b" ").split()
        total += len(blanks) - blanks.count(b"s")
    if not text.isascii():
        for find_all, tokens in _CHARACTERS:
            total += tokens * len(find_all(text))
    return max(int(total + 0.5), 1) if text else 0


# -- tokenizers of the caller ------------------------------------------------------------------------------------------


def as_counter(tokenizer: object) -> TokenCounter:
    """Return a counter that uses a tokenizer; the estimate for None.

    >>> as_counter(str.split)("three short words")
    3

    Args:
        tokenizer: None; an object with `encode(text)`, such as a tokenizer of `transformers`, `tokenizers` or
            `tiktoken`; or a callable that returns the tokens or their number, such as a `BackgroundCounter`. Where
            `encode` has the argument `add_special_tokens`, those that begin and end a prompt are left out.

    Raises:
        TypeError: `tokenizer` is something else. The counter raises it if the tokenizer returns something else.
    """
    if tokenizer is None:
        return estimated_tokens
    if isinstance(tokenizer, BackgroundCounter):
        return tokenizer
    if not isinstance(tokenizer, str | bytes):
        # tiktoken's `encode` refuses texts that contain a special token; `encode_ordinary` counts them as text.
        for name in ("encode_ordinary", "encode"):
            encode = getattr(tokenizer, name, None)
            if callable(encode):
                return _Lengths(encode, {"add_special_tokens": False} if _takes_special_tokens(encode) else {})
        if callable(tokenizer):
            return _Lengths(tokenizer, {})
    allowed = "None, a callable or an object with encode()"
    raise TypeError(f"tokenizer must be {allowed}, got {type(tokenizer).__name__}")


def _takes_special_tokens(encode: Callable[..., object]) -> bool:
    try:
        return "add_special_tokens" in inspect.signature(encode).parameters
    except (TypeError, ValueError):  # compiled functions may have no signature
        return False


class _Lengths:
    """A counter that measures what a function returns."""

    def __init__(self, encode: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._encode = encode
        self._options = options

    def __call__(self, text: str, /) -> int:
        value = self._encode(text, **self._options)
        if isinstance(value, Sized) and not isinstance(value, str | bytes | Mapping):
            return len(value)
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise TypeError(f"tokenizer must return tokens or their number, got {type(value).__name__}")
        return operator.index(value)


_CACHED_CHARACTERS = 500
_CACHED_TEXTS = 4096
_SPECIAL_TOKENS = 4
"""More tokens than bytes that a count may have: some tokenizers always add those that begin and end a prompt."""


class CheckedCounter:
    """A counter that never fails: it returns the estimate where a tokenizer raises or returns nonsense.

    It remembers the counts of short texts, because the same labels come again and again. Bounded; thread-safe if the
    tokenizer is.
    """

    def __init__(self, counter: TokenCounter, on_failure: Callable[[], object]) -> None:
        """Create the counter.

        Args:
            counter: The tokenizer, as `as_counter` returns it.
            on_failure: Called for each text that gets the estimate because the tokenizer failed.
        """
        self._counter = counter
        self._on_failure = on_failure
        self._has_failed = False
        # A `BackgroundCounter` has its own memory, and returns the true count only later.
        self._cached_characters = -1 if isinstance(counter, BackgroundCounter) else _CACHED_CHARACTERS
        self._cached = lru_cache(_CACHED_TEXTS)(self._checked)

    def __call__(self, text: str, /) -> int:
        try:
            return self._cached(text) if len(text) <= self._cached_characters else self._checked(text)
        except BaseException as error:
            _raise_unless_failure(error)
            log_failure(_log, "a tokenizer failed, so tokens are estimated", first=not self._has_failed)
            self._has_failed = True
        self._on_failure()
        return estimated_tokens(text)

    def _checked(self, text: str) -> int:
        return _plausible(self._counter(text), text)


def _plausible(count: object, text: str) -> int:
    """Return `count` if a text may have this number of tokens; raise ValueError otherwise."""
    least = 1 if text and not text.isspace() else 0
    most = len(text.encode("utf-8", "surrogatepass")) + _SPECIAL_TOKENS
    if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= most:
        raise ValueError(f"the number of tokens must be an int from {least} to {most}, got {count!r}")
    return count


def _raise_unless_failure(error: BaseException) -> None:
    """Raise again what is no failure of a tokenizer, such as KeyboardInterrupt."""
    # The panic of a tokenizer in Rust is a BaseException.
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


# -- slow tokenizers ---------------------------------------------------------------------------------------------------

_LEARNED_CHARACTERS = 2000
_MAX_WAITING = 256
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_IDLE_SECONDS = 3600.0
_CLOSING_SECONDS = 1.0
_PRIOR_TOKENS = 50
"""Weight of the estimate in the ratio, so that one short label changes it little."""


class BackgroundCounter:
    """A counter that learns from a slow tokenizer in the background, such as the engine's `/tokenize`.

    A call never waits. A new text gets the estimate, times the ratio of true to estimated tokens so far, and a thread
    asks the tokenizer for its count. After a failure the thread pauses, first for 1 second and at last for 60. Bounded;
    thread-safe; goes on in a forked process. Call `close` to end the thread.
    """

    def __init__(self, tokenizer: object, *, max_entries: int = 4096) -> None:
        """Create the counter; the first call starts its thread.

        Args:
            tokenizer: An `EngineTokenizer` of `warmprefix.residency`, or anything else that `as_counter` accepts.
            max_entries: The number of texts whose counts are remembered; the least recently used is forgotten first.

        Raises:
            TypeError: `tokenizer` or `max_entries` has the wrong type.
            ValueError: `max_entries` is below 1.
        """
        check_count("max_entries", max_entries)
        self._counter = as_counter(tokenizer)
        self._max_entries = max_entries
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._true_tokens = self._estimated_tokens = _PRIOR_TOKENS
        self._failures = 0
        self._pause = 0.0
        self._is_closed = False
        self._lock = fork_safe_lock()
        in_each_process(self._start_process)

    def _start_process(self) -> None:
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._ticker = Ticker(self._learn, _do_nothing, "warmprefix-tokenizer")

    @property
    def failures(self) -> int:
        """Number of texts that the tokenizer did not count, or not plausibly."""
        return self._failures

    def __call__(self, text: str, /) -> int:
        """Return the learned count of a text, or else the corrected estimate."""
        with self._lock:
            count = self._counts.get(text)
            if count is not None:
                self._counts.move_to_end(text)
                return count
            is_new = (
                0 < len(text) <= _LEARNED_CHARACTERS
                and not self._is_closed
                and len(self._waiting) < _MAX_WAITING
                and text not in self._waiting
            )
            if is_new:
                self._waiting[text] = None
            ratio = self._true_tokens / self._estimated_tokens
        if is_new:
            self._wake()
        estimate = estimated_tokens(text)
        return max(int(estimate * ratio + 0.5), 1) if estimate else 0

    def close(self) -> None:
        """End the thread, and wait for it up to a second. Learned counts stay."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
        self._ticker.stop(_CLOSING_SECONDS)

    def _wake(self) -> None:
        try:
            self._ticker.start()
        except RuntimeError:  # the process can start no more threads
            with self._lock:
                self._failures += 1
            return
        if not self._pause:
            self._ticker.wake()

    def _learn(self) -> float:
        """Count all waiting texts; return the seconds until the next call."""
        while True:
            with self._lock:
                if not self._waiting:
                    return self._pause or _IDLE_SECONDS
                text = next(iter(self._waiting))
            try:
                count = _plausible(self._counter(text), text)
            except BaseException as error:
                _raise_unless_failure(error)
                log_failure(_log, "a tokenizer failed, so tokens are estimated", first=not self._failures)
                with self._lock:
                    self._failures += 1
                    self._waiting.pop(text, None)  # it may be the cause, so it waits for the next call with it
                self._pause = min(max(self._pause * 2, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
                return self._pause
            self._pause = 0.0
            with self._lock:
                self._waiting.pop(text, None)
                self._true_tokens += count
                self._estimated_tokens += estimated_tokens(text)
                self._counts[text] = count
                while len(self._counts) > self._max_entries:
                    self._counts.popitem(last=False)


def _do_nothing() -> None:
    pass
