"""Making an install from a released checkpoint, or continuing one."""

from __future__ import annotations

import fcntl
import hashlib
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import xxhash

from deltafin.checkpoint import METADATA_FILES, Checkpoint
from deltafin.checkpoint.tensorfile import read_bounded
from deltafin.errors import DriveMissingError, DriveSwappedError, StoreError, UsageError
from deltafin.store.drives import (
    MARKER_NAME,
    check_drive,
    check_files,
    measure_bandwidth,
    read_marker,
    slice_folder,
    write_marker,
)
from deltafin.store.files import fsync_path, write_atomic
from deltafin.store.ingest import drive_error, ingest
from deltafin.store.manifest import MANIFEST_NAME, Manifest, write_manifest
from deltafin.store.meter import Progress
from deltafin.store.slicing import InstallPlan, plan_in_place, plan_striped
from deltafin.store.source import BlobSource
from deltafin.store.types import DriveInfo, DriveSpec, IngestProgress

_MEASURE_FROM_BYTES = 4 << 30  # below this the speed test would cost more than it could save

Layout = Literal["striped", "in-place"]


def create_store(
    checkpoint_dir: Path,
    drives: Sequence[DriveSpec],
    *,
    layout: Layout,
    home: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Creates an install, or continues an unfinished one; a finished one returns at once.

    Striped: every expert and spine page is copied, cut over ``drives`` in proportion to their weights; without weights
    the drives' read bandwidth is measured when that pays. In place: nothing is copied; the shards are read once for
    their checksums. There a drive is a directory that holds shards, found by itself from the checkpoint's links.

    Args:
        checkpoint_dir: the released files.
        drives: existing directories; for in place either empty or those that hold the shards.
        layout: ``striped`` or ``in-place``.
        home: where manifest and small files go; by default ``deltafin-<id>`` in the first drive's directory, or in
            ``checkpoint_dir`` for in place.
        progress: called a few times per second.

    Returns:
        The home.

    Raises:
        CheckpointError: the released files are not usable.
        UsageError: drives or weights make no sense.
        DriveMissingError: a drive's directory does not exist.
        DriveSwappedError: a drive belongs to another install.
        DriveFullError: not enough room; finished work is kept.
        ReadError: a slice file of the unfinished install is gone or truncated.
        StoreError: anything else; Interrupted: Ctrl-C. Both can be continued by the same call.
    """
    check_specs(drives, layout)
    checkpoint = Checkpoint.open(checkpoint_dir)
    with open_install(checkpoint, drives, layout=layout, home=home, progress=progress) as manifest:
        ingest(manifest, lambda: BlobSource(manifest, checkpoint), progress)
        return manifest.path.parent


@contextmanager
def open_install(
    checkpoint: Checkpoint,
    drives: Sequence[DriveSpec],
    *,
    layout: Layout,
    home: Path | None = None,
    progress: Progress | None = None,
) -> Iterator[Manifest]:
    """Begins an install of ``checkpoint``, or opens one that was begun, for this process alone to write to.

    Arguments and errors as in ``create_store``, which then brings the bytes.

    Yields:
        The manifest; other writers are kept out while the context lasts.
    """
    short_id = hashlib.sha256(f"{checkpoint.identity} {layout}".encode()).hexdigest()[:8]
    places = _in_place_drives(checkpoint, drives) if layout == "in-place" else [spec.path.resolve() for spec in drives]
    if home is None:
        home = (checkpoint.folder if layout == "in-place" else places[0]) / slice_folder(short_id)
    with lock_home(home):
        if not (home / MANIFEST_NAME).exists():
            _begin(home, checkpoint, places, drives, layout, short_id, progress)
        manifest = Manifest.load(home)
        check_identity(manifest, checkpoint, layout, home)
        _check_same_drives(manifest, places, drives, layout, home)
        for drive in manifest.drives:
            if layout == "striped":
                _claim_drive(manifest, drive, slice_folder(short_id))
            check_drive(manifest, drive)
        check_files(manifest)
        yield manifest


def check_specs(drives: Sequence[DriveSpec], layout: str) -> None:
    """Checks drives as a user names them.

    Raises:
        UsageError: they make no sense; DriveMissingError: one is not a directory.
    """
    paths = [spec.path.resolve() for spec in drives]
    for spec in drives:
        if not spec.path.is_dir():
            raise DriveMissingError(
                f"drive {spec.path} is not a directory", remedy="mount the drive, or create the directory first"
            )
        if spec.weight is not None and not 0 < spec.weight < float("inf"):
            raise UsageError(f"drive {spec.path}: the weight {spec.weight} is not a positive number")
    if len(set(paths)) != len(paths):
        raise UsageError("a drive is named twice")
    weighted = [spec for spec in drives if spec.weight is not None]
    if layout == "in-place" and weighted:
        raise UsageError("a weight has no effect in place: the shards stay where they are", remedy="leave it out")
    if layout == "striped" and not drives:
        raise UsageError("a striped install needs at least one drive", remedy="add --drive DIR")
    if weighted and len(weighted) != len(drives):
        raise UsageError("some drives have weights and some not", remedy="give all drives a weight, or none")


def _in_place_drives(checkpoint: Checkpoint, drives: Sequence[DriveSpec]) -> list[Path]:
    """Directories that hold the shards, links followed; checked against ``drives`` when those are given."""
    found = list(dict.fromkeys((checkpoint.folder / shard).resolve().parent for shard in sorted(checkpoint.files)))
    given = [spec.path.resolve() for spec in drives]
    if given and checkpoint.folder.resolve() not in given:
        for place in found:
            if place not in given:
                raise UsageError(f"{place} holds shards and is not among the drives", remedy=f"add --drive {place}")
        for place in given:
            if place not in found:
                raise UsageError(f"{place} holds no shard of {checkpoint.folder}", remedy="leave this drive out")
        return given
    return found


def _begin(
    home: Path,
    checkpoint: Checkpoint,
    places: Sequence[Path],
    specs: Sequence[DriveSpec],
    layout: Layout,
    short_id: str,
    progress: Progress | None,
) -> None:
    if layout == "striped":
        weights = [spec.weight for spec in specs]
        rates = _measure(checkpoint, places, progress) if None in weights else [0.0] * len(places)
        shares = [w or rate or 1.0 for w, rate in zip(weights, rates, strict=True)]
        plan = plan_striped(checkpoint.config, shares, slice_folder(short_id))
    else:
        rates, shares = [0.0] * len(places), [1.0] * len(places)
        plan = _plan_in_place(checkpoint, places)
    infos = [
        DriveInfo(index, str(uuid.uuid4()), path, share, rate)
        for index, (path, share, rate) in enumerate(zip(places, shares, rates, strict=True))
    ]
    metadata: dict[str, int] = {}
    for name, limit in METADATA_FILES.items():
        if (checkpoint.folder / name).exists():
            data = read_bounded(checkpoint.folder / name, limit)
            metadata[name] = xxhash.xxh3_64_intdigest(data)
            write_atomic(home / name, data)
    write_manifest(
        home,
        plan,
        infos,
        identity=checkpoint.identity,
        store_uuid=str(uuid.uuid4()),
        layout=layout,
        metadata=metadata,
    )


def _plan_in_place(checkpoint: Checkpoint, places: Sequence[Path]) -> InstallPlan:
    files: dict[str, tuple[int, str]] = {}
    for shard in checkpoint.files:
        real = (checkpoint.folder / shard).resolve()
        files[shard] = (places.index(real.parent), real.name)
    return plan_in_place(checkpoint, files)


def _measure(checkpoint: Checkpoint, places: Sequence[Path], progress: Progress | None) -> list[float]:
    total = sum(checkpoint.files.values())
    rates = [0.0] * len(places)
    if total < _MEASURE_FROM_BYTES or len(places) == 1:
        return rates
    for index, place in enumerate(places):
        rates[index] = measure_bandwidth(place)
        if progress:
            progress(IngestProgress("measure", 0, total, 0, tuple(rates), None))
    return rates


def check_identity(manifest: Manifest, checkpoint: Checkpoint, layout: str, home: Path) -> None:
    """Checks that the install at ``home`` is of this checkpoint and layout.

    Raises:
        StoreError: it is not.
    """
    if manifest.identity != checkpoint.identity or manifest.layout != layout:
        raise StoreError(
            f"{home} holds an install of another model or layout ({manifest.layout})",
            remedy="choose another --home, or delete that install",
        )


def _check_same_drives(
    manifest: Manifest, places: Sequence[Path], specs: Sequence[DriveSpec], layout: str, home: Path
) -> None:
    if [drive.path for drive in manifest.drives] != list(places):
        there = ", ".join(str(drive.path) for drive in manifest.drives)
        raise StoreError(
            f"the install at {home} was begun on other drives: {there}",
            remedy="name the same drives in the same order; if they moved: deltafin store relocate HOME --drive PATH",
        )
    weights = [spec.weight for spec in specs if spec.weight is not None]
    if weights and layout == "striped":
        total, before = sum(weights), sum(drive.weight for drive in manifest.drives)
        pairs = zip(weights, manifest.drives, strict=True)
        if any(abs(w / total - drive.weight / before) > 1e-6 for w, drive in pairs):
            raise StoreError(
                f"the install at {home} was begun with other weights: {[d.weight for d in manifest.drives]}",
                remedy="give the same weights, or delete that install",
            )


def _claim_drive(manifest: Manifest, drive: DriveInfo, folder_name: str) -> None:
    """Makes sure the drive's slice folder exists and carries this install's marker."""
    if not drive.path.is_dir():
        return  # reported by check_drive
    folder = drive.path / folder_name
    if (folder / MARKER_NAME).exists():
        if read_marker(folder) != (manifest.store_uuid, drive.uuid):
            raise DriveSwappedError(
                f"{folder} belongs to another install",
                remedy="delete that folder if the install is no longer needed, or choose another directory",
            )
        return
    drives = [manifest.files[file].drive for file in manifest.file[manifest.present].tolist()]
    if drive.index in drives:
        return  # slices were written here before: a missing marker means this is not the drive
    try:
        folder.mkdir(exist_ok=True)
        fsync_path(drive.path)
        write_marker(folder, manifest.store_uuid, drive)
    except OSError as e:
        raise drive_error(drive, e) from None


@contextmanager
def lock_home(home: Path) -> Iterator[None]:
    """Creates the home if needed and keeps other writers out of it; the lock dies with the process.

    Raises:
        StoreError: the home cannot be written, or another process works on it.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        fsync_path(home.parent)
        fd = os.open(home / "create.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as e:
        raise StoreError(
            f"{home} cannot be written: {e.strerror}", remedy="choose a writable folder with --home"
        ) from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"another process is working on {home}", remedy="wait until it is done") from None
        yield
    finally:
        os.close(fd)
