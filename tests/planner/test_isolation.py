"""A tenant that uses all names and ids of another tenant learns nothing and changes nothing.

Three worlds are compared. In the first, an attacker makes every public call with the victim's conversation, plan ids,
labels, block ids and texts, and therefore with its digests. In the second, the attacker does the same without a victim:
all its results must be the same. In the third, the victim is alone: its next plans must be the same as in the first.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from redis_servers import Server, wait_until
from warmprefix import Choice, ContextBlock, ContextPlan, ContextPlanner, EngineReport, Scope
from warmprefix.batch.plan import BatchPlan, BatchRequest
from warmprefix.order_sharing import LearnedOrder, NoSharing, OrderSharing
from warmprefix.plan import Touch
from warmprefix.planner.planner import PlanningContext
from warmprefix.residency import FeedStats, ResidencyTarget
from warmprefix.stores import (
    Abandon,
    Commit,
    Conversation,
    Forget,
    MemorySeenStore,
    Prepare,
    SeenBlock,
    SeenStore,
    Snapshot,
)
from warmprefix.telemetry import LatencySnapshot
from warmprefix_redis import RedisSeenStore
from warmprefix_redis.order_sharing import RedisOrderSharing
from warmprefix_redis.settings import SharedSettings
from warmprefix_routing import AgentRouter, Assignment
from warmprefix_tools.cli import app

VICTIM = Conversation("acme", "chat-42")
WITNESS = "witness"
AGENTS = ["a", "b", "c"]
SALT_KEY = b"a secret"
CHOOSE = Choice(2, keep=1, within=9, extra=1, most=1, twins=True)

ATTACKERS = {
    "another tenant": Conversation("evil", "chat-42"),
    "no tenant": Conversation(None, "chat-42"),
    "an empty tenant": Conversation("", "chat-42"),
    "the same letters, cut elsewhere": Conversation("acm", "echat-42"),
    "the other way round": Conversation("chat-42", "acme"),
    "with a separator": Conversation("", "acme\0chat-42"),
    "with a brace": Conversation("acme}", "chat-42"),
}


class Loot(NamedTuple):
    """All names, ids and texts of the victim."""

    blocks: list[ContextBlock]
    labels: dict[bytes, str]
    """By fingerprint."""
    done: ContextPlan
    open: ContextPlan
    batch: BatchPlan
    routed: Assignment
    routing: Assignment
    """Open."""

    @property
    def renamed(self) -> list[ContextBlock]:
        """Other texts under the victim's labels."""
        return [ContextBlock(f"Evil {i}.", id=label) for i, label in enumerate(self.labels.values())]

    def sent(self, turn: int) -> list[SeenBlock]:
        return [SeenBlock(key, label, turn, 10) for key, label in self.labels.items()]

    @property
    def secrets(self) -> list[str]:
        ids = [str(block.id) for block in self.blocks if block.id is not None]
        digests = [block.fingerprint.hex() for block in self.blocks]
        return [
            *ids,
            *digests,
            *(block.text for block in self.blocks),
            VICTIM.id,
            str(VICTIM.tenant),
            self.open.id,
            self.routing.id,
        ]


@dataclass
class World:
    """One worker of an application, or two; the first one serves the victim's requests."""

    victims: ContextPlanner
    attackers: ContextPlanner
    store: SeenStore
    sharing: OrderSharing
    victims_router: AgentRouter
    attackers_router: AgentRouter
    settings: SharedSettings | None
    """Settings of its Redis; None without one."""
    received_orders: list[LearnedOrder] = field(default_factory=list)

    def settle(self) -> None:
        """Wait long enough for all shared state to reach the other worker."""
        if self.settings is not None:
            for sender, receiver in ((self.victims, self.attackers), (self.attackers, self.victims)):
                learned = receiver.stats().shared_orders
                with sender.planning(["w", "x"], tenant=WITNESS):
                    pass
                wait_until(lambda: receiver.stats().shared_orders > learned, "the workers share orders")  # noqa: B023
            routers = (self.victims_router, self.attackers_router)
            for router, other in (routers, routers[::-1]):
                before = other.stats().learned
                router.commit(router.assign(["w"], tenant=WITNESS))
                wait_until(lambda: other.stats().learned > before, "the routers share orders")  # noqa: B023


