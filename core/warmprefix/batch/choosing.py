"""The evidence of a batch: of each request's candidates, those that it can share with other requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from warmprefix.batch.merge import MergePlanner
from warmprefix.batch.plan import BatchRequest
from warmprefix.batch.planners import no_progress
from warmprefix.batch.scope_plan import NumberedRequests
from warmprefix.choice import Candidates, Choice
from warmprefix.ordering.choosing import FIRST_REQUESTS, PathSearch

__all__ = ["candidates_of", "feedings"]

_PASSES = 2
"""A third pass saves 0.1 % more."""
# A batch has more to exchange than a cache, so that the rules of single plans would cost it gold passages.
_ENTERING_SHARE = 1 / 2
"""How far below rank `k` a candidate that enters may score, as a share of `Choice.within`."""
_LEAST_FED = 5
"""The least number of other requests that are fed a candidate which leaves."""
_LEAST_SAVED = 0.5
"""The least that an exchange saves, in mean blocks of the first `k`."""
_NODES = 256
"""Most nodes of the tree that the search of one request walks."""


def candidates_of(request: BatchRequest, choice: Choice, on_error: Callable[[], object]) -> Candidates:
    """Return the candidates of a request.

    Raises:
        TypeError: `choice` is not a `Choice`.
        ValueError: The request has a locked order, or scores by which nothing can be chosen.
    """
    try:
        return Candidates.checked(choice, request.blocks, on_error, request.order_locked)
    except ValueError as error:
        raise ValueError(f"request {request.id!r}: {error}") from None


def feedings(
    listed: Sequence[Candidates], choice: Choice, resident: Sequence[Sequence[int]] | None = None
) -> Iterator[Sequence[Sequence[int]]]:
    """Yield what requests of one scope may be fed, as the places of blocks, the most relevant first.

    First the candidates that relevance alone would feed; then `resident` ones, given by their indices; then those with
    which the batch computes less, as far as that pays for their lost score; then candidates that cost nothing in
    addition. Each request takes its best path in the tree of the others' orders, in turn. Plan all, and use the one
    that computes least.
    """
    fed = [candidates.first for candidates in listed]
    yield _places(listed, fed)
    if resident not in (None, fed):
        yield _places(listed, resident)
    usable = [candidates.usable if candidates.are_open else candidates.first for candidates in listed]
    if usable == fed:
        return
    batch = NumberedRequests(
        [BatchRequest(i, [candidates.blocks[j] for j in usable[i]]) for i, candidates in enumerate(listed)], None
    )
    numbers = [dict(zip(*each, strict=True)) for each in zip(usable, batch.contexts, strict=True)]
    # At first, each request has all of its candidates. No time for search, because most orders change; the clock
    # counts, so that the result never depends on time.
    placed = MergePlanner(0, clock=count().__next__).arrange(batch.contexts, batch.tokens, no_progress)
    orders: list[Sequence[int]] = [order for _, order in sorted(placed)]
    tree = _OrderTree()
    for order in orders:
        tree.add(order, 1)
    fed_to = Counter([number[j] for number, own in zip(numbers, fed, strict=True) for j in own])
    entered = Counter[int]()
    most = choice.most * (len(listed) + FIRST_REQUESTS)
    for extra in sorted({0, choice.extra}):
        for i in [*range(len(listed))] * _PASSES:
            candidates, number = listed[i], numbers[i]
            beyond = [
                j
                for p in candidates.entering
                if candidates.losses[p] <= choice.within * _ENTERING_SHARE
                for j in candidates.places[p]
                if j in number
            ]
            tree.add(orders[i], -1)
            fed_to.subtract([number[j] for j in fed[i]])
            entered.subtract([number[j] for j in fed[i] if j in beyond])
            may_leave = [
                p
                for p in candidates.leaving
                if max([fed_to[number.get(j, -1)] for j in candidates.places[p]]) >= _LEAST_FED
            ]
            may_enter = [j for j in beyond if entered[number[j]] + 1 <= most]
            search = PathSearch(candidates, may_enter, may_leave, extra, behind=0.0, least_saved=_LEAST_SAVED)
            path = tree.best_path(search, [(number[j], candidates.blocks[j].fingerprint) for j in usable[i]])
            fed[i] = search.fed()
            orders[i] = [*path, *[number[j] for j in fed[i] if number[j] not in path]]
            tree.add(orders[i], 1)
            fed_to.update([number[j] for j in fed[i]])
            entered.update([number[j] for j in fed[i] if j in beyond])
        yield _places(listed, fed)


def _places(listed: Sequence[Candidates], fed: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    found = []
    for candidates, own in zip(listed, fed, strict=True):
        _, positions, joined = candidates.feeding(own)
        places = [place for its in positions for place in its]
        found.append(sorted(places) if joined else places)  # repetitions may hold a run together
    return found


class _OrderTree:
    """The orders of requests, with the number of requests at each node."""

    def __init__(self) -> None:
        self._children: dict[int, int] = {}
        """The node behind each node and block. The root is 0."""
        self._users = [0]

    def add(self, order: Sequence[int], users: int) -> None:
        """Add a request, or remove it."""
        node = 0
        for block in order:
            node = self._children.setdefault(node << 32 | block, len(self._users))
            if node == len(self._users):
                self._users.append(0)
            self._users[node] += users

    def best_path(self, search: PathSearch, usable: Sequence[tuple[int, bytes]]) -> Sequence[int]:
        """Walk along the blocks of a request, given by number and fingerprint; return the best path."""
        best: tuple[int, ...] = ()
        stack: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
        steps = _NODES
        while stack and steps:
            steps -= 1
            node, on_path, path = stack.pop()
            for number, key in reversed(usable):
                child = self._children.get(node << 32 | number, 0)
                if self._users[child]:
                    value = search.value
                    longer, placed = search.extend(on_path, [key])
                    if placed:
                        stack.append((child, longer, (*path, number)))
                    if search.value > value:
                        best = (*path, number)
        return best
