"""The web application: one streaming endpoint, health and metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict

import httpx
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from prometheus_client import CollectorRegistry, Counter, make_asgi_app

from warmprefix_redis.settings import SharedSettings
from warmprefix_telemetry.prometheus import register

from .answering import Answerer, Finished, Question, Sources
from .retrieval import create_planner, create_retriever, read_passages
from .settings import Settings

__all__ = ["create_app"]

_log = logging.getLogger("rag_service")


def create_app(settings: Settings) -> FastAPI:
    """Return the application. It connects to Redis and to the engine in the background, so both may come later."""
    registry = CollectorRegistry()
    metrics = _Metrics(registry)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        passages = read_passages(settings.documents)
        limits = httpx.Timeout(connect=5, read=120, write=30, pool=5)
        with create_planner() as planner:  # the end of the block closes the connection to Redis
            register(planner, registry)
            async with httpx.AsyncClient(timeout=limits) as http:
                salt_key = SharedSettings().salt_key.get_secret_value().encode()
                retriever = create_retriever(passages, planner, settings.passages)
                app.state.answerer = Answerer(settings, retriever, http, salt_key)
                yield

    app = FastAPI(title="RAG service", lifespan=lifespan)
    app.mount("/metrics", make_asgi_app(registry))

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/ask")
    async def ask(asked: Question, request: Request) -> StreamingResponse:
        tenant = request.headers.get(settings.tenant_header)
        if not tenant:
            raise HTTPException(401, f"the header {settings.tenant_header} must name the tenant")
        answer = request.app.state.answerer.answer(asked, tenant)
        return StreamingResponse(_events(answer, metrics), media_type="text/event-stream")

    return app


class _Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.answers = Counter("rag_answers", "Answers, by outcome.", ["outcome"], registry=registry)
        self.prompt = Counter("rag_prompt_tokens", "Prompt tokens, as the engine counts them.", registry=registry)
        self.cached = Counter("rag_cached_tokens", "Those of them that it had cached.", registry=registry)


async def _events(answer: AsyncGenerator[Sources | str | Finished, None], metrics: _Metrics) -> AsyncIterator[str]:
    """Yield the answer as server-sent events: `sources`, then `text` many times, then `done` or `error`."""
    outcome = "cancelled"  # unless the answer gets to its end
    try:
        async with aclosing(answer):  # a client that leaves ends the request to the engine at once
            async for piece in answer:
                if isinstance(piece, Sources):
                    yield _event("sources", piece.sources)
                elif isinstance(piece, Finished):
                    metrics.prompt.inc(piece.prompt_tokens)
                    metrics.cached.inc(piece.cached_tokens)
                    outcome = "ok"
                    yield _event("done", asdict(piece))
                else:
                    yield _event("text", piece)
    except Exception:
        outcome = "error"
        _log.exception("a question could not be answered")
        yield _event("error", "the engine did not answer")  # the status was sent before
    finally:
        metrics.answers.labels(outcome).inc()


def _event(name: str, data: object) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
