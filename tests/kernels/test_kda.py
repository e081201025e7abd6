"""The recurrence in any chunking, in place or not, with and without outputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafin import kernels

from .cases import kda_inputs, rand


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 40), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_chunks_and_replay_leave_the_same_bits(heads: int, d: int, chunks: list[int]) -> None:
    rows = sum(chunks)
    q, k, v, decay, beta, state = kda_inputs(rows, heads, d)
    whole, out = torch.empty_like(state), torch.empty(rows, heads * d)
    kernels.kda_recurrence(q, k, v, decay, beta, state, whole, out)
    replayed = torch.empty_like(state)
    kernels.kda_recurrence(None, k, v, decay, beta, state, replayed, None)
    assert torch.equal(replayed, whole)
    running, pieces, at = state.clone(), [], 0
    for n in chunks:
        piece = slice(at, at + n)
        pieces.append(torch.empty(n, heads * d))
        kernels.kda_recurrence(q[piece], k[piece], v[piece], decay[piece], beta[piece], running, running, pieces[-1])
        at += n
    assert torch.equal(running, whole)
    assert torch.equal(torch.cat(pieces), out)


def test_the_entering_state_is_left_alone() -> None:
    q, k, v, decay, beta, state = kda_inputs(4, 2, 48)
    before, after = state.clone(), torch.empty_like(state)
    kernels.kda_recurrence(q, k, v, decay, beta, state, after, torch.empty(4, 96))
    assert torch.equal(state, before)
    assert not torch.equal(after, before)


def test_no_rows_keep_the_state() -> None:
    state, after = rand(2, 16, 16, seed=1), torch.zeros(2, 16, 16)
    empty = torch.empty(0, 32)
    kernels.kda_recurrence(empty, empty, empty, empty, torch.empty(0, 2), state, after, empty)
    assert torch.equal(after, state)


def test_query_without_output_is_refused() -> None:
    q, k, v, decay, beta, state = kda_inputs(1, 1, 16)
    with pytest.raises(ValueError, match="both"):
        kernels.kda_recurrence(q, k, v, decay, beta, state, state, None)


def test_prepare_leaves_its_inputs_alone_and_accepts_flat_rows() -> None:
    width, qkv, history = 64, rand(5, 3, 64, seed=2), rand(3, 3, 64, seed=3)
    rest = (rand(3, width, 4, seed=4), rand(5, width, seed=5), rand(width, seed=6), rand(4, seed=7), rand(5, 2, seed=8))
    copies = [t.clone() for t in (qkv, history, *rest)]
    options = {"heads": 2, "head_dim": 32, "lower_bound": -5.0, "qk_eps": 1e-6}
    shaped = kernels.kda_prepare(qkv, history, *rest, **options)
    flat = kernels.kda_prepare(qkv.flatten(1), history, *rest, **options)
    assert all(torch.equal(a, b) for a, b in zip(shaped, flat, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((qkv, history, *rest), copies, strict=True))


def test_extreme_decay_inputs_stay_within_their_bounds() -> None:
    qkv, history, zeros = torch.zeros(2, 3, 16), torch.zeros(3, 3, 16), torch.zeros(16)
    r = torch.tensor([[1e4, -1e4] * 8, [0.0, 1e30] * 8])
    *_, decay, beta = kernels.kda_prepare(
        qkv, history, torch.zeros(3, 16, 4), r, zeros, torch.full((1,), 3.0), torch.tensor([[1e4], [-1e4]]),
        heads=1, head_dim=16, lower_bound=-5.0, qk_eps=1e-6,
    )  # fmt: skip
    assert ((decay >= 0.0067) & (decay <= 1)).all()
    assert beta.flatten().tolist() == [1, 0]
