"""Bringing an install's missing slices onto its drives, resumably.

Movers read a blob from the checkpoint, checksum its slices and hand them to the writers of their drives; a writer makes
a batch durable and reports it; only then does the calling thread mark it present. A kill at any point therefore loses
at most the batches in flight. In place there is nothing to write: movers report checksums directly.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from deltafin.errors import DeltafinError, DriveError, DriveFullError, Interrupted, StoreError
from deltafin.store.buffers import AlignedBuffer
from deltafin.store.files import fsync_path, sync
from deltafin.store.manifest import Manifest, PresenceLog
from deltafin.store.meter import REPORT_SECONDS, Meter, Progress
from deltafin.store.source import AGAIN
from deltafin.store.types import PAGE, SLICE_ALIGN, DriveInfo

BATCH_BYTES = 256 << 20
"""Unsynced bytes per drive: large enough that syncing costs little, small enough to redo after a kill."""

BATCH_SECONDS = 2.0
_ZEROS = bytes(SLICE_ALIGN)
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)

Row = tuple[int, int, int]  # blob, part, checksum


@dataclass(frozen=True, slots=True)
class _Slice:
    blob: int
    part: int
    file: int
    offset: int
    begin: int  # in the blob
    length: int


@dataclass(slots=True)
class _Job:
    """A slice on its way to a drive; ``done`` counts down the slices of its blob."""

    slice: _Slice
    data: memoryview
    checksum: int
    done: queue.SimpleQueue[None]


@dataclass(slots=True)
class _Shared:
    """What the threads of one ingest share."""

    reports: queue.SimpleQueue[list[Row]] = field(default_factory=queue.SimpleQueue)
    stop: threading.Event = field(default_factory=threading.Event)
    failures: list[Exception] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)  # payload bytes by drive; each element has one writer or a lock
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, error: Exception) -> None:
        self.failures.append(error)
        self.stop.set()


class Source(Protocol):
    """Where a mover gets blobs from; each has one of its own."""

    def read(self, blob: int, begin: int, end: int) -> memoryview:
        """Bytes [begin, end) of ``blob``, valid until the next call."""

    def close(self) -> None:
        """Called once, by the mover."""


class Witness(Protocol):
    """Decides when written slices may be believed: when the file they come from has proved genuine."""

    def durable(self, rows: Sequence[Row]) -> None:
        """These slices are on their drives. Called in the thread that called ``ingest``, as the next one."""

    def believed(self) -> list[int]:
        """Blobs that may be believed since the last call; raises when a file is not genuine."""

    def finish(self) -> None:
        """Everything is durable: waits until all has been judged."""


def ingest(
    manifest: Manifest,
    source: Callable[[], Source],
    progress: Progress | None = None,
    *,
    blobs: Sequence[int] | None = None,
    movers: int | None = None,
    witness: Witness | None = None,
    interrupt: Callable[[], None] = lambda: None,
    phase: str = "",
) -> None:
    """Makes slices of ``manifest`` present.

    Args:
        manifest: of an install, striped or in place.
        source: makes a mover's source of missing bytes.
        progress: called from this thread a few times per second and once at the end.
        blobs: which to bring, in this order; None for all, in the order in which the slice files grow.
        movers: blobs on their way at a time.
        witness: when given, slices are present only once it believes them.
        interrupt: makes sources give up what they wait for; called when this thread is told to stop.
        phase: what progress calls it; ``copy`` or, in place, ``checksum`` by default.

    Raises:
        DriveFullError: a drive has no room; finished work is kept.
        DriveError: a drive cannot be written.
        ReadError: the checkpoint cannot be read.
        ManifestError: the manifest cannot be written.
        Interrupted: Ctrl-C; finished work is kept.
    """
    m = manifest
    order = _reading_order(m) if blobs is None else list(blobs)
    chosen = np.zeros(len(m.first) - 1, dtype=bool)
    chosen[order] = True
    wanted = chosen[m.blobs]
    striped = m.layout == "striped"
    meter = Meter(m, progress, phase or ("copy" if striped else "checksum"), wanted)
    missing = wanted & ~m.present
    if witness is not None:
        missing &= ~m.written
    if not missing.any() and witness is None:
        meter.report([0] * len(m.drives), force=True)
        return
    _check_space(m, missing)
    shared = _Shared(moved=[0] * len(m.drives))
    work = _missing_slices(m, order, missing)
    writers = [_Writer(m, drive, shared) for drive in m.drives] if striped else []
    crew = [_Mover(m, source(), work, shared, writers) for _ in range(movers or max(4, 2 * len(m.drives)))]
    log = PresenceLog(m.path)
    interrupted = False
    try:
        for thread in (*crew, *writers):
            thread.start()
        try:
            while any(mover.is_alive() for mover in crew):
                _commit(log, shared, witness, timeout=REPORT_SECONDS)
                meter.report(shared.moved)
        except KeyboardInterrupt:
            interrupted = True
            interrupt()
        finally:
            shared.stop.set()
            for mover in crew:
                mover.join()
            for writer in writers:
                writer.jobs.put(None)
            for writer in writers:
                writer.join()
            _commit(log, shared, witness, timeout=0)
        if witness is not None and not interrupted and not shared.failures:
            try:
                witness.finish()
                log.believe(witness.believed())
            except KeyboardInterrupt:
                interrupted = True
    finally:
        log.close()
    meter.report(shared.moved, force=True)
    if interrupted:
        raise Interrupted("the install is unfinished", remedy=AGAIN)
    if shared.failures:
        raise shared.failures[0]


def _commit(log: PresenceLog, shared: _Shared, witness: Witness | None, timeout: float) -> None:
    rows: list[Row] = []
    try:
        rows += shared.reports.get(timeout=timeout) if timeout else shared.reports.get_nowait()
        while True:
            rows += shared.reports.get_nowait()
    except queue.Empty:
        pass
    if rows:
        log.commit(rows, believed=witness is None)
    if witness is not None:
        if rows:
            witness.durable(rows)
        if believed := witness.believed():
            log.believe(believed)


def _reading_order(m: Manifest) -> list[int]:
    """All blobs in the order in which the slice files grow."""
    return list(dict.fromkeys(m.blobs[m.reading_order()].tolist()))


def _missing_slices(m: Manifest, order: Sequence[int], missing: npt.NDArray[np.bool_]) -> Iterator[list[_Slice]]:
    """Slices to bring, grouped by blob."""
    for blob in order:
        first, end = int(m.first[blob]), int(m.first[blob + 1])
        base = int(m.at[first])
        slices = [
            _Slice(blob, i - first, int(m.file[i]), int(m.offset[i]), int(m.at[i]) - base, int(m.length[i]))
            for i in range(first, end)
            if missing[i]
        ]
        if slices:
            yield slices


class _Mover(threading.Thread):
    """Reads blobs from its source, one at a time, and passes their slices on."""

    def __init__(
        self,
        manifest: Manifest,
        source: Source,
        blobs: Iterator[list[_Slice]],
        shared: _Shared,
        writers: list[_Writer],
    ) -> None:
        super().__init__(daemon=True)
        self._manifest = manifest
        self._source = source
        self._blobs = blobs
        self._shared = shared
        self._writers = writers

    def run(self) -> None:
        shared = self._shared
        batch: list[Row] = []
        since = time.monotonic()
        try:
            while not shared.stop.is_set() and (slices := self._next()):
                rows = self._move(slices)
                batch += rows
                if batch and time.monotonic() - since > BATCH_SECONDS:
                    shared.reports.put(batch)
                    batch, since = [], time.monotonic()
        except Exception as e:
            shared.fail(e if isinstance(e, DeltafinError) else StoreError(f"reading the checkpoint failed: {e}"))
        finally:
            self._source.close()
            shared.reports.put(batch)  # even if empty: it wakes the caller, who looks whether all movers are done

    def _next(self) -> list[_Slice] | None:
        with self._shared.lock:
            return next(self._blobs, None)

    def _move(self, slices: list[_Slice]) -> list[Row]:
        """Returns rows that are already durable: all in place, none striped."""
        m = self._manifest
        begin, end = slices[0].begin, slices[-1].begin + slices[-1].length
        data = self._source.read(slices[0].blob, begin, end)
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        rows: list[Row] = []
        for s in slices:
            part = data[s.begin - begin : s.begin - begin + s.length]
            checksum = xxhash.xxh3_64_intdigest(part)
            drive = m.files[s.file].drive
            if self._writers:
                self._writers[drive].jobs.put(_Job(s, part, checksum, done))
            else:
                rows.append((s.blob, s.part, checksum))
                with self._shared.lock:
                    self._shared.moved[drive] += s.length
        if self._writers:
            for _ in slices:
                done.get()
        return rows


class _Writer(threading.Thread):
    """Writes one drive's slices and makes them durable in batches."""

    def __init__(self, manifest: Manifest, drive: DriveInfo, shared: _Shared) -> None:
        super().__init__(daemon=True)
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._manifest = manifest
        self._drive = drive
        self._shared = shared
        self._open: dict[int, int] = {}
        self._direct: set[int] = set()  # of the open ones, those that bypass the page cache
        self._bounce = AlignedBuffer(SLICE_ALIGN)
        self._created: set[Path] = set()
        self._batch: list[Row] = []
        self._unsynced = 0
        self._since = time.monotonic()

    def run(self) -> None:
        failed = False
        while (job := self.jobs.get()) is not None:
            if not failed:
                failed = not self._attempt(lambda job=job: self._write(job))  # type: ignore[misc]
            # Release the mover even after a failure, or it would wait for ever.
            job.data.release()
            job.done.put(None)
            full = self._unsynced >= BATCH_BYTES or time.monotonic() - self._since > BATCH_SECONDS
            if full and not failed:
                failed = not self._attempt(self._sync)
        # What was written before a failure is still good once synced.
        self._attempt(self._sync)

    def _attempt(self, step: Callable[[], None]) -> bool:
        try:
            step()
            return True
        except OSError as e:
            self._shared.fail(drive_error(self._drive, e))
            return False

    def _write(self, job: _Job) -> None:
        s = job.slice
        fd = self._descriptor(s.file)
        size = s.length + -s.length % SLICE_ALIGN
        pieces = self._aligned(job.data) if fd in self._direct else [job.data, memoryview(_ZEROS)[: size - s.length]]
        offset = s.offset
        while pieces:
            try:
                written = os.pwritev(fd, pieces, offset)
            except OSError as e:
                if e.errno != errno.EINVAL or fd not in self._direct:
                    raise
                self._step_back(fd)
                continue
            offset += written
            while pieces and written >= len(pieces[0]):
                written -= len(pieces.pop(0))
            if pieces:  # interrupted, or at a limit of the system
                pieces[0] = pieces[0][written:]
        if fd not in self._direct and hasattr(os, "posix_fadvise"):
            # Starts the write-back now, so that the sync at the batch's end finds little to do.
            os.posix_fadvise(fd, s.offset, size, os.POSIX_FADV_DONTNEED)
        self._batch.append((s.blob, s.part, job.checksum))
        self._unsynced += size
        self._shared.moved[self._drive.index] += s.length

    def _descriptor(self, file: int) -> int:
        fd = self._open.get(file)
        if fd is None:
            path = self._manifest.file_path(file)
            if not path.exists():
                self._created.add(path.parent)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            self._open[file] = fd
            if _O_DIRECT:
                # Past the page cache: through it, a gigabyte costs twice the processor time and evicts what others use.
                with contextlib.suppress(OSError):
                    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _O_DIRECT)
                    self._direct.add(fd)
        return fd

    def _step_back(self, fd: int) -> None:
        """Goes on through the page cache: this file system refuses a direct write."""
        self._direct.discard(fd)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_O_DIRECT)

    def _aligned(self, data: memoryview) -> list[memoryview]:
        """``data`` and its padding in pieces that a direct write takes: whole pages at page boundaries."""
        whole = len(data) // PAGE * PAGE
        if ctypes.addressof(ctypes.c_char.from_buffer(data)) % PAGE:
            whole = 0
        rest = len(data) - whole
        room = rest + -len(data) % SLICE_ALIGN
        if self._bounce.view.nbytes < room:
            self._bounce = AlignedBuffer(room)
        tail = self._bounce.view[:room]
        tail[:rest] = data[whole:]
        tail[rest:] = _ZEROS[: room - rest]
        return [piece for piece in (data[:whole], tail) if len(piece)]

    def _sync(self) -> None:
        batch, self._batch, self._unsynced = self._batch, [], 0
        try:
            for fd in self._open.values():
                sync(fd)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            for folder in self._created:
                fsync_path(folder)
        finally:
            while self._open:
                os.close(self._open.popitem()[1])
            self._direct.clear()
        self._created.clear()
        self._since = time.monotonic()
        if batch:
            self._shared.reports.put(batch)


