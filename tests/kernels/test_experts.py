"""Experts one by one or together, in any order, from any address; bad indices; the router's choice."""

from __future__ import annotations

import pytest
import torch

from deltafin import kernels
from deltafin.kernels import ExpertLayout

from .cases import rand, rand_blob, run_experts

LAYOUT = ExpertLayout.released(96, 64)


def test_together_is_one_by_one_in_any_order() -> None:
    x, blobs = rand(9, 96, seed=1), [rand_blob(LAYOUT, seed=e) for e in range(6)]
    routes = [[0, 1, 2, 3, 4, 5, 6, 7, 8], [4], [], [8, 0], [3, 5, 7], [2]]
    together = torch.zeros(9 * 6, 96)
    run_experts(x, blobs, LAYOUT, routes, together, 0, 9)
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 0, 4, 1, 3]):
        alone = torch.zeros(9 * 6, 96)
        for e in order:
            run_experts(x, blobs, LAYOUT, [r if i == e else [] for i, r in enumerate(routes)], alone, 0, 9)
        assert torch.equal(alone, together)


def test_unaligned_blobs_and_other_layouts() -> None:
    x, blob = rand(3, 96, seed=2), rand_blob(LAYOUT, seed=3)
    expected = torch.zeros(3, 96)
    run_experts(x, [blob], LAYOUT, [[0, 1, 2]], expected, 0, 3)
    moved = torch.zeros(3 * LAYOUT.nbytes, dtype=torch.uint8)
    moved[5 : 5 + LAYOUT.nbytes] = blob
    got = torch.zeros(3, 96)
    run_experts(x, [moved[5:]], LAYOUT, [[0, 1, 2]], got, 0, 3)
    assert torch.equal(got, expected)

    p, s = LAYOUT.packed_nbytes, LAYOUT.scale_nbytes
    other = ExpertLayout(96, 64, w1_packed=7, w1_scale=7 + 3 * p, w2_packed=7 + p, w2_scale=9 + 3 * p + s,
                         w3_packed=7 + 2 * p, w3_scale=11 + 3 * p + 2 * s)  # fmt: skip
    mixed = torch.zeros(other.nbytes, dtype=torch.uint8)
    for name in ("w1", "w2", "w3"):
        for part, n in (("packed", p), ("scale", s)):
            source, target = (getattr(where, f"{name}_{part}") for where in (LAYOUT, other))
            mixed[target : target + n] = blob[source : source + n]
    got.zero_()
    run_experts(x, [mixed], other, [[0, 1, 2]], got, 0, 3)
    assert torch.equal(got, expected)


def test_more_rows_than_are_worked_on_at_once() -> None:
    layout = ExpertLayout.released(32, 32)
    x, blobs = rand(700, 32, seed=6), [rand_blob(layout, seed=e) for e in range(4)]
    routes = [list(range(700)), [], list(range(0, 700, 2)), list(range(699, 0, -1))]
    together, alone = torch.zeros(2800, 32), torch.zeros(2800, 32)
    run_experts(x, blobs, layout, routes, together, 0, 700)
    for e in range(4):
        run_experts(x, blobs, layout, [r if i == e else [] for i, r in enumerate(routes)], alone, 0, 700)
    assert torch.equal(together, alone)


@pytest.mark.parametrize(
    ("splits", "rows", "slots"),
    [
        ([0, 2], [0, 3], [0, 1]),
        ([0, 2], [0, -1], [0, 1]),
        ([0, 2], [0, 1], [0, 4]),
        ([0, 2], [0, 1], [0, -1]),
        ([1, 2], [0, 1], [0, 1]),
        ([0, 1], [0, 1], [0, 1]),
        ([0, 1, 2], [0, 1], [0, 1]),
    ],
)
def test_bad_indices_are_refused(splits: list[int], rows: list[int], slots: list[int]) -> None:
    x, blob, out = rand(3, 96, seed=4), rand_blob(LAYOUT, seed=5), torch.zeros(4, 96)
    index = [torch.tensor(v, dtype=torch.int32) for v in (splits, rows, slots)]
    with pytest.raises(ValueError):
        kernels.expert_forward(x, [blob.data_ptr()], LAYOUT, *index, out, beta=4, linear_beta=25)


def test_decreasing_splits_are_refused() -> None:
    x, blob, out = rand(3, 96, seed=4), rand_blob(LAYOUT, seed=5), torch.zeros(4, 96)
    index = [torch.tensor(v, dtype=torch.int32) for v in ([0, 3, 2], [0, 1], [0, 1])]
    with pytest.raises(ValueError, match="decrease"):
        kernels.expert_forward(x, [blob.data_ptr()] * 2, LAYOUT, *index, out, beta=4, linear_beta=25)


def test_router_ties_go_to_the_smaller_id() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, -1.0]])
    ids, weights = kernels.router(logits, torch.zeros(6), 4, renormalize=True, scale=1.0, sum_eps=1e-20)
    assert ids.tolist() == [[1, 2, 4, 0]]
    assert weights.sum().item() == pytest.approx(1)


def test_router_bias_decides_the_choice_but_not_the_weight() -> None:
    logits, bias = torch.tensor([[2.0, 0.0, -2.0]]), torch.tensor([0.0, 0.0, 3.0])
    ids, weights = kernels.router(logits, bias, 2, renormalize=False, scale=2.0, sum_eps=0.0)
    assert ids.tolist() == [[2, 0]]
    assert torch.allclose(weights, 2 * torch.sigmoid(torch.tensor([[-2.0, 2.0]])))


def test_router_survives_nan() -> None:
    logits = torch.full((2, 40), torch.nan)
    logits[1, 7] = 3.0
    ids, _ = kernels.router(logits, torch.zeros(40), 16, renormalize=True, scale=1.0, sum_eps=1e-20)
    assert ids[1, 0] == 7
    for row in ids.tolist():
        assert len(set(row)) == 16
        assert all(0 <= i < 40 for i in row)
