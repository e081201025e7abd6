"""The two references agree on layers of K3's true dimensions, so that a third disagreeing with them is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deltafin.bench.synthetic import write_synthetic_checkpoint

from .float64 import Trace
from .real_geometry import assert_true_widths, float64_reference, mlx_reference, relative_rms

IDS = [17, 4023, 5, 5, 991, 2600, 42, 1303]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)  # 5 GB, which pytest would keep for three runs


@pytest.mark.slow
def test_float64_and_mlx_agree(folder: Path) -> None:
    pytest.importorskip("mlx.core")
    # A short residual block, so that three layers mix more than one saved row.
    write_synthetic_checkpoint(
        folder,
        layers=3,
        mla_layers=[2],
        experts=32,
        vocab_size=6144,
        text_overrides={"attn_res_block_size": 2},
    )
    assert_true_widths(json.loads((folder / "config.json").read_text())["text_config"])
    got, trace = mlx_reference(folder, IDS), Trace()
    want = float64_reference(folder, IDS, routes=got.experts, trace=trace)
    for row in (want.logits, *want.layers):
        assert 0.1 < np.sqrt((row**2).mean()) < 100  # neither vanishing nor saturated: the comparison means something
    assert np.min(trace.route_margins) > -1e-5
    errors = [relative_rms(a, b) for a, b in zip(got.layers, want.layers, strict=True)]
    errors.append(relative_rms(got.logits, want.logits))
    print("relative error by layer, then logits:", errors)
    assert max(errors) < 5e-5
