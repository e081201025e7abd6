"""The native kernels with tensors in and out: checks shapes, passes addresses.

Every function fixes the order of floating-point operations of each output element, so results have the same bits
whatever the number of rows, threads or chunks and whatever the instruction set (see ``docs/kernels.md``). Tensors are
on the CPU, activations fp32. Unless stated otherwise rows may be strided and numbers within a row must be adjacent.
``out`` is filled and returned when given. Wrong shapes or dtypes raise ValueError: they are defects of the caller.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from deltafin.errors import MachineError
from deltafin.kernels.layout import ExpertLayout

try:
    from deltafin.kernels import _native
except ImportError as e:
    raise MachineError(
        f"the native kernels are not built ({e})",
        remedy="install a C++17 compiler and run `pip install .` in the source folder",
    ) from None

_F32, _BF16, _U8, _I32 = torch.float32, torch.bfloat16, torch.uint8, torch.int32


# ---- threads and instruction sets ------------------------------------------------------------------------------------


def set_threads(n: int) -> None:
    """Uses ``n`` threads, the caller included. At start: as many as this process may run on.

    Raises:
        ValueError: ``n`` is not in 1..1024.
    """
    if not 1 <= n <= 1024:
        raise ValueError(f"{n} threads")
    _native.set_threads(n)


def threads() -> int:
    """Threads in use, the caller included."""
    return _native.threads()


def isa() -> str:
    """Instruction set in use: ``avx512``, ``avx2``, ``neon`` or ``portable``."""
    return _native.isa()


def available_isas() -> tuple[str, ...]:
    """Instruction sets this machine and build can run, fastest first."""
    return _native.available_isas()


def select_isa(name: str) -> None:
    """Uses one instruction set from now on (the environment variable ``K3_ISA`` does so at start).

    Raises:
        MachineError: ``name`` is not among ``available_isas()``.
    """
    if not _native.select_isa(name):
        raise MachineError(
            f"instruction set {name!r} is not available here",
            remedy=f"choose one of {', '.join(available_isas())} or leave K3_ISA unset",
        )


if os.environ.get("K3_ISA"):
    select_isa(os.environ["K3_ISA"])


# ---- checks ----------------------------------------------------------------------------------------------------------


def _fail(name: str, t: Tensor, wanted: str) -> ValueError:
    return ValueError(f"{name} is {t.dtype} {list(t.shape)} stride {list(t.stride())} on {t.device}, not {wanted}")


def _rows(name: str, t: Tensor, cols: int) -> int:
    """Address of an fp32 [rows, cols] tensor with adjacent columns."""
    if t.dtype is not _F32 or t.dim() != 2 or t.shape[1] != cols or t.stride(1) != 1 or not t.is_cpu:
        raise _fail(name, t, f"fp32 [rows, {cols}] with adjacent columns")
    return t.data_ptr()


def _dense(name: str, t: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Address of a contiguous tensor of exactly this dtype and shape."""
    if t.dtype is not dtype or t.shape != shape or not t.is_contiguous() or not t.is_cpu:
        raise _fail(name, t, f"contiguous {dtype} {list(shape)}")
    return t.data_ptr()


def _norm_weight(t: Tensor, width: int) -> tuple[int, bool]:
    is_bf16 = t.dtype is _BF16
    return _dense("norm weight", t, _BF16 if is_bf16 else _F32, width), is_bf16


def _out(out: Tensor | None, rows: int, cols: int) -> Tensor:
    if out is None:
        return torch.empty(rows, cols)
    if out.shape[0] != rows:
        raise _fail("out", out, f"fp32 [{rows}, {cols}]")
    _rows("out", out, cols)
    return out


def _matrix(name: str, w: Tensor, cols: int) -> int:
    if w.dtype is not _BF16 or w.dim() != 2 or w.shape[1] != cols or not w.is_contiguous() or not w.is_cpu:
        raise _fail(name, w, f"contiguous bf16 [outputs, {cols}]")
    return w.data_ptr()


# ---- dense layers ----------------------------------------------------------------------------------------------------