def live(world: World) -> Loot:
    """Play the victim: two turns of a conversation, an open third one, and a learned order."""
    planner, tenant = world.victims, VICTIM.tenant
    blocks = [ContextBlock(f"Secret {i}. " * 9, id=None if i == 3 else f"paper-{i}") for i in range(6)]
    planned: list[ContextPlan] = []
    for part in (blocks[:3], blocks[2:5]):
        with planner.planning(part, conversation=VICTIM.id, placement="tail", tenant=tenant, annotate="labels") as plan:
            planned.append(plan)
    for order in ((4, 1, 0), (4, 1, 3), (4, 1, 5)):
        with planner.planning([blocks[i] for i in order], tenant=tenant) as plan:
            planned.append(plan)
            planner.touches(plan.scope)
    for start in (0, 2, 1):
        with planner.planning(scored(blocks[start:]), tenant=tenant, choose=CHOOSE) as plan:
            planned.append(plan)
    batch = planner.plan_batch([BatchRequest(i, blocks[i:], tenant=tenant) for i in range(2)], "window")
    open_plan = planner.plan(blocks[4:], conversation=VICTIM.id, placement="tail", tenant=tenant, annotate="labels")
    labels = {each.block.fingerprint: each.label for plan in (*planned[::-1], open_plan) for each in plan.blocks}
    router = world.victims_router
    routed = [router.assign(blocks[i:], conversation=VICTIM.id, tenant=tenant) for i in range(3)]
    for assignment in routed[:2]:
        router.commit(assignment)
    return Loot(blocks, labels, planned[0], open_plan, batch, routed[0], routed[2])


def go_on(world: World, loot: Loot) -> list[object]:
    """Return the victim's next plans, and whether it could commit its open ones."""
    planner, tenant = world.victims, VICTIM.tenant
    seen: list[object] = [planner.commit(loot.open)]
    seen += [planner.commit(planned.plan) for planned in loot.batch]
    for i in range(2):
        with planner.planning(loot.blocks[i:], conversation=VICTIM.id, placement="tail", tenant=tenant) as plan:
            seen.append(shown(plan))
        with planner.planning([*loot.blocks[i:], *loot.renamed], tenant=tenant) as plan:
            seen.append(shown(plan))
        for blocks in (loot.blocks[i:], loot.blocks[::-1], [*loot.blocks[i:], *loot.renamed]):
            with planner.planning(scored(blocks), tenant=tenant, choose=CHOOSE) as plan:
                seen.append((plan.blocks, plan.left_out, plan.entered, plan.render()))
        batch = [BatchRequest(j, scored(loot.blocks[j:]), tenant=tenant) for j in range(3)]
        seen.append(batch_shown(planner.plan_batch(batch, choose=CHOOSE)))
    router = world.victims_router
    seen.append(router.commit(loot.routing))
    for conversation in (VICTIM.id, None):
        for blocks in (loot.blocks, loot.renamed, loot.blocks[::-1]):
            seen.append(routed(router.assign(blocks, conversation=conversation, tenant=tenant)))
    seen.append(router.load(tenant))
    return [*seen, facts(world.store.inspect(VICTIM))]


def scored(blocks: Sequence[ContextBlock]) -> list[ContextBlock]:
    """Return candidates in this order."""
    return [ContextBlock(block.text, block.id, score=1 - i / 100) for i, block in enumerate(blocks)]


def shown(plan: ContextPlan) -> object:
    """Return all of a plan except its id."""
    return replace(plan, id=""), plan.render(), plan.order_annotation


def routed(assignment: Assignment) -> object:
    """Return all of an assignment except its id."""
    return replace(assignment, id="")


# -- the calls ---------------------------------------------------------------------------------------------------------

Attack = Callable[[World, Loot, Conversation], object]
ATTACKS: dict[tuple[str, str], Attack] = {}
"""By class and method; the results must be the same in a world without the victim."""
OPERATORS: dict[tuple[str, str], Attack] = {}
"""Calls that concern all tenants by design: an application must not expose them to its tenants. They may erase records,
so that the victim's blocks are sent again, but they must not reveal anything."""

