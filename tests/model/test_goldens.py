"""The model against published numbers, and against a float64 implementation that shares nothing with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deltafin.model import kda, mla, moe, target
from deltafin.model import state as model_state
from deltafin.model.state import SequenceState
from oracles import tiny
from oracles.float64 import Float64K3, Trace

from .fakes import open_target, plain_kernels


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with fp32 matrices, for which the numbers were published."""
    return tiny.write_tiny_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def plain(published: Path, monkeypatch: pytest.MonkeyPatch) -> target.Target:
    """The product's model code over the reference kernels, which take fp32 matrices."""
    opened, experts = open_target(published)
    kernels = plain_kernels(experts)
    for module in (target, kda, mla, moe, model_state):
        monkeypatch.setattr(module, "kernels", kernels)
    return opened


def test_published_logits_and_state(plain: target.Target) -> None:
    state = SequenceState.empty(plain.config, 64)
    logits = plain.forward(tiny.IDS, state)
    state.commit(len(tiny.IDS))
    assert logits.argmax(-1).tolist() == tiny.ARGMAX
    assert logits[-1, :6].tolist() == pytest.approx(tiny.LAST_LOGITS_0_6, abs=2e-5)
    assert logits[0, :4].tolist() == pytest.approx(tiny.FIRST_LOGITS_0_4, abs=2e-5)
    assert float(logits.astype(np.float64).sum()) == pytest.approx(tiny.LOGITS_SUM, abs=2e-3)
    assert float(np.abs(logits.astype(np.float64)).sum()) == pytest.approx(tiny.LOGITS_ABS_SUM, abs=2e-3)
    recurrent = state.kda[0].recurrent.double()
    assert float(recurrent.sum()) == pytest.approx(tiny.KDA0_STATE_SUM, abs=1e-4)
    assert float(recurrent.abs().sum()) == pytest.approx(tiny.KDA0_STATE_ABS_SUM, abs=1e-4)
    assert recurrent[0, 0, :4].tolist() == pytest.approx(tiny.KDA0_STATE_HEAD0_KEY0, abs=1e-6)
    rows = state.mla[3].rows[: len(tiny.IDS)].double()
    assert float(rows.sum()) == pytest.approx(tiny.MLA3_ROWS_SUM, abs=1e-4)
    assert float(rows.abs().sum()) == pytest.approx(tiny.MLA3_ROWS_ABS_SUM, abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 4, 11])
def test_published_continuation(plain: target.Target, chunk: int) -> None:
    state = SequenceState.empty(plain.config, 64)
    for i in range(0, len(tiny.IDS), chunk):
        logits = plain.forward(tiny.IDS[i : i + chunk], state)
        state.commit(len(logits))
    out = [int(logits[-1].argmax())]
    while len(out) < 12:
        logits = plain.forward(out[-1:], state)
        state.commit(1)
        out.append(int(logits[-1].argmax()))
    assert out == tiny.GREEDY_12


def test_native_kernels_on_the_tiny_model(tmp_path: Path) -> None:
    """Widths of 20, 24 and 80, matrices in bf16 as released."""
    folder = tiny.write_tiny_target(tmp_path, bf16=True)
    opened, _ = open_target(folder)
    logits = opened.forward(tiny.IDS, SequenceState.empty(opened.config, 64))
    want, _ = Float64K3(folder).forward(tiny.IDS)
    assert np.abs(logits - want).max() < 5e-5


def test_every_layer_of_the_miniature_stays_near_float64(mini_target: Path, prompts: list[dict]) -> None:
    opened, _ = open_target(mini_target)
    worst_layer = worst_logit = 0.0
    for prompt in prompts[::11]:
        ids = prompt["ids"][:160]
        state = SequenceState.empty(opened.config, 256)
        logits = opened.forward(ids, state)
        trace = Trace()
        # A tie in the router makes two right answers differ, so both sides use the engine's choices.
        want, _ = Float64K3(mini_target).forward(ids, trace=trace, routes=opened.routes)
        assert np.min(trace.route_margins) > -1e-5
        for mine, theirs in zip(opened.accumulators, trace.layers, strict=True):
            scale = np.sqrt((theirs**2).mean())
            worst_layer = max(worst_layer, float(np.abs(mine.numpy() - theirs).max() / scale))
        worst_logit = max(worst_logit, float(np.abs(logits - want).max()))
    print(f"worst layer difference {worst_layer:.1e} of its root mean square, worst logit difference {worst_logit:.1e}")
    assert worst_layer < 5e-5
    assert worst_logit < 5e-5


def test_non_zero_padding_of_a_log_is_refused(tmp_path: Path) -> None:
    from deltafin.errors import CheckpointError
    from deltafin.model.weights import layer_weights

    opened, _ = open_target(tiny.write_tiny_target(tmp_path, bf16=True))
    with opened._spine.unit("layer.0") as unit:
        name = "language_model.model.layers.0.self_attn.A_log"
        unit[name] = unit[name].clone()
        unit[name][-1] = 0.5
        with pytest.raises(CheckpointError, match="A_log"):
            layer_weights(opened.config, 0, unit)


@pytest.mark.parametrize("field", ["latent_norm_eps", "qk_norm_eps"])
def test_numeric_choices_take_effect(mini_target: Path, field: str) -> None:
    """Each choice where sources disagree is one constant, and it reaches the computation."""
    from dataclasses import replace

    opened, _ = open_target(mini_target)
    ids = [278, 328, 279, 1935, 264]
    before = opened.forward(ids, SequenceState.empty(opened.config, 16))
    opened.config = replace(opened.config, numeric=replace(opened.config.numeric, **{field: 1e-2}))
    after = opened.forward(ids, SequenceState.empty(opened.config, 16))
    assert not np.array_equal(before, after)
