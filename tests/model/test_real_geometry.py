"""Layers of K3's true dimensions through the whole engine, against mlx-lm and float64 on the same released files."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from conftest import in_place
from deltafin.bench.synthetic import write_synthetic_checkpoint
from deltafin.generation.engine import Engine, EngineOptions
from deltafin.model.state import SequenceState
from oracles.float64 import Trace
from oracles.real_geometry import assert_true_widths, float64_reference, mlx_reference, relative_rms

from .fakes import WatchedTarget

IDS = [17, 4023, 5, 5, 991, 2600, 42, 1303]
BOUND = 5e-5
"""Root mean square of a difference over that of the values: a few thousand fp32 roundings."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    if shutil.disk_usage(tmp_path).free < 12 << 30 or psutil.virtual_memory().available < 11 << 30:
        pytest.skip("needs 12 GiB of disk and 11 GiB of memory")
    yield tmp_path
    shutil.rmtree(tmp_path)  # 5 GB, which pytest would keep for three runs


def engine_rows(home: Path, ids: list[int], *, chunk: int) -> list[npt.NDArray[np.float32]]:
    """Accumulators after each layer, then logits."""
    ram = psutil.Process().memory_info().rss + (6 << 30)
    with Engine.open(home, EngineOptions(ram=ram, context=64)) as engine:
        engine.target.__class__ = WatchedTarget
        state = SequenceState.empty(engine.config, 64)
        parts = []
        for i in range(0, len(ids), chunk):
            logits = engine.target.forward(ids[i : i + chunk], state)
            state.commit(len(logits))
            parts.append([rows.numpy() for rows in engine.target.accumulators] + [logits])
        return [np.concatenate(rows) for rows in zip(*parts, strict=True)]


@pytest.mark.slow
def test_engine_mlx_and_float64_agree(folder: Path) -> None:
    pytest.importorskip("mlx.core")
    model = folder / "model"
    model.mkdir()
    # A short residual block, so that three layers mix more than one saved row.
    write_synthetic_checkpoint(
        model, layers=3, mla_layers=[2], experts=32, vocab_size=6144, text_overrides={"attn_res_block_size": 2}
    )
    assert_true_widths(json.loads((model / "config.json").read_text())["text_config"])
    home = in_place(model, folder / "home")
    mine = engine_rows(home, IDS, chunk=len(IDS))
    cut = engine_rows(home, IDS, chunk=3)
    assert all(np.array_equal(a.view(np.int32), b.view(np.int32)) for a, b in zip(mine, cut, strict=True))
    gc.collect()

    theirs, trace = mlx_reference(model, IDS), Trace()
    exact = float64_reference(model, IDS, routes=theirs.experts, trace=trace)
    assert np.min(trace.route_margins) > -1e-5
    for name, reference in (("mlx", theirs), ("float64", exact)):
        rows = [*reference.layers, reference.logits]
        for row in rows:
            assert 0.1 < np.sqrt((row**2).mean()) < 100  # neither vanishing nor saturated: it means something
        errors = [relative_rms(a, b) for a, b in zip(mine, rows, strict=True)]
        print(f"relative difference to {name} by layer, then logits: {', '.join(f'{e:.1e}' for e in errors)}")
        assert max(errors) < BOUND
