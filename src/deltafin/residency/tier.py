"""Which experts stay in memory after use: a pure policy over (layer, expert) keys.

A plain LRU smaller than one token's working set never hits, because every token sweeps the layers in the same order and
evicts what it will need next. Here the expert whose next use is expected last leaves, as Belady's optimum does with the
true next use. The expectation comes from ``UseModel``: experts popular in the long run stay (they are as good as
pinned), experts of the present topic come and go at the margin, and an expert that was used once displaces nobody who
is likelier to return. So a sweep cannot flush the tier.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
import numpy.typing as npt

from deltafin.residency.usage import UseModel

Key = tuple[int, int]


class ExpertTierPolicy:
    """Admission and eviction by expected time of next use.

    Args:
        capacity: experts that fit.
        first: first layer with routed experts; keys carry layer numbers from there on.
        model: chances of use; shared with whoever else needs them, fed only through ``observe`` here.
    """

    def __init__(self, capacity: int, *, first: int, model: UseModel) -> None:
        if capacity < 0:
            raise ValueError("capacity must not be negative")
        self.capacity = capacity
        self.model = model
        self._first = first
        total = model.layers * model.experts
        self._kept = np.zeros(total, bool)
        self._count = 0
        self._layer_of = np.repeat(np.arange(model.layers), model.experts)
        # Chances with the running token's uses included, as far as it has come.
        self._chances = model.chances.copy()
        self._layer = 0
        # Kept experts in the order they would leave, last to go first, made when the first newcomer of a layer asks.
        self._leaving: list[tuple[float, int]] | None = None

    def __contains__(self, key: Key) -> bool:
        return bool(self._kept[self._index(key)])

    def __len__(self) -> int:
        return self._count

    @property
    def holds_all(self) -> bool:
        """Whether there is room for every expert, so that nothing needs to be decided."""
        return self.capacity >= len(self._kept)

    def begin_layer(self, layer: int, experts: Sequence[int]) -> None:
        """A pass uses ``experts`` of ``layer``: real routes only."""
        if self.holds_all:
            return
        self._layer = layer - self._first
        self._leaving = None
        span = slice(self._layer * self.model.experts, (self._layer + 1) * self.model.experts)
        self._chances[span] = self.model.after_layer(self._layer, np.asarray(experts, np.int64))

    def observe(self, routes: npt.NDArray[np.integer]) -> None:
        """Tokens were committed; ``routes`` [tokens, layers, k]. Uses of abandoned rows are forgotten."""
        if self.holds_all:
            return
        self.model.observe(routes)
        self._chances[:] = self.model.chances
        self._leaving = None

    def admit(self, key: Key, *, leased: Container[Key] = ()) -> tuple[bool, Key | None]:
        """Decides whether a just-used expert of the current layer stays.

        Args:
            key: the expert whose bytes are at hand.
            leased: entries that cannot be evicted now, since a kernel may be reading them.

        Returns:
            (stays, victim to drop for it or None).
        """
        index = self._index(key)
        if self._kept[index]:
            return True, None
        victim = None
        if self._count >= self.capacity:
            # Its own next chance is one whole sweep away.
            expected = self.model.layers / float(self._chances[index])
            found = self._last_expected(leased)
            if found is None or found[0] <= expected:
                return False, None
            victim = found[1]
            self._forget(victim)
        self._kept[index] = True
        self._count += 1
        return True, victim

    def kept_in(self, layer: int) -> set[int]:
        """Experts of ``layer`` that are kept."""
        begin = self._index((layer, 0))
        return set(np.flatnonzero(self._kept[begin : begin + self.model.experts]).tolist())

    def drop(self, key: Key) -> None:
        """Forgets that ``key`` is kept."""
        if key in self:
            self._forget(key)

    def evict(self, leased: Container[Key] = ()) -> Key | None:
        """Drops and names the entry expected last; None when all are leased or there is none."""
        found = self._last_expected(leased)
        if found is None:
            return None
        self._forget(found[1])
        return found[1]

    def _forget(self, key: Key) -> None:
        self._kept[self._index(key)] = False
        self._count -= 1

    def _index(self, key: Key) -> int:
        return (key[0] - self._first) * self.model.experts + key[1]

    def _last_expected(self, leased: Container[Key]) -> tuple[float, Key] | None:
        """(layers until the expected next use, key) of the kept entry expected last."""
        if self._leaving is None:
            self._leaving = self._departures(64)
        for again in (True, False):
            held: list[tuple[float, int]] = []
            while self._leaving:
                when, index = self._leaving[-1]
                key = self._key(index)
                if self._kept[index] and key not in leased:
                    self._leaving.extend(reversed(held))
                    return when, key
                entry = self._leaving.pop()
                if self._kept[index]:
                    held.append(entry)
            if again:
                self._leaving = self._departures(self._count)
        return None

    def _key(self, index: int) -> Key:
        return self._first + index // self.model.experts, index % self.model.experts

    def _departures(self, count: int) -> list[tuple[float, int]]:
        """The ``count`` kept entries expected last, the very last at the end: (layers until use, index)."""
        kept = np.flatnonzero(self._kept)
        layers = self.model.layers
        ahead = (self._layer_of[kept] - self._layer - 1) % layers + 1
        when = layers / self._chances[kept] - layers + ahead
        if count < len(kept):
            last = np.argpartition(when, len(kept) - count)[-count:]
            kept, when = kept[last], when[last]
        order = np.argsort(when, kind="stable")
        return list(zip(when[order].tolist(), kept[order].tolist(), strict=True))
