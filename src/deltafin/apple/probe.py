"""Measures on this machine whether rows of a pass influence each other's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from deltafin.apple import kda, mla
from deltafin.apple.ops import Bank, Linear, gated
from deltafin.apple.rows import MODES, TILE, Mode, linear_for
from deltafin.apple.state import KdaState, LatentCache
from deltafin.apple.weights import KdaWeights, MlaWeights, MlpWeights, ResidualMix
from deltafin.checkpoint.config import NumericChoices

_MOST_OUTPUTS = 512
_COUNTS = (2, 3, TILE, 3 * TILE + 1)


def choose(shapes: Iterable[tuple[int, int]], activations: mx.Dtype) -> Mode:
    """The cheapest mode that keeps rows apart on the default device.

    Args:
        shapes: (out, in) of the model's matrices; kernels are chosen by shape.
    """
    wanted = sorted({(min(out, _MOST_OUTPUTS), width) for out, width in shapes})
    for mode in MODES[:-1]:
        linear = linear_for(mode)
        products = all(product_keeps_apart(linear, out, width, activations) for out, width in wanted)
        # In fp32 too, which hides nothing.
        if products and all(
            bool(mx.array_equal(together, alone).item())
            for dtype in {activations, mx.float32}
            for _, together, alone in sublayers(linear, dtype)
        ):
            return mode
    return MODES[-1]


def product_keeps_apart(linear: Linear, out: int, width: int, activations: mx.Dtype) -> bool:
    """Whether rows of wide products equal products of one row, bit for bit, in one shape."""
    most, half = max(_COUNTS), (width + 1) // 2
    keys = mx.random.split(mx.random.key(out * 31 + width), 3)
    x = mx.random.normal((most, half), key=keys[0]).astype(activations)
    w = mx.random.normal((out, half), key=keys[1]).astype(mx.bfloat16)
    # The other half takes everything back in another order: what remains are roundings, which no two orders of sums
    # share and which a result rounded to bf16 would otherwise hide.
    order = mx.random.permutation(half, key=keys[2])
    x = mx.concatenate([x, -x[:, order]], axis=1)[:, :width]
    w = mx.concatenate([w, w[:, order]], axis=1)[:, :width]
    single = mx.concatenate([linear(x[i : i + 1], w) for i in range(most)])
    return all(bool(mx.array_equal(linear(x[-n:], w), single[-n:]).item()) for n in _COUNTS)


def sublayers(linear: Linear, activations: mx.Dtype, count: int = 5) -> Iterable[tuple[str, mx.array, mx.array]]:
    """(name, rows computed together, the same rows one by one) of each kind of sublayer, in a small geometry."""
    hidden, heads, dim, taps = 64, 4, 32, 4
    keys = iter(mx.random.split(mx.random.key(11), 64))

    def rand(*shape: int, dtype: mx.Dtype = activations) -> mx.array:
        return (mx.random.normal(shape, key=next(keys)) * 0.2).astype(dtype)

    def compare(run: Callable[[slice], mx.array]) -> tuple[mx.array, mx.array]:
        return run(slice(0, count)), mx.concatenate([run(slice(t, t + 1)) for t in range(count)])

    x, width = rand(count, hidden), heads * dim
    mix = ResidualMix(rand(1, hidden, dtype=mx.float32), rand(hidden))
    bank = Bank(1e-5)
    for _ in range(3):
        bank.append(rand(count, hidden))
    yield "attention residual", *compare(lambda rows: bank.mixed(mix, x, rows))
    mlp = MlpWeights(rand(96, hidden), rand(96, hidden), rand(hidden, 96))
    yield "gated MLP", *compare(lambda rows: gated(mlp, x[rows], 4.0, 25.0, linear))

    config: Any = SimpleNamespace(
        kda_heads=heads, kda_head_dim=dim, kda_width=width, conv_kernel=taps, gate_lower_bound=-5.0, rms_eps=1e-5,
        mla_heads=heads, nope_dim=dim, rope_dim=16, v_dim=dim, kv_lora=48, numeric=NumericChoices(),
    )  # fmt: skip
    own = KdaWeights(
        q=rand(width, hidden), k=rand(width, hidden), v=rand(width, hidden), gate=rand(width, hidden),
        out=rand(hidden, width), f_a=rand(dim, hidden), f_b=rand(width, dim), beta=rand(heads, hidden),
        conv=rand(taps, 3 * width, dtype=mx.float32), rate=rand(width, dtype=mx.float32),
        bias=rand(width, dtype=mx.float32), out_norm=rand(dim, dtype=mx.float32),
    )  # fmt: skip
    start, history = rand(heads, dim, dim, dtype=mx.float32), rand(taps - 1, 3 * width)
    state = KdaState(start, history)

    def delta(rows: slice) -> mx.array:
        return kda.forward(config, own, x[rows], state, linear, first=rows.start == 0, keep_rows=False)

    yield "KDA", *compare(delta)
    latent = MlaWeights(
        rand(48, hidden), rand(48), rand(heads * (dim + 16), 48), rand(48 + 16, hidden), rand(48),
        rand(heads, dim, 48), rand(heads, dim, 48), rand(width, hidden), rand(hidden, width),
    )  # fmt: skip
    cache, before = LatentCache(64, activations), rand(7, 64)
    cache.write(0, before)
    yield "MLA", *compare(lambda rows: mla.forward(config, latent, x[rows], cache, 7 + rows.start, linear))
