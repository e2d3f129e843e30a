"""The primes of one run of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from warmprefix.batch import PlannedPrime, PlannedRequest
from warmprefix.primes import prime_request, refuses_exact_end, without_exact_end
from warmprefix_openai.asking import CallFailedError, ChatAsker, ask_with_retries
from warmprefix_openai.batch_runner.journal import Messages
from warmprefix_openai.call import chat_options
from warmprefix_openai.retry import Retries

__all__ = ["BatchPrimer"]

_MAX_FAILURES_IN_A_ROW = 3
"""After these a run sends no more primes."""

_ANSWER_OPTIONS = (
    "n",
    "max_completion_tokens",
    "response_format",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "stop",
)
"""Options of a request that are about its answer, not about its prompt."""


class BatchPrimer:
    """Sends primes with the options of the batch's requests. A failed prime is counted and costs nothing else."""

    def __init__(
        self, chat: ChatAsker, model: str, options: Mapping[str, Any], messages: Messages, counts: Counter[str]
    ) -> None:
        self._chat = chat
        self._model = model
        self._options = {name: value for name, value in options.items() if name not in _ANSWER_OPTIONS}
        self._messages = messages
        self._counts = counts
        self._due: dict[str, list[PlannedPrime]] = {}
        self._exact = True
        self._failures_in_a_row = 0

    def expect(self, primes: Iterable[PlannedPrime]) -> None:
        """Add the primes of a run."""
        for prime in primes:
            self._due.setdefault(prime.before.id, []).append(prime)

    async def send_before(self, planned: PlannedRequest) -> None:
        """Send the primes of this request one after the other, shortest first."""
        for prime in self._due.pop(planned.id, ()):
            await self._send(prime)

    async def _send(self, prime: PlannedPrime) -> None:
        messages = prime.messages(self._messages)
        if messages is None or self._failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
            self._counts["skipped"] += 1
            return
        made = prime_request(self._model, messages, prime.before.cache_salt, exact=self._exact)
        error = await self._ask(made)
        if error is not None and refuses_exact_end(made, error):
            self._exact = False
            error = await self._ask(without_exact_end(made))
        self._failures_in_a_row = 0 if error is None else self._failures_in_a_row + 1
        if error is None and not self._exact:
            self._counts["inexact"] += 1
        self._counts["sent" if error is None else "failed"] += 1

    async def _ask(self, made: Mapping[str, Any]) -> Exception | None:
        extra = {**(self._options.get("extra_body") or {}), **made.get("extra_body", {})}
        given = {**self._options, "max_tokens": made["max_tokens"], "extra_body": extra}
        options = chat_options(self._model, made["messages"], given, None)
        try:
            await ask_with_retries(lambda: self._chat.ask(options), Retries(0))
        except CallFailedError as failed:
            return failed.error
        return None
