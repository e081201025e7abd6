"""The start-up checks: kernels against NumPy, rows against each other, and what happens when either goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from deltafin.apple import kda, mla, moe, ops, probe, rows, selftest
from deltafin.errors import MachineError
from deltafin.generation.engine import Engine

from .conftest import options

PRECISIONS = pytest.mark.parametrize("activations", [mx.float32, mx.bfloat16])


@PRECISIONS
def test_kernels_agree_with_their_reference(activations: mx.Dtype) -> None:
    selftest.check(activations)


@PRECISIONS
@pytest.mark.parametrize(
    ("name", "module", "function"),
    [
        ("linear", rows, "plain"),
        ("KDA", kda, "recurrence"),
        ("attention", mla, "forward"),
        ("SiTU", selftest, "situ"),
        ("MXFP4", mx, "gather_qmm"),
    ],
)
def test_a_wrong_kernel_is_named(
    activations: mx.Dtype, name: str, module: Any, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(module, function)

    def wrong(*args: Any, **how: Any) -> Any:
        out = right(*args, **how)
        return (out[0] * 1.1, out[1]) if isinstance(out, tuple) else out * 1.1

    monkeypatch.setattr(module, function, wrong)
    with pytest.raises(MachineError) as refused:
        selftest.check(activations)
    assert f"kernel {name} " in refused.value.message
    assert "--backend torch" in refused.value.remedy


def test_an_engine_refuses_a_wrong_kernel(mini_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = mx.gather_qmm
    monkeypatch.setattr(mx, "gather_qmm", lambda *args, **how: gather(*args, **how) * 2)
    with pytest.raises(MachineError, match="MXFP4"):
        Engine.open(mini_store, options())


@PRECISIONS
@pytest.mark.parametrize("mode", rows.MODES[:2])
def test_rows_do_not_influence_each_other_here(activations: mx.Dtype, mode: rows.Mode) -> None:
    for name, together, alone in probe.sublayers(rows.linear_for(mode), activations):
        assert mx.array_equal(together, alone).item(), name


def test_products_that_depend_on_their_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: one row goes through another kernel than several. Tiles help, unless they depend on rows too."""
    shapes = {(96, 64), (32, 48)}
    assert probe.choose(shapes, mx.bfloat16) == "together"

    def plain(x: mx.array, w: mx.array) -> mx.array:
        # Single rows are summed in another order; a bf16 result hardly ever shows it.
        return (x[:, ::-1] @ w[:, ::-1].T) if len(x) == 1 else x @ w.T

    monkeypatch.setattr(rows, "plain", plain)
    assert probe.choose(shapes, mx.bfloat16) == "tiles"

    def tiles(x: mx.array, w: mx.array) -> mx.array:
        return plain(x, w)

    monkeypatch.setattr(rows, "in_tiles", tiles)
    assert probe.choose(shapes, mx.bfloat16) == "alone"


def test_the_gpu_kernel_of_the_recurrence_is_used_only_when_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def kernel(q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array) -> Any:
        """As mlx-lm's: batched, the write strength after its sigmoid."""
        nonlocal calls
        calls += 1
        logits = mx.log(beta / (1 - beta))[0, ..., None]
        out, after = kda.by_operations(q[0], kda.KdaRows(k[0], v[0], g[0], logits), state[0])
        return out[None], after[None]

    class Parts:
        gated_delta_kernel = staticmethod(kernel)

    monkeypatch.setattr(kda, "on_gpu", lambda: True)
    monkeypatch.setattr(kda, "model_file", lambda name: Parts)
    kda.gpu_kernel.cache_clear()
    try:
        selftest.check(mx.bfloat16)
        assert calls >= 2
        Parts.gated_delta_kernel = staticmethod(lambda *args: tuple(a * 1.01 for a in kernel(*args)))
        kda.gpu_kernel.cache_clear()
        assert kda.gpu_kernel() is None
        selftest.check(mx.bfloat16)

        def broken(*_: Any) -> Any:
            raise RuntimeError("no such function in the library")

        Parts.gated_delta_kernel = staticmethod(broken)
        kda.gpu_kernel.cache_clear()
        assert kda.gpu_kernel() is None
    finally:
        monkeypatch.undo()
        kda.gpu_kernel.cache_clear()


def test_ties_of_the_router_go_to_the_smaller_id(bf16: Engine) -> None:
    import numpy as np

    config = bf16.config
    scores = np.full((3, config.experts), 0.5, np.float32)
    scores[1, 7] = 0.25
    scores[2, [90, 40]] = 0.75
    ids, weights = moe.choose(config, scores, np.zeros(config.experts, np.float32))
    assert ids[0].tolist() == list(range(16))
    assert ids[1].tolist() == [*range(7), *range(8, 17)]
    assert ids[2].tolist() == [40, 90, *range(14)]
    assert np.allclose(weights.sum(1), 1)
    for row, wanted in zip(scores, weights, strict=True):
        assert moe.choose(config, row[None], np.zeros(config.experts, np.float32))[1].tobytes() == wanted.tobytes()


def test_fused_formulas_equal_single_operations() -> None:
    x = mx.random.normal((3, 96))
    compiled: Any = mx.compile(ops.situ_formula, shapeless=True)
    assert mx.allclose(compiled(x, x * 2, 4.0, 25.0), ops.situ(x, x * 2, 4.0, 25.0), rtol=1e-6).item()