STORES = (MemorySeenStore, RedisSeenStore)
SHARINGS = (NoSharing, RedisOrderSharing)


def tries(*calls: tuple[Any, str], operators: bool = False) -> Callable[[Attack], Attack]:
    def decorate(attack: Attack) -> Attack:
        for owner, name in calls:
            table = OPERATORS if operators else ATTACKS
            assert (owner.__name__, name) not in table
            table[owner.__name__, name] = attack
        return attack

    return decorate


@tries((ContextPlanner, "plan"))
def plan(world: World, loot: Loot, me: Conversation) -> object:
    results = []
    for blocks in (loot.renamed, loot.blocks, [*loot.renamed, *reversed(loot.blocks)]):
        for conversation in (None, me.id, VICTIM.id, loot.open.id):
            for placement in ("head", "tail"):
                for model in (None, "m"):
                    plan = world.attackers.plan(
                        blocks, conversation=conversation, placement=placement, tenant=me.tenant, model=model
                    )
                    results.append(shown(plan))
        for model in (None, "m"):
            plan = world.attackers.plan(scored(blocks), tenant=me.tenant, model=model, choose=CHOOSE)
            results.append(shown(plan))
    plan = world.attackers.plan(
        loot.blocks,
        conversation=VICTIM.id,
        placement="tail",
        tenant=me.tenant,
        history=[{"role": "user", "content": loot.blocks[0].text}],
    )
    return [*results, shown(plan)]


@tries((ContextPlanner, "aplan"))
async def aplan(world: World, loot: Loot, me: Conversation) -> object:
    plan = await world.attackers.aplan(loot.blocks, conversation=VICTIM.id, placement="tail", tenant=me.tenant)
    return shown(plan)


@tries((ContextPlanner, "planning"))
def planning(world: World, loot: Loot, me: Conversation) -> object:
    results = []
    for blocks in (loot.blocks[::-1], loot.renamed, loot.blocks):
        for conversation in (me.id, VICTIM.id):
            with world.attackers.planning(
                blocks, conversation=conversation, placement="tail", tenant=me.tenant
            ) as plan:
                results.append(shown(plan))
        with world.attackers.planning(blocks, tenant=me.tenant) as plan:
            results.append(shown(plan))
        for start in (2, 0, 1):
            with world.attackers.planning(scored(blocks[start:]), tenant=me.tenant, choose=CHOOSE) as plan:
                results.append(shown(plan))
    return results


@tries((PlanningContext, "__aenter__"))
async def planning_in_a_task(world: World, loot: Loot, me: Conversation) -> object:
    async with world.attackers.planning(
        loot.blocks, conversation=VICTIM.id, placement="tail", tenant=me.tenant
    ) as plan:
        return shown(plan)


@tries((ContextPlanner, "queued"))
def queued(world: World, loot: Loot, me: Conversation) -> object:
    for _ in range(300):  # more than are remembered
        world.attackers.queued(loot.blocks[::-1], tenant=me.tenant)
    with (
        world.attackers.queued(loot.blocks, tenant=me.tenant),
        world.attackers.planning([*loot.blocks, *loot.renamed], tenant=me.tenant) as plan,
    ):
        return plan.resident_tokens, shown(plan)


@tries((ContextPlanner, "plan_batch"))
def plan_batch(world: World, loot: Loot, me: Conversation) -> object:
    chosen = [BatchRequest(i, scored(loot.blocks[i:]), tenant=me.tenant) for i in range(3)]
    batches = [world.attackers.plan_batch(batch_of(loot, me), name) for name in ("auto", "window")]
    return [batch_shown(batch) for batch in (*batches, world.attackers.plan_batch(chosen, choose=CHOOSE))]


def batch_of(loot: Loot, me: Conversation) -> list[BatchRequest]:
    return [BatchRequest(i, [*loot.blocks[i:], *loot.renamed], tenant=me.tenant) for i in range(3)]


