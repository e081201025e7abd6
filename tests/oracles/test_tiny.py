"""Pins the float64 models and the tiny checkpoints to published numbers, which neither produced."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltafin.checkpoint.config import K3Config

from . import tiny
from .dspark_float64 import Float64DSpark, yarn_bounds, yarn_inv_freq
from .float64 import Float64K3, KdaState, MlaState, Trace


def close(got: Any, want: Any, digits: float = 1e-7) -> None:
    """Equal to the digits printed: the last one may be cut off instead of rounded."""
    np.testing.assert_allclose(got, want, rtol=2e-7, atol=digits)


def test_target(tiny_target: Path) -> None:
    model = Float64K3(tiny_target)
    logits, state = model.forward(tiny.IDS)
    assert logits.argmax(1).tolist() == tiny.ARGMAX
    close(logits[-1, :6], tiny.LAST_LOGITS_0_6)
    close(logits[0, :4], tiny.FIRST_LOGITS_0_4)
    close([logits.sum(), abs(logits).sum()], [tiny.LOGITS_SUM, tiny.LOGITS_ABS_SUM], 4e-6)
    kda, mla = state[0], state[3]
    assert isinstance(kda, KdaState)
    assert isinstance(mla, MlaState)
    close([kda.s.sum(), abs(kda.s).sum()], [tiny.KDA0_STATE_SUM, tiny.KDA0_STATE_ABS_SUM], 1e-6)
    close(kda.s[0, 0, :4], tiny.KDA0_STATE_HEAD0_KEY0)
    assert mla.rows.shape == (11, 32)
    close([mla.rows.sum(), abs(mla.rows).sum()], [tiny.MLA3_ROWS_SUM, tiny.MLA3_ROWS_ABS_SUM], 1e-6)
    top = np.sort(logits, axis=1)
    assert round(float((top[:, -1] - top[:, -2]).min()), 3) == tiny.SMALLEST_MARGIN
    assert model.greedy(tiny.IDS, 12)[0] == tiny.GREEDY_12


def test_draft(tiny_target: Path, tiny_draft: Path) -> None:
    target, trace = Float64K3(tiny_target), Trace()
    target.forward(tiny.IDS, trace=trace)
    draft = Float64DSpark(tiny_draft, target)
    assert yarn_bounds(draft.config["rope_parameters"], 8) == tiny.DRAFT_RAMP_BOUNDS
    np.testing.assert_allclose(draft.inv_freq, tiny.DRAFT_INV_FREQ, rtol=0, atol=6e-8 + 5e-7)
    close(draft.scale, tiny.DRAFT_SCORE_SCALE)
    taps = draft.tapped(trace)
    assert taps.shape == (11, 192)
    close([taps.sum(), abs(taps).sum()], [tiny.TAPS_SUM, tiny.TAPS_ABS_SUM], 1e-6)
    # The published numbers come from unrounded taps.
    close(draft.context_rows(taps, bf16_taps=False)[0, :4], tiny.CONTEXT_NORM_ROW0_0_4)
    context = draft.context(taps, bf16_taps=False)
    close(abs(context[0].latent).sum(), tiny.CONTEXT0_LATENT_ABS_SUM, 1e-6)
    close(abs(context[0].rotated).sum(), tiny.CONTEXT0_ROTATED_ABS_SUM, 5e-6)
    close(context[0].rotated[10, :4], tiny.CONTEXT0_ROTATED_ROW10_0_4)
    p = draft.propose(context, 11, tiny.ANCHOR)
    close(p.hidden[0, :4], tiny.FINAL_NORM_ROW0_0_4)
    close(p.hidden[6, :4], tiny.FINAL_NORM_ROW6_0_4)
    close([p.logits.sum(), abs(p.logits).sum()], [tiny.BASE_LOGITS_SUM, tiny.BASE_LOGITS_ABS_SUM], 4e-6)
    assert p.logits.argmax(1).tolist() == tiny.BASE_ARGMAX
    assert p.ids == tiny.DRAFTED
    close(p.confidences, tiny.CONFIDENCES, 1e-6)


def test_yarn_of_the_released_draft() -> None:
    rope = tiny.draft_config()["rope_parameters"] | {"original_max_position_embeddings": 32768}
    assert yarn_bounds(rope, 64) == (15, 26)
    got = yarn_inv_freq(rope, 64)
    for pair, want in {
        0: 1,
        1: 0.713111085,
        15: 0.00627130338,
        16: 0.00407828307,
        20: 0.000647242922,
        25: 2.54469837e-05,
        26: 4.75266161e-06,
        31: 8.76441291e-07,
    }.items():
        assert got[pair] == pytest.approx(want, rel=2e-7)


def test_the_engine_accepts_the_config(tiny_target: Path) -> None:
    config = K3Config.load(tiny_target)
    assert (config.hidden, config.layers, config.mla_layers) == (64, 8, frozenset({3, 6, 7}))
    assert (config.kda_heads, config.kda_head_dim, config.shared_intermediate) == (4, 32, 64)


@pytest.mark.parametrize("bf16", [False, True])
def test_layout_is_the_released_one(tmp_path: Path, bf16: bool) -> None:
    folder = tiny.write_tiny_target(tmp_path, bf16=bf16)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for layer in range(8):
        file = folder / f"model-{layer + 1:05}-of-000009.safetensors"
        header = _header(file)
        assert {n for n, f in index.items() if f == file.name} == set(header)
        assert {v["dtype"] for v in header.values()} == {"F32"} | ({"U8"} if layer else set()) | (
            {"BF16"} if bf16 else set()
        )
        packed = sorted((v["data_offsets"][0], n) for n, v in header.items() if v["dtype"] == "U8")
        order = [
            f"language_model.model.layers.{layer}.block_sparse_moe.experts.{e}.{w}.weight_{part}"
            for e in sorted(range(12), key=str)
            for w in ("w1", "w2", "w3")
            for part in ("packed", "scale")
        ]
        assert [n for _, n in packed] == (order if layer else [])


def test_bf16_variant_holds_rounded_values(tmp_path: Path) -> None:
    exact, rounded = (
        Float64K3(tiny.write_tiny_target(tmp_path / str(b), bf16=b)).w.get("language_model.lm_head.weight")
        for b in (False, True)
    )
    assert 0 < abs(exact - rounded).max() <= abs(exact).max() * 2**-8


def _header(file: Path) -> dict[str, Any]:
    raw = file.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header: dict[str, Any] = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    return header
