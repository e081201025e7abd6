from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from . import released
from .released import Released, mxfp4, round_bf16


def test_mxfp4_worked_example() -> None:
    row = np.zeros((1, 16), np.uint8)
    row[0, 0] = 0x7A
    assert mxfp4(row, np.array([[128]], np.uint8))[0, :2].tolist() == [-2.0, 12.0]


def test_mxfp4_every_byte_and_scale_exponent() -> None:
    magnitude = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for scale in (0, 1, 121, 127, 200, 254):
        got = mxfp4(np.arange(256, dtype=np.uint8).reshape(1, -1), np.full((1, 16), scale, np.uint8)).reshape(-1, 2)
        for byte in range(256):
            for column, code in enumerate((byte & 15, byte >> 4)):
                sign = -1 if code & 8 else 1
                assert got[byte, column] == sign * magnitude[code & 7] * 2.0 ** (scale - 127)


def test_mxfp4_scales_cover_32_columns_each() -> None:
    packed = np.full((2, 32), 0x22, np.uint8)  # all ones
    scale = np.array([[127, 128], [126, 130]], np.uint8)
    got = mxfp4(packed, scale)
    assert got[:, :32].tolist() == [[1.0] * 32, [0.5] * 32]
    assert got[:, 32:].tolist() == [[2.0] * 32, [8.0] * 32]


def test_round_bf16_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    x[:3] = [1 + 2**-8, 1 + 3 * 2**-8, -0.0]  # ties in both directions
    assert np.array_equal(round_bf16(x), torch.from_numpy(x).bfloat16().float().numpy())


def test_blocks_and_rows_equal_the_whole(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(released, "_BLOCK_ELEMENTS", 7 * 64)  # blocks that do not divide the 96 rows
    name = "language_model.lm_head.weight"
    kept, lean = Released(tiny_target), Released(tiny_target, keep_bytes=0)
    x = np.random.default_rng(0).standard_normal((3, 64))
    np.testing.assert_allclose(lean.linear(x, name), kept.linear(x, name), rtol=0, atol=1e-12)
    assert np.array_equal(lean.rows(name, [5, 1, 5]), kept.get(name)[[5, 1, 5]])
    assert np.array_equal(lean.get(name), kept.get(name))