def batch_shown(batch: BatchPlan) -> object:
    shown = [(each.id, each.order, each.saved_tokens, each.cache_salt, each.render()) for each in batch]
    return shown, batch.saved_tokens, batch.upper_bound


def forged(loot: Loot, me: Conversation) -> Iterator[ContextPlan]:
    """Yield plans of the attacker with ids of the victim's plans."""
    for stolen in (loot.open, loot.done, loot.batch.requests[0].plan):
        for conversation in (me.id, VICTIM.id):
            scope = stolen.scope._replace(tenant=me.tenant)
            yield replace(stolen, scope=scope, conversation=conversation, tracked=True)


@tries((ContextPlanner, "commit"))
def commit(world: World, loot: Loot, me: Conversation) -> object:
    return [world.attackers.commit(plan, cached_tokens=7) for plan in forged(loot, me)]


@tries((ContextPlanner, "acommit"))
async def acommit(world: World, loot: Loot, me: Conversation) -> object:
    return [await world.attackers.acommit(plan) for plan in forged(loot, me)]


@tries((ContextPlanner, "report"))
def report(world: World, loot: Loot, me: Conversation) -> None:
    for plan in forged(loot, me):
        world.attackers.report(plan, EngineReport(0, 100, ttft=9.0, prompt_token_ids=[1, 2, 3]))


@tries((ResidencyTarget, "residency_changed"))
def residency_changed(world: World, loot: Loot, me: Conversation) -> None:
    for scope in scopes(me):
        world.attackers.residency.residency_changed(scope, list(loot.labels), 0)
        world.attackers.residency.residency_changed(scope, list(loot.labels), len(loot.labels))


@tries((ContextPlanner, "abandon"))
def abandon(world: World, loot: Loot, me: Conversation) -> object:
    return [world.attackers.abandon(plan) for plan in forged(loot, me)]


@tries((ContextPlanner, "aabandon"))
async def aabandon(world: World, loot: Loot, me: Conversation) -> object:
    return [await world.attackers.aabandon(plan) for plan in forged(loot, me)]


@tries((ContextPlanner, "withdraw"))
async def withdraw(world: World, loot: Loot, me: Conversation) -> None:
    for plan in forged(loot, me):
        world.attackers.withdraw(plan)
    while world.attackers.stats().unsettled_conversations:  # a task forgets them
        await asyncio.sleep(0.01)


@tries((ContextPlanner, "touches"))
def touches(world: World, loot: Loot, me: Conversation) -> object:
    return [world.attackers.touches(scope, 9) for scope in scopes(me)]


@tries((ContextPlanner, "touched"))
def touched(world: World, loot: Loot, me: Conversation) -> None:
    for plan in forged(loot, me):
        for blocks in range(len(plan.blocks) + 1):
            world.attackers.touched(Touch(plan.scope, plan.id, blocks, 10, 600), EngineReport(0, 100))


@tries((ContextPlanner, "forget"))
def forget(world: World, loot: Loot, me: Conversation) -> None:
    for conversation in (me.id, VICTIM.id):
        world.attackers.forget(conversation, tenant=me.tenant)


@tries((ContextPlanner, "from_url"))
def from_url(world: World, loot: Loot, me: Conversation) -> object:
    if world.settings is None:
        return None  # a world without a server has no URL
    with ContextPlanner.from_url(settings=world.settings) as planner:
        plan = planner.plan(loot.blocks, conversation=VICTIM.id, placement="tail", tenant=me.tenant)
        return shown(plan)


@tries((ContextPlanner, "stats"), (NoSharing, "stats"), (RedisOrderSharing, "stats"))
def stats(world: World, loot: Loot, me: Conversation) -> None:
    """Counts of all tenants together, and nothing else."""
    for counts in (world.attackers.stats(), world.sharing.stats()):
        fields = [getattr(counts, name) for name in counts.__dataclass_fields__]
        values = [value for value in fields if not isinstance(value, str)]
        assert {type(value) for value in values} <= {int, float, type(None), FeedStats, LatencySnapshot}


