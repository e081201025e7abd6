"""Replicas: copies of experts' slices on a second drive, so that a drive that is slow or busy is helped by others.

A striped install reads an expert from all drives at once and waits for the slowest. Where a slice also lies on another
drive, whichever drive is free first reads it (see ``reader``). Replicas are advisory: their index lies beside the
manifest, is believed only when it fits the manifest to the letter, and every byte read from a replica is checked like
any other. Losing the index or a replica's file costs speed, never a token.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from deltafin.errors import DriveFullError, Interrupted, ManifestError, ReadError, StoreError
from deltafin.store.buffers import AlignedBuffer
from deltafin.store.create import lock_home
from deltafin.store.direct import DirectFile
from deltafin.store.drives import check_drive
from deltafin.store.files import fsync_path, sync, write_padded
from deltafin.store.ingest import drive_error
from deltafin.store.manifest import Manifest, read_only
from deltafin.store.types import PAGE, SLICE_ALIGN, IngestProgress

INDEX_NAME = "replicas.sqlite"
FILE_NAME = "replicas.slices"
_FORMAT = 1
_SCHEMA = (
    "CREATE TABLE info (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT",
    "CREATE TABLE replicas (blob INTEGER NOT NULL, part INTEGER NOT NULL, drive INTEGER NOT NULL, "
    "offset INTEGER NOT NULL, PRIMARY KEY (blob, part)) STRICT, WITHOUT ROWID",
)
_MAX_INDEX_BYTES = 512 << 20
_BATCH = 32  # experts made durable together
_MARGIN_BYTES = 64 << 20
_KEPT = "replicas made so far are kept: the same command continues"


@dataclass(frozen=True)
class Replicas:
    """Where second copies lie.

    Attributes:
        drive: [slices] of the manifest, the drive of each slice's copy; -1 without one.
        offset: [slices] first byte in that drive's ``FILE_NAME``.
        problem: why an index that exists is not used; empty otherwise.
    """

    drive: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    problem: str = field(default="")

    @property
    def count(self) -> int:
        """Slices with a copy."""
        return int((self.drive >= 0).sum())

    @classmethod
    def none(cls, m: Manifest, problem: str = "") -> Replicas:
        """Of an install without any."""
        return cls(np.full(len(m.file), -1, np.int64), np.zeros(len(m.file), np.int64), problem)


def replica_path(m: Manifest, drive: int) -> Path:
    """The file of copies on a drive of a striped install."""
    return m.drives[drive].path / m.files[0].name.partition("/")[0] / FILE_NAME


def load(m: Manifest) -> Replicas:
    """The replicas of an install; none, with the reason, when their index does not fit. Never raises."""
    path = m.path.parent / INDEX_NAME
    if m.layout != "striped" or not path.exists():
        return Replicas.none(m)
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError("larger than any index")
        with read_only(path) as db:
            return _load(m, db)
    except (sqlite3.Error, OSError, KeyError, ValueError, TypeError, OverflowError) as e:
        return Replicas.none(m, f"{path} is not used: {str(e)[:200]}")


def replicate(
    home: Path, experts: Iterable[int], *, limit: int | None = None, progress: Callable[[IngestProgress], None] | None
) -> Replicas:
    """Copies every slice of ``experts`` to a second drive, the hottest first.

    Args:
        home: a striped install over at least two drives.
        experts: their blob numbers, hottest first; what is absent or has a replica is skipped.
        limit: most bytes all replicas may take, earlier ones included.
        progress: told how far it is.

    Returns:
        All replicas there are now.

    Raises:
        StoreError, DriveError: as named; replicas made so far are kept.
        Interrupted: on Ctrl-C, likewise.
    """
    with lock_home(home):
        m = Manifest.load(home)
        if m.layout != "striped" or len(m.drives) < 2:
            raise StoreError(
                f"{home} is not striped over several drives", remedy="add one first: deltafin drives add PATH"
            )
        if m.target is not None:
            raise StoreError(f"{home} is being rebalanced", remedy="finish that first: deltafin drives rebalance")
        for drive in m.drives:
            check_drive(m, drive)
        known = load(m)
        if not known.count:
            _start_anew(m)
        try:
            _Copying(m, known).run(experts, limit, progress)
        except KeyboardInterrupt:
            raise Interrupted("not all replicas are made; the install can be used as it is", remedy=_KEPT) from None
        return load(m)


def remove_replicas(home: Path) -> None:
    """Forgets all replicas and deletes their files. A running engine reads the first copies from then on.

    Raises:
        StoreError: a file cannot be deleted.
    """
    with lock_home(home):
        _delete(Manifest.load(home))


def _delete(m: Manifest) -> None:
    (m.path.parent / INDEX_NAME).unlink(missing_ok=True)
    fsync_path(m.path.parent)
    if m.layout != "striped":
        return
    for drive in m.drives:
        path = replica_path(m, drive.index)
        try:
            path.unlink(missing_ok=True)
        except OSError as e:
            raise StoreError(f"{path} cannot be deleted: {e.strerror}", remedy="delete it by hand") from None


def _start_anew(m: Manifest) -> None:
    """An empty index; copies that an earlier index described are gone first."""
    _delete(m)
    path = m.path.parent / INDEX_NAME
    temporary = path.with_name(INDEX_NAME + ".new")
    temporary.unlink(missing_ok=True)
    db = sqlite3.connect(temporary, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = OFF")
        for statement in _SCHEMA:
            db.execute(statement)
        info = {"format": _FORMAT, "store": m.store_uuid, "generation": m.generation}
        db.executemany("INSERT INTO info VALUES (?, ?)", [(key, str(value)) for key, value in info.items()])
    finally:
        db.close()
    fsync_path(temporary)
    os.replace(temporary, path)
    fsync_path(path.parent)


def _load(m: Manifest, db: sqlite3.Connection) -> Replicas:
    schema = {sql for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL LIMIT 8")}
    info = dict(db.execute("SELECT key, value FROM info LIMIT 8")) if schema == set(_SCHEMA) else {}
    if info.get("format") != str(_FORMAT) or info.get("store") != m.store_uuid:
        raise ValueError("it is not an index of this install's replicas")
    if info.get("generation") != str(m.generation):
        raise ValueError("slices have been moved since; make the replicas again")
    limit = int(m.first[m.expert_blobs])
    rows = db.execute(f"SELECT blob, part, drive, offset FROM replicas ORDER BY blob, part LIMIT {limit + 1}")
    table = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int64).reshape(-1, 4)
    blob, part, drive, offset = table.T
    sound = (blob >= 0) & (blob < m.expert_blobs) & (part >= 0) & (drive >= 0) & (drive < len(m.drives))
    if len(table) > limit or not sound.all():
        raise ValueError("inconsistent rows")
    index = m.first[blob] + part
    if not (index < m.first[blob + 1]).all():
        raise ValueError("inconsistent parts")
    home_drive = np.array([entry.drive for entry in m.files], dtype=np.int64)[m.file[index]]
    if (drive == home_drive).any() or ((offset - m.at[index]) % PAGE).any():
        raise ValueError("inconsistent places")
    found = Replicas.none(m)
    for d in np.unique(drive).tolist():
        mine = drive == d
        size = os.stat(replica_path(m, d)).st_size
        if (offset[mine] < 0).any() or (offset[mine] > size - m.length[index[mine]]).any():
            raise ValueError(f"{replica_path(m, d)} is too short")
    found.drive[index], found.offset[index] = drive, offset
    return found


class _Copying:
    """Appends copies to the drives' files, a batch of experts at a time: data durable first, then its rows."""

    def __init__(self, m: Manifest, known: Replicas) -> None:
        self._m = m
        self._known = known
        self._home_drive = np.array([entry.drive for entry in m.files], dtype=np.int64)[m.file]
        self._weights = [drive.weight for drive in m.drives]
        has = known.drive >= 0
        ends = -(-(known.offset + m.length) // SLICE_ALIGN) * SLICE_ALIGN
        self._ends = [int(ends[has & (known.drive == d.index)].max(initial=0)) for d in m.drives]
        self._made = [0] * len(m.drives)

    def run(self, experts: Iterable[int], limit: int | None, progress: Callable[[IngestProgress], None] | None) -> None:
        m, chosen = self._m, []
        total = sum(self._ends)
        for blob in experts:
            first, end = int(m.first[blob]), int(m.first[blob + 1])
            if blob >= m.expert_blobs or not m.present[first:end].all() or (self._known.drive[first:end] >= 0).all():
                continue
            total += sum(-(-int(n) // SLICE_ALIGN) * SLICE_ALIGN for n in m.length[first:end])
            if limit is not None and total > limit:
                break
            chosen.append(int(blob))
        wanted = sum(int(m.length[int(m.first[b]) : int(m.first[b + 1])].sum()) for b in chosen)
        self._check_space(wanted)
        with contextlib.ExitStack() as stack:
            targets = {d.index: self._open(stack, d.index) for d in m.drives}
            sources = _Sources(stack)
            db = sqlite3.connect(m.path.parent / INDEX_NAME, isolation_level=None, timeout=30)
            stack.callback(db.close)
            buffer = AlignedBuffer(int(m.length[: int(m.first[m.expert_blobs])].max(initial=1)) + 2 * PAGE)
            for start in range(0, len(chosen), _BATCH):
                rows: list[tuple[int, int, int, int]] = []
                for blob in chosen[start : start + _BATCH]:
                    rows += self._copy(blob, targets, sources, buffer)
                for drive in {row[2] for row in rows}:
                    with self._guarded(drive):
                        sync(targets[drive])
                self._record(db, rows)
                if progress is not None:
                    progress(IngestProgress("replicate", sum(self._made), wanted, 0, (), None))

    def _open(self, stack: contextlib.ExitStack, drive: int) -> int:
        path = replica_path(self._m, drive)
        with self._guarded(drive):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            stack.callback(os.close, fd)
            fsync_path(path.parent)
        return fd

    def _copy(
        self, blob: int, targets: dict[int, int], sources: _Sources, buffer: AlignedBuffer
    ) -> Iterator[tuple[int, int, int, int]]:
        m = self._m
        first, end = int(m.first[blob]), int(m.first[blob + 1])
        for i in range(first, end):
            if self._known.drive[i] >= 0:
                continue
            others = [d.index for d in m.drives if d.index != self._home_drive[i]]
            drive = min(others, key=lambda d: self._ends[d] / self._weights[d])
            data = self._read(i, blob, sources, buffer)
            # The copy lies at the same place within a page, so that it lands in the same place of a buffer.
            offset = self._ends[drive] + int(m.at[i]) % PAGE
            with self._guarded(drive):
                write_padded(targets[drive], data, offset)
            self._ends[drive] = -(-(offset + len(data)) // SLICE_ALIGN) * SLICE_ALIGN
            self._made[drive] += len(data)
            yield blob, i - first, drive, offset

    def _read(self, i: int, blob: int, sources: _Sources, buffer: AlignedBuffer) -> memoryview:
        m = self._m
        number, offset, nbytes = int(m.file[i]), int(m.offset[i]), int(m.length[i])
        path, lead = m.file_path(number), offset % PAGE
        try:
            view = buffer.view[: -(-(lead + nbytes) // PAGE) * PAGE]
            sources.of(number, path).read(view, offset - lead, lead + nbytes)
        except (OSError, EOFError) as e:
            raise ReadError(f"{path} cannot be read: {e}", remedy=f"check the drive; {_KEPT}") from None
        data = buffer.view[lead : lead + nbytes]
        if xxhash.xxh3_64_intdigest(data) != int(m.checksum[i]):
            raise ReadError(
                f"{path}: the bytes of {m.blob_name(blob)} differ from the recorded checksum",
                remedy="mend it first: deltafin verify --repair",
            )
        return data

    def _record(self, db: sqlite3.Connection, rows: Sequence[tuple[int, int, int, int]]) -> None:
        try:
            db.execute("PRAGMA synchronous = FULL")
            db.execute("BEGIN IMMEDIATE")
            db.executemany("INSERT INTO replicas VALUES (?, ?, ?, ?)", rows)
            db.execute("COMMIT")
        except sqlite3.Error as e:
            raise ManifestError(
                f"{self._m.path.parent / INDEX_NAME} cannot be written: {e}", remedy="check free space and permissions"
            ) from None

    def _check_space(self, wanted: int) -> None:
        """Roughly: copies go to all drives by weight."""
        m, total = self._m, sum(self._weights)
        needed: dict[int, float] = {}
        for drive in m.drives:
            device = os.stat(drive.path).st_dev
            needed[device] = needed.get(device, _MARGIN_BYTES) + wanted * drive.weight / total
        for drive in m.drives:
            free = shutil.disk_usage(drive.path).free
            if free < needed[os.stat(drive.path).st_dev]:
                raise DriveFullError(
                    f"drive {drive.index}, {drive.path}, has {free / 1e9:.1f} GB free, too little for its replicas",
                    remedy="choose fewer: --hot N or --gb N",
                )

    @contextlib.contextmanager
    def _guarded(self, drive: int) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            error = drive_error(self._m.drives[drive], e)
            raise type(error)(error.message, remedy=_KEPT) from None


class _Sources:
    """Opened slice files, closed with the stack; a few at a time, since a full install has hundreds."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._files: dict[int, DirectFile] = {}
        stack.callback(self._close)

    def of(self, number: int, path: Path) -> DirectFile:
        file = self._files.get(number)
        if file is None:
            if len(self._files) >= 64:
                self._close()
            file = self._files[number] = DirectFile(path)
        return file

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
