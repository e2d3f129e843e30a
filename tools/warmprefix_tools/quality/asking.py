"""Asks a model all questions in all arms, and a judge which answers are better; several calls at one time."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from warmprefix.errors import MissingExtraError, WarmprefixError
from warmprefix_requests.usage import TokenUsage, token_usage
from warmprefix_tools.quality.answer_store import AnswerStore, CallKey, GivenAnswer, Judgement
from warmprefix_tools.quality.arms import ArmPrompt
from warmprefix_tools.quality.cache_probe import SaltSupport, probe_cache
from warmprefix_tools.quality.conversations import Messages
from warmprefix_tools.quality.quality_options import EndpointOptions, QualityJudgeOptions, QualityOptions
from warmprefix_tools.quality.questions import EvidenceQuestion
from warmprefix_tools.quality.scores import citations, normalized
from warmprefix_tools.quality.watch import RunWatch

try:
    import openai
    from openai.types import CompletionUsage
    from openai.types.chat import ChatCompletion
except ImportError as exc:
    raise MissingExtraError("openai", "openai") from exc

__all__ = ["EndpointError", "ask_all", "judge_all"]

_TIMEOUT_SECONDS = 600.0
_MOST_FAILURES = 20
"""After this many failed calls in a row, the endpoint counts as down."""
_ABOUT_MODEL = ("owned_by", "root", "n_params", "size", "ftype")
"""Fields in the list of models that other weights change, and a restart does not."""
_SEED = 0
_JUDGE_PROMPT = """\
Compare two answers to a question.

Question: {question}
Expected answer: {expected}

Answer A: {first}

Answer B: {second}

Which answer agrees better with the expected one? Length and style do not count. Reply with one word: A, B, or equal."""
_REFUSAL_EXPECTED = "The context does not hold the answer, so the right answer is a refusal."
_VERDICT = re.compile(r"\W*(?:answer\s+)?(a|b|equal)\b\W*", re.IGNORECASE)
_JUDGE_TOKENS = 8

Call = TypeVar("Call")


class EndpointError(WarmprefixError):
    """The endpoint does not answer, so the run stopped; the message has the reason."""


class _RefusedPromptError(Exception):
    """The endpoint refuses these messages, and will refuse them again."""


class _FailedCallError(Exception):
    """A call had no usable answer; the next run makes it again."""


async def ask_all(
    prompts: Sequence[ArmPrompt],
    store: AnswerStore,
    options: QualityOptions,
    watch: RunWatch,
    progress: Callable[[int], None],
    tell: Callable[[str], None],
) -> None:
    """Ask what the store has no answer to, and store each answer as it comes.

    Questions are asked one after another, each in all arms; the run stops between two of them if the watch is certain.
    Each arm has a cache salt of its own, so that the arms do not warm the engine's cache for each other.

    An endpoint that refuses a prompt, because it is too long for the model, will refuse it again: that is stored. A
    call that fails otherwise is not; the next run makes it again.

    Args:
        prompts: All prompts of the run, question by question.
        store: Where the answers go.
        options: The endpoint and the model.
        watch: Gets the stored answers, and each new one.
        progress: Called after each call with the number of calls that are left.
        tell: Called with each sentence that the user should read before the calls.

    Raises:
        StoreFileError: The endpoint serves another model than when the run began.
        EndpointError: 20 calls failed in a row, each after two retries, or the endpoint refuses the key or the model,
            or calls are left because they failed.
    """
    done = store.done()
    for answer in store.answers():
        watch.add(answer)
    calls = [
        (CallKey(prompt.question.id, prompt.arm, repeat), prompt)
        for prompt in prompts
        for repeat in range(options.repeats)
    ]
    waiting = [call for call in calls if call[0] not in done]
    if not waiting or watch.is_certain:
        return
    salt = store.salt()
    if not done:  # an earlier try, at another endpoint or while it was down, holds for no answer
        store.forget_endpoint()
    endpoint = await _first_contact(prompts, options, salt)
    if endpoint.engine is not None:
        store.note_engine(endpoint.engine)
    for sentence in endpoint.sentences(options):
        tell(sentence)
    is_salted = store.note_salts(endpoint.salts) == "kept"
    salts = {arm: f"{salt}-{number}" for number, arm in enumerate({prompt.arm: None for prompt in prompts})}

    def asked() -> Iterator[tuple[CallKey, ArmPrompt]]:
        for _, of_question in groupby(waiting, key=lambda call: call[0].question):
            if watch.is_certain:
                return
            yield from of_question

    async def make(client: openai.AsyncOpenAI, call: tuple[CallKey, ArmPrompt]) -> None:
        key = call[0]
        prompt = call[1]._replace(messages=endpoint.messages(call[1].messages))
        answer = await _ask(client, options, key, prompt, f"{salts[key.arm]}-{key.repeat}" if is_salted else None)
        answer = replace(answer, has_other_evidence=prompt.has_other_evidence)
        store.add(answer)
        watch.add(answer)

    await _call_all(asked(), len(waiting), options, make, progress)


class _Endpoint(NamedTuple):
    """What the first calls show of an endpoint."""

    salts: SaltSupport = "unreported"
    has_system_role: bool = True
    engine: Mapping[str, Any] | None = None
    """Names the model that is served; None if the endpoint does not answer."""
    keeps_slots: bool = False
    """True if it is llama.cpp, which keeps one prompt per slot."""

    def messages(self, messages: Messages) -> Messages:
        """Return the messages as the model's template takes them."""
        return messages if self.has_system_role else _in_one_role(messages)

    def sentences(self, options: QualityOptions) -> Iterator[str]:
        """Yield what the user should know."""
        if not self.has_system_role:
            yield "The model's chat template has no system role, so the system prompt opens the user's first message."
        if self.keeps_slots and options.at_once > 1:
            yield "This is llama.cpp, which keeps one prompt per slot: --at-once 1 reuses more of it."


