"""The prompts that an engine received, and checks of their references. They read nothing but text.

No part of the library is used here: labels, notes and borders of blocks are found by rules of this module's own, as a
reader of the prompt finds them. It is given the passages that the retriever returned in each turn. The checks count

- dangling: a label of a reference, without a passage of this turn in full behind that label, further up in this prompt;
  or first words of a reference, with which no such passage begins;
- ambiguous: such a label that another text of the prompt has, too; or first words of another text;
- lost: a passage of the turn that is neither in full in the turn's own part of a prompt nor named by a reference there;
- crossed: a text of another tenant.

A prompt is cut into parts behind each answer. Each part belongs to the last question in it, so earlier turns are
checked again in each later prompt.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Passage", "PromptFindings", "PromptMessage", "answer_of", "marked", "number_of", "without_labels"]


class PromptMessage(NamedTuple):
    """A message as the engine's chat template received it."""

    role: str
    text: str


class Passage(NamedTuple):
    """A text that the retriever returned."""

    text: str
    tenant: str | None = None


_MARK = re.compile(r"\(turn (\d+)\)")
_ANSWER = re.compile(r"\(answered turn (\d+)\)")
_LABEL = r"[^\[\]\n]{1,80}"
_REFERENCE = re.compile(
    rf"^[-*#>\d.) ]{{0,6}}Please also use the context labelled ((?:\[{_LABEL}\](?:, )?)+) above in this conversation\.",
    re.MULTILINE,
)
_AGAIN = re.compile(
    r'^[-*#>\d.) ]{0,6}Also use the passages above that begin with ("[^"\n]+"(?:, "[^"\n]+")*)\.', re.MULTILINE
)
_PRIORITY = re.compile(
    rf"^Please read the context in the following priority order: ((?:\[{_LABEL}\](?: > )?)+) and", re.MULTILINE
)
_HEADER = re.compile(rf"^(?:[-*>\d.) ]{{0,6}})\[({_LABEL})\] ", re.MULTILINE)
_BORDER = re.compile(rf"(?:\A|\n[^\S\n]*\n)\s*(?:\[{_LABEL}\] )?")
_NAMED = re.compile(rf"\[({_LABEL})\]")
_QUOTING = re.compile(
    r'^\[(?:Ran again; w|W)ord for word in the result of [^\n]*?: the passage that begins "(.+?)"\.\]', re.MULTILINE
)
_WHOLE = re.compile(r"^\[(?:Ran again; w|W)ord for word the result of the earlier call (.+)\.\]$", re.MULTILINE)
_NUMBERED = re.compile(r"(.+), number (\d+) of such calls")
_OWNER = re.compile(r"\bproperty of tenant (\w+)")


def marked(question: str, number: int) -> str:
    """Return the question of turn `number` with its mark."""
    return f"{question} (turn {number})"


def answer_of(messages: Sequence[PromptMessage]) -> str:
    """Return the answer to the last question, with a mark of its own."""
    number = number_of(messages)
    return "Nothing was asked." if number is None else f"That is so. (answered turn {number})"


def number_of(messages: Sequence[PromptMessage]) -> int | None:
    """Return the number of the last question."""
    for message in reversed(messages):
        numbers = [] if message.role == "assistant" else _MARK.findall(message.text)
        if numbers:
            return int(numbers[-1])
    return None


def without_labels(text: str) -> str:
    """Return a text without labels: those of blocks, and those in references."""
    for note in [*_REFERENCE.finditer(text), *_AGAIN.finditer(text)][::-1]:
        text = text[: note.start(1)] + text[note.end(1) :]
    return _HEADER.sub("", text)


class _Place(NamedTuple):
    """A place in a prompt: the message and the character."""

    message: int
    at: int


class _Part(NamedTuple):
    """The messages of one turn, from the last answer to the next one."""

    start: int
    end: int
    numbers: Sequence[int]


