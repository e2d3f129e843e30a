"""What `ContextPlanner` promises, one example each. The invariants are held by test_invariants.py."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeVar

import pytest

from warmprefix import ContextBlock, ContextPlan, ContextPlanner, Scope, StoreError, Templates
from warmprefix.labels import label_candidates
from warmprefix.ordering import BlockView, PrefixView, ServedBlock
from warmprefix.prefix.tree import PrefixTree
from warmprefix.stores import Conversation, MemorySeenStore, Operation, Snapshot

T = TypeVar("T")


def block(name: object, tokens: int = 100) -> ContextBlock:
    return ContextBlock(f"Everything about block {name}.", id=f"Doc_{name}", tokens=tokens)


def blocks(*names: object) -> list[ContextBlock]:
    return [block(name) for name in names]


def serve(planner: ContextPlanner, *names: object, **options: object) -> ContextPlan:
    with planner.planning(blocks(*names), **options) as plan:  # type: ignore[arg-type]
        return plan


def shape(plan: ContextPlan) -> list[str]:
    """Return `ref:1` or `full:1` for each block, as in the papers' examples: without prefix and digits of labels."""
    return [
        f"{'full' if planned.reference is None else 'ref'}:{re.sub('^Doc_|~[0-9a-f]{6}$', '', planned.label)}"
        for planned in plan.blocks
    ]


# -- the papers' examples ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "turns",
    [
        [([1, 2, 4], None), ([1, 5, 2], ["ref:1", "full:5", "ref:2"])],
        [([4, 3, 1], None), ([4, 3, 2], ["ref:4", "ref:3", "full:2"])],
        [
            ([10, 20, 30], None),
            ([10, 20, 40], ["ref:10", "ref:20", "full:40"]),
            ([10, 30, 50], ["ref:10", "ref:30", "full:50"]),
        ],
    ],
)
def test_repeated_blocks_become_references(turns: list[tuple[list[int], list[str] | None]]) -> None:
    """ContextPilot, Alg. 3."""
    planner = ContextPlanner(annotate="both")
    for names, expected in turns:
        plan = serve(planner, *names, conversation="chat", placement="tail")
        if expected is not None:
            assert shape(plan) == expected


def test_default_annotations_have_the_documented_wording() -> None:
    """The wording of the order note is ContextPilot's."""
    planner = ContextPlanner(annotate="both")
    serve(planner, 1, 2)
    plan = serve(planner, 2, 1, 4)
    assert [planned.label for planned in plan.blocks] == ["Doc_1", "Doc_2", "Doc_4"]
    assert plan.order_annotation == (
        "Please read the context in the following priority order: [Doc_2] > [Doc_1] > [Doc_4] and answer the question."
    )
    history = [serve(planner, 1, 2, placement="tail", history=[]).render()]
    assert serve(planner, 1, placement="tail", history=history).render() == (
        "Please also use the context labelled [Doc_1] above in this conversation."
    )


def test_one_sentence_replaces_all_references() -> None:
    planner = ContextPlanner(annotate="both")
    history = [serve(planner, 1, 2, 3, placement="tail", history=[]).render()]
    plan = planner.plan(blocks(4, 3, 5, 1, 2), placement="tail", history=history)
    sentence = "Please also use the context labelled [Doc_3], [Doc_1], [Doc_2] above in this conversation."
    new = [f"[Doc_{name}] {block(name).text}" for name in (4, 5)]
    assert plan.paragraphs() == [new[0], sentence, new[1], "", ""]
    assert plan.render() == "\n\n".join([new[0], sentence, new[1]])


# -- rendering -----------------------------------------------------------------------------------------------------


def test_a_plan_renders_labelled_paragraphs_then_the_order_annotation() -> None:
    planner = ContextPlanner(annotate="both")
    serve(planner, "a", "b")
    assert serve(planner, "b", "a").render() == (
        "[Doc_a] Everything about block a.\n\n"
        "[Doc_b] Everything about block b.\n\n"
        "Please read the context in the following priority order: [Doc_b] > [Doc_a] and answer the question."
    )


