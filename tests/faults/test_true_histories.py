"""Randomized turns against a model of the true prompts: short runs of `benchmarks/true_histories.py`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from store_faults import Laboratory, Lease, MemoryLaboratory, RedisLaboratory
from true_branches import BranchWorld
from true_histories import SCENARIOS, Scenario, run
from true_prompts import Dialogue, Findings, Message
from true_world import World
from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix.labels import lasting_labels
from warmprefix.stores import (
    Abandon,
    Commit,
    Conversation,
    Forget,
    MemorySeenStore,
    Operation,
    Prepare,
    PreparedTurn,
    ReadTurn,
    SeenBlock,
    SeenStore,
    WriteTurn,
)

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Log no failures, because the stores fail on purpose."""
    log = logging.getLogger("warmprefix")
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(logging.NOTSET)


@pytest.mark.sample(2)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
@pytest.mark.parametrize("faults", ["none", "all"])
def test_in_memory(scenario: Scenario, faults: str) -> None:
    asymmetric = scenario.application != "careless"
    with MemoryLaboratory(1, faults, lossy=scenario.lossy, asymmetric=asymmetric) as laboratory:
        outcome = run(laboratory, scenario, turns=2_500, seed=1, period=150)
    assert outcome.findings.wrong == 0, outcome.findings.examples
    assert outcome.findings.references > 500
    assert (outcome.store_errors > 0) == (faults == "all")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_in_redis(scenario: Scenario) -> None:
    asymmetric = scenario.application != "careless"
    with RedisLaboratory(2, "all", lossy=scenario.lossy, asymmetric=asymmetric) as laboratory:
        outcome = run(laboratory, scenario, turns=2_500, seed=2, period=250)
    assert outcome.findings.wrong == 0, outcome.findings.examples
    assert outcome.findings.references > 100
    assert outcome.store_errors > 0
    assert sum(outcome.faults.values()) > 3


# -- mistakes are found --------------------------------------------------------------------------------------------


class Spoilt(MemorySeenStore):
    """A store with a fault of its own."""


class RecordsEveryCommit(Spoilt):
    """Takes every commit for the next turn."""

    def execute(self, operation: Operation[T]) -> T:
        if not isinstance(operation, Commit):
            return super().execute(operation)
        super().execute(Prepare(operation.conversation, f"{operation.plan_id}, again", {}))
        super().execute(Abandon(operation.conversation, operation.plan_id))
        renamed: Any = dataclasses.replace(operation, plan_id=f"{operation.plan_id}, again")
        return super().execute(renamed)  # type: ignore[no-any-return]


class TrustsContestedBlocks(Spoilt):
    def execute(self, operation: Operation[T]) -> T:
        result = super().execute(operation)
        if isinstance(result, PreparedTurn):
            return result._replace(contested=frozenset())
        return result


class RecordsWithoutCommit(Spoilt):
    def execute(self, operation: Operation[T]) -> T:
        result = super().execute(operation)
        if isinstance(operation, Prepare) and isinstance(result, PreparedTurn):
            new = [item for item in operation.proposed.items() if item[0] not in result.seen]
            sent = [SeenBlock(key, label, result.turn, 1) for key, label in new]
            super().execute(Commit(operation.conversation, operation.plan_id, sent))
        return result


class ForgetsNothing(Spoilt):
    def execute(self, operation: Operation[T]) -> T:
        return None if isinstance(operation, Forget) else super().execute(operation)  # type: ignore[return-value]


class IgnoresTenants(Spoilt):
    def execute(self, operation: Operation[T]) -> T:
        if isinstance(operation, Prepare | Commit):
            shared: Any = dataclasses.replace(operation, conversation=Conversation(None, operation.conversation.id))
            return super().execute(shared)  # type: ignore[no-any-return]
        return super().execute(operation)


