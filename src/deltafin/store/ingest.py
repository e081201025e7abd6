"""Bringing an install's missing slices onto its drives, resumably.

Movers read a blob from the checkpoint, checksum its slices and hand them to the writers of their drives; a writer makes
a batch durable and reports it; only then does the calling thread mark it present. A kill at any point therefore loses
at most the batches in flight. In place there is nothing to write: movers report checksums directly.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from deltafin.checkpoint import Checkpoint, Run
from deltafin.errors import DriveError, DriveFullError, Interrupted, ReadError, StoreError
from deltafin.store.buffers import AlignedBuffer
from deltafin.store.direct import DirectFile
from deltafin.store.files import fsync_path, sync
from deltafin.store.manifest import Manifest, PresenceLog
from deltafin.store.types import PAGE, SLICE_ALIGN, SPINE_PAGE, DriveInfo, IngestProgress

BATCH_BYTES = 256 << 20
"""Unsynced bytes per drive: large enough that syncing costs little, small enough to redo after a kill."""

BATCH_SECONDS = 2.0
REPORT_SECONDS = 0.2
_AGAIN = "finished work is kept: run the same command again to continue"
_ZEROS = bytes(SLICE_ALIGN)

Progress = Callable[[IngestProgress], None]
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


def ingest(manifest: Manifest, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
    """Makes every slice of ``manifest`` present.

    Args:
        manifest: of an install of ``checkpoint``, striped or in place.
        checkpoint: where missing bytes come from.
        progress: called from this thread a few times per second and once at the end.

    Raises:
        DriveFullError: a drive has no room; finished work is kept.
        DriveError: a drive cannot be written.
        ReadError: the checkpoint cannot be read.
        ManifestError: the manifest cannot be written.
        Interrupted: Ctrl-C; finished work is kept.
    """
    todo = np.flatnonzero(~manifest.present)
    striped = manifest.layout == "striped"
    meter = Meter(manifest, progress, "copy" if striped else "checksum")
    if not len(todo):
        meter.report([0] * len(manifest.drives), force=True)
        return
    _check_space(manifest)
    shared = _Shared(moved=[0] * len(manifest.drives))
    blobs = _missing_blobs(manifest)
    writers = [_Writer(manifest, drive, shared) for drive in manifest.drives] if striped else []
    movers = [_Mover(manifest, checkpoint, blobs, shared, writers) for _ in range(max(4, 2 * len(manifest.drives)))]
    log = PresenceLog(manifest.path)
    interrupted = False
    try:
        for thread in (*movers, *writers):
            thread.start()
        try:
            while any(mover.is_alive() for mover in movers):
                _commit(log, shared, timeout=REPORT_SECONDS)
                meter.report(shared.moved)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            shared.stop.set()
            for mover in movers:
                mover.join()
            for writer in writers:
                writer.jobs.put(None)
            for writer in writers:
                writer.join()
            _commit(log, shared, timeout=0)
    finally:
        log.close()
    meter.report(shared.moved, force=True)
    if interrupted:
        raise Interrupted("the install is unfinished", remedy=_AGAIN)
    if shared.failures:
        raise shared.failures[0]


def _commit(log: PresenceLog, shared: _Shared, timeout: float) -> None:
    rows: list[Row] = []
    try:
        rows += shared.reports.get(timeout=timeout) if timeout else shared.reports.get_nowait()
        while True:
            rows += shared.reports.get_nowait()
    except queue.Empty:
        pass
    if rows:
        log.commit(rows)


def _missing_blobs(manifest: Manifest) -> Iterator[list[_Slice]]:
    """Slices to bring, grouped by blob, in the order in which the slice files grow."""
    m = manifest
    blobs = m.blobs
    todo = m.reading_order()
    todo = todo[~m.present[todo]]
    order = list(dict.fromkeys(blobs[todo].tolist()))
    for blob in order:
        first, end = int(m.first[blob]), int(m.first[blob + 1])
        base = int(m.at[first])
        yield [
            _Slice(blob, i - first, int(m.file[i]), int(m.offset[i]), int(m.at[i]) - base, int(m.length[i]))
            for i in range(first, end)
            if not m.present[i]
        ]


class _Mover(threading.Thread):
    """Reads blobs from the checkpoint, one at a time, and passes their slices on."""

    def __init__(
        self,
        manifest: Manifest,
        checkpoint: Checkpoint,
        blobs: Iterator[list[_Slice]],
        shared: _Shared,
        writers: list[_Writer],
    ) -> None:
        super().__init__(daemon=True)
        self._manifest = manifest
        self._source = BlobSource(manifest, checkpoint)
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
            shared.fail(e if isinstance(e, StoreError) else StoreError(f"reading the checkpoint failed: {e}"))
        finally:
            self._source.close()
            shared.reports.put(batch)  # even if empty: it wakes the caller, who looks whether all movers are done

    def _next(self) -> list[_Slice] | None:
        with self._shared.lock:
            return next(self._blobs, None)

    def _move(self, slices: list[_Slice]) -> list[Row]:
        """Returns rows that are already durable: all in place, none striped."""
        m = self._manifest
        data = self._source.read(slices[0].blob)
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        rows: list[Row] = []
        for s in slices:
            part = data[s.begin : s.begin + s.length]
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


class BlobSource:
    """Reads a blob's bytes out of the checkpoint, gathering scattered ones. One per thread.

    Args:
        manifest: of the install, which numbers blobs and places spine tensors.
        checkpoint: the released files.
    """

    def __init__(self, manifest: Manifest, checkpoint: Checkpoint) -> None:
        self._manifest = manifest
        self._checkpoint = checkpoint
        self._files: dict[str, DirectFile] = {}
        self._blob = AlignedBuffer(1)
        self._scratch = AlignedBuffer(1)
        self._unit: tuple[int, int, list[tuple[int, Run]]] = (0, 0, [])

    def read(self, blob: int) -> memoryview:
        """The bytes of ``blob``, valid until the next call.

        Raises:
            ReadError: the checkpoint cannot be read.
        """
        runs, nbytes = self._runs(blob)
        if len(runs) == 1 and runs[0][1].nbytes == nbytes:
            self._blob, view = self._direct(self._blob, runs[0][1])
            return view
        self._blob = _at_least(self._blob, nbytes)
        target = self._blob.view[:nbytes]
        target[:] = bytes(nbytes)  # padding between tensors is part of the slice and of its checksum
        for at, run in runs:
            self._scratch, view = self._direct(self._scratch, run)
            target[at : at + run.nbytes] = view
        return target

    def close(self) -> None:
        """Closes the shards."""
        for file in self._files.values():
            file.close()

    def _runs(self, blob: int) -> tuple[list[tuple[int, Run]], int]:
        m = self._manifest
        first, end = int(m.first[blob]), int(m.first[blob + 1])
        begin = int(m.at[first])
        nbytes = int(m.at[end - 1] + m.length[end - 1]) - begin
        if blob < m.expert_blobs:
            layer, expert = divmod(blob, m.config.experts)
            runs = self._checkpoint.expert_runs(layer + m.config.dense_layers, expert)
            starts = np.cumsum([0, *(run.nbytes for run in runs)]).tolist()
            return list(zip(starts, runs, strict=False)), nbytes
        return _cut(self._unit_runs(blob), begin, begin + nbytes), nbytes

    def _unit_runs(self, blob: int) -> list[tuple[int, Run]]:
        """Where the unit that contains ``blob`` comes from, sorted by position in its buffer."""
        low, high, runs = self._unit
        if low <= blob < high:
            return runs
        m = self._manifest
        key = next(k for k, u in m.units.items() if u.first_blob <= blob < u.first_blob + u.blobs)
        tensors = self._checkpoint.spine_units()[key]
        runs = sorted(
            (m.tensor_offsets[name], Run(info.file, info.offset, info.nbytes)) for name, info in tensors.items()
        )
        self._unit = (m.units[key].first_blob, m.units[key].first_blob + m.units[key].blobs, runs)
        return runs

    def _direct(self, buffer: AlignedBuffer, run: Run) -> tuple[AlignedBuffer, memoryview]:
        lead = run.offset % PAGE
        wanted = lead + run.nbytes
        buffer = _at_least(buffer, wanted)
        path = self._checkpoint.folder / run.file
        try:
            file = self._files.get(run.file)
            if file is None:
                file = self._files[run.file] = DirectFile(path.resolve())
            file.read(buffer.view[: -(-wanted // PAGE) * PAGE], run.offset - lead, wanted)
        except (OSError, EOFError) as e:
            reason = (e.strerror if isinstance(e, OSError) else None) or e
            raise ReadError(
                f"{path}, bytes {run.offset} to {run.offset + run.nbytes}: {reason}",
                remedy="fetch this file again from the model's repository; " + _AGAIN,
            ) from None
        return buffer, buffer.view[lead:wanted]


def _at_least(buffer: AlignedBuffer, nbytes: int) -> AlignedBuffer:
    return buffer if buffer.view.nbytes >= nbytes else AlignedBuffer(max(nbytes, SPINE_PAGE))


def _cut(runs: list[tuple[int, Run]], begin: int, end: int) -> list[tuple[int, Run]]:
    """The part of ``runs`` between two positions, relative to the first; touching neighbours merged."""
    index = max(0, bisect_right(runs, begin, key=lambda item: item[0]) - 1)
    cut: list[tuple[int, Run]] = []
    for at, run in runs[index:]:
        if at >= end:
            break
        low, high = max(at, begin), min(at + run.nbytes, end)
        if low >= high:
            continue
        part = Run(run.file, run.offset + low - at, high - low)
        if cut:
            previous_at, previous = cut[-1]
            touches = previous_at + previous.nbytes == low - begin
            if touches and previous.file == part.file and previous.offset + previous.nbytes == part.offset:
                cut[-1] = (previous_at, Run(part.file, previous.offset, previous.nbytes + part.nbytes))
                continue
        cut.append((low - begin, part))
    return cut


class _Writer(threading.Thread):
    """Writes one drive's slices and makes them durable in batches."""

    def __init__(self, manifest: Manifest, drive: DriveInfo, shared: _Shared) -> None:
        super().__init__(daemon=True)
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._manifest = manifest
        self._drive = drive
        self._shared = shared
        self._open: dict[int, int] = {}
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
        padding = -s.length % SLICE_ALIGN
        pieces = [job.data, memoryview(_ZEROS)[:padding]]
        offset, left = s.offset, s.length + padding
        while left:
            written = os.pwritev(fd, pieces, offset)
            offset, left = offset + written, left - written
            if left:  # interrupted, or at a limit of the system
                skip = s.length + padding - left
                pieces = [job.data[skip:], pieces[-1]] if skip < s.length else [pieces[-1][-left:]]
        if hasattr(os, "posix_fadvise"):
            # Starts the write-back now, so that the sync at the batch's end finds little to do.
            os.posix_fadvise(fd, s.offset, s.length + padding, os.POSIX_FADV_DONTNEED)
        self._batch.append((s.blob, s.part, job.checksum))
        self._unsynced += s.length + padding
        self._shared.moved[self._drive.index] += s.length

    def _descriptor(self, file: int) -> int:
        fd = self._open.get(file)
        if fd is None:
            path = self._manifest.file_path(file)
            if not path.exists():
                self._created.add(path.parent)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            self._open[file] = fd
        return fd

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
        self._created.clear()
        self._since = time.monotonic()
        if batch:
            self._shared.reports.put(batch)


