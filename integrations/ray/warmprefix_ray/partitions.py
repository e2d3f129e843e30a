"""Partitions of more requests than one plan can hold: requests that share blocks meet in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from warmprefix.batch import BatchRequest, MergePlanner, no_progress, serve
from warmprefix.errors import MissingExtraError, check_count
from warmprefix_openai.shards import REQUEST_TOKENS, cut_places

try:
    import numpy as np
    import numpy.typing as npt
except ImportError as exc:
    raise MissingExtraError("ray", "numpy") from exc

__all__ = ["Outline", "Partitions", "outline_of"]

_MOST_SHARES = 8
"""Most partitions that are remembered for a block."""

_ROUNDS = 8
"""Passes over the sample in which the partitions learn how popular they are."""

_BALANCED_REQUESTS = 20_000
"""Most requests of the sample that these passes use."""

_ROWS = 4_096
"""Requests that are assigned at once."""

_Numbers = npt.NDArray[np.int64]
_Hashes = npt.NDArray[np.uint64]
_Weights = npt.NDArray[np.float32]


class Outline(NamedTuple):
    """A request as hashes, without its texts."""

    id: int
    """Hash of the request's id and tenant."""
    keys: tuple[int, ...]
    """A hash of each distinct block and the tenant, in the caller's order; 64 bits."""
    tokens: tuple[int, ...]
    """The length of each of these blocks."""


def outline_of(request: BatchRequest) -> Outline:
    """Return the outline of a request. O(blocks)."""
    tenant = 0 if request.tenant is None else _hash(request.tenant)
    tokens = {tenant ^ int.from_bytes(block.fingerprint[:8], "big"): block.tokens for block in request.blocks}
    return Outline(tenant ^ _hash(request.id), tuple(tokens), tuple(tokens.values()))


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


