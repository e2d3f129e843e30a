"""Settings by argument and by environment."""

from __future__ import annotations

import pytest

from warmprefix import ContextPlanner
from warmprefix_redis import URL_SCHEMES, SharedSettings


def test_defaults() -> None:
    settings = SharedSettings()
    assert settings.redis_url is None
    assert settings.store_budget == 0.020
    assert settings.share_orders


def test_environment_fills_missing_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "REDIS_URL": "redis://elsewhere",
        "STORE_BUDGET": "0.005",
        "CAPACITY_TOKENS": "none",
        "SHARE_ORDERS": "false",
        "LEASE_TTL": "60",
        "RECORD_TO": "what others read",
    }.items():
        monkeypatch.setenv(f"WARMPREFIX_{name}", value)
    settings = SharedSettings(lease_ttl=30)
    assert settings.redis_url == "redis://elsewhere"
    assert settings.store_budget == 0.005
    assert settings.capacity_tokens is None
    assert not settings.share_orders
    assert settings.lease_ttl == 30


def test_secrets_are_not_shown() -> None:
    settings = SharedSettings.model_validate({"redis_url": "redis://:hunter2@host", "salt_key": "hunter3"})
    dumped = settings.model_dump()
    assert "hunter" not in repr(settings) + str(settings) + repr(dumped) + settings.model_dump_json()
    assert settings.redis_url == "redis://:hunter2@host"
    assert SharedSettings.model_validate(dumped) == settings


@pytest.mark.parametrize("name", ["redis_url", "lease_ttl", "typo"])
def test_a_validation_error_shows_no_secret(name: str) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        SharedSettings.model_validate({name: ["redis://:hunter2@host"]})
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lease_ttl", 0),
        ("conversation_ttl", float("inf")),
        ("store_budget", float("nan")),
        ("max_blocks", 0),
        ("capacity_tokens", 0),
        ("key_prefix", ""),
        ("key_prefix", "a{b}"),
        ("typo", 1),
    ],
)
def test_invalid_setting_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SharedSettings.model_validate({name: value})


def test_a_planner_needs_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARMPREFIX_REDIS_URL", raising=False)
    with pytest.raises(ValueError, match="url must be given, or WARMPREFIX_REDIS_URL must be set; got None"):
        ContextPlanner.from_url()


@pytest.mark.parametrize("scheme", [each.removesuffix("://") for each in URL_SCHEMES])
def test_each_scheme_of_the_store_connects_a_planner(scheme: str) -> None:
    """Each one is an entry point, also with valkey in place of redis, and in capitals."""
    address = "/no/socket" if scheme == "unix" else "127.0.0.1:9/service" if "sentinel" in scheme else "127.0.0.1:9"
    for name in (scheme, scheme.replace("redis", "valkey", 1), scheme.upper()):
        ContextPlanner.from_url(f"{name}://{address}", settings=SharedSettings(share_orders=False)).close()


def test_a_url_without_a_scheme_is_not_quoted() -> None:
    for url in ("secret", "user:secret@host", ""):
        with pytest.raises(ValueError, match=r"url must have one of the schemes .*, got ''$"):
            ContextPlanner.from_url(url)
    with pytest.raises(TypeError, match="url must be a str or None, got int"):
        ContextPlanner.from_url(5)  # type: ignore[arg-type]


def test_invalid_url_is_refused() -> None:
    with pytest.raises(ValueError, match=r"url must have one of the schemes .*redis.*, got 'postgres'"):
        ContextPlanner.from_url("postgres://localhost")