@dataclass
class PromptFindings:
    """Counts of what was checked, and of the mistakes."""

    turns: int = 0
    prompts: int = 0
    passages: int = 0
    references: int = 0
    """Labels of references in the newest part of a prompt, counted once per prompt."""
    checked: int = 0
    """Labels of references in all parts."""
    dangling: int = 0
    lost: int = 0
    ambiguous: int = 0
    crossed: int = 0
    examples: list[str] = field(default_factory=list)
    asked: dict[int, Sequence[Passage]] = field(default_factory=dict, repr=False)
    """The passages of each turn."""
    shares: bool = False
    """True if a turn may have several prompts, each with a share of the passages: only a turn that ended has all."""
    of_results: bool = False
    """True if references name results of tools; what looks like the planner's notes is then a part of a text."""

    @property
    def wrong(self) -> int:
        return self.dangling + self.lost + self.ambiguous + self.crossed

    def check(
        self, number: int, prompts: Sequence[Sequence[PromptMessage]], *, cut: bool = False, ended: bool = True
    ) -> list[str]:
        """Check all prompts that the engine received for a turn; return the mistakes.

        A passage must be in one of these prompts.

        Args:
            number: The turn.
            prompts: The messages of each.
            cut: True if the application has cut or edited the history of this turn: what its older messages refer to
                may be gone.
            ended: True if the application kept the turn.
        """
        self.turns += 1
        mistakes: list[str] = []
        readers = [_Reader(prompt, self.asked, self.of_results) for prompt in prompts]
        for reader in readers:
            self.prompts += 1
            for part in reader.parts if not cut else reader.parts[-1:]:
                newest = part is reader.parts[-1]
                for kind, label in reader.references(part):
                    self.checked += 1
                    self.references += newest and kind != "priority"
                    mistakes += reader.mistakes_of(part, kind, label)
                if not newest and part.numbers:
                    mistakes += [
                        f"lost: {passage.text!r} of turn {part.numbers[-1]}, seen from turn {number}"
                        for passage in self.asked.get(part.numbers[-1], ())
                        if len(readers) == 1 and not self.shares and not reader.shows(part, passage)
                    ]
            mistakes += reader.crossed(self.asked[number])
        is_whole = bool(readers) and (ended or not self.shares)
        for passage in self.asked[number]:
            self.passages += 1
            if is_whole and not any(reader.shows(reader.parts[-1], passage) for reader in readers):
                mistakes.append(f"lost: {passage.text!r} of turn {number}")
        for mistake in mistakes:
            kind = mistake.partition(":")[0]
            setattr(self, kind, getattr(self, kind) + 1)
        return mistakes


