"""Recognising drives: the marker of a striped install, the shards themselves of an install in place; and
their speed."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil

from deltafin.errors import DriveError, DriveMissingError, DriveSwappedError, ReadError
from deltafin.macos import spotlight
from deltafin.store.buffers import AlignedBuffer
from deltafin.store.direct import DirectFile
from deltafin.store.files import write_atomic
from deltafin.store.manifest import Manifest
from deltafin.store.reader import REPAIR
from deltafin.store.types import DriveInfo

MARKER_NAME = "deltafin-drive.json"
MARKER_FORMAT = 1
_MAX_MARKER_BYTES = 4096
_RELOCATE = "connect the drive, or if it is mounted elsewhere: deltafin store relocate HOME --drive NEW_PATH"
_TEST_BYTES = 192 << 20
_TEST_PIECE = 4 << 20
_TEST_SECONDS = 1.0
_MOST_MOUNTS = 256


def slice_folder(short_id: str) -> str:
    """Name of an install's folder on each drive."""
    return f"deltafin-{short_id}"


def write_marker(folder: Path, store_uuid: str, drive: DriveInfo) -> None:
    """Writes the marker of ``drive`` into its slice folder, durably.

    Raises:
        OSError: the drive cannot be written.
    """
    marker = {"format": MARKER_FORMAT, "store": store_uuid, "drive": drive.uuid, "index": drive.index}
    write_atomic(folder / MARKER_NAME, json.dumps(marker, indent=1).encode())
    spotlight.keep_out(folder)


