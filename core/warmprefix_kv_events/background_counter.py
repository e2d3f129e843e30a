"""A token counter that learns from a slow tokenizer in the background."""

from __future__ import annotations

import logging
from collections import OrderedDict

from warmprefix.errors import check_count, log_failure
from warmprefix.forks import fork_safe_lock, in_each_process
from warmprefix.ticker import Ticker
from warmprefix.tokens import as_counter, estimated_tokens, plausible_count, raise_unless_failure

__all__ = ["BackgroundCounter"]

_log = logging.getLogger("warmprefix.tokens")

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

    remembers = True
    """It has its own memory, and returns the true count only later."""

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
                count = plausible_count(self._counter(text), text)
            except BaseException as error:
                raise_unless_failure(error)
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
