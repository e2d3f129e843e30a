"""Plans for engines that reuse text behind other text, as LMCache does: relevance order, and a separator around each
block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest

from warmprefix import BatchRequest, ContextBlock, ContextPlanner, EngineReport
from warmprefix.cache_profiles import blend
from warmprefix.plan import ContextPlan
from warmprefix_openai import messages_for
from warmprefix_requests.block_places import in_full

SEPARATOR = " # # "
TEXTS = [
    "The sky is blue.",
    "# Title\n\nThe sea is deep, and salt. ",
    "  return x\n}\n",
    "日本語です。",
    "[Doc_1] A header.\n",
]
BLOCKS = [ContextBlock(text, id=f"Doc_{number}", tokens=100) for number, text in enumerate(TEXTS)]


def pieces(plan: ContextPlan) -> list[str]:
    """Return what stands between the separators of a prompt."""
    assert "".join(plan.parts()) == plan.render()
    first, *inner, last = plan.render().split(SEPARATOR)
    assert first == last == ""
    return inner


@pytest.mark.parametrize("annotate", ["auto", "note", "none"])
def test_blocks_keep_relevance_order_and_their_bytes(annotate: str) -> None:
    planner = ContextPlanner(profile="blend", annotate=annotate)  # type: ignore[arg-type]
    for order in permutations(range(len(BLOCKS))):
        with planner.planning([BLOCKS[i] for i in order]) as plan:
            assert pieces(plan) == [TEXTS[i] for i in order]
        assert not plan.reordered
        assert (plan.resident_tokens, plan.note_tokens, plan.order_annotation) == (0, 0, None)
    assert planner.stats().tree_nodes == 0


def test_a_label_is_the_same_in_each_place() -> None:
    planner = ContextPlanner(profile="blend", annotate="labels")
    shown = [set(pieces(planner.plan(order))) for order in permutations(BLOCKS[:4])]
    assert shown == [shown[0]] * len(shown)


def test_waiting_requests_and_open_plans_change_no_order() -> None:
    planner = ContextPlanner(profile="blend")
    queued = planner.queued(BLOCKS[::-1])
    planner.plan(BLOCKS[1:])
    assert not planner.plan(BLOCKS).reordered
    queued.withdraw()


def test_reports_are_counted_and_nothing_is_learned_from_them() -> None:
    planner = ContextPlanner(profile="blend", capacity_tokens=10_000)
    for number in range(200):
        plan = planner.plan(BLOCKS)
        planner.commit(plan, report=EngineReport(cached_tokens=450 * (number % 2), prompt_tokens=500, ttft=1.0))
    stats = planner.stats()
    assert (stats.reports, stats.reported_cached_tokens) == (200, 45_000)
    assert (stats.residency_confidence, stats.disabled_scopes) == (None, 0)
    assert (stats.capacity_tokens, stats.profile, stats.profile_source) == (10_000, "blend", "argument")


def test_pins_still_count() -> None:
    planner = ContextPlanner(profile="blend", annotate="none")
    pinned = ContextBlock("Last words.", tokens=10, pinned="end")
    assert pieces(planner.plan([pinned, *BLOCKS[:2]])) == [*TEXTS[:2], "Last words."]


def test_references_still_remove_text() -> None:
    planner = ContextPlanner(profile="blend")
    repeated = ContextBlock("Ada Lovelace wrote the first algorithm that was meant for a machine. " * 3, tokens=100)
    with planner.planning([BLOCKS[0], repeated], conversation="c", placement="tail") as plan:
        assert len(pieces(plan)) == 2
    with planner.planning([repeated, BLOCKS[2]], conversation="c", placement="tail") as plan:
        assert [planned.reference is not None for planned in plan.blocks] == [True, False]
        assert len(pieces(plan)) == 2
    body = {"messages": [{"role": "user", "content": plan.render()}]}
    (message,) = in_full("chat", body, plan)["messages"]
    assert repeated.text in message["content"]


def test_a_batch_keeps_the_order_of_blocks() -> None:
    planner = ContextPlanner(profile="blend")
    orders = [BLOCKS, BLOCKS[::-1], BLOCKS[1:], BLOCKS[:3]]
    batch = planner.plan_batch([BatchRequest(str(number), blocks) for number, blocks in enumerate(orders)])
    assert batch.planner == "relevance"
    for request in batch.requests:
        assert pieces(request.plan) == [block.text for block in orders[int(request.id)]]
        assert planner.commit(request.plan)


def test_the_question_follows_the_last_separator() -> None:
    plan = ContextPlanner(profile="blend").plan(BLOCKS[:1])
    (message,) = messages_for(plan, "Why?")
    assert message["content"] == " # # The sky is blue. # # Why?"
    (bare,) = messages_for(ContextPlanner(profile="blend").plan([]), "Why?")
    assert bare["content"] == "Why?"


def segments(ids: Sequence[int], separator: Sequence[int]) -> list[tuple[int, ...]]:
    """Return what LMCache keeps of a prompt: the tokens between those of the separator."""
    found: list[tuple[int, ...]] = []
    begin = place = 0
    while place <= len(ids) - len(separator):
        if [*ids[place : place + len(separator)]] == [*separator]:
            found.append(tuple(ids[begin:place]))
            begin = place = place + len(separator)
        else:
            place += 1
    return [*found, tuple(ids[begin:])]


def test_blocks_are_the_same_tokens_in_each_place_if_the_separator_is_one_token() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|sep|>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([*TEXTS, "Answer from the context. # # "] * 10, trainer)
    planner = ContextPlanner(profile=blend("<|sep|>"))
    kept = set()
    for order in permutations(BLOCKS[:3]):
        prompt = f"Answer from the context.{planner.plan(order).render()}Why?"
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        first, *inner, last = segments(ids, [tokenizer.token_to_id("<|sep|>")])
        assert [tokenizer.decode(segment) for segment in (first, last)] == ["Answer from the context.", "Why?"]
        kept.add(frozenset(inner))
        assert len(inner) == 3
    assert len(kept) == 1
