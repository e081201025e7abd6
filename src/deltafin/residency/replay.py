"""Replays recorded routes against ways of keeping experts: the product's own, two classics, and Belady's optimum.

Every policy here answers one question per layer: which of the used experts are in memory. The product's is the very
code that runs in the engine.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deltafin.residency.tier import ExpertTierPolicy
from deltafin.residency.usage import UseModel

Routes = npt.NDArray[np.integer]
_NEVER = 1 << 60


class Replay(Protocol):
    """A tier being replayed; layers count from 0."""

    def use(self, layer: int, experts: Sequence[int]) -> list[int]:
        """The running token uses ``experts`` of ``layer``; returns those that had to be read."""

    def end_token(self, routes: Routes) -> None:
        """The token, routes [layers, k], is committed."""

    def holds(self, layer: int) -> set[int]:
        """Experts of ``layer`` in memory."""


class ProductTier:
    """What the engine does."""

    def __init__(self, capacity: int, layers: int, experts: int) -> None:
        self.model = UseModel(layers, experts)
        self._policy = ExpertTierPolicy(capacity, first=0, model=self.model)

    def use(self, layer: int, experts: Sequence[int]) -> list[int]:
        policy = self._policy
        policy.begin_layer(layer, experts)
        missed = [e for e in experts if (layer, e) not in policy]
        for expert in missed:
            policy.admit((layer, expert))
        return missed

    def end_token(self, routes: Routes) -> None:
        self._policy.observe(routes[None])

    def holds(self, layer: int) -> set[int]:
        return self._policy.kept_in(layer)


class Lru:
    """The least recently used expert leaves."""

    def __init__(self, capacity: int, layers: int, experts: int) -> None:
        self._capacity, self._experts = capacity, experts
        self._kept: OrderedDict[int, None] = OrderedDict()

    def use(self, layer: int, experts: Sequence[int]) -> list[int]:
        missed = []
        for expert in experts:
            key = layer * self._experts + expert
            if key in self._kept:
                self._kept.move_to_end(key)
                continue
            missed.append(expert)
            if self._capacity:
                if len(self._kept) >= self._capacity:
                    self._kept.popitem(last=False)
                self._kept[key] = None
        return missed

    def end_token(self, routes: Routes) -> None:
        pass

    def holds(self, layer: int) -> set[int]:
        first = layer * self._experts
        return {key - first for key in self._kept if first <= key < first + self._experts}


class DecayedLfu:
    """The expert with the smallest use count leaves, if the newcomer's is larger; counts halve every 64 tokens."""

    def __init__(self, capacity: int, layers: int, experts: int, half_life: float = 64.0) -> None:
        self._capacity, self._experts = capacity, experts
        self._fade = 2.0 ** (-1.0 / half_life)
        self._counts = np.zeros(layers * experts)
        self._kept = np.zeros(layers * experts, bool)
        self._used = 0

    def use(self, layer: int, experts: Sequence[int]) -> list[int]:
        keys = np.asarray(experts) + layer * self._experts
        self._counts[keys] += 1
        missed = [e for e, k in zip(experts, keys.tolist(), strict=True) if not self._kept[k]]
        for key in (layer * self._experts + e for e in missed):
            if self._used >= self._capacity:
                if not self._capacity:
                    continue
                kept = np.flatnonzero(self._kept)
                coldest = kept[np.argmin(self._counts[kept])]
                if self._counts[coldest] >= self._counts[key]:
                    continue
                self._kept[coldest] = False
                self._used -= 1
            self._kept[key] = True
            self._used += 1
        return missed

    def end_token(self, routes: Routes) -> None:
        self._counts *= self._fade

    def holds(self, layer: int) -> set[int]:
        first = layer * self._experts
        return set(np.flatnonzero(self._kept[first : first + self._experts]).tolist())


class Belady:
    """The optimum: the expert whose next use is farthest leaves, be it the newcomer. Knows the whole trace."""

    def __init__(self, capacity: int, layers: int, experts: int, routes: Routes) -> None:
        self._capacity, self._experts = capacity, experts
        flat = (routes.astype(np.int64) + (np.arange(layers) * experts)[:, None]).reshape(-1)
        following: dict[int, int] = {}
        self._next = [0] * len(flat)
        for i, key in zip(range(len(flat) - 1, -1, -1), flat[::-1].tolist(), strict=True):
            self._next[i] = following.get(key, _NEVER)
            following[key] = i
        self._at = 0
        self._kept: dict[int, int] = {}
        self._farthest: list[tuple[int, int]] = []

    def use(self, layer: int, experts: Sequence[int]) -> list[int]:
        missed = []
        for expert in experts:
            key, then = layer * self._experts + expert, self._next[self._at]
            self._at += 1
            if key not in self._kept:
                missed.append(expert)
                if not self._admit(then):
                    continue
            self._kept[key] = then
            heapq.heappush(self._farthest, (-then, key))
        return missed

    def _admit(self, then: int) -> bool:
        if len(self._kept) < self._capacity:
            return True
        while self._farthest:
            when, key = self._farthest[0]
            if self._kept.get(key) == -when:
                if -when <= then:
                    return False
                del self._kept[key]
                heapq.heappop(self._farthest)
                return True
            heapq.heappop(self._farthest)
        return False

    def end_token(self, routes: Routes) -> None:
        pass

    def holds(self, layer: int) -> set[int]:
        first = layer * self._experts
        return {key - first for key in self._kept if first <= key < first + self._experts}


POLICIES: dict[str, Callable[[int, int, int, Routes], Replay]] = {
    "deltafin": lambda capacity, layers, experts, _: ProductTier(capacity, layers, experts),
    "lru": lambda capacity, layers, experts, _: Lru(capacity, layers, experts),
    "lfu": lambda capacity, layers, experts, _: DecayedLfu(capacity, layers, experts),
    "belady": Belady,
}
"""Name → maker(capacity in experts, layers, experts per layer, the trace's routes [tokens, layers, k])."""


def hit_rate(policy: str, routes: Routes, experts: int, capacity: int) -> float:
    """Share of uses served from memory, from an empty tier on.

    Args:
        policy: one of ``POLICIES``.
        routes: [tokens, layers, k].
        experts: per layer.
        capacity: experts that fit.
    """
    tokens, layers, k = routes.shape
    tier = POLICIES[policy](capacity, layers, experts, routes)
    missed = 0
    for row in routes:
        for layer, chosen in enumerate(row.tolist()):
            missed += len(tier.use(layer, chosen))
        tier.end_token(row)
    return float(1.0 - missed / (tokens * layers * k))