@tries(*((store, "execute(Prepare)") for store in STORES))
def prepare(world: World, loot: Loot, me: Conversation) -> object:
    return world.store.execute(Prepare(me, loot.open.id, loot.labels))


@tries((RedisSeenStore, "aexecute(Prepare)"))
async def aprepare(world: World, loot: Loot, me: Conversation) -> object:
    return (
        await world.store.aexecute(Prepare(me, loot.open.id, loot.labels))
        if isinstance(world.store, RedisSeenStore)
        else None
    )


@tries(*((store, "execute(Commit)") for store in STORES))
def store_commit(world: World, loot: Loot, me: Conversation) -> object:
    plan_ids = (loot.open.id, loot.done.id, "no such plan")
    return [world.store.execute(Commit(me, plan_id, loot.sent(3))) for plan_id in plan_ids]


@tries((RedisSeenStore, "aexecute(Commit)"))
async def store_acommit(world: World, loot: Loot, me: Conversation) -> object:
    return (
        await world.store.aexecute(Commit(me, loot.open.id, loot.sent(3)))
        if isinstance(world.store, RedisSeenStore)
        else None
    )


@tries(*((store, "execute(Abandon)") for store in STORES))
def store_abandon(world: World, loot: Loot, me: Conversation) -> object:
    return [world.store.execute(Abandon(me, plan_id)) for plan_id in (loot.open.id, loot.done.id)]


@tries((RedisSeenStore, "aexecute(Abandon)"))
async def store_aabandon(world: World, loot: Loot, me: Conversation) -> object:
    operation = Abandon(me, loot.open.id)
    return await world.store.aexecute(operation) if isinstance(world.store, RedisSeenStore) else None


@tries(*((store, "execute(Forget)") for store in STORES))
def store_forget(world: World, loot: Loot, me: Conversation) -> None:
    world.store.execute(Forget(me))
    world.store.execute(Forget(me, (loot.open.id,), (loot.done.id,), loot.sent(3)))


@tries((RedisSeenStore, "aexecute(Forget)"))
async def store_aforget(world: World, loot: Loot, me: Conversation) -> None:
    if isinstance(world.store, RedisSeenStore):
        await world.store.aexecute(Forget(me))


@tries(*((store, "inspect") for store in STORES))
def store_inspect(world: World, loot: Loot, me: Conversation) -> object:
    return facts(world.store.inspect(me))


@tries((RedisSeenStore, "ainspect"))
async def store_ainspect(world: World, loot: Loot, me: Conversation) -> object:
    return facts(await world.store.ainspect(me)) if isinstance(world.store, RedisSeenStore) else None


def facts(snapshot: Snapshot | None) -> object:
    """What is the same in worlds whose plans have other ids."""
    return snapshot and (snapshot.epoch, snapshot.turn, set(snapshot.blocks), len(snapshot.leases))


def scopes(me: Conversation) -> list[Scope]:
    return [Scope(me.tenant, model, None) for model in (None, "m", VICTIM.tenant)]


@tries(*((sharing, "follow") for sharing in SHARINGS))
def follow(world: World, loot: Loot, me: Conversation) -> object:
    for scope in scopes(me):
        world.sharing.follow(scope, world.received_orders.extend)
    mark = ContextBlock("The last order to arrive.")
    with world.attackers.planning([mark], tenant=me.tenant):
        pass
    if isinstance(world.sharing, RedisOrderSharing):
        wait_until(lambda: any(order.keys == [mark.fingerprint] for order in world.received_orders), "orders arrived")
    return [(list(order.keys), list(order.tokens), list(order.ranks)) for order in world.received_orders]


@tries((RedisOrderSharing, "has_caught_up"))
def has_caught_up(world: World, loot: Loot, me: Conversation) -> None:
    if isinstance(sharing := world.sharing, RedisOrderSharing):
        wait_until(lambda: all(map(sharing.has_caught_up, scopes(me))), "all that its tenant shared is read")
        assert not sharing.has_caught_up(Scope(VICTIM.tenant, None, None))


@tries(*((sharing, "publish") for sharing in SHARINGS))
def publish(world: World, loot: Loot, me: Conversation) -> None:
    keys = list(loot.labels)
    for scope in scopes(me):
        for _ in range(5):
            world.sharing.publish(scope, LearnedOrder(keys, [1_000] * len(keys), range(len(keys))))


