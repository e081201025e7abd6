"""Compares MLX's kernels with NumPy on small inputs: does this machine compute K3's formulas?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from deltafin.apple import kda, mla, rows
from deltafin.apple.frames import MlxFrames
from deltafin.apple.ops import Bank, situ
from deltafin.apple.state import KdaRows, LatentCache
from deltafin.apple.weights import MlaWeights, ResidualMix
from deltafin.checkpoint.config import NumericChoices
from deltafin.errors import MachineError
from deltafin.expert_layout import ExpertLayout

Numbers = npt.NDArray[np.float64]

_TOLERANCE = {mx.float32: 1e-3, mx.bfloat16: 4e-2}
"""Largest difference allowed, relative to the largest number of the expected result. Wide enough for a GPU that rounds
the factors of fp32 products, far too narrow for a kernel that reads its weights or its state otherwise."""

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def check(activations: mx.Dtype) -> None:
    """Compares each kernel with its reference on the default device; takes a tenth of a second.

    Raises:
        MachineError: naming the kernel that is wrong.
    """
    for name, run, expected in _cases(activations):
        try:
            got = np.array(run().astype(mx.float32)).astype(np.float64)
            error = float(np.abs(got - expected).max() / np.abs(expected).max())
        except (RuntimeError, ValueError) as e:
            raise MachineError(f"kernel {name} does not run on this machine: {e}", remedy=_REMEDY) from None
        if not error <= _TOLERANCE[activations]:
            raise MachineError(
                f"kernel {name} computes wrong numbers on {mx.default_device()} (error {error:.1e})", remedy=_REMEDY
            )


_REMEDY = "update MLX (pip install -U mlx) and macOS, or use --backend torch"


def _cases(activations: mx.Dtype) -> Iterator[tuple[str, Callable[[], mx.array], Numbers]]:
    rng = np.random.default_rng(5)

    def rand(*shape: int) -> tuple[mx.array, Numbers]:
        """A random array, and the very same numbers in fp64."""
        array = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(activations)
        return array, np.array(array.astype(mx.float32)).astype(np.float64)

    x, x64 = rand(3, 64)
    w, w64 = rand(96, 64)
    yield "linear", lambda: rows.plain(x, w), x64 @ w64.T
    norm, norm64 = rand(64)
    rms64 = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5) * norm64
    yield "rmsnorm", lambda: mx.fast.rms_norm(x, norm, 1e-5), rms64

    def mixed() -> mx.array:
        bank = Bank(1e-5)
        bank.append(x)
        return bank.mixed(ResidualMix(norm.astype(mx.float32)[None], norm), x * 2, slice(0, 3))

    sources = np.stack([x64, 2 * x64])
    score = (sources @ norm64) / np.sqrt((sources**2).mean(-1) + 1e-5)
    share = np.exp(score - score.max(0))
    mixture = ((share / share.sum(0))[..., None] * sources).sum(0)
    yield "attention residual", mixed, mixture / np.sqrt((mixture**2).mean(-1, keepdims=True) + 1e-5) * norm64
    gate64 = 4 * np.tanh(x64 / 4) / (1 + np.exp(-x64)) * 25 * np.tanh(3 * x64 / 25)
    yield "SiTU", lambda: situ(x, 3 * x, 4.0, 25.0), gate64

    yield _mxfp4(rng, activations)

    heads, dim, count = 2, 32, 3
    q, k, v, decay = (rng.standard_normal((count, heads, dim)) for _ in range(4))
    decay, beta = np.exp(-np.abs(decay)), rng.standard_normal((count, heads, 1))
    k /= np.sqrt((k**2).sum(-1, keepdims=True))
    state = rng.standard_normal((heads, dim, dim))
    single = [mx.array(a.astype(np.float32)) for a in (q, k, v, decay, beta, state)]
    expected, s = [], state
    for t in range(count):
        s = s * decay[t][:, None]
        u = (v[t] - np.einsum("hvk,hk->hv", s, k[t])) / (1 + np.exp(-beta[t]))
        s = s + u[..., None] * k[t][:, None]
        expected.append(np.einsum("hvk,hk->hv", s, q[t]))
    yield "KDA", lambda: kda.recurrence(single[0], KdaRows(*single[1:5]), single[5])[0], np.stack(expected)
    yield _attention(rand)


def _mxfp4(rng: np.random.Generator, activations: mx.Dtype) -> tuple[str, Callable[[], mx.array], Numbers]:
    """A product through the windows of a frame, as experts are multiplied."""
    n, m = 64, 32
    layout = ExpertLayout.released(n, m)
    frames = MlxFrames(2, 3 * 4096)
    blob = rng.integers(0, 256, layout.nbytes, dtype=np.uint8)
    for start in (layout.w1_scale, layout.w2_scale, layout.w3_scale):
        blob[start : start + layout.scale_nbytes] = rng.integers(120, 125, layout.scale_nbytes)
    frames.view(1)[64 : 64 + layout.nbytes] = blob.data
    x = rng.standard_normal((2, n)).astype(np.float32)
    rounded = mx.array(x).astype(activations)

    def run() -> mx.array:
        w = frames.windows(0, 64, layout)
        how: dict[str, Any] = {"transpose": True, "group_size": 32, "bits": 4, "mode": "mxfp4"}
        lhs, rhs = mx.array([0, 1, 1], dtype=mx.uint32), mx.array([2, 2, 3], dtype=mx.uint32)
        return mx.gather_qmm(rounded[:, None], w.gate_up, w.gate_up_scales, None, lhs, rhs, **how)[:, 0]

    def matrix(packed: int, scale: int) -> Numbers:
        p = blob[packed : packed + layout.packed_nbytes].reshape(m, n // 2)
        nibbles = np.stack([p & 15, p >> 4], -1).reshape(m, n)
        power = np.exp2(blob[scale : scale + layout.scale_nbytes].reshape(m, n // 32).astype(np.float64) - 127)
        return _E2M1[nibbles] * power.repeat(32, axis=1)

    wide = np.array(rounded.astype(mx.float32)).astype(np.float64)
    gate, up = matrix(layout.w1_packed, layout.w1_scale), matrix(layout.w3_packed, layout.w3_scale)
    return "MXFP4", run, np.stack([gate @ wide[0], gate @ wide[1], up @ wide[1]])


def _attention(rand: Any) -> tuple[str, Callable[[], mx.array], Numbers]:
    """Latent attention after five cached rows, against the expanded form."""
    hidden, heads, nope, rope, lora, past, count = 64, 2, 32, 16, 48, 5, 3
    config: Any = SimpleNamespace(
        mla_heads=heads, nope_dim=nope, rope_dim=rope, v_dim=nope, kv_lora=lora, numeric=NumericChoices()
    )
    x, x64 = rand(count, hidden)
    shapes = {
        "q_a": (48, hidden), "q_a_norm": (48,), "q_b": (heads * (nope + rope), 48), "kv_a": (lora + rope, hidden),
        "kv_a_norm": (lora,), "key": (heads, nope, lora), "value": (heads, nope, lora), "gate": (heads * nope, hidden),
        "out": (hidden, heads * nope),
    }  # fmt: skip
    made = {name: rand(*shape) for name, shape in shapes.items()}
    weights = MlaWeights(**{name: (a * 0.125 if a.ndim > 1 else a) for name, (a, _) in made.items()})
    w = {name: (b * 0.125 if b.ndim > 1 else b) for name, (_, b) in made.items()}
    before, before64 = rand(past, lora + rope)

    def run() -> mx.array:
        cache = LatentCache(lora + rope, x.dtype)
        cache.write(0, before)
        return mla.forward(config, weights, x, cache, past, rows.plain)

    def norm(a: Numbers, by: Numbers) -> Numbers:
        normed: Numbers = a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-6) * by
        return normed

    q = (norm(x64 @ w["q_a"].T, w["q_a_norm"]) @ w["q_b"].T).reshape(count, heads, nope + rope)
    kv = x64 @ w["kv_a"].T
    fresh = np.concatenate([norm(kv[:, :lora], w["kv_a_norm"]), kv[:, lora:]], axis=1)
    cached = np.concatenate([before64, fresh])
    c, position = cached[:, :lora], cached[:, lora:]
    scores = np.einsum("thn,hnl,sl->hts", q[..., :nope], w["key"], c)
    scores = (scores + np.einsum("thr,sr->hts", q[..., nope:], position)) * (nope + rope) ** -0.5
    scores[:, np.arange(past + count) > past + np.arange(count)[:, None]] = -np.inf
    share = np.exp(scores - scores.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    out = np.einsum("hts,sl,hvl->thv", share, c, w["value"]).reshape(count, heads * nope)
    out = out / (1 + np.exp(-(x64 @ w["gate"].T)))
    return "attention", run, out @ w["out"].T
