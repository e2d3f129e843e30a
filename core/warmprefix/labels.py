"""Labels: what a block is called in the prompt."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from warmprefix.blocks import ContextBlock

__all__ = ["LABEL_CHARACTERS", "LabelRegistry", "content_label", "label_candidates", "lasting_labels", "seems_lasting"]

LABEL_CHARACTERS = r"A-Za-z0-9_.:/~-"
"""A regular-expression class of all characters that occur in labels."""

_SUFFIX = 6
"""Hexadecimal digits of a fingerprint in a label: two texts with one id share them once in 16 million times."""

_LASTING = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,39}~[0-9a-f]{6}|ctx-[0-9a-f]{6}(?:[0-9a-f]{6}|[0-9a-f]{26})?(?:~[0-9]+)?"
)

_SAFE_ID = re.compile(r"(?!ctx-)(?![0-9A-Fa-f-]{20,}\Z)[A-Za-z0-9][A-Za-z0-9_.:/-]{0,39}")


def label_candidates(block: ContextBlock) -> Iterator[str]:
    """Yield the labels that a block may get, best first.

    Its id, if that is at most 40 ASCII letters, digits and `_.:/-`, begins with a letter or digit and not with `ctx-`,
    and is no UUID or digest, which would cost many tokens and mean nothing; then the id with a part of the fingerprint,
    for an id that names another text too; then the fingerprint alone, ever more of it. No other id can imitate
    these: `~` and the prefix `ctx-` are kept from ids.

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


def content_label(block: ContextBlock) -> str:
    """Return the label that holds the whole fingerprint, so that no other text has it."""
    return f"ctx-{block.fingerprint.hex()}"


def lasting_labels(blocks: Iterable[ContextBlock]) -> list[str]:
    """Return for each block the first of `label_candidates` that holds a part of the fingerprint.

    It depends on id and text alone. So it still names this text, and no other version of it, after everything that
    was remembered of a conversation is lost. Of two blocks that would share one, the second gets its content label.

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
    """Return whether a label in a text has the form of those that `lasting_labels` gives, or of a content label.

    >>> [label for label in ("Doc_1~2f235f", "ctx-2f235f", "~/src", "ctx-switch", "ERROR") if seems_lasting(label)]
    ['Doc_1~2f235f', 'ctx-2f235f']
    """
    return _LASTING.fullmatch(label) is not None


class LabelRegistry:
    """One label per block and one block per label, for as long as either is remembered.

    The first id that comes with a text names it from then on. Bounded, between two calls: first forgotten is the
    block that was not asked for longest since the registry was half full. Not thread-safe.
    """

    def __init__(self, max_labels: int = 65_536) -> None:
        self._max_labels = max_labels
        self._labels: OrderedDict[bytes, str] = OrderedDict()
        self._owners: dict[str, bytes] = {}
        self._opened: OrderedDict[bytes, None] = OrderedDict()
        """Digests of lines of texts that begin with a label."""

    def labels(self, blocks: Sequence[ContextBlock]) -> list[str]:
        """Return a label for each block, chosen now for those that have none. O(1) per block."""
        known, used = self._labels, self._labels.move_to_end
        # Far from the bound, nothing will be forgotten soon, and remembering the order of use is not worth its time.
        filling = len(known) + len(blocks) > self._max_labels // 2
        labels: list[str] = []
        for block in blocks:
            label = known.get(block.fingerprint)
            if label is None:
                label = self._choose(block)
            elif filling:
                used(block.fingerprint)
            labels.append(label)
        while len(known) > self._max_labels:
            del self._owners[known.popitem(last=False)[1]]
        return labels

    def _choose(self, block: ContextBlock) -> str:
        key, owners = block.fingerprint, self._owners
        label = next(candidate for candidate in label_candidates(block) if owners.get(candidate, key) == key)
        owners[label] = key  # before the other, so that an interrupt between the two leaves nothing to trip over
        self._labels[key] = label
        return label

    def add_opened(self, lines: Iterable[str]) -> None:
        """Remember lines of texts that begin with a label, though no block of the prompt has it. Bounded as above."""
        for line in lines:
            self._opened[_digest(line)] = None
            self._opened.move_to_end(_digest(line))
        while len(self._opened) > self._max_labels:
            self._opened.popitem(last=False)

    def discard_opened(self, lines: Iterable[str]) -> None:
        """Forget lines that blocks begin with from now on."""
        if self._opened:
            for line in lines:
                self._opened.pop(_digest(line), None)

    def is_text(self, label: str, line: str) -> bool:
        """Return whether a text had this line, which begins with a label that no remembered block has."""
        return label not in self._owners and _digest(line) in self._opened

    def __len__(self) -> int:
        return len(self._labels)


def _digest(line: str) -> bytes:
    return hashlib.blake2b(line.encode("utf-8", "surrogatepass"), digest_size=8).digest()
