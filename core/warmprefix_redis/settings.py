"""The settings of shared state, from arguments or from the environment."""

from __future__ import annotations

from typing import Annotated, Literal

from warmprefix.errors import MissingExtraError
from warmprefix.planner import PlannerOptions
from warmprefix.stores import RecordBounds
from warmprefix_redis.order_sharing import RedisOrderSharing
from warmprefix_redis.store import RedisSeenStore

try:
    from pydantic import Field, SecretStr, field_serializer, field_validator
    from pydantic_settings import BaseSettings, SettingsConfigDict
except ImportError as error:
    raise MissingExtraError("redis", error.name or "pydantic_settings") from error

__all__ = ["SharedSettings", "planner_options", "shared_orders"]


class SharedSettings(BaseSettings):
    """The settings of `ContextPlanner.from_url`.

    Missing ones come from the environment: `WARMPREFIX_REDIS_URL`, `WARMPREFIX_STORE_BUDGET`, and so on, where `none`
    means None.

    Raises:
        pydantic.ValidationError: Values are out of range; names each. It is a ValueError.
    """

    model_config = SettingsConfigDict(
        env_prefix="WARMPREFIX_",
        env_parse_none_str="none",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,  # a URL may hold a password, and may stand in the wrong field
        validate_default=True,
    )

    redis_url: str | None = Field(default=None, repr=False)
    """A URL as for `RedisSeenStore`: `redis://`, `rediss://`, `unix://`, `redis+sentinel://`, `redis+cluster://`.

    It may hold a password, so `repr` leaves it out, and dumps show it as they show a `SecretStr`.
    """
    key_prefix: str = Field(default="wp", pattern=r"^[A-Za-z0-9_.:-]+$")
    """Beginning of all keys, before a colon. Planners of one prefix share; an ACL can be limited to it."""
    store_budget: float = Field(default=0.020, gt=0, allow_inf_nan=False)
    """Seconds that a request waits for the store to answer, and before that to connect."""
    conversation_ttl: float = Field(default=86_400.0, gt=0, allow_inf_nan=False)
    """Seconds after its last use at which a conversation is dropped."""
    lease_ttl: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds in which a plan must be committed."""
    max_blocks: int = Field(default=1_024, ge=1)
    """Blocks remembered per conversation."""
    share_orders: bool = True
    """True if planners learn from the orders that others serve."""
    capacity_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Tokens of context that the engine's prefix cache can hold, learned if `auto`."""
    salt_key: SecretStr = SecretStr("")
    """Secret that makes cache salts unguessable for those who have a tenant's name."""

    @field_validator("redis_url", mode="before")
    @classmethod
    def _reveal(cls, url: object) -> object:
        return url.get_secret_value() if isinstance(url, SecretStr) else url

    @field_serializer("redis_url")
    def _hide(self, url: str | None) -> SecretStr | None:
        return None if url is None else SecretStr(url)


def planner_options(url: str | None, settings: SharedSettings | None) -> PlannerOptions:
    """Connect to a Redis or Valkey server, and return the arguments of a planner that shares its state there."""
    settings = SharedSettings() if settings is None else settings
    address = _address(url, settings)
    store = RedisSeenStore(
        address,
        prefix=settings.key_prefix,
        bounds=RecordBounds(
            max_blocks=settings.max_blocks, ttl=settings.conversation_ttl, lease_ttl=settings.lease_ttl
        ),
        timeout=settings.store_budget,
    )
    return {
        "store": store,
        "sharing": shared_orders(url, settings),
        "capacity_tokens": settings.capacity_tokens,
        "salt_key": settings.salt_key.get_secret_value().encode(),
    }


def shared_orders(
    url: str | None = None, settings: SharedSettings | None = None, *, newest_first: bool = False
) -> RedisOrderSharing | None:
    """Return what shares orders through a Redis or Valkey server; None if the settings share none.

    Args:
        url: As for `RedisSeenStore`; by default that of the settings.
        settings: By default those of the environment.
        newest_first: As for `RedisOrderSharing`.

    Raises:
        ValueError: There is no URL, or it can't be used.
    """
    settings = SharedSettings() if settings is None else settings
    address = _address(url, settings)
    if not settings.share_orders:
        return None
    return RedisOrderSharing(address, prefix=settings.key_prefix, newest_first=newest_first)


def _address(url: str | None, settings: SharedSettings) -> str:
    address = settings.redis_url if url is None else url
    if not address:
        raise ValueError(f"url must be given, or WARMPREFIX_REDIS_URL must be set; got {address!r}")
    return address