def test_overridden_templates_are_used() -> None:
    templates = Templates(order="Most relevant first: {order}.", location="See {labels} above.")
    planner = ContextPlanner(templates=templates, annotate="both")
    serve(planner, "a", "b", conversation="chat", placement="tail")
    assert serve(planner, "b", "a").order_annotation == "Most relevant first: [Doc_b] > [Doc_a]."
    again = serve(planner, "a", conversation="chat", placement="tail")
    assert again.render() == f"See [{again.blocks[0].label}] above."


def test_a_plan_identifies_its_request() -> None:
    planner = ContextPlanner()
    plan = planner.plan(blocks("a"), conversation="chat", placement="tail", tenant="acme", model="m", preamble="Hi.")
    assert (plan.conversation, plan.placement, plan.turn) == ("chat", "tail", 1)
    assert plan.scope == Scope("acme", "m", ContextBlock("Hi.").fingerprint)
    assert plan.id != planner.plan(blocks("a")).id


def test_token_counts_add_up() -> None:
    planner = ContextPlanner(annotate="both")
    first = [block("a", 300), block("b", 200)]
    with planner.planning(first, conversation="chat", placement="tail") as plan:
        assert (plan.total_tokens, plan.reference_tokens, plan.resident_tokens) == (500, 0, 0)
    with planner.planning([block("c", 50), block("a", 300)], conversation="chat", placement="tail") as plan:
        assert (plan.total_tokens, plan.reference_tokens, plan.resident_tokens) == (350, 300, 0)
    assert planner.plan([block("c", 50), block("a", 300)]).resident_tokens == 300


# -- ordering ------------------------------------------------------------------------------------------------------


def test_the_first_tail_turn_is_ordered_and_later_ones_keep_relevance_order() -> None:
    planner = ContextPlanner()
    serve(planner, 1, 2, 3)
    first = serve(planner, 3, 2, 1, conversation="chat", placement="tail")
    assert first.order == (2, 1, 0)
    second = serve(planner, 7, 3, 6, conversation="chat", placement="tail")
    assert second.order == (0, 1, 2)
    assert second.order_annotation is None


def test_order_locked_keeps_everything_in_place() -> None:
    planner = ContextPlanner()
    serve(planner, 1, 2, 3)
    request = [block(3), block(2), ContextBlock("last", pinned="start"), block(1)]
    plan = planner.plan(request, order_locked=True)
    assert plan.order == (0, 1, 2, 3)
    assert plan.order_annotation is None


def test_a_locked_order_can_be_shared() -> None:
    planner = ContextPlanner()
    serve(planner, 3, 1, 2, order_locked=True)
    assert planner.plan(blocks(1, 2, 3)).order == (2, 0, 1)


def test_pinned_blocks_stay_at_their_ends_and_the_path_continues_after_them() -> None:
    planner = ContextPlanner()
    rules, reminder = ContextBlock("Rules.", pinned="start"), ContextBlock("Reminder.", pinned="end")
    with planner.planning([rules, block(1), block(2), reminder]):
        pass
    plan = planner.plan([block(3), block(2), reminder, block(1), rules])
    assert [planned.block.text for planned in plan.blocks[:3]] == [rules.text, block(1).text, block(2).text]
    assert plan.blocks[-1].block == reminder
    assert plan.resident_tokens == rules.tokens + 200


@pytest.mark.parametrize("policy", ["relevance", "sorted", "coaccess"])
def test_the_policy_can_be_named(policy: str) -> None:
    planner = ContextPlanner(policy=policy)
    serve(planner, 2, 1)
    assert sorted(planner.plan(blocks(1, 2)).order) == [0, 1]


class Reversed:
    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        return range(len(blocks) - 1, -1, -1)

    def observe(self, served: Sequence[BlockView]) -> None:
        pass


def test_the_policy_can_be_the_callers_own() -> None:
    assert ContextPlanner(policy=Reversed).plan(blocks(1, 2, 3)).order == (2, 1, 0)


class Attentive(Reversed):
    def __init__(self, observed: list[tuple[int, bool]]) -> None:
        self.observed = observed

    def observe(self, served: Sequence[BlockView]) -> None:
        self.observed += [(block.rank, block.resident) for block in served if isinstance(block, ServedBlock)]


def test_a_policy_observes_rank_and_residency_of_each_served_block() -> None:
    observed: list[tuple[int, bool]] = []
    planner = ContextPlanner(policy=lambda: Attentive(observed))
    serve(planner, 1, 2, 3)
    assert observed == [(2, False), (1, False), (0, False)]
    observed.clear()
    serve(planner, 4, 2, 3)
    assert observed == [(2, True), (1, True), (0, False)]


