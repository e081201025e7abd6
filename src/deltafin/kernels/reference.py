"""Every kernel again in plain PyTorch, written from the model's formulas without looking at the native code.

Computes in the dtype of its first floating-point input (pass float64 for a yardstick); other inputs are converted to
it. Slow and obvious on purpose. Shapes are those of the native functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deltafin.expert_layout import GROUP, ExpertLayout

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def linear(x: Tensor, w: Tensor) -> Tensor:
    """``x @ w.T``."""
    return x @ w.to(x.dtype).T


def rmsnorm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Spec 3.2."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w.to(x.dtype)


def attnres_mix_norm(sources: Sequence[Tensor], score_w: Tensor, norm_w: Tensor, eps: float) -> Tensor:
    """Spec 3.3, then the norm."""
    v = torch.stack(list(sources))  # [m, T, D]
    s = (v * score_w.to(v.dtype)).sum(-1) / torch.sqrt((v * v).mean(-1) + eps)
    p = torch.softmax(s, 0)
    return rmsnorm((p[..., None] * v).sum(0), norm_w, eps)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """Spec 3.4."""
    up = up.to(gate.dtype)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (linear_beta * torch.tanh(up / linear_beta))


def gated_mlp(x: Tensor, gate_w: Tensor, up_w: Tensor, down_w: Tensor, beta: float, linear_beta: float) -> Tensor:
    """``down(situ(gate x, up x))``."""
    return linear(situ(linear(x, gate_w), linear(x, up_w), beta, linear_beta), down_w)


def kda_prepare(
    qkv: Tensor,
    history: Tensor,
    conv_w: Tensor,
    r: Tensor,
    dt_bias: Tensor,
    a_log: Tensor,
    b: Tensor,
    *,
    heads: int,
    head_dim: int,
    lower_bound: float,
    qk_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Spec 3.5, steps 2 to 5."""
    dtype, rows, width = qkv.dtype, qkv.shape[0], heads * head_dim
    taps = conv_w.shape[-1]
    z = torch.cat([history.to(dtype), qkv.reshape(rows, 3, width)])  # [K-1+T, 3, H*D]
    windows = z.unfold(0, taps, 1)  # [T, 3, H*D, K]
    y = torch.nn.functional.silu((windows * conv_w.to(dtype)).sum(-1))

    def unit(v: Tensor) -> Tensor:
        v = v.reshape(rows, heads, head_dim)
        return (v / torch.sqrt((v * v).sum(-1, keepdim=True) + qk_eps)).reshape(rows, width)

    rate = torch.exp(a_log[:heads].to(dtype)).repeat_interleave(head_dim)
    decay = torch.exp(lower_bound * torch.sigmoid(rate * (r.to(dtype) + dt_bias.to(dtype))))
    return unit(y[:, 0]) * head_dim**-0.5, unit(y[:, 1]), y[:, 2], decay, torch.sigmoid(b.to(dtype))


def kda_recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Spec 3.5, step 6; returns outputs [T, H*D] and the new state, leaving ``state`` as it was."""
    heads, d, _ = state.shape
    rows = k.shape[0]
    q, k, v, decay = (t.reshape(rows, heads, d) for t in (q, k, v, decay))
    s = state.to(k.dtype).clone()
    out = torch.empty_like(v)
    for t in range(rows):
        s = s * decay[t][:, :, None]
        u = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", s, k[t]))
        s = s + k[t][:, :, None] * u[:, None, :]
        out[t] = torch.einsum("hkv,hk->hv", s, q[t])
    return out.reshape(rows, heads * d), s


def kda_output(o: Tensor, gate: Tensor, norm_w: Tensor, eps: float, *, heads: int, head_dim: int) -> Tensor:
    """Spec 3.5, step 7."""
    normed = rmsnorm(o.reshape(-1, heads, head_dim), norm_w, eps).reshape(o.shape)
    return normed * torch.sigmoid(gate.to(o.dtype))


def mla_attention(
    q: Tensor,
    kv_b: Tensor,
    cache: Tensor,
    start: int,
    gate: Tensor | None,
    *,
    heads: int,
    nope: int,
    rope: int,
    v_dim: int,
    kv_lora: int,
    scale: float,
) -> Tensor:
    """Spec 3.6, steps 3 to 5, in expanded form."""
    dtype, rows = q.dtype, q.shape[0]
    cache = cache[: start + rows].to(dtype)
    c, k_pe = cache[:, :kv_lora], cache[:, kv_lora:]
    kv = linear(c, kv_b).reshape(-1, heads, nope + v_dim)
    qh = q.reshape(rows, heads, nope + rope)
    scores = torch.einsum("thn,shn->hts", qh[..., :nope], kv[..., :nope])
    scores = (scores + torch.einsum("thr,sr->hts", qh[..., nope:], k_pe)) * scale
    future = torch.arange(start + rows)[None, :] > start + torch.arange(rows)[:, None]
    p = torch.softmax(scores.masked_fill(future, -torch.inf), -1)
    o = torch.einsum("hts,shv->thv", p, kv[..., nope:]).reshape(rows, heads * v_dim)
    return o if gate is None else o * torch.sigmoid(gate.to(dtype))


def router(
    logits: Tensor, bias: Tensor, k: int, *, renormalize: bool, scale: float, sum_eps: float
) -> tuple[Tensor, Tensor]:
    """Spec 3.7, step 1."""
    s = torch.sigmoid(logits)
    ids = torch.sort(s + bias.to(s.dtype), dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = s.gather(1, ids)
    if renormalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + sum_eps)
    return ids.to(torch.int32), chosen * scale


def mxfp4_dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Spec 2.6."""
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    value = torch.tensor(_E2M1, dtype=dtype)[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0).to(dtype)
    power = torch.exp2(scale.to(torch.float64) - 127)
    power[scale == 255] = torch.nan
    return value * power.to(dtype).repeat_interleave(GROUP, -1)


def expert(x: Tensor, blob: Tensor, layout: ExpertLayout, beta: float, linear_beta: float) -> Tensor:
    """One expert on rows ``x`` [T, latent]; ``blob`` is its bytes, uint8 [layout.nbytes] (spec 3.7, step 3)."""

    def matrix(packed: int, scale: int, rows: int, cols: int) -> Tensor:
        p = blob[packed : packed + rows * cols // 2].reshape(rows, cols // 2)
        s = blob[scale : scale + rows * cols // GROUP].reshape(rows, cols // GROUP)
        return mxfp4_dequantize(p, s, x.dtype)

    n, m = layout.latent, layout.intermediate
    return gated_mlp(
        x,
        matrix(layout.w1_packed, layout.w1_scale, m, n),
        matrix(layout.w3_packed, layout.w3_scale, m, n),
        matrix(layout.w2_packed, layout.w2_scale, n, m),
        beta,
        linear_beta,
    )


def combine_norm(y: Tensor, weights: Tensor, norm_w: Tensor, eps: float) -> Tensor:
    """Spec 3.7, step 4."""
    return rmsnorm((weights.to(y.dtype)[..., None] * y).sum(1), norm_w, eps)
