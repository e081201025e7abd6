"""Moving slices between drives: adding a drive, taking one out, or following changed speeds; unit by unit, resumable.

A unit (one layer, the embedding, the head) is cut anew into files of a new generation, which are made durable; then one
transaction exchanges its rows in the manifest. A kill leaves either the old unit or the new one, and at most files that
nobody refers to. Engines that are running keep the manifest they opened: files they may still read are deleted only
when no engine is left, and what they fetch meanwhile is not recorded against rows that have changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from deltafin.errors import DriveError, DriveFullError, Interrupted, ManifestError, ReadError, StoreError, UsageError
from deltafin.store.buffers import AlignedBuffer
from deltafin.store.create import lock_home
from deltafin.store.direct import DirectFile
from deltafin.store.drives import MARKER_NAME, check_drive, measure_bandwidth, write_marker
from deltafin.store.files import fsync_path, sync, unread, write_padded
from deltafin.store.ingest import drive_error
from deltafin.store.manifest import Manifest
from deltafin.store.meter import Meter, Progress
from deltafin.store.slicing import cut_unit
from deltafin.store.store import find_home
from deltafin.store.types import PAGE, DriveInfo, DriveSpec

_KEPT = "finished work is kept: deltafin drives rebalance continues"
_MARGIN_BYTES = 64 << 20


def add_drive(home: Path, spec: DriveSpec, progress: Progress | None = None) -> None:
    """Takes a drive into a striped install and moves its share of every blob onto it.

    Raises:
        UsageError, StoreError, DriveError: as named; finished work is kept.
    """
    home = find_home(home)
    with lock_home(home):
        m = _opened(home)
        path = spec.path.resolve()
        if not path.is_dir():
            raise UsageError(f"{path} is not a directory", remedy="mount the drive, or create the directory first")
        if any(drive.path == path for drive in m.drives):
            raise UsageError(f"{path} is a drive of this install already", remedy="name another directory")
        if _target(m) is not None:
            raise StoreError(f"{home} is being rebalanced", remedy="finish that first: deltafin drives rebalance")
        weights = [drive.weight for drive in m.drives]
        weight = spec.weight or _fitting_weight(m, path)
        info = DriveInfo(len(m.drives), str(uuid.uuid4()), path, weight, 0.0)
        folder = path / _folder(m)
        try:
            folder.mkdir(exist_ok=True)
            write_marker(folder, m.store_uuid, info)
        except OSError as e:
            raise drive_error(info, e) from None
        _insert_drive(m, info, [*weights, weight])
        _move_units(home, progress)


def remove_drive(home: Path, path: Path, progress: Progress | None = None) -> None:
    """Moves everything off a drive and takes it out of the install.

    Raises:
        UsageError, StoreError, DriveError: as named; finished work is kept.
    """
    home = find_home(home)
    with lock_home(home):
        m = _opened(home)
        leaving = [drive.index for drive in m.drives if drive.path == path.resolve()]
        if not leaving:
            raise UsageError(f"{path} is no drive of the install at {home}", remedy="deltafin store inspect shows them")
        if len(m.drives) == 1:
            raise UsageError(f"{path} is the only drive", remedy="add another first: deltafin drives add PATH")
        if home.resolve().is_relative_to(m.drives[leaving[0]].path):
            raise UsageError(f"the manifest itself is on {path}", remedy="take out another drive")
        if _target(m) is not None:
            raise StoreError(f"{home} is being rebalanced", remedy="finish that first: deltafin drives rebalance")
        _set_target(m, [0.0 if drive.index in leaving else drive.weight for drive in m.drives])
        _move_units(home, progress)


def rebalance(home: Path, weights: Sequence[float] | None, progress: Progress | None = None) -> None:
    """Continues an interrupted move, or cuts everything anew by ``weights``.

    Args:
        home: the install.
        weights: share of each drive; None continues, or without anything to continue measures the drives.

    Raises:
        UsageError, StoreError, DriveError: as named; finished work is kept.
    """
    home = find_home(home)
    with lock_home(home):
        m = _opened(home)
        if weights is not None:
            if len(weights) != len(m.drives) or not all(0 < w < float("inf") for w in weights):
                raise UsageError(f"{len(m.drives)} positive weights are needed", remedy="give one for each drive")
            if _target(m) is not None:
                raise StoreError(f"{home} is being rebalanced", remedy="finish that first, without --weights")
            _set_target(m, list(weights))
        elif _target(m) is None:
            _set_target(m, [measure_bandwidth(drive.path, _files_on(m, drive.index)) for drive in m.drives])
        _move_units(home, progress)


def _opened(home: Path) -> Manifest:
    m = Manifest.load(home)
    if m.layout != "striped":
        raise StoreError(f"{home} uses the released files in place", remedy="only striped installs can be rebalanced")
    for drive in m.drives:
        check_drive(m, drive)
    return m


def _fitting_weight(m: Manifest, path: Path) -> float:
    """The new drive's weight on the scale of the others: by speed where that was measured, else their mean."""
    known = [(drive.weight, drive.bytes_per_s) for drive in m.drives if drive.bytes_per_s]
    if not known:
        return sum(drive.weight for drive in m.drives) / len(m.drives)
    return measure_bandwidth(path) * sum(w for w, _ in known) / sum(rate for _, rate in known)


