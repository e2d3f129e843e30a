"""Asks a model all questions in all arms, several at one time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from warmprefix.errors import MissingExtraError, WarmprefixError
from warmprefix_tools.quality.answer_store import AnswerStore, CallKey, GivenAnswer
from warmprefix_tools.quality.arms import ArmPrompt
from warmprefix_tools.quality.quality_options import QualityOptions

try:
    import openai
    from openai.types.chat import ChatCompletion
except ImportError as exc:
    raise MissingExtraError("openai", "openai") from exc

__all__ = ["EndpointError", "ask_all"]

_MOST_FAILURES = 20
"""After this many failed calls in a row, the endpoint counts as down."""


class EndpointError(WarmprefixError):
    """The endpoint does not answer, so the run stopped; the message has the reason."""


class _NoCompletionError(Exception):
    """What came back is no chat completion."""


async def ask_all(
    prompts: Sequence[ArmPrompt], store: AnswerStore, options: QualityOptions, progress: Callable[[int], None]
) -> None:
    """Ask what the store has no answer to, and store each answer as it comes.

    An endpoint that refuses a prompt, because it is too long for the model, will refuse it again: that is stored. A
    call that fails otherwise, after two retries, is not; the next run makes it again.

    Args:
        prompts: All prompts of the run.
        store: Where the answers go.
        options: The endpoint, the model, and how many calls run at one time.
        progress: Called after each call with the number of calls that are left.

    Raises:
        EndpointError: 20 calls failed in a row, or the endpoint refuses the key or the model.
    """
    done = store.done()
    waiting = [call for call in _calls(prompts, options.repeats) if call[0] not in done]
    remaining, failures = len(waiting), 0
    calls = iter(waiting)
    client = openai.AsyncOpenAI(
        base_url=options.endpoint, api_key=options.api_key, max_retries=2, timeout=options.timeout_seconds
    )

    async def work() -> None:
        nonlocal remaining, failures
        for key, prompt in calls:
            try:
                answer = await _ask(client, options, key, prompt)
            except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
                raise EndpointError(f"{options.endpoint} refuses the calls: {error}") from error
            except (openai.APIError, _NoCompletionError) as error:
                failures += 1
                if failures >= _MOST_FAILURES:
                    raise EndpointError(f"{options.endpoint} failed {failures} times in a row: {error}") from error
                continue
            failures, remaining = 0, remaining - 1
            store.add(answer)
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


def _calls(prompts: Iterable[ArmPrompt], repeats: int) -> list[tuple[CallKey, ArmPrompt]]:
    return [
        (CallKey(prompt.question.id, prompt.arm, repeat), prompt) for prompt in prompts for repeat in range(repeats)
    ]


async def _ask(client: openai.AsyncOpenAI, options: QualityOptions, key: CallKey, prompt: ArmPrompt) -> GivenAnswer:
    began = time.monotonic()
    try:
        answer = await client.chat.completions.create(
            model=options.model,
            messages=prompt.messages,  # type: ignore[arg-type]
            max_tokens=options.max_tokens,
            temperature=0,
            seed=options.seed + key.repeat,
        )
    except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
        return GivenAnswer(key, prompt.is_changed, None, f"refused: {error}"[:300], seconds=time.monotonic() - began)
    if not isinstance(answer, ChatCompletion):  # the client passes on what is no JSON
        raise _NoCompletionError(f"the answer is no chat completion but {type(answer).__name__}")
    choice = answer.choices[0] if answer.choices else None
    text = choice.message.content if choice is not None else None
    problem = None if isinstance(text, str) else "no text"
    if choice is not None and choice.finish_reason == "length":
        problem = "truncated"
    usage = answer.usage
    details = usage.prompt_tokens_details if usage is not None else None
    return GivenAnswer(
        key,
        prompt.is_changed,
        text.encode("utf-8", "replace").decode() if isinstance(text, str) else None,
        problem,
        usage.prompt_tokens if usage is not None else None,
        details.cached_tokens if details is not None else None,
        usage.completion_tokens if usage is not None else None,
        time.monotonic() - began,
    )