@tries(*((sharing, "unfollow") for sharing in SHARINGS))
def unfollow(world: World, loot: Loot, me: Conversation) -> None:
    for scope in scopes(me):
        world.sharing.unfollow(scope)


def state(world: World, *arguments: str) -> tuple[int, str]:
    """Return the exit code and output of `warmprefix state`."""
    assert world.settings is not None
    options = ["--url", str(world.settings.redis_url), "--prefix", world.settings.key_prefix]
    result = CliRunner().invoke(app, ["state", *arguments, *options])
    return result.exit_code, result.output


def named(conversation: str, tenant: str | None) -> list[str]:
    return ["--conversation", conversation, *([] if tenant is None else ["--tenant", tenant])]


class Command:
    """Stands for `warmprefix state` in the list of calls."""


@tries((Command, "inspect"))
def command_inspect(world: World, loot: Loot, me: Conversation) -> object:
    if world.settings is None:
        return None  # there is no command for what is in a process's memory
    results: list[object] = []
    for conversation in (me.id, VICTIM.id):
        status, output = state(world, "inspect", *named(conversation, me.tenant), "--json")
        found = json.loads(output)
        results.append((status, found["usable"], [found.get(name) for name in ("epoch", "turn")], found.get("blocks")))
        results.append(len(found.get("plans", ())))
    return results


@tries((Command, "forget"))
def command_forget(world: World, loot: Loot, me: Conversation) -> object:
    if world.settings is None:
        return None
    return [state(world, "forget", *named(conversation, me.tenant)) for conversation in (me.id, VICTIM.id)]


@tries((Command, "stats"))
def command_stats(world: World, loot: Loot, me: Conversation) -> None:
    """Counts of all tenants together, and names of servers and streams."""
    if world.settings is not None:
        for options in ((), ("--json",)):
            status, output = state(world, "stats", *options)
            assert status == 0
            assert not [secret for secret in loot.secrets if secret in output]


@tries((AgentRouter, "assign"))
def assign(world: World, loot: Loot, me: Conversation) -> object:
    results = []
    for blocks in (loot.renamed, loot.blocks, [*loot.renamed, *reversed(loot.blocks)]):
        for conversation in (None, me.id, VICTIM.id, loot.routing.id):
            for together in (False, True):
                assignment = world.attackers_router.assign(
                    blocks, conversation=conversation, tenant=me.tenant, together=together
                )
                results.append(routed(assignment))
                world.attackers_router.commit(assignment)
    return results


def stolen(loot: Loot, me: Conversation) -> Iterator[Assignment]:
    """Yield assignments of the attacker with ids of the victim's assignments."""
    for assignment in (loot.routing, loot.routed):
        for conversation in (me.id, VICTIM.id):
            yield replace(assignment, tenant=me.tenant, conversation=conversation)


@tries((AgentRouter, "commit"))
def commit_routed(world: World, loot: Loot, me: Conversation) -> object:
    return [
        world.attackers_router.commit(assignment, agent, EngineReport(0), blocks=blocks)
        for assignment in stolen(loot, me)
        for agent in (None, "b")
        for blocks in (None, loot.blocks)
    ]


@tries((AgentRouter, "abandon"))
def abandon_routed(world: World, loot: Loot, me: Conversation) -> object:
    return [world.attackers_router.abandon(assignment) for assignment in stolen(loot, me)]


@tries((AgentRouter, "reassign"))
def reassign(world: World, loot: Loot, me: Conversation) -> object:
    return [routed(world.attackers_router.reassign(assignment, "a")) for assignment in stolen(loot, me)]


@tries((AgentRouter, "end"))
def end(world: World, loot: Loot, me: Conversation) -> None:
    for conversation in (me.id, VICTIM.id):
        world.attackers_router.end(conversation, me.tenant)


@tries((AgentRouter, "load"))
def load(world: World, loot: Loot, me: Conversation) -> object:
    return world.attackers_router.load(me.tenant)


