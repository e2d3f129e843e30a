"""De-duplication inside one prompt: repeated tool results become references."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from warmprefix_requests.copies import Copied

__all__ = ["Transcript", "possible_quotes", "shown_call"]

_SEPARATOR = "\n\n"

_WORDS = (24, 48, 96)
"""Lengths of quoted words, shortest first."""

_MAX_WORD_REST_CHARACTERS = 16
"""Quoted words end at the end of a word, unless the word goes on for longer than this."""

_RESULT = "[Word for word the {what} of the earlier call {call}.]"
_RERUN = "[Ran again; word for word the {what} of the earlier call {call}.]"
"""The same for a call that was made again after other calls."""
_BARE = "bare output"
_PASSAGE = "[Word for word in the result of the earlier call {call}: the passage that begins {quote}.]"
_PASSAGES = "[Word for word in the result of the earlier call {call}: the passages that begin {quotes}.]"
"""The same for neighbouring passages of one result. The quotes are JSON strings."""
_NUMBERED = "{call}, number {number} of such calls"
"""Takes the place of a call where one that looks the same may have given another result."""

_MAX_NAME_CHARACTERS = 64
_MAX_ARGUMENTS_CHARACTERS = 200


_Original = tuple[str | None, ...]
"""The parts of a result as the tool gave it."""


class _SearchBudget(Copied):
    """Characters that may be searched, a multiple of those that were read: so searches stay linear in the text."""

    _TIMES = 256
    _START = 1 << 20

    def __init__(self) -> None:
        self.left = self._START
        """Characters that may be searched now."""

    def grow(self, characters: int) -> None:
        """Note that this many characters were read."""
        self.left += self._TIMES * characters

    def take(self, characters: int) -> bool:
        """Return True if this many characters may be searched, and count them."""
        if self.left < characters:
            return False
        self.left -= characters
        return True


class _Call(NamedTuple):
    shown: str
    number: int
    """Position among the calls that are shown in the same way, its look-alikes, from 1 on."""
    place: int
    """Position among all calls."""

    def repeats_after_others(self, earlier: _Call) -> bool:
        """Return True if this is the same call again, and a call that may have changed its result stands between."""
        return self.shown == earlier.shown and self.place - earlier.place > self.number - earlier.number


class _Result(NamedTuple):
    """A result that stands in the prompt, at least in part as the tool gave it."""

    call: _Call
    original: _Original
    sent: str


@dataclass(frozen=True, slots=True)
class _Span:
    """A passage of a result, and the earlier result that a reference can name, if any."""

    part: int
    start: int
    end: int
    text: str
    source: _Result | None
    quote: str = ""
    """Words that identify the passage in the earlier result."""


class Transcript(Copied):
    """One prompt's tool calls and results, in order; repeats become references.

    Make a new one for each prompt and pass all calls and results of the prompt to it. Each output depends only on
    earlier inputs. So a history that only grows keeps its bytes, and a history that was cut, forked or summarised has
    no dangling reference. The first occurrence of a text always keeps its bytes; a later one becomes a reference to
    the call that gave the first. A prompt without repeats stays as it is.

    >>> transcript = Transcript(min_tokens=20)
    >>> sea = "The sea is 3,688 metres deep on average, and 10,935 metres at its deepest point, in the Mariana Trench."
    >>> transcript.call("call_1", "read", '{"path":"sea.txt"}')
    >>> transcript.result("call_1", sea) == sea
    True
    >>> transcript.call("call_2", "run", '{"command":"cat sea.txt"}')
    >>> transcript.result("call_2", sea)
    '[Word for word the result of the earlier call read({"path":"sea.txt"}).]'

    Not thread-safe. Linear in the length of its inputs. Searches, such as for words that identify a passage in the
    result that holds it, are bounded by a multiple of that length; what they do not reach stays in full.
    """

    def __init__(
        self,
        *,
        separator: str | None = None,
        min_tokens: int = 64,
    ) -> None:
        """Begin with an empty prompt.

        Args:
            separator: Cuts results into passages where none are given. One reference names several passages only
                where exactly this stands between them, a blank line by default.
            min_tokens: Results and passages shorter than this stay as they are.

        Raises:
            TypeError: An argument has another type than the above.
            ValueError: `min_tokens` is negative, or `separator` is empty.
        """
        if separator is not None and not isinstance(separator, str):
            raise TypeError(f"separator must be a str or None, got {type(separator).__name__}")
        if separator == "":
            raise ValueError("separator must have at least one character, got ''")
        if isinstance(min_tokens, bool) or not isinstance(min_tokens, int):
            raise TypeError(f"min_tokens must be an int, got {type(min_tokens).__name__}")
        if min_tokens < 0:
            raise ValueError(f"min_tokens must be 0 or more, got {min_tokens}")
        self.references = 0
        """Number of results and passages that became references."""
        self.reference_tokens = 0
        """Tokens of these results and passages, estimated as a quarter of their UTF-8 bytes."""
        self.latest: dict[str, str] = {}
        """The references in the latest result, and the text that each stands for."""
        self._separator = separator
        self._min_tokens = min_tokens
        self._budget = _SearchBudget()
        self._calls = 0
        self._shown: dict[str, int] = {}
        """Number of look-alikes, the calls that are shown in this way."""
        self._given: dict[tuple[str, _Original], int] = {}
        """Number of those with this result."""
        self._waiting: dict[str, _Call | None] = {}
        """Calls without a result, by their ids; None for several with one id, which are never told apart."""
        self._answered: dict[str, _Call] = {}
        self._unclear: set[_Call] = set()
        """Calls with a second result for their id: they name no single result, and their look-alikes need a number."""
        self._numbered: set[str] = set()
        """How these are shown."""
        self._sources: dict[_Original, _Call] = {}
        """The calls that references to whole results name."""
        self._passages: dict[str, _Result] = {}
        self._quotes: dict[str, str | None] = {}
        """First words of passages that stand once in the results that have them; None if all are too long."""

    def call(self, id: str | None, name: str, arguments: object = "") -> None:
        """Add a tool call of an assistant message.

        Args:
            id: What the call's result names it by; None if nothing does.
            name: The tool's name.
            arguments: The arguments as the call carries them: a raw string, or any JSON value. References show them in
                one line of at most 200 characters.

        Raises:
            TypeError: `name` is no str.
        """
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, got {type(name).__name__}")
        self.add_shown_call(id, shown_call(name, arguments))

    def add_shown_call(self, id: str | None, shown: str, place: int | None = None) -> None:
        """Add a tool call as references show it, see `shown_call`; `place` counts calls that were not added, too."""
        number = self._shown[shown] = self._shown.get(shown, 0) + 1
        self._calls = self._calls + 1 if place is None else place
        if id is not None:
            self._waiting[id] = None if id in self._waiting else _Call(shown, number, self._calls)

    def skip(self, call_id: str | None) -> None:
        """Add a result that stays as it is and that no reference names, like an error."""
        self.latest = {}
        self._answer(call_id)

    def result(self, call_id: str | None, text: str, passages: Iterable[str] = ()) -> str:
        """Add a call's result and return the text to send in its place.

        Args:
            call_id: The `id` of the call. A result of an unknown call may become a reference, but none names it.
            text: The result.
            passages: The documents of a retrieval tool, in the order in which they stand in `text`. Those that do not
                stand there are ignored.

        Returns:
            `text` itself, or a text in which references replace all of it or some of its passages.

        Raises:
            TypeError: `text` or a passage is no str.
        """
        [sent] = self.parts(call_id, [text], passages)
        return sent or ""

    def keyed(self, call_id: str | None, key: str, size: int, bare: tuple[str, int] | None = None) -> str | None:
        """Add a call's result by a key that stands for its text, and by its size in UTF-8 bytes.

        Args:
            call_id: The `id` of the call.
            key: Stands for the text.
            size: With 0 the result stays.
            bare: The same two of the output inside it. A reference says "bare output" if it stands for this alone.

        Returns:
            The reference to send, for all of the result or for the output in it; None if it stays.
        """
        originals: list[tuple[str, ...]] = [(key,)]
        call = self._answer(call_id)
        reference = self._refer_to_result((key,), size, call)
        if bare is not None:
            originals.append((_BARE, bare[0]))
            if reference is None:
                reference = self._refer_to_result((_BARE, bare[0]), bare[1], call, _BARE)
        if call is not None:
            for original in originals:
                if reference is None:
                    self._add_source(original, call)
                self._count_given(call, original)
        return reference

    def parts(self, call_id: str | None, parts: Sequence[str | None], passages: Iterable[str] = ()) -> list[str | None]:
        """Add a result that has several parts, as `result` does.

        Each text is a passage unless `passages` are found.

        Args:
            call_id: The `id` of the call.
            parts: The texts, and None for each part that is no text, such as an image.
            passages: As in `result`.

        Returns:
            The parts to send. A text is empty if the reference in an earlier part covers it.

        Raises:
            TypeError: A part is neither a str nor None, or a passage is no str.
        """
        for part in parts:
            if not (part is None or isinstance(part, str)):
                raise TypeError(f"text must be a str, got {type(part).__name__}")
        passages = list(passages)
        for passage in passages:
            if not isinstance(passage, str):
                raise TypeError(f"passages must contain str only, got {type(passage).__name__}")
        original = tuple(parts)
        self.latest = {}
        self._budget.grow(sum([len(part) for part in parts if part is not None]))
        call = self._answer(call_id)
        size = sum([_size(part) for part in original if part is not None])
        reference = self._refer_to_result(original, size, call)
        if reference is not None:
            self.latest[reference] = "".join([part or "" for part in original])
            sent: list[str | None] = [reference, *[""] * (len(original) - 1)]
        else:
            spans = self._spans(original, passages, call)
            sent = self._refer_to_passages(original, spans, call)
            if call is not None:
                if tuple(sent) == original and None not in original:
                    self._add_source(original, call)
                result = _Result(call, original, "".join([part or "" for part in sent]))
                for span in spans:
                    if span.source is None:
                        self._passages.setdefault(span.text, result)
        if call is not None:
            self._count_given(call, original)
        return sent

    def _answer(self, call_id: str | None) -> _Call | None:
        """Return the call that a result answers; None unless one open call has this id."""
        if call_id is None:
            return None
        if call_id not in self._waiting:
            if (answered := self._answered.get(call_id)) is not None:
                self._unclear.add(answered)
                self._numbered.add(answered.shown)
            return None
        call = self._waiting[call_id]
        if call is not None:
            del self._waiting[call_id]
            self._answered[call_id] = call
        return call

    def _count_given(self, call: _Call, original: _Original) -> None:
        given = call.shown, original
        self._given[given] = self._given.get(given, 0) + 1

    def _add_source(self, original: _Original, call: _Call) -> None:
        source = self._sources.get(original)
        if source is None or source in self._unclear:
            self._sources[original] = call

    def _refer_to_result(self, original: _Original, size: int, call: _Call | None, what: str = "result") -> str | None:
        source = self._sources.get(original)
        if source is None or source in self._unclear:
            return None
        is_rerun = call is not None and call.repeats_after_others(source)
        template = _RERUN if is_rerun else _RESULT
        reference = template.format(what=what, call=self._name(source, original, call))
        if not self._pays(reference, size):
            return None
        self._count(size)
        return reference

    def _refer_to_passages(self, original: _Original, spans: Sequence[_Span], call: _Call | None) -> list[str | None]:
        parts = list(original)
        runs: list[tuple[_Result, list[_Span]]] = []
        for span in spans:
            if span.source is None:
                continue
            self._count(_size(span.text))
            before = runs[-1][1][-1] if runs and runs[-1][0] is span.source else None
            if before and self._touch(original, before, span):
                runs[-1][1].append(span)
            else:
                runs.append((span.source, [span]))
        home: int | None = None  # the part that gets the text from here on
        part = at = 0
        pieces: list[str] = []
        for source, run in runs:
            first, last = run[0], run[-1]
            if home is None or first.part != part:
                if home is not None:
                    parts[home] = "".join([*pieces, (original[part] or "")[at:]])
                home, part, at, pieces = first.part, first.part, 0, []
            reference = self._refer(source, [span.quote for span in run], call)
            self.latest[reference] = _text_between(original, first.part, first.start, last.part, last.end)
            pieces += ((original[part] or "")[at : first.start], reference)
            parts[part + 1 : last.part + 1] = [""] * (last.part - part)
            part, at = last.part, last.end
        if home is not None:
            parts[home] = "".join([*pieces, (original[part] or "")[at:]])
        return parts

    def _touch(self, parts: Sequence[str | None], before: _Span, after: _Span) -> bool:
        """Return True if only the separator stands between two passages."""
        if None in parts[before.part : after.part + 1]:
            return False
        between = _text_between(parts, before.part, before.end, after.part, after.start)
        return between == (self._separator or _SEPARATOR)

    def _refer(self, source: _Result, quotes: Sequence[str], call: _Call | None) -> str:
        name = self._name(source.call, source.original, call)
        if len(quotes) == 1:
            return _PASSAGE.format(call=name, quote=quotes[0])
        return _PASSAGES.format(call=name, quotes=", ".join(quotes))

    def _spans(self, parts: Sequence[str | None], passages: Sequence[str], call: _Call | None) -> list[_Span]:
        """Return the passages of a result, each with the earlier result to refer to."""
        spans: list[_Span] = []
        for number, part in enumerate(parts):
            if not part:
                continue
            found = self._find(passages, part)
            if not found and self._separator is not None:
                found = self._find(part.split(self._separator), part)
            for start, text in found or self._find([part], part):
                spans.append(_Span(number, start, start + len(text), text, *self._source(text, call)))
        return spans

    def _find(self, passages: Iterable[str], text: str) -> list[tuple[int, str]]:
        """Look for long passages in sequence, without the line breaks around them."""
        found: list[tuple[int, str]] = []
        end = gap = 0
        for passage in passages:
            if not self._budget.take(len(passage)):
                break
            passage = passage.strip("\r\n")
            if not passage or not self._is_long(_size(passage)):
                continue
            # The same text usually stands between all of them; looking there first takes a hundredth of the time.
            start = end + gap
            if not text.startswith(passage, start):
                start = text.find(passage, end) if self._budget.take(len(text)) else -1
            if start >= 0:
                found.append((start, passage))
                gap, end = start - end, start + len(passage)
        return found

    def _source(self, passage: str, call: _Call | None) -> tuple[_Result | None, str]:
        source = self._passages.get(passage)
        if source is None:
            return None, ""
        if passage not in self._quotes:
            if not self._budget.take(len(source.sent)):
                return None, ""
            words = _unique_words(passage, source.sent)
            self._quotes[passage] = None if words is None else _json_string(words)
        quote = self._quotes[passage] if source.call not in self._unclear else None
        if quote is None:
            del self._passages[passage], self._quotes[passage]  # this one stays, and later ones may refer to it
        elif self._pays(self._refer(source, [quote], call), _size(passage)):
            return source, quote
        return None, ""

    def _name(self, source: _Call, original: _Original, call: _Call | None) -> str:
        """Return the name of the call that gave a result, for a result of `call`."""
        shown = source.shown
        others = self._shown[shown] - (call is not None and call.shown == shown)
        # A look-alike that has no result yet may get a different one, after this reference was sent.
        if shown not in self._numbered and self._given.get((shown, original)) == others:
            return shown
        return _NUMBERED.format(call=shown, number=source.number)

    def _is_long(self, size: int) -> bool:
        return (size + 3) // 4 >= self._min_tokens

    def _pays(self, reference: str, size: int) -> bool:
        return self._is_long(size) and _size(reference) < size

    def _count(self, size: int) -> None:
        self.references += 1
        self.reference_tokens += (size + 3) // 4


def _text_between(parts: Sequence[str | None], first: int, start: int, last: int, end: int) -> str:
    """Return the text from a place in one part to a place in the same or a later part."""
    if first == last:  # with many spans in one part, to copy all in front of each would take quadratic time
        return (parts[first] or "")[start:end]
    texts = [part or "" for part in parts[first : last + 1]]
    return "".join([texts[0][start:], *texts[1:-1], texts[-1][:end]])


def _size(text: str) -> int:
    """Return the length in UTF-8 bytes."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _unique_words(part: str, text: str) -> str | None:
    """Return the first words of a part of a text that stand once in it; None if these are too long."""
    return next((words for words in _first_words(part) if _stands_once(words, text)), None)


