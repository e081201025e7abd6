"""What a draft proposes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted ids in order, and for each the estimated probability that it is accepted given the earlier ones are."""

    tokens: tuple[int, ...]
    confidence: tuple[float, ...]