def _files_on(m: Manifest, drive: int) -> list[Path]:
    return [m.file_path(i) for i, entry in enumerate(m.files) if entry.drive == drive]


def _folder(m: Manifest) -> str:
    return m.files[0].name.partition("/")[0]


def _target(m: Manifest) -> list[float] | None:
    """The shares towards which the install is being moved."""
    return None if m.target is None else list(m.target)


@contextlib.contextmanager
def _transaction(m: Manifest) -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(m.path, isolation_level=None, timeout=30)
    try:
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN IMMEDIATE")
        yield db
        # Whoever holds an older view of this manifest must not record anything into it.
        db.execute("INSERT OR REPLACE INTO info VALUES ('generation', ?)", (str(m.generation + 1),))
        db.execute("COMMIT")
    except sqlite3.Error as e:
        raise ManifestError(f"{m.path} cannot be written: {e}", remedy="check free space and permissions") from None
    finally:
        db.close()


def _set_target(m: Manifest, weights: Sequence[float]) -> None:
    with _transaction(m) as db:
        target = json.dumps({"weights": list(weights), "suffix": f"g{m.generation + 1}"})
        db.execute("INSERT OR REPLACE INTO info VALUES ('target', ?)", (target,))


def _insert_drive(m: Manifest, info: DriveInfo, weights: Sequence[float]) -> None:
    """Makes room for one more file in every unit, empty so far, and records where the install is going."""
    old, new = len(m.drives), len(m.drives) + 1
    rows = []
    for unit in range(len(m.files) // old):
        entries = m.files[unit * old : (unit + 1) * old]
        rows += [(unit * new + d, entry.drive, entry.name, entry.nbytes) for d, entry in enumerate(entries)]
        rows.append((unit * new + old, old, f"{_folder(m)}/{_stem(entries[0].name)}.none.slices", 0))
    with _transaction(m) as db:
        db.execute(
            "INSERT INTO drives VALUES (?, ?, ?, ?, ?)", (info.index, info.uuid, str(info.path), info.weight, 0.0)
        )
        db.execute("DELETE FROM files")
        db.executemany("INSERT INTO files VALUES (?, ?, ?, ?)", rows)
        db.execute("UPDATE slices SET file = (file / ?) * ? + file % ?", (old, new, old))
        target = json.dumps({"weights": list(weights), "suffix": f"g{m.generation + 1}"})
        db.execute("INSERT OR REPLACE INTO info VALUES ('target', ?)", (target,))


def _stem(name: str) -> str:
    return name.partition("/")[2].partition(".")[0]


def _move_units(home: Path, progress: Progress | None) -> None:
    m = Manifest.load(home)
    assert m.target is not None
    _sweep(m)
    meter = Meter(m, progress, "move")
    moved = [0] * len(m.drives)
    try:
        for unit, key in enumerate(m.units):
            m = Manifest.load(home)
            first = unit * len(m.drives)
            if any(f".{m.suffix}." in entry.name for entry in m.files[first : first + len(m.drives)]):
                continue
            _Unit(m, unit, key).move(lambda drive, n: moved.__setitem__(drive, moved[drive] + n), meter, moved)
            _sweep(Manifest.load(home))
    except KeyboardInterrupt:
        raise Interrupted("the drives are not balanced yet; the install can be used as it is", remedy=_KEPT) from None
    _finish(Manifest.load(home))
    _sweep(Manifest.load(home))


class _Unit:
    """One unit on its way into a new cut."""

    def __init__(self, m: Manifest, unit: int, key: str) -> None:
        assert m.target is not None
        self._m = m
        self._first_file = unit * len(m.drives)
        layer = int(key.partition(".")[2] or -1)
        stem = key.replace(".", "-") if layer < 0 else f"layer-{layer:04d}"
        self._staying = [d for d, weight in enumerate(m.target) if weight > 0]
        rows, ends = cut_unit(m.config, key, [m.target[d] for d in self._staying])
        # Rows are cut over the drives that stay; the others keep an empty file.
        self._rows = [(b, part, self._staying[d], offset, n, at) for b, part, d, offset, n, at in rows]
        sizes = dict(zip(self._staying, ends, strict=True))
        self._sizes = [sizes.get(d, 0) for d in range(len(m.drives))]
        self._names = [
            f"{_folder(m)}/{stem}.{m.suffix if sizes.get(d) else m.suffix + '.none'}.slices"
            for d in range(len(m.drives))
        ]

    def move(self, count: Callable[[int, int], None], meter: Meter, moved: Sequence[int]) -> None:
        m = self._m
        self._check_space()
        opened: dict[int, int] = {}
        sources: dict[int, DirectFile] = {}
        done: list[tuple[int, int, int, int, int, int, int, int]] = []
        buffer = AlignedBuffer(1)
        try:
            for d, size in enumerate(self._sizes):
                if size:
                    path = m.drives[d].path / self._names[d]
                    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
                    opened[d] = self._guarded(d, lambda path=path, flags=flags: os.open(path, flags, 0o644))  # type: ignore[misc]
            blob, data = -1, memoryview(b"")
            for b, part, d, offset, nbytes, at in self._rows:
                if b != blob:
                    blob = b
                    begin = at
                    buffer, data = self._read(b, buffer, sources)
                checksum, present = 0, int(len(data) > 0)
                if present:
                    piece = data[at - begin : at - begin + nbytes]
                    checksum = xxhash.xxh3_64_intdigest(piece)
                    self._guarded(d, lambda d=d, piece=piece, offset=offset: write_padded(opened[d], piece, offset))  # type: ignore[misc]
                    count(d, nbytes)
                    meter.report(moved)
                signed = checksum - (1 << 64) if checksum >> 63 else checksum
                done.append((b, part, self._first_file + d, offset, nbytes, at, signed, present))
            for d, fd in opened.items():
                self._guarded(d, lambda fd=fd: sync(fd))  # type: ignore[misc]
                self._guarded(d, lambda d=d: fsync_path(m.drives[d].path / _folder(m)))  # type: ignore[misc]
        finally:
            for fd in opened.values():
                os.close(fd)
            for source in sources.values():
                source.close()
        blobs = sorted({row[0] for row in done})
        with _transaction(m) as db:
            db.executemany("DELETE FROM slices WHERE blob = ?", [(b,) for b in blobs])
            db.executemany("INSERT INTO slices VALUES (?, ?, ?, ?, ?, ?, ?, ?)", done)
            db.executemany(
                "UPDATE files SET name = ?, nbytes = ? WHERE file = ?",
                [
                    (name, size, self._first_file + d)
                    for d, (name, size) in enumerate(zip(self._names, self._sizes, strict=True))
                ],
            )

    def _guarded(self, drive: int, step: Callable[[], int | None]) -> int:
        try:
            return step() or 0
        except OSError as e:
            error = drive_error(self._m.drives[drive], e)
            raise type(error)(error.message, remedy=_KEPT) from None

    def _check_space(self) -> None:
        needed: dict[int, int] = {}
        for d, size in enumerate(self._sizes):
            device = os.stat(self._m.drives[d].path).st_dev
            needed[device] = needed.get(device, 0) + size
        for drive in self._m.drives:
            free = shutil.disk_usage(drive.path).free
            if free < needed[os.stat(drive.path).st_dev] + min(_MARGIN_BYTES, max(self._sizes)):
                raise DriveFullError(
                    f"drive {drive.index}, {drive.path}, has {free / 1e9:.1f} GB free, too little to move a layer",
                    remedy=f"free some space, and stop running engines so that old slices can be deleted; {_KEPT}",
                )

    def _read(self, blob: int, buffer: AlignedBuffer, files: dict[int, DirectFile]) -> tuple[AlignedBuffer, memoryview]:
        """The bytes of a blob, checked; empty when not all of it is present."""
        m = self._m
        first, end = int(m.first[blob]), int(m.first[blob + 1])
        if not m.present[first:end].all():
            return buffer, memoryview(b"")
        base = int(m.at[first]) // PAGE * PAGE
        room = -(-int(m.at[end - 1] + m.length[end - 1] - base) // PAGE) * PAGE
        if buffer.view.nbytes < room:
            buffer = AlignedBuffer(room)
        for i in range(first, end):
            number, offset, nbytes = int(m.file[i]), int(m.offset[i]), int(m.length[i])
            at = int(m.at[i]) - base
            lead = offset % PAGE
            path = m.file_path(number)
            try:
                if number not in files:
                    files[number] = DirectFile(path)
                view = buffer.view[at - lead : at - lead + -(-(lead + nbytes) // PAGE) * PAGE]
                files[number].read(view, offset - lead, lead + nbytes)
            except (OSError, EOFError) as e:
                raise ReadError(f"{path} cannot be read: {e}", remedy=f"check the drive; {_KEPT}") from None
            if xxhash.xxh3_64_intdigest(buffer.view[at : at + nbytes]) != int(m.checksum[i]):
                raise ReadError(
                    f"{path}: the bytes of {m.blob_name(blob)} differ from the recorded checksum",
                    remedy="mend it first: deltafin verify --repair; then deltafin drives rebalance",
                )
        begin = int(m.at[first]) - base
        return buffer, buffer.view[begin : int(m.at[end - 1] + m.length[end - 1]) - base]


def _finish(m: Manifest) -> None:
    """Records the new shares; drives without any leave the manifest."""
    assert m.target is not None
    leaving = [drive for drive in m.drives if not m.target[drive.index]]
    old, new = len(m.drives), len(m.drives) - len(leaving)
    number = {d: i for i, d in enumerate(d.index for d in m.drives if m.target[d.index])}
    folder = _folder(m)
    with _transaction(m) as db:
        for drive in m.drives:
            if m.target[drive.index]:
                db.execute("UPDATE drives SET weight = ? WHERE drive = ?", (m.target[drive.index], drive.index))
            else:
                db.execute("DELETE FROM drives WHERE drive = ?", (drive.index,))
        if leaving:
            for before, after in number.items():  # ascending, so that no number is taken twice
                db.execute("UPDATE drives SET drive = ? WHERE drive = ?", (after, before))
            rows = [
                ((f // old) * new + number[e.drive], number[e.drive], e.name, e.nbytes)
                for f, e in enumerate(m.files)
                if e.drive in number
            ]
            db.execute("DELETE FROM files")
            db.executemany("INSERT INTO files VALUES (?, ?, ?, ?)", rows)
            db.executemany(
                "UPDATE slices SET file = -1 - ? WHERE file = ?",
                [((f // old) * new + number[e.drive], f) for f, e in enumerate(m.files) if e.drive in number],
            )
            db.execute("UPDATE slices SET file = -1 - file")
        db.execute("DELETE FROM info WHERE key = 'target'")
    for drive in leaving:
        with contextlib.suppress(OSError):
            shutil.rmtree(drive.path / folder) if unread(m.path.parent) else (
                drive.path / folder / MARKER_NAME
            ).unlink()


def _sweep(m: Manifest) -> None:
    """Deletes slice files that the manifest does not name, unless an engine may still read them."""
    if not unread(m.path.parent):
        return
    known = {(entry.drive, entry.name) for entry in m.files}
    folder = _folder(m)
    for drive in m.drives:
        for path in (drive.path / folder).glob("*.slices"):
            if (drive.index, f"{folder}/{path.name}") not in known:
                try:
                    path.unlink()
                except OSError as e:
                    raise DriveError(f"{path} cannot be deleted: {e.strerror}", remedy="delete it by hand") from None


def moved_share(m: Manifest) -> float:
    """Share of all units that have their new cut; 1 when nothing is being moved."""
    if m.target is None:
        return 1.0
    new = np.array([f".{m.suffix}." in entry.name for entry in m.files])
    return float(new.reshape(-1, len(m.drives)).any(axis=1).mean())
