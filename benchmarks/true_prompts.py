"""The prompts that the model really reads, byte for byte, and checks of a plan's references against them.

The checks do not depend on how plans are made or on any store's record. They count

- dangling: references whose labelled text is not complete in any earlier message of the prompt;
- lost: blocks of the request that are neither complete in the prompt nor replaced by a reference;
- ambiguous: labels in front of two different texts of one prompt;
- crossed: labels of another tenant, which begin with the tenant's name and a dot.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from warmprefix import Branch, ContextBlock, ContextPlan, ContextPlanner

__all__ = ["TENANTS", "Chain", "Dialogue", "Findings", "Message", "Turn"]


TENANTS = ("acme", "globex", None)

_NOTE = re.compile(r"^Please also use the context labelled (.+) above in this conversation\.$", re.MULTILINE)
_AGAIN = re.compile(r'^Also use the passages above that begin with ("[^"\n]+"(?:, "[^"\n]+")*)\.$', re.MULTILINE)
_HEADER = re.compile(r"(?:\A|\n)\[([A-Za-z0-9_.:/~-]+)\] ")


class Message:
    """The text that was sent to the model in one turn."""

    __slots__ = ("edited", "headers", "quoted", "referred", "text")

    def __init__(self, text: str, edited: bool = False) -> None:
        self.text = text
        self.edited = edited
        """True if the application has cut out a piece of it, perhaps the end of a paragraph."""
        headers: dict[str, tuple[int, ...]] = {}
        for found in _HEADER.finditer(text):
            headers[found[1]] = (*headers.get(found[1], ()), found.start(1) - 1)
        self.headers = headers
        """Places of the labels that its lines begin with."""
        self.referred = {label for note in _NOTE.finditer(text) for label in note[1][1:-1].split("], [")}
        """Labels that its references name."""
        self.quoted = {words for note in _AGAIN.finditer(text) for words in note[1][1:-1].split('", "')}
        """First words of blocks that its references name."""

    def named(self, label: str, text: str) -> tuple[bool, bool]:
        """Return whether it holds the labelled text in full, and whether another text has the label.

        Ignores backslashes, because the prompt decides which lines of a text are escaped. An unlabelled text must
        be a paragraph.
        """
        if not label:
            return f"\n\n{text}\n\n".replace("\\", "") in f"\n\n{self.text}".replace("\\", ""), False
        holds = other = False
        full = f"[{label}] {text}".replace("\\", "")
        for start in self.headers.get(label, ()):
            shown = self.text[start : start + 2 * len(full) + 64].replace("\\", "")
            if shown.startswith(full) and (self.edited or shown.startswith("\n\n", len(full))):
                holds = True
            else:
                other = True
        return holds, other


@dataclass
class Findings:
    """Counts of the mistakes in all plans that were checked."""

    plans: int = 0
    blocks: int = 0
    references: int = 0
    dangling: int = 0
    lost: int = 0
    ambiguous: int = 0
    crossed: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        return self.dangling + self.lost + self.ambiguous + self.crossed

    def check(
        self,
        plan: ContextPlan,
        request: Sequence[ContextBlock],
        history: Sequence[Message],
        message: Message,
        story: Iterable[str] = (),
    ) -> None:
        """Check a plan against its prompt: the history, and the message that holds the plan.

        Args:
            plan: The plan.
            request: The blocks that it was made of.
            history: The messages before it.
            message: The message that it became part of.
            story: The events of the conversation so far, for the report of a mistake.
        """
        self.plans += 1
        wrong: list[str] = []
        if {planned.block.text for planned in plan.blocks} != {block.text for block in request}:
            wrong.append("lost: the plan holds other blocks than the request")
        for planned in plan.blocks:
            self.blocks += 1
            label, text, reference = planned.label, planned.block.text, planned.reference
            here, other = message.named(label, text)
            before = False
            for earlier in history:
                found = earlier.named(label, text)
                before, other = before or found[0], other or found[1]
            if reference is not None:
                self.references += 1
                words = reference.opening
                if label not in message.referred and not (words in message.quoted and _begins(text, words)):
                    wrong.append(f"lost: no trace of [{label or words}]")
                if not before:
                    wrong.append(f"dangling: [{label or words}] is not {text!r} in {len(history)} messages")
            elif not here:
                wrong.append(f"lost: no trace of [{label}] {text!r}")
            if other:
                wrong.append(f"ambiguous: [{label}] is {text!r} and another text")
            giver = label.partition(".")[0]
            if giver in TENANTS and giver != plan.scope.tenant:
                wrong.append(f"crossed: [{label}] is a label of {giver}")
        for finding in wrong:
            kind = finding.partition(":")[0]
            setattr(self, kind, getattr(self, kind) + 1)
            if len(self.examples) < 20:
                events = "; ".join(story)
                self.examples.append(f"{finding}, in {plan.conversation} of {plan.scope.tenant}: {events}")


def _begins(text: str, words: str) -> bool:
    """Return True if a reader finds that a text begins with these words."""
    return "".join(filter(str.isalnum, text)).startswith("".join(filter(str.isalnum, words)))


@dataclass(frozen=True, eq=False)
class Turn:
    """A plan, and the prompt that it is part of."""

    planner: ContextPlanner
    plan: ContextPlan
    history: tuple[Message, ...]
    message: Message


class Dialogue:
    """One conversation of an obedient application: it stores a turn only if no other turn came between.

    Numbers name its blocks. Every plan is checked.
    """

    def __init__(self, name: str = "chat", tenant: str | None = None) -> None:
        self.name = name
        self.tenant = tenant
        self.history: tuple[Message, ...] = ()
        self.findings = Findings()

    @staticmethod
    def blocks(numbers: Iterable[int]) -> list[ContextBlock]:
        proof = "Anyone can check that by hand who has learned to multiply, and any machine that counts can do it too."
        return [ContextBlock(f"Fact {n}: {n} times {n} is {n * n}. {proof}", id=f"doc-{n}") for n in numbers]

    def plan(self, planner: ContextPlanner, numbers: Iterable[int]) -> Turn:
        request = self.blocks(numbers)
        plan = planner.plan(request, conversation=self.name, tenant=self.tenant, placement="tail")
        return self.check(planner, plan, request)

    def keep(self, turn: Turn) -> bool:
        """Store and commit an answered turn, or abandon it if another was stored meanwhile; True if stored."""
        if not self.store(turn):
            turn.planner.abandon(turn.plan)
            return False
        turn.planner.commit(turn.plan)
        return True

    def turn(self, planner: ContextPlanner, numbers: Iterable[int]) -> ContextPlan:
        turn = self.plan(planner, numbers)
        assert self.keep(turn)
        return turn.plan

    def cut(self, planner: ContextPlanner, keep: int = 0) -> None:
        """Drop all messages but the first `keep`; if the store fails, raise StoreError and drop none."""
        planner.forget(self.name, tenant=self.tenant)
        self.history = self.history[:keep]

    # -- steps, for tests that await the calls ------------------------------------------------------------------

    def check(self, planner: ContextPlanner, plan: ContextPlan, request: Sequence[ContextBlock]) -> Turn:
        """Check a plan that was just made."""
        message = Message(f"{plan.render()}\n\nQuestion {len(self.history)}?")
        self.findings.check(plan, request, self.history, message)
        return Turn(planner, plan, self.history, message)

    def store(self, turn: Turn) -> bool:
        """Append a turn to the history, unless another was stored since it was planned; True if appended."""
        if self.history is not turn.history:
            return False
        self.history = (*self.history, turn.message)
        return True


class Chain(Dialogue):
    """A conversation by the ids of its turns; every stored turn gets an id that no other has."""

    _ids = itertools.count()

    def __init__(self, name: str = "chain", tenant: str | None = None) -> None:
        super().__init__(name, tenant)
        self.after: str | None = None

    def plan(self, planner: ContextPlanner, numbers: Iterable[int]) -> Turn:
        request = self.blocks(numbers)
        plan = planner.plan(request, conversation=Branch(self.after), tenant=self.tenant, placement="tail")
        return self.check(planner, plan, request)

    def keep(self, turn: Turn) -> bool:
        """Store and commit an answered turn, which becomes the one to continue."""
        self.history = (*turn.history, turn.message)
        self.after = f"{self.name}-{next(self._ids)}"
        turn.planner.commit(turn.plan, turn_id=self.after)
        return True

    def cut(self, planner: ContextPlanner, keep: int = 0) -> None:
        """Drop all messages but the first `keep`, and continue a turn that has no record."""
        self.history = self.history[:keep]
        self.after = f"{self.name}-cut-{next(self._ids)}"

    def fork(self) -> Chain:
        """Return another conversation that continues the same turn."""
        fork = Chain(self.name, self.tenant)
        fork.history, fork.after, fork.findings = self.history, self.after, self.findings
        return fork