class Broken(Reversed):
    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        return [0] * len(blocks)

    def observe(self, served: Sequence[BlockView]) -> None:
        raise RuntimeError("no memory")


def test_a_failing_policy_costs_only_the_order(caplog: pytest.LogCaptureFixture) -> None:
    planner = ContextPlanner(policy=Broken)
    with caplog.at_level(logging.WARNING, "warmprefix"):
        for _ in range(3):
            plan = serve(planner, 1, 2)
            assert plan.order == (0, 1)
            assert plan.order_annotation is None
    assert planner.stats().policy_errors == 6
    assert len(caplog.records) == 1


class Fractional(Reversed):
    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Any:
        return [float(i) for i in range(len(blocks))]


def test_an_order_must_consist_of_integers() -> None:
    planner = ContextPlanner(policy=Fractional)
    assert planner.plan(blocks(1, 2)).order == (0, 1)
    assert planner.stats().policy_errors == 1


# -- commit and abandon --------------------------------------------------------------------------------------------


def test_only_committed_plans_are_learned_from() -> None:
    planner = ContextPlanner()
    planner.abandon(planner.plan(blocks(1, 2)))
    assert planner.plan(blocks(2, 1)).order == (0, 1)


def test_an_open_plan_counts_as_resident_for_the_order_alone() -> None:
    planner = ContextPlanner()
    in_flight = planner.plan(blocks(1, 2))
    plan = planner.plan(blocks(2, 1))
    assert (plan.order, plan.resident_tokens) == ((1, 0), 0)
    planner.abandon(in_flight)
    planner.abandon(plan)
    assert planner.plan(blocks(2, 1)).order == (0, 1)


def test_only_committed_plans_are_seen() -> None:
    planner = ContextPlanner(annotate="both")
    planner.plan(blocks(1), conversation="chat", placement="tail")
    planner.abandon(planner.plan(blocks(1), conversation="chat", placement="tail"))
    assert shape(planner.plan(blocks(1), conversation="chat", placement="tail")) == ["full:1"]


def test_a_plan_is_closed_once() -> None:
    planner = ContextPlanner()
    committed, abandoned = planner.plan(blocks(1)), planner.plan(blocks(1))
    assert [planner.commit(committed), planner.commit(committed), planner.abandon(committed)] == [True, False, False]
    assert [planner.abandon(abandoned), planner.abandon(abandoned), planner.commit(abandoned)] == [True, False, False]
    stats = planner.stats()
    assert (stats.commits, stats.abandons, stats.late_commits, stats.open_plans) == (1, 1, 2, 0)


def test_leaving_planning_by_an_exception_abandons() -> None:
    planner = ContextPlanner(annotate="both")
    with pytest.raises(KeyboardInterrupt), planner.planning(blocks(1), conversation="chat", placement="tail"):
        raise KeyboardInterrupt
    assert shape(planner.plan(blocks(1), conversation="chat", placement="tail")) == ["full:1"]
    assert planner.stats().abandons == 1


def test_committing_inside_planning_reports_cached_tokens_and_counts_once() -> None:
    planner = ContextPlanner()
    with planner.planning(blocks(1)) as plan:
        planner.commit(plan, cached_tokens=64)
    stats = planner.stats()
    assert (stats.commits, stats.reports, stats.reported_cached_tokens) == (1, 1, 64)


async def test_cancelling_a_task_abandons() -> None:
    planner = ContextPlanner(annotate="both")
    planned = asyncio.Event()

    async def request() -> None:
        async with planner.planning(blocks(1), conversation="chat", placement="tail"):
            planned.set()
            await asyncio.sleep(3_600)

    task = asyncio.create_task(request())
    await planned.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert planner.stats().abandons == 1
    plan = await planner.aplan(blocks(1), conversation="chat", placement="tail")
    assert shape(plan) == ["full:1"]


async def test_the_async_twins_do_the_same() -> None:
    planner = ContextPlanner(annotate="both")
    async with planner.planning(blocks(1, 2), conversation="chat", placement="tail") as plan:
        assert shape(plan) == ["full:1", "full:2"]
    plan = await planner.aplan(blocks(2), conversation="chat", placement="tail")
    assert shape(plan) == ["ref:2"]
    assert await planner.aabandon(plan)
    assert not await planner.acommit(plan)
    planner.forget("chat")
    assert shape(await planner.aplan(blocks(2), conversation="chat", placement="tail")) == ["full:2"]


