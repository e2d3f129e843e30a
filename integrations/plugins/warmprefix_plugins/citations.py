"""Names of sources that are the same in every request, and the way back to the numbers that a page shows."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence

__all__ = ["Citations", "steady_numbers"]

_FIRST, _LAST = 3_000, 9_999
_CITATION = re.compile(r"\[(\d{4}(?:[,;]\s{0,3}\d{4})*)\]")
_BEGUN = re.compile(r"\[(?:\d{1,4}|\d{4}(?:[,;]\s{0,3}\d{0,4})+)?\Z")
"""The beginning of what may become a citation."""
_MOST_BEGUN = 512


def steady_numbers(sources: Sequence[str], text: str) -> list[int]:
    """Return a number of four digits for each source, by its name alone unless `text` or another source has it.

    A name has the same number in every request, so that the engine's cache finds its passages again. `text` is what
    the model reads, where the number must mean nothing else. O(len(text)).

    >>> steady_numbers(["tides.md", "moon.md"], "The sea is 3,688 metres deep.")
    [4359, 3553]

    Raises:
        ValueError: `text` and the sources have all numbers.
    """
    taken = set(map(str, range(_FIRST, _LAST + 1))).intersection(re.findall(r"(?<!\d)\d{4}(?!\d)", text))
    if len(taken) + len(sources) > _LAST - _FIRST + 1:
        raise ValueError(f"text must leave a number for each of the {len(sources)} sources, got {len(taken)} in it")
    numbers: list[int] = []
    for name in sources:
        number = _FIRST + zlib.crc32(name.encode("utf-8", "surrogatepass")) % (_LAST - _FIRST + 1)
        while str(number) in taken:
            number = number + 1 if number < _LAST else _FIRST
        taken.add(str(number))
        numbers.append(number)
    return numbers


class Citations:
    """The citations of one answer, which come in pieces."""

    def __init__(self, numbers: Mapping[int, int]) -> None:
        """Begin an answer.

        Args:
            numbers: What the page shows in place of each number that the model was given.
        """
        self._numbers = {str(given): str(shown) for given, shown in numbers.items()}
        self._begun: dict[str, str] = {}

    def shown(self, text: str, field: str = "", *, ended: bool = False) -> str:
        """Return a piece of an answer with the numbers that the page shows; O(len(text)).

        What may become a citation is kept back until the next piece of the same field, or until the answer has
        `ended`.
        """
        text = self._begun.pop(field, "") + text
        begun = None if ended else _BEGUN.search(text, max(len(text) - _MOST_BEGUN, 0))
        if begun is not None:
            self._begun[field] = text[begun.start() :]
            text = text[: begun.start()]
        return _CITATION.sub(self._replaced, text)

    def _replaced(self, citation: re.Match[str]) -> str:
        numbers = re.split(r"[,;]\s*", citation[1])
        if not self._numbers.keys() >= set(numbers):  # it is no citation of these sources
            return citation[0]
        return f"[{', '.join([self._numbers[number] for number in numbers])}]"
