"""The hot loops, as they are or compiled, and the arrays that go with them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

from warmprefix.batch import loops

__all__ = ["COMPILING_PAYS_FROM", "Machine", "machine"]

COMPILING_PAYS_FROM = 4_000_000
"""Steps of plain Python, half a second or more, that take longer than to import numba and load what it compiled."""

_LOADED_PAYS_FROM = 100_000
"""The same, once that is done."""


class Machine(NamedTuple):
    """Runs the hot loops. Both machines give the same answers."""

    compiled: bool
    run: Any
    """Has the functions of `warmprefix.batch.loops` as attributes."""

    def ints(self, values: Iterable[int]) -> Any:
        """An array that these functions take."""
        if not self.compiled:
            return list(values)
        import numpy as np

        return np.fromiter(values, np.int64)

    def zeros(self, count: int, value: int = 0) -> Any:
        """An array of `count` equal numbers."""
        if not self.compiled:
            return [value] * count
        import numpy as np

        return np.full(count, value, np.int64)


def machine(steps: int, greatest: int = 0) -> Machine:
    """The machine for about so many steps of the innermost loops: numba's if it is installed and they are many, and
    no number is above `greatest`, for its numbers have 64 bits.
    """
    is_loaded = _compiled.cache_info().currsize > 0
    pays = steps >= (_LOADED_PAYS_FROM if is_loaded else COMPILING_PAYS_FROM) and greatest < 1 << 62
    functions = _compiled() if pays else None
    return Machine(False, loops) if functions is None else Machine(True, functions)


@cache
def _compiled() -> Any:
    try:
        from numba import njit
    except ImportError:  # the extra `batch` only makes it faster
        return None
    # A compiled function looks up what it calls among its globals when it is first called, so each is given a copy of
    # the module's in which those before it are compiled already. Other threads go on while one runs.
    namespace = dict(vars(loops))
    for name in loops.HOT:
        function = FunctionType(namespace[name].__code__, namespace, name)
        try:
            namespace[name] = njit(cache=True, nogil=True)(function)
        except RuntimeError:  # there is nowhere to keep compiled code
            namespace[name] = njit(nogil=True)(function)
    return _Functions(**{name: namespace[name] for name in loops.HOT})


class _Functions:
    def __init__(self, **functions: Any) -> None:
        self.__dict__.update(functions)
