"""Arguments of a planner: checked once, and read from a URL for shared state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, TypedDict

from warmprefix.annotate import Annotate, Templates, check_annotate
from warmprefix.cache_profiles import CacheProfile
from warmprefix.errors import check_count, check_names
from warmprefix.extensions import extension, extension_names
from warmprefix.order_sharing import OrderSharing
from warmprefix.ordering import POLICIES, OrderingPolicy
from warmprefix.ordering.positions import profiles_of_models
from warmprefix.residency import ResidencyFeed
from warmprefix.stores import SeenStore
from warmprefix.telemetry import PlannerObserver
from warmprefix.tokens import TokenCounter, as_counter
from warmprefix.traces import RequestRecorder

__all__ = ["PlannerConfig", "PlannerOptions", "options_of_url"]

DEFAULT_SCHEME = "redis"
"""Whose package finds the URL itself, in its settings."""


class PlannerOptions(TypedDict, total=False):
    """The fields of `PlannerConfig`, as keyword arguments."""

    policy: str | Callable[[], OrderingPolicy]
    capacity_tokens: int | Literal["auto"] | None
    max_nodes: int
    max_scopes: int
    max_labels: int
    max_open_plans: int
    store: SeenStore | None
    sharing: OrderSharing | None
    templates: Templates | None
    salt_key: bytes
    recorder: RequestRecorder | None
    feed: ResidencyFeed | None
    observer: PlannerObserver | None
    annotate: Annotate
    annotations: Mapping[str, Annotate]
    positions: Mapping[str, Sequence[float]]
    points_per_percent: float
    tokenizer: object
    profile: CacheProfile | str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """The arguments of a `ContextPlanner`.

    Raises:
        TypeError: An argument has the wrong type, or `policy` is a policy instead of a callable that makes one.
        ValueError: `policy`, `annotate` or `annotations` has an unknown value, a bound is below 1, or a number of
            `positions` is no percentage.
    """

    policy: str | Callable[[], OrderingPolicy] = "coaccess"
    """A name in `warmprefix.ordering.POLICIES`, or a class or function that makes a policy. It is called once per
    scope, so that scopes share no state."""
    capacity_tokens: int | Literal["auto"] | None = "auto"
    """Tokens of context in the engine's prefix cache; None for no bound, `"auto"` to learn it. If some 100 reports
    contradict a number, it is learned, too, unless it is a `warmprefix.residency.FixedCapacity`."""
    max_nodes: int = 65_536
    """Most nodes of the prefix tree, per scope."""
    max_scopes: int = 1_024
    """Most scopes; the least recently used goes. The tenant with the most loses one."""
    max_labels: int = 65_536
    """Most blocks with a label in each scope; the least recently used go."""
    max_open_plans: int = 10_000
    """Most open plans besides the last batch's; beyond it the oldest of the tenant with the most can't be committed."""
    store: SeenStore | None = None
    """Remembers conversations; in this process by default. One that can be slow bounds the time of a call itself."""
    sharing: OrderSharing | None = None
    """Exchanges learned orders with other planners of the same engine; None for no exchange."""
    templates: Templates | None = None
    """The wording of the annotations."""
    salt_key: bytes = b""
    """A secret that makes `ContextPlan.cache_salt` unguessable for people with the tenant's name."""
    recorder: RequestRecorder | None = None
    """Receives every request as it came; by default, only if `warmprefix record` runs the application."""
    feed: ResidencyFeed | None = None
    """Follows what the engine holds, such as a `warmprefix.residency.KvEventFeed`. Without one, the planner predicts
    it."""
    observer: PlannerObserver | None = None
    """Notified of every plan and its end."""
    annotate: Annotate = "auto"
    """What prompts show of the relevance order; see docs/prompt-text.md. `"note"`: a note where the order changed.
    `"labels"`: a label in front of each block. `"both"`, `"none"`. `"auto"`: a note. With labels, references name
    these."""
    annotations: Mapping[str, Annotate] = field(default_factory=dict)
    """What `"auto"` stands for, by the `model` of a request, as `warmprefix quality report --annotations FILE` writes
    it; see docs/quality.md."""
    positions: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Right answers in percent, by the `model` of a request, with the answer in places from the first to the last, as
    `warmprefix quality report --positions FILE` writes them. `"*"` stands for all other models. Of those without, and
    with equal numbers, any order costs no answers; see docs/quality.md."""
    points_per_percent: float = 2.0
    """Points of right answers that one percent of saved prefill is worth, for models in `positions`."""
    tokenizer: object = None
    """Counts labels and notes, whose price an order must save: a function of a text, an object with `encode`, or a
    `warmprefix.residency.EngineTokenizer`, asked in the background. By default they are estimated."""
    profile: CacheProfile | str = "auto"
    """Where the engine's cache can match: a `CacheProfile` or its name. `"auto"` learns it."""

    def __post_init__(self) -> None:
        if isinstance(self.capacity_tokens, str):
            if self.capacity_tokens != "auto":
                raise ValueError(f"capacity_tokens must be 'auto', an int or None, got {self.capacity_tokens!r}")
        else:
            check_count("capacity_tokens", self.capacity_tokens, optional=True)
        for name in ("max_nodes", "max_scopes", "max_labels", "max_open_plans"):
            check_count(name, getattr(self, name))
        for name, type_, wanted in _CONTRACTS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, type_):
                raise TypeError(f"{name} must be {wanted} or None, got {type(value).__name__}")
        check_annotate(self.annotate)
        if not isinstance(self.annotations, Mapping):
            raise TypeError(f"annotations must be a mapping, got {type(self.annotations).__name__}")
        for annotate in self.annotations.values():
            check_annotate(annotate)
        profiles_of_models(self.positions, self.points_per_percent)
        if not isinstance(self.salt_key, bytes):
            raise TypeError(f"salt_key must be bytes, got {type(self.salt_key).__name__}")
        if isinstance(self.policy, str) and _named_policy(self.policy) is None:
            known = sorted({*POLICIES, *extension_names("warmprefix.policies")})
            raise ValueError(f"policy must be one of {', '.join(known)}, got {self.policy!r}")
        if not callable(self.policy) and not isinstance(self.policy, str):
            wanted = "a name or a callable that makes a policy for each scope"
            raise TypeError(f"policy must be {wanted}, got {type(self.policy).__name__}")

    def new_policy(self) -> OrderingPolicy:
        """Return a new policy, for one scope."""
        make = _named_policy(self.policy) if isinstance(self.policy, str) else self.policy
        assert make is not None
        return make()

    def token_counter(self) -> TokenCounter:
        """Return the counter that the tokenizer brings, or one that calls it for each new text.

        Raises:
            TypeError: `tokenizer` is nothing that `as_counter` accepts.
        """
        counter: Callable[[], TokenCounter] | None = getattr(self.tokenizer, "token_counter", None)
        return as_counter(self.tokenizer) if counter is None else counter()