class SpoiltLaboratory(Laboratory):
    def __init__(self, store: SeenStore) -> None:
        super().__init__(0, "none", lossy=False, asymmetric=False)
        self._store = store

    @property
    def lease(self) -> Lease:
        return Lease(0, 0)

    def store(self, worker: int) -> SeenStore:
        return self._store


@pytest.mark.parametrize("store", Spoilt.__subclasses__())
def test_faulty_store_is_detected(store: type[Spoilt]) -> None:
    application = "obedient" if store in (RecordsWithoutCommit, ForgetsNothing) else "careless"
    world = World(SpoiltLaboratory(store()), application, seed=4)  # type: ignore[arg-type]
    while world.turns < 20_000 and not world.findings.dangling:
        world.step()
    world.close()
    assert world.findings.dangling


class SpoiltTurns(MemorySeenStore):
    """A store that mixes up the records of turns."""

    def mixed_up(self, turn: Conversation) -> Conversation:
        return turn

    def execute(self, operation: Operation[T]) -> T:
        if isinstance(operation, ReadTurn | WriteTurn):
            mixed: Any = dataclasses.replace(operation, conversation=self.mixed_up(operation.conversation))
            return super().execute(mixed)  # type: ignore[no-any-return]
        return super().execute(operation)


class ReadsLaterTurns(SpoiltTurns):
    """Takes two turns for one, and then has the record of the later one."""

    def mixed_up(self, turn: Conversation) -> Conversation:
        return turn._replace(id=turn.id[:-1])

    def execute(self, operation: Operation[T]) -> T:
        written = operation  # the check would widen the type of `operation`
        if isinstance(written, WriteTurn):
            self._states.pop((self.mixed_up(written.conversation), "turn"))
        return super().execute(operation)


class SharesTurnsOfTenants(SpoiltTurns):
    """Has one record for all tenants."""

    def mixed_up(self, turn: Conversation) -> Conversation:
        return turn._replace(tenant=None)


@pytest.mark.parametrize("store", SpoiltTurns.__subclasses__())
def test_store_that_mixes_up_turns_is_detected(store: type[SpoiltTurns]) -> None:
    world = BranchWorld(SpoiltLaboratory(store()), seed=4)
    while world.turns < 20_000 and not world.findings.dangling:
        world.step()
    world.close()
    assert world.findings.dangling


Spoil = Callable[[ContextPlan], ContextPlan]


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("lost", lambda plan: dataclasses.replace(plan, blocks=plan.blocks[1:])),
        ("dangling", lambda plan: plan),
        ("ambiguous", lambda plan: relabelled(plan, lasting_labels(Dialogue.blocks([3]))[0])),
        ("crossed", lambda plan: relabelled(plan, "globex.3")),
    ],
)
def test_faulty_plan_is_detected(kind: str, spoil: Spoil) -> None:
    talk = Dialogue(tenant="acme")
    planner = ContextPlanner(annotate="labels")
    talk.turn(planner, [1, 2, 3])
    request = talk.blocks([1, 4])
    plan = spoil(planner.plan(request, conversation="chat", tenant="acme", placement="tail"))
    message = Message(f"{plan.render()}\n\n")
    findings = Findings()
    findings.check(plan, request, [] if kind == "dangling" else talk.history, message)
    assert getattr(findings, kind) == 1, findings
    assert findings.wrong == 1


def relabelled(plan: ContextPlan, label: str) -> ContextPlan:
    """Return the plan with another label for its only block in full."""
    blocks = tuple(block if block.reference else block._replace(label=label) for block in plan.blocks)
    return dataclasses.replace(plan, blocks=blocks)


def test_evidence_missing_from_the_prompt_counts_as_lost() -> None:
    planner = ContextPlanner(annotate="labels")
    plan = planner.plan([ContextBlock("one"), ContextBlock("two")])
    findings = Findings()
    findings.check(plan, [ContextBlock("one"), ContextBlock("two")], [], Message(f"{plan.blocks[0].render()}\n\n"))
    assert findings.lost == 1