def read_marker(folder: Path) -> tuple[str, str] | None:
    """(store uuid, drive uuid) of the marker in ``folder``; None when there is none or it is not one of
    ours."""
    try:
        with open(folder / MARKER_NAME, "rb") as file:
            marker = json.loads(file.read(_MAX_MARKER_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(marker, dict) or marker.get("format") != MARKER_FORMAT:
        return None
    store, drive = marker.get("store"), marker.get("drive")
    return (store, drive) if isinstance(store, str) and isinstance(drive, str) else None


def check_drive(manifest: Manifest, drive: DriveInfo) -> None:
    """Checks that the drive's directory is there and is the one the manifest means.

    Raises:
        DriveMissingError: the directory is missing.
        DriveSwappedError: it belongs to another drive or install, or to none.
    """
    if is_drive(manifest, drive, drive.path):
        return
    now = elsewhere(manifest, drive)
    remedy = f"record where it is now: deltafin store relocate {manifest.path.parent} --drive '{now}'"
    if not drive.path.is_dir():
        message = f"drive {drive.index} is missing: no directory {drive.path}"
        raise DriveMissingError(message, remedy=remedy if now else _RELOCATE)
    what = "the released shards" if manifest.layout == "in-place" else "the marker of this drive"
    message = f"{drive.path} does not hold {what} (drive {drive.index})"
    raise DriveSwappedError(message, remedy=remedy if now else _RELOCATE)


def elsewhere(manifest: Manifest, drive: DriveInfo) -> Path | None:
    """Where a drive that is not in its place is mounted now, recognised by its marker; None when it is nowhere.

    A volume that was not ejected comes back as ``/Volumes/NAME 1`` while ``/Volumes/NAME`` stays as an empty directory;
    desktops on Linux number their mount points too.
    """
    if manifest.layout == "in-place":
        return None  # names and sizes of shards are no proof of identity
    return next((place for place in places_of(drive.path) if is_drive(manifest, drive, place)), None)


def places_of(path: Path) -> Iterator[Path]:
    """Where ``path`` would be if its volume were mounted in another place: its end, long or short, below each mount."""
    parts = path.parts[1:]
    for mount in itertools.islice(_mount_points(), _MOST_MOUNTS):
        for first in range(len(parts) + 1):
            place = mount.joinpath(*parts[first:])
            if place != path:
                yield place


def follow(manifest: Manifest) -> tuple[Manifest, list[str]]:
    """The manifest with the drives where they are mounted now, and a sentence about each that has moved. Nothing is
    written: if the old place comes back, it holds again."""
    drives, told = list(manifest.drives), []
    for drive in manifest.drives:
        if not is_drive(manifest, drive, drive.path) and (now := elsewhere(manifest, drive)):
            drives[drive.index] = replace(drive, path=now)
            told.append(f"drive {drive.index} is at {now} now, not at {drive.path}: used there")
    return (replace(manifest, drives=tuple(drives)), told) if told else (manifest, told)


def _mount_points() -> Iterator[Path]:
    try:
        yield from (Path(partition.mountpoint) for partition in psutil.disk_partitions())
    except (OSError, RuntimeError):
        return  # a system that does not tell


def is_drive(manifest: Manifest, drive: DriveInfo, path: Path) -> bool:
    """Whether ``path`` is the directory of ``drive``, by marker or, in place, by the names and sizes of its
    shards."""
    entries = [f for f in manifest.files if f.drive == drive.index]
    if manifest.layout == "in-place":
        # Any shard identifies it: a single damaged one is reported by name when files are checked.
        return any(_size(path / f.name) == f.nbytes for f in entries)
    folders = {f.name.partition("/")[0] for f in entries}
    return any(read_marker(path / folder) == (manifest.store_uuid, drive.uuid) for folder in folders)


def check_files(manifest: Manifest) -> None:
    """Checks that every file holds all slices that are present.

    Raises:
        ReadError: a file is missing or truncated.
    """
    for index, needed in enumerate(manifest.needed_sizes()):
        if needed:
            path = manifest.file_path(index)
            size = _size(path)
            if size is None:
                raise ReadError(f"{path} is missing", remedy=REPAIR)
            if size < needed:
                raise ReadError(f"{path} is truncated: it has {size} of {needed} bytes", remedy=REPAIR)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def measure_bandwidth(path: Path, candidates: Iterable[Path] = ()) -> float:
    """Bytes per second of direct reads from the drive at ``path``, four at a time, for about a second.

    Args:
        path: a directory on the drive.
        candidates: large files there to read; when none suffices a temporary one is written.

    Raises:
        DriveError: the drive cannot be written or read.
    """
    source = next((p for p in candidates if (_size(p) or 0) >= _TEST_BYTES), None)
    temporary = None if source else path / f".deltafin-speed-{os.getpid()}"
    try:
        if temporary:
            _write_test_file(temporary)
        return read_rate(source or temporary or path)[0]
    except OSError as e:
        raise DriveError(
            f"{path}: the speed test failed: {e.strerror}",
            remedy="check the drive, or give weights instead: --drive PATH:WEIGHT for every drive",
        ) from None
    finally:
        if temporary:
            temporary.unlink(missing_ok=True)


def _write_test_file(path: Path) -> None:
    piece = os.urandom(_TEST_PIECE)  # compressing drives must not look fast
    with open(path, "wb") as file:
        for _ in range(_TEST_BYTES // _TEST_PIECE):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_rate(path: Path) -> tuple[float, str]:
    """(bytes per second of reading a file of at least 4 MiB, why its reads are not direct), in about a second.

    Raises:
        OSError: it cannot be read.
    """
    file = DirectFile(path)
    pieces = (_size(path) or 0) // _TEST_PIECE
    totals: list[int] = []
    failures: list[OSError] = []
    start = time.perf_counter()

    def work(first: int) -> None:
        buffer = AlignedBuffer(_TEST_PIECE)
        total, index = 0, first
        try:
            while time.perf_counter() - start < _TEST_SECONDS:
                file.read(buffer.view, index % pieces * _TEST_PIECE, _TEST_PIECE)
                total += _TEST_PIECE
                index += 4
        except (OSError, EOFError) as e:
            failures.append(e if isinstance(e, OSError) else OSError(0, "the file shrank"))
        totals.append(total)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        elapsed = time.perf_counter() - start
        file.close()
    if failures:
        raise failures[0]
    return sum(totals) / elapsed, file.fallback
