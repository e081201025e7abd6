"""Every row's bits independent of the rows beside it, on whatever kernels MLX chooses.

MLX may multiply one row with another kernel, and so in another order of sums, than eight. Which it does is measured at
start-up, on this machine and in the model's shapes, and the cheapest way that keeps rows apart is taken:

* ``together``: products of any number of rows are the same bits as products of one (MLX's CPU kernels).
* ``tiles``: a product is always one of ``TILE`` rows, filled up with zeros; the same kernel for one row and for eight.
* ``alone``: all dense work is done one row at a time; the same calls as for a single row, whatever the machine.

Routed experts need no such care: the gather product treats every (row, expert) pair alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import mlx.core as mx

Mode = Literal["together", "tiles", "alone"]
TILE = 8
_MOST_OUTPUTS = 512
_COUNTS = (2, 3, TILE, 3 * TILE + 1)


def linear_for(mode: Mode):  # type: ignore[no-untyped-def]
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


def choose(shapes: Iterable[tuple[int, int]], activations: mx.Dtype) -> Mode:
    """The cheapest mode in which products of all shapes (out, in) keep rows apart on the default device."""
    wanted = sorted({(min(out, _MOST_OUTPUTS), width) for out, width in shapes})
    for mode in ("together", "tiles"):
        if all(keeps_apart(mode, out, width, activations) for out, width in wanted):
            return mode
    return "alone"


def keeps_apart(mode: Mode, out: int, width: int, activations: mx.Dtype) -> bool:
    """Whether rows of wide products equal products of one row, bit for bit, in one shape."""
    linear, most = linear_for(mode), max(_COUNTS)
    key = mx.random.key(out * 31 + width)
    x = mx.random.normal((most, width), key=key).astype(activations)
    w = mx.random.normal((out, width), key=key).astype(mx.bfloat16)
    single = mx.concatenate([linear(x[i : i + 1], w) for i in range(most)])
    wide = [(linear(x[-n:], w), single[-n:]) for n in _COUNTS]
    return all(bool(mx.array_equal(a, b).item()) for a, b in wide)
