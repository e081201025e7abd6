"""The kernels' own exp, sigmoid, tanh and SiLU: accuracy over the whole range, and their limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltafin import kernels
from deltafin.kernels.dense import unary

EXACT = {
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": lambda x: x * torch.sigmoid(x),
}
ULPS = {"exp": 1.2, "sigmoid": 2.5, "tanh": 2.0, "silu": 3.5}
INF = float("inf")


def ulp(x: Tensor) -> Tensor:
    """Distance of fp32 numbers around ``x`` (float64), that of the smallest normal below it."""
    return torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=2.0**-126))) - 23)


def sweep() -> Tensor:
    near_zero = torch.logspace(-30, 0, 40_001, dtype=torch.float64)
    wide = torch.linspace(-87, 87, 400_001, dtype=torch.float64)
    return torch.cat([wide, near_zero, -near_zero]).float()


@pytest.mark.parametrize("name", EXACT)
def test_accuracy(name: str) -> None:
    x = sweep()
    want = EXACT[name](x.double())
    error = (unary(name, x).double() - want).abs() / ulp(want)
    worst = error.argmax()
    assert error[worst] <= ULPS[name], f"{name}({float(x[worst])!r}) is {float(error[worst]):.2f} ulp off"


@pytest.mark.parametrize("name", EXACT)
def test_same_bits_everywhere(name: str) -> None:
    x = torch.cat([sweep()[::7], torch.tensor([INF, -INF, 0.0, -0.0, 1e30, -1e30, 88.7, 88.8, -103.9, -200.0])])
    results = []
    for isa in kernels.available_isas():
        kernels.select_isa(isa)
        results.append(unary(name, x).view(torch.int32))
    finite = torch.isfinite(x)
    assert all(torch.equal(r[finite], results[0][finite]) for r in results)


def test_limits() -> None:
    x = torch.tensor([INF, -INF, 0.0, 200.0, -200.0])
    assert unary("exp", x).tolist() == [INF, 0, 1, INF, 0]
    assert unary("sigmoid", x).tolist() == [1, 0, 0.5, 1, 0]
    assert unary("tanh", x).tolist() == [1, -1, 0, 1, -1]
    for name in EXACT:
        assert unary(name, torch.tensor([float("nan")])).isnan().all()


def test_tanh_keeps_the_sign_of_zero() -> None:
    assert str(unary("tanh", torch.tensor([-0.0])).item()) == "-0.0"


def test_subnormals_are_not_flushed() -> None:
    x = torch.tensor([-88.0, -95.0, -100.0, -103.0])
    got = unary("exp", x).double()
    assert (got > 0).all()
    assert ((got - torch.exp(x.double())).abs() <= 2.0**-149).all()
