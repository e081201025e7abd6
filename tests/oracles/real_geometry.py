"""Layers of K3's true dimensions, small enough in number to compute with two other implementations.

Expects a released-format folder with K3's true widths, three or four layers (dense KDA, KDA with experts, MLA with
experts), few experts and a small vocabulary, as ``deltafin.bench.synthetic`` writes it.

Measured on two cores of an EPYC, three layers, 32 experts, 8 tokens, a 5.3 GB folder: ``mlx_reference`` 12 s to
load, 20 s to run, 8.1 GB; ``float64_reference`` 20 s, about 1 GB beside the mapped files. Relative to float64, mlx-lm's
float32 layers are off by 6e-6 to 8e-6 (root mean square) and its logits by 1.1e-5; with bf16 activations it is 0.9 %,
2 % and 7 % after the first three layers, which proves nothing: compare in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .float64 import Float64K3, Trace

TRUE_WIDTHS = {
    "hidden_size": 7168,
    "num_attention_heads": 96,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 33792,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
}
TRUE_LINEAR = {"num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}


class Reference(NamedTuple):
    """``logits`` [T, vocab]; ``layers``: P after each layer, ``[T, hidden]``; ``experts`` per MoE layer, ``[T, k]``."""

    logits: npt.NDArray[Any]
    layers: Sequence[npt.NDArray[Any]]
    experts: Sequence[npt.NDArray[np.intp]]


def assert_true_widths(text_config: dict[str, Any]) -> None:
    """Fails if a width of ``text_config`` is not the released one, or if a kind of layer is missing."""
    linear = text_config["linear_attn_config"]
    assert {k: text_config[k] for k in TRUE_WIDTHS} == TRUE_WIDTHS
    assert {k: linear[k] for k in TRUE_LINEAR} == TRUE_LINEAR
    dense = text_config["first_k_dense_replace"]
    assert any(n <= dense for n in linear["kda_layers"]), "no dense layer"
    assert any(n > dense for n in linear["kda_layers"]), "no KDA layer with experts"
    assert any(n > dense for n in linear["full_attn_layers"]), "no MLA layer with experts"


def mlx_reference(folder: Path, ids: Sequence[int]) -> Reference:
    """mlx-lm in float32 over weights kept in bf16. About 1.5 GB more than the folder's size."""
    from .mlx_k3 import MlxK3  # mlx only where this reference is asked for

    return Reference(*MlxK3(folder, lean=True).trace(ids))


def float64_reference(
    folder: Path,
    ids: Sequence[int],
    routes: Sequence[npt.NDArray[np.integer]] | None = None,
    trace: Trace | None = None,
) -> Reference:
    """Float64, nothing kept decoded: about 1 GB. ``routes`` and ``trace`` as in ``Float64K3.forward``."""
    trace = Trace() if trace is None else trace
    logits, _ = Float64K3(folder, keep_bytes=0).forward(ids, trace=trace, routes=routes)
    return Reference(logits, trace.layers, trace.experts)


def relative_rms(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> float:
    """Root mean square of the difference over that of ``want``, in float64."""
    difference = got.astype(np.float64) - want
    return float(np.sqrt((difference**2).mean() / (want.astype(np.float64) ** 2).mean()))
