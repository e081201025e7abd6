"""Bytes are multiplied where a read put them, and a frame is not read into again before that is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from deltafin.apple.frames import MlxFrames
from deltafin.apple.kda import recurrence
from deltafin.apple.memory import Landing
from deltafin.apple.state import KdaRows
from deltafin.apple.target import MlxTarget
from deltafin.errors import ReadError
from deltafin.expert_layout import ExpertLayout
from deltafin.generation.engine import Engine
from deltafin.residency.budget import block_row_bytes, chunk_row_bytes
from deltafin.streaming.experts import Lease

from .conftest import options

LAYOUT = ExpertLayout.released(64, 32)
HOW: dict[str, Any] = {"transpose": True, "group_size": 32, "bits": 4, "mode": "mxfp4"}


def blob(seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    rng = np.random.default_rng(seed)
    out = rng.integers(0, 256, LAYOUT.nbytes, dtype=np.uint8)
    for start in (LAYOUT.w1_scale, LAYOUT.w2_scale, LAYOUT.w3_scale):
        out[start : start + LAYOUT.scale_nbytes] = rng.integers(118, 124, LAYOUT.scale_nbytes)
    return out


def gate(frames: MlxFrames, frame: int, offset: int) -> np.ndarray[Any, Any]:
    """w1 · x of the expert in a frame."""
    w = frames.windows(frame // frames.per_slab, offset, LAYOUT)
    x = mx.arange(64, dtype=mx.float32)[None, None] / 64
    which = mx.array([2 * (frame % frames.per_slab)], dtype=mx.uint32)
    return np.array(mx.gather_qmm(x, w.gate_up, w.gate_up_scales, None, mx.array([0]), which, **HOW))


def address(array: mx.array) -> int:
    return int(np.array(array, copy=False).ctypes.data)


def test_an_array_sees_what_is_written_into_its_landing() -> None:
    landing = Landing.of(10_000)
    assert landing.address % 4096 == 0
    assert landing.nbytes >= 10_000
    landing.bytes[4096:4104] = np.array([1.5, -2.0], np.float32).tobytes()
    array = landing.array(mx.float32, (2, 1), 4096)
    assert array.tolist() == [[1.5], [-2.0]]
    assert address(array) == landing.address + 4096
    landing.bytes[4096:4100] = np.array([7], np.float32).tobytes()
    assert array.tolist() == [[7.0], [-2.0]]


def test_windows_share_the_memory_of_their_slab_and_follow_it() -> None:
    frames = MlxFrames(5, 3 * 4096, slab_bytes=4 * 3 * 4096)
    assert frames.per_slab == 4
    before = []
    for frame in (0, 3, 4):
        frames.view(frame)[8 : 8 + LAYOUT.nbytes] = blob(frame).data
        before.append(gate(frames, frame, 8))
    assert len({b.tobytes() for b in before}) == 3
    held = mx.get_active_memory()
    first = frames.windows(0, 8, LAYOUT)
    assert mx.get_active_memory() == held
    assert address(first.gate_up) == frames.address(0) + 8
    # Another expert in the same frame: the same window shows it, without anything being made.
    frames.view(3)[8 : 8 + LAYOUT.nbytes] = blob(0).data
    assert frames.windows(0, 8, LAYOUT) is first
    assert gate(frames, 3, 8).tobytes() == before[0].tobytes()
    assert frames.copied_bytes == 0


def test_a_blob_off_its_word_boundaries_is_moved_and_counted() -> None:
    frames = MlxFrames(2, 3 * 4096)
    frames.view(1)[8 : 8 + LAYOUT.nbytes] = blob(1).data
    straight = gate(frames, 1, 8)
    frames.view(1)[11 : 11 + LAYOUT.nbytes] = blob(1).data
    assert gate(frames, 1, 11).tobytes() == straight.tobytes()
    assert frames.copied_bytes > 0


def test_a_frame_given_back_returns_its_memory() -> None:
    size = 20 << 20
    frames = MlxFrames(3, size)
    assert frames.per_slab == 1
    start = mx.get_active_memory()
    frames.view(frames.free.pop())
    frames.view(frames.free.pop())
    assert mx.get_active_memory() - start >= 2 * size
    frames.retire(0)
    assert mx.get_active_memory() - start < 2 * size
    frames.revive(1)
    assert 0 in frames.free
    frames.view(0)[:4] = b"used"


@pytest.fixture
def cold(mini_store: Path) -> Iterator[Engine]:
    # Nothing is read ahead, so that every frame's whereabouts are known at every moment.
    with Engine.open(mini_store, options(tier=0, prefetch=False)) as engine:
        yield engine


def test_no_expert_byte_is_copied_after_its_read(cold: Engine, prompts: list[dict[str, Any]]) -> None:
    target, frames = cold.target, cold.experts.frames
    assert isinstance(target, MlxTarget)
    assert isinstance(frames, MlxFrames)
    state = cold.backend.state(cold.config, 256)
    target.forward(prompts[0]["ids"][:20], state)
    state.commit(20)
    products = 0
    gather = mx.gather_qmm

    def watched(x: mx.array, w: mx.array, scales: mx.array, biases: None, lhs: Any, rhs: Any, **how: Any) -> mx.array:
        nonlocal products
        mx.eval([a for a in (x, w, scales, lhs, rhs) if a is not None])
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        out = gather(x, w, scales, biases, lhs, rhs, **how)
        mx.eval(out)
        # Its result and what MLX makes of rows and indices; one expert's matrix alone would be 6,528 bytes.
        assert mx.get_peak_memory() - before <= out.nbytes + x.nbytes + 4096
        products += 1
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "gather_qmm", watched)
        reads = cold.experts.stats.reads
        target.forward([5], state)
        assert cold.experts.stats.reads - reads == 8 * 16
    assert products >= 2 * 8
    assert frames.copied_bytes == 0


def test_spine_tensors_lie_where_they_were_read(bf16: Engine) -> None:
    spine = bf16.spine
    for key in ("layer.3", "head"):
        assert key in spine.resident_keys
        with spine.unit(key) as unit:
            by_place = sorted((address(a.view(mx.uint8)), a.nbytes) for a in unit.values())
        assert all(a + size <= b for (a, size), (b, _) in pairwise(by_place))
        # One landing, and little in it but the tensors.
        assert by_place[-1][0] + by_place[-1][1] - by_place[0][0] < sum(size for _, size in by_place) * 1.1
    with spine.unit("head") as unit:
        assert bf16.backend.lm_head(spine) is unit["language_model.lm_head.weight"]


def test_leases_are_held_until_the_device_is_done_with_them(cold: Engine) -> None:
    """Scribbling over every frame at the moment it is given back changes nothing."""
    target, experts = cold.target, cold.experts
    state = cold.backend.state(cold.config, 256)
    ids = [278, 328, 279, 1935, 264, 7, 9]
    wanted = target.forward(ids, state)
    release = experts.release
    given = 0

    def scribbling(leases: Sequence[Lease]) -> None:
        nonlocal given
        for lease in leases:
            experts.frames.view(lease.frame)[:] = b"\xff" * len(experts.frames.view(lease.frame))
        given += len(leases)
        release(leases)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "release", scribbling)
        for _ in range(2):
            again = target.forward(ids, state)
            assert again.tobytes() == wanted.tobytes()
    assert given == 2 * sum(len(set(r.reshape(-1).tolist())) for r in target.routes)
    assert not experts._leased


def test_the_host_waits_once_in_each_routed_layer(bf16: Engine, cold: Engine) -> None:
    for engine in (bf16, cold):
        target = engine.target
        assert isinstance(target, MlxTarget)
        state = engine.backend.state(engine.config, 256)
        target.forward(list(range(10, 40)), state)
        state.commit(30)
        for tokens, partial in (([3], False), ([3, 4, 5, 6], True)):
            before = target.waits
            target.forward(tokens, state, partial=partial)
            # Each routed layer's router, and the logits.
            assert target.waits - before == len(engine.config.moe_layers) + 1


def test_an_error_in_the_middle_gives_every_frame_back(cold: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    experts = cold.experts
    state = cold.backend.state(cold.config, 256)
    frames = len(experts._arena.free)
    real = os.preadv
    for countdown in (1, 40, 90, 200):
        left = countdown

        def failing(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
            nonlocal left
            left -= 1
            if left <= 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(ReadError):
            cold.target.forward([5, 6, 7], state)
        monkeypatch.setattr(os, "preadv", real)
        experts.clear_tier()
        assert not experts._leased
        cold.target.forward([5, 6, 7], state)
        experts.clear_tier()
    assert len(experts._arena.free) == frames


def test_a_consumer_that_leaves_a_prefill_gives_every_frame_back(cold: Engine) -> None:
    experts = cold.experts
    frames = len(experts._arena.free)
    state = cold.backend.state(cold.config, 256)
    for layers in range(1, 9):
        steps = cold.target.run([5, 6, 7, 8], state)
        for _ in range(layers):
            next(steps)
        steps.close()
        assert not experts._leased
        experts.clear_tier()
    assert len(experts._arena.free) == frames


@pytest.mark.parametrize("unit", [mx.uint8, mx.uint16, mx.uint32, mx.uint64])
def test_landings_of_more_bytes_than_mlx_counts(unit: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The released embedding has 2.3 GB, more than an axis may have numbers; here the bound is lowered instead."""
    monkeypatch.setattr("deltafin.apple.memory._MOST_NUMBERS", 12_288 // unit.size)
    landing = Landing.of(8_000)
    assert landing.base.dtype == unit
    numbers = np.arange(64, dtype=np.float32)
    for offset in (0, 64, 4096 + 8, 6, 3):
        landing.bytes[offset : offset + 256] = numbers.tobytes()
        array = landing.array(mx.float32, (8, 8), offset)
        assert array.reshape(-1).tolist() == numbers.tolist()
        if offset % 8 == 0:
            assert address(array) == landing.address + offset
    with pytest.raises(MemoryError):
        Landing.of(1 << 20)


def test_a_long_pass_needs_little_more_than_its_rows(bf16: Engine) -> None:
    """Transients exist for a few rows at a time, whatever the length of the pass."""
    state = bf16.backend.state(bf16.config, 600)
    ids = [7 + i % 500 for i in range(512)]
    bf16.target.forward(ids, state, logits="last")
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    bf16.target.forward(ids, state, logits="last")
    planned = chunk_row_bytes(bf16.config) * len(ids) + block_row_bytes(bf16.config) * bf16.plan.block_rows
    # All outputs of experts exist twice for a moment, when batches are put together.
    slots = 4 * bf16.config.latent * bf16.config.experts_per_token * len(ids)
    assert mx.get_peak_memory() - before < planned + slots + (12 << 20)


def test_the_recurrence_does_not_keep_every_rows_state() -> None:
    heads, dim, count = 2, 64, 256
    q = mx.random.normal((count, heads, dim))
    rows, start = KdaRows(q * 0.1, q, mx.abs(q) * 0.1, q[..., :1]), mx.zeros((heads, dim, dim))
    mx.eval(q, *rows, start)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(recurrence(q, rows, start))
    assert mx.get_peak_memory() - before < 40 * start.nbytes + 2 * q.nbytes