def _in_one_role(messages: Messages) -> Messages:
    """Return the messages with the text of the system prompt in the user's first one."""
    first, *others = messages or [{}]
    if first.get("role") != "system" or not others:
        return messages
    return [{**others[0], "content": f"{first['content']}\n\n{others[0]['content']}"}, *others[1:]]


async def _first_contact(prompts: Sequence[ArmPrompt], options: QualityOptions, salt: str) -> _Endpoint:
    """Find out with a prompt of middle length which model answers, and what its engine and its template do."""
    ours = sorted([prompt for prompt in prompts if prompt.run is None], key=lambda each: len(str(each.messages)))
    if not ours:
        return _Endpoint()
    messages = ours[len(ours) // 2].messages
    short: dict[str, Any] = {"model": options.model, "max_tokens": 1}

    async def first(messages: Messages) -> ChatCompletion | None:
        try:
            return await _complete(client, messages, None, **short)
        except (_RefusedPromptError, openai.InternalServerError):  # llama.cpp's status for an error in a template
            return None

    async def ask(salt: str | None) -> TokenUsage | None:
        try:
            return _usage_of(await _complete(client, messages, salt, **short))
        except _RefusedPromptError:
            return None

    async with _client(options) as client:
        try:
            answer, has_system_role = await first(messages), True
            if answer is None and (merged := _in_one_role(messages)) != messages:
                answer = await first(merged)
                if answer is not None:
                    messages, has_system_role = merged, False
            if answer is None:
                return _Endpoint(await probe_cache(ask, salt))
            keeps_slots = "timings" in (answer.model_extra or {})
            return _Endpoint(
                await probe_cache(ask, salt), has_system_role, await _engine(client, options, answer), keeps_slots
            )
        except (openai.APIError, _FailedCallError):  # if it is down, the calls that follow say so
            return _Endpoint()


async def _engine(client: openai.AsyncOpenAI, options: QualityOptions, answer: ChatCompletion) -> dict[str, Any]:
    """Return what names the model: as its answers call it, and as the list of models describes it."""
    found: dict[str, Any] = {"model": answer.model, "software": answer.system_fingerprint}
    try:
        listed = [each.model_dump() async for each in client.models.list() if each.id == options.model]
    except openai.APIError:
        return found
    for entry in listed:
        meta = entry.get("meta")
        about = {**entry, **(meta if isinstance(meta, dict) else {})}
        found |= {name: about[name] for name in _ABOUT_MODEL if isinstance(about.get(name), str | int)}
    return found


async def _ask(
    client: openai.AsyncOpenAI, options: QualityOptions, key: CallKey, prompt: ArmPrompt, salt: str | None
) -> GivenAnswer:
    began = time.monotonic()
    if prompt.run is not None:
        answered = await _run(prompt, client, options.model)
        return GivenAnswer(key, prompt.is_changed, answered, seconds=time.monotonic() - began)
    settings = {"model": options.model, "max_tokens": options.max_tokens, "seed": _SEED + key.repeat}
    try:
        answer = await _complete(client, prompt.messages, salt, **settings)
    except _RefusedPromptError as error:
        return GivenAnswer(key, prompt.is_changed, None, f"refused: {error}"[:300], seconds=time.monotonic() - began)
    text = _text_of(answer)
    problem = "no text" if text is None else None
    if answer.choices and answer.choices[0].finish_reason == "length":
        problem = "truncated"
    tokens = _usage_of(answer)
    cited = citations(text) if text is not None and prompt.gold_labels else None
    return GivenAnswer(
        key,
        prompt.is_changed,
        text,
        problem,
        tokens.prompt_tokens,
        tokens.cached_tokens,
        tokens.completion_tokens,
        time.monotonic() - began,
        None if cited is None else len(cited),
        None if cited is None else len(cited & set(prompt.gold_labels)),
    )


async def _run(prompt: ArmPrompt, client: openai.AsyncOpenAI, model: str) -> str:
    """Return the answer of an arm with calls of its own.

    Raises:
        _FailedCallError: It raised an error that is not the client's, or its answer is no text.
    """
    assert prompt.run is not None
    try:
        text = await prompt.run(prompt.question, client, model)
    except openai.APIError:
        raise
    except Exception as error:
        raise _FailedCallError(f"{prompt.arm} raised {error!r}") from error
    if not isinstance(text, str):
        raise _FailedCallError(f"{prompt.arm} must return a text, got {type(text).__name__}")
    return _storable(text)


def _usage_of(answer: ChatCompletion) -> TokenUsage:
    return token_usage(answer.usage.model_dump() if isinstance(answer.usage, CompletionUsage) else None)


def _text_of(answer: ChatCompletion) -> str | None:
    text = answer.choices[0].message.content if answer.choices else None
    return _storable(text) if isinstance(text, str) else None


def _storable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


# -- the judge ---------------------------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    """Two answers for the judge, in one order."""

    question: EvidenceQuestion
    arm: str
    arm_first: bool
    first: str
    second: str

    @property
    def prompt(self) -> str:
        """The message for the judge."""
        expected = " or ".join(self.question.answers) or _REFUSAL_EXPECTED
        return _JUDGE_PROMPT.format(
            question=self.question.question, expected=expected, first=self.first.strip(), second=self.second.strip()
        )


async def judge_all(store: AnswerStore, options: QualityJudgeOptions, progress: Callable[[int, int], None]) -> None:
    """Ask the judge about each answer that differs from its baseline's, and store what it returns.

    Of repeated calls, the first answer counts. Earlier judgements stay.

    Args:
        store: The answers of a run.
        options: The judge's endpoint and model.
        progress: Called after each call with the numbers of all calls and of those that are left.

    Raises:
        StoreFileError: The file holds no run, or the judgements of another model.
        EndpointError: As of `ask_all`.
    """
    done = store.begin_judging(options.model)
    pairs = list(_pairs(store))

    async def make(client: openai.AsyncOpenAI, pair: _Pair) -> None:
        messages = [{"role": "user", "content": pair.prompt}]
        try:
            text = _text_of(await _complete(client, messages, model=options.model, max_tokens=_JUDGE_TOKENS))
        except _RefusedPromptError:
            text = None
        store.add_judgement(Judgement(pair.question.id, pair.arm, pair.arm_first, _preferred(text, pair.arm_first)))

    waiting = [pair for pair in pairs if (pair.question.id, pair.arm, pair.arm_first) not in done]
    await _call_all(waiting, len(waiting), options, make, lambda remaining: progress(len(pairs), remaining))


def _pairs(store: AnswerStore) -> Iterator[_Pair]:
    baselines = store.settings()["arms"]
    questions = {question.id: question for question in store.questions()}
    texts = {
        (answer.key.question, answer.key.arm): answer.text
        for answer in store.answers()
        if answer.key.repeat == 0 and answer.text is not None
    }
    for (id, arm), text in texts.items():
        other = texts.get((id, baselines[arm]))
        if other is not None and normalized(other) != normalized(text):
            yield _Pair(questions[id], arm, True, text, other)
            yield _Pair(questions[id], arm, False, other, text)


def _preferred(text: str | None, arm_first: bool) -> str | None:
    """Return which answer the judge prefers; None if it answered something else."""
    found = _VERDICT.fullmatch(text or "")
    if found is None:
        return None
    word = found[1].lower()
    return "neither" if word == "equal" else "arm" if (word == "a") == arm_first else "baseline"


# -- calls -------------------------------------------------------------------------------------------------------------


async def _call_all(
    calls: Iterable[Call],
    count: int,
    options: EndpointOptions,
    make: Callable[[openai.AsyncOpenAI, Call], Awaitable[None]],
    progress: Callable[[int], None],
) -> None:
    """Make all calls, `count` at most; `make` makes one and stores its result."""
    remaining, failed, failures = count, 0, 0
    waiting = iter(calls)
    client = _client(options)

    async def work() -> None:
        nonlocal remaining, failed, failures
        for call in waiting:
            try:
                await make(client, call)
            except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
                raise EndpointError(f"{options.endpoint} refuses the calls: {error}") from error
            except (openai.APIError, _FailedCallError) as error:
                failures, failed = failures + 1, failed + 1
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
    if failed:
        raise EndpointError(f"{failed} calls failed; run the same command again to make them")


def _client(options: EndpointOptions) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=options.endpoint, api_key=options.api_key, timeout=_TIMEOUT_SECONDS)


async def _complete(
    client: openai.AsyncOpenAI, messages: Sequence[Any], salt: str | None = None, **settings: Any
) -> ChatCompletion:
    """Return the model's answer to a chat, at temperature 0.

    Raises:
        _RefusedPromptError: The prompt is too long for the model, or the endpoint refuses it for another lasting
            reason.
        openai.APIError: The call failed.
    """
    try:
        body = None if salt is None else {"cache_salt": salt}
        answer = await client.chat.completions.create(
            messages=list(messages), temperature=0, extra_body=body, **settings
        )
    except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
        raise _RefusedPromptError(str(error)) from error
    except json.JSONDecodeError as error:  # a body that was cut
        raise _FailedCallError(f"the answer is no JSON: {error}") from error
    if not isinstance(answer, ChatCompletion):  # the client passes on what is no JSON
        raise _FailedCallError(f"the answer is no chat completion but {type(answer).__name__}")
    first = answer.choices[0] if answer.choices else None
    if getattr(first, "message", None) is None:  # proxies send errors of the engine with status 200
        raise _FailedCallError(f"the answer has no message: {answer.model_extra or answer}"[:300])
    return answer