def drive_error(drive: DriveInfo, error: OSError) -> DriveError:
    """The error a user should see when writing to ``drive`` failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DriveFullError(f"drive {drive.index}, {drive.path}, is full", remedy=f"free some space; {_AGAIN}")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return DriveError(
            f"drive {drive.index}, {drive.path}, cannot be written: {error.strerror}",
            remedy=f"make it writable for this user; {_AGAIN}",
        )
    return DriveError(
        f"drive {drive.index}, {drive.path}, failed while writing: {error.strerror}",
        remedy=f"check the drive and its cable; {_AGAIN}",
    )


def _check_space(manifest: Manifest) -> None:
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
                missing = (m.file == index) & ~m.present & (m.offset + padded > have)
                needed[device] = needed.get(device, 0) + int(padded[missing].sum())
    for device, nbytes in needed.items():
        available, drive = free[device]
        if nbytes > available:
            raise DriveFullError(
                f"drive {drive.index}, {drive.path}, has {available / 1e9:.1f} GB free of {nbytes / 1e9:.1f} needed",
                remedy="free some space or add a drive",
            )


class Meter:
    """Turns byte counts into progress reports.

    Args:
        manifest: of the install.
        progress: receives the reports.
        phase: ``copy`` and ``checksum`` count towards all slices, ``verify`` towards those present.
    """

    def __init__(self, manifest: Manifest, progress: Progress | None, phase: str) -> None:
        self._progress = progress
        self._phase = phase
        present = int(manifest.length[manifest.present].sum())
        self._total = present if phase == "verify" else int(manifest.length.sum())
        self._resumed = 0 if phase == "verify" else present
        self._start = self._last = time.monotonic()
        self._moved = [0] * len(manifest.drives)
        self._rates = [0.0] * len(manifest.drives)

    def report(self, moved: Iterable[int], *, force: bool = False) -> None:
        """Reports when it is time again, or when forced.

        Args:
            moved: bytes of each drive since the meter was made.
            force: report now.
        """
        now = time.monotonic()
        elapsed = now - self._last
        if self._progress is None or (elapsed < REPORT_SECONDS and not force):
            return
        moved = list(moved)
        if elapsed > 0:
            fresh = 1 - 0.5 ** (elapsed / 2.0)  # half of what is shown happened in the last two seconds
            self._rates = [
                rate + fresh * ((n - before) / elapsed - rate)
                for rate, n, before in zip(self._rates, moved, self._moved, strict=True)
            ]
        self._last, self._moved = now, moved
        done = self._resumed + sum(moved)
        average = sum(moved) / max(now - self._start, 1e-9)
        eta = (self._total - done) / average if average > 0 else None
        self._progress(
            IngestProgress(
                phase=self._phase,
                done_bytes=done,
                total_bytes=self._total,
                resumed_bytes=self._resumed,
                bytes_per_s=tuple(self._rates),
                eta_seconds=0.0 if done >= self._total else eta,
            )
        )