def linear(x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """``x @ w.T``.

    Args:
        x: fp32 [T, K].
        w: bf16 [N, K], contiguous.
        out: fp32 [T, N].

    Returns:
        fp32 [T, N].
    """
    rows, k = x.shape
    n = w.shape[0]
    xp, wp = _rows("x", x, k), _matrix("w", w, k)
    out = _out(out, rows, n)
    _native.linear(xp, x.stride(0), wp, out.data_ptr(), out.stride(0), rows, k, n)
    return out


def rmsnorm(x: Tensor, w: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * w`` over the last axis (spec 3.2).

    Args:
        x: fp32 [T, D].
        w: bf16 or fp32 [D].
        eps: added to the mean square.
        out: fp32 [T, D], may be ``x``.

    Returns:
        fp32 [T, D].
    """
    rows, d = x.shape
    xp, (wp, is_bf16) = _rows("x", x, d), _norm_weight(w, d)
    out = _out(out, rows, d)
    _native.rmsnorm(xp, x.stride(0), wp, is_bf16, out.data_ptr(), out.stride(0), rows, d, eps)
    return out


def attnres_mix_norm(
    sources: Sequence[Tensor], score_w: Tensor, norm_w: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """Attention-residual mixture followed by the sublayer's RMS norm (spec 3.3).

    Per row ``s_i = Σ V_i · score_w / sqrt(mean V_i² + eps)``, ``p = softmax(s)``, ``h = Σ p_i V_i`` with i ascending,
    then ``rmsnorm(h, norm_w, eps)``. With one source h is that source exactly.

    Args:
        sources: m ≥ 1 tensors V_i, fp32 [T, D]: the bank's rows, then the accumulator.
        score_w: fp32 [D], the product ``res_norm.weight * res_proj.weight``.
        norm_w: bf16 or fp32 [D].
        eps: of both norms.
        out: fp32 [T, D], not one of the sources.

    Returns:
        fp32 [T, D].
    """
    rows, d = sources[0].shape
    addresses = [_rows("source", s, d) for s in sources]
    if any(s.shape[0] != rows for s in sources):
        raise ValueError("sources differ in their number of rows")
    wp, is_bf16 = _norm_weight(norm_w, d)
    out = _out(out, rows, d)
    _native.attnres_mix_norm(
        addresses,
        [s.stride(0) for s in sources],
        _dense("score_w", score_w, _F32, d),
        wp,
        is_bf16,
        out.data_ptr(),
        out.stride(0),
        rows,
        d,
        eps,
    )
    return out


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float, out: Tensor | None = None) -> Tensor:
    """``beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta)`` (spec 3.4).

    Args:
        gate: g, fp32 [T, I].
        up: u, fp32 [T, I].
        beta: soft limit of the gate branch.
        linear_beta: soft limit of the linear branch.
        out: fp32 [T, I], may be ``gate`` or ``up``.

    Returns:
        fp32 [T, I].
    """
    rows, n = gate.shape
    gp, up_ = _rows("gate", gate, n), _rows("up", up, n)
    if up.shape[0] != rows:
        raise _fail("up", up, f"fp32 [{rows}, {n}]")
    out = _out(out, rows, n)
    _native.situ(gp, gate.stride(0), up_, up.stride(0), out.data_ptr(), out.stride(0), rows, n, beta, linear_beta)
    return out


def gated_mlp(
    x: Tensor,
    gate_w: Tensor,
    up_w: Tensor,
    down_w: Tensor,
    beta: float,
    linear_beta: float,
    out: Tensor | None = None,
) -> Tensor:
    """``down(situ(gate x, up x))``, the bits of the three steps done separately (spec 3.4).

    Args:
        x: fp32 [T, K].
        gate_w: bf16 [I, K].
        up_w: bf16 [I, K].
        down_w: bf16 [N, I].
        beta: see :func:`situ`.
        linear_beta: see :func:`situ`.
        out: fp32 [T, N].

    Returns:
        fp32 [T, N].
    """
    rows, k = x.shape
    n, hidden = down_w.shape
    if gate_w.shape[0] != hidden or up_w.shape[0] != hidden:
        raise ValueError(f"gate {list(gate_w.shape)}, up {list(up_w.shape)} and down {list(down_w.shape)} do not match")
    xp = _rows("x", x, k)
    gp, up_, dp = _matrix("gate_w", gate_w, k), _matrix("up_w", up_w, k), _matrix("down_w", down_w, hidden)
    out = _out(out, rows, n)
    _native.gated_mlp(
        xp, x.stride(0), gp, up_, dp, out.data_ptr(), out.stride(0), rows, k, hidden, n, beta, linear_beta
    )
    return out


# ---- KDA -------------------------------------------------------------------------------------------------------------


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
        raise _fail("conv_w", conv_w, "1 to 16 taps")
    if r.shape[0] != rows or b.shape[0] != rows:
        raise ValueError(f"qkv has {rows} rows, r {r.shape[0]}, b {b.shape[0]}")
    if a_log.dtype is not _F32 or a_log.dim() != 1 or a_log.shape[0] < heads or a_log.stride(0) != 1:
        raise _fail("a_log", a_log, f"fp32 [≥{heads}]")
    q, k, v, decay = (torch.empty(rows, width) for _ in range(4))
    beta = torch.empty(rows, heads)
    _native.kda_prepare(
        _rows("qkv", flat, 3 * width),
        flat.stride(0),
        _dense("history", history, _F32, taps - 1, 3, width),
        _dense("conv_w", conv_w, _F32, 3, width, taps),
        _rows("r", r, width),
        r.stride(0),
        _dense("dt_bias", dt_bias, _F32, width),
        a_log.data_ptr(),
        _rows("b", b, heads),
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
        0 if q is None else _dense("q", q, _F32, rows, width),
        _dense("k", k, _F32, rows, heads * d),
        _dense("v", v, _F32, rows, width),
        _dense("decay", decay, _F32, rows, width),
        _dense("beta", beta, _F32, rows, heads),
        _dense("state_in", state_in, _F32, heads, d, d),
        _dense("state_out", state_out, _F32, heads, d, d),
        0 if out is None else _dense("out", out, _F32, rows, width),
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
    op, gp = _rows("o", o, width), _rows("gate", gate, width)
    if gate.shape[0] != rows:
        raise _fail("gate", gate, f"fp32 [{rows}, {width}]")
    wp = _dense("norm_w", norm_w, _F32, head_dim)
    out = _out(out, rows, width)
    _native.kda_output(
        op, o.stride(0), gp, gate.stride(0), wp, out.data_ptr(), out.stride(0), rows, heads, head_dim, eps
    )
    return out


# ---- MLA -------------------------------------------------------------------------------------------------------------


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
    qp, cp = _rows("q", q, heads * (nope + rope)), _rows("cache", cache, kv_lora + rope)
    wp = _dense("kv_b", kv_b, _BF16, heads * (nope + v_dim), kv_lora)
    if start < 0 or start + rows > cache.shape[0]:
        raise ValueError(f"positions {start}..{start + rows - 1} in a cache of {cache.shape[0]} rows")
    gp, ldg = 0, 0
    if gate is not None:
        gp, ldg = _rows("gate", gate, width), gate.stride(0)
        if gate.shape[0] != rows:
            raise _fail("gate", gate, f"fp32 [{rows}, {width}]")
    out = _out(out, rows, width)
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


# ---- routed experts --------------------------------------------------------------------------------------------------


def router(
    logits: Tensor, bias: Tensor, k: int, *, renormalize: bool, scale: float, sum_eps: float
) -> tuple[Tensor, Tensor]:
    """Chooses experts by ``sigmoid(z) + bias`` (spec 3.7, step 1).

    Largest first, ties to the smaller id; NaN is chosen last. Weights are the unbiased sigmoids of the chosen, divided
    by (their sum in slot order + ``sum_eps``) when ``renormalize``, times ``scale``.

    Args:
        logits: z, fp32 [T, E].
        bias: fp32 [E].
        k: experts per row, 1..E.
        renormalize: see above.
        scale: see above.
        sum_eps: see above.

    Returns:
        ids: int32 [T, k]; weights: fp32 [T, k].
    """
    rows, experts = logits.shape
    if not 1 <= k <= experts:
        raise ValueError(f"{k} of {experts} experts")
    ids, weights = torch.empty(rows, k, dtype=_I32), torch.empty(rows, k)
    _native.router(
        _rows("logits", logits, experts),
        logits.stride(0),
        _dense("bias", bias, _F32, experts),
        ids.data_ptr(),
        weights.data_ptr(),
        rows,
        experts,
        k,
        renormalize,
        scale,
        sum_eps,
    )
    return ids, weights


def expert_forward(
    x: Tensor,
    blobs: Sequence[int],
    layout: ExpertLayout,
    row_splits: Tensor,
    rows: Tensor,
    slots: Tensor,
    out: Tensor,
    *,
    beta: float,
    linear_beta: float,
) -> None:
    """Runs experts on their rows straight from the released bytes (spec 3.7, step 3; 2.6).

    Expert e takes entries ``row_splits[e]..row_splits[e+1]``; for each entry i,
    ``out[slots[i]] = w2 · situ(w1 · x[rows[i]], w3 · x[rows[i]])``. One expert at a time or all at once, the bits are
    the same.

    Args:
        x: fp32 [T, latent].
        blobs: n addresses of expert blobs, ``layout.nbytes`` readable bytes each, any alignment, alive until return.
        layout: where the six tensors lie in a blob.
        row_splits: int32 [n+1], from 0, not decreasing.
        rows: int32 [R] with R = row_splits[n]; rows of ``x``.
        slots: int32 [R]; rows of ``out``, each at most once.
        out: fp32 [*, latent].
        beta: see :func:`situ`.
        linear_beta: see :func:`situ`.

    Raises:
        ValueError: a wrong shape, or an index out of range.
    """
    latent = layout.latent
    entries = rows.shape[0]
    splits = _dense("row_splits", row_splits, _I32, len(blobs) + 1)
    if int(row_splits[-1]) != entries:
        raise ValueError(f"row_splits end at {int(row_splits[-1])}, there are {entries} rows")
    _native.expert_forward(
        _rows("x", x, latent),
        x.stride(0),
        x.shape[0],
        blobs,
        latent,
        layout.intermediate,
        layout.w1_packed,
        layout.w1_scale,
        layout.w2_packed,
        layout.w2_scale,
        layout.w3_packed,
        layout.w3_scale,
        splits,
        _dense("rows", rows, _I32, entries),
        _dense("slots", slots, _I32, entries),
        _rows("out", out, latent),
        out.stride(0),
        out.shape[0],
        beta,
        linear_beta,
    )


def combine_norm(y: Tensor, weights: Tensor, norm_w: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """``rmsnorm(Σ_j weights[t, j] * y[t, j])``, summed in slot order (spec 3.7, step 4).

    Args:
        y: fp32 [T, k, latent], contiguous.
        weights: fp32 [T, k], contiguous.
        norm_w: bf16 or fp32 [latent].
        eps: of the norm.
        out: fp32 [T, latent].

    Returns:
        fp32 [T, latent].
    """
    rows, k, width = y.shape
    if k < 1:
        raise _fail("y", y, "fp32 [T, k ≥ 1, latent]")
    yp, ap = _dense("y", y, _F32, rows, k, width), _dense("weights", weights, _F32, rows, k)
    wp, is_bf16 = _norm_weight(norm_w, width)
    out = _out(out, rows, width)
    _native.combine_norm(yp, ap, k, wp, is_bf16, out.data_ptr(), out.stride(0), rows, width, eps)
    return out


def mxfp4_dequantize(packed: Tensor, scale: Tensor) -> Tensor:
    """Decodes MXFP4 exactly (spec 2.6); for tests and inspection, the products never store decoded weights.

    Args:
        packed: uint8 [R, C/2], low nibble first.
        scale: uint8 [R, C/32], E8M0; 255 gives NaN.

    Returns:
        fp32 [R, C].
    """
    rows, half = packed.shape
    cols = 2 * half
    if cols % 32:
        raise _fail("packed", packed, "uint8 [rows, a multiple of 16]")
    pp, sp = _dense("packed", packed, _U8, rows, half), _dense("scale", scale, _U8, rows, cols // 32)
    out = torch.empty(rows, cols)
    _native.mxfp4_dequantize(pp, sp, out.data_ptr(), rows, cols)
    return out


_UNARY = {"exp": 0, "sigmoid": 1, "tanh": 2, "silu": 3}


def unary(name: str, x: Tensor) -> Tensor:
    """One of the kernels' own elementary functions, for accuracy tests.

    Args:
        name: ``exp``, ``sigmoid``, ``tanh`` or ``silu``.
        x: fp32, contiguous, any shape.

    Returns:
        fp32, shaped like ``x``.
    """
    out = torch.empty_like(x)
    _native.unary(_dense("x", x, _F32, *x.shape), out.data_ptr(), x.numel(), _UNARY[name])
    return out
