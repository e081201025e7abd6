from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltafin.bench.synthetic import TINY, released_config
from deltafin.checkpoint import Checkpoint, K3Config
from deltafin.checkpoint.inventory import spine_inventory
from deltafin.errors import StoreError
from deltafin.store.slicing import Slicer, plan_in_place, plan_striped
from deltafin.store.types import PAGE, SLICE_ALIGN, SPINE_PAGE
from store.installs_help import scattered_checkpoint

weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=7)


@given(weights, st.lists(st.integers(1, 40 * SLICE_ALIGN), min_size=1, max_size=60))
def test_every_blob_is_covered_once_in_aligned_slices(shares: list[float], sizes: list[int]) -> None:
    slicer = Slicer(shares)
    for nbytes in sizes:
        drives, lengths = zip(*slicer.cut(nbytes), strict=True)
        assert len(set(drives)) == len(drives)
        assert set(drives) <= set(range(len(shares)))
        assert sum(lengths) == nbytes
        assert all(length % SLICE_ALIGN == 0 for length in lengths[:-1])
        assert min(lengths) > 0


@given(weights, st.lists(st.integers(1, 40 * SLICE_ALIGN), min_size=1, max_size=200))
def test_every_prefix_is_shared_in_proportion(shares: list[float], sizes: list[int]) -> None:
    slicer = Slicer(shares)
    given_to = [0] * len(shares)
    for nbytes in sizes:
        for drive, length in slicer.cut(nbytes):
            given_to[drive] += length
    for drive, share in enumerate(shares):
        # Never further from the exact share than one piece per drive, however long the sequence.
        assert abs(given_to[drive] - sum(sizes) * share / sum(shares)) <= len(shares) * SLICE_ALIGN


def test_small_blobs_rotate_over_the_drives() -> None:
    slicer = Slicer([1, 1, 1, 1, 1])
    cuts = [slicer.cut(2 * SLICE_ALIGN) for _ in range(5)]
    assert all(len(cut) == 2 for cut in cuts)
    assert sorted(drive for cut in cuts for drive, _ in cut) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@settings(max_examples=25, deadline=None)
@given(weights, st.integers(1, 9), st.integers(2, 5))
def test_striped_plan(shares: list[float], experts: int, layers: int) -> None:
    raw = released_config(layers=layers, experts=experts + 1, vocab_size=512, text_overrides=TINY)
    config = K3Config.parse(raw)
    plan = plan_striped(config, shares, "folder")
    assert plan.slices == sorted(plan.slices)
    by_file: dict[int, list[tuple[int, int]]] = defaultdict(list)
    by_blob: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for blob, part, file, offset, length, at in plan.slices:
        assert offset % SLICE_ALIGN == 0 == at % PAGE
        assert part == len(by_blob[blob])
        by_file[file].append((offset, length))
        by_blob[blob].append((at, length))
    for file, spans in by_file.items():  # slices stand back to back, padded to the alignment, and fill the file
        end = 0
        for offset, length in sorted(spans):
            assert offset == end
            end = offset + -(-length // SLICE_ALIGN) * SLICE_ALIGN
        assert end == plan.files[file][2]
    for parts in by_blob.values():  # parts follow each other without a gap
        for (at, length), (following, _) in pairwise(parts):
            assert at + length == following
    offsets = dict(plan.tensors)
    for (first, blobs, buffer), tensors in zip(plan.units, spine_inventory(config).values(), strict=True):
        covered = sum(length for blob in range(first, first + blobs) for _, length in by_blob[blob])
        assert all(offsets[n] % 64 == 0 and offsets[n] + s.nbytes <= covered <= buffer for n, s in tensors.items())
        assert all(at % SPINE_PAGE == 0 for blob in range(first, first + blobs) for at, _ in by_blob[blob][:1])


def test_real_experts_fill_whole_slices() -> None:
    # 17,547,264 is 1071 times 16 KiB: no padding, and four equal drives differ by at most one piece.
    lengths = [length for _, length in Slicer([1, 1, 1, 1]).cut(17_547_264)]
    assert all(length % SLICE_ALIGN == 0 for length in lengths)
    assert max(lengths) - min(lengths) <= SLICE_ALIGN


def test_in_place_needs_contiguous_experts_and_aligned_tensors(tiny_once: Path, tmp_path: Path) -> None:
    reversed_order = Checkpoint.open(scattered_checkpoint(tiny_once, tmp_path / "reversed"))
    with pytest.raises(StoreError, match=r"expert 0 of layer 1 is scattered") as caught:
        plan_in_place(reversed_order, {shard: (0, shard) for shard in reversed_order.files})
    assert "striped" in caught.value.remedy
    odd = Checkpoint.open(scattered_checkpoint(tiny_once, tmp_path / "odd", odd=True))
    with pytest.raises(StoreError, match="not a multiple") as caught:
        plan_in_place(odd, {shard: (0, shard) for shard in odd.files})
    assert "striped" in caught.value.remedy


def test_in_place_plan_points_at_the_released_bytes(tiny_once: Path) -> None:
    checkpoint = Checkpoint.open(tiny_once)
    plan = plan_in_place(checkpoint, {shard: (0, shard) for shard in checkpoint.files})
    assert len(plan.slices) == len({row[0] for row in plan.slices})
    for blob, _, file, offset, length, at in plan.slices[: plan.units[0][0]]:
        layer, expert = divmod(blob, 6)
        run = checkpoint.expert_runs(layer + 1, expert)[0]
        assert (plan.files[file][1], offset, length) == (run.file, run.offset, run.nbytes)
        assert at == offset % PAGE
