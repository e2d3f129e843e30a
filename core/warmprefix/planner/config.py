"""Arguments of a planner: checked once, and read from a URL for shared state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Literal, TypedDict

from warmprefix.annotate import Annotate, Templates, check_annotate
from warmprefix.cache_profiles import CacheProfile
from warmprefix.errors import check_count
from warmprefix.extensions import extension, extension_names
from warmprefix.order_sharing import OrderSharing
from warmprefix.ordering import POLICIES, OrderingPolicy
from warmprefix.residency import ResidencyFeed
from warmprefix.stores import SeenStore
from warmprefix.telemetry import PlannerObserver
from warmprefix.tokens import BackgroundCounter, TokenCounter, as_counter
from warmprefix.traces import RequestRecorder

__all__ = ["PlannerBounds", "PlannerConfig", "PlannerOptions", "counter_of", "options_of_url"]


DEFAULT_SCHEME = "redis"
"""Whose package finds the URL itself, in its settings."""


class PlannerOptions(TypedDict, total=False):
    """The arguments of `ContextPlanner`."""

    policy: str | Callable[[], OrderingPolicy]
    capacity_tokens: int | Literal["auto"] | None
    max_nodes: int
    max_scopes: int
    max_labels: int
    max_open_plans: int
    templates: Templates | None
    store: SeenStore | None
    sharing: OrderSharing | None
    salt_key: bytes
    recorder: RequestRecorder | None
    feed: ResidencyFeed | None
    observer: PlannerObserver | None
    patience: int | None
    annotate: Annotate
    annotations: Mapping[str, Annotate]
    tokenizer: object
    profile: CacheProfile | str


@dataclass(frozen=True, slots=True)
class PlannerBounds:
    """The arguments of `ContextPlanner` that are counts; all are checked here.

    Raises:
        TypeError: An argument is not an int, or None where that is allowed.
        ValueError: An argument is below 1, or `capacity_tokens` is a string other than `auto`.
    """

    capacity_tokens: int | Literal["auto"] | None
    max_nodes: int
    max_scopes: int
    max_labels: int
    max_open_plans: int
    patience: int | None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "capacity_tokens" and isinstance(value, str):
                if value != "auto":
                    raise ValueError(f"capacity_tokens must be 'auto', an int or None, got {value!r}")
                continue
            check_count(field.name, value, optional=field.name in ("capacity_tokens", "patience"))


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """The arguments of `ContextPlanner`, which documents them; all are checked here.

    Raises:
        TypeError: An argument has the wrong type, or `policy` is a policy instead of a callable that makes one.
        ValueError: `policy` is an unknown name.
    """

    policy: str | Callable[[], OrderingPolicy]
    bounds: PlannerBounds
    store: SeenStore | None
    sharing: OrderSharing | None
    templates: Templates | None
    salt_key: bytes
    recorder: RequestRecorder | None
    feed: ResidencyFeed | None
    observer: PlannerObserver | None
    annotate: Annotate
    annotations: Mapping[str, Annotate]
    profile: CacheProfile | str

    def __post_init__(self) -> None:
        self._check_type("store", SeenStore, "a SeenStore")
        self._check_type("sharing", OrderSharing, "an OrderSharing")
        self._check_type("templates", Templates, "Templates")
        self._check_type("recorder", RequestRecorder, "a RequestRecorder")
        self._check_type("feed", ResidencyFeed, "a ResidencyFeed")
        self._check_type("observer", PlannerObserver, "a PlannerObserver")
        check_annotate(self.annotate)
        if not isinstance(self.annotations, Mapping):
            raise TypeError(f"annotations must be a mapping, got {type(self.annotations).__name__}")
        for annotate in self.annotations.values():
            check_annotate(annotate)
        if not isinstance(self.salt_key, bytes):
            raise TypeError(f"salt_key must be bytes, got {type(self.salt_key).__name__}")
        if isinstance(self.policy, str) and self._named_policy(self.policy) is None:
            known = sorted({*POLICIES, *extension_names("warmprefix.policies")})
            raise ValueError(f"policy must be one of {', '.join(known)}, got {self.policy!r}")
        if not callable(self.policy) and not isinstance(self.policy, str):
            wanted = "a name or a callable that makes a policy for each scope"
            raise TypeError(f"policy must be {wanted}, got {type(self.policy).__name__}")

    def _check_type(self, name: str, type_: type, wanted: str) -> None:
        value = getattr(self, name)
        if value is not None and not isinstance(value, type_):
            raise TypeError(f"{name} must be {wanted} or None, got {type(value).__name__}")

    def new_policy(self) -> OrderingPolicy:
        """Return a new policy, for one scope."""
        if not isinstance(self.policy, str):
            return self.policy()
        make = self._named_policy(self.policy)
        assert make is not None
        return make()

    @staticmethod
    @cache
    def _named_policy(name: str) -> Callable[[], OrderingPolicy] | None:
        return POLICIES.get(name) or extension("warmprefix.policies", name)


def counter_of(tokenizer: object) -> TokenCounter:
    """Return the counter of a planner's tokenizer. One that asks a server is called in the background.

    Raises:
        TypeError: `tokenizer` is nothing that `as_counter` accepts.
    """
    return BackgroundCounter(tokenizer) if getattr(tokenizer, "is_remote", False) else as_counter(tokenizer)


def options_of_url(url: str | None, settings: object) -> PlannerOptions:
    """Return the arguments of a planner that the package for the URL's scheme brings.

    Raises:
        MissingExtraError: The package needs an extra that is not installed.
        ValueError: No installed package handles the scheme, or its settings are out of bounds.
    """
    scheme = DEFAULT_SCHEME if url is None else url.partition(":")[0]
    connect = extension("warmprefix.urls", scheme)
    if connect is None:
        known = ", ".join(extension_names("warmprefix.urls"))
        raise ValueError(f"url must have one of the schemes {known}, got {scheme!r}")
    options: PlannerOptions = connect(url, settings)
    return options