def drive_error(drive: DriveInfo, error: OSError) -> DriveError:
    """The error a user should see when writing to ``drive`` failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DriveFullError(f"drive {drive.index}, {drive.path}, is full", remedy=f"free some space; {AGAIN}")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return DriveError(
            f"drive {drive.index}, {drive.path}, cannot be written: {error.strerror}",
            remedy=f"make it writable for this user; {AGAIN}",
        )
    return DriveError(
        f"drive {drive.index}, {drive.path}, failed while writing: {error.strerror}",
        remedy=f"check the drive and its cable; {AGAIN}",
    )


def _check_space(manifest: Manifest, wanted: npt.NDArray[np.bool_]) -> None:
    """Refuses to start what cannot fit.

    Raises:
        DriveFullError: a file system lacks room for the missing slices of its drives.
    """
    if manifest.layout != "striped":
        return
    m = manifest
    padded = -(-m.length // SLICE_ALIGN) * SLICE_ALIGN
    needed: dict[int, int] = {}
    free: dict[int, tuple[int, DriveInfo]] = {}
    for drive in m.drives:
        try:
            device = os.stat(drive.path).st_dev
            room = os.statvfs(drive.path)
        except OSError as e:
            raise drive_error(drive, e) from None
        free[device] = (room.f_bavail * room.f_frsize, drive)
        for index, entry in enumerate(m.files):
            if entry.drive == drive.index:
                path = m.file_path(index)
                have = path.stat().st_size if path.exists() else 0  # written but unmarked bytes need no new room
                missing = (m.file == index) & wanted & (m.offset + padded > have)
                needed[device] = needed.get(device, 0) + int(padded[missing].sum())
    for device, nbytes in needed.items():
        available, drive = free[device]
        if nbytes > available:
            raise DriveFullError(
                f"drive {drive.index}, {drive.path}, has {available / 1e9:.1f} GB free of {nbytes / 1e9:.1f} needed",
                remedy="free some space or add a drive",
            )
