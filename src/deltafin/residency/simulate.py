"""Time per token of recorded routes on a described machine: drives, memory, computing, keeping and reading ahead.

The decisions are the product's own (``tier``, ``prefetch``); only clocks and bytes are imagined here. Decoding, one
position at a time, with every layer's expert reads overlapping its computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deltafin.residency.prefetch import PrefetchPolicy
from deltafin.residency.replay import POLICIES, ProductTier, Routes
from deltafin.residency.usage import UseModel

PREDICTORS = ("none", "history", "router", "perfect")


@dataclass(frozen=True, slots=True)
class Machine:
    """What is simulated.

    Attributes:
        bytes_per_s: of each drive.
        expert_bytes: one expert.
        before_seconds: computing per layer before its router (attention, norms, router).
        beside_seconds: computing per layer that needs no routed expert (shared experts, projections).
        expert_seconds: computing one expert.
        token_seconds: computing per token outside the layers (embedding, dense layers, head).
        split: whether every expert lies on all drives, cut by bandwidth; else each lies whole on one of them.
    """

    bytes_per_s: tuple[float, ...]
    expert_bytes: int
    before_seconds: float = 0.0
    beside_seconds: float = 0.0
    expert_seconds: float = 0.0
    token_seconds: float = 0.0
    split: bool = True

    def __post_init__(self) -> None:
        if not self.bytes_per_s or min(self.bytes_per_s) <= 0 or self.expert_bytes <= 0:
            raise ValueError("a machine needs drives with positive bandwidth and experts with bytes")

    @property
    def read_seconds(self) -> float:
        """One expert from all drives together."""
        return self.expert_bytes / sum(self.bytes_per_s)

    def layer_read_seconds(self, experts: Sequence[int]) -> float:
        """All of ``experts``: with whole experts on single drives the fullest queue decides."""
        if self.split:
            return len(experts) * self.read_seconds
        queues = [0.0] * len(self.bytes_per_s)
        for expert in experts:
            drive = expert % len(queues)
            queues[drive] += self.expert_bytes / self.bytes_per_s[drive]
        return max(queues, default=0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A simulated run.

    Attributes:
        hit_rate: share of uses served from memory (reads ahead are reads).
        seconds_per_token: mean.
        read_bytes_per_token: bytes read and used.
        wasted_bytes_per_token: bytes read ahead and not used.
        recall: share of a layer's experts among as many first guesses, mean over layers.
    """

    hit_rate: float
    seconds_per_token: float
    read_bytes_per_token: float
    wasted_bytes_per_token: float
    recall: float

    @property
    def tokens_per_second(self) -> float:
        return 1.0 / self.seconds_per_token if self.seconds_per_token else float("inf")


def simulate(
    routes: Routes,
    experts: int,
    machine: Machine,
    *,
    capacity: int,
    policy: str = "deltafin",
    predictor: str = "none",
    recall: float = 0.65,
    seed: int = 0,
) -> Outcome:
    """Replays ``routes`` [tokens, layers, k].

    Args:
        experts: per layer.
        machine: clocks and drives.
        capacity: experts that fit into memory.
        policy: one of ``replay.POLICIES``.
        predictor: one of ``PREDICTORS``; ``router`` guesses at random with the given recall, its first ranks best.
        recall: of ``router``.
        seed: of its guesses.
    """
    tokens, layers, k = routes.shape
    tier = POLICIES[policy](capacity, layers, experts, routes)
    history = tier.model if isinstance(tier, ProductTier) else UseModel(layers, experts)
    ahead = PrefetchPolicy(layers, k)
    rng = np.random.default_rng(seed)
    read = machine.read_seconds
    windows = [0.0] * layers
    seconds = machine.token_seconds * tokens
    reads = wasted = 0.0
    idle = machine.token_seconds + machine.before_seconds
    for row in routes:
        for layer, chosen in enumerate(row.tolist()):
            window = idle
            used = set(chosen)
            planned: list[int] = []
            if predictor != "none":
                guesses = _guesses(predictor, used, history, layer, experts, ahead.ranks, recall, rng)
                known = windows[layer] or window
                planned = ahead.plan(layer, guesses, tier.holds(layer), window=known, read=read)
                ahead.learn(layer, used)
                windows[layer] = known + 0.1 * (window - known)
            missed = tier.use(layer, chosen)
            wanted = set(missed)
            # Reads ahead run one after the other; what has not begun by the router's turn is cancelled.
            begun = planned[: int(np.ceil(window / read))] if read else planned
            early = sum(e in wanted for e in begun)
            wasted += len(begun) - early
            over = max(0.0, len(begun) * read - window)
            late = over if begun and begun[-1] not in wanted else 0.0
            rest = [e for e in missed if e not in begun]
            reading = machine.layer_read_seconds(rest) + (over if begun and begun[-1] in wanted else late)
            computing = machine.beside_seconds + k * machine.expert_seconds
            last = machine.expert_seconds if rest else 0.0
            layer_seconds = max(reading + last, computing)
            seconds += machine.before_seconds + layer_seconds
            idle = layer_seconds - reading + machine.before_seconds
            if layer == layers - 1:
                idle += machine.token_seconds
            reads += len(missed)
        tier.end_token(row)
        if not isinstance(tier, ProductTier) and predictor == "history":
            history.observe(row[None])
    figures = [stats for entry in ahead.report() for stats in entry.values()]
    return Outcome(
        hit_rate=1.0 - reads / (tokens * layers * k),
        seconds_per_token=seconds / tokens,
        read_bytes_per_token=reads * machine.expert_bytes / tokens,
        wasted_bytes_per_token=wasted * machine.expert_bytes / tokens,
        recall=float(np.mean([s.recall for s in figures])) if figures else 0.0,
    )


def _guesses(
    predictor: str,
    used: set[int],
    history: UseModel,
    layer: int,
    experts: int,
    ranks: int,
    recall: float,
    rng: np.random.Generator,
) -> dict[str, Sequence[int]]:
    if predictor == "history":
        return {"history": history.likeliest(layer, ranks)}
    right = list(used)
    if predictor == "perfect":
        return {"router": right}
    rng.shuffle(right)
    wrong = iter(rng.permutation([e for e in range(experts) if e not in used]).tolist())
    k = len(right)
    # Precision falls linearly over the ranks so that its mean over the first k is the recall.
    high = min(1.0, recall + 0.2)
    low = 2 * recall - high
    ranked: list[int] = []
    for rank in range(min(ranks, experts)):
        chance = max(0.05, high + (low - high) * rank / max(1, k - 1))
        hit = bool(right) and rng.random() < chance
        guess = right.pop() if hit else next(wrong, None)
        if guess is None:
            break
        ranked.append(guess)
    return {"router": ranked}
