"""A property that is computed once, and that forks leave free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

__all__ = ["ForkSafeProperty"]

_T = TypeVar("_T")


class ForkSafeProperty(Generic[_T]):
    """A property that is computed once per object, without a lock.

    Before Python 3.12, `functools.cached_property` has one lock for all objects of a class. A process that is forked
    while another thread holds it waits for it without end. Threads that ask at the same time may compute it twice.
    """

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type[object]) -> ForkSafeProperty[_T]: ...

    @overload
    def __get__(self, instance: object, owner: type[object]) -> _T: ...

    def __get__(self, instance: object | None, owner: type[object]) -> ForkSafeProperty[_T] | _T:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
