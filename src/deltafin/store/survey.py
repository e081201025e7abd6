"""Looking at an install without reading its slices, and finding its drives again after mount points changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deltafin.errors import DriveMissingError, DriveSwappedError
from deltafin.store.drives import is_drive
from deltafin.store.manifest import Manifest, PresenceLog
from deltafin.store.store import find_home
from deltafin.store.types import DriveInfo


@dataclass(frozen=True, slots=True)
class DriveReport:
    """One drive of an install.

    Attributes:
        index: position in the install.
        path: where it was last found.
        state: ``ok``, ``missing`` or ``swapped``.
        weight: its share of every blob relative to the others.
        bytes_per_s: measured when the install was created; 0 when not measured.
        bytes: payload that belongs on it.
        present_bytes: payload that is there.
        files: number of its files.
        damaged_files: files that are missing or shorter than their present slices.
    """

    index: int
    path: Path
    state: str
    weight: float
    bytes_per_s: float
    bytes: int
    present_bytes: int
    files: int
    damaged_files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoreReport:
    """An install at a glance.

    Attributes:
        home: folder of the manifest.
        identity: of the model.
        layout: ``striped`` or ``in-place``.
        layers, experts: of the model; experts per layer.
        expert_bytes, spine_bytes: payload.
        slices, present_slices: counts.
        drives: in index order.
    """

    home: Path
    identity: str
    layout: str
    layers: int
    experts: int
    expert_bytes: int
    spine_bytes: int
    slices: int
    present_slices: int
    drives: tuple[DriveReport, ...]

    @property
    def complete(self) -> bool:
        """Whether every slice is present and every drive in order, as far as can be told without reading."""
        return self.present_slices == self.slices and all(d.state == "ok" and not d.damaged_files for d in self.drives)


def inspect_store(home: Path) -> StoreReport:
    """Surveys the install at ``home``; works with drives missing.

    Raises:
        ManifestError: no install there, or its manifest is damaged.
    """
    home = find_home(home)
    m = Manifest.load(home)
    boundary = int(m.first[m.expert_blobs])
    return StoreReport(
        home=home,
        identity=m.identity,
        layout=m.layout,
        layers=m.config.layers,
        experts=m.config.experts,
        expert_bytes=int(m.length[:boundary].sum()),
        spine_bytes=int(m.length[boundary:].sum()),
        slices=len(m.present),
        present_slices=int(m.present.sum()),
        drives=tuple(_drive_report(m, drive) for drive in m.drives),
    )


def _drive_report(m: Manifest, drive: DriveInfo) -> DriveReport:
    state = "missing" if not drive.path.is_dir() else "ok" if is_drive(m, drive, drive.path) else "swapped"
    mine = np.array([entry.drive == drive.index for entry in m.files])[m.file]
    damaged = []
    if state == "ok":
        for index, (entry, needed) in enumerate(zip(m.files, m.needed_sizes(), strict=True)):
            if entry.drive == drive.index and needed:
                path = m.file_path(index)
                if not path.is_file() or path.stat().st_size < needed:
                    damaged.append(entry.name)
    return DriveReport(
        index=drive.index,
        path=drive.path,
        state=state,
        weight=drive.weight,
        bytes_per_s=drive.bytes_per_s,
        bytes=int(m.length[mine].sum()),
        present_bytes=int(m.length[mine & m.present].sum()),
        files=sum(entry.drive == drive.index for entry in m.files),
        damaged_files=tuple(damaged),
    )


def relocate_store(home: Path, candidates: Sequence[Path]) -> tuple[DriveInfo, ...]:
    """Finds the drives again and records where they are now.

    Args:
        home: the install.
        candidates: directories that may be drives of it; the home's own drive and the last known places are looked at
            too.

    Returns:
        All drives with their present paths.

    Raises:
        DriveMissingError: a drive was not found; those that were are recorded.
        DriveSwappedError: a named candidate is no drive of this install.
        ManifestError: the manifest is damaged or cannot be written.
    """
    home = find_home(home)
    m = Manifest.load(home)
    named = [path.resolve() for path in candidates]
    for path in named:
        if not any(is_drive(m, drive, path) for drive in m.drives):
            raise DriveSwappedError(f"{path} is no drive of the install at {home}", remedy="leave it out")
    found: list[DriveInfo] = []
    lost: list[DriveInfo] = []
    for drive in m.drives:
        places = [*named, home.resolve().parent, drive.path]
        place = next((path for path in places if is_drive(m, drive, path)), None)
        if place is None:
            lost.append(drive)
        else:
            found.append(DriveInfo(drive.index, drive.uuid, place, drive.weight, drive.bytes_per_s))
    log = PresenceLog(m.path)
    try:
        log.move((str(drive.path), drive.index) for drive in found)
    finally:
        log.close()
    if lost:
        names = ", ".join(f"drive {drive.index} (last at {drive.path})" for drive in lost)
        raise DriveMissingError(f"not found: {names}", remedy="connect it, then name its directory with --drive")
    return tuple(found)
