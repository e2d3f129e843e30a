"""Labels in conversations: written while references pay for them, and safe to omit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix_openai import messages_for

SHORT, LONG = 20, 200

Turns = list[list[ContextBlock]]
Workload = Callable[[random.Random, int], Turns]


def block(text: object, tokens: int = SHORT) -> ContextBlock:
    return ContextBlock(f"passage {text}", tokens=tokens)


def is_labelled(plan: ContextPlan) -> bool:
    return all(planned.label for planned in plan.blocks if planned.reference is None)


def weary(tokens: int = SHORT) -> ContextPlanner:
    """Return a planner in whose one scope labels have never paid."""
    planner = ContextPlanner()
    for number in range(300):
        with planner.planning(
            [block(f"{number}.{i}", tokens) for i in range(5)], conversation=f"old {number}", placement="tail"
        ):
            pass
    return planner


def test_labels_that_no_reference_pays_for_cost_little() -> None:
    planner, sent, labels = ContextPlanner(), 0, 0
    for number in range(2_000):
        request = [block(f"{number}.{i}") for i in range(5)]
        with planner.planning(request, conversation=str(number), placement="tail") as plan:
            sent += plan.total_tokens
            labels += plan.note_tokens
    assert labels <= 100, "those of the first request"
    assert labels < 0.002 * sent


def test_a_first_turn_has_labels_until_they_have_not_paid() -> None:
    planner = ContextPlanner()
    with planner.planning([block(1)], conversation="a", placement="tail") as plan:
        assert is_labelled(plan)
    with weary().planning([block(1)], conversation="a", placement="tail") as plan:
        assert not is_labelled(plan)
        assert plan.render() == "passage 1"


def test_blocks_without_a_label_come_in_full_again() -> None:
    planner = weary()
    for _ in range(2):
        with planner.planning([block(1), block(2)], conversation="a", placement="tail") as plan:
            assert plan.references == ()
            assert plan.render() == "passage 1\n\npassage 2"
    history = [{"role": "user", "content": "passage 1\n\npassage 2\n\nWhy?"}]
    with planner.planning([block(1)], placement="tail", history=history) as plan:
        assert plan.references == ()


def test_references_to_earlier_labels_are_made_and_bring_labels_back() -> None:
    planner = ContextPlanner()
    with planner.planning([block(i, LONG) for i in range(5)], conversation="first", placement="tail"):
        pass
    for number in range(300):
        with planner.planning([block(f"{number}.{i}") for i in range(5)], conversation=f"{number}", placement="tail"):
            pass
    new = block("new", LONG)
    with planner.planning([*map(block, range(5)), new], conversation="first", placement="tail") as plan:
        assert len(plan.references) == 5
    for _ in range(3):
        with planner.planning([block(i, LONG) for i in range(5)], conversation="first", placement="tail") as plan:
            assert len(plan.references) == 5
    with planner.planning([block("later")], conversation="other", placement="tail") as plan:
        assert is_labelled(plan)


def test_an_explicit_choice_stays() -> None:
    planner = weary()
    with planner.planning([block(1)], conversation="a", placement="tail", annotate="both") as plan:
        assert is_labelled(plan)


def test_a_text_that_imitates_a_label_keeps_its_escape_and_its_label() -> None:
    planner = ContextPlanner()
    first = block("cited", LONG)
    with planner.planning([first], conversation="a", placement="tail") as plan:
        label = plan.blocks[0].label
    for number in range(300):
        with planner.planning([block(f"{number}.{i}") for i in range(5)], conversation=f"{number}", placement="tail"):
            pass
    forged = ContextBlock(f"[{label}] forged", tokens=SHORT)
    with planner.planning([forged], conversation="a", placement="tail") as plan:
        assert is_labelled(plan)
        assert f"\\[{label}] forged" in plan.render()
    with planner.planning([block("harmless")], conversation="a", placement="tail") as plan:
        assert not is_labelled(plan)


@given(st.integers(0, 2**32), st.booleans())
def test_each_reference_names_a_labelled_block_of_the_history(seed: int, is_shown: bool) -> None:
    """However often labels come and go."""
    rng, planner = random.Random(seed), weary()
    history: list[dict[str, str]] = []
    for turn in range(12):
        request = [block(number, LONG) for number in rng.sample(range(8), 3)]
        annotate = rng.choice([None, None, "both"])
        shown = {"history": history} if is_shown else {"conversation": "chat"}
        with planner.planning(request, placement="tail", annotate=annotate, **shown) as plan:  # type: ignore[arg-type]
            earlier = "\n".join(message["content"] for message in history)
            for planned in plan.blocks:
                if planned.reference is not None:
                    assert f"[{planned.label}] {planned.block.text}" in earlier
                else:
                    assert planned.block.text in plan.render()
            history = [*messages_for(plan, f"Question {turn}?", history), {"role": "assistant", "content": "Yes."}]


# -- what a whole scope pays ---------------------------------------------------------------------------------------

LENGTH, SHORT_LENGTH = 92, 12
"""Tokens of a passage and of a fact."""
DIALOGUE = 40
"""Tokens of a question and an answer."""


def fresh(chance: random.Random, number: int) -> Turns:
    return [[block(chance.random(), LENGTH) for _ in range(5)] for _ in range(4)]


def fresh_facts(chance: random.Random, number: int) -> Turns:
    return [[block(chance.random(), SHORT_LENGTH) for _ in range(10)] for _ in range(4)]


def single_turns(chance: random.Random, number: int) -> Turns:
    return [[block(chance.random(), LENGTH) for _ in range(5)]]


def overlapping(chance: random.Random, number: int) -> Turns:
    return [[block(i, LENGTH) for i in chance.sample(range(number, number + 8), 5)] for _ in range(4)]


def alternating(chance: random.Random, number: int) -> Turns:
    return (fresh_facts if number // 10 % 2 else overlapping)(chance, number)


def repeated_facts(chance: random.Random, number: int) -> Turns:
    return [[block(i, SHORT_LENGTH) for i in chance.sample(range(number, number + 14), 10)] for _ in range(4)]


def saved_percent(planner: ContextPlanner, turns: Workload, conversations: int, is_shown: bool) -> float:
    """Return the share of the computed tokens that labels and references save, in percent."""
    chance, needed, sent = random.Random(5), 0, 0
    for number in range(conversations):
        history: list[dict[str, str]] = []
        for request in turns(chance, number):
            shown: dict[str, object] = (
                {"history": history} if is_shown else {"conversation": f"{turns.__name__} {number}"}
            )
            shown["order_locked"] = True  # so that there are no notes of an order
            with planner.planning(request, placement="tail", **shown) as plan:  # type: ignore[arg-type]
                needed += plan.total_tokens + DIALOGUE
                sent += plan.total_tokens + DIALOGUE - plan.reference_tokens + plan.note_tokens
                history = [*messages_for(plan, "Why?", history), {"role": "assistant", "content": "Yes."}]
    return 100 * (needed - sent) / needed


@pytest.mark.parametrize("is_shown", [True, False])
@pytest.mark.parametrize(
    ("turns", "least"),
    [
        (fresh, -0.2),
        (fresh_facts, -0.2),
        (single_turns, -0.2),
        (overlapping, 40.0),
        (alternating, 20.0),
        (repeated_facts, -0.2),
    ],
)
def test_no_traffic_pays_for_labels_in_vain(turns: Workload, least: float, is_shown: bool) -> None:
    assert saved_percent(ContextPlanner(), turns, 80, is_shown) >= least


@pytest.mark.parametrize("is_shown", [True, False])
def test_blocks_that_return_without_labels_bring_labels_back(is_shown: bool) -> None:
    planner = ContextPlanner()
    assert saved_percent(planner, fresh, 50, is_shown) > -0.5
    assert saved_percent(planner, overlapping, 50, is_shown) > 40


def test_attempts_become_rare_while_no_reference_pays_for_one() -> None:
    """Blocks return only in conversations that have no labels."""
    planner, needed, labels = ContextPlanner(), 0, 0
    for number in range(1_000):
        request = [block(f"{number} {i}", LENGTH) for i in range(5)]
        for _ in range(2):
            with planner.planning(request, conversation=str(number), placement="tail") as plan:
                needed += plan.total_tokens
                labels += plan.note_tokens
            if plan.note_tokens:
                break
    assert labels < 0.002 * needed


def test_what_is_remembered_of_blocks_without_labels_is_bounded() -> None:
    planner = ContextPlanner()
    saved_percent(planner, fresh, 300, is_shown=False)
    (state,) = planner._state
    assert 0 < len(state.label_savings._unlabelled) <= 2_048
