"""The agents: workers that read documents, and the manager that answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from warmprefix import MissingExtraError
from warmprefix_routing import Agent

try:
    from openai import APIConnectionError, AsyncOpenAI, OpenAI
except ImportError as exc:
    raise MissingExtraError("chain-of-agents", "openai") from exc

from warmprefix_openai import SlowAnswerError, status_of

__all__ = ["Manager", "Speaker", "Worker", "is_unreachable", "refuses_all"]

_RESERVED = ("messages", "model", "n", "stream", "timeout")
"""Options of a request that the chain sets."""

_OF_THE_ENDPOINT = frozenset({401, 403, 404, 429, 502, 503, 504})
"""Statuses that do not depend on the document: a wrong key, an unknown model, an overload, no engine."""


@dataclass(frozen=True, slots=True)
class Worker:
    """An agent that reads documents, on an engine of its own. Each may have another client and model.

    Raises:
        TypeError: A field has another type than below.
        ValueError: `name` or `model` is empty, `options` sets an option of the chain, or the router would refuse
            `capacity_tokens` or `weight`.
    """

    name: str
    """The agent's name in the router, in the planner's scopes and in reports."""
    client: OpenAI | AsyncOpenAI
    """Its own retries are not used: the chain's are."""
    model: str
    """Name of the model on its engine."""
    _: KW_ONLY
    capacity_tokens: int | None = None
    """Tokens of context that its engine's prefix cache holds, for the router; None for no bound."""
    weight: float = 1.0
    """Its share of the load, relative to the others', for the router."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Sent with every request: `temperature`, `max_tokens`, `extra_headers` and the like."""
    cache_salt: bool = True
    """Send a tenant's `cache_salt`, as vLLM and the SGLang router take it. Not for endpoints that refuse unknown
    fields, such as OpenAI's own."""

    def __post_init__(self) -> None:
        _check(self)
        Agent(self.name, self.capacity_tokens, self.weight)


@dataclass(frozen=True, slots=True)
class Manager:
    """The agent that answers from the workers' summaries.

    Raises:
        TypeError: A field has another type than below.
        ValueError: `name` or `model` is empty, or `options` sets an option of the chain.
    """

    client: OpenAI | AsyncOpenAI
    """Client of the engine; its own retries are not used."""
    model: str
    """Name of the model on its engine."""
    _: KW_ONLY
    name: str = "manager"
    """The agent's name in reports."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """As a worker's."""
    cache_salt: bool = True
    """As a worker's."""

    def __post_init__(self) -> None:
        _check(self)


Speaker = Worker | Manager
"""An agent that is asked."""


def is_unreachable(error: Exception) -> bool:
    """Return True if no answer came, or none in time: the agent counts as dead. A slow agent does not."""
    is_slow = isinstance(error, SlowAnswerError)
    return isinstance(error, APIConnectionError | ConnectionError | TimeoutError) and not is_slow


def refuses_all(error: Exception) -> bool:
    """Return True if the agent would have refused any document, so that another agent may well read this one."""
    return status_of(error) in _OF_THE_ENDPOINT


def _check(speaker: Speaker) -> None:
    for field_name in ("name", "model"):
        value = getattr(speaker, field_name)
        if not isinstance(value, str):
            raise TypeError(f"{field_name} must be a str, got {type(value).__name__}")
        if not value:
            raise ValueError(f"{field_name} must not be empty, got {value!r}")
    if not isinstance(speaker.client, OpenAI | AsyncOpenAI):
        kind = type(speaker.client).__name__
        raise TypeError(f"client of {speaker.name!r} must be an openai.OpenAI or openai.AsyncOpenAI, got {kind}")
    if not isinstance(speaker.options, Mapping):
        raise TypeError(f"options of {speaker.name!r} must be a mapping, got {type(speaker.options).__name__}")
    taken = sorted(set(speaker.options).intersection(_RESERVED))
    if "cache_salt" in (speaker.options.get("extra_body") or ()):
        taken.insert(0, "extra_body.cache_salt")
    if taken:
        raise ValueError(f"options of {speaker.name!r} must hold no option of the chain, got {', '.join(taken)}")
