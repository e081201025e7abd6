"""Kernels against the float64 reference, within stated bounds."""

from __future__ import annotations

import pytest
import torch

from deltafin import kernels

from .cases import Case, all_cases


@pytest.mark.parametrize("case", all_cases(), ids=lambda c: c.name)
def test_agrees_with_float64(case: Case) -> None:
    for got, want in zip(case.native(0, case.rows), case.reference(), strict=True):
        if got.dtype is torch.int32:
            assert torch.equal(got, want)
        else:
            assert got.dtype is torch.float32
            error = (got.double() - want).abs().max() / want.abs().max()
            assert error <= case.bound, f"error {float(error):.2e} of the largest number, {case.bound:.0e} allowed"


def test_situ_check_values() -> None:
    out = kernels.situ(torch.tensor([[1.0, -2.0, 10.0]]), torch.tensor([[1.0, 3.0, 100.0]]), 4.0, 25.0)
    assert torch.allclose(out, torch.tensor([[0.7158178, -0.6578738, 98.5907816]]), rtol=2e-7, atol=0)


def test_one_source_passes_through_unchanged() -> None:
    x, ones = torch.randn(3, 100) * 1e3, torch.ones(100)
    mixed = kernels.attnres_mix_norm([x], torch.randn(100), ones, 1e-5)
    assert torch.equal(mixed, kernels.rmsnorm(x, ones, 1e-5))


def test_gated_mlp_is_the_composition_of_its_parts() -> None:
    for rows in (1, 5, 40):
        x = torch.randn(rows, 100)
        gate, up, down = (
            torch.randn(90, 100).bfloat16(),
            torch.randn(90, 100).bfloat16(),
            torch.randn(50, 90).bfloat16(),
        )
        h = kernels.situ(kernels.linear(x, gate), kernels.linear(x, up), 4.0, 25.0)
        assert torch.equal(kernels.gated_mlp(x, gate, up, down, 4.0, 25.0), kernels.linear(h, down))


def test_strided_rows_and_out() -> None:
    wide = torch.randn(6, 3, 70)
    x, w = wide[::2, 1], torch.randn(40, 70).bfloat16()
    out = torch.full((3, 50), 7.0)
    returned = kernels.linear(x, w, out=out[:, 5:45])
    assert returned.data_ptr() == out[:, 5:].data_ptr()
    assert torch.equal(returned, kernels.linear(x.contiguous(), w))
    assert (out[:, :5] == 7).all()
    assert (out[:, 45:] == 7).all()


def test_no_rows() -> None:
    assert kernels.linear(torch.empty(0, 64), torch.randn(8, 64).bfloat16()).shape == (0, 8)
    assert kernels.rmsnorm(torch.empty(0, 64), torch.ones(64), 1e-5).shape == (0, 64)
    ids, weights = kernels.router(torch.empty(0, 8), torch.zeros(8), 2, renormalize=True, scale=1, sum_eps=0)
    assert ids.shape == weights.shape == (0, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernels.linear(torch.randn(2, 64), torch.randn(8, 64)),  # fp32 weight
        lambda: kernels.linear(torch.randn(2, 64), torch.randn(8, 32).bfloat16()),  # widths differ
        lambda: kernels.linear(torch.randn(64, 2).T, torch.randn(8, 64).bfloat16()),  # columns not adjacent
        lambda: kernels.linear(torch.randn(2, 64).double(), torch.randn(8, 64).bfloat16()),
        lambda: kernels.linear(torch.randn(2, 64), torch.randn(8, 64).bfloat16(), out=torch.empty(1, 8)),
        lambda: kernels.linear(torch.randn(2, 64), torch.randn(8, 128).bfloat16()[:, ::2]),
        lambda: kernels.rmsnorm(torch.randn(2, 64), torch.ones(63), 1e-5),
        lambda: kernels.situ(torch.randn(2, 64), torch.randn(1, 64), 4, 25),
        lambda: kernels.attnres_mix_norm([torch.randn(2, 8), torch.randn(3, 8)], torch.ones(8), torch.ones(8), 1e-5),
        lambda: kernels.mxfp4_dequantize(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)),
        lambda: kernels.router(torch.randn(1, 4), torch.zeros(4), 5, renormalize=True, scale=1, sum_eps=0),
    ],
)
def test_wrong_arguments_are_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError):
        call()
