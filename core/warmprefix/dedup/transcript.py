"""De-duplication inside one prompt, for whoever puts all of its messages together."""

from __future__ import annotations

from itertools import chain, count

from warmprefix.annotate import Templates, header_labels
from warmprefix.blocks import ContextBlock
from warmprefix.labels import content_label, label_candidates

__all__ = ["Transcript"]

_DEFAULT_TEMPLATES = Templates()  # checking them takes longer than a prompt's other work


class Transcript:
    """One prompt's messages, told in order: a context block that comes again becomes a reference to the first time.

    Make a new one for every prompt and tell it all messages. What `write` returns depends on nothing but what was told
    before, so a history that only grows keeps its bytes, and one that was cut, forked or summarised can't leave a
    reference dangling: there is no other state to disagree with it. The texts are not changed, nor reordered, for
    behind a question of its own nobody shares a prompt.

    >>> transcript = Transcript(min_tokens=0)
    >>> transcript.read("How deep is the sea?")
    >>> sea = ContextBlock("The sea is 3,688 metres deep on average, and 10,935 metres at most.", id="sea")
    >>> transcript.write(sea)
    '[sea] The sea is 3,688 metres deep on average, and 10,935 metres at most.'
    >>> transcript.write(sea)
    'Please refer to [sea] in the previous conversation.'

    Not thread-safe. Linear in the length of what it is told.
    """

    def __init__(self, *, templates: Templates | None = None, min_tokens: int = 64) -> None:
        """Begin with an empty prompt.

        Args:
            templates: The wording of the references.
            min_tokens: A block shorter than this stays as it is, without a label: a reference would spare next to
                nothing. The default is about three times what a label and a reference cost.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: `min_tokens` is negative.
        """
        if templates is not None and not isinstance(templates, Templates):
            raise TypeError(f"templates must be Templates or None, got {type(templates).__name__}")
        if isinstance(min_tokens, bool) or not isinstance(min_tokens, int):
            raise TypeError(f"min_tokens must be an int, got {type(min_tokens).__name__}")
        if min_tokens < 0:
            raise ValueError(f"min_tokens must be 0 or more, got {min_tokens}")
        self.references = 0
        """Blocks that became references."""
        self.reference_tokens = 0
        """Tokens of these blocks."""
        self._templates = _DEFAULT_TEMPLATES if templates is None else templates
        self._min_tokens = min_tokens
        self._labels: dict[bytes, str] = {}
        self._owners: dict[str, bytes] = {}
        self._taken: set[str] = set()

    def read(self, text: str) -> None:
        """Tell of text that stands in the prompt as it is: a question, an answer, a result of another kind.

        A line that begins with a label, as a block does, takes that label away: no block gets it any more, and one
        that has it is sent in full, under another, when it comes again. Inside a line it is a citation, which changes
        nothing.
        """
        for label in header_labels(text):
            self._taken.add(label)
            owner = self._owners.pop(label, None)
            if owner is not None:
                del self._labels[owner]

    def write(self, block: ContextBlock | str) -> str:
        """What to put into the prompt for a block: labelled in full, or a reference to where it already stands so.

        Raises:
            TypeError: `block` is neither a ContextBlock nor a str.
        """
        if not isinstance(block, ContextBlock):
            block = ContextBlock(block)
        if block.tokens < self._min_tokens:
            self.read(block.text)
            return block.text
        label = self._labels.get(block.fingerprint)
        if label is None:
            return self._in_full(block)
        note = self._templates.location_annotation(label)
        if len(note) >= len(block.text):
            return self._in_full(block)
        self.references += 1
        self.reference_tokens += block.tokens
        return note

    def _in_full(self, block: ContextBlock) -> str:
        self.read(block.text)  # it may take a label away, even the one that this block had so far
        label = self._labels.get(block.fingerprint)
        if label is None:
            numbered = (f"{content_label(block)}~{number}" for number in count(2))
            label = next(free for free in chain(label_candidates(block), numbered) if self._is_free(free))
            self._labels[block.fingerprint] = label
            self._owners[label] = block.fingerprint
        return f"[{label}] {block.text}"

    def _is_free(self, label: str) -> bool:
        return label not in self._owners and label not in self._taken
