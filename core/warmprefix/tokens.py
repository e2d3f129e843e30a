"""Notes and labels of a planner's prompts, and their price in tokens."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from string import ascii_lowercase, ascii_uppercase, digits, punctuation
from typing import Any, Protocol, SupportsIndex, cast

from warmprefix.annotate import Annotate, Annotation, Templates, check_annotate, has_labels
from warmprefix.blocks import ContextBlock
from warmprefix.errors import log_failure
from warmprefix.plan import PlannedBlock, joint_reference
from warmprefix.quotes import quotes_of

__all__ = [
    "CheckedCounter",
    "NoteWriter",
    "OrderNote",
    "TokenCounter",
    "as_counter",
    "estimated_tokens",
    "needs_note",
    "order_note",
    "plausible_count",
    "raise_unless_failure",
]


class TokenCounter(Protocol):
    """Counts the tokens of a text."""

    def __call__(self, text: str, /) -> int:
        """Return the number of tokens, without those that begin or end a prompt."""
        ...


# -- the estimate ------------------------------------------------------------------------------------------------------

# Tokenizers cut a text at the borders between words, numbers and signs. A space belongs to the word or sign after it,
# but not to a digit. `bytes.translate` and `split` are five times faster than a regular expression here.
# `benchmarks/token_estimates.py` measures the errors.
_MAX_WORD = 7
"""Letters of a word that is one token."""
_TOKENS_PER_LETTER = 0.2
"""Of each further letter."""
_TOKENS_PER_DIGIT = 0.9
_FREE_TOKENS = 0.4
"""Of a number. Some tokenizers have one token per digit, others one per three digits. Notes in the tokens of the first
kind must not be underestimated by more than a tenth, so the estimate of a number is above the mean."""
_TOKENS_PER_SIGN = 0.05
"""Of each sign right after another sign."""
_TOKENS_PER_CHARACTER = (
    (r"[\u0080-\u00bf\u2000-\u2bff]", 0.9),  # typographic signs
    (r"[\u00c0-\u024f]", 1.1),  # Latin letters with marks
    (r"[\u1e00-\u1eff]", 0.3),  # the same, of Vietnamese
    (r"[\u0400-\u052f]", 0.33),  # Cyrillic
    (r"[\u0250-\u03ff\u0530-\u07ff]", 0.55),  # Greek, Arabic, Hebrew and others
    (r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]", 0.87),  # Chinese, Japanese, Korean
    (r"[\u0800-\u1dff\u2c00-\u303f\ua000-\uabff\ud7b0-\uffff]", 0.66),  # Devanagari, Thai and others
    (r"[\U00010000-\U0010ffff]", 2.0),  # emoji and others
)


def _table(classes: Mapping[str, str]) -> bytes:
    """Return a table for `bytes.translate` from characters to a letter for their class, and from others to a space."""
    found = {ord(character): ord(name) for name, characters in classes.items() for character in characters}
    return bytes(found.get(byte, ord(" ")) for byte in range(256))


_LETTERS = _table({"a": ascii_lowercase, "A": ascii_uppercase})
_DIGITS = _table({"0": digits})
_SIGNS = _table({".": punctuation})
_GAPS = _table({"s": " ", "n": "\t\n\v\f\r", "0": digits})


def estimated_tokens(text: str) -> int:
    """Return roughly the tokens of a short text, for common tokenizers.

    Calibrated on notes and labels; `docs/tokens.md` has the error on these and on other texts. O(len(text)).

    >>> estimated_tokens("[12] "), estimated_tokens("[Doc_1] "), estimated_tokens("Best first: 4, 1, 7.")
    (3, 5, 12)
    """
    data = text.rstrip().encode("ascii", "ignore")
    letters = data.translate(_LETTERS)
    words = letters.split()
    total = float(len(words) + letters.count(b"aA") + letters.count(b"AAa"))  # camelCase, JSONText
    for word in words:
        if len(word) > _MAX_WORD:
            total += _TOKENS_PER_LETTER * (len(word) - _MAX_WORD)
    for number in data.translate(_DIGITS).split():
        total += max(_TOKENS_PER_DIGIT * len(number) - _FREE_TOKENS, 1.0)
    signs = data.translate(_SIGNS)
    runs = len(signs.split())
    total += runs + _TOKENS_PER_SIGN * (signs.count(b".") - runs)
    gaps = data.translate(_GAPS)
    total += gaps.count(b"s0")
    if b"ss" in gaps or b"n" in gaps:
        blanks = gaps.replace(b"0", b" ").split()
        total += len(blanks) - blanks.count(b"s")
    if not text.isascii():
        for pattern, tokens in _TOKENS_PER_CHARACTER:
            total += tokens * len(re.findall(pattern, text))
    return max(int(total + 0.5), 1) if text else 0


# -- tokenizers of the caller ------------------------------------------------------------------------------------------


def as_counter(tokenizer: object) -> TokenCounter:
    """Return a counter that uses a tokenizer; the estimate for None.

    >>> as_counter(str.split)("three short words")
    3

    Args:
        tokenizer: None; an object with `encode(text)`, such as a tokenizer of `transformers`, `tokenizers` or
            `tiktoken`; or a callable that returns the tokens or their number. Where
            `encode` has the argument `add_special_tokens`, those that begin and end a prompt are left out.

    Raises:
        TypeError: `tokenizer` is something else. The counter raises it if the tokenizer returns something else.
    """
    if tokenizer is None:
        return estimated_tokens
    if getattr(tokenizer, "remembers", False):
        return cast("TokenCounter", tokenizer)
    if not isinstance(tokenizer, str | bytes):
        # tiktoken's `encode` refuses texts that contain a special token; `encode_ordinary` counts them as text.
        for name in ("encode_ordinary", "encode"):
            encode = getattr(tokenizer, name, None)
            if callable(encode):
                return _Lengths(encode, {"add_special_tokens": False} if _takes_special_tokens(encode) else {})
        if callable(tokenizer):
            return _Lengths(tokenizer, {})
    allowed = "None, a callable or an object with encode()"
    raise TypeError(f"tokenizer must be {allowed}, got {type(tokenizer).__name__}")


def _takes_special_tokens(encode: Callable[..., object]) -> bool:
    import inspect  # slow to import, and only needed here

    try:
        return "add_special_tokens" in inspect.signature(encode).parameters
    except (TypeError, ValueError):  # compiled functions may have no signature
        return False


class _Lengths:
    """A counter that measures what a function returns."""

    def __init__(self, encode: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._encode = encode
        self._options = options

    def __call__(self, text: str, /) -> int:
        value = self._encode(text, **self._options)
        if isinstance(value, Sized) and not isinstance(value, str | bytes | Mapping):
            return len(value)
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise TypeError(f"tokenizer must return tokens or their number, got {type(value).__name__}")
        return operator.index(value)


_CACHED_CHARACTERS = 500
_CACHED_TEXTS = 4096
_SPECIAL_TOKENS = 4
"""More tokens than bytes that a count may have: some tokenizers always add those that begin and end a prompt."""


class CheckedCounter:
    """A counter that never fails: it returns the estimate where a tokenizer raises or returns nonsense.

    It remembers the counts of short texts, because the same labels come again and again. Bounded; thread-safe if the
    tokenizer is.
    """

    def __init__(self, counter: TokenCounter, on_failure: Callable[[], object]) -> None:
        """Create the counter.

        Args:
            counter: The tokenizer, as `as_counter` returns it.
            on_failure: Called for each text that gets the estimate because the tokenizer failed.
        """
        self._counter = counter
        self._on_failure = on_failure
        self._has_failed = False
        self._cached_characters = -1 if getattr(counter, "remembers", False) else _CACHED_CHARACTERS
        self._cached: dict[str, int] = {}

    def __call__(self, text: str, /) -> int:
        count = self._cached.get(text)
        if count is not None:
            return count
        try:
            count = plausible_count(self._counter(text), text)
            if len(text) <= self._cached_characters:
                if len(self._cached) >= _CACHED_TEXTS:
                    self._cached.clear()
                self._cached[text] = count
            return count
        except BaseException as error:
            raise_unless_failure(error)
            import logging  # slow to import, and seldom needed

            log_failure(
                logging.getLogger(__name__), "a tokenizer failed, so tokens are estimated", first=not self._has_failed
            )
            self._has_failed = True
        self._on_failure()
        return estimated_tokens(text)


def plausible_count(count: object, text: str) -> int:
    """Return `count` if a text may have this number of tokens; raise ValueError otherwise."""
    least = 1 if text and not text.isspace() else 0
    most = len(text.encode("utf-8", "surrogatepass")) + _SPECIAL_TOKENS
    if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= most:
        raise ValueError(f"the number of tokens must be an int from {least} to {most}, got {count!r}")
    return count


def raise_unless_failure(error: BaseException) -> None:
    """Raise again what is no failure of a tokenizer, such as KeyboardInterrupt."""
    # The panic of a tokenizer in Rust is a BaseException.
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


# -- notes -------------------------------------------------------------------------------------------------------------

_MARGIN = 1.5
"""Tokens that an order must save for each token of its note: both are estimates, and short blocks are often shorter."""


@dataclass(frozen=True, slots=True)
class NoteWriter:
    """The wording of one planner, and the tokens that it takes."""

    templates: Templates
    annotate: Annotate
    """What a request shows of the relevance order unless it asks for something else."""
    count: CheckedCounter
    annotations: Mapping[str, Annotate] = field(default_factory=dict)
    """What `"auto"` stands for, by model."""
    separator: str | None = None
    """The `separator` of plans."""

    def choose(self, annotate: Annotate | None, model: str | None) -> Annotation:
        """Return what a request to this model shows.

        Raises:
            ValueError: `annotate` has another value.
        """
        if annotate is not None:
            check_annotate(annotate)
        asked = self.annotate if annotate is None else annotate
        if asked == "auto" and model is not None:
            asked = self.annotations.get(model, asked)
        return "note" if asked == "auto" else asked

    def tokens(self, annotation: Annotation, planned: Sequence[PlannedBlock], note: str | None = None) -> int:
        """Return the tokens of all labels and notes in a context.

        Args:
            annotation: What the prompt shows.
            planned: The context.
            note: Its order annotation.
        """
        total = 0 if note is None else self.count(note)
        referring = joint_reference(planned)
        if referring is not None:
            total += self.count(referring)
        if not has_labels(annotation):
            return total
        return total + sum([self.count(f"[{block.label}] ") for block in planned if block.reference is None])


@dataclass(slots=True)
class OrderNote:
    """The order annotation of one request. It is written once, as soon as an order needs it."""

    writer: NoteWriter
    annotation: Annotation
    labels: Sequence[str]
    """The blocks' labels, in relevance order."""
    blocks: Sequence[ContextBlock]
    """The blocks, in relevance order."""
    joined: Collection[int] = ()
    """The blocks that continue a run."""
    _note: tuple[str | None, int | None] | None = None

    def written(self, order: Sequence[int]) -> tuple[str | None, int | None]:
        """Return the note of an order of the blocks, and its tokens.

        No note and 0 tokens if the order needs none; None and None if none can be written.
        """
        joined, templates = self.joined, self.writer.templates
        if not needs_note(templates, self.annotation, [i for i in order if i not in joined] if joined else order):
            return None, 0
        if self._note is None:
            texts, labels = [block.text for block in self.blocks], self.labels
            if joined:
                first = [i for i in range(len(texts)) if i not in joined]
                labels = [labels[i] for i in first]
                text = _note(templates, self.annotation, labels, [texts[i] for i in first], [texts[i] for i in joined])
            else:
                text = _note(templates, self.annotation, labels, texts, ())
            self._note = text, None if text is None else self.writer.count(text)
        return self._note

    def price(self, order: Sequence[int]) -> int:
        """Return the tokens that an order must save to be worth its note; 0 without one."""
        return round(_MARGIN * (self.written(order)[1] or 0))


