"""Who works: the agents that read, and the one that answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from warmprefix import Agent, MissingExtraError

try:
    from openai import AsyncOpenAI, OpenAI
except ImportError as exc:
    raise MissingExtraError("chain-of-agents", "openai") from exc

__all__ = ["Manager", "Speaker", "Worker"]

_OURS = ("messages", "model", "n", "stream", "timeout")
"""Options of a request that are no user's to set."""


@dataclass(frozen=True, slots=True)
class Worker:
    """An agent that reads documents, with an engine of its own: clients and models may differ from agent to agent.

    Raises:
        TypeError: A field has another type than below.
        ValueError: `name` or `model` is empty, `options` sets what the chain sets itself, or the router would refuse
            `capacity_tokens` or `weight`.
    """

    name: str
    """Names it in the router, in the planner's scopes and in reports."""
    client: OpenAI | AsyncOpenAI
    """Its own retries are not used: the chain's are."""
    model: str
    _: KW_ONLY
    capacity_tokens: int | None = None
    """Tokens of context that its engine's prefix cache holds, for the router; None for no bound."""
    weight: float = 1.0
    """Its share of the load, relative to the others', for the router."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Sent with every request: `temperature`, `max_tokens`, `extra_headers` and the like."""
    cache_salt: bool = True
    """Whether a tenant's `cache_salt` is sent, as vLLM and the SGLang router take it. Not for endpoints that refuse
    fields they do not know, such as OpenAI's own."""

    def __post_init__(self) -> None:
        _check(self)
        Agent(self.name, self.capacity_tokens, self.weight)


@dataclass(frozen=True, slots=True)
class Manager:
    """The agent that answers from what the workers handed on.

    Raises:
        TypeError: A field has another type than below.
        ValueError: `name` or `model` is empty, or `options` sets what the chain sets itself.
    """

    client: OpenAI | AsyncOpenAI
    model: str
    _: KW_ONLY
    name: str = "manager"
    options: Mapping[str, Any] = field(default_factory=dict)
    """As a worker's."""
    cache_salt: bool = True
    """As a worker's."""

    def __post_init__(self) -> None:
        _check(self)


Speaker = Worker | Manager
"""Whoever is asked."""


def _check(speaker: Speaker) -> None:
    for field_name in ("name", "model"):
        value = getattr(speaker, field_name)
        if not isinstance(value, str):
            raise TypeError(f"{field_name} must be a str, got {type(value).__name__}")
        if not value:
            raise ValueError(f"{field_name} must not be empty")
    if not isinstance(speaker.client, OpenAI | AsyncOpenAI):
        kind = type(speaker.client).__name__
        raise TypeError(f"client of {speaker.name!r} must be an openai.OpenAI or openai.AsyncOpenAI, got {kind}")
    if not isinstance(speaker.options, Mapping):
        raise TypeError(f"options of {speaker.name!r} must be a mapping, got {type(speaker.options).__name__}")
    taken = sorted(set(speaker.options).intersection(_OURS))
    if "cache_salt" in (speaker.options.get("extra_body") or ()):
        taken.insert(0, "extra_body.cache_salt")
    if taken:
        raise ValueError(f"options of {speaker.name!r} must leave {', '.join(taken)} to the chain")
