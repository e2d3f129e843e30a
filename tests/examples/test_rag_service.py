"""The RAG service: its process, in front of gateways and emulated engines, with a real Redis."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import typer

from redis_servers import Server, free_port, wait_until
from warmprefix_gateway import GatewayOptions, GatewayServer
from warmprefix_tools.cli import app as commands
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

yaml = pytest.importorskip("yaml")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/rag_service"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]

INSTANT = EmulatorConfig(prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)
SUBJECTS = ("anchors", "buoys", "compasses", "docks", "ebbs", "ferries", "gulls", "harbours")
QUESTION = "What do sailors write about anchors, buoys, compasses and docks?"
RELATED = "Docks, docks, docks: what do sailors write about them, and about compasses, anchors and buoys?"


class Answer(NamedTuple):
    sources: list[str]
    text: str
    prompt_tokens: int
    cached_tokens: int


class Service:
    """The service's process, as `python -m examples.rag_service` starts it."""

    def __init__(self, engine_url: str, documents: Path, **environment: str) -> None:
        port = free_port()
        self.engine_url = engine_url
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        own = {"RAG_ENGINE_URL": engine_url, "RAG_DOCUMENTS": str(documents), "RAG_PORT": str(port)}
        command = [sys.executable, "-m", "examples.rag_service"]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "RAG_PASSAGES": "4", **own, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def __enter__(self) -> Service:
        wait_until(self.is_healthy, "the service is healthy", seconds=60)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate()

    def is_healthy(self) -> bool:
        assert self.process.poll() is None, (self.process.stderr or sys.stdin).read()
        try:
            return bool(self.client.get("/health").json() == {"status": "ok"})
        except httpx.TransportError:
            return False

    @contextmanager
    def asking(self, question: str, tenant: str = "acme") -> Iterator[Iterator[tuple[str, Any]]]:
        body, headers = {"question": question, "conversation": "chat-1"}, {"x-tenant": tenant}
        with self.client.stream("POST", "/ask", json=body, headers=headers) as response:
            assert response.status_code == 200
            yield events(response)

    def ask(self, question: str, tenant: str = "acme") -> Answer:
        with self.asking(question, tenant) as answer:
            (first, sources), *pieces, (last, usage) = answer
        assert (first, last) == ("sources", "done")
        assert {name for name, _ in pieces} == {"text"}
        return Answer(sources, "".join(text for _, text in pieces), usage["prompt_tokens"], usage["cached_tokens"])

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.client.get("/metrics/").text, re.MULTILINE)
        return 0.0 if found is None else float(found[1])


def events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    lines = response.iter_lines()
    for line in lines:
        if line.startswith("event: "):
            yield line.removeprefix("event: "), json.loads(next(lines).removeprefix("data: "))


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    for subject in SUBJECTS:
        (folder / f"{subject}.md").write_text(f"# Sailors write about {subject}\n\n" + f"All about {subject}. " * 50)
    return folder


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def redis(stack: ExitStack) -> Server:
    return stack.enter_context(Server())


@pytest.fixture(scope="module")
def start(stack: ExitStack, documents: Path) -> Callable[..., Service]:
    """Start a service with a gateway and an engine of its own."""

    def start(config: EmulatorConfig, **environment: str) -> Service:
        engine = stack.enter_context(EmulatorServer(config))
        options = GatewayOptions((engine.base_url,), port=0, tenant_header="x-tenant")
        gateway = stack.enter_context(GatewayServer(options))
        return stack.enter_context(Service(gateway.base_url, documents, **environment))

    return start


@pytest.fixture(scope="module")
def service(start: Callable[..., Service], redis: Server) -> Service:
    return start(INSTANT, WARMPREFIX_REDIS_URL=redis.url)


def test_repeated_and_related_questions_find_more_of_the_prompt_cached(service: Service) -> None:
    first, again, related = service.ask(QUESTION), service.ask(QUESTION), service.ask(RELATED)
    assert "no model" in first.text
    assert first.sources == again.sources
    assert first.cached_tokens == 0
    assert again.cached_tokens > 0.9 * again.prompt_tokens
    assert related.sources == first.sources  # although its most relevant passage is another one
    assert related.cached_tokens > 0.8 * related.prompt_tokens
    cached = sum(answer.cached_tokens for answer in (first, again, related))
    assert service.metric("rag_cached_tokens_total") == cached
    assert service.metric('rag_answers_total{outcome="ok"}') == 3
    assert service.metric('warmprefix_plans_total{planner="default"}') == 3


def test_tenants_share_no_cached_token(service: Service) -> None:
    question = "What do sailors write about gulls and ferries?"
    assert service.ask(question, tenant="one").cached_tokens == 0
    assert service.ask(question, tenant="one").cached_tokens > 0
    assert service.ask(question, tenant="other").cached_tokens == 0
    assert service.client.post("/ask", json={"question": question}).status_code == 401


