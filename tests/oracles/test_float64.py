"""The float64 model against recorded results and against itself, split in other ways."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from . import recorded, tiny
from .float64 import Float64K3, KdaState, MlaState, State, Trace


def flat(state: State) -> npt.NDArray[np.float64]:
    parts = [(s.s, s.conv) if isinstance(s, KdaState) else (s.rows,) for s in state]
    return np.concatenate([a.ravel() for part in parts for a in part])


def test_situ_check_values(mini: Float64K3) -> None:
    got = mini._situ(np.array([1.0, -2.0, 10.0]), np.array([1.0, 3.0, 100.0]))
    np.testing.assert_allclose(got, [0.7158178, -0.6578738, 98.5907816], atol=5e-8)


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_any_split_gives_the_same_logits_and_state(tiny_target: Path, chunk: int) -> None:
    model = Float64K3(tiny_target)
    whole, end = model.forward(tiny.IDS)
    state: State | None = None
    rows = []
    for i in range(0, len(tiny.IDS), chunk):
        logits, state = model.forward(tiny.IDS[i : i + chunk], state)
        rows.append(logits)
    assert state is not None
    np.testing.assert_allclose(np.concatenate(rows), whole, rtol=0, atol=1e-11)
    np.testing.assert_allclose(flat(state), flat(end), rtol=0, atol=1e-11)


def test_state_is_left_untouched(tiny_target: Path) -> None:
    model = Float64K3(tiny_target)
    _, state = model.forward(tiny.IDS)
    before = flat(state).copy()
    first, _ = model.forward([1, 2], state)
    again, _ = model.forward([1, 2], state)
    assert np.array_equal(flat(state), before)
    assert np.array_equal(first, again)


def test_keeping_nothing_decoded_changes_nothing(tiny_target: Path) -> None:
    kept, lean = Float64K3(tiny_target), Float64K3(tiny_target, keep_bytes=0)
    np.testing.assert_allclose(lean.forward(tiny.IDS)[0], kept.forward(tiny.IDS)[0], rtol=0, atol=1e-11)


def test_forced_routes(tiny_target: Path) -> None:
    model, own = Float64K3(tiny_target), Trace()
    logits, _ = model.forward(tiny.IDS, trace=own)
    assert np.min(own.route_margins) > 0
    again, _ = model.forward(tiny.IDS, routes=[e[:, ::-1] for e in own.experts])
    np.testing.assert_allclose(again, logits, rtol=0, atol=1e-11)  # a set: order does not matter
    other = [e.copy() for e in own.experts]
    rejected = next(e for e in range(12) if e not in other[0][5])
    other[0][5, 3] = rejected
    forced = Trace()
    changed, _ = model.forward(tiny.IDS, trace=forced, routes=other)
    np.testing.assert_allclose(changed[:5], logits[:5], rtol=0, atol=1e-11)
    assert abs(changed[5:] - logits[5:]).max(1).min() > 1e-4  # this row, and all that see it
    assert forced.route_margins[0][5] < 0
    assert forced.clear_rows() == 5


def test_latent_norm_epsilon_is_used(tiny_target: Path) -> None:
    a, b = (Float64K3(tiny_target, latent_norm_eps=e).forward(tiny.IDS)[0] for e in (1e-6, 1e-5))
    assert 1e-7 < abs(a - b).max() < 1e-3


def agrees(model: Float64K3, prompt: recorded.Prompt) -> None:
    """One pass over prompt and recorded continuation: every recorded token is this model's best as well."""
    trace = Trace()
    logits, _ = model.forward([*prompt.ids, *prompt.expected[:-1]], trace=trace)
    steps = logits[len(prompt.ids) - 1 :]
    assert steps.argmax(1).tolist() == prompt.expected, prompt.id
    top = np.sort(steps, axis=1)
    error = abs(top[:, -1] - top[:, -2] - prompt.margins)
    # Beyond a router tie the recording took the other expert; see Trace.clear_rows.
    clear = max(0, trace.clear_rows(1e-8) - len(prompt.ids) + 1)
    assert error[:clear].max() < 2e-4, prompt.id
    assert error.max() < 0.1, prompt.id


@pytest.mark.parametrize("number", recorded.DOZEN)
def test_recorded_continuations(mini: Float64K3, number: int) -> None:
    agrees(mini, recorded.prompts()[number])


@pytest.mark.slow
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_all_recorded_continuations(eps: float) -> None:
    model = Float64K3(recorded.TARGET, latent_norm_eps=eps)
    for prompt in recorded.prompts():
        agrees(model, prompt)


def test_greedy_decodes_what_was_recorded(mini: Float64K3) -> None:
    prompt = recorded.prompts()[64]
    assert mini.greedy(prompt.ids, prompt.max_new, prompt.stop)[0] == prompt.expected


@pytest.mark.parametrize("number", [0, 3, pytest.param(None, marks=pytest.mark.slow)])
def test_recorded_routes(mini: Float64K3, number: int | None) -> None:
    """Experts in order of biased score; only neighbours closer than float32 resolves may be exchanged."""
    data = np.load(recorded.ORACLE / "router_traces.npz")
    starts = data["sequence_start"]
    for n in range(len(starts) - 1) if number is None else [number]:
        rows = slice(starts[n], starts[n + 1])
        trace = Trace()
        mini.forward(data["tokens"][rows].tolist(), trace=trace)
        got, want = np.stack(trace.experts, axis=1), data["experts"][rows]
        clear = np.stack(trace.route_margins, axis=1) > 1e-5
        assert np.array_equal(np.sort(got, axis=2)[clear], np.sort(want, axis=2)[clear])
        assert (got == want).mean() > 0.999


def test_mla_rows_are_latent_then_position_part(tiny_target: Path) -> None:
    _, state = Float64K3(tiny_target).forward(tiny.IDS)
    assert [isinstance(s, MlaState) for s in state] == [n in (3, 6, 7) for n in range(8)]
