"""The same bits whatever the rows per call, the threads and the instruction set."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafin import kernels

from .cases import Case, Result, all_cases, expert_case, gated_mlp_case, linear_case, mla_case


def equal(a: Result, b: Result) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def in_pieces(case: Case, cuts: list[int]) -> Result:
    bounds = [0, *cuts, case.rows]
    pieces = [case.native(lo, hi) for lo, hi in pairwise(bounds)]
    rows = zip(*(p[: len(pieces[0])] for p in pieces), strict=True)
    whole = tuple(torch.cat(parts) for parts in rows)
    return whole + pieces[-1][len(whole) :]


@pytest.mark.parametrize("case", all_cases(), ids=lambda c: c.name)
def test_rows_threads_and_instruction_sets(case: Case) -> None:
    kernels.select_isa("portable")
    kernels.set_threads(1)
    expected = case.native(0, case.rows)
    one_by_one = list(range(1, case.rows)) if case.rows <= 70 else list(range(1, 20))
    for isa in kernels.available_isas():
        kernels.select_isa(isa)
        for threads in (1, 2, 3):
            kernels.set_threads(threads)
            assert equal(case.native(0, case.rows), expected), (isa, threads)
        assert equal(in_pieces(case, one_by_one), expected), isa


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 7])
def test_uneven_pieces(cut: int) -> None:
    for case in all_cases():
        if case.rows > 8:
            cuts = list(range(cut, case.rows, cut))
            assert equal(in_pieces(case, cuts), case.native(0, case.rows)), case.name


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 200), st.integers(1, 80), st.integers(1, 3))
def test_linear_of_any_shape(rows: int, k: int, n: int, threads: int) -> None:
    case = linear_case(rows, k, n)
    kernels.set_threads(threads)
    (want,) = case.reference()
    for isa in kernels.available_isas():
        kernels.select_isa(isa)
        (got,) = case.native(0, rows)
        # every product has one rounding less than its operands' sum of magnitudes times the chain length
        assert ((got.double() - want).abs() <= 1e-5 * (1 + want.abs())).all()
        assert equal(in_pieces(case, list(range(1, rows))), (got,))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_experts_of_any_shape(rows: int, latent: int, intermediate: int, experts: int) -> None:
    case = expert_case(rows, 32 * latent, 32 * intermediate, experts)
    for isa in kernels.available_isas():
        kernels.select_isa(isa)
        assert equal(in_pieces(case, list(range(1, rows))), case.native(0, rows))


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(0, 140),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(0, 20),
    st.integers(1, 40),
    st.integers(1, 100),
)
def test_mla_of_any_shape(rows: int, start: int, heads: int, nope: int, rope: int, v_dim: int, lora: int) -> None:
    case = mla_case(rows, start, heads, nope, rope, v_dim, lora)
    want, got = case.reference()[0], case.native(0, rows)
    assert (got[0].double() - want).abs().max() <= 2e-5 * max(1.0, float(want.abs().max()))
    for isa in kernels.available_isas():
        kernels.select_isa(isa)
        assert equal(in_pieces(case, list(range(1, rows))), got), isa


@pytest.mark.slow
@pytest.mark.parametrize("case", [linear_case(40, 7168, 200), gated_mlp_case(33, 7168, 96, 160)], ids=lambda c: c.name)
def test_real_widths(case: Case) -> None:
    test_rows_threads_and_instruction_sets(case)
