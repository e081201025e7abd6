"""The two attentions of K3: KDA (recurrent) and MLA (latent cache).

Results have the same bits whatever the number of rows, threads or chunks and whatever the instruction set (see
``docs/kernels.md``). Tensors are on the CPU, activations fp32. Unless stated otherwise rows may be strided and numbers
within a row must be adjacent. ``out`` is filled and returned when given. Wrong shapes or dtypes raise ValueError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltafin.kernels.arguments import BF16, F32, contiguous, failure, output, rows_of
from deltafin.kernels.machine import _native


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
    """Everything between KDA's projections and its recurrence (spec 3.5, steps 2 to 5).

    Convolution over K rows and SiLU; q and k divided by ``sqrt(Σ z² + qk_eps)`` per head, q also by ``sqrt(D)``;
    ``decay = exp(lower_bound * sigmoid(exp(a_log[h]) * (r + dt_bias)))``; ``beta = sigmoid(b)``. Inputs are not
    modified; carrying the last K-1 raw rows over to the next call is the caller's.

    Args:
        qkv: fp32 [T, 3, H*D] (or [T, 3*H*D]), raw projections q, k, v; rows may be strided.
        history: fp32 [K-1, 3, H*D], raw rows before these, oldest first, zero where there are none.
        conv_w: fp32 [3, H*D, K]; tap K-1 multiplies the current row. K is 1 to 16.
        r: fp32 [T, H*D], the decay projection without its bias.
        dt_bias: fp32 [H*D].
        a_log: fp32 [≥H], one entry per head.
        b: fp32 [T, H].
        heads: H.
        head_dim: D.
        lower_bound: of the log decay, negative.
        qk_eps: see above.

    Returns:
        q, k, v, decay: fp32 [T, H*D]; beta: fp32 [T, H].
    """
    width = heads * head_dim
    rows = qkv.shape[0]
    taps = conv_w.shape[-1]
    flat = qkv.flatten(1) if qkv.dim() == 3 else qkv
    if not 1 <= taps <= 16:
        raise failure("conv_w", conv_w, "1 to 16 taps")
    if r.shape[0] != rows or b.shape[0] != rows:
        raise ValueError(f"qkv has {rows} rows, r {r.shape[0]}, b {b.shape[0]}")
    if a_log.dtype is not F32 or a_log.dim() != 1 or a_log.shape[0] < heads or a_log.stride(0) != 1:
        raise failure("a_log", a_log, f"fp32 [≥{heads}]")
    q, k, v, decay = (torch.empty(rows, width) for _ in range(4))
    beta = torch.empty(rows, heads)
    _native.kda_prepare(
        rows_of("qkv", flat, 3 * width),
        flat.stride(0),
        contiguous("history", history, F32, taps - 1, 3, width),
        contiguous("conv_w", conv_w, F32, 3, width, taps),
        rows_of("r", r, width),
        r.stride(0),
        contiguous("dt_bias", dt_bias, F32, width),
        a_log.data_ptr(),
        rows_of("b", b, heads),
        b.stride(0),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        decay.data_ptr(),
        beta.data_ptr(),
        rows,
        heads,
        head_dim,
        taps,
        lower_bound,
        qk_eps,
    )
    return q, k, v, decay, beta


def kda_recurrence(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    out: Tensor | None,
) -> None:
    """The gated delta rule, strictly row by row (spec 3.5, step 6).

    Per head and row: ``S ← diag(decay) S``, ``u = beta (v - Sᵀ k)``, ``S ← S + k uᵀ``, ``o = Sᵀ q``.

    Args:
        q: fp32 [T, H*D] contiguous, as the others; None together with ``out`` to advance the state only.
        k: fp32 [T, H*D].
        v: fp32 [T, H*D].
        decay: fp32 [T, H*D].
        beta: fp32 [T, H].
        state_in: fp32 [H, D, D] as [head, key, value].
        state_out: like ``state_in``; the same tensor, or another one that does not overlap it.
        out: fp32 [T, H*D] contiguous, filled.
    """
    rows, width = k.shape
    heads, d, _ = state_in.shape
    if (q is None) != (out is None):
        raise ValueError("q and out must both be given or both be None")
    if rows == 0:
        if state_out.data_ptr() != state_in.data_ptr():
            state_out.copy_(state_in)
        return
    _native.kda_recurrence(
        0 if q is None else contiguous("q", q, F32, rows, width),
        contiguous("k", k, F32, rows, heads * d),
        contiguous("v", v, F32, rows, width),
        contiguous("decay", decay, F32, rows, width),
        contiguous("beta", beta, F32, rows, heads),
        contiguous("state_in", state_in, F32, heads, d, d),
        contiguous("state_out", state_out, F32, heads, d, d),
        0 if out is None else contiguous("out", out, F32, rows, width),
        rows,
        heads,
        d,
    )


def kda_output(
    o: Tensor,
    gate: Tensor,
    norm_w: Tensor,
    eps: float,
    *,
    heads: int,
    head_dim: int,
    out: Tensor | None = None,
) -> Tensor:
    """RMS norm per head times ``sigmoid(gate)`` (spec 3.5, step 7).

    Args:
        o: fp32 [T, H*D].
        gate: fp32 [T, H*D].
        norm_w: fp32 [D], shared by the heads.
        eps: added to the mean square.
        heads: H.
        head_dim: D.
        out: fp32 [T, H*D], may be ``o``.

    Returns:
        fp32 [T, H*D].
    """
    rows, width = o.shape[0], heads * head_dim
    op, gp = rows_of("o", o, width), rows_of("gate", gate, width)
    if gate.shape[0] != rows:
        raise failure("gate", gate, f"fp32 [{rows}, {width}]")
    wp = contiguous("norm_w", norm_w, F32, head_dim)
    out = output(out, rows, width)
    _native.kda_output(
        op, o.stride(0), gp, gate.stride(0), wp, out.data_ptr(), out.stride(0), rows, heads, head_dim, eps
    )
    return out


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
    out: Tensor | None = None,
) -> Tensor:
    """Causal latent attention in absorbed form, with the output gate (spec 3.6, steps 3 to 5).

    Row t attends to cache rows 0..start+t. The softmax runs online over tiles of 64 cache rows counted from row 0, so
    memory does not grow with the context and a row's bits depend on its position alone.

    Args:
        q: fp32 [T, H*(nope+rope)].
        kv_b: bf16 [H*(nope+v_dim), kv_lora]; per head the rows of k, then those of v.
        cache: fp32 [≥start+T, kv_lora+rope]: the normed latent, then the shared position part.
        start: position of the first row.
        gate: fp32 [T, H*v_dim], the output is multiplied by its sigmoid; or None.
        heads: H.
        nope: query numbers per head that meet the latent.
        rope: query numbers per head that meet the position part.
        v_dim: values per head.
        kv_lora: width of the latent.
        scale: of the scores.
        out: fp32 [T, H*v_dim].

    Returns:
        fp32 [T, H*v_dim].
    """
    rows, width = q.shape[0], heads * v_dim
    qp, cp = rows_of("q", q, heads * (nope + rope)), rows_of("cache", cache, kv_lora + rope)
    wp = contiguous("kv_b", kv_b, BF16, heads * (nope + v_dim), kv_lora)
    if start < 0 or start + rows > cache.shape[0]:
        raise ValueError(f"positions {start}..{start + rows - 1} in a cache of {cache.shape[0]} rows")
    gp, ldg = 0, 0
    if gate is not None:
        gp, ldg = rows_of("gate", gate, width), gate.stride(0)
        if gate.shape[0] != rows:
            raise failure("gate", gate, f"fp32 [{rows}, {width}]")
    out = output(out, rows, width)
    _native.mla_attention(
        qp,
        q.stride(0),
        wp,
        cp,
        cache.stride(0),
        gp,
        ldg,
        out.data_ptr(),
        out.stride(0),
        rows,
        start,
        heads,
        nope,
        rope,
        v_dim,
        kv_lora,
        scale,
    )
    return out
