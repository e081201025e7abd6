"""Kimi Delta Attention: short convolutions, per-channel decay, delta-rule state, gated output (spec 3.5)."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from deltafin.apple.mlx_lm_models import model_file
from deltafin.apple.ops import Linear, on_gpu, start
from deltafin.apple.state import KdaRows, KdaState
from deltafin.apple.weights import KdaWeights
from deltafin.checkpoint.config import K3Config
from deltafin.errors import MachineError

_UNCOMPUTED = 8
"""Rows of the recurrence written down before they are submitted."""


def forward(
    config: K3Config,
    w: KdaWeights,
    x: mx.array,
    state: KdaState,
    linear: Linear,
    *,
    first: bool,
    keep_rows: bool,
) -> mx.array:
    """One KDA sublayer over the next rows of a pass.

    Args:
        x: normalised input [T, hidden].
        state: the layer's state; ``ahead``, ``raw`` and ``rows`` are written, the committed part is not.
        first: whether these are the pass's first rows (start from the committed state, else continue from ``ahead``).
        keep_rows: keep the recurrence's inputs so that fewer rows than computed can be committed.

    Returns:
        [T, hidden] in the dtype of ``x``.
    """
    count, heads, dim, width = len(x), config.kda_heads, config.kda_head_dim, config.kda_width
    taps, dtype = config.conv_kernel, x.dtype
    raw = mx.concatenate([linear(x, w.q), linear(x, w.k), linear(x, w.v)], axis=1)
    history = state.history
    if not first:
        assert state.raw is not None
        history = mx.concatenate([history, state.raw])[1 - taps :]
    z = mx.concatenate([history, raw]).astype(mx.float32)
    windows = mx.as_strided(z, (count, taps, 3 * width), (3 * width, 3 * width, 1))
    y = (windows * w.conv).sum(axis=1)
    y = (y * mx.sigmoid(y)).astype(dtype).astype(mx.float32)
    # rms_norm divides by the root of the mean; q and k are divided by the root of the sum, and q by that of D again.
    qk = mx.fast.rms_norm(y[:, : 2 * width].reshape(count, 2, heads, dim), None, config.numeric.qk_norm_eps / dim)
    q, k = qk[:, 0] * (1 / dim), qk[:, 1] * dim**-0.5
    v = y[:, 2 * width :].reshape(count, heads, dim)
    r = linear(linear(x, w.f_a), w.f_b).astype(mx.float32)
    decay = mx.exp(config.gate_lower_bound * mx.sigmoid(w.rate * (r + w.bias))).reshape(count, heads, dim)
    beta = linear(x, w.beta).astype(mx.float32).reshape(count, heads, 1)
    rows = KdaRows(k, v, decay, beta)
    earlier, before = (None, None) if first else (state.raw, state.rows)
    begin = state.recurrent if first or state.ahead is None else state.ahead
    out, state.ahead = recurrence(q, rows, begin)
    if keep_rows:
        state.raw, state.rows = raw, rows
        if before is not None and earlier is not None:
            state.raw = mx.concatenate([earlier, raw])
            state.rows = KdaRows(*(mx.concatenate(list(pair)) for pair in zip(before, rows, strict=True)))
    else:
        whole = raw if earlier is None else mx.concatenate([earlier, raw])
        # Of a long pass taken, not cut out: a window would keep the rows of the whole pass alive.
        first_kept = max(0, len(whole) - taps + 1)
        short = len(whole) <= _UNCOMPUTED
        state.raw, state.rows = whole[first_kept:] if short else whole[mx.arange(first_kept, len(whole))], None
    gate = linear(x, w.gate).astype(mx.float32).reshape(count, heads, dim)
    normed = mx.fast.rms_norm(out, w.out_norm, config.rms_eps) * mx.sigmoid(gate)
    return linear(normed.reshape(count, width).astype(dtype), w.out)


def recurrence(q: mx.array | None, rows: KdaRows, state: mx.array) -> tuple[mx.array, mx.array]:
    """The delta rule row by row (spec 3.5, step 6), so that a row's bits do not depend on how a pass is cut.

    Args:
        q: fp32 [T, H, D]; None when only the state is wanted.
        state: fp32 [H, value, key].

    Returns:
        (outputs fp32 [T, H, D], meaningless without ``q``; state after the rows).
    """
    kernel = gpu_kernel()
    if kernel is None:
        return by_operations(q, rows, state)
    beta = mx.sigmoid(rows.beta[..., 0])
    asked = rows.k if q is None else q
    out, after = kernel(asked[None], rows.k[None], rows.v[None], rows.decay[None], beta[None], state[None])
    return out[0], after[0]


def by_operations(q: mx.array | None, rows: KdaRows, state: mx.array) -> tuple[mx.array, mx.array]:
    """``recurrence`` as single operations."""
    outputs = []
    keys, decays = rows.k[:, :, None], rows.decay[:, :, None]
    queries = None if q is None else q[:, :, None]
    for t in range(len(keys)):
        k = keys[t]
        # Sigmoid row by row: a vector unit treats the last few numbers of an array differently, and so few heads
        # as the miniature has would be such a rest in one case and not in another.
        beta = mx.sigmoid(rows.beta[t])
        state = state * decays[t]
        u = (rows.v[t] - (state * k).sum(axis=-1)) * beta
        state = state + u[..., None] * k
        if queries is not None:
            outputs.append((state * queries[t]).sum(axis=-1))
            if t % _UNCOMPUTED == _UNCOMPUTED - 1:
                # MLX begins with what was written down last: it would keep the state of every row until its output is
                # computed, and a released layer's state has 6.3 MB.
                start([*outputs[-_UNCOMPUTED:], state])
    return (mx.stack(outputs) if outputs else mx.zeros((0,))), state


@cache
def gpu_kernel() -> Any | None:
    """``mlx-lm``'s Metal kernel of the recurrence, which runs the rows of a pass in one call and in their order.

    None on the CPU, without ``mlx-lm``, and where the kernel does not give what the formula gives; the recurrence then
    consists of single operations.
    """
    if not on_gpu():
        return None
    try:
        kernel = model_file("gated_delta").gated_delta_kernel
        key = mx.random.split(mx.random.key(1), 4)
        q, k, v, decay = (mx.random.normal((2, 2, 32), key=key[i]) for i in range(4))
        rows = KdaRows(k * 0.2, v, mx.exp(-mx.abs(decay)), mx.zeros((2, 2, 1)))
        state = mx.ones((2, 32, 32))
        beta = mx.sigmoid(rows.beta[..., 0])
        got = kernel(q[None], rows.k[None], rows.v[None], rows.decay[None], beta[None], state[None])
        wanted = by_operations(q, rows, state)
        same = all(bool(mx.allclose(a[0], b, rtol=1e-3, atol=1e-3).item()) for a, b in zip(got, wanted, strict=True))
    except (MachineError, AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return kernel if same else None


def replay(state: mx.array, rows: KdaRows, count: int) -> mx.array:
    """The state after the first ``count`` rows."""
    part = KdaRows(rows.k[:count], rows.v[:count], rows.decay[:count], rows.beta[:count])
    return recurrence(None, part, state)[1]
