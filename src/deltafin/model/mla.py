"""Gated multi-head latent attention without positions, in the absorbed form."""

from __future__ import annotations

import torch

from deltafin import kernels
from deltafin.checkpoint.config import K3Config
from deltafin.model.state import LatentCache
from deltafin.model.weights import MlaWeights


def forward(config: K3Config, w: MlaWeights, x: torch.Tensor, cache: LatentCache, start: int) -> torch.Tensor:
    """One MLA sublayer over rows at positions ``start`` … ``start + T - 1``; writes their latents into the cache.

    The absorbed form scores queries against the cached latents directly. Prefill and decode both use it: two forms
    would round differently, and a row must not depend on how many rows came with it.

    Args:
        x: normalised input, fp32 [T, hidden].

    Returns:
        fp32 [T, hidden].
    """
    rows, eps = len(x), config.numeric.latent_norm_eps
    q = kernels.linear(kernels.rmsnorm(kernels.linear(x, w.q_a), w.q_a_norm, eps), w.q_b)
    kv = kernels.linear(x, w.kv_a)
    fresh = cache.rows[start : start + rows]
    fresh[:, : config.kv_lora] = kernels.rmsnorm(kv[:, : config.kv_lora].contiguous(), w.kv_a_norm, eps)
    fresh[:, config.kv_lora :] = kv[:, config.kv_lora :]
    out = kernels.mla_attention(
        q,
        w.kv_b,
        cache.rows,
        start,
        kernels.linear(x, w.gate),
        heads=config.mla_heads,
        nope=config.nope_dim,
        rope=config.rope_dim,
        v_dim=config.v_dim,
        kv_lora=config.kv_lora,
        scale=(config.nope_dim + config.rope_dim) ** -0.5,
    )
    return kernels.linear(out, w.out)