@tries((AgentRouter, "stats"))
def router_stats(world: World, loot: Loot, me: Conversation) -> None:
    """Counts of all tenants together, and nothing else."""
    counts = world.attackers_router.stats()
    assert {type(getattr(counts, name)) for name in counts.__dataclass_fields__} == {int}


@tries((AgentRouter, "from_url"))
def router_from_url(world: World, loot: Loot, me: Conversation) -> object:
    if world.settings is None:
        return None  # a world without a server has no URL
    world.settle()  # the new router starts with what the tenant's others have assigned
    with AgentRouter.from_url(agents=AGENTS, settings=world.settings) as router:
        return routed(router.assign(loot.blocks, conversation=VICTIM.id, tenant=me.tenant))


@tries((AgentRouter, "catch_up"))
def router_catch_up(world: World, loot: Loot, me: Conversation) -> object:
    router = world.attackers_router
    router.catch_up(me.tenant)
    return routed(router.assign(loot.blocks, tenant=me.tenant))


@tries((AgentRouter, "join"), (AgentRouter, "leave"), (AgentRouter, "fail"), operators=True)
def come_and_go(world: World, loot: Loot, me: Conversation) -> None:
    router = world.attackers_router
    router.join("d")
    router.leave("d")
    router.fail("a")
    router.join("a")


@tries((AgentRouter, "reset"), (AgentRouter, "close"), operators=True)
def end_routing(world: World, loot: Loot, me: Conversation) -> None:
    world.attackers_router.reset()
    world.attackers_router.close()


@tries((ContextPlanner, "reset"), operators=True)
def reset(world: World, loot: Loot, me: Conversation) -> None:
    world.attackers.reset()


@tries(*((store, "clear") for store in STORES), operators=True)
def clear(world: World, loot: Loot, me: Conversation) -> None:
    world.store.clear()


@tries((ContextPlanner, "close"), operators=True)
def close(world: World, loot: Loot, me: Conversation) -> None:
    world.attackers.close()


@tries((NoSharing, "close"), (RedisOrderSharing, "close"), operators=True)
def close_sharing(world: World, loot: Loot, me: Conversation) -> None:
    world.sharing.close()


@tries((RedisSeenStore, "close"), (RedisSeenStore, "aclose"), operators=True)
async def close_store(world: World, loot: Loot, me: Conversation) -> None:
    if isinstance(world.store, RedisSeenStore):
        world.store.close()
        await world.store.aclose()


# -- completeness of the list ------------------------------------------------------------------------------------------


def public_methods(owner: type) -> set[str]:
    return {name for name, value in inspect.getmembers(owner, callable) if not name.startswith("_")}


@pytest.mark.parametrize("owner", [ContextPlanner, AgentRouter, *STORES, *SHARINGS], ids=lambda owner: owner.__name__)
def test_every_public_method_is_tried(owner: type) -> None:
    tried = {name.partition("(")[0] for kind, name in (*ATTACKS, *OPERATORS) if kind == owner.__name__}
    assert tried == public_methods(owner)


def test_every_command_on_the_state_is_tried() -> None:
    (group,) = [group for group in app.registered_groups if group.name == "state"]
    assert group.typer_instance is not None
    commands = {command.name for command in group.typer_instance.registered_commands}
    assert {name for kind, name in ATTACKS if kind == "Command"} == commands


# -- worlds ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


KINDS = ("one worker", "two workers, memory", "two workers, Redis")


