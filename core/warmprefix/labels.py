"""Labels: what a block is called in the prompt, the same in every request."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from warmprefix.blocks import ContextBlock

__all__ = ["LABEL_CHARACTERS", "LabelRegistry", "content_label", "label_candidates"]

LABEL_CHARACTERS = r"A-Za-z0-9_.:/~-"
"""A regular-expression class of all characters that occur in labels."""

_SAFE_ID = re.compile(r"(?!ctx-)(?![0-9A-Fa-f-]{20,}\Z)[A-Za-z0-9][A-Za-z0-9_.:/-]{0,39}")


def label_candidates(block: ContextBlock) -> Iterator[str]:
    """The labels that a block may get, best first.

    Its id, if that is at most 40 ASCII letters, digits and `_.:/-`, begins with a letter or digit and not with `ctx-`,
    and is no UUID or digest, which would cost many tokens and tell nothing; then the id with a part of the fingerprint,
    for an id that names another text too; then the fingerprint alone, ever more of it. No other id can imitate
    these: `~` and the prefix `ctx-` are kept from ids.

    >>> list(label_candidates(ContextBlock("evidence", id="Doc_1")))[:3]
    ['Doc_1', 'Doc_1~2f235f96', 'ctx-2f235f']
    >>> next(label_candidates(ContextBlock("evidence", id="Doc 1]")))
    'ctx-2f235f'
    """
    digest = block.fingerprint.hex()
    if block.id is not None and _SAFE_ID.fullmatch(block.id):
        yield block.id
        yield f"{block.id}~{digest[:8]}"
    yield f"ctx-{digest[:6]}"
    yield f"ctx-{digest[:12]}"
    yield content_label(block)


def content_label(block: ContextBlock) -> str:
    """The label that holds the whole fingerprint, and so can't name any other text."""
    return f"ctx-{block.fingerprint.hex()}"


class LabelRegistry:
    """One label a block and one block a label, for as long as either is remembered.

    The first id that comes with a text names it from then on. Bounded, between two calls: first forgotten is the
    block that was not asked for longest since the registry was half full. Not thread-safe.
    """

    def __init__(self, max_labels: int = 65_536) -> None:
        self._max_labels = max_labels
        self._labels: OrderedDict[bytes, str] = OrderedDict()
        self._owners: dict[str, bytes] = {}

    def labels(self, blocks: Sequence[ContextBlock]) -> list[str]:
        """A label for each block, chosen now for those that have none. O(1) a block."""
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

    def __len__(self) -> int:
        return len(self._labels)
