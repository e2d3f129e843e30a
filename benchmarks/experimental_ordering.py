"""The ordering rules that were tried on the way to the default policy, as settings of one.

`Rule()` is the default policy, written again in the plainest way, every step next to its alternatives. It is
made for experiments only: nothing in it is bounded but the window, and `order` and `observe` must take turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from typing import NamedTuple

from warmprefix.ordering import BlockView, OrderingPolicy, PrefixView, ServedBlock
from warmprefix.ordering.coaccess import AccessWindow, BitCounter
from warmprefix.ordering.policies import by_rank, is_resident, then_the_rest
from warmprefix.prefix.tree import PrefixMatch, PrefixTree


@dataclass(frozen=True, slots=True)
class Rule:
    """What is done in each step. An experiment changes one setting, or a few that belong together."""

    window: int = 1_000

    # Which head.
    least_head: float = 0.0
    """A resident path of a smaller share of the tokens is ignored, unless it begins with the most relevant block."""
    leave_cold: bool = False
    """A request without a head keeps its relevance order."""

    # Which requests of the window count, and how much.
    levels: tuple[float, ...] = (1 / 3, 2 / 3, 1.0)
    """A request counts once for each of these shares of the highest overlap that its own reaches; if there are none,
    once as soon as it shares a block."""
    first_half_twice: bool = False
    """For the overlap, blocks of the upper half of the ranks count twice."""
    rare: int | None = None
    """For the overlap, only blocks in at most this many requests count, if there are any."""
    recent: int = 0
    """The last this many requests that reach the lowest level count twice."""
    unmet: float = 0.0
    """Of the requests that reach the lowest level those count once more of which less than this share was resident."""

    # Which block is next.
    odds: bool = True
    """By tokens times odds; if not, by the requests that hold it with all before it, less `prior` for its rank."""
    prior: float = 2.0
    """Requests that the prior of the last rank counts as; other ranks in proportion."""
    learn_prior: bool = False
    """By regression of what comes up again on the requests that hold it and on its rank."""
    then_by_frequency: bool = False
    """Once no candidate comes up with those before it, the rest by frequency."""
    exponent: float = 1.0
    """Of the tokens."""
    trust: float = 11.0
    """Requests that weigh as much as the prior of the rank."""
    learn_trust: bool = False
    """The one with which past estimates would have had the least squared error."""
    trust_when_cold: float | None = None
    """Where there is no head."""
    frequency_trust: float | None = None
    """Requests that outweigh the prior of the rank, if the prior is the block's frequency in the window."""
    estimates: int = 4
    """With odds: number of places for which they are estimated separately, then once for the rest; 0 for all."""
    look_ahead: int = 0
    """Number of best blocks compared pairwise, by the savings of both orders."""
    discount: float = 0.0
    """This share of the requests that hold a block ever served behind the head does not count for the first place."""

    # What is expected of a rank.
    learn: str = "tails"
    """From which blocks of the earlier request: "none", "all", or its "tails", beyond what was resident."""
    latest_weight: int = 8
    """Weight of the latest similar request, in requests."""
    by_novelty: bool = False
    """Apart for blocks that came up in the window and for new ones."""


class Remembered(NamedTuple):
    """A served block, with its statistics at that time."""

    key: bytes
    rank: int
    blocks: int
    part: int
    """Which third of the ranks it was in."""
    new: bool
    """True if it was new to the window, if the rule distinguishes such blocks."""
    holders: float
    """Requests that held it with the whole head, and all that held the head, by weight."""
    requests: float


Outcome = tuple[Remembered, bool]
"""A block of an earlier request, and whether the request most like that one has it too."""


class BlockEstimate(NamedTuple):
    """A block that may come next."""

    place: int
    """In the request."""
    holders: int
    """The requests that hold it, as a bitset of all levels."""
    tokens: float
    expected: float
    """The prior of its rank: requests that hold it, and requests that do not."""
    against: float
    penalty: float
    """Where odds do not count."""


class Situation(NamedTuple):
    """The window's statistics on a request."""

    keys: list[bytes]
    requests: list[int]
    overlap: BitCounter
    outcomes: list[Outcome]
    """Of the tail of the latest request most like this one."""


