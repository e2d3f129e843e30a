"""The arms of a comparison: the same question and evidence, arranged in different ways. Pure, and deterministic."""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from warmprefix import Choice, ContextBlock, ContextPlan, ContextPlanner
from warmprefix.annotate import Annotate
from warmprefix.batch import BatchRequest
from warmprefix.errors import WarmprefixError
from warmprefix.labels import label_candidates
from warmprefix_openai import messages_for
from warmprefix_tools.chance_swaps import chance_swaps
from warmprefix_tools.choice_option import ChoiceOption, parse_choice
from warmprefix_tools.quality.conversations import Messages, history_of, later_turn
from warmprefix_tools.quality.questions import EvidenceQuestion

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = [
    "ARM_NAMES",
    "SYSTEM",
    "UNANSWERABLE",
    "AgentsArm",
    "ArmError",
    "ArmPrompt",
    "arm_number",
    "baseline_of",
    "check_arm",
    "compared_with",
    "expanded_arms",
    "prompts_of",
]

UNANSWERABLE = "unanswerable"
SYSTEM = (
    "Answer the question from the context, in as few words as possible. If the context does not hold the answer, "
    f"reply: {UNANSWERABLE}."
)
_CITING = " Behind the answer, name the [label] of the passage that it follows from."
_BORDER = "---\n"
"""In front of each passage, in the arms that show where one begins."""
_CACHE_TOKENS = 100_000
"""Size of the cache that the arms with a choice assume."""
_DEFAULT_CHOICE = parse_choice("")
_EXTRA = 2
_ORDERS = 5
"""Random orders of the group `orders`."""
_NUMBERED = re.compile(r"(gold|shuffled)-([1-9]\d?)")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_CUSTOM = re.compile(r"[\w.]+:\w+")


AgentsArm = Callable[[EvidenceQuestion, "AsyncOpenAI", str], Awaitable[str]]
"""Answers a question with several calls, given a client and the name of the model."""


class ArmPrompt(NamedTuple):
    """What a model is asked in one arm."""

    question: EvidenceQuestion
    arm: str
    messages: Messages
    gold_labels: tuple[str, ...]
    """The labels of the passages that the answer follows from, if the prompt shows labels."""
    is_changed: bool
    """False if the prompt is the baseline's."""
    run: AgentsArm | None = None
    """Answers the question with calls of its own; then there are no messages."""
    has_other_evidence: bool = False
    """True if a choice fed a candidate that is not among the question's passages."""


class ArmError(WarmprefixError, ValueError):
    """An arm is unknown or can't be used; the message has the reason."""


class _Made(NamedTuple):
    messages: Messages
    gold_labels: tuple[str, ...] = ()
    run: AgentsArm | None = None
    has_other_evidence: bool = False


_Maker = Callable[[EvidenceQuestion], _Made]


class _Arm(NamedTuple):
    baseline: str
    """The arm to compare it with; its own name for a baseline."""
    new: Callable[[Sequence[EvidenceQuestion], str], _Maker]
    """Makes the arm's prompts, given all questions in their order and the system prompt."""


def prompts_of(
    arms: Sequence[str],
    questions: Sequence[EvidenceQuestion],
    system: str = SYSTEM,
    choose: ChoiceOption = _DEFAULT_CHOICE,
) -> Iterator[ArmPrompt]:
    """Yield the prompts of all arms for each question; `arms` are names from `expanded_arms`.

    Arms that plan do so with one planner over the questions in their order, as an application that answers them one
    after another; `choose` is for those that choose evidence. O(tokens of all prompts).

    Raises:
        ArmError: An arm needs candidates, and no question has them.
    """
    makers = {name: _arm(name, choose).new(questions, system) for name in arms}
    for question in questions:
        made = {name: maker(question) for name, maker in makers.items()}
        for name, prompt in made.items():
            is_changed = (prompt.messages, prompt.run) != (
                made[baseline_of(name)].messages,
                made[baseline_of(name)].run,
            )
            messages, labels, run, has_other_evidence = prompt
            yield ArmPrompt(question, name, messages, labels, is_changed, run, has_other_evidence)


def expanded_arms(names: Sequence[str], questions: Sequence[EvidenceQuestion]) -> list[str]:
    """Return the arms that these names and groups stand for, behind their baselines.

    The group `positions` has the passage with the answer at each place, the group `orders` has random orders.

    Raises:
        ArmError: An arm is unknown, or arms are baselines of each other.
    """
    most = max([len(question.passages) for question in questions], default=1)
    groups = {
        "positions": [f"gold-{place}" for place in range(1, most + 1)],
        "orders": [f"shuffled-{number}" for number in range(1, _ORDERS + 1)],
    }
    found: dict[str, None] = {}
    for name in [arm for group in names for arm in groups.get(group, [group])]:
        missing = [name]
        while (baseline := baseline_of(missing[-1])) != missing[-1]:
            if baseline in missing:
                raise ArmError(f"the baselines of {name!r} must end at an arm, got a circle: {', '.join(missing)}")
            missing.append(baseline)
        found.update(dict.fromkeys(reversed(missing)))
    return list(found)


