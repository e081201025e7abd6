"""How an install divides bytes: blobs into slices over drives, tensors into spine units. Pure arithmetic,
no files.

Two planners produce the same ``InstallPlan``: ``plan_striped`` cuts each blob over all drives in proportion
to their weights; ``plan_in_place`` describes where the released shards already hold the bytes. Blobs are
numbered: first the routed experts, layer by layer, then the spine's blobs, unit by unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deltafin.checkpoint import Checkpoint, merged_runs
from deltafin.checkpoint.config import K3Config
from deltafin.checkpoint.inventory import ITEM_BYTES, expert_inventory, spine_inventory
from deltafin.errors import StoreError
from deltafin.store.types import PAGE, SLICE_ALIGN, SPINE_PAGE

TENSOR_ALIGN = 64
"""Bytes to which a tensor is aligned in a striped spine unit: a cache line, the widest vector."""


Row = tuple[int, int, int, int, int, int]


@dataclass(slots=True)
class InstallPlan:
    """What goes where. Every tuple is a row of the manifest.

    Attributes:
        files: (drive, name relative to the drive's directory, bytes).
        slices: (blob, part, file, offset, length, at); see ``Extent``. Sorted by blob and part.
        units: (first blob, number of blobs, buffer bytes) of each spine unit in inventory order.
        tensors: (name, offset in its unit's buffer).
    """

    files: list[tuple[int, str, int]] = field(default_factory=list)
    slices: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    units: list[tuple[int, int, int]] = field(default_factory=list)
    tensors: list[tuple[str, int]] = field(default_factory=list)


class Slicer:
    """Cuts blobs over drives so that every prefix of the sequence of blobs is divided in proportion to the weights.

    A blob is cut at multiples of ``SLICE_ALIGN``. What a drive is owed beyond whole pieces carries over to the next
    blob, so blobs of fewer pieces than drives rotate over the drives. Deterministic.

    Args:
        weights: positive, one per drive.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        total = float(sum(weights))
        self._shares = [w / total for w in weights]
        self._owed = [0.0] * len(weights)  # bytes
        self.drives = len(weights)

    def cut(self, nbytes: int) -> list[tuple[int, int]]:
        """(drive, bytes) of each slice of the next blob, in blob order; all but the last are whole pieces."""
        pieces = -(-nbytes // SLICE_ALIGN)
        drives = range(len(self._shares))
        owed = [o + nbytes * share for o, share in zip(self._owed, self._shares, strict=True)]
        given = [max(0, int(o // SLICE_ALIGN)) for o in owed]

        def short(d: int) -> int:
            # Whole bytes, so that equal debts are a tie, which goes to a drive that this blob does not use yet.
            return round(owed[d]) - given[d] * SLICE_ALIGN

        while sum(given) > pieces:  # others were overpaid before: take from those least short
            given[min((d for d in drives if given[d]), key=short)] -= 1
        while sum(given) < pieces:
            given[max(drives, key=lambda d: (short(d), -given[d]))] += 1
        used = [d for d in drives if given[d]]
        last = min(used, key=short)  # the piece that is not full goes to the drive that is overpaid most
        lengths = {d: given[d] * SLICE_ALIGN for d in used if d != last}
        lengths[last] = nbytes - sum(lengths.values())
        self._owed = [o - lengths.get(d, 0) for d, o in enumerate(owed)]
        return list(lengths.items())


def unit_offsets(config: K3Config) -> dict[str, tuple[dict[str, int], int]]:
    """Striped spine: for each unit the offset of each tensor in its packed stream, and the stream's
    length."""
    units: dict[str, tuple[dict[str, int], int]] = {}
    for key, tensors in spine_inventory(config).items():
        offsets: dict[str, int] = {}
        end = 0
        for name, spec in tensors.items():
            offsets[name] = -(-end // TENSOR_ALIGN) * TENSOR_ALIGN
            end = offsets[name] + spec.nbytes
        units[key] = offsets, end
    return units


def plan_striped(config: K3Config, weights: Sequence[float], folder: str) -> InstallPlan:
    """Cuts every expert and every spine page over all drives.

    Args:
        config: the model.
        weights: one per drive.
        folder: directory of the slice files, relative to each drive's.
    """
    plan = InstallPlan()
    slicer = Slicer(weights)
    spine_blob = len(config.moe_layers) * config.experts
    spine_slices: list[Row] = []
    for key, (offsets, nbytes) in unit_offsets(config).items():
        spine, experts, ends = _unit_rows(config, key, nbytes, spine_blob, slicer, len(plan.files))
        spine_slices += spine
        plan.slices += experts
        pages = len(range(0, nbytes, SPINE_PAGE))
        plan.units.append((spine_blob, pages, -(-nbytes // PAGE) * PAGE))
        spine_blob += pages
        plan.tensors.extend(offsets.items())
        layer = int(key.partition(".")[2] or -1)
        stem = key if layer < 0 else f"layer-{layer:04d}"
        plan.files.extend((drive, f"{folder}/{stem}.slices", end) for drive, end in enumerate(ends))
    plan.slices += spine_slices
    return plan


def cut_unit(config: K3Config, key: str, weights: Sequence[float]) -> tuple[list[Row], list[int]]:
    """One unit cut alone, for a striped install whose shares change.

    Returns:
        (rows as in ``InstallPlan.slices`` with the drive in place of the file, bytes of each drive's file).
    """
    spine_blob = len(config.moe_layers) * config.experts
    for other, (_, nbytes) in unit_offsets(config).items():
        if other == key:
            spine, experts, ends = _unit_rows(config, key, nbytes, spine_blob, Slicer(weights), 0)
            return experts + spine, ends
        spine_blob += len(range(0, nbytes, SPINE_PAGE))
    raise KeyError(key)


def _unit_rows(
    config: K3Config, key: str, nbytes: int, spine_blob: int, slicer: Slicer, first_file: int
) -> tuple[list[Row], list[Row], list[int]]:
    """Rows of a unit's spine pages, of its experts, and the bytes of its files, one per drive."""
    ends = [0] * slicer.drives
    spine: list[Row] = []
    experts: list[Row] = []
    for page in range(0, nbytes, SPINE_PAGE):
        parts = slicer.cut(min(SPINE_PAGE, nbytes - page))
        _place(spine, spine_blob + page // SPINE_PAGE, parts, page, first_file, ends)
    layer = int(key.partition(".")[2] or -1)
    if layer in config.moe_layers:
        expert_bytes = sum(spec.nbytes for spec in expert_inventory(config).values())
        first_blob = (layer - config.dense_layers) * config.experts
        for expert in range(config.experts):
            _place(experts, first_blob + expert, slicer.cut(expert_bytes), 0, first_file, ends)
    return spine, experts, ends


def _place(
    rows: list[Row],
    blob: int,
    parts: Sequence[tuple[int, int]],
    at: int,
    first_file: int,
    ends: list[int],
) -> None:
    for part, (drive, length) in enumerate(parts):
        rows.append((blob, part, first_file + drive, ends[drive], length, at))
        ends[drive] += -(-length // SLICE_ALIGN) * SLICE_ALIGN
        at += length


def plan_in_place(checkpoint: Checkpoint, files: Mapping[str, tuple[int, str]]) -> InstallPlan:
    """Describes the released shards as an install.

    Args:
        checkpoint: the opened checkpoint.
        files: for each shard its drive and its name relative to that drive's directory.

    Raises:
        StoreError: an expert is scattered, or a tensor is not aligned to its element size.
    """
    plan = InstallPlan()
    number = {shard: index for index, shard in enumerate(sorted(files))}
    plan.files = [(*files[shard], checkpoint.files[shard]) for shard in number]
    config = checkpoint.config
    for layer in config.moe_layers:
        first_blob = (layer - config.dense_layers) * config.experts
        for expert in range(config.experts):
            runs = checkpoint.expert_runs(layer, expert)
            if len(runs) != 1:
                raise StoreError(
                    f"{checkpoint.folder / runs[0].file}: expert {expert} of layer {layer} is scattered",
                    remedy="use --layout striped, which gathers it",
                )
            run = runs[0]
            plan.slices.append((first_blob + expert, 0, number[run.file], run.offset, run.nbytes, run.offset % PAGE))
    blob = len(plan.slices)
    for tensors in checkpoint.spine_units().values():
        first, end = blob, 0
        for run in merged_runs(sorted(tensors.values(), key=lambda info: (info.file, info.offset))):
            # A direct read rounds out to whole pages, which no other run may touch.
            base = end + run.offset % PAGE
            for name, info in tensors.items():
                if info.file == run.file and run.offset <= info.offset < run.offset + run.nbytes:
                    _check_alignment(checkpoint.folder / info.file, name, info.offset, ITEM_BYTES[info.dtype])
                    plan.tensors.append((name, base + info.offset - run.offset))
            begin, stop = run.offset, run.offset + run.nbytes
            while begin < stop:
                piece_end = min(stop, begin - begin % PAGE + SPINE_PAGE)
                at = base + begin - run.offset
                plan.slices.append((blob, 0, number[run.file], begin, piece_end - begin, at))
                blob += 1
                begin = piece_end
            end = -(-(base + run.nbytes) // PAGE) * PAGE
        plan.units.append((first, blob - first, end))
    return plan


def _check_alignment(path: Path, name: str, offset: int, item: int) -> None:
    if offset % item:
        raise StoreError(
            f"{path}: tensor {name} starts at byte {offset}, not a multiple of its {item}-byte elements",
            remedy="use --layout striped, which aligns it",
        )
