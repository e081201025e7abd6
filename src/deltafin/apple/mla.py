"""Gated multi-head latent attention without positions, in the absorbed form (spec 3.6)."""

from __future__ import annotations

import mlx.core as mx

from deltafin.apple.ops import Linear
from deltafin.apple.state import LatentCache
from deltafin.apple.weights import MlaWeights
from deltafin.checkpoint.config import K3Config


def forward(config: K3Config, w: MlaWeights, x: mx.array, cache: LatentCache, start: int, linear: Linear) -> mx.array:
    """One MLA sublayer over rows at positions ``start`` … ``start + T - 1``; writes their latents into the cache.

    Every row is attended for itself, over exactly the positions it may see: a mask over more of them would change the
    order of sums, and with it the last bits. Prefill and decode both use the absorbed form for the same reason.

    Args:
        x: normalised input [T, hidden].

    Returns:
        [T, hidden] in the dtype of ``x``.
    """
    count, heads, nope, lora = len(x), config.mla_heads, config.nope_dim, config.kv_lora
    eps, dtype = config.numeric.latent_norm_eps, x.dtype
    q = linear(mx.fast.rms_norm(linear(x, w.q_a), w.q_a_norm, eps), w.q_b)
    q = q.reshape(count, heads, 1, nope + config.rope_dim)
    kv = linear(x, w.kv_a)
    cache.write(start, mx.concatenate([mx.fast.rms_norm(kv[:, :lora], w.kv_a_norm, eps), kv[:, lora:]], axis=1))
    # Rows are a batch here, and heads too, so that each product is of one row.
    absorbed = mx.concatenate([q[..., :nope] @ w.key, q[..., nope:]], axis=-1)[:, :, 0]
    scale = (nope + config.rope_dim) ** -0.5
    mixed = []
    for t in range(count):
        keys = cache.rows[: start + t + 1]
        scores = (absorbed[t] @ keys.T).astype(mx.float32) * scale
        share = mx.softmax(scores, axis=-1, precise=True).astype(dtype)
        # Over whole rows, position part included: a narrower window of the cache would be copied first.
        mixed.append((share @ keys)[:, :lora])
    latent = mx.stack(mixed)[:, :, None]
    out = (latent @ w.value.swapaxes(-1, -2)).reshape(count, heads * config.v_dim)
    gated = out * mx.sigmoid(linear(x, w.gate))
    return linear(gated, w.out)
