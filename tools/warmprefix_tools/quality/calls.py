"""Calls of a model, several at one time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from warmprefix.errors import MissingExtraError, WarmprefixError
from warmprefix_tools.quality.quality_options import EndpointOptions

try:
    import openai
    from openai.types.chat import ChatCompletion
except ImportError as exc:
    raise MissingExtraError("openai", "openai") from exc

__all__ = ["EndpointError", "FailedCallError", "RefusedPromptError", "call_all", "complete"]

_MOST_FAILURES = 20
"""After this many failed calls in a row, the endpoint counts as down."""

Call = TypeVar("Call")


class EndpointError(WarmprefixError):
    """The endpoint does not answer, so the run stopped; the message has the reason."""


class RefusedPromptError(Exception):
    """The endpoint refuses these messages, and will refuse them again."""


class FailedCallError(Exception):
    """A call had no usable answer; the next run makes it again."""


async def call_all(
    calls: Sequence[Call],
    options: EndpointOptions,
    make: Callable[[openai.AsyncOpenAI, Call], Awaitable[None]],
    progress: Callable[[int], None],
) -> None:
    """Make all calls, as many at one time as the options allow.

    Args:
        calls: What to call with.
        options: The endpoint.
        make: Makes one call and stores its result.
        progress: Called after each call with the number of calls that are left.

    Raises:
        EndpointError: 20 calls failed in a row, each after two retries, or the endpoint refuses the key or the model,
            or calls are left because they failed.
    """
    remaining, failures = len(calls), 0
    waiting = iter(calls)
    client = openai.AsyncOpenAI(
        base_url=options.endpoint, api_key=options.api_key, max_retries=2, timeout=options.timeout_seconds
    )

    async def work() -> None:
        nonlocal remaining, failures
        for call in waiting:
            try:
                await make(client, call)
            except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
                raise EndpointError(f"{options.endpoint} refuses the calls: {error}") from error
            except (openai.APIError, FailedCallError) as error:
                failures += 1
                if failures >= _MOST_FAILURES:
                    raise EndpointError(f"{options.endpoint} failed {failures} times in a row: {error}") from error
                continue
            failures, remaining = 0, remaining - 1
            progress(remaining)

    async with client:
        workers = [asyncio.create_task(work()) for _ in range(options.at_once)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    if remaining:
        raise EndpointError(f"{remaining} calls failed; run the same command again to make them")


async def complete(client: openai.AsyncOpenAI, messages: Sequence[Any], **settings: Any) -> ChatCompletion:
    """Return the model's answer to a chat, at temperature 0.

    Raises:
        RefusedPromptError: The prompt is too long for the model, or the endpoint refuses it for another lasting reason.
        openai.APIError: The call failed.
    """
    try:
        answer = await client.chat.completions.create(messages=list(messages), temperature=0, **settings)
    except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
        raise RefusedPromptError(str(error)) from error
    if not isinstance(answer, ChatCompletion):  # the client passes on what is no JSON
        raise FailedCallError(f"the answer is no chat completion but {type(answer).__name__}")
    return answer