class Partitions:
    """Assigns requests to partitions, to be planned separately.

    A plan of the sample is cut as `shards_of` cuts one, and its requests stay in the partitions that this makes. Each
    block then stands for the partitions in which the sample has it, the more, the earlier it stands in their prompts.
    Every other request goes to the partition for which its blocks stand, weighted by their tokens; partitions that
    would get more than their share count less. A request without a block of the sample goes by its smallest key, so
    that equal contexts meet.

    One call does not affect another, so any number of processes can assign requests. Memory is proportional to the
    blocks of the sample, all in arrays.
    """

    def __init__(self, sample: Sequence[Outline], partitions: int) -> None:
        """Plan the sample and learn from it. Takes as long as `plan_batch` for as many requests.

        Args:
            sample: Some of the requests, or all, in an order that does not depend on chance. At least some hundred
                for each partition are needed for good plans.
            partitions: Number of partitions.

        Raises:
            TypeError: `partitions` is not an int.
            ValueError: `partitions` is below 1.
        """
        check_count("partitions", partitions)
        self.count = partitions
        numbers: dict[int, int] = {}
        lengths: list[int] = []
        contexts: list[list[int]] = []
        for outline in sample:
            context: list[int] = []
            for key, tokens in zip(outline.keys, outline.tokens, strict=True):
                number = numbers.setdefault(key, len(numbers))
                if number == len(lengths):
                    lengths.append(tokens)
                context.append(number)
            contexts.append(context)
        placed = MergePlanner().arrange(contexts, lengths, no_progress) if contexts else []
        saved = [served.tokens for served in serve(placed, lengths)]
        costs = [
            sum([lengths[number] for number in order]) - tokens + REQUEST_TOKENS
            for (_, order), tokens in zip(placed, saved, strict=True)
        ]
        ends = [*cut_places(costs, saved, partitions), len(placed)]
        owners = np.repeat(np.arange(partitions), np.diff([0, *ends]))
        ids = np.array([sample[one.context].id for one in placed], np.uint64)
        by_id = np.argsort(ids, kind="stable")
        self._members: _Hashes = ids[by_id]
        self._member_partitions: _Numbers = owners[by_id]
        self._learn(np.array(list(numbers), np.uint64), [one.order for one in placed], owners)
        self._popularity = np.ones(partitions)
        self._balance(sample[:: len(sample) // _BALANCED_REQUESTS + 1])

    def _learn(self, keys: _Hashes, orders: Sequence[Sequence[int]], owners: _Numbers) -> None:
        """Store for each block the partitions that it stands for, and how much."""
        sizes = np.array([len(order) for order in orders], np.int64)
        blocks = np.array([number for order in orders for number in order], np.int64)
        depths = np.arange(len(blocks)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        pairs, inverse = np.unique(blocks * self.count + np.repeat(owners, sizes), return_inverse=True)
        weights = np.bincount(inverse.reshape(-1), 1 / (1 + depths), len(pairs))
        blocks, parts = pairs // self.count, pairs % self.count
        totals = np.bincount(blocks, weights, len(keys))
        rank_of_key = np.argsort(np.argsort(keys))
        greatest_first = np.lexsort((parts, -weights, rank_of_key[blocks]))
        blocks, parts, weights = blocks[greatest_first], parts[greatest_first], weights[greatest_first]
        counts = np.bincount(rank_of_key[blocks], minlength=len(keys))
        kept = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts) < _MOST_SHARES
        self._keys: _Hashes = np.sort(keys)
        self._ends: _Numbers = np.cumsum(np.minimum(counts, _MOST_SHARES))
        self._parts: _Numbers = parts[kept]
        self._shares: _Weights = (weights[kept] / totals[blocks[kept]]).astype(np.float32)

    def _balance(self, sample: Sequence[Outline]) -> None:
        """Lower the weight of partitions that get more than their share of the sample."""
        weights = np.concatenate([np.zeros((0, self.count), np.float32), *map(self._weights, _chunks(sample))])
        weights = weights[weights.any(axis=1)]
        mean = len(weights) / self.count
        for _ in range(_ROUNDS if mean else 0):
            sizes = np.bincount((weights * self._popularity).argmax(axis=1), minlength=self.count)
            self._popularity *= (2 * mean / (mean + sizes)) ** 0.25

    def assign(self, outlines: Sequence[Outline]) -> list[int]:
        """Return the number of each request's partition. O(blocks + requests * partitions)."""
        return [int(number) for chunk in _chunks(outlines) for number in self._assign(chunk)]

    def _assign(self, outlines: Sequence[Outline]) -> _Numbers:
        weights = self._weights(outlines)
        smallest = np.array([min(outline.keys, default=0) % self.count for outline in outlines], np.int64)
        found = np.where(weights.any(axis=1), (weights * self._popularity).argmax(axis=1), smallest)
        places, are_members = _places(self._members, np.array([outline.id for outline in outlines], np.uint64))
        found[are_members] = self._member_partitions[places[are_members]]
        return found

    def _weights(self, outlines: Sequence[Outline]) -> _Weights:
        """Return how much each request's blocks stand for each partition, one row per request."""
        keys = np.array([key for outline in outlines for key in outline.keys], np.uint64)
        tokens = np.array([tokens for outline in outlines for tokens in outline.tokens], np.float64)
        rows = np.repeat(np.arange(len(outlines)), [len(outline.keys) for outline in outlines])
        places, are_found = _places(self._keys, keys)
        places, tokens, rows = places[are_found], tokens[are_found], rows[are_found]
        ends = self._ends[places]
        counts = ends - np.where(places > 0, self._ends[places - 1], 0)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        shares = np.repeat(ends - counts, counts) + within
        cells = np.repeat(rows, counts) * self.count + self._parts[shares]
        weights = np.bincount(cells, np.repeat(tokens, counts) * self._shares[shares], len(outlines) * self.count)
        return weights.reshape(len(outlines), self.count).astype(np.float32)


def _places(table: _Hashes, wanted: _Hashes) -> tuple[_Numbers, npt.NDArray[np.bool_]]:
    """Return where a sorted table has each wanted hash, and whether it does."""
    if not len(table):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.bool_)
    places = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    return places, table[places] == wanted


def _chunks(outlines: Sequence[Outline]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(outlines), _ROWS):
        yield outlines[start : start + _ROWS]
