"""Products with bf16 matrices, norms, activations.

Results have the same bits whatever the number of rows, threads or chunks and whatever the instruction set (see
``docs/kernels.md``). Tensors are on the CPU, activations fp32. Unless stated otherwise rows may be strided and numbers
within a row must be adjacent. ``out`` is filled and returned when given. Wrong shapes or dtypes raise ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deltafin.kernels.arguments import F32, contiguous, failure, matrix, norm_weight, output, rows_of
from deltafin.kernels.machine import _native


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
    xp, wp = rows_of("x", x, k), matrix("w", w, k)
    out = output(out, rows, n)
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
    xp, (wp, is_bf16) = rows_of("x", x, d), norm_weight(w, d)
    out = output(out, rows, d)
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
    addresses = [rows_of("source", s, d) for s in sources]
    if any(s.shape[0] != rows for s in sources):
        raise ValueError("sources differ in their number of rows")
    wp, is_bf16 = norm_weight(norm_w, d)
    out = output(out, rows, d)
    _native.attnres_mix_norm(
        addresses,
        [s.stride(0) for s in sources],
        contiguous("score_w", score_w, F32, d),
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
    gp, up_ = rows_of("gate", gate, n), rows_of("up", up, n)
    if up.shape[0] != rows:
        raise failure("up", up, f"fp32 [{rows}, {n}]")
    out = output(out, rows, n)
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
    xp = rows_of("x", x, k)
    gp, up_, dp = matrix("gate_w", gate_w, k), matrix("up_w", up_w, k), matrix("down_w", down_w, hidden)
    out = output(out, rows, n)
    _native.gated_mlp(
        xp, x.stride(0), gp, up_, dp, out.data_ptr(), out.stride(0), rows, k, hidden, n, beta, linear_beta
    )
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
    _native.unary(contiguous("x", x, F32, *x.shape), out.data_ptr(), x.numel(), _UNARY[name])
    return out