class _Reader:
    """One prompt, as a reader sees it."""

    def __init__(
        self, messages: Sequence[PromptMessage], asked: Mapping[int, Sequence[Passage]], of_results: bool
    ) -> None:
        self.messages = messages
        self._of_results = of_results
        self._asked = asked
        self.parts = list(_parts(messages))
        self._plain = [_plain(message.text) for message in messages]
        self._headers: dict[str, list[_Place]] | None = None

    def references(self, part: _Part) -> Iterator[tuple[str, str]]:
        """Yield kind and label of each block that the notes of a part name."""
        for number in range(part.start, part.end):
            text = self.messages[number].text
            if self._of_results:
                if self.messages[number].role == "tool" and (note := _WHOLE.search(text)):
                    yield "result", note[1]
                continue
            for note in _REFERENCE.finditer(text):
                for label in _NAMED.findall(note[1]):
                    yield "reference", label
            for note in _AGAIN.finditer(text):
                for words in note[1][1:-1].split('", "'):
                    yield "opening", words
            for note in _PRIORITY.finditer(text):
                for label in _NAMED.findall(note[1]):
                    yield "priority", label
            for note in _QUOTING.finditer(text):
                yield "quote", note[1]

    def mistakes_of(self, part: _Part, kind: str, label: str) -> list[str]:
        """Return the mistakes of a reference."""
        wanted = {passage.text for number in part.numbers for passage in self._asked.get(number, ())}
        before = range(part.end if kind == "priority" else part.start)
        places = self._places(kind, label, part)
        held = [(place, self._block_at(place, kind, label, wanted)) for place in places]
        right = {text for place, text in held if text in wanted and place.message in before}
        if kind != "priority" and not right:  # a reference may also stand behind its block in one message
            right = {text for place, text in held if text in wanted and self._stands_before_note(place, part, label)}
        mistakes: list[str] = []
        if not right:
            found = [text or "another text" for _, text in held]
            mistakes.append(f"dangling: {kind} [{label}] of turn {part.numbers[-1:]}, where stands {found}")
        elif len({text for _, text in held}) > 1:
            mistakes.append(f"ambiguous: {kind} [{label}] is {sorted(str(text) for _, text in held)}")
        return mistakes

    def shows(self, part: _Part, passage: Passage) -> bool:
        """Return True if a part has a passage in full, or refers to it."""
        text = _plain(passage.text)
        if any(text in self._plain[number] for number in range(part.start, part.end)):
            return True
        for kind, label in self.references(part):
            if kind == "priority":
                continue
            places = self._places(kind, label, part)
            if any(self._block_at(place, kind, label, {passage.text}) == passage.text for place in places):
                return True
        return False

    def crossed(self, passages: Iterable[Passage]) -> list[str]:
        """Return the texts of other tenants than the owner of these passages."""
        owners = {passage.tenant for passage in passages}
        if not owners:
            return []
        named = {owner for message in self.messages for owner in _OWNER.findall(message.text)}
        return [f"crossed: a text of {owner} in a prompt of {owners}" for owner in sorted(named - owners)]

    def _stands_before_note(self, place: _Place, part: _Part, label: str) -> bool:
        """Return True if a block stands in the part itself, in front of the reference."""
        for number in range(part.start, part.end):
            text = self.messages[number].text
            if self._of_results:
                notes = [note for note in _WHOLE.finditer(text) if note[1] == label]
            else:
                notes = [note for note in _REFERENCE.finditer(text) if f"[{label}]" in note[1]]
                notes += [note for note in _AGAIN.finditer(text) if f'"{label}"' in note[1]]
            if any(place < (number, note.start()) for note in notes):
                return True
        return False

    def _places(self, kind: str, label: str, part: _Part) -> list[_Place]:
        if kind == "result":
            return self._results(label, part.end)
        if kind == "opening":
            return self._opened(label, part.end)
        return self._quoted(label) if kind == "quote" else self._labelled(label)

    def _opened(self, words: str, end: int) -> list[_Place]:
        """Return where the first messages have a paragraph, or a labelled text, that begins with these words."""
        wanted = _letters(words)
        return [
            _Place(number, found.end())
            for number, message in enumerate(self.messages[:end])
            for found in _BORDER.finditer(message.text)
            if _letters(message.text[found.end() : found.end() + 8 * len(words) + 100]).startswith(wanted)
        ]

    def _results(self, call: str, end: int) -> list[_Place]:
        """Return where the results of an earlier call begin that are there in full."""
        numbered = _NUMBERED.fullmatch(call)
        ids = [id for id, shown in self._calls(end) if shown == (call if numbered is None else numbered[1])]
        if numbered is not None:
            ids = ids[int(numbered[2]) - 1 :][:1]
        return [
            _Place(number, message.text.index("\n") + 1)
            for number, message in enumerate(self.messages)
            if message.role == "tool" and message.text.partition("\n")[0] in ids and not _WHOLE.search(message.text)
        ]

    def _calls(self, end: int) -> Iterator[tuple[str, str]]:
        """Yield the id of each call in the first messages, and how it is written."""
        for message in self.messages[:end]:
            if message.role == "assistant" and message.text.startswith("{"):
                for line in message.text.splitlines():
                    call = json.loads(line)
                    yield call["call_id"], f"{call['name']}({call['arguments']})"

    def _labelled(self, label: str) -> list[_Place]:
        """Return where lines begin with a label."""
        if self._headers is None:
            self._headers = defaultdict(list)
            for number, message in enumerate(self.messages):
                for found in _HEADER.finditer(message.text):
                    self._headers[found[1]].append(_Place(number, found.end()))
        return self._headers.get(label, [])

    def _quoted(self, words: str) -> list[_Place]:
        """Return where lines begin with these words."""
        return [
            _Place(number, found.start())
            for number, message in enumerate(self.messages)
            for found in re.finditer(f"^{re.escape(words)}", message.text, re.MULTILINE)
        ]

    def _block_at(self, place: _Place, kind: str, label: str, wanted: Iterable[str]) -> str | None:
        """Return the longest passage that stands at a place in full; None if no known one does."""
        shown = self.messages[place.message].text[place.at :]
        number = next((part.numbers for part in self.parts if part.start <= place.message < part.end), ())
        known = {*wanted, *(passage.text for each in number for passage in self._asked.get(each, ()))}
        shown = _plain(shown[: 2 * max(map(len, known), default=0) + 100])
        held = [text for text in known if shown.startswith(_plain(text)) and _ends(shown, len(_plain(text)))]
        return max(held, key=len, default=None)


def _ends(shown: str, at: int) -> bool:
    """Return True if a text that ends here could be a whole block: the line ends, too."""
    rest = shown[at:].lstrip(" \t")
    return not rest or rest[0] in "\n\r"


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text)).casefold()


def _plain(text: str) -> str:
    """Return a text without backslashes, which may escape lines of evidence, and without the blanks at its ends."""
    return text.replace("\\", "").strip()


def _parts(messages: Sequence[PromptMessage]) -> Iterator[_Part]:
    start = 0
    for end, message in enumerate(messages, 1):
        answered = message.role == "assistant" and _ANSWER.search(message.text)
        if answered or end == len(messages):
            asked = [each for each in messages[start:end] if each.role != "assistant"]
            yield _Part(start, end, [int(number) for each in asked for number in _MARK.findall(each.text)])
            start = end
