"""Layers of K3's true dimensions: more bytes in a unit than MLX counts, one expert a frame, and PyTorch's numbers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from conftest import in_place
from deltafin.apple.frames import MlxFrames
from deltafin.bench.synthetic import write_synthetic_checkpoint
from deltafin.generation.engine import Engine, EngineOptions

IDS = [5, 90, 3, 3]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    if shutil.disk_usage(tmp_path).free < 8 << 30 or psutil.virtual_memory().available < 9 << 30:
        pytest.skip("needs 8 GiB of disk and 9 GiB of memory")
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_true_widths_agree_with_pytorch(folder: Path) -> None:
    model = folder / "model"
    model.mkdir()
    write_synthetic_checkpoint(
        model, layers=2, mla_layers=[1], experts=16, vocab_size=1024, text_overrides={"attn_res_block_size": 1}
    )
    home = in_place(model, folder / "home")
    logits = {}
    for backend, precision in (("torch", "auto"), ("mlx", "fp32")):
        ram = psutil.Process().memory_info().rss + (5 << 30)
        options = EngineOptions(backend=backend, precision=precision, ram=ram, context=64, draft="off")  # type: ignore[arg-type]
        with Engine.open(home, options) as engine:
            state = engine.backend.state(engine.config, 64)
            first = engine.target.forward(IDS[:3], state, partial=True)
            state.commit(2)
            rest = engine.target.forward(IDS[2:], state)
            # The third row again, alone with the fourth: the same bits.
            assert first[2].tobytes() == rest[0].tobytes()
            logits[backend] = np.concatenate([first, rest])
            if backend == "mlx":
                frames = engine.experts.frames
                assert isinstance(frames, MlxFrames)
                assert frames.per_slab == 1
                assert frames.copied_bytes == 0
                assert engine.store.spine_unit("layer.0").plan.buffer_bytes > 1 << 31
    apart = np.abs(logits["mlx"] - logits["torch"]).max() / np.abs(logits["torch"]).max()
    print(f"largest difference {apart:.1e} of the largest logit")
    assert apart < 2e-4