class Worlds:
    """Makes independent worlds, and closes them."""

    def __init__(self, kind: str, server: Server) -> None:
        self._kind = kind
        self._server = server
        self._ends = AsyncExitStack()

    async def __aenter__(self) -> Worlds:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._ends.aclose()

    def make(self) -> World:
        world = self._on_redis() if self._kind == KINDS[2] else self._in_memory()
        for planner in {world.victims, world.attackers}:
            self._ends.push_async_exit(planner)
        for router in {world.victims_router, world.attackers_router}:
            self._ends.callback(router.close)
        self._ends.callback(world.sharing.close)
        return world

    def _in_memory(self) -> World:
        store = MemorySeenStore()
        one = ContextPlanner(store=store, salt_key=SALT_KEY)
        other = one if self._kind == KINDS[0] else ContextPlanner(store=store, salt_key=SALT_KEY)
        first = AgentRouter(AGENTS)
        second = first if self._kind == KINDS[0] else AgentRouter(AGENTS)
        return World(one, other, store, NoSharing(), first, second, None)

    def _on_redis(self) -> World:
        prefix = f"world-{time.monotonic_ns()}"
        settings = SharedSettings(
            redis_url=self._server.url, key_prefix=prefix, store_budget=10.0, salt_key=SecretStr(SALT_KEY.decode())
        )
        one, other = (ContextPlanner.from_url(settings=settings) for _ in range(2))
        store = RedisSeenStore(self._server.url, prefix=prefix, timeout=20.0)
        self._ends.push_async_callback(store.aclose)
        self._ends.callback(store.close)
        sharing = RedisOrderSharing(self._server.url, prefix=prefix)
        first, second = (AgentRouter.from_url(agents=AGENTS, settings=settings) for _ in range(2))
        world = World(one, other, store, sharing, first, second, settings)
        for planner in (one, other):  # both follow the witness
            planner.plan([], tenant=WITNESS)
        for router in (first, second):
            router.assign([], tenant=WITNESS)
        return world


@pytest.fixture(params=KINDS)
async def worlds(request: pytest.FixtureRequest, server: Server) -> AsyncIterator[Worlds]:
    async with Worlds(request.param, server) as worlds:
        yield worlds


async def attack(world: World, loot: Loot, me: Conversation) -> dict[str, object]:
    """Make every call and return the results; none may change the victim's conversation."""
    results: dict[str, object] = {}
    before = world.store.inspect(VICTIM)
    for attack in dict.fromkeys(ATTACKS.values()):
        outcome = attack(world, loot, me)
        results[attack.__name__] = await outcome if isinstance(outcome, Awaitable) else outcome
        assert world.store.inspect(VICTIM) == before, f"{attack.__name__} changed the victim's conversation"
    world.settle()
    return results


@pytest.mark.sample(8)
@pytest.mark.parametrize("me", ATTACKERS.values(), ids=list(ATTACKERS))
async def test_attacker_learns_nothing_and_changes_nothing(worlds: Worlds, me: Conversation) -> None:
    attacked, without_victim, without_attacker = [worlds.make() for _ in range(3)]
    loot = live(attacked)
    attacked.settle()
    results = await attack(attacked, loot, me)
    assert results == await attack(without_victim, loot, me)

    expected = live(without_attacker)
    without_attacker.settle()
    assert loot.labels == expected.labels
    assert go_on(attacked, loot) == go_on(without_attacker, expected)


@pytest.mark.parametrize("call", dict.fromkeys(OPERATORS.values()), ids=lambda call: call.__name__)
async def test_operator_calls_reveal_nothing(worlds: Worlds, call: Attack) -> None:
    me = ATTACKERS["another tenant"]
    results = []
    attacked, without_victim = worlds.make(), worlds.make()
    loot = live(attacked)
    for world in (attacked, without_victim):
        outcome = call(world, loot, me)
        results.append(await outcome if isinstance(outcome, Awaitable) else outcome)
        results.append(plan(world, loot, me))
    assert results[:2] == results[2:]
    after = attacked.victims.plan(
        loot.blocks, conversation=VICTIM.id, placement="tail", tenant=VICTIM.tenant, annotate="labels"
    )
    assert {planned.block for planned in after.blocks} == set(loot.blocks)
    for planned in after.blocks:
        assert planned.label == loot.labels[planned.block.fingerprint]
    if call in (reset, clear):
        assert not after.references


def test_each_tenant_has_its_own_salt() -> None:
    with ContextPlanner(salt_key=SALT_KEY) as planner:
        salts = [planner.plan(["a"], tenant=me.tenant).cache_salt for me in (VICTIM, *ATTACKERS.values())]
    named = {me.tenant for me in (VICTIM, *ATTACKERS.values())} - {None}
    assert len(set(salts) - {None}) == len(named)
