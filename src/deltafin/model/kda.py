"""Kimi Delta Attention: short convolutions, per-channel decay, delta-rule state, gated output."""

from __future__ import annotations

import torch

from deltafin import kernels
from deltafin.checkpoint.config import K3Config
from deltafin.model.state import KdaRows, KdaState
from deltafin.model.weights import KdaWeights


def forward(
    config: K3Config,
    w: KdaWeights,
    x: torch.Tensor,
    state: KdaState,
    *,
    first: bool,
    keep_rows: bool,
) -> torch.Tensor:
    """One KDA sublayer over the next rows of a pass.

    The recurrence runs row by row in every case, so a row's bits do not depend on how a pass is cut.

    Args:
        x: normalised input, fp32 [T, hidden].
        state: the layer's state; ``ahead``, ``raw`` and ``rows`` are written, the committed part is not.
        first: whether these are the pass's first rows (start from the committed state, else continue from ``ahead``).
        keep_rows: keep the recurrence inputs so that fewer rows than computed can be committed.

    Returns:
        fp32 [T, hidden].
    """
    rows, width, dim = len(x), config.kda_width, config.kda_head_dim
    qkv = torch.empty(rows, 3, width)
    kernels.linear(x, w.q, out=qkv[:, 0])
    kernels.linear(x, w.k, out=qkv[:, 1])
    kernels.linear(x, w.v, out=qkv[:, 2])
    history = state.history
    if not first:
        assert state.raw is not None
        history = torch.cat([history, state.raw])[-len(history) :]
    q, k, v, decay, beta = kernels.kda_prepare(
        qkv,
        history,
        w.conv,
        kernels.linear(kernels.linear(x, w.f_a), w.f_b),
        w.dt_bias,
        w.a_log,
        kernels.linear(x, w.beta),
        heads=config.kda_heads,
        head_dim=dim,
        lower_bound=config.gate_lower_bound,
        qk_eps=config.numeric.qk_norm_eps,
    )
    out = torch.empty(rows, width)
    kernels.kda_recurrence(q, k, v, decay, beta, state.recurrent if first else state.ahead, state.ahead, out)
    if keep_rows:
        # A partly committed pass is never longer than one block, so its rows arrive in one call.
        assert first
        state.raw, state.rows = qkv, KdaRows(k, v, decay, beta)
    else:
        keep = config.conv_kernel - 1
        raw = qkv if first or state.raw is None else torch.cat([state.raw, qkv])
        state.raw, state.rows = raw[-keep:].clone() if len(raw) > keep else raw, None
    gate = kernels.linear(x, w.gate)
    kernels.kda_output(out, gate, w.out_norm, config.rms_eps, heads=config.kda_heads, head_dim=dim, out=out)
    return kernels.linear(out, w.out)
