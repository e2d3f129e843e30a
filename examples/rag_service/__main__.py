"""Runs the service: `python -m examples.rag_service`."""

from __future__ import annotations

import uvicorn

from .app import create_app
from .settings import Settings

if __name__ == "__main__":
    settings = Settings()
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        # On SIGTERM, uvicorn accepts no more connections and lets the answers in progress end.
        timeout_graceful_shutdown=settings.drain_seconds,
    )
