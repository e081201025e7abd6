"""Routed experts: choosing them, running them from their released bytes, adding them up.

Results have the same bits whatever the number of rows, threads or chunks and whatever the instruction set (see
``docs/kernels.md``). Tensors are on the CPU, activations fp32. Unless stated otherwise rows may be strided and numbers
within a row must be adjacent. ``out`` is filled and returned when given. Wrong shapes or dtypes raise ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deltafin.expert_layout import ExpertLayout
from deltafin.kernels.arguments import F32, I32, U8, contiguous, failure, norm_weight, output, rows_of
from deltafin.kernels.machine import _native


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
    ids, weights = torch.empty(rows, k, dtype=I32), torch.empty(rows, k)
    _native.router(
        rows_of("logits", logits, experts),
        logits.stride(0),
        contiguous("bias", bias, F32, experts),
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
    splits = contiguous("row_splits", row_splits, I32, len(blobs) + 1)
    if int(row_splits[-1]) != entries:
        raise ValueError(f"row_splits end at {int(row_splits[-1])}, there are {entries} rows")
    _native.expert_forward(
        rows_of("x", x, latent),
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
        contiguous("rows", rows, I32, entries),
        contiguous("slots", slots, I32, entries),
        rows_of("out", out, latent),
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
        raise failure("y", y, "fp32 [T, k ≥ 1, latent]")
    yp, ap = contiguous("y", y, F32, rows, k, width), contiguous("weights", weights, F32, rows, k)
    wp, is_bf16 = norm_weight(norm_w, width)
    out = output(out, rows, width)
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
        raise failure("packed", packed, "uint8 [rows, a multiple of 16]")
    pp, sp = contiguous("packed", packed, U8, rows, half), contiguous("scale", scale, U8, rows, cols // 32)
    out = torch.empty(rows, cols)
    _native.mxfp4_dequantize(pp, sp, out.data_ptr(), rows, cols)
    return out