class ExperimentalPolicy:
    """Orders by a `Rule`."""

    def __init__(self, rule: Rule | None = None) -> None:
        self.rule = rule = rule or Rule()
        self._window = AccessWindow[bytes](rule.window)
        self._served: list[list[Remembered]] = [[] for _ in range(rule.window)]
        self._unmet = 0
        self._followers: dict[tuple[bytes, ...], dict[bytes, None]] = {}
        self._ranks = RankShares(rule.latest_weight)
        self._new_ranks = RankShares(rule.latest_weight, new=True)
        self._regression = RankRegression()
        self._trusts = TrustBySquaredLoss(self._ranks)
        self._now = Situation([], [], BitCounter([]), [])
        self._evidence: dict[int, tuple[float, float]] = {}

    # -- the order -----------------------------------------------------------------------------------------------------

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        now = self._now = self._look([block.fingerprint for block in blocks])
        self._evidence = {}
        head = self._head(blocks, prefix)
        if not now.overlap.highest or len(head) == len(blocks) or (self.rule.leave_cold and not head):
            return then_the_rest(head, len(blocks))
        levels = self._levels(now)
        common = stacked(levels, self.rule.window)
        holders = [common & self._at_all_levels(held, len(levels)) if held else 0 for held in now.requests]
        for i in head:
            common &= holders[i]
        candidates = self._candidates(blocks, head, holders, common, len(levels))
        return then_the_rest(head + self._tail(candidates, common, self._served_behind(head)), len(blocks))

    def _look(self, keys: list[bytes]) -> Situation:
        requests = self._window.requests(keys)
        overlap = BitCounter(requests)
        outcomes: list[Outcome] = []
        if overlap.highest and self.rule.learn != "none":
            here = set(keys)
            alike = self._served[self._window.latest(overlap.at_least(overlap.highest))]
            outcomes = [(block, block.key in here) for block in alike]
        return Situation(keys, requests, overlap, outcomes)

    def _head(self, blocks: Sequence[BlockView], prefix: PrefixView) -> list[int]:
        head = prefix.deepest_path(blocks)
        if self.rule.least_head and head and head[0] != 0:
            least = self.rule.least_head * sum(block.tokens for block in blocks)
            return head if sum(blocks[i].tokens for i in head) >= least else []
        return head

    def _levels(self, now: Situation) -> list[int]:
        """Return bit sets of the requests that count, one per level."""
        rule, overlap, counted = self.rule, now.overlap, now.requests
        if rule.rare is not None:
            counted = [held for held in counted if held.bit_count() <= rule.rare]
        if rule.first_half_twice:
            counted = counted + counted[: len(counted) // 2]
        if counted is not now.requests and any(counted):
            overlap = BitCounter(counted)
        shares = rule.levels or (0.0,)
        levels = [overlap.at_least(max(math.ceil(overlap.highest * share - 1e-9), 1)) for share in shares]
        if rule.recent:
            levels.append(levels[0] & self._last(rule.recent))
        if rule.unmet:
            levels.append(levels[0] & self._unmet)
        return levels

    def _last(self, count: int) -> int:
        """Return the last `count` places of the window."""
        size, places = self.rule.window, (1 << count) - 1
        turned = places << (self._window.next_place - count) % size
        return (turned | turned >> size) & ((1 << size) - 1)

    def _at_all_levels(self, held: int, levels: int) -> int:
        together = held
        for _ in range(levels - 1):
            together = together << self.rule.window | held
        return together

    def _candidates(
        self, blocks: Sequence[BlockView], head: Sequence[int], holders: Sequence[int], common: int, levels: int
    ) -> list[BlockEstimate]:
        rule = self.rule
        trust = rule.trust
        if rule.learn_trust:
            trust = self._trusts.best
        if rule.trust_when_cold is not None and not head:
            trust = rule.trust_when_cold
        trust *= levels
        cost = levels * (self._regression.prior if rule.learn_prior else rule.prior) / len(blocks)
        chances = self._chances()
        requests = common.bit_count() / levels
        placed = set(head)
        candidates: list[BlockEstimate] = []
        for i, block in enumerate(blocks):
            if i not in placed:
                chance = chances[i]
                if rule.frequency_trust is not None:
                    weight = rule.frequency_trust * levels
                    all_requests = reduce(or_, holders).bit_count()
                    chance = (holders[i].bit_count() + weight * chance) / (all_requests + weight)
                candidates.append(
                    BlockEstimate(
                        i,
                        holders[i],
                        block.tokens**rule.exponent,
                        trust * chance,
                        trust - trust * chance,
                        cost * i,
                    )
                )
                if rule.learn_prior or rule.learn_trust:
                    self._evidence[i] = ((common & holders[i]).bit_count() / levels, requests)
        return candidates

    def _chances(self) -> list[float]:
        """Return the chance of each rank."""
        now = self._now
        chances = self._ranks.chances(len(now.keys), now.outcomes)
        if self.rule.by_novelty:
            of_new_ones = self._new_ranks.chances(len(now.keys), now.outcomes)
            return [seen if held else new for seen, new, held in zip(chances, of_new_ones, now.requests, strict=True)]
        return chances

    def _tail(self, candidates: list[BlockEstimate], common: int, served: int) -> list[int]:
        """Return candidates, each the best after those before it, as long as one request holds all of them."""
        rule = self.rule
        order: list[int] = []
        while candidates and common:
            if rule.odds:
                scores = savings(candidates, common, 0 if order else rule.discount, served)
            else:
                scores = [(common & block.holders).bit_count() - block.penalty for block in candidates]
            if rule.odds and len(order) == rule.estimates > 0:
                by_score = sorted(range(len(candidates)), key=scores.__getitem__, reverse=True)
                return order + [candidates[j].place for j in by_score]
            if rule.look_ahead:
                best = first_of_pairs(candidates, scores, common, rule.look_ahead)
            else:
                best = scores.index(max(scores))
            if rule.then_by_frequency and not common & candidates[best].holders:
                candidates.sort(key=lambda block: block.penalty - block.holders.bit_count())
                return order + [block.place for block in candidates]
            block = candidates.pop(best)
            order.append(block.place)
            common &= block.holders
        return order

    def _served_behind(self, head: Sequence[int]) -> int:
        """Return the requests with a block that was ever served right after this head, at all levels."""
        if not self.rule.discount:
            return 0
        followers = self._followers.get(tuple([self._now.keys[i] for i in head]), ())
        held = reduce(or_, self._window.requests(followers), 0)
        return self._at_all_levels(held, len(self.rule.levels))

    # -- what is learned -----------------------------------------------------------------------------------------------

    def observe(self, served: Sequence[BlockView]) -> None:
        rule, now, place = self.rule, self._now, self._window.next_place
        if rule.learn_trust:
            self._trusts.learn(now.outcomes)
        if rule.learn_prior:
            self._regression.learn(now.outcomes)
        self._ranks.learn(now.outcomes)
        if rule.by_novelty:
            self._new_ranks.learn(now.outcomes)
        if rule.learn != "none":
            self._served[place] = self._worth_remembering(served)
        resident = sum(block.tokens for block in served if is_resident(block))
        poor = resident < rule.unmet * sum(block.tokens for block in served)
        self._unmet = self._unmet & ~(1 << place) | poor << place
        if rule.discount:
            keys = tuple([block.fingerprint for block in served])
            for i, key in enumerate(keys):
                self._followers.setdefault(keys[:i], {})[key] = None
        self._window.observe(now.keys)

    def _worth_remembering(self, served: Sequence[BlockView]) -> list[Remembered]:
        rule, now, nothing = self.rule, self._now, (0.0, 0.0)
        blocks = len(served)
        return [
            Remembered(
                now.keys[rank],
                rank,
                blocks,
                PARTS * rank // blocks,
                rule.by_novelty and not now.requests[rank],
                *self._evidence.get(rank, nothing),
            )
            for rank, block in enumerate(by_rank(served))
            if rule.learn == "all" or not is_resident(block)
        ]


def stacked(levels: Sequence[int], size: int) -> int:
    """Bitsets of the window side by side in one, so that one `bit_count` adds up all levels."""
    return reduce(lambda together, level: together << size | level, levels)


def savings(candidates: Sequence[BlockEstimate], common: int, discount: float, served: int) -> list[float]:
    """For each candidate, its tokens times the odds that it comes up again where everything placed does."""
    if discount and served:
        return list(_discounted(candidates, common, discount, served))
    requests = common.bit_count()
    return [
        tokens * (expected + (count := (holders & common).bit_count())) / (requests - count + against)
        for _, holders, tokens, expected, against, _ in candidates
    ]


def _discounted(candidates: Sequence[BlockEstimate], common: int, discount: float, served: int) -> Iterator[float]:
    served &= common
    requests = common.bit_count() - discount * served.bit_count()
    for _, holders, tokens, expected, against, _ in candidates:
        count = (holders & common).bit_count() - discount * (holders & served).bit_count()
        yield tokens * (expected + count) / (requests - count + against)


def first_of_pairs(candidates: Sequence[BlockEstimate], scores: Sequence[float], common: int, most: int) -> int:
    """Of the best, the one that saves more in front of any other of them than behind it, without independence."""

    def alone(block: BlockEstimate) -> float:
        return (common & block.holders).bit_count() + block.expected

    def both(a: BlockEstimate, b: BlockEstimate) -> float:
        trust = a.expected + a.against
        return (common & a.holders & b.holders).bit_count() + a.expected * b.expected / trust

    best, *others = sorted(range(len(candidates)), key=lambda j: -scores[j])[:most]
    for other in others:
        a, b = candidates[best], candidates[other]
        together = both(a, b)
        if b.tokens * alone(b) + a.tokens * together > a.tokens * alone(a) + b.tokens * together:
            best = other
    return best


# -- learners ----------------------------------------------------------------------------------------------------------


PARTS = 3


class RankShares:
    """How many blocks of the first, the middle and the last third of the ranks come up again.

    Written for experiments as in `warmprefix.ordering.coaccess`, which has the details.
    """

    FIRST_GUESS = (0.633, 0.5, 0.367)
    GUESS_WEIGHT = 60
    MEMORY = 10_000

    def __init__(self, latest_weight: int, new: bool = False) -> None:
        """Learn only from blocks that count as new, or only from the others."""
        self._latest_weight = latest_weight
        self._new = new
        self._recurred = [self.GUESS_WEIGHT * share for share in self.FIRST_GUESS]
        self._seen = [float(self.GUESS_WEIGHT)] * PARTS

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        for block, again in outcomes:
            if block.new == self._new:
                part = block.part
                self._recurred[part] += again
                self._seen[part] += 1
                if self._seen[part] > self.MEMORY:
                    self._recurred[part] /= 2
                    self._seen[part] /= 2

    def chances(self, blocks: int, latest: Sequence[Outcome] = ()) -> list[float]:
        """For each rank, how likely its block is to come up again."""
        recurred, seen = self._recurred.copy(), self._seen.copy()
        for block, again in latest:
            if block.new == self._new:
                recurred[block.part] += self._latest_weight * again
                seen[block.part] += self._latest_weight
        shares = [min(max(a / b, 0.02), 0.98) for a, b in zip(recurred, seen, strict=True)]
        return [shares[part] + (shares[part + 1] - shares[part]) * way for part, way in between_parts(blocks)]


@lru_cache(maxsize=64)
def between_parts(blocks: int) -> list[tuple[int, float]]:
    """For each rank: behind the middle of which part, and how far towards the middle of the next, from 0 to 1."""
    positions = [(rank + 0.5) / blocks * PARTS - 0.5 for rank in range(blocks)]
    parts = [min(max(int(position), 0), PARTS - 2) for position in positions]
    return [(part, min(max(position - part, 0.0), 1.0)) for part, position in zip(parts, positions, strict=True)]


class TrustBySquaredLoss:
    """The trust with which the estimates so far would have been nearest to what came."""

    TRUSTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    FIRST = 8.0

    def __init__(self, ranks: RankShares) -> None:
        self._ranks = ranks
        self._losses = [abs(math.log2(trust / self.FIRST)) for trust in self.TRUSTS]

    @property
    def best(self) -> float:
        return self.TRUSTS[self._losses.index(min(self._losses))]

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        for block, again in outcomes:
            if block.requests:
                chance = self._ranks.chances(block.blocks)[block.rank]
                for i, trust in enumerate(self.TRUSTS):
                    estimate = (block.holders + trust * chance) / (block.requests + trust)
                    self._losses[i] += (estimate - again) ** 2


class RankRegression:
    """How many requests that hold a block the last rank is worth: the ratio of two slopes, by ridge regression."""

    STRENGTH = 10.0
    GUESS = (0.1, 0.1)
    """The slopes that nothing learned amounts to."""
    RANGE = (0.25, 16.0)

    def __init__(self) -> None:
        self._sums = [0.0] * 9

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        for block, again in outcomes:
            x, r, y = min(block.holders, 3.0), 1 - block.rank / block.blocks, float(again)
            terms = (1.0, x, r, y, x * x, r * r, x * r, x * y, r * y)
            self._sums = [total + term for total, term in zip(self._sums, terms, strict=True)]

    @property
    def prior(self) -> float:
        n, x, r, y, xx, rr, xr, xy, ry = self._sums
        n = max(n, 1.0)
        a = xx - x * x / n + self.STRENGTH
        b = xr - x * r / n
        d = rr - r * r / n + self.STRENGTH
        u = xy - x * y / n + self.STRENGTH * self.GUESS[0]
        v = ry - r * y / n + self.STRENGTH * self.GUESS[1]
        by_holders, by_rank = (u * d - b * v) / (a * d - b * b), (a * v - b * u) / (a * d - b * b)
        return min(max(by_rank / max(by_holders, 0.005), self.RANGE[0]), self.RANGE[1])


# -- caches, real and imagined -----------------------------------------------------------------------------------------


class Block(NamedTuple):
    """The data on a block that a policy may use."""

    fingerprint: bytes
    tokens: int


class BlockCache:
    """An engine's prefix cache of whole blocks, which is also its planner's prediction."""

    def __init__(self, capacity: int | None) -> None:
        self._tree = PrefixTree[bytes](capacity, max_nodes=1_000_000_000)
        self._view = PrefixView(self._tree)

    def serve(self, policy: OrderingPolicy, blocks: Sequence[BlockView]) -> PrefixMatch:
        """Order, serve, and let the policy learn, as the planner does. What of it was resident is the answer."""
        order = policy.order(blocks, self._view)
        keys = [blocks[i].fingerprint for i in order]
        tokens = [blocks[i].tokens for i in order]
        found = self._tree.insert(keys, tokens)
        policy.observe(
            [
                ServedBlock(key, length, rank, place < found.blocks)
                for place, (key, length, rank) in enumerate(zip(keys, tokens, order, strict=True))
            ]
        )
        return found


class FollowTheBest:
    """Several policies, each with its own ghost cache; the real cache follows the one that saved most recently."""

    def __init__(
        self, policies: Sequence[OrderingPolicy], capacity: int | None, decay: float, hysteresis: float = 0.0
    ) -> None:
        """Begin with the first.

        Args:
            policies: Which; they must learn only from requests and from their own orders.
            capacity: Tokens of each ghost cache, and of the real one.
            decay: What saved tokens are multiplied by with each request.
            hysteresis: A share of the tokens served by which another must be ahead to be followed.
        """
        self._policies = policies
        self._caches = [BlockCache(capacity) for _ in policies]
        self._decay = decay
        self._hysteresis = hysteresis
        self._saved = [0.0] * len(policies)
        self._total = 0.0
        self._leader = 0

    def order(self, blocks: Sequence[BlockView], prefix: PrefixView) -> Sequence[int]:
        order = self._policies[self._leader].order(blocks, prefix)
        self._total = self._total * self._decay + sum(block.tokens for block in blocks)
        for i, (policy, cache) in enumerate(zip(self._policies, self._caches, strict=True)):
            self._saved[i] = self._saved[i] * self._decay + cache.serve(policy, blocks).tokens
        best = self._saved.index(max(self._saved))
        if self._saved[best] > self._saved[self._leader] + self._hysteresis * self._total:
            self._leader = best
        return order

    def observe(self, served: Sequence[BlockView]) -> None:
        """Nothing: each has learned on its own cache."""
