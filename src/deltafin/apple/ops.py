"""Small formulas that several sublayers share. ``x`` has one row for each position; statistics are fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from deltafin.apple.weights import MlpWeights, ResidualMix


def on_gpu() -> bool:
    """Whether MLX computes on a GPU here."""
    return bool(mx.default_device() == mx.Device(mx.gpu))


def fused(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """``function`` as one GPU kernel; on the CPU as it is, where MLX would call a compiler at run time."""
    compiled: Any = mx.compile(function, shapeless=True)

    def call(*args: Any) -> mx.array:
        result: mx.array = compiled(*args) if on_gpu() else function(*args)
        return result

    return call


def situ_formula(gate: mx.array, up: mx.array, beta: float, linear_beta: float) -> mx.array:
    """β·tanh(g/β)·sigmoid(g) · λ·tanh(u/λ), fp32 inside, in the dtype of ``gate`` (spec 3.4)."""
    g, u = gate.astype(mx.float32), up.astype(mx.float32)
    out = mx.tanh(g * (1 / beta)) * mx.sigmoid(g) * mx.tanh(u * (1 / linear_beta)) * (beta * linear_beta)
    return out.astype(gate.dtype)


situ = fused(situ_formula)


class Bank:
    """Saved rows of the attention residuals, and their inverse root mean squares (spec 3.3)."""

    def __init__(self, eps: float) -> None:
        self._eps = eps
        self._rows: mx.array | None = None  # [T, m, hidden] fp32
        self._scale: mx.array | None = None  # [T, 1, m] fp32

    def append(self, accumulator: mx.array) -> None:
        """Saves the accumulator [T, hidden]."""
        rows = accumulator.astype(mx.float32)[:, None]
        scale = self._inverse(rows)
        self._rows = rows if self._rows is None else mx.concatenate([self._rows, rows], axis=1)
        self._scale = scale if self._scale is None else mx.concatenate([self._scale, scale], axis=2)

    def mixed(self, mix: ResidualMix, accumulator: mx.array, rows: slice) -> mx.array:
        """Softmax mixture of the saved rows and the accumulator, then the norm. [T, hidden], for ``rows``."""
        bank, scale = self._rows, self._scale
        whole = rows == slice(0, len(accumulator))
        own = accumulator if whole else accumulator[rows]
        if bank is None or scale is None:
            return mx.fast.rms_norm(own, mix.norm, self._eps)
        if not whole:
            bank, scale = bank[rows], scale[rows]
        wide = own.astype(mx.float32)[:, None]
        sources = mx.concatenate([bank, wide], axis=1)
        score = (mix.score @ sources.swapaxes(1, 2)) * mx.concatenate([scale, self._inverse(wide)], axis=2)
        # Sources lie along the last axis: each row's softmax is one call that never sees another row.
        share = mx.softmax(score, axis=-1, precise=True)
        mixture = share @ sources
        if on_gpu():
            return mx.fast.rms_norm(mixture[:, 0].astype(own.dtype), mix.norm, self._eps)
        # On the CPU the norm is no single kernel, and its statistics are at hand in fp32.
        return (mixture * self._inverse(mixture))[:, 0].astype(own.dtype) * mix.norm

    def _inverse(self, x: mx.array) -> mx.array:
        """1 / sqrt(mean(x²) + eps), [T, 1, 1]."""
        return mx.rsqrt((x @ x.swapaxes(1, 2)) * (1 / x.shape[-1]) + self._eps)


def gated(w: MlpWeights, x: mx.array, beta: float, linear_beta: float, linear: Linear) -> mx.array:
    """down(SiTU(gate x, up x)), [T, hidden] → [T, hidden]."""
    return linear(situ(linear(x, w.gate), linear(x, w.up), beta, linear_beta), w.down)


Linear = Callable[[mx.array, mx.array], mx.array]
"""(x [T, in], w [out, in]) → x·wᵀ in the dtype of x, each row's bits independent of the others; see ``rows``."""


def total(parts: Sequence[mx.array]) -> mx.array:
    """Parts put together along the rows."""
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts))


def start(arrays: Sequence[mx.array]) -> None:
    """Submits what ``arrays`` need, without waiting."""
    submit: Any = mx.async_eval
    submit(list(arrays))
