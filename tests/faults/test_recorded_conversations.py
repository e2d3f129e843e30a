"""Each plugin with its real framework, Redis and the emulator: short runs of `benchmarks/recorded_conversations.py`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from recorded import APPLICATIONS, Application, How, is_installed
from recorded.planner import BranchApplication, NameApplication
from recorded_conversations import run
from recorded_counts import count_tokens
from recorded_traces import generated
from recorded_turns import RecordedWorld
from store_faults import RedisLaboratory


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Log no failures, because the stores fail on purpose."""
    log = logging.getLogger("warmprefix")
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(logging.NOTSET)


@pytest.fixture(params=APPLICATIONS)
def application(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not is_installed(name):
        pytest.skip(f"the framework of {name} is not installed")
    return name


@pytest.mark.sample(5)
def test_random_turns(application: str) -> None:
    row = run(application, turns=50, seed=1, faults="none")
    assert row["dangling"] == row["lost"] == row["ambiguous"] == row["crossed"] == 0
    assert row["references"] > 5


class ContinuesTheNewestTurn(BranchApplication):
    """Names the turn that was recorded last, and not the one that its prompt continues."""

    newest: ClassVar[dict[tuple[str, str | None], str | None]] = {}

    def turn(self, state: Any, question: str, passages: Any, *, conversation: str, tenant: str | None, how: How) -> Any:
        chat = (conversation, tenant)
        claimed = None if state is None else {**state, "id": self.newest.get(chat)}
        kept = super().turn(claimed, question, passages, conversation=conversation, tenant=tenant, how=how)
        if kept is not None:
            self.newest[chat] = kept["id"]
        return kept


class CutsWithoutForgetting(NameApplication):
    def may_cut(self, conversation: str, tenant: str | None) -> bool:
        return True


@pytest.mark.parametrize("kind", [ContinuesTheNewestTurn, CutsWithoutForgetting])
def test_application_that_breaks_the_rules_is_found(kind: type[Application]) -> None:
    with RedisLaboratory(3, "none", lossy=False, asymmetric=False) as laboratory:
        world = RecordedWorld(laboratory, kind, seed=3)
        while world.turns < 2_000 and not world.findings.dangling:
            world.step()
        world.close()
    assert world.findings.dangling
    assert world.findings.examples


NAMED = {"planner-name", "mem0-name", "langchain-thread", "llamaindex-chat"}
"""A name whose record was lost does not know which texts of before begin like later ones."""


@pytest.mark.slow
def test_random_turns_with_faults(application: str) -> None:
    row = run(application, turns=1_200, seed=2, faults="all", period=150)
    assert row["dangling"] == row["lost"] == row["crossed"] == 0
    assert row["ambiguous"] <= (row["references"] / 10 if application in NAMED else 0)
    assert row["references"] > 50  # short texts are sent again, and all behind an unknown turn
    assert sum(row["faults"].values()) > 2


@pytest.mark.slow
def test_record_saves_as_much_as_the_shown_history(application: str) -> None:
    row = count_tokens(application, generated()[:1])
    assert row["wrong"] == 0
    assert row["record"]["net_of_labels"] <= 1.02 * row.get("shown", row["record"])["net_of_labels"]
    assert row["record"]["computed"] < 0.9 * row["without"]["computed"]
