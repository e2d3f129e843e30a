"""Real servers, with something in them to look at."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from redis_servers import Cluster, SentinelSetup, Server, binaries
from warmprefix.stores import Commit, Conversation, Prepare, SeenBlock, TurnRecord, WriteTurn
from warmprefix_redis import RedisSeenStore

Run = Callable[..., Any]


class Fill:
    """Puts conversations into a server."""

    def __init__(self, url: str, prefix: str) -> None:
        self._store = RedisSeenStore(url, prefix=prefix, timeout=10)
        self._plans = 0

    def turns(self, conversation: Conversation, blocks: int = 3, turns: int = 2) -> list[SeenBlock]:
        """Have that many blocks sent in each turn; returns all of them, as they are recorded."""
        sent: list[SeenBlock] = []
        for turn in range(1, turns + 1):
            own = [
                SeenBlock(bytes([turn, i]) * 8, f"label {turn}.{i}\u2028{{x}}", turn, 100 * i) for i in range(blocks)
            ]
            plan = self.open(conversation)
            assert self._store.execute(Commit(conversation, plan, own))
            sent += own
        return sent

    def open(self, conversation: Conversation) -> str:
        """Prepare a plan, and leave it at that."""
        self._plans += 1
        plan_id = f"plan-{self._plans}"
        self._store.execute(Prepare(conversation, plan_id, {}))
        return plan_id

    def write(self, turn: Conversation, record: TurnRecord) -> None:
        assert self._store.execute(WriteTurn(turn, record))

    def inspect(self, conversation: Conversation) -> Any:
        return self._store.inspect(conversation)

    def close(self) -> None:
        self._store.close()


@pytest.fixture
def fill() -> Iterator[Callable[..., Fill]]:
    fills: list[Fill] = []

    def make(url: str, prefix: str = "wp") -> Fill:
        fills.append(Fill(url, prefix))
        return fills[-1]

    yield make
    for each in fills:
        each.close()


@pytest.fixture(scope="session")
def run(run: Run) -> Run:
    """Run `warmprefix state`, in an environment without settings; a warning is an error."""

    def run_state(*arguments: str, **environment: str) -> Any:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            for name in [name for name in os.environ if name.startswith("WARMPREFIX_")]:
                patch.delenv(name)
            warnings.simplefilter("error")
            return run("state", *arguments, **environment)

    return run_state


@pytest.fixture(scope="session")
def ask() -> Callable[..., Any]:
    """Return a function that runs a command with `--json` and returns its exit status and output."""
    from typer.testing import CliRunner

    from warmprefix_tools.cli import app

    def asked(command: str, url: str, *arguments: str) -> tuple[int, Any]:
        options: Sequence[str] = ["state", command, "--url", url, "--json", *arguments]
        result = CliRunner().invoke(app, options, env={"WARMPREFIX_REDIS_URL": "", "WARMPREFIX_KEY_PREFIX": "wp"})
        assert result.exit_code != 2, result.output
        return result.exit_code, json.loads(result.stdout)

    return asked


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Return a server of the newest flavour."""
    with Server(list(binaries())[-1]) as server:
        yield server


@pytest.fixture(scope="session", params=list(binaries()))
def each_server(request: pytest.FixtureRequest, server: Server) -> Iterator[Server]:
    """Every flavour."""
    if request.param == list(binaries())[-1]:
        yield server
        return
    with Server(request.param) as other:
        yield other


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def sentinels() -> Iterator[SentinelSetup]:
    with SentinelSetup() as setup:
        yield setup


@pytest.fixture(autouse=True)
def emptied(request: pytest.FixtureRequest) -> None:
    """Whatever server a test asks for, it finds it empty."""
    for name in ("server", "each_server", "cluster"):
        if name in request.fixturenames:
            with request.getfixturevalue(name).client() as client:
                client.flushall()
    if "sentinels" in request.fixturenames:
        with request.getfixturevalue("sentinels").master.client() as client:
            client.flushall()
