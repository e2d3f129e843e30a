"""Mem0's memories, with search results in an order that stays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from types import TracebackType
from typing import Any

from warmprefix import ContextPlanner
from warmprefix_mem0.arrange import Arranger
from warmprefix_mem0.tenant import owners_of, tenant_of

__all__ = ["AsyncContextReuseMemory", "ContextReuseMemory"]


class _Around:
    """A memory of which only `search` is another: all other attributes are read from and written to the wrapped one."""

    __slots__ = ("__weakref__", "_arranger", "_memory", "_tenant")

    _is_async: bool
    _wraps: str
    _instead: str

    def __init__(
        self,
        memory: Any,
        planner: ContextPlanner | None = None,
        *,
        tenant: str | None = None,
        annotate: bool = False,
    ) -> None:
        """Wrap a memory; it can still be used beside this.

        Args:
            memory: Mem0's.
            planner: By default one of its own that orders by `SteadyOrder` and remembers the 1,024 latest tenants. Give
                one to set its bounds, to read its counts, or to order by another policy.
            tenant: Needed where memories of several Mem0s, in which one id names different people, share a planner.
            annotate: Whether `context` has a label before each memory and, where the order was changed, a note that
                tells the relevance order. That is some 20 tokens a memory: more than the order saves, unless memories
                have more than about 60 tokens each. Without it, `context` is a plain list, a memory an item.

        Raises:
            TypeError: `memory` is of the kind that the other class wraps, or has no `search`; or another argument has
                another type than the above.
        """
        search = getattr(memory, "search", None)
        if not callable(search):
            raise TypeError(f"memory must be Mem0's {self._wraps}, got {type(memory).__name__}")
        if inspect.iscoroutinefunction(inspect.unwrap(search)) is not self._is_async:
            raise TypeError(
                f"{type(self).__name__} wraps Mem0's {self._wraps}; use {self._instead} for {type(memory).__name__}"
            )
        if tenant is not None and not isinstance(tenant, str):
            raise TypeError(f"tenant must be a str or None, got {type(tenant).__name__}")
        self._memory = memory
        self._arranger = Arranger(planner, annotate)
        self._tenant = tenant

    def _with_context(self, result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        results = result.get("results") if isinstance(result, dict) else None
        if not isinstance(results, list):
            return result  # another API's shape, and not ours to change
        filters = _filters(args, kwargs)
        arranged = self._arranger.arrange(
            results,
            # A subclass may have a search of its own, which says in another way whose memories it finds.
            lambda: owners_of(results, self._tenant) if filters is None else tenant_of(filters, self._tenant),
        )
        return {
            **result,
            "results": arranged.entries,
            "context": arranged.context,
            "order_annotation": arranged.order_annotation,
        }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _Around.__slots__:  # an object that is being copied has no memory yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._memory, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._memory, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._memory)})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._memory!r})"


class ContextReuseMemory(_Around):
    """Around Mem0's `Memory` or `MemoryClient`: the memories of a search stand in an order that stays across turns.

    For memories that are put into the prompt anew each turn, in front of the history, such as into the system prompt.

        memory = ContextReuseMemory(Memory.from_config(config))
        found = memory.search(question, filters={"user_id": "ann"})
        messages = [{"role": "system", "content": f"You remember of Ann: {found['context']}"}, *history]

    Of two searches in a row for the same entity ids, the memories of the first that the second finds again stand in
    front, in the order that they had, and new ones follow in relevance order; unless the engine is predicted to hold
    more tokens in another order, from an earlier search, which then comes first. A search that found nothing does not
    count. See `SteadyOrder`; a planner of your own orders by its own policy.

    A memory is its text: one that was updated is new, under the same id. Nothing is shared between two sets of entity
    ids. If planning fails, the memories stay as Mem0 gave them; what Mem0 itself raises passes through.
    """

    __slots__ = ()

    _is_async = False
    _wraps = "Memory or MemoryClient"
    _instead = "AsyncContextReuseMemory"

    @property
    def search(self) -> Callable[..., dict[str, Any]]:
        """The wrapped memory's `search`, with the signature that it has.

        Its result has the same keys, of which `results` has the same memories in planned order, and two more:
        `context`, all of their texts for the prompt, and `order_annotation`, the note at its end or None.
        """
        search = self._memory.search

        @wraps(search)
        def arranged(*args: Any, **kwargs: Any) -> dict[str, Any]:
            result: dict[str, Any] = self._with_context(search(*args, **kwargs), args, kwargs)
            return result

        return arranged

    def __enter__(self) -> ContextReuseMemory:
        self._memory.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        suppress: bool | None = self._memory.__exit__(exc_type, exc, traceback)
        return suppress


class AsyncContextReuseMemory(_Around):
    """`ContextReuseMemory`, around Mem0's `AsyncMemory` or `AsyncMemoryClient`."""

    __slots__ = ()

    _is_async = True
    _wraps = "AsyncMemory or AsyncMemoryClient"
    _instead = "ContextReuseMemory"

    @property
    def search(self) -> Callable[..., Coroutine[Any, Any, dict[str, Any]]]:
        """The wrapped memory's `search`, as in `ContextReuseMemory.search`."""
        search = self._memory.search

        @wraps(search)
        async def arranged(*args: Any, **kwargs: Any) -> dict[str, Any]:
            result: dict[str, Any] = self._with_context(await search(*args, **kwargs), args, kwargs)
            return result

        return arranged

    async def __aenter__(self) -> AsyncContextReuseMemory:
        await self._memory.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        suppress: bool | None = await self._memory.__aexit__(exc_type, exc, traceback)
        return suppress


def _filters(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """The filters of a `search` call: a keyword, or a field of the hosted API's `options`."""
    if "filters" in kwargs:
        return kwargs["filters"]
    options = kwargs.get("options", args[1] if len(args) > 1 else None)
    return getattr(options, "filters", None)