def baseline_of(name: str) -> str:
    """Return the arm that this one is compared with; a baseline's is itself."""
    return _arm(name).baseline


def check_arm(name: str) -> None:
    """Check the name of an arm or of a group of arms.

    Raises:
        ArmError: It is unknown, or names a function that can't be imported.
    """
    if name not in ("positions", "orders"):
        _arm(name)


def arm_number(name: str, kind: str) -> int | None:
    """Return the number of an arm of this kind, `gold` or `shuffled`; None for another arm."""
    numbered = _NUMBERED.fullmatch(name)
    return int(numbered[2]) if numbered and numbered[1] == kind else None


def compared_with(baseline: str) -> Callable[[_Function], _Function]:
    """Return a decorator for an arm of your own; without it, the arm is compared with `relevance`.

    Args:
        baseline: Name of another arm, or of this one if it is a baseline itself.
    """

    def add(arm: _Function) -> _Function:
        arm.__dict__["baseline"] = baseline
        return arm

    return add


def _arm(name: str, choose: ChoiceOption = _DEFAULT_CHOICE) -> _Arm:
    if name in _CHOICES:
        return _choosing(name, choose)
    if name in _ARMS:
        return _ARMS[name]
    if (place := arm_number(name, "gold")) is not None:
        return _fixed(lambda question, rng: _with_gold_at(question, place))
    if arm_number(name, "shuffled") is not None:
        return _fixed(_shuffled, name)
    if _CUSTOM.fullmatch(name):
        return _own(name)
    raise ArmError(f"an arm must be one of {ARM_NAMES}, got {name!r}")


def _fixed(order: Callable[[EvidenceQuestion, random.Random], Sequence[str]], name: str = "") -> _Arm:
    """Return an arm with an order that no planner chooses."""

    def new(questions: Sequence[EvidenceQuestion], system: str) -> _Maker:
        planner = ContextPlanner(annotate="none")

        def make(question: EvidenceQuestion) -> _Made:
            rng = random.Random(f"{question.id}{name}")  # noqa: S311
            blocks = [ContextBlock(text) for text in order(question, rng)]
            plan = planner.plan(blocks, order_locked=True)
            planner.abandon(plan)
            return _prompt(plan, question, system)

        return make

    return _Arm("relevance", new)


def _shuffled(question: EvidenceQuestion, rng: random.Random) -> Sequence[str]:
    return rng.sample(question.passages, len(question.passages))


def _with_gold_at(question: EvidenceQuestion, place: int) -> Sequence[str]:
    gold = [text for at, text in enumerate(question.passages) if at in question.gold]
    others = [text for at, text in enumerate(question.passages) if at not in question.gold]
    return [*others[: place - 1], *gold, *others[place - 1 :]]


def _planned(annotate: Annotate, baseline: str = "relevance", more: str = "", form: _Form | None = None) -> _Arm:
    """Return an arm of a planner; `more` extends the system prompt, and `form` writes the context in another way."""

    def new(questions: Sequence[EvidenceQuestion], system: str) -> _Maker:
        planner = ContextPlanner(annotate=annotate)

        def make(question: EvidenceQuestion) -> _Made:
            with planner.planning(blocks_of(question), preamble=system + more) as plan:
                made = _prompt(plan, question, system + more)
                if form is not None:
                    shown, written = plan.render(), form(plan)
                    for message in made.messages:
                        message["content"] = message["content"].replace(shown, written, 1)
                return made

        return make

    return _Arm(baseline, new)


def _batch(questions: Sequence[EvidenceQuestion], system: str) -> _Maker:
    requests = [BatchRequest(each.id, blocks_of(each), each.question) for each in questions]
    batch = ContextPlanner(annotate="none").plan_batch(requests, preamble=system)
    plans = {planned.request.id: planned.plan for planned in batch.requests}
    return lambda question: _prompt(plans[question.id], question, system)


# -- other evidence; all have the order of the arm `planned` -----------------------------------------------------------