def needs_note(templates: Templates, annotation: Annotation, ranks: Sequence[int]) -> bool:
    """Return True if a planned order needs a note. O(blocks).

    Args:
        templates: The wording.
        annotation: What the prompt shows.
        ranks: For each block in planned order, its place in relevance order; distinct. Without the blocks that
            continue a run: a note names a run by its first block, because the order within it is a fact.
    """
    if annotation not in ("note", "both") or not ranks:
        return False
    named = templates.most_quoted if annotation == "note" else templates.most_named
    return ranks[0] != min(ranks) if named == 1 else [*ranks[:named]] != sorted(ranks)[:named]


def _note(
    templates: Templates, annotation: Annotation, labels: Sequence[str], texts: Sequence[str], others: Sequence[str]
) -> str | None:
    """Return the note of every order that needs one; None if the best text cannot be quoted. O(characters).

    A text can be quoted if it has words that stand in no other text. The note does not depend on the order.

    Args:
        templates: The wording.
        annotation: What the prompt shows.
        labels: The blocks' labels, in relevance order; unused for `"note"`.
        texts: The blocks' texts; used for `"note"` only.
        others: The texts of blocks that continue a run, which a note does not name.
    """
    if annotation == "both":
        return templates.order_annotation(labels[: templates.most_named])
    quoted = len(texts) if templates.most_quoted is None else min(templates.most_quoted, len(texts))
    quotes = quotes_of([*texts, *others], quoted, templates.lead_ins, templates.escaped)
    return templates.quotes.format(quotes=" > ".join([f'"{quote}"' for quote in quotes])) if quotes else None


def order_note(
    templates: Templates,
    annotation: Annotation,
    ranks: Sequence[int | None],
    labels: Sequence[str],
    texts: Sequence[str],
) -> str | None:
    """Return the note of one order; None if it needs none, or if the best text cannot be quoted.

    >>> order_note(Templates(), "note", [1, 0, 2], (), ["The grass is green.", "The sky is blue.", "The sea is blue."])
    'Most relevant above: the passage with "The sky is".'

    Args:
        templates: The wording.
        annotation: What the prompt shows.
        ranks: For each block in planned order, its place in relevance order; distinct. None for a block that
            continues a run.
        labels: The label of each, in planned order; unused for `"note"`.
        texts: The text of each; used for `"note"` only.
    """
    best_first = [place for _, place in sorted([(rank, i) for i, rank in enumerate(ranks) if rank is not None])]
    if not needs_note(templates, annotation, [rank for rank in ranks if rank is not None]):
        return None
    if annotation == "both":
        return _note(templates, annotation, [labels[i] for i in best_first], (), ())
    others = [texts[place] for place, rank in enumerate(ranks) if rank is None]
    return _note(templates, annotation, (), [texts[i] for i in best_first], others)
