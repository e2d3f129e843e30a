"""Options of a gateway."""

from __future__ import annotations

import ipaddress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

from warmprefix.cache_profiles import CacheProfile, as_profile
from warmprefix_gateway.reordering import as_templates
from warmprefix_gateway.routes import Routes
from warmprefix_gateway.tenant_bodies import CLOSED_FIELDS
from warmprefix_requests import SteadyMode
from warmprefix_requests.engine_salts import ENGINES, EngineName

__all__ = ["EchoHandling", "GatewayBounds", "GatewayOptions", "References", "ToolsMode", "is_loopback"]

EchoHandling = Literal["restore", "refuse", "pass"]
"""What becomes of a reference in a tool call's arguments: the text that it stands for, an error in place of the answer,
or nothing else."""

References = Literal["off", "exact", "passages"]

ToolsMode = Literal["off"] | SteadyMode


@dataclass(frozen=True, slots=True)
class GatewayBounds:
    """Limits of one gateway.

    Raises:
        ValueError: A limit is not above 0.
    """

    max_body_bytes: int = 64 << 20
    """Bytes of one request's body."""
    max_buffered_bytes: int = 1 << 30
    """Bytes of all bodies that are held at one time; requests that need more are answered with 429."""
    max_in_flight: int = 2_000
    """Requests at one time; more are answered with 429."""
    silent_seconds: float = 600.0
    """Longest silence of an upstream, before its first byte or later."""
    health_seconds: float = 5.0
    """Time between two checks of an upstream."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """What a gateway does, and where it listens.

    Raises:
        ValueError: An address is not usable, a number is out of range, the profile is unknown, or the gateway would
            listen on another address than the loopback without keys, a tenant header, or `no_auth`.
    """

    upstreams: tuple[str, ...]
    """Base URLs of the engines, such as `http://vllm:8000/v1`; several are replicas of one model."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8080
    """0 takes a free one."""
    keys: Path | None = None
    """File with one tenant per line: its name, and the SHA-256 of its key in hexadecimal digits."""
    tenant_header: str | None = None
    """Header in which a trusted proxy names the tenant."""
    no_auth: bool = False
    """Allow another address than the loopback without keys."""
    upstream_key: str | None = field(default=None, repr=False)
    """Key to send to the upstreams, in place of the clients' own."""
    salt_key: bytes = field(default=b"", repr=False)
    """Secret that makes tenants' cache salts unguessable; the same for all gateways, and for planners of the same
    tenants. Empty: one that is new with each start."""
    engine: EngineName | None = None
    """Engine of the upstreams, in its newest version; None to recognise it where a tenant's salt depends on it."""
    allow_routes: tuple[str, ...] = ()
    """Routes that tenants may use besides those of prompts and models, such as `GET /v1/files/*`; see `Routes`."""
    allow_fields: tuple[str, ...] = ()
    """Fields of bodies that tenants may use although they reach beyond one tenant, such as `previous_response_id`."""
    references: References = "exact"
    """Whether repeated tool results become references, and with `passages` their paragraphs, too; see
    `warmprefix_requests.rewrite`."""
    echoes: EchoHandling = "restore"
    """What becomes of references that a model copies into the arguments of its tool calls."""
    keep_tools: tuple[str, ...] = ()
    """Names of tools whose results always stay."""
    steady_tools: ToolsMode = "off"
    """Whether a session's tools keep their order, and where new ones stand; see `warmprefix_requests.steady_tools`."""
    reorder: tuple[str, ...] = ()
    """Contexts to order for the cache: `tags`, `llamaindex`, `json`, `mem0`, or `pattern:REGEX` for one block."""
    pin_first: int = 0
    """First blocks of each such context that stay in front."""
    pin_last: int = 0
    """Last blocks of each such context that stay at its end."""
    touches: bool = True
    """Allow requests for one token that keep contexts cached which come again, where they pay; of ordered ones only."""
    profile: CacheProfile | str = "full-attention"
    """Where the caches of the upstreams can match; one with marks makes the gateway set them."""
    bounds: GatewayBounds = GatewayBounds()
    """Limits of bytes, requests and seconds."""
    record: Path | None = None
    """File to which each request is appended as it was sent, with its texts and its usage."""
    quote: bool = False
    """Show session ids on the page."""
    redis_url: str | None = field(default=None, repr=False)
    """URL of a Redis or Valkey server, as for `RedisSeenStore`, by which gateways with the same salt key and addresses
    of upstreams agree where sessions are, and share what is known of the responses that upstreams keep."""

    def __post_init__(self) -> None:
        check_addresses(self.upstreams)
        if self.references not in get_args(References):
            raise ValueError(f"references must be one of {', '.join(get_args(References))}, got {self.references!r}")
        if self.steady_tools not in (modes := ("off", *get_args(SteadyMode))):
            raise ValueError(f"steady_tools must be one of {', '.join(modes)}, got {self.steady_tools!r}")
        if self.echoes not in get_args(EchoHandling):
            raise ValueError(f"echoes must be one of {', '.join(get_args(EchoHandling))}, got {self.echoes!r}")
        self._check_numbers()
        if not (self.keys or self.tenant_header or self.no_auth or is_loopback(self.host)):
            raise ValueError(
                f"host {self.host} can be reached by others: give keys or a tenant header, or allow it with no_auth"
            )
        if self.engine is not None and self.engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {self.engine!r}")
        if (self.allow_routes or self.allow_fields) and not self.has_tenants:
            raise ValueError("routes and fields are allowed to tenants: give keys or a tenant header")
        Routes(self.allow_routes)
        if unknown := set(self.allow_fields) - CLOSED_FIELDS:
            raise ValueError(
                f"fields must be among {', '.join(sorted(CLOSED_FIELDS))}, got {', '.join(sorted(unknown))}"
            )
        if "priority" in self.allow_fields and self.cache_profile.eviction == "priority":
            raise ValueError(
                "priority would keep a tenant's prompts cached before all others', so it cannot be allowed"
            )
        if self.redis_url is not None and not self.salt_key:
            raise ValueError("what is in Redis is sealed with the salt key: give one")
        as_profile(self.profile)
        as_templates(self.reorder)

    def _check_numbers(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port must be 0 to 65535, got {self.port}")
        for name in ("pin_first", "pin_last"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")

    @property
    def has_tenants(self) -> bool:
        """True if each request belongs to a tenant."""
        return self.keys is not None or self.tenant_header is not None

    @property
    def cache_profile(self) -> CacheProfile:
        """The profile with this name."""
        return as_profile(self.profile)


def check_addresses(upstreams: tuple[str, ...]) -> None:
    """Check that there are addresses, different ones, without a query or a password."""
    if not upstreams:
        raise ValueError("upstreams must have one address or more, got none")
    for upstream in upstreams:
        parts = urlsplit(upstream)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"upstreams must be http or https addresses without a query, got {upstream!r}")
        if parts.username or parts.password:
            raise ValueError("upstreams must have no user name or password; use an upstream key")
    if len({upstream.rstrip("/") for upstream in upstreams}) < len(upstreams):
        raise ValueError("upstreams must be different")


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
