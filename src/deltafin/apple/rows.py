"""Every row's bits independent of the rows beside it, on whatever kernels MLX chooses.

MLX may multiply one row with another kernel, and so in another order of sums, than eight. Which it does is measured at
start-up (``probe``), on this machine and in the model's shapes, and the cheapest way that keeps rows apart is taken:

* ``together``: products of any number of rows are the same bits as products of one (MLX's CPU kernels).
* ``tiles``: a product is always one of ``TILE`` rows, filled up with zeros; the same kernel for one row and for eight.
* ``alone``: all dense work is done one row at a time; the same calls as for a single row, whatever the machine.

Routed experts need no such care: the gather product treats every (row, expert) pair alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import mlx.core as mx

Mode = Literal["together", "tiles", "alone"]
MODES: tuple[Mode, ...] = ("together", "tiles", "alone")
"""From the cheapest on."""
TILE = 8


def linear_for(mode: Mode) -> Callable[[mx.array, mx.array], mx.array]:
    """The product x·wᵀ that keeps rows apart; see ``ops.Linear``."""
    return in_tiles if mode == "tiles" else plain


def plain(x: mx.array, w: mx.array) -> mx.array:
    """x·wᵀ as MLX computes it."""
    return x @ w.T


def in_tiles(x: mx.array, w: mx.array) -> mx.array:
    """x·wᵀ in products of exactly ``TILE`` rows."""
    count = len(x)
    rest = -count % TILE
    if rest:
        x = mx.concatenate([x, mx.zeros((rest, x.shape[1]), dtype=x.dtype)])
    parts = [x[i : i + TILE] @ w.T for i in range(0, count + rest, TILE)]
    out = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return out[:count] if rest else out
