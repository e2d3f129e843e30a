"""Labels in conversations: written while references pay for them, and safe to omit."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix.openai import messages_for

SHORT, LONG = 20, 200


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
    assert labels <= 0.002 * sent + 1_024 + 100  # the allowance, the start, and one request too many


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
