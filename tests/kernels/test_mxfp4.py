"""MXFP4 decoding is exact for every byte and every scale, in the decoder the products use."""

from __future__ import annotations

import pytest
import torch

from deltafin import kernels
from deltafin.kernels import reference


def test_worked_example() -> None:
    packed = torch.full((1, 16), 0x7A, dtype=torch.uint8)
    out = kernels.mxfp4_dequantize(packed, torch.tensor([[128]], dtype=torch.uint8))
    assert out.tolist() == [[-2.0, 12.0] * 16]


@pytest.mark.parametrize("isa", kernels.available_isas())
def test_every_byte_at_every_scale(isa: str) -> None:
    kernels.select_isa(isa)
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    # every position within a group meets every byte
    packed = torch.stack([packed.roll(i, 1) for i in range(16)]).reshape(-1, 256)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(16, 16)
    got, want = kernels.mxfp4_dequantize(packed, scale), reference.mxfp4_dequantize(packed, scale, torch.float64)
    nan = scale[:, :1].expand_as(got) == 255
    assert got[nan].isnan().all()
    # only 6 * 2^127 lies beyond fp32
    assert torch.equal(got[~nan].double(), want[~nan].float().double())
    assert torch.equal(torch.signbit(got[~nan]), torch.signbit(want[~nan]))
