"""How one replica is asked in a run of a batch: for answers, and for the primes in front of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from warmprefix.batch import PlannedPrime, PlannedRequest
from warmprefix_openai.asking import CallFailedError, ChatAsker, ask_with_retries
from warmprefix_openai.batch_runner.journal import BatchResult, Messages
from warmprefix_openai.completion import chat_options
from warmprefix_openai.primer import ANSWER_FIELDS, cut_chat, prime_of
from warmprefix_openai.retry import Retries, status_of
from warmprefix_requests import FieldRefusals, OutgoingRequest

__all__ = ["Asker"]

_MAX_FAILURES_IN_A_ROW = 3
"""After these a run sends no more primes."""


class Asker:
    """Asks one model through one client, all requests with the same options.

    Primes have the options that are about a prompt. A failed prime is counted and costs nothing else.
    """

    def __init__(
        self,
        chat: ChatAsker,
        model: str,
        options: Mapping[str, Any],
        messages: Messages,
        retries: Retries,
        prime_counts: Counter[str],
    ) -> None:
        self._chat = chat
        self._model = model
        self._options = options
        self._prime_options = {name: value for name, value in options.items() if name not in ANSWER_FIELDS}
        self._messages = messages
        self._retries = retries
        self._counts = prime_counts
        self._due: dict[str, list[PlannedPrime]] = {}
        self._refusals = FieldRefusals()
        self._failures_in_a_row = 0

    async def ask(
        self, planned: PlannedRequest, prefilled: Callable[[], object]
    ) -> tuple[BatchResult, Exception | None]:
        """Ask until there is an answer or no hope; return the result and the last attempt's failure.

        `prefilled` is called at the first token. A failure that is not about the call, such as an option that the
        client does not have, is raised as it is.
        """
        options = chat_options(self._model, self._messages(planned), self._options, planned.cache_salt)
        try:
            answer, attempts = await ask_with_retries(
                lambda: self._chat.ask(options, on_start=prefilled), self._retries
            )
        except CallFailedError as failed:
            error = failed.error
            kind = "TimeoutError" if isinstance(error, TimeoutError) else type(error).__name__
            return BatchResult(planned, None, f"{kind}: {error}", failed.attempts, None), error
        return BatchResult(planned, answer.completion, None, attempts, answer.ttft), None

    def expect(self, primes: Iterable[PlannedPrime]) -> None:
        """Add the primes of a run."""
        for prime in primes:
            self._due.setdefault(prime.before.id, []).append(prime)

    async def prime(self, planned: PlannedRequest) -> None:
        """Send the primes of this request one after the other, shortest first."""
        for prime in self._due.pop(planned.id, ()):
            await self._send_prime(prime)

    async def _send_prime(self, prime: PlannedPrime) -> None:
        messages = cut_chat(self._messages(prime.before), prime.shared_text)
        if messages is None or self._failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
            self._counts["skipped"] += 1
            return
        salt = prime.before.cache_salt
        made = prime_of({} if salt is None else {"cache_salt": salt}, messages)
        attempt = self._refusals.attempt(made, "")
        due: OutgoingRequest | None = attempt.request
        error: Exception | None = None
        while due is not None:
            error = await self._ask_prime(due.body)
            due = attempt.answered(200 if error is None else status_of(error) or 500)
        self._failures_in_a_row = 0 if error is None else self._failures_in_a_row + 1
        if error is None and not attempt.request.optional:
            self._counts["inexact"] += 1
        self._counts["sent" if error is None else "failed"] += 1

    async def _ask_prime(self, body: Mapping[str, Any]) -> Exception | None:
        fields = dict(body)
        messages, max_tokens = fields.pop("messages"), fields.pop("max_tokens")
        extra = {**(self._prime_options.get("extra_body") or {}), **fields}
        given = {**self._prime_options, "max_tokens": max_tokens, "extra_body": extra}
        try:
            options = chat_options(self._model, messages, given, None)
            await ask_with_retries(lambda: self._chat.ask(options), Retries(0))
        except CallFailedError as failed:
            return failed.error
        return None
