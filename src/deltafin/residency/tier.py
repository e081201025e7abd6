"""Which experts stay in memory after use: a pure policy over (layer, expert) keys.

A plain LRU smaller than one token's working set never hits, because every token sweeps the layers in the same order and
evicts what it will need next. Here each expert carries a use count that decays by age, and a newcomer replaces the
least used entry only when it has been used more; ties keep what is there. So a sweep cannot flush the tier.
"""

from __future__ import annotations

import heapq
from collections.abc import Container

Key = tuple[int, int]


class ExpertTierPolicy:
    """Decayed-frequency admission and eviction.

    Args:
        capacity: experts that fit.
        half_life: tokens after which a past use counts half.
    """

    def __init__(self, capacity: int, *, half_life: int = 64) -> None:
        if capacity < 0:
            raise ValueError("capacity must not be negative")
        self.capacity = capacity
        self._growth = 2.0 ** (1.0 / half_life)
        self._unit = 1.0
        self._heat: dict[Key, float] = {}
        self._kept: set[Key] = set()
        # Counts never shrink between rescalings, so a stored count is a lower bound and the heap can be repaired
        # lazily.
        self._coldest: list[tuple[float, Key]] = []

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def next_token(self) -> None:
        """Ages all counts by one token, by making the next use worth more instead of touching every count."""
        self._unit *= self._growth
        if self._unit > 1e12:
            scale = 1.0 / self._unit
            self._heat = {k: h * scale for k, h in self._heat.items() if h * scale > 1e-9}
            self._unit = 1.0
            self._coldest = [(self._heat.get(k, 0.0), k) for k in self._kept]
            heapq.heapify(self._coldest)

    def use(self, key: Key) -> None:
        """Counts a real route."""
        self._heat[key] = self._heat.get(key, 0.0) + self._unit

    def admit(self, key: Key, *, leased: Container[Key] = ()) -> tuple[bool, Key | None]:
        """Decides whether a just-used expert stays.

        Args:
            key: the expert whose bytes are at hand.
            leased: entries that cannot be evicted now, since a kernel may be reading them.

        Returns:
            (stays, victim to drop for it or None).
        """
        if key in self._kept:
            return True, None
        victim = None
        if len(self._kept) >= self.capacity:
            coldest = self._find_coldest(leased)
            heat = self._heat.get(key, 0.0)
            if coldest is None or coldest[0] >= heat:
                return False, None
            victim = coldest[1]
            self._kept.discard(victim)
        self._kept.add(key)
        heapq.heappush(self._coldest, (self._heat.get(key, 0.0), key))
        return True, victim

    def drop(self, key: Key) -> None:
        """Forgets that ``key`` is kept (its count remains)."""
        self._kept.discard(key)

    def _find_coldest(self, leased: Container[Key]) -> tuple[float, Key] | None:
        skipped, found = [], None
        while self._coldest:
            heat, key = self._coldest[0]
            now = self._heat.get(key, 0.0)
            if key not in self._kept:
                heapq.heappop(self._coldest)
            elif now > heat:
                heapq.heapreplace(self._coldest, (now, key))
            elif key in leased:
                skipped.append(heapq.heappop(self._coldest))
            else:
                found = (heat, key)
                break
        for entry in skipped:
            heapq.heappush(self._coldest, entry)
        return found
