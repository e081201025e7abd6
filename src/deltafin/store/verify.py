"""Re-reading an install at drive speed and comparing every slice with its checksum; repairing from the released
files."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from deltafin.checkpoint import Checkpoint
from deltafin.errors import StoreError
from deltafin.store.buffers import aligned_memory
from deltafin.store.create import check_identity, lock_home
from deltafin.store.drives import check_drive
from deltafin.store.ingest import ingest
from deltafin.store.manifest import Manifest, PresenceLog
from deltafin.store.meter import Meter, Progress
from deltafin.store.reader import DEFAULT_DEPTH, Reader, raise_file_limit
from deltafin.store.source import BlobSource
from deltafin.store.store import check_metadata, find_home
from deltafin.store.types import PAGE, Extent, ReadPlan

_REFETCH = "fetch this file again from the model's repository, then run deltafin store create again"


@dataclass(frozen=True, slots=True)
class BadSlice:
    """A slice whose bytes cannot be used.

    Attributes:
        blob, part: its number in the manifest.
        name: what it belongs to.
        drive: index.
        path: file.
        offset, length: bytes in the file.
        reason: the reader's message.
    """

    blob: int
    part: int
    name: str
    drive: int
    path: Path
    offset: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Outcome of a verification.

    Attributes:
        slices: read and compared.
        bytes: their length.
        absent: slices that were never written, or were found bad before.
        seconds: it took.
        bad: damaged slices, by blob and part.
    """

    slices: int
    bytes: int
    absent: int
    seconds: float
    bad: tuple[BadSlice, ...]


def verify_store(
    home: Path,
    *,
    depth: int | None = None,
    max_bytes_per_s: float | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Reads every present slice and compares it with its checksum; changes nothing.

    Args:
        home: the install.
        depth: requests in flight per drive.
        max_bytes_per_s: limit per drive, to leave room for others.
        progress: called a few times per second.

    Raises:
        ManifestError: the manifest or its metadata is damaged.
        DriveMissingError, DriveSwappedError: a drive is not there.
    """
    home = find_home(home)
    manifest = Manifest.load(home)
    check_metadata(home, manifest)
    for drive in manifest.drives:
        check_drive(manifest, drive)
    depth = depth or DEFAULT_DEPTH
    raise_file_limit(len(manifest.files))
    limits = {drive.index: max_bytes_per_s for drive in manifest.drives} if max_bytes_per_s else {}
    paths = [(entry.drive, manifest.file_path(index)) for index, entry in enumerate(manifest.files)]
    reader = Reader(manifest.drives, paths, depth=depth, max_bytes_per_s=limits)
    start = time.monotonic()
    try:
        bad = _read_all(manifest, reader, depth, progress)
    finally:
        reader.close()
    present = manifest.present
    return VerifyReport(
        slices=int(present.sum()),
        bytes=int(manifest.length[present].sum()),
        absent=int((~present).sum()),
        seconds=time.monotonic() - start,
        bad=tuple(sorted(bad, key=lambda b: (b.blob, b.part))),
    )


def repair_store(home: Path, checkpoint_dir: Path, progress: Progress | None = None) -> VerifyReport:
    """Verifies, then writes damaged and absent slices again from the released files.

    Returns:
        What was found before the repair.

    Raises:
        StoreError: the install is in place (then the released file itself is damaged), or of another model.
        CheckpointError: the released files are not usable.
    """
    home = find_home(home)
    with lock_home(home):
        report = verify_store(home, progress=progress)
        manifest = Manifest.load(home)
        if manifest.layout == "in-place":
            if report.bad:
                raise StoreError(f"{report.bad[0].path} is damaged", remedy=_REFETCH)
            return report
        checkpoint = Checkpoint.open(checkpoint_dir)
        check_identity(manifest, checkpoint, "striped", home)
        log = PresenceLog(manifest.path)
        try:
            log.forget((slice_.blob, slice_.part) for slice_ in report.bad)
        finally:
            log.close()
        manifest = Manifest.load(home)
        ingest(manifest, lambda: BlobSource(manifest, checkpoint), progress)
    return report


def _read_all(m: Manifest, reader: Reader, depth: int, progress: Progress | None) -> list[BadSlice]:
    """Keeps every drive's queue filled, each in the order of its files, until all present slices are read."""
    drive_of_file = np.array([entry.drive for entry in m.files])
    order = m.reading_order()
    order = order[m.present[order]]
    todo = [deque(order[drive_of_file[m.file[order]] == drive.index].tolist()) for drive in m.drives]
    blobs = m.blobs
    room = int(m.length.max(initial=0)) + 2 * PAGE
    done: SimpleQueue[tuple[int, memoryview, BaseException | None]] = SimpleQueue()
    read = [0] * len(m.drives)
    meter = Meter(m, progress, phase="verify")
    bad: list[BadSlice] = []
    flying = 0

    def submit(drive: int, buffer: memoryview) -> int:
        if not todo[drive]:
            return 0
        index = todo[drive].popleft()
        offset, length = int(m.offset[index]), int(m.length[index])
        at = offset % PAGE
        extent = Extent(drive, int(m.file[index]), offset, length, at, int(m.checksum[index]))
        end = -(-(at + length) // PAGE) * PAGE
        plan = ReadPlan((extent,), at, length, end, m.blob_name(int(blobs[index])))
        reader.submit(plan, buffer, lambda error: done.put((index, buffer, error)))
        return 1

    for drive in m.drives:
        for _ in range(depth + 1):
            flying += submit(drive.index, aligned_memory(room))
    while flying:
        index, buffer, error = done.get()
        flying -= 1
        file, blob = int(m.file[index]), int(blobs[index])
        drive_index = m.files[file].drive
        length = int(m.length[index])
        read[drive_index] += length
        if error is not None:
            reason = getattr(error, "message", None) or str(error)
            part = index - int(m.first[blob])
            place = (drive_index, m.file_path(file), int(m.offset[index]), length)
            bad.append(BadSlice(blob, part, m.blob_name(blob), *place, reason))
        flying += submit(drive_index, buffer)
        meter.report(read)
    meter.report(read, force=True)
    return bad