def _choosing(name: str, option: ChoiceOption) -> _Arm:
    """Return an arm that feeds some of a question's candidates."""

    def new(questions: Sequence[EvidenceQuestion], system: str) -> _Maker:
        if not any(question.candidates for question in questions):
            raise ArmError(
                "the arms chosen, extra and chance need questions with candidates and their scores, and none has them:"
                " see docs/quality.md"
            )
        planner, served = (ContextPlanner(annotate="none", capacity_tokens=_CACHE_TOKENS) for _ in range(2))
        before = set[str]()

        def make(question: EvidenceQuestion) -> _Made:
            found, choose = question.candidates, option.of(len(question.passages))
            assert choose is not None
            choose = _CHOICES[name](choose)
            blocks = [ContextBlock(each.text, score=each.score) for each in found] or blocks_of(question)
            with planner.planning(blocks, preamble=system, choose=choose if found else None) as plan:
                made = _prompt(plan, question, system)._replace(has_other_evidence=bool(plan.entered))
            if not found or name != "chance":
                return made
            swaps = sum(left.reason == "exchanged" for left in plan.left_out)
            rng = random.Random(f"{question.id}chance")  # noqa: S311
            scores, extra = [each.score for each in found], len(plan.entered or ()) - swaps
            known = [position for position, each in enumerate(found) if each.text in before]
            fed = chance_swaps(scores, choose, swaps, rng, extra, known)
            before.update([found[position].text for position in fed])
            with served.planning([blocks[position] for position in fed], preamble=system) as plan:
                return _prompt(plan, question, system)._replace(has_other_evidence=fed[-1] >= choose.k)

        return make

    return _Arm("relevance", new)


# -- forms of the note; all have the order of the arm `note`, and a note where that arm has one ------------------------

_Form = Callable[[ContextPlan], str]


def _with_borders(plan: ContextPlan) -> str:
    return "\n\n".join([f"{_BORDER}{text}" for text in plan.paragraphs()])


def _with_places(plan: ContextPlan) -> str:
    place = [block.rank for block in plan.blocks].index(0) + 1
    note = f"\n\nMost relevant above: passage {place} of {len(plan.blocks)}."
    return _with_borders(plan) + (note if plan.order_annotation else "")


def _with_named_label(plan: ContextPlan) -> str:
    """Return the context with a label on the passage that the note names, and on no other."""
    label = next(label_candidates(plan.blocks[plan.order.index(0)].block))
    best = f"[{label}] " if plan.order_annotation else ""
    shown = [best * (block.rank == 0) + block.render() for block in plan.blocks]
    return "\n\n".join([*shown, f"Most relevant above: {best.rstrip()}."] if best else shown)


def blocks_of(question: EvidenceQuestion) -> list[ContextBlock]:
    """Return the passages as blocks, in relevance order."""
    return [ContextBlock(text) for text in question.passages]


def _prompt(plan: ContextPlan, question: EvidenceQuestion, system: str) -> _Made:
    gold = {question.passages[at] for at in question.gold}
    labels = tuple([block.label for block in plan.blocks if block.label and block.text in gold])
    return _Made(messages_for(plan, question.question, history_of(question), preamble=system), labels)


def _own(name: str) -> _Arm:
    """Return an arm that a function of the caller makes: a question in, messages out, or an `AgentsArm`.

    `compared_with` names its baseline.
    """
    module, _, function = name.partition(":")
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ArmError(f"the arm {name!r} can't be imported: {error}") from error
    if not callable(make):
        raise ArmError(f"the arm {name!r} must be a function, got {type(make).__name__}")
    baseline = str(getattr(make, "baseline", "relevance"))
    if iscoroutinefunction(make):
        return _Arm(baseline, lambda questions, system: lambda question: _Made([], run=make))
    return _Arm(baseline, lambda questions, system: lambda question: _Made(cast("Messages", make(question))))


def _conversation(make: Callable[[EvidenceQuestion, str], Messages], baseline: str) -> _Arm:
    return _Arm(baseline, lambda questions, system: lambda question: _Made(make(question, system)))


_ARMS: Mapping[str, _Arm] = {
    "relevance": _fixed(lambda question, rng: question.passages),
    "planned": _planned("none"),
    "note": _planned("note"),
    "labels": _planned("labels"),
    "both": _planned("both"),
    "cited": _planned("labels", "labels", _CITING),
    "borders": _planned("note", form=_with_borders),
    "places": _planned("note", form=_with_places),
    "named": _planned("note", form=_with_named_label),
    "batch": _Arm("relevance", _batch),
    "shuffled": _fixed(_shuffled),
    "full-again": _conversation(later_turn(refers=False), "full-again"),
    "references": _conversation(later_turn(refers=True), "full-again"),
}
"""Described in docs/quality.md, as those below."""

_CHOICES: Mapping[str, Callable[[Choice], Choice]] = {
    "chosen": lambda choice: choice,
    "extra": lambda choice: replace(choice, keep=choice.k, extra=choice.extra or _EXTRA),
    "chance": lambda choice: choice,
}
"""The choice of each arm that feeds other evidence, given the one that the user asked for."""

ARM_NAMES = f"{', '.join([*_ARMS, *_CHOICES])}, positions, orders, gold-N, shuffled-N, or a function as module:name"
"""For messages to users."""