@cache
def _named_policy(name: str) -> Callable[[], OrderingPolicy] | None:
    return POLICIES.get(name) or extension("warmprefix.policies", name)


_CONTRACTS = (
    ("store", SeenStore, "a SeenStore"),
    ("sharing", OrderSharing, "an OrderSharing"),
    ("templates", Templates, "Templates"),
    ("recorder", RequestRecorder, "a RequestRecorder"),
    ("feed", ResidencyFeed, "a ResidencyFeed"),
    ("observer", PlannerObserver, "a PlannerObserver"),
)


def options_of_url(url: str | None, settings: object) -> PlannerOptions:
    """Return the arguments of a planner that the package for the URL's scheme brings.

    Raises:
        MissingExtraError: The package needs an extra that is not installed.
        TypeError: `url` is neither a str nor None.
        ValueError: No installed package handles the scheme, or its settings are out of bounds.
    """
    check_names(url=url)
    scheme, separator, _ = (f"{DEFAULT_SCHEME}://" if url is None else url).partition("://")
    scheme = scheme.lower() if separator else ""  # a URL without a scheme may be a password
    connect = extension("warmprefix.urls", scheme)
    if connect is None:
        known = ", ".join(extension_names("warmprefix.urls"))
        raise ValueError(f"url must have one of the schemes {known}, got {scheme!r}")
    options: PlannerOptions = connect(url, settings)
    return options