@pytest.mark.parametrize("where", ["policy", "store"])
def test_a_plan_can_be_abandoned_in_the_middle_of_another_call(where: str) -> None:
    """The garbage collector does that when it closes a generator that is suspended in `planning`."""

    def stream() -> Generator[None, None, None]:
        with planner.planning(blocks(1), conversation="chat", placement="tail"):
            yield

    def collect(at: str) -> None:
        while at == where and garbage:
            garbage.pop().close()

    class Collecting(Reversed):
        def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
            collect("policy")
            return range(len(blocks))

    class CollectingStore(MemorySeenStore):
        def _use(self, key: Any, now: float) -> Any:
            collect("store")
            return super()._use(key, now)

    def request() -> None:
        planner.plan(blocks(1), conversation="chat", placement="tail")

    garbage: list[Generator[None, None, None]] = []
    planner = ContextPlanner(policy=Collecting, store=CollectingStore())
    abandoned = stream()
    next(abandoned)
    garbage.append(abandoned)
    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "deadlock"
    assert (planner.stats().abandons, planner.stats().open_plans) == (1, 1)


@pytest.mark.parametrize("step", ["insert", "_use", "_fit"])
def test_an_interrupt_while_learning_costs_only_the_learned_state(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    planner = ContextPlanner()
    serve(planner, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(PrefixTree, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            serve(planner, 1, 3)
    assert planner.stats().scopes == 0
    serve(planner, 1, 2)
    assert serve(planner, 2, 1).order == (1, 0)


def test_a_late_commit_makes_blocks_of_parallel_plans_unseen() -> None:
    planner = ContextPlanner(annotate="both", max_open_plans=2)
    kept = planner.plan(blocks(1), conversation="chat", placement="tail")
    retry = planner.plan(blocks(2), conversation="chat", placement="tail")
    planner.plan(blocks(3))
    assert planner.commit(retry)
    assert not planner.commit(kept)
    assert shape(planner.plan(blocks(1, 2), conversation="chat", placement="tail")) == ["full:1", "full:2"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_plans_of_a_forked_planner_have_distinct_ids() -> None:
    script = """if True:
        import os
        from warmprefix import ContextPlanner
        planner = ContextPlanner()
        if os.fork():
            os.wait()
        print(planner.plan([]).id, flush=True)
    """
    forked = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert len(set(forked.stdout.split())) == 2


# -- conversations -------------------------------------------------------------------------------------------------


def test_head_placement_never_de_duplicates() -> None:
    planner = ContextPlanner(annotate="both")
    for _ in range(3):
        plan = serve(planner, 1, 2, conversation="chat", placement="head")
        assert shape(plan) == ["full:1", "full:2"]


def test_without_a_conversation_nothing_is_de_duplicated() -> None:
    planner = ContextPlanner(annotate="both")
    for _ in range(3):
        assert shape(serve(planner, 1, 2, placement="tail")) == ["full:1", "full:2"]


def test_conversations_of_two_tenants_with_one_name_are_two() -> None:
    planner = ContextPlanner(annotate="both")
    serve(planner, 1, conversation="chat", placement="tail", tenant="acme")
    assert shape(serve(planner, 1, conversation="chat", placement="tail", tenant="other")) == ["full:1"]
    assert shape(serve(planner, 1, conversation="chat", placement="tail")) == ["full:1"]
    assert shape(serve(planner, 1, conversation="chat", placement="tail", tenant="acme")) == ["ref:1"]


def test_a_conversation_may_change_its_model() -> None:
    planner = ContextPlanner(annotate="both")
    serve(planner, 1, conversation="chat", placement="tail", model="small")
    assert shape(serve(planner, 1, conversation="chat", placement="tail", model="large")) == ["ref:1"]


def test_forgetting_a_conversation_sends_everything_again() -> None:
    planner = ContextPlanner(annotate="both")
    serve(planner, 1, conversation="chat", placement="tail")
    planner.forget("chat")
    assert shape(serve(planner, 1, conversation="chat", placement="tail")) == ["full:1"]


def test_commits_of_parallel_plans_make_both_unseen() -> None:
    planner = ContextPlanner(annotate="both")
    retried = planner.plan(blocks(1), conversation="chat", placement="tail")
    retry = planner.plan(blocks(2), conversation="chat", placement="tail")
    assert planner.commit(retry)
    assert not planner.commit(retried)
    assert planner.stats().conflicts == 1
    assert shape(planner.plan(blocks(1, 2), conversation="chat", placement="tail")) == ["full:1", "full:2"]


# -- visible history -----------------------------------------------------------------------------------------------


def user(content: object) -> Mapping[str, Any]:
    return {"role": "user", "content": content}


def test_visible_messages_decide_what_is_seen() -> None:
    planner = ContextPlanner(annotate="both")
    first = planner.plan(blocks(1, 2), placement="tail", history=[])
    history: list[Mapping[str, Any]] = [
        user(f"{first.render()}\n\nWhat is it?"),
        {"role": "assistant", "content": None},
    ]
    assert shape(planner.plan(blocks(2, 3), placement="tail", history=history)) == ["ref:2", "full:3"]
    assert shape(planner.plan(blocks(2, 3), placement="tail", history=[user("It was cut.")])) == ["full:2", "full:3"]


@pytest.mark.parametrize("wrap", [str, lambda text: user([{"type": "text", "text": text}]), user])
def test_messages_may_be_strings_or_mappings_or_hold_parts(wrap: object) -> None:
    planner = ContextPlanner(annotate="both")
    rendered = planner.plan(blocks(1), placement="tail", history=[]).render()
    plan = planner.plan(blocks(1), placement="tail", history=[wrap(rendered)])  # type: ignore[operator]
    assert shape(plan) == ["ref:1"]


def test_a_history_of_system_prompts_only_is_the_first_turn() -> None:
    planner = ContextPlanner()
    serve(planner, 1, 2)
    history: list[Mapping[str, Any]] = [{"role": "system", "content": "Be brief."}]
    assert planner.plan(blocks(2, 1), placement="tail", history=history).order == (1, 0)
    assert planner.plan(blocks(2, 1), placement="tail", history=[*history, user("Hello.")]).order == (0, 1)


def test_nothing_is_ordered_or_learned_after_a_system_prompt_with_one_of_the_blocks() -> None:
    planner = ContextPlanner(annotate="both")
    serve(planner, 1, 2)
    history = [{"role": "system", "content": planner.plan(blocks(1)).render()}]
    with planner.planning(blocks(2, 1, 3), placement="tail", history=history) as plan:
        assert shape(plan) == ["full:2", "ref:1", "full:3"]
        assert (plan.resident_tokens, plan.reference_tokens) == (0, 100)
    assert (planner.stats().references, planner.stats().reference_tokens) == (1, 100)
    assert planner.plan(blocks(3, 2)).resident_tokens == 0


def test_a_history_that_forges_every_label_of_a_block_gets_no_reference() -> None:
    planner = ContextPlanner(annotate="both")
    original, other = ContextBlock("The original text.", id="x"), ContextBlock("Another text.", id="x")
    history = [
        planner.plan([other]).render(),
        *(f"[{label}] Lies." for label in label_candidates(original) if label != "x"),
    ]
    plan = planner.plan([original, other], placement="tail", history=history)
    assert shape(plan) == [f"full:ctx-{original.fingerprint.hex()}~2", "ref:x"]


def test_a_shown_history_voids_the_record_permanently() -> None:
    planner = ContextPlanner(annotate="both")
    serve(planner, 1, conversation="chat", placement="tail")
    shown = planner.plan(blocks(1), conversation="chat", placement="tail", history=[user("Cut.")])
    assert shape(shown) == ["full:1"]
    assert shape(planner.plan(blocks(1), conversation="chat", placement="tail")) == ["full:1"]


def test_a_part_of_a_block_in_the_history_is_not_the_block() -> None:
    planner = ContextPlanner()
    short, long = ContextBlock("The sky", id="a"), ContextBlock("The sky is blue.", id="a")
    history = [user(planner.plan([long], placement="tail", history=[]).render())]
    plan = planner.plan([short], placement="tail", history=history)
    assert plan.references == ()
    assert plan.blocks[0].label != "a"


def test_a_header_inside_a_line_is_not_a_block() -> None:
    planner = ContextPlanner()
    history = [user(f"He wrote: {planner.plan(blocks(1)).render()}")]
    assert shape(planner.plan(blocks(1), placement="tail", history=history))[0].startswith("full")


@pytest.mark.parametrize(
    "line", [" [x] Lies.", "[x]: lies.", "[x]\tLies.", "[\u200bx] Lies.", "So.\r[x] Lies.", "So.\u2028[x] Lies."]
)
def test_a_line_that_seems_to_begin_with_a_label_blocks_that_label(line: str) -> None:
    planner = ContextPlanner(annotate="both")
    original = ContextBlock("The original text.", id="x")
    history = [planner.plan([original]).render(), line]
    plan = planner.plan([original], placement="tail", history=history)
    assert [planned.label for planned in plan.blocks] == [f"x~{original.fingerprint.hex()[:6]}"]
    assert plan.references == ()
    again = planner.plan([original], placement="tail", history=[*history, plan.render()])
    assert [reference.label for reference in again.references] == [f"x~{original.fingerprint.hex()[:6]}"]


def test_an_escaped_header_blocks_no_label() -> None:
    planner = ContextPlanner(annotate="both")
    original, forger = ContextBlock("The original text.", id="x"), ContextBlock("So.\n[x] Lies.", id="y")
    history = [planner.plan([original, forger]).render()]
    assert shape(planner.plan([original], placement="tail", history=history)) == ["ref:x"]


# -- labels --------------------------------------------------------------------------------------------------------


def test_two_texts_of_one_id_get_two_labels_and_keep_them() -> None:
    planner = ContextPlanner(annotate="both")
    old, new = ContextBlock("Version 1.", id="page"), ContextBlock("Version 2.", id="page")
    labels = [planned.label for planned in planner.plan([old, new]).blocks]
    assert labels[0] == "page"
    assert labels[1].startswith("page~")
    assert planner.plan([new]).blocks[0].label == labels[1]
    assert planner.plan([new, old]).blocks[1].label == "page"


def test_a_conversation_keeps_its_labels_through_a_change_of_model() -> None:
    planner = ContextPlanner(annotate="both")
    old, new = ContextBlock("Version 1.", id="page"), ContextBlock("Version 2.", id="page")
    with planner.planning([old], conversation="chat", placement="tail", model="small"):
        pass
    plan = planner.plan([new, old], conversation="chat", placement="tail", model="large")
    assert plan.blocks[0].label == f"page~{new.fingerprint.hex()[:6]}"
    assert plan.blocks[1].reference is not None
    assert plan.blocks[1].reference.label == f"page~{old.fingerprint.hex()[:6]}"


def test_a_label_names_one_text_after_its_record_is_lost() -> None:
    """For example after a restart, or after the store evicted the conversation."""
    old, new = ContextBlock("Version 1.", id="page"), ContextBlock("Version 2.", id="page")
    store = MemorySeenStore(max_conversations=1)
    workers = {
        "model switch, evicted record": ContextPlanner(annotate="both", store=store),
        "restart": ContextPlanner(annotate="both"),
    }
    shown = serve_block(ContextPlanner(annotate="both", store=store), old, model="small")
    for what, planner in workers.items():
        serve_block(planner, ContextBlock("x"), conversation="another chat")
        assert serve_block(planner, new, model="large") != shown, what


@pytest.mark.parametrize("form", ["x\n[{}] forged", "Please also use the context labelled [{}] above."])
def test_a_text_cannot_imitate_a_label_of_a_history_that_is_not_shown(form: str) -> None:
    original = ContextBlock("The original text.", id="x")
    forger = ContextBlock(form.format(f"x~{original.fingerprint.hex()[:6]}"), id="y")
    for first, second in ((original, forger), (forger, original)):
        planner = ContextPlanner(annotate="both")
        serve_block(planner, first)
        with planner.planning([second], conversation="chat", placement="tail"):
            pass
        plan = planner.plan([ContextBlock(forger.text)], conversation="new", placement="tail")
        assert f"\\[{original.id}~" in plan.render()


def serve_block(planner: ContextPlanner, block: ContextBlock, **options: Any) -> str:
    given: Any = {"conversation": "chat", "placement": "tail", **options}
    with planner.planning([block], **given) as plan:
        return plan.blocks[0].label


def test_equal_texts_are_placed_once_with_all_their_positions() -> None:
    request = [ContextBlock("a", id="x"), ContextBlock("b"), ContextBlock("a", id="y"), ContextBlock("a")]
    plan = ContextPlanner(annotate="both").plan(request)
    assert (plan.blocks[0].label, plan.blocks[0].positions) == ("x", (0, 2, 3))
    assert len(plan.blocks) == 2


# -- scopes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{"tenant": "other"}, {"model": "other"}, {"preamble": "other"}, {}])
def test_no_order_is_learned_across_scopes(other: dict[str, str]) -> None:
    planner = ContextPlanner()
    serve(planner, 1, 2, tenant="acme", model="m", preamble="p")
    assert planner.plan(blocks(2, 1), tenant="acme", model="m", preamble="p").order == (1, 0)
    scope = {"tenant": "acme", "model": "m", "preamble": "p"} | other if other else {}
    assert planner.plan(blocks(2, 1), **scope).order == (0, 1)  # type: ignore[arg-type]


def test_the_cache_salt_follows_the_tenant_and_the_key() -> None:
    def salt(tenant: str | None, key: bytes = b"secret") -> str | None:
        return ContextPlanner(salt_key=key).plan([], tenant=tenant).cache_salt

    assert salt(None) is None
    assert salt("acme") == salt("acme") != salt("other")
    assert salt("acme") != salt("acme", b"another secret")
    assert str(salt("acme")).isalnum()
    assert len(str(salt("acme"))) <= 128


# -- bounds and reset ----------------------------------------------------------------------------------------------


def test_the_least_recently_used_scope_is_forgotten() -> None:
    planner = ContextPlanner(max_scopes=2)
    for tenant in ("a", "b", "a", "c"):
        serve(planner, 1, 2, tenant=tenant)
    assert planner.plan(blocks(2, 1), tenant="a").order == (1, 0)
    assert planner.plan(blocks(2, 1), tenant="b").order == (0, 1)
    assert planner.stats().scopes == 2


def test_the_oldest_open_plan_is_dropped_at_the_bound() -> None:
    planner = ContextPlanner(max_open_plans=2)
    plans = [planner.plan(blocks(i)) for i in range(3)]
    assert [planner.commit(plan) for plan in plans] == [False, True, True]


def test_reset_forgets_everything() -> None:
    planner = ContextPlanner(annotate="both")
    serve(planner, 1, 2, conversation="chat", placement="tail")
    stale = planner.plan(blocks(1, 2))
    planner.reset()
    assert planner.stats() == type(planner.stats())()
    assert not planner.commit(stale)
    assert planner.plan(blocks(2, 1)).order == (0, 1)
    assert shape(planner.plan(blocks(1), conversation="chat", placement="tail")) == ["full:1"]


def test_no_reference_names_a_block_that_an_open_plan_could_void() -> None:
    """The application may keep that plan's answer, although it has not committed it yet."""
    planner = ContextPlanner(annotate="both")
    serve(planner, 1, conversation="chat", placement="tail")
    parallel = planner.plan(blocks(3), conversation="chat", placement="tail")
    serve(planner, 2, conversation="chat", placement="tail")
    assert shape(serve(planner, 1, 2, conversation="chat", placement="tail")) == ["ref:1", "full:2"]
    assert planner.stats().contested_blocks == 1
    planner.abandon(parallel)
    assert shape(serve(planner, 1, 2, conversation="chat", placement="tail")) == ["ref:1", "ref:2"]


# -- a failing store -----------------------------------------------------------------------------------------------


class FailingStore(MemorySeenStore):
    def __init__(self) -> None:
        super().__init__()
        self.failing = ""

    def execute(self, operation: Operation[T]) -> T:
        self._fail(operation.name)
        return super().execute(operation)

    def clear(self) -> None:
        self._fail("clear")
        super().clear()

    def inspect(self, conversation: Conversation) -> Snapshot | None:
        return super().inspect(conversation)

    def _fail(self, operation: str) -> None:
        if self.failing in ("all", operation):
            raise ConnectionError(operation)


class Unreachable(MemorySeenStore):
    def execute(self, operation: Operation[T]) -> T:
        try:
            raise OSError("connection refused\n  by the server")
        except OSError as error:
            raise RuntimeError("no answer") from error


@pytest.mark.parametrize("level", [logging.WARNING, logging.DEBUG])
def test_a_failing_store_is_logged_in_one_line(level: int, caplog: pytest.LogCaptureFixture) -> None:
    planner = ContextPlanner(store=Unreachable())
    with caplog.at_level(level, "warmprefix"):
        for _ in range(2):
            planner.plan(blocks(1), conversation="chat", placement="tail")
    first = caplog.records[0]
    assert first.getMessage().startswith("seen-block store failed: RuntimeError: no answer ")
    assert "(because of OSError: connection refused by the server)" in first.getMessage()
    assert "\n" not in first.getMessage()
    assert bool(first.exc_info) == (level == logging.DEBUG), "the traceback is for those who ask for it"
    assert len(caplog.records) == (2 if level == logging.DEBUG else 1)


def test_a_failing_store_costs_only_references(caplog: pytest.LogCaptureFixture) -> None:
    store = FailingStore()
    planner = ContextPlanner(annotate="both", store=store)
    for _ in range(2):  # so that references have paid for more labels
        serve(planner, 1, 2, conversation="chat", placement="tail")
    store.failing = "all"
    with caplog.at_level(logging.WARNING, "warmprefix"):
        plan = serve(planner, 2, 1, conversation="chat", placement="tail")
        planner.abandon(planner.plan(blocks(1), conversation="chat", placement="tail"))
    assert shape(plan) == ["full:2", "full:1"]
    assert plan.order_annotation is None
    assert planner.stats().store_errors == 4
    assert len(caplog.records) == 1
    store.failing = ""
    again = serve(planner, 1, 2, conversation="chat", placement="tail")
    assert shape(again) == ["full:1", "full:2"], "the store has no record before the turn that it missed"
    assert shape(serve(planner, 1, conversation="chat", placement="tail")) == ["ref:1"]
    assert planner.stats().unsettled_conversations == 0


@pytest.mark.parametrize("operation", ["commit", "abandon", "forget"])
def test_a_store_that_fails_after_planning_leaves_blocks_unseen(operation: str) -> None:
    store = FailingStore()
    planner = ContextPlanner(annotate="both", store=store)
    plan = planner.plan(blocks(1), conversation="chat", placement="tail")
    store.failing = operation
    if operation == "commit":
        assert not planner.commit(plan)
    elif operation == "abandon":
        assert planner.abandon(plan)
    else:
        shown = planner.plan(blocks(1), conversation="chat", placement="tail", history=[])
        assert shape(shown) == ["full:1"]
    assert planner.stats().store_errors == 1
    assert shape(planner.plan(blocks(1), conversation="chat", placement="tail")) == ["full:1"]


def test_a_failing_reset_raises() -> None:
    store = FailingStore()
    store.failing = "clear"
    with pytest.raises(StoreError, match="clear for all conversations"):
        ContextPlanner(store=store).reset()


@pytest.mark.parametrize("correction", ["commit", "shown history", "forget"])
def test_a_record_is_not_trusted_after_its_correction_failed(correction: str) -> None:
    """The history goes on without block 1, but the store fails and does not receive that."""
    store = FailingStore()
    planner = ContextPlanner(annotate="both", store=store)
    kept = planner.plan(blocks(2), conversation="chat", placement="tail")
    serve(planner, 1, conversation="chat", placement="tail")  # its answer is thrown away for the other's
    store.failing = "all"
    if correction == "commit":
        assert not planner.commit(kept)
    elif correction == "shown history":
        planner.plan(blocks(3), conversation="chat", placement="tail", history=[user("Cut.")])
    else:
        with pytest.raises(StoreError):
            planner.forget("chat")
    unanswered = planner.plan(blocks(1), conversation="chat", placement="tail")
    assert shape(unanswered) == ["full:1"]
    store.failing = ""
    assert shape(serve(planner, 1, conversation="chat", placement="tail")) == ["full:1"]
    planner.abandon(kept)
    planner.abandon(unanswered)
    assert shape(serve(planner, 1, conversation="chat", placement="tail")) == ["ref:1"]


def test_a_failing_forget_raises() -> None:
    store = FailingStore()
    store.failing = "forget"
    with pytest.raises(StoreError, match="forget"):
        ContextPlanner(store=store).forget("chat")
