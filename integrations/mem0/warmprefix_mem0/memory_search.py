"""Wrappers for Mem0's memories that return search results in a steady order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial, wraps
from types import TracebackType
from typing import Any

from warmprefix import Branch, Choice, ContextPlan, ContextPlanner
from warmprefix.annotate import Annotate
from warmprefix.errors import check_names
from warmprefix_mem0.memory_order import ArrangedMemories, Entry, MemoryArranger
from warmprefix_mem0.memory_owners import owners_of, tenant_of
from warmprefix_requests.neighbours import PinRule

__all__ = ["AsyncContextReuseMemory", "ContextReuseMemory"]


class _FoundMemories(dict[str, Any]):
    """Result of a search, with the plan of its turn; None if there is nothing to commit."""

    plan: ContextPlan | None = None


class _MemoryWrapper:
    """A wrapper that changes `search` and passes all other attributes through to the wrapped memory."""

    __slots__ = ("__weakref__", "_arranger", "_memory", "_tenant")

    _is_async: bool
    _wrapped_classes: str
    _other_wrapper: str

    def __init__(
        self,
        memory: Any,
        planner: ContextPlanner | None = None,
        *,
        tenant: str | None = None,
        annotate: Annotate = "none",
        order_locked: bool = False,
        pinned: PinRule[Entry] | None = None,
        choose: Choice | None = None,
    ) -> None:
        """Wrap a memory, which remains usable directly.

        Args:
            memory: Memory or client of Mem0.
            planner: By default a new planner that orders by `SteadyOrder` and keeps the 1,024 latest tenants. Pass one
                to set its bounds, to read its counters, or to order by another policy.
            tenant: Name of this Mem0, required if several Mem0 instances in which one id names different people share a
                planner.
            annotate: What `context` shows of the relevance order. `"none"`: nothing; it is a list, one item per memory.
                `"note"` or `"auto"`: the same list and, if the order needs it, a note at its end that quotes the most
                relevant memory. `"labels"`: each memory behind its label. `"both"`: labels, and a
                note that names them. A label takes about ten tokens, and so does a note; an order that saves fewer
                tokens than its note takes stays in relevance order.
            order_locked: Keep the order of Mem0, for example because the search sorts by time.
            pinned: Memories to keep at an end: the metadata key of `"start"` or `"end"`, or a function that returns one
                of them or None.
            choose: Return `k` memories: the most relevant ones, and in the last places perhaps others of nearly equal
                score that the engine holds already. Mem0 is asked for five per two places. A call's `top_k` lowers `k`,
                or raises that number. The first `k` are returned in a conversation, and if the memories do not come
                with falling scores. Functions in the choice take a memory as Mem0 returns it.

        Raises:
            TypeError: `memory` needs the other class or has no `search`, or another argument has the wrong type.
            ValueError: `annotate` has another value, `choose` comes with `order_locked`, or its scores are distances:
                Mem0 sorts by similarity.
        """
        search = getattr(memory, "search", None)
        kind = type(memory).__name__
        if not callable(search):
            raise TypeError(f"memory must be Mem0's {self._wrapped_classes}, got {kind}")
        if inspect.iscoroutinefunction(inspect.unwrap(search)) is not self._is_async:
            raise TypeError(
                f"memory must be Mem0's {self._wrapped_classes}, got {kind}: use {self._other_wrapper} for {kind}"
            )
        if tenant is not None and not isinstance(tenant, str):
            raise TypeError(f"tenant must be a str or None, got {type(tenant).__name__}")
        self._memory = memory
        self._arranger = MemoryArranger(planner, annotate, order_locked, pinned, choose)
        self._tenant = tenant

    def forget(self, conversation: str, filters: Mapping[str, Any]) -> None:
        """Count no memory as seen any more in a named conversation; call it before its history is cut or edited.

        Args:
            conversation: Name of the conversation, as in `search`.
            filters: Filters of its searches, of which the entity ids count.

        Raises:
            StoreError: The store failed. Then the history must stay as it is; try again.
        """
        self._arranger.planner.forget(conversation, tenant=tenant_of(filters, self._tenant))

    def _owners(self, results: list[Entry], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return the tenant of a search."""
        filters = _option("filters", args, kwargs)
        # A subclass may have its own `search`, whose other arguments select the owners.
        return owners_of(results, self._tenant) if filters is None else tenant_of(filters, self._tenant)

    def _candidates(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Choice | None, dict[str, Any]]:
        """Return the choice of a search, and the keywords that ask Mem0 for its candidates."""
        choose, top_k = self._arranger.choose, _option("top_k", args, kwargs)
        if choose is None or not (top_k is None or (type(top_k) is int and top_k > 0)):
            return None, kwargs  # Mem0 says what is wrong, or finds nothing
        if top_k is not None and top_k < choose.k:
            choose = replace(choose, k=top_k, keep=min(choose.kept, top_k))
        return choose, {**kwargs, "top_k": max(-(-5 * choose.k // 2), top_k or 0)}

    def _plan_of(self, found: object) -> ContextPlan | None:
        if not isinstance(found, _FoundMemories):
            raise TypeError(f"found must be the result of this object's search, got {type(found).__name__}")
        return found.plan

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _MemoryWrapper.__slots__:  # a copy under construction has no memory yet
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


class ContextReuseMemory(_MemoryWrapper):
    """Wrapper for Mem0's `Memory` or `MemoryClient` that keeps the order of memories across turns.

    Use it if each turn builds the memories into the prompt again before the history, for example into the system
    prompt.

        memory = ContextReuseMemory(Memory.from_config(config))
        found = memory.search(question, filters={"user_id": "ann"})
        messages = [{"role": "system", "content": f"You remember of Ann: {found['context']}"}, *history]

    When two searches in a row have the same entity ids, the memories found by both come first, in the order of the
    first search, and new ones follow in relevance order. One exception: if the engine is predicted to hold more tokens
    of the order of an earlier search, that order comes first. A search that finds nothing does not count. See
    `SteadyOrder`; a planner that you pass orders by its own policy.

    In a chat that appends each turn's memories to its history, and keeps them there, name the conversation instead.
    Then `context` shows each memory in full once, and later one sentence refers to it. Memories that are shorter than
    that are shown each time.

        found = memory.search(question, filters={"user_id": "ann"}, conversation="chat-42")
        ...  # ask the model with the history, then found["context"] and the question; store the turn
        memory.commit(found)

    The text identifies a memory: an updated memory is new, under the same id. Different sets of entity ids share
    nothing. If planning fails, the memories keep the order of Mem0; errors of Mem0 itself pass through.
    """

    __slots__ = ()

    _is_async = False
    _wrapped_classes = "Memory or MemoryClient"
    _other_wrapper = "AsyncContextReuseMemory"

    @property
    def search(self) -> Callable[..., dict[str, Any]]:
        """The wrapped memory's `search`, with the same signature and one more keyword, `conversation`.

        The result has the same keys; `results` holds the same memories, in planned order without a conversation. Two
        keys are new: `context`, the texts of all memories for the prompt, and `order_annotation`, the note in `context`
        or None.

        `conversation` names the chat whose history keeps the `context` of each turn. It restricts no search, which
        `run_id` in `filters` does. A name is one linear history. With `Branch(after=...)`, the id of the turn that this
        prompt continues, turns may be retried and forked. Ids belong to the entity ids in `filters`, so pass the same
        ones in each turn. What was not committed is sent again in full.
        """
        search = self._memory.search

        @wraps(search)
        def arranged(*args: Any, conversation: str | Branch | None = None, **kwargs: Any) -> dict[str, Any]:
            _check_conversation(conversation)
            choose, kwargs = self._candidates(args, kwargs)
            result: dict[str, Any] = search(*args, **kwargs)
            results = _results(result)
            if results is None:
                return result
            owners = partial(self._owners, results, args, kwargs)
            return _with_context(result, self._arranger.arrange(results, owners, conversation, choose))

        return arranged

    def commit(self, found: dict[str, Any], turn_id: str | None = None) -> bool:
        """Count the memories of a turn as seen: the application has the answer and stores the turn.

        Args:
            found: Result of a search with `conversation`; for any other one this does nothing.
            turn_id: Id of this turn, for a later `Branch(after=turn_id)`. Without it, a branch records nothing.

        Returns:
            True if the turn was recorded; False does no harm.

        Raises:
            TypeError: `found` is no result of a search, or `turn_id` is no str.
            ValueError: `turn_id` is empty.
        """
        plan = self._plan_of(found)
        return plan is not None and self._arranger.planner.commit(plan, turn_id=turn_id)

    def abandon(self, found: dict[str, Any]) -> bool:
        """Drop a turn that the history does not keep; True if it was open. To omit it costs tokens only."""
        plan = self._plan_of(found)
        return plan is not None and self._arranger.planner.abandon(plan)

    def __enter__(self) -> ContextReuseMemory:
        self._memory.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        suppress: bool | None = self._memory.__exit__(exc_type, exc, traceback)
        return suppress


class AsyncContextReuseMemory(_MemoryWrapper):
    """Wrapper for Mem0's `AsyncMemory` or `AsyncMemoryClient`; see `ContextReuseMemory`."""

    __slots__ = ()

    _is_async = True
    _wrapped_classes = "AsyncMemory or AsyncMemoryClient"
    _other_wrapper = "ContextReuseMemory"

    @property
    def search(self) -> Callable[..., Coroutine[Any, Any, dict[str, Any]]]:
        """The wrapped memory's `search`; see `ContextReuseMemory.search`."""
        search = self._memory.search

        @wraps(search)
        async def arranged(*args: Any, conversation: str | Branch | None = None, **kwargs: Any) -> dict[str, Any]:
            _check_conversation(conversation)
            choose, kwargs = self._candidates(args, kwargs)
            result: dict[str, Any] = await search(*args, **kwargs)
            results = _results(result)
            if results is None:
                return result
            owners = partial(self._owners, results, args, kwargs)
            return _with_context(result, await self._arranger.aarrange(results, owners, conversation, choose))

        return arranged

    async def commit(self, found: dict[str, Any], turn_id: str | None = None) -> bool:
        """Count the memories of a turn as seen; see `ContextReuseMemory.commit`."""
        plan = self._plan_of(found)
        return plan is not None and await self._arranger.planner.acommit(plan, turn_id=turn_id)

    async def abandon(self, found: dict[str, Any]) -> bool:
        """Drop a turn that the history does not keep; see `ContextReuseMemory.abandon`."""
        plan = self._plan_of(found)
        return plan is not None and await self._arranger.planner.aabandon(plan)

    async def __aenter__(self) -> AsyncContextReuseMemory:
        await self._memory.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        suppress: bool | None = await self._memory.__aexit__(exc_type, exc, traceback)
        return suppress


def _results(result: Any) -> list[Entry] | None:
    """Return the memories that a search found; None for another API's result, which stays unchanged."""
    results = result.get("results") if isinstance(result, dict) else None
    return results if isinstance(results, list) else None


def _check_conversation(conversation: str | Branch | None) -> None:
    """Check a caller's argument before the search, whose failures to plan are survived."""
    if isinstance(conversation, Branch):
        return
    check_names(conversation=conversation)
    if conversation == "":
        raise ValueError("conversation must be None, a Branch or a name of at least one character, got ''")


def _with_context(result: Mapping[str, Any], arranged: ArrangedMemories) -> _FoundMemories:
    found = _FoundMemories(
        result, results=arranged.entries, context=arranged.context, order_annotation=arranged.order_annotation
    )
    found.plan = arranged.plan
    return found


def _option(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return an option of a `search` call: a keyword, or a field of the hosted API's `options`."""
    if name in kwargs:
        return kwargs[name]
    return getattr(kwargs.get("options", args[1] if len(args) > 1 else None), name, None)
