"""Labels: the names of blocks in the prompt."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from warmprefix.blocks import ContextBlock

__all__ = [
    "LABEL_CHARACTERS",
    "LabelRegistry",
    "content_label",
    "is_lasting_label",
    "is_turn_label",
    "label_candidates",
    "lasting_labels",
    "seems_lasting",
    "turn_labels",
]

LABEL_CHARACTERS = r"A-Za-z0-9_.:/~-"
"""All characters that occur in labels, for a regular expression's brackets."""

_SUFFIX = 6
"""Hexadecimal digits of a fingerprint in a label: two texts with one id share them once in 16 million cases."""

_LASTING = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,39}~[0-9a-f]{6}|ctx-[0-9a-f]{6}(?:[0-9a-f]{6}|[0-9a-f]{26})?(?:~[0-9]+)?"
)

_SAFE_ID = re.compile(r"(?!ctx-)(?![0-9A-Fa-f-]{20,}\Z)[A-Za-z0-9][A-Za-z0-9_.:/-]{0,39}")


def label_candidates(block: ContextBlock) -> Iterator[str]:
    """Yield the labels that a block may get, best first.

    - Its id, if it is safe: at most 40 ASCII letters, digits and `_.:/-`, beginning with a letter or digit but not with
      `ctx-`, and not a UUID or digest, which costs many tokens and means nothing.
    - The id with a part of the fingerprint, for an id that names another text too.
    - The fingerprint alone, with more and more digits.

    No id can imitate the last two, because safe ids contain no `~` and do not begin with `ctx-`.

    >>> list(label_candidates(ContextBlock("evidence", id="Doc_1")))[:3]
    ['Doc_1', 'Doc_1~2f235f', 'ctx-2f235f']
    >>> next(label_candidates(ContextBlock("evidence", id="Doc 1]")))
    'ctx-2f235f'
    """
    digest = block.fingerprint.hex()
    if block.id is not None and _SAFE_ID.fullmatch(block.id):
        yield block.id
        yield f"{block.id}~{digest[:_SUFFIX]}"
    yield f"ctx-{digest[:_SUFFIX]}"
    yield f"ctx-{digest[:12]}"
    yield content_label(block)


def turn_labels(block: ContextBlock, is_partial: bool) -> Iterator[str]:
    """Yield the labels that a block may get in a branch, best first.

    A number alone may be that of a footnote in a message. If the record of the branch `is_partial`, an id alone, or few
    digits, may name an unknown text.

    >>> list(turn_labels(ContextBlock("evidence", id="Doc_1"), False))[:2]
    ['Doc_1', 'Doc_1~2f235f']
    >>> next(turn_labels(ContextBlock("evidence", id="1"), False)), next(turn_labels(ContextBlock("evidence"), True))
    ('1~2f235f', 'ctx-2f235f9686cc')
    """
    short = f"ctx-{block.fingerprint.hex()[:_SUFFIX]}"
    for label in label_candidates(block):
        if label == block.id:
            is_safe = not is_partial and any(map(str.isalpha, label))
        else:
            is_safe = label != short or not is_partial
        if is_safe:
            yield label


def is_turn_label(label: str, fingerprint: bytes) -> bool:
    """Return True if a block with this fingerprint, whatever its id, can have a label in a branch."""
    return (
        is_lasting_label(label, fingerprint)
        or _SAFE_ID.fullmatch(label) is not None
        or label == f"ctx-{fingerprint.hex()[:12]}"
    )


def content_label(block: ContextBlock) -> str:
    """Return the label with the whole fingerprint, so that no other text has it."""
    return f"ctx-{block.fingerprint.hex()}"


