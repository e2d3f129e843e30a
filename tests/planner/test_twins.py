"""Twins and superseded versions: what counts as one, and which of them a plan feeds."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import Branch, Choice, ContextBlock, ContextPlan, ContextPlanner
from warmprefix.twins import twin_groups, twin_key

BODY = (
    "Returns the number of characters of the text. Python 3.8 counts surrogates as two, so that no index points into\n"
    "the middle of one; it must not be called before the text is read, and takes 12 ms for Ada's notes of 1843-10-01."
)
ONE = BODY.replace("\n", " ")


def page(version: str, body: str = BODY) -> str:
    return f"Docs {version} > Texts > length()\n{body}"


def are_twins(first: str, second: str) -> bool:
    return len(twin_groups([ContextBlock(first), ContextBlock(second)])) == 1


# -- what are twins ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (page("3.8"), page("3.12")),
        (page("4.2.11"), page("5.0rc1")),
        (page("v2"), page("v10")),
        (page("4.2"), page("4.2", BODY.replace("\n", " ").replace("'", "’"))),
        (page("4.2"), page("4.2", BODY.replace(" ", "   ") + "\r\n\r\n")),
        (f"https://docs.example.org/4.2/text\n{BODY}", f"https://docs.example.org/stable/text\n{BODY}"),
        (f"docs/flask-2.0.3/text.rst\n{BODY}", f"docs/flask-2.3/text.rst\n{BODY}"),
        (f"title: length()\nversion: 4.2\n\n{BODY}", f"title: length()\nversion: 5.0\n\n{BODY}"),
        (f"Python 3.8 documentation\n{BODY}", f"Python 3.9 documentation\n{BODY}"),
        (f"Flask 2.1.3, Foreword: Threads\n{BODY}", f"Flask 3.0.3, Foreword: Threads\n{BODY}"),
        (f"Click 7.1.2\n\n{BODY}", f"Click 8.0rc1\n\n{BODY}"),
        (f"guides/4.2/text\n{BODY}", f"guides/5.0/text\n{BODY}"),
        # The same outline in other white space.
        (page("4.2", f"{ONE}\n  {ONE}"), page("4.2", f"{ONE}\n\n    {ONE}")),
        (page("4.2", f"  {ONE}\n  {ONE}"), page("4.2", f"{ONE} {ONE}")),
    ],
)
def test_repeats_of_other_versions_are_twins(first: str, second: str) -> None:
    assert are_twins(first, second)
    assert are_twins(second, first)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *[
            (page("4.2"), page("4.2", BODY.replace(*change)))
            for change in [
                ("3.8", "3.9"), ("12 ms", "13 ms"), ("12 ms", "12 s"), ("must not", "must"), ("Ada", "Ida"),
                ("1843-10-01", "1843-10-02"), ("before", "after"), ("two", "one"), ("Returns", "returns"),
                ("; it", ", it"), ("of 1843", "of -1843"),
            ]
        ],
        # What differs in the first line is what the rest is about.
        (f"Widget A\n{BODY}", f"Widget B\n{BODY}"),
        (f"iPhone 12\n{BODY}", f"iPhone 13\n{BODY}"),
        (f"Annual report 2022\n{BODY}", f"Annual report 2023\n{BODY}"),
        (f"Meeting of 24.12.2024\n{BODY}", f"Meeting of 31.12.2024\n{BODY}"),
        (f"Widget, $3.99\n{BODY}", f"Widget, $4.99\n{BODY}"),
        (f"Widget: 3.99\n{BODY}", f"Widget: 4.99\n{BODY}"),
        (f"Disk of 1.5 TB\n{BODY}", f"Disk of 2.5 TB\n{BODY}"),
        *[
            (header.format(1.5) + f"\n{BODY}", header.format(2.5) + f"\n{BODY}")
            for header in [
                "T-Shirt {}", "Price USD {}", "Section {}", "Article {} Liability", "Chapter {}: Texts", "{} Liability",
                "pH {}", "Rating {}/5", "Drug {} - daily", "Vitamin D3-{}", "Bluetooth {}", "Magnitude {} Earthquake",
            ]
        ],
        (f"V8 Engine\n{BODY}", f"V6 Engine\n{BODY}"),
        (f"3.2.1 Liability\n{BODY}", f"3.2.2 Liability\n{BODY}"),
        (f"Terms, Section 3.2.1\n{BODY}", f"Terms, Section 3.3.1\n{BODY}"),
        # Code in which white space has a meaning.
        (page("4.2", f"for a in b:\n    c()\n    d()\n{BODY}"), page("4.2", f"for a in b:\n    c()\nd()\n{BODY}")),
        (page("4.2", f"a:\n  b:\n    c: 1\n{BODY}"), page("4.2", f"a:\n  b:\n  c: 1\n{BODY}")),
        (f"Growth 2.5 %\n{BODY}", f"Growth 3.5 %\n{BODY}"),
        (f"Host 10.0.0.1\n{BODY}", f"Host 10.0.0.2\n{BODY}"),
        # Lines of wrapped prose, and data about the version itself.
        (f"It supports SQLite 3.27.0 and later.\n{BODY}", f"It supports SQLite 3.31.0 and later.\n{BODY}"),
        (f"This page is about Python 3.8 and\n{BODY}", f"This page is about Python 3.9 and\n{BODY}"),
        (f"added: v8.5.0\n{BODY}", f"added: v9.0.0\n{BODY}"),
        (f"Note: needs Django 4.2\nSee: {BODY}", f"Note: needs Django 4.2\nSee: {BODY.replace('3.8', '3.9')}"),
        ("Flask 2.0 > Licence\nReleased in May.", "Flask 2.1 > Licence\nReleased in May."),
        ("", " "), ("a", "a b"), ("\n", ""),
    ],
)  # fmt: skip
def test_other_facts_are_no_twins(first: str, second: str) -> None:
    assert not are_twins(first, second)


def test_no_change_of_a_word_makes_a_twin() -> None:
    rng, words = random.Random(0), page("4.2").split(" ")
    for place in range(len(words)):
        others = [words[:place] + words[place + 1 :], [*words[:place], rng.choice(["no", "4", "Bob"]), *words[place:]]]
        assert not any(are_twins(" ".join(words), " ".join(other)) for other in others)


@given(st.lists(st.text(max_size=200) | st.sampled_from([page("1.0"), page("1.1"), BODY]), max_size=8))
def test_groups_are_the_classes_of_the_key(texts: list[str]) -> None:
    groups = twin_groups([ContextBlock(text) for text in texts])
    assert sorted(i for group in groups for i in group) == [*range(len(texts))]
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    together = {i: group[0] for group in groups for i in group}
    for i, text in enumerate(texts):
        for j in range(i):
            assert (together[i] == together[j]) == (twin_key(text) is not None and twin_key(text) == twin_key(texts[j]))


# -- which one is fed -------------------------------------------------------------------------------------------------


def docs(*names: str) -> list[ContextBlock]:
    """Return one candidate per name such as `a2`: topic a of version 2, with scores that fall more and more slowly."""
    return [
        ContextBlock(page(f"1.{name[1]}", f"Topic {name[0]}. {BODY}"), id=name, tokens=100, score=-(i**0.5))
        for i, name in enumerate(names)
    ]


def fed(plan: ContextPlan) -> list[str]:
    return [str(planned.block.id) for planned in plan.blocks]


def left_out(plan: ContextPlan) -> list[tuple[str | None, str, int | None]]:
    return [(out.block.id, out.reason, out.instead) for out in plan.left_out]


def serve(planner: ContextPlanner, *names: str, **options: Any) -> None:
    with planner.planning(docs(*names), **options):
        pass


def test_one_of_twins_is_fed_and_the_places_of_the_others_stay_empty() -> None:
    plan = ContextPlanner().plan(docs("a1", "a2", "b1", "a3", "c1", "d1", "b2"), choose=Choice(k=5, twins=True))
    assert fed(plan) == ["a1", "b1", "c1"]
    assert left_out(plan) == [
        ("a2", "twin", 0), ("a3", "twin", 0), ("d1", "rank", None), ("b2", "twin", 2)
    ]  # fmt: skip
    assert [planned.positions for planned in plan.blocks] == [(0,), (2,), (4,)]
    assert plan.entered == ()


@pytest.mark.parametrize("tenant", [None, "acme"])
def test_the_resident_twin_is_fed_even_of_the_first(tenant: str | None) -> None:
    planner = ContextPlanner()
    choose = Choice(k=3, twins=True)
    serve(planner, "a2", "b1", "x1", tenant=tenant, choose=choose)
    plan = planner.plan(docs("a1", "b2", "c1", "b1", "a2", "a3"), tenant=tenant, choose=choose)
    assert fed(plan) == ["a2", "b1", "c1"]
    assert plan.resident_tokens == 200
    assert left_out(plan) == [("a1", "twin", 4), ("b2", "twin", 3), ("a3", "twin", 4)]
    assert plan.entered == ()


def test_a_twin_is_as_relevant_as_the_first() -> None:
    planner = ContextPlanner(annotate="note")
    serve(planner, "a2", "x1")
    plan = planner.plan(docs("a1", "b1", "c1", "a2"), choose=Choice(k=3, twins=True))
    assert fed(plan) == ["a2", "b1", "c1"]
    assert plan.order_annotation is None


def test_newer_versions_of_a_run_stay_behind_each_other() -> None:
    old, other, one = docs("a1", "b1", "a2")
    two = ContextBlock("the next part", "a2", 100, score=-3.0, follows=one.fingerprint)
    plan = ContextPlanner().plan([old, other, one, two], choose=Choice(k=3, version=version))
    assert [planned.positions[0] for planned in plan.blocks] == [1, 2, 3]


@pytest.mark.parametrize("annotate", ["auto", "labels"])
@pytest.mark.parametrize("known_by", ["messages", "branch"])
def test_a_later_turn_refers_to_the_twin_that_the_history_shows(annotate: Any, known_by: str) -> None:
    planner = ContextPlanner(annotate=annotate)
    options: dict[str, Any] = {"placement": "tail", "choose": Choice(k=3, twins=True)}
    names: list[dict[str, Any]] = [{"history": []}, {"history": []}]
    if known_by == "branch":
        names = [{"conversation": Branch(None)}, {"conversation": Branch("one")}]
    first = planner.plan(docs("a2", "b1"), **options, **names[0])
    planner.commit(first, turn_id="one")
    if known_by == "messages":
        names[1] = {"history": [{"role": "user", "content": first.render()}]}
    plan = planner.plan(docs("a1", "a3", "a2", "c1"), **options, **names[1])
    assert fed(plan) == ["a2"]
    assert plan.reference_tokens == 100
    plan = planner.plan(docs("a1", "a3", "b2", "c1", "b1"), **options, **names[1])
    assert fed(plan) == ["a1", "b1"]
    assert [planned.reference is not None for planned in plan.blocks] == [False, True]


def test_a_path_holds_one_of_twins_at_most() -> None:
    planner = ContextPlanner()
    serve(planner, "a1", "a2", "b1")
    plan = planner.plan(docs("a3", "b1", "a2", "a1"), choose=Choice(k=2, twins=True))
    assert fed(plan) == ["a1", "b1"]
    assert plan.resident_tokens == 100


def test_a_twin_beyond_the_places_can_enter() -> None:
    planner = ContextPlanner()
    serve(planner, "a1", "b1", "d2", choose=Choice(k=3))
    serve(planner, "c1", choose=Choice(k=3))  # what was never fed is not left out
    plan = planner.plan(docs("a1", "b1", "c1", "d1", "d2"), choose=Choice(k=3, keep=2, within=1, twins=True))
    assert fed(plan) == ["a1", "b1", "d2"]
    assert left_out(plan) == [("c1", "exchanged", 4), ("d1", "twin", 4)]
    assert plan.entered == (4,)


def test_twins_are_recognised_by_a_function() -> None:
    blocks = docs("a1", "b1", "a2", "c1")
    choose = Choice(k=4, twins=lambda block: None if block.id == "c1" else "all the same")
    assert fed(ContextPlanner().plan(blocks, choose=choose)) == ["a1", "c1"]


def test_a_plan_can_be_pickled_whatever_its_functions_are() -> None:
    choose = Choice(k=3, twins=lambda block: block.id[0], version=lambda block: (block.id, 1))
    planner, blocks = ContextPlanner(), docs("a1", "b1", "a2", "c1")
    for plan in (planner.plan(blocks, choose=choose), planner.plan_batch({"q": blocks}, choose=choose)["q"].plan):
        copied = pickle.loads(pickle.dumps(plan))
        assert copied == plan
        assert left_out(copied) == left_out(plan) == [("a2", "twin", 0), ("c1", "rank", None)]


def test_without_twins_the_option_changes_nothing() -> None:
    plain, twins = ContextPlanner(), ContextPlanner()
    rng = random.Random(0)
    for _ in range(50):
        names = [f"{letter}1" for letter in rng.sample("abcdefghijklm", 8)]
        with plain.planning(docs(*names), choose=Choice(k=5, extra=1)) as first:
            pass
        with twins.planning(docs(*names), choose=Choice(k=5, extra=1, twins=True)) as second:
            pass
        assert (first.render(), first.left_out) == (second.render(), second.left_out)


def test_pinned_blocks_and_runs_have_no_twins() -> None:
    first, second, third = docs("a1", "a2", "a3")
    pinned = ContextBlock(second.text, "a2", 100, score=-1.0, pinned="end")
    follower = ContextBlock("the next part", "n", 100, score=-3.0, follows=third)
    plan = ContextPlanner().plan([first, pinned, third, follower], choose=Choice(k=4, twins=True))
    assert fed(plan) == ["a1", "a3", "n", "a2"]


# -- versions ---------------------------------------------------------------------------------------------------------


def version(block: ContextBlock) -> tuple[str, int] | None:
    name = str(block.id)
    return None if name[0] == "x" else (name[0], int(name[1]))


def test_only_the_newest_version_is_fed_in_the_best_place_of_its_source() -> None:
    planner, blocks = ContextPlanner(), docs("a1", "b3", "x1", "b1", "c1", "d1", "a2")
    plan = planner.plan(blocks, choose=Choice(k=3, version=version))
    assert set(fed(plan)) == {"a2", "b3", "x1"}
    assert left_out(plan) == [
        ("a1", "superseded", 6),
        ("b1", "superseded", 1),
        ("c1", "rank", None),
        ("d1", "rank", None),
    ]
    plan = planner.plan(blocks, choose=Choice(k=4, version=version))
    assert set(fed(plan)) == {"a2", "b3", "x1", "c1"}  # the next one has the place of b1


def test_equal_versions_stay() -> None:
    choose = Choice(k=5, version=lambda block: ("a", int(str(block.id)[1]) // 2))
    assert set(fed(ContextPlanner().plan(docs("a2", "b1", "b3", "a3"), choose=choose))) == {"a2", "b3", "a3"}


def test_a_text_that_a_newer_version_repeats_is_not_superseded() -> None:
    (old,) = docs("a1")
    again = ContextBlock(old.text, "a2", score=-1.0)
    plan = ContextPlanner().plan([old, again], choose=Choice(k=2, version=version))
    assert [planned.positions for planned in plan.blocks] == [(0, 1)]


@pytest.mark.parametrize(
    ("function", "result"),
    [("twins", []), ("twins", ([], 1)), ("version", ("a",)), ("version", 7), ("version", ([], 1)), ("version", [])],
)
def test_results_of_another_shape_are_counted_and_ignored(function: str, result: Any) -> None:
    assert_plans_without({function: lambda block: result})


@pytest.mark.parametrize("function", ["twins", "version"])
def test_functions_that_fail_are_counted_and_ignored(function: str) -> None:
    def fails(block: ContextBlock) -> Any:
        raise RuntimeError("no version")

    assert_plans_without({function: fails})


def assert_plans_without(options: dict[str, Any]) -> None:
    planner = ContextPlanner()
    plan = planner.plan(docs("a1", "a2", "b1"), choose=Choice(k=2, **options))
    assert fed(plan) == ["a1", "a2"]
    assert planner.stats().choice_errors == 1


def test_versions_that_cannot_be_compared_are_counted_and_ignored() -> None:
    planner = ContextPlanner()
    versions: Sequence[Any] = [1, "2", None]
    choose = Choice(k=3, version=lambda block: ("a", versions[int(str(block.id)[1])]))
    assert len(planner.plan(docs("a0", "a1", "a2"), choose=choose).blocks) == 3
    assert planner.stats().choice_errors == 1


@pytest.mark.parametrize(
    "options", [{"twins": 1}, {"twins": "yes"}, {"twins": None}, {"version": True}, {"version": "v"}]
)
def test_other_values_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Choice(k=1, **options)


def test_versions_that_are_not_greater_supersede_nothing() -> None:
    versions = [math.nan, 1.0, 2.0, math.nan]
    choose = Choice(k=4, version=lambda block: ("a", versions[int(str(block.id)[1])]))
    assert len(ContextPlanner().plan(docs("a0", "a1", "a2", "a3"), choose=choose).blocks) == 4
    assert set(fed(ContextPlanner().plan(docs("a1", "a0", "a2", "a3"), choose=choose))) == {"a0", "a2", "a3"}
