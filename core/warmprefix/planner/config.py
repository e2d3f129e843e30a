"""Arguments of a planner: checked once, and read from a URL for shared state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from warmprefix.annotate import Annotate, Templates, check_annotate
from warmprefix.cache_profiles import CacheProfile
from warmprefix.errors import check_count
from warmprefix.order_sharing import OrderSharing
from warmprefix.ordering import POLICIES, OrderingPolicy
from warmprefix.residency import ResidencyFeed
from warmprefix.stores import GuardedStore, SeenStore
from warmprefix.telemetry import PlannerObserver
from warmprefix.tokens import BackgroundCounter, TokenCounter, as_counter
from warmprefix.traces import RequestRecorder

if TYPE_CHECKING:
    from warmprefix.settings import SharedSettings
    from warmprefix.stores.redis import RedisSeenStore

__all__ = ["PlannerBounds", "PlannerConfig", "PlannerOptions", "SharedParts", "connect_shared_parts", "counter_of"]


class PlannerOptions(TypedDict, total=False):
    """The arguments of `ContextPlanner` that `from_url` takes too."""

    policy: str | Callable[[], OrderingPolicy]
    capacity_tokens: int | Literal["auto"] | None
    max_nodes: int
    max_scopes: int
    max_labels: int
    max_open_plans: int
    templates: Templates | None
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
        if isinstance(self.policy, str) and self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(sorted(POLICIES))}, got {self.policy!r}")
        if not callable(self.policy) and not isinstance(self.policy, str):
            wanted = "a name or a callable that makes a policy for each scope"
            raise TypeError(f"policy must be {wanted}, got {type(self.policy).__name__}")

    def _check_type(self, name: str, type_: type, wanted: str) -> None:
        value = getattr(self, name)
        if value is not None and not isinstance(value, type_):
            raise TypeError(f"{name} must be {wanted} or None, got {type(value).__name__}")

    def new_policy(self) -> OrderingPolicy:
        """Return a new policy, for one scope."""
        return POLICIES[self.policy]() if isinstance(self.policy, str) else self.policy()


def counter_of(tokenizer: object) -> TokenCounter:
    """Return the counter of a planner's tokenizer. An engine is asked in the background.

    Raises:
        TypeError: `tokenizer` is nothing that `as_counter` accepts.
    """
    if tokenizer is not None:
        from warmprefix.residency import EngineTokenizer  # imports HTTP

        if isinstance(tokenizer, EngineTokenizer):
            return BackgroundCounter(tokenizer)
    return as_counter(tokenizer)


class SharedParts(NamedTuple):
    """The arguments of a planner that shares its state."""

    connection: RedisSeenStore
    """Must be closed after the store."""
    store: GuardedStore
    """Calls the connection."""
    sharing: OrderSharing | None
    options: PlannerOptions
    """Defaults from the settings."""


def connect_shared_parts(url: str | None, settings: SharedSettings | None) -> SharedParts:
    """Connect to a Redis or Valkey server, for `ContextPlanner.from_url`."""
    from warmprefix.order_sharing.redis import RedisOrderSharing
    from warmprefix.settings import SharedSettings
    from warmprefix.stores.redis import RedisSeenStore

    if settings is None:
        settings = SharedSettings()
    address = settings.redis_url if url is None else url
    if not address:
        raise ValueError(f"url must be given, or WARMPREFIX_REDIS_URL must be set; got {address!r}")
    store = RedisSeenStore(
        address,
        prefix=settings.key_prefix,
        max_blocks=settings.max_blocks,
        ttl=settings.conversation_ttl,
        lease_ttl=settings.lease_ttl,
        # Longer than a request waits: a late commit is better than a lost one.
        timeout=max(0.1, 2 * settings.store_budget),
        connect_timeout=max(0.5, 2 * settings.store_budget),
    )
    guarded = GuardedStore(store, budget=settings.store_budget)
    guarded.start()
    sharing = RedisOrderSharing(address, prefix=settings.key_prefix) if settings.share_orders else None
    salt_key = settings.salt_key.get_secret_value().encode()
    options: PlannerOptions = {"capacity_tokens": settings.capacity_tokens, "salt_key": salt_key}
    return SharedParts(store, guarded, sharing, options)
