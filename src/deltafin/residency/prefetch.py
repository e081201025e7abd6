"""Which experts of the next layer to start reading before its router has spoken: a pure policy.

The drives are idle from the arrival of a layer's last expert until the next layer's router. A guess that fits into that
window costs nothing when wrong; one that reaches beyond it delays the reads that are really needed. So for every layer
the precision of each predictor is measured rank by rank, and a read is started only while it is expected to gain more
time than it may cost.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

RANKS_PER_EXPERT = 2
"""Ranks looked at per expert that a token uses."""

MIN_PRECISION = 0.3
"""Less likely guesses are not read even into an idle window: their checksums and copies take time from computing."""

_MEMORY = 0.05  # weight of the newest observation
_MIN_GAIN_OVER_COST = 2.0
_PROBE_EVERY = 32


@dataclass(slots=True)
class PredictorStats:
    """How a predictor did at one layer: of its k first guesses per token, how many were used."""

    guesses: int = 0
    used: int = 0

    @property
    def recall(self) -> float:
        """Share of a token's k experts that were among the k first guesses."""
        return self.used / self.guesses if self.guesses else 0.0


@dataclass(slots=True)
class _Layer:
    precision: dict[str, list[float]]
    asked: dict[str, Sequence[int]] = field(default_factory=dict)
    stats: dict[str, PredictorStats] = field(default_factory=dict)
    skipped: int = 0


class PrefetchPolicy:
    """Chooses reads for one layer at a time and learns from what the router then chose.

    Args:
        layers: layers with routed experts, counted from 0 here.
        k: experts per token.
    """

    def __init__(self, layers: int, k: int) -> None:
        self._k = k
        ranks = self.ranks = RANKS_PER_EXPERT * k
        # Until measured: the first guesses of a neighbouring router are usually right, those past k rarely.
        router = [max(0.05, 0.8 - 0.6 * rank / k) for rank in range(ranks)]
        late = [max(0.05, 0.9 - 0.5 * rank / k) for rank in range(ranks)]
        # A rejected draft's position was computed with another token; its routes are in router order.
        rejected = [max(0.05, 0.5 - 0.3 * rank / k) for rank in range(ranks)]
        self._layers = [
            _Layer(
                {
                    "router": list(router),
                    "late router": list(late),
                    "rejected draft": list(rejected),
                    "history": [0.1] * ranks,
                }
            )
            for _ in range(layers)
        ]

    def worth_predicting(self, layer: int, *, window: float, read: float, cost: float, rejected: bool = False) -> bool:
        """Whether asking the predictors can pay for itself.

        Args:
            rejected: whether the routes of a rejected draft are at hand.
            window: seconds the drives are expected to be idle before this layer's router.
            read: seconds one expert takes to read.
            cost: seconds of computing the predictions took lately.
        """
        entry = self._layers[layer]
        ranks = range(self._k)
        known = [p for name, p in entry.precision.items() if name != "rejected draft" or rejected]
        best = max(self._gain(p, ranks, (), window, read)[1] for p in known)
        if best > _MIN_GAIN_OVER_COST * cost:
            entry.skipped = 0
            return True
        entry.skipped += 1
        if entry.skipped < _PROBE_EVERY:
            return False
        entry.skipped = 0
        return True

    def plan(
        self,
        layer: int,
        guesses: Mapping[str, Sequence[int]],
        present: Container[int] = (),
        *,
        window: float,
        read: float,
        again: bool = False,
    ) -> list[int]:
        """The reads to start, likeliest first.

        Args:
            layer: to be predicted.
            guesses: predictor → experts, likeliest first.
            present: experts that are in memory.
            window, read: see ``worth_predicting``.
            again: these guesses add to those of an earlier call for the same token.
        """
        entry = self._layers[layer]
        if not again:
            entry.asked = {}
        best: list[int] = []
        best_gain = 0.0
        for name, ranked in guesses.items():
            entry.asked[name] = ranked[: self.ranks]
            chosen, gain = self._gain(entry.precision[name], entry.asked[name], present, window, read)
            if gain > best_gain:
                best, best_gain = chosen, gain
        return best

    def learn(self, layer: int, used: Collection[int]) -> None:
        """The router chose ``used``."""
        entry = self._layers[layer]
        for name, ranked in entry.asked.items():
            precision = entry.precision[name]
            stats = entry.stats.setdefault(name, PredictorStats())
            for rank, expert in enumerate(ranked):
                hit = expert in used
                precision[rank] += _MEMORY * (hit - precision[rank])
                if rank < self._k:
                    stats.used += hit
                    stats.guesses += 1
        entry.asked = {}

    def report(self) -> list[dict[str, PredictorStats]]:
        """Figures per layer and predictor."""
        return [dict(entry.stats) for entry in self._layers]

    @staticmethod
    def _gain(
        precision: Sequence[float], ranked: Sequence[int], present: Container[int], window: float, read: float
    ) -> tuple[list[int], float]:
        """(experts worth reading, expected seconds gained), for reads one after the other in rank order."""
        chosen, gain, begin = [], 0.0, 0.0
        for rank, expert in enumerate(ranked):
            if begin >= window:
                break
            if expert in present or precision[rank] < MIN_PRECISION:
                continue
            end = begin + read
            worth = precision[rank] * (min(end, window) - begin) - (1 - precision[rank]) * max(0.0, end - window)
            if worth > 0:
                chosen.append(expert)
                gain += worth
                begin = end
        return chosen, gain