def possible_quotes(passage: str) -> list[str]:
    """Return the quotes by which a reference may name a passage."""
    return [_json_string(words) for words in _first_words(passage)]


def _first_words(part: str) -> Iterator[str]:
    for length in _WORDS:
        rest = part[length : length + _MAX_WORD_REST_CHARACTERS]
        word_rest = len(rest.split(maxsplit=1)[0]) if rest and not rest[0].isspace() else 0
        yield part[: length + (word_rest if word_rest < len(rest) else 0)]


def _stands_once(words: str, text: str) -> bool:
    return text.find(words, text.find(words) + 1) < 0


def _json_string(text: str) -> str:
    """Return a text as a JSON string in one line."""
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def shown_call(name: str, arguments: object) -> str:
    """Return a call as references show it: in one line, with its arguments cut to 200 characters."""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"), default=_type_name)
    return f"{_one_line(name, _MAX_NAME_CHARACTERS)}({_one_line(arguments, _MAX_ARGUMENTS_CHARACTERS)})"


def _one_line(text: str, max_characters: int) -> str:
    if len(text) <= max_characters and text.isprintable() and text == text.strip(" "):
        return text
    lines = text[: 2 * max_characters].splitlines()
    line = " ".join([stripped for line in lines if (stripped := line.strip())])
    if len(line) > max_characters or len(text) > 2 * max_characters:
        line = line[: max_characters - 1] + "…"
    # JSON can hold a lone surrogate in escaped form, but no client can encode it as UTF-8.
    return line.encode("utf-8", "backslashreplace").decode()


def _type_name(value: Any) -> str:
    return type(value).__name__
