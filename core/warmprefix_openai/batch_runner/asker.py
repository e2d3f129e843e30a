"""How one replica is asked in a run of a batch: for answers, and for the primes in front of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from warmprefix.batch import BatchPlan, PlannedPrime, PlannedRequest
from warmprefix.cache_profiles import Checkpoints
from warmprefix_openai.asking import CallFailedError, ChatAsker, ask_with_retries
from warmprefix_openai.batch_runner.journal import BatchResult, Messages
from warmprefix_openai.completion import ChatAnswer, chat_options
from warmprefix_openai.primer import PrimeLengths, cut_chat, shortened
from warmprefix_openai.retry import Retries, status_of
from warmprefix_requests import FieldRefusals, OutgoingRequest
from warmprefix_requests.prefixes import ANSWER_FIELDS, one_token

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
        self._lengths = PrimeLengths()
        self._checkpoints: Checkpoints | None = None

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

    def expect(self, part: BatchPlan) -> None:
        """Add the primes of a part of the run."""
        self._checkpoints = part.checkpoints
        for prime in part.primes:
            self._due.setdefault(prime.before.id, []).append(prime)

    async def prime(self, planned: PlannedRequest) -> None:
        """Send the primes of this request one after the other, shortest first."""
        for prime in self._due.pop(planned.id, ()):
            await self._send_prime(prime)

    async def _send_prime(self, prime: PlannedPrime) -> None:
        chat, checkpoints = cut_chat(self._messages(prime.before), prime.shared_text), self._checkpoints
        if chat is None or checkpoints is None or self._failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
            self._counts["skipped"] += 1
            return
        cut, salt = self._lengths.cut(chat, checkpoints), prime.before.cache_salt
        salted = {} if salt is None else {"cache_salt": salt}
        made = one_token("chat", {**salted, "messages": shortened(chat, cut)})
        attempt = self._refusals.attempt(made, "")
        due: OutgoingRequest | None = attempt.request
        answer: ChatAnswer | Exception | None = None
        while due is not None:
            answer = await self._ask_prime(due.body)
            due = attempt.answered(status_of(answer) or 500 if isinstance(answer, Exception) else 200)
        if not isinstance(answer, ChatAnswer):
            self._failures_in_a_row += 1
            self._counts["failed"] += 1
            return
        self._failures_in_a_row = 0
        self._counts.update(("sent",) if attempt.request.optional else ("sent", "inexact"))
        if answer.prompt_tokens:
            self._lengths.add(cut.estimated, answer.prompt_tokens)
            self._counts["computed_tokens"] += answer.prompt_tokens - (answer.cached_tokens or 0)

    async def _ask_prime(self, body: Mapping[str, Any]) -> ChatAnswer | Exception:
        fields = dict(body)
        messages, max_tokens = fields.pop("messages"), fields.pop("max_tokens")
        extra = {**(self._prime_options.get("extra_body") or {}), **fields}
        given = {**self._prime_options, "max_tokens": max_tokens, "extra_body": extra}
        try:
            options = chat_options(self._model, messages, given, None)
            answer, _ = await ask_with_retries(lambda: self._chat.ask(options), Retries(0))
        except CallFailedError as failed:
            return failed.error
        return answer
