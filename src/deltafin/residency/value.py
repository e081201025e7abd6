"""What memory for experts is worth, estimated from how unevenly they are used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def hit_curve(counts: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Share of uses covered by the n most used experts, for n = 0 … all; zeros when nothing is known.

    Args:
        counts: use counts of any shape.
    """
    ordered = np.sort(counts.reshape(-1).astype(np.float64))[::-1]
    total = ordered.sum()
    covered = np.concatenate([[0.0], np.cumsum(ordered)])
    return covered / total if total else covered


def predicted_hit_rate(counts: npt.NDArray[np.floating], frames: int) -> float:
    """Hit rate of keeping the ``frames`` most used experts for ever, which the tier should reach in the long run."""
    curve = hit_curve(counts)
    return float(curve[min(max(frames, 0), len(curve) - 1)])


def seconds_saved_per_gib(
    counts: npt.NDArray[np.floating], frames: int, *, frame_bytes: int, uses_per_token: int, bytes_per_s: float
) -> float:
    """Reading time per token that one more GiB for experts would save beside ``frames`` of them.

    Args:
        counts: long-run use counts.
        frame_bytes: one expert.
        uses_per_token: routed experts of a token, all layers.
        bytes_per_s: of all drives together.
    """
    more = (1 << 30) / frame_bytes
    gained = predicted_hit_rate(counts, frames + round(more)) - predicted_hit_rate(counts, frames)
    return gained * uses_per_token * frame_bytes / bytes_per_s
