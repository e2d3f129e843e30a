"""The settings of the service, from the environment: `RAG_ENGINE_URL`, `RAG_MODEL`, and so on."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["Settings"]


class Settings(BaseSettings):
    """Addresses and limits. The planner has its own: `WARMPREFIX_REDIS_URL`, `WARMPREFIX_SALT_KEY`, and others."""

    model_config = SettingsConfigDict(env_prefix="RAG_", env_ignore_empty=True, frozen=True)

    engine_url: str = "http://127.0.0.1:8080/v1"
    """Base URL of the gateway, or of an engine."""
    engine_key: SecretStr = SecretStr("none")
    """API key for it."""
    model: str | None = None
    """Name of the model; by default, the first one that the engine lists."""
    documents: Path = Path(__file__).parents[2] / "docs"
    """Folder with the Markdown files that the service answers from."""
    passages: int = Field(default=6, ge=1)
    """Passages per question."""
    max_tokens: int = Field(default=300, ge=1)
    """Longest answer."""
    tenant_header: str = "x-tenant"
    """Header with the name of the tenant. The proxy that authenticates users must set it."""
    host: str = "127.0.0.1"
    port: int = 8090
    drain_seconds: int = Field(default=30, ge=1)
    """Time that answers in progress get when the service stops."""
