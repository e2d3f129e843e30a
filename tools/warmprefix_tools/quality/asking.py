"""Asks a model all questions in all arms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from warmprefix.errors import MissingExtraError
from warmprefix_requests.usage import token_usage
from warmprefix_tools.quality.answer_store import AnswerStore, CallKey, GivenAnswer
from warmprefix_tools.quality.arms import AgentsArm, ArmPrompt
from warmprefix_tools.quality.calls import FailedCallError, RefusedPromptError, call_all, complete
from warmprefix_tools.quality.quality_options import QualityOptions
from warmprefix_tools.quality.scores import citations

try:
    import openai
except ImportError as exc:
    raise MissingExtraError("openai", "openai") from exc

__all__ = ["ask_all"]

_Call = tuple[CallKey, ArmPrompt]


async def ask_all(
    prompts: Sequence[ArmPrompt], store: AnswerStore, options: QualityOptions, progress: Callable[[int], None]
) -> None:
    """Ask what the store has no answer to, and store each answer as it comes.

    An endpoint that refuses a prompt, because it is too long for the model, will refuse it again: that is stored. A
    call that fails otherwise is not; the next run makes it again.

    Args:
        prompts: All prompts of the run.
        store: Where the answers go.
        options: The endpoint, the model, and how many calls run at one time.
        progress: Called after each call with the number of calls that are left.

    Raises:
        EndpointError: See `call_all`.
    """
    done = store.done()

    async def make(client: openai.AsyncOpenAI, call: _Call) -> None:
        store.add(await _ask(client, options, *call))

    await call_all([call for call in _calls(prompts, options.repeats) if call[0] not in done], options, make, progress)


def _calls(prompts: Iterable[ArmPrompt], repeats: int) -> list[_Call]:
    return [
        (CallKey(prompt.question.id, prompt.arm, repeat), prompt) for prompt in prompts for repeat in range(repeats)
    ]


async def _ask(client: openai.AsyncOpenAI, options: QualityOptions, key: CallKey, prompt: ArmPrompt) -> GivenAnswer:
    began = time.monotonic()
    if prompt.run is not None:
        answered = await _run(prompt.run, prompt, client, options.model)
        return GivenAnswer(key, prompt.is_changed, answered, seconds=time.monotonic() - began)
    seed = options.seed + key.repeat
    try:
        answer = await complete(client, prompt.messages, model=options.model, max_tokens=options.max_tokens, seed=seed)
    except RefusedPromptError as error:
        return GivenAnswer(key, prompt.is_changed, None, f"refused: {error}"[:300], seconds=time.monotonic() - began)
    choice = answer.choices[0] if answer.choices else None
    text = choice.message.content if choice is not None else None
    problem = None if isinstance(text, str) else "no text"
    if choice is not None and choice.finish_reason == "length":
        problem = "truncated"
    tokens = token_usage(answer.usage.model_dump() if answer.usage is not None else None)
    cited = citations(text) if isinstance(text, str) and prompt.gold_labels else None
    return GivenAnswer(
        key,
        prompt.is_changed,
        text.encode("utf-8", "replace").decode() if isinstance(text, str) else None,
        problem,
        tokens.prompt_tokens,
        tokens.cached_tokens,
        tokens.completion_tokens,
        time.monotonic() - began,
        None if cited is None else len(cited),
        None if cited is None else len(cited & set(prompt.gold_labels)),
    )


async def _run(run: AgentsArm, prompt: ArmPrompt, client: openai.AsyncOpenAI, model: str) -> str:
    """Return the answer of an arm with calls of its own.

    Raises:
        FailedCallError: It raised an error that is not the client's, or its answer is no text.
    """
    try:
        text = await run(prompt.question, client, model)
    except openai.APIError:
        raise
    except Exception as error:
        raise FailedCallError(f"{prompt.arm} raised {error!r}") from error
    if not isinstance(text, str):
        raise FailedCallError(f"{prompt.arm} must return a text, got {type(text).__name__}")
    return text.encode("utf-8", "replace").decode()
