"""Which bytes of a step come from on-chip memory: closed forms, and a set-associative simulator to check them and the rest.

The last on-chip level of capacity C is seen by a decode step as one cyclic sequence: W bytes of weights and B bytes of KV cache,
each read once per step, in the same order every step. So a KV line is used again after W + B other bytes:

    LRU                  all hits while W + B <= C, none beyond: a cliff
    random replacement   h = exp(-(1 - h) (W + B) / C), the least solution, h = 1 while W + B <= C
    evict_first          weights are marked to be evicted first (or bypass the cache): the KV cache has C to itself, but set
                         conflicts blur the edge: h = 1 up to 0.9 C, 0.5 at C, 0 from 1.2 C
    persisting           a set-aside of S bytes: 1 while B <= S; beyond that S/B, if hitRatio is lowered to S/B; without
                         lowering it the set-aside thrashes and gives 0

Every figure made here is modelled. `simulate` runs real address sequences through a set-associative cache instead.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

POLICIES = ("lru", "random", "evict_first", "persisting")
LINE = 64


def hit_rate(policy: str, capacity: float, streamed: float, kept: float, set_aside: float = 0.0, lowered: bool = True) -> float:
    """Share of the kept bytes (KV) that hit in steady state, 0..1.

    capacity C, streamed W, kept B and set_aside S in bytes. lowered: whether hitRatio is lowered to S/B when B > S.
    """
    if kept <= 0:
        return 1.0
    if capacity <= 0:
        return 0.0
    if policy == "lru":
        return 1.0 if streamed + kept <= capacity else 0.0
    if policy == "random":
        return _random(capacity, streamed + kept)
    if policy == "evict_first":
        ratio = kept / capacity
        if ratio <= 1.0:
            return 1.0 if ratio <= 0.9 else 1.0 - 5.0 * (ratio - 0.9)
        return max(0.0, 0.5 - 2.5 * (ratio - 1.0))
    if policy == "persisting":
        if kept <= set_aside:
            return 1.0
        return set_aside / kept if lowered else 0.0
    raise ValueError(f"no replacement policy {policy!r}")


def _random(capacity: float, touched: float) -> float:
    """Least fixed point of h = exp(-(1 - h) touched / capacity), by iteration from below (it grows monotonically)."""
    if touched <= capacity:
        return 1.0
    load, h = touched / capacity, 0.0
    for _ in range(10_000):
        following = math.exp(-(1.0 - h) * load)
        if following - h < 1e-12:
            break
        h = following
    return h


def dram_saving(hit: float, streamed: float, kept: float) -> float:
    """Share of a step's DRAM reads that residency of the KV cache saves: h B / (W + B)."""
    return hit * kept / (streamed + kept) if streamed + kept else 0.0


# ------------------------------------------------------------------------------------------------------------ simulator


@dataclass(frozen=True)
class Access:
    """A contiguous read or write of one step: which tensor, byte address, length, and how its lines are to be treated.

    mode: normal; streaming (evict first: inserted as the next victim); persisting (kept in the set-aside).
    """

    tensor: str
    address: int
    bytes: int
    mode: str = "normal"
    write: bool = False


class Cache:
    """Set-associative, write-allocate cache. capacity, line in bytes; ways is the associativity.

    policy: 'lru' or 'random'. set_aside bytes (whole ways) are reserved for accesses of mode persisting, as a CUDA L2 set-aside
    is. With hit_ratio < 1 only that share of persisting lines, spread evenly by address, uses the set-aside; the rest streams.
    hashed: the set of a line follows from a hash of its address, as in GPU caches, not from its low bits, as in most CPU caches
    up to L2 and in cachegrind.
    """

    def __init__(
        self,
        capacity: int,
        ways: int,
        line: int = LINE,
        policy: str = "lru",
        set_aside: int = 0,
        hit_ratio: float = 1.0,
        hashed: bool = False,
        seed: int = 0,
    ):
        sets = capacity // (ways * line) if ways > 0 and line > 0 else 0
        if sets < 1:
            raise ValueError("a cache needs at least one set of lines")
        if policy not in ("lru", "random"):
            raise ValueError(f"no replacement policy {policy!r}")
        self.sets, self.ways, self.line, self.policy, self.hit_ratio, self.hashed = sets, ways, line, policy, hit_ratio, hashed
        self.kept_ways = min(ways - 1, round(ways * set_aside / capacity)) if set_aside else 0
        self.normal = [OrderedDict() for _ in range(sets)]  # tag -> streaming?, oldest first
        self.kept = [OrderedDict() for _ in range(sets)]
        self.random = random.Random(seed)

    def touch(self, number: int, mode: str = "normal") -> bool:
        """One line by its number (address // line); True on a hit."""
        index = int(_spread(number) * self.sets) if self.hashed else number % self.sets
        streaming = mode == "streaming"
        if mode == "persisting" and self.kept_ways:
            if self.hit_ratio >= 1.0 or _chosen(number // self.sets, self.hit_ratio):
                return self._look_up(self.kept[index], number, self.kept_ways, False)
            streaming = True
        return self._look_up(self.normal[index], number, self.ways - self.kept_ways, streaming)

    def _look_up(self, lines: OrderedDict, number: int, room: int, streaming: bool) -> bool:
        if number in lines:
            if self.policy == "lru":
                lines.move_to_end(number, last=not streaming)
            lines[number] = streaming
            return True
        if len(lines) >= room:
            self._evict(lines)
        lines[number] = streaming
        if streaming and self.policy == "lru":
            lines.move_to_end(number, last=False)
        return False

    def _evict(self, lines: OrderedDict) -> None:
        if self.policy == "lru":
            lines.popitem(last=False)
            return
        victims = [tag for tag, streaming in lines.items() if streaming] or list(lines)
        del lines[victims[self.random.randrange(len(victims))]]


def _chosen(number: int, ratio: float) -> bool:
    """Evenly spread choice of a share of consecutive numbers: any n of them hold at most ceil(n * ratio) chosen ones."""
    return math.floor((number + 1) * ratio) > math.floor(number * ratio)


def _spread(number: int) -> float:
    """A line number hashed to [0, 1), the same every time (the mixing of splitmix64)."""
    mixed = number * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ mixed >> 31) / 2.0**64


@dataclass
class Counted:
    """Lines touched and lines that missed, per tensor."""

    lines: dict[str, int]
    misses: dict[str, int]

    def hit_rate(self, tensor: str) -> float:
        return 1.0 - self.misses.get(tensor, 0) / self.lines[tensor]


def simulate(cache: Cache, steps: Iterable[Iterable[Access]], warm_up: int = 1) -> Counted:
    """Runs the accesses of every step through the cache; counts from step `warm_up` on (0 counts cold misses too)."""
    counted = Counted({}, {})
    for number, step in enumerate(steps):
        for access in step:
            first, last = access.address // cache.line, (access.address + access.bytes - 1) // cache.line
            misses = sum(not cache.touch(line, access.mode) for line in range(first, last + 1))
            if number >= warm_up:
                counted.lines[access.tensor] = counted.lines.get(access.tensor, 0) + last - first + 1
                counted.misses[access.tensor] = counted.misses.get(access.tensor, 0) + misses
    return counted