def lasting_labels(blocks: Iterable[ContextBlock]) -> list[str]:
    """Return for each block its first candidate with a part of the fingerprint.

    It depends on id and text alone. So it still names this text, and no other version of it, after the conversation's
    record is lost. If two blocks would share a label, the second gets its content label.

    >>> lasting_labels([ContextBlock("evidence", id="Doc_1"), ContextBlock("more")])
    ['Doc_1~2f235f', 'ctx-ee2309']
    """
    labels: dict[str, None] = {}
    for block in blocks:
        id, digits = block.id, block.fingerprint.hex()[:_SUFFIX]
        label = f"ctx-{digits}" if id is None or not _SAFE_ID.fullmatch(id) else f"{id}~{digits}"
        labels[content_label(block) if label in labels else label] = None
    return list(labels)


def seems_lasting(label: str) -> bool:
    """Return True if a label has the form of a lasting label or of a content label.

    >>> [label for label in ("Doc_1~2f235f", "ctx-2f235f", "~/src", "ctx-switch", "ERROR") if seems_lasting(label)]
    ['Doc_1~2f235f', 'ctx-2f235f']
    """
    return _LASTING.fullmatch(label) is not None


def is_lasting_label(label: str, fingerprint: bytes) -> bool:
    """Return True if a block with this fingerprint, whatever its id, can have a label as its lasting or content label.

    >>> key = ContextBlock("evidence").fingerprint
    >>> [is_lasting_label(label, key) for label in ("Doc_1~2f235f", "ctx-2f235f", "Doc_1~000000", "Doc_1")]
    [True, True, False, False]
    """
    digest = fingerprint.hex()
    id, _, digits = label.rpartition("~")
    if digits == digest[:_SUFFIX]:
        return _SAFE_ID.fullmatch(id) is not None
    return label in (f"ctx-{digest[:_SUFFIX]}", f"ctx-{digest}")


class LabelRegistry:
    """One label per block and one block per label, while either is remembered.

    The first id that comes with a text names it from then on. Bounded between calls: the least recently used block is
    forgotten first, where use counts from when the registry was half full. Not thread-safe.
    """

    def __init__(self, max_labels: int = 65_536) -> None:
        self._max_labels = max_labels
        self._labels: OrderedDict[bytes, str] = OrderedDict()
        self._owners: dict[str, bytes] = {}
        self._opened: OrderedDict[bytes, None] = OrderedDict()
        """Digests of lines of texts that begin with a label."""

    def labels(self, blocks: Sequence[ContextBlock]) -> list[str]:
        """Return the blocks' labels; new blocks get theirs now. O(1) per block."""
        chosen, mark_used = self._labels, self._labels.move_to_end
        # Far from the bound, nothing is forgotten soon, so the order of use is not worth the time.
        filling = len(chosen) + len(blocks) > self._max_labels // 2
        labels: list[str] = []
        for block in blocks:
            label = chosen.get(block.fingerprint)
            if label is None:
                label = self._choose(block)
            elif filling:
                mark_used(block.fingerprint)
            labels.append(label)
        while len(chosen) > self._max_labels:
            del self._owners[chosen.popitem(last=False)[1]]
        return labels

    def _choose(self, block: ContextBlock) -> str:
        key, owners = block.fingerprint, self._owners
        label = next(candidate for candidate in label_candidates(block) if owners.get(candidate, key) == key)
        owners[label] = key  # first, so that an interrupt between the two lines leaves a valid registry
        self._labels[key] = label
        return label

    def add_opened(self, lines: Iterable[str]) -> None:
        """Remember lines of texts that begin with a label; at most `max_labels`."""
        for line in lines:
            self._opened[_digest(line)] = None
            self._opened.move_to_end(_digest(line))
        while len(self._opened) > self._max_labels:
            self._opened.popitem(last=False)

    def discard_opened(self, lines: Iterable[str]) -> None:
        """Forget lines that are now first lines of blocks."""
        if self._opened:
            for line in lines:
                self._opened.pop(_digest(line), None)

    def is_text(self, label: str, line: str) -> bool:
        """Return True if a text had this line, and its label is no block's."""
        return label not in self._owners and _digest(line) in self._opened

    def __len__(self) -> int:
        return len(self._labels)


def _digest(line: str) -> bytes:
    return hashlib.blake2b(line.encode("utf-8", "surrogatepass"), digest_size=8).digest()
