"""Randomized turns against a model of the true prompts: short runs of `benchmarks/true_histories.py`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from store_faults import Laboratory, Lease, MemoryLaboratory, RedisLaboratory
from true_histories import SCENARIOS, Scenario, run
from true_prompts import Dialogue, Findings, Message
from true_world import World
from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix.labels import lasting_labels
from warmprefix.stores import Conversation, MemorySeenStore, Prepared, SeenBlock, SeenStore


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Log no failures, because the stores fail on purpose."""
    log = logging.getLogger("warmprefix")
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(logging.NOTSET)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
@pytest.mark.parametrize("faults", ["none", "all"])
def test_in_memory(scenario: Scenario, faults: str) -> None:
    asymmetric = scenario.application == "obedient"
    with MemoryLaboratory(1, faults, lossy=scenario.lossy, asymmetric=asymmetric) as laboratory:
        outcome = run(laboratory, scenario, turns=2_500, seed=1, period=150)
    assert outcome.findings.wrong == 0, outcome.findings.examples
    assert outcome.findings.references > 500
    assert (outcome.store_errors > 0) == (faults == "all")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_in_redis(scenario: Scenario) -> None:
    asymmetric = scenario.application == "obedient"
    with RedisLaboratory(2, "all", lossy=scenario.lossy, asymmetric=asymmetric) as laboratory:
        outcome = run(laboratory, scenario, turns=2_500, seed=2, period=250)
    assert outcome.findings.wrong == 0, outcome.findings.examples
    assert outcome.findings.references > 100
    assert outcome.store_errors > 0
    assert sum(outcome.faults.values()) > 3


# -- mistakes are found --------------------------------------------------------------------------------------------


class Spoilt(MemorySeenStore):
    """A store with a fault of its own."""


class RecordsWhateverComes(Spoilt):
    """Takes every commit for the next turn."""

    def commit(self, conversation: Conversation, plan_id: str, sent: Sequence[SeenBlock]) -> bool:
        super().prepare(conversation, f"{plan_id}, again", {})
        super().abandon(conversation, plan_id)
        return super().commit(conversation, f"{plan_id}, again", sent)


class TrustsWhatIsContested(Spoilt):
    def prepare(self, conversation: Conversation, plan_id: str, proposed: Mapping[bytes, str]) -> Prepared:
        return super().prepare(conversation, plan_id, proposed)._replace(contested=frozenset())


class RecordsWithoutCommit(Spoilt):
    def prepare(self, conversation: Conversation, plan_id: str, proposed: Mapping[bytes, str]) -> Prepared:
        prepared = super().prepare(conversation, plan_id, proposed)
        sent = [SeenBlock(key, label, prepared.turn, 1) for key, label in proposed.items() if key not in prepared.seen]
        super().commit(conversation, plan_id, sent)
        return prepared


class ForgetsNothing(Spoilt):
    def forget(self, conversation: Conversation) -> None:
        pass


class KnowsNoTenants(Spoilt):
    def prepare(self, conversation: Conversation, plan_id: str, proposed: Mapping[bytes, str]) -> Prepared:
        return super().prepare(Conversation(None, conversation.id), plan_id, proposed)

    def commit(self, conversation: Conversation, plan_id: str, sent: Sequence[SeenBlock]) -> bool:
        return super().commit(Conversation(None, conversation.id), plan_id, sent)


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
def test_mistakes_of_a_store_are_found(store: type[Spoilt]) -> None:
    application = "obedient" if store in (RecordsWithoutCommit, ForgetsNothing) else "careless"
    world = World(SpoiltLaboratory(store()), application, seed=4)  # type: ignore[arg-type]
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
def test_mistakes_in_a_plan_are_found(kind: str, spoil: Spoil) -> None:
    talk = Dialogue(tenant="acme")
    planner = ContextPlanner()
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


def test_a_planned_block_that_the_prompt_lacks_is_lost() -> None:
    planner = ContextPlanner()
    plan = planner.plan([ContextBlock("one"), ContextBlock("two")])
    findings = Findings()
    findings.check(plan, [ContextBlock("one"), ContextBlock("two")], [], Message(f"{plan.blocks[0].render()}\n\n"))
    assert findings.lost == 1