def test_salts_keep_tenants_apart_without_a_gateway_too(stack: ExitStack, documents: Path) -> None:
    engine = stack.enter_context(EmulatorServer(INSTANT))
    with Service(engine.base_url, documents, WARMPREFIX_SALT_KEY="secret") as service:
        assert service.ask(QUESTION, tenant="one").cached_tokens == 0
        assert service.ask(QUESTION, tenant="other").cached_tokens == 0
        assert service.ask(QUESTION, tenant="other").cached_tokens > 0


def test_another_worker_uses_the_orders_and_a_stopped_redis_costs_no_answer(
    stack: ExitStack, service: Service, redis: Server, documents: Path
) -> None:
    published = 'warmprefix_published_orders_total{planner="default"}'
    first = service.ask(QUESTION)
    wait_until(lambda: service.metric(published) > 0, "the order is published")
    other = stack.enter_context(Service(service.engine_url, documents, WARMPREFIX_REDIS_URL=redis.url))
    other.ask("What about gulls?")  # from now on it follows this tenant
    learned = 'warmprefix_shared_orders_total{planner="default"}'
    wait_until(lambda: other.metric(learned) > 0, "the other worker has learned it")
    for redis_runs in (True, False):
        if not redis_runs:
            redis.stop()
        related = other.ask(RELATED)
        assert related.sources == first.sources
        assert related.cached_tokens > 0.8 * related.prompt_tokens


def test_a_client_that_leaves_ends_the_request_to_the_engine(stack: ExitStack, documents: Path) -> None:
    slow = EmulatorConfig(prefill_rate=math.inf, base_ttft_ms=0, decode_rate=1)
    engine = stack.enter_context(EmulatorServer(slow))
    gateway = stack.enter_context(GatewayServer(GatewayOptions((engine.base_url,), port=0, tenant_header="x-tenant")))
    with Service(gateway.base_url, documents) as service:
        with service.asking(QUESTION) as answer:
            assert [next(answer)[0], next(answer)[0]] == ["sources", "text"]
        cancelled = 'rag_answers_total{outcome="cancelled"}'
        wait_until(lambda: service.metric(cancelled) == 1, "the answer is cancelled")
        aborted = re.compile(r'^vllm:request_success_total\{.*"abort".*\} 1\.0$', re.MULTILINE)
        wait_until(lambda: aborted.search(httpx.get(f"{engine.url}/metrics").text), "the engine stops")


def test_a_failing_engine_is_reported_in_the_stream(documents: Path) -> None:
    with Service(f"http://127.0.0.1:{free_port()}/v1", documents, RAG_MODEL="any") as service:
        with service.asking(QUESTION) as answer:
            assert [name for name, _ in answer] == ["sources", "error"]
        assert service.metric('rag_answers_total{outcome="error"}') == 1


def test_sigterm_lets_an_answer_in_progress_end(start: Callable[..., Service]) -> None:
    service = start(EmulatorConfig(prefill_rate=math.inf, base_ttft_ms=0, decode_rate=40))
    with service.asking(QUESTION) as answer:
        assert next(answer)[0] == "sources"
        service.process.terminate()
        *_, (last, _usage) = answer
    assert last == "done"
    service.process.wait(30)


def test_the_compose_file_starts_what_there_is() -> None:
    assert set(COMPOSE) == {"service", "gateway", "redis", "engine"}
    for name, service in COMPOSE.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        if "build" in service:
            context = FOLDER / service["build"]["context"]
            assert (context / "pyproject.toml").is_file(), name
            assert (context / service["build"]["dockerfile"]).is_file(), name
    containerfile = (FOLDER / "Containerfile").read_text()
    assert 'CMD ["python", "-m", "examples.rag_service"]' in containerfile
    for command in (COMPOSE["engine"]["command"], COMPOSE["gateway"]["command"]):
        name, *arguments = (part.replace("${ENGINE:-", "").removesuffix("}") for part in command)
        subcommand = typer.main.get_command(commands).commands[name]  # type: ignore[attr-defined]
        subcommand.make_context(name, arguments)  # checks the options, and runs nothing


def test_the_services_of_the_compose_file_find_each_other() -> None:
    from examples.rag_service.settings import Settings

    environment = COMPOSE["service"]["environment"]
    names = {name.lower() for name in environment if name.startswith("RAG_")}
    assert names <= {f"rag_{field}" for field in Settings.model_fields}
    options = dict(part.removeprefix("--").split("=", 1) for part in COMPOSE["gateway"]["command"][1:])
    settings = Settings()
    assert options["tenant-header"] == settings.tenant_header
    assert environment["RAG_ENGINE_URL"] == "http://gateway:8080/v1"
    assert options["upstream"] == "${ENGINE:-http://engine:8000/v1}"
    assert COMPOSE["gateway"]["ports"] == ["127.0.0.1:8080:8080"]
    assert COMPOSE["service"]["ports"] == [f"127.0.0.1:{settings.port}:{settings.port}"]
    assert environment["WARMPREFIX_REDIS_URL"] == "redis://redis:6379"
