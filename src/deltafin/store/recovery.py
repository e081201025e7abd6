"""What happens after a read has failed for good: wait for a drive that went away, or bring the bytes from elsewhere.

The only place that waits for drives. A read that ends here is neither delivered nor lost: whoever asked for it keeps
waiting, the buffer stays reserved, and generation continues where it was when the bytes arrive. Cancelling the read
ends the wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import xxhash

from deltafin.errors import DeltafinError, ReadError, SliceCorruptError, SliceError
from deltafin.store.direct import DirectFile
from deltafin.store.drives import elsewhere, is_drive
from deltafin.store.keeper import Keeper
from deltafin.store.manifest import Manifest
from deltafin.store.types import PAGE, Extent, ReadPlan

POLL_SECONDS = 0.5
PARALLEL = 16
"""Recoveries at a time: as many experts as a token needs in one layer."""

_log = logging.getLogger("deltafin")


class Supplier(Protocol):
    """Brings bytes that the drives do not hold, for example from the hub an install came from."""

    def fetch(self, blob: int, begin: int, view: memoryview, stopped: Callable[[], bool]) -> None:
        """Fills ``view`` with the bytes of ``blob`` from ``begin``. Called from several threads.

        Args:
            blob: its number in the manifest.
            begin: first byte, counted from the blob's first.
            view: memory to fill.
            stopped: whether nobody waits any more.

        Raises:
            DeltafinError: they cannot be had.
        """

    def close(self) -> None:
        """Ends running fetches."""


class Job(Protocol):
    """A read that could not be carried out, as its ticket shows it."""

    @property
    def plan(self) -> ReadPlan: ...

    @property
    def unwanted(self) -> bool:
        """Whether the caller has given it up."""

    def finish(self, error: BaseException | None) -> None:
        """Hands the buffer back."""


class Recovery:
    """Carries failed and absent reads to their end, in threads of its own.

    Args:
        manifest: of the install; what is brought is marked in it.
        supplier: None when bytes can come from nowhere else.
        reopen: told a drive that came back, whose open files are dead, and where it is now.
        notify: told single sentences for the user.
    """

    def __init__(
        self,
        manifest: Manifest,
        supplier: Supplier | None,
        *,
        reopen: Callable[[int, Path], None] = lambda drive, place: None,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self._m = manifest
        self.supplier = supplier
        self._reopen = reopen
        self._notify = notify or _log.warning
        self._keeper = Keeper(manifest, self._notify)
        self._jobs: SimpleQueue[tuple[Job, memoryview, BaseException | None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._lost: set[int] = set()  # drives about which the user has been told
        self._index: dict[tuple[int, int], int] = {}
        self._closed = False

    def take(self, job: Job, buffer: memoryview, error: BaseException | None) -> bool:
        """Takes over a read that failed with ``error``, or (None) whose bytes are not in the install.

        Returns:
            False when nothing can be done about this error: the caller delivers it.
        """
        if self._closed or (error is not None and not isinstance(error, SliceError)):
            return False
        with self._lock:
            if len(self._threads) < PARALLEL:
                thread = threading.Thread(target=self._work, name=f"recovery-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put((job, buffer, error))
        return True

    def close(self) -> None:
        """Ends every wait; reads still here end with their error. What was brought is made durable."""
        if self._closed:
            return
        self._closed = True
        if self.supplier is not None:
            self.supplier.close()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._keeper.close()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, buffer, error = item
            outcome: BaseException | None
            try:
                outcome = self._recover(job, buffer, error)
            except BaseException as e:
                outcome = e
            if isinstance(outcome, DeltafinError):
                outcome = outcome.with_traceback(None)
                outcome.__context__ = None
            del buffer, item  # nothing of ours (a traceback's frames neither) may pin the memory once the owner is told
            job.finish(outcome)
            del job

    def _recover(self, job: Job, buffer: memoryview, error: BaseException | None) -> BaseException | None:
        plan = job.plan

        def stopped() -> bool:
            return self._closed or job.unwanted

        while True:
            if not self._await_drives(plan, stopped):
                return error or ReadError(f"{plan.name}: given up while its drive was away")
            lost = list(plan.extents) if error is None else [e for e in plan.extents if not self._read(e, buffer)]
            if not lost:
                return None
            if self._missing_drives(plan):
                continue
            if self.supplier is None or stopped():
                return error
            try:
                self._supply(self.supplier, lost, buffer, stopped)
                return None
            except DeltafinError as e:
                if self._missing_drives(plan):
                    continue
                return e if error is None or stopped() else _with_cause(error, e)

    def _await_drives(self, plan: ReadPlan, stopped: Callable[[], bool]) -> bool:
        """Waits until all drives of ``plan`` are there; False when the wait was ended."""
        while missing := self._missing_drives(plan):
            with self._lock:
                news = [index for index in missing if index not in self._lost]
                self._lost.update(missing)
            for index in news:
                drive = self._m.drives[index]
                self._notify(
                    f"drive {index}, {drive.path}, is gone: paused until it is back (Ctrl-C stops; nothing is lost)"
                )
            if stopped():
                return False
            for index in missing:
                self._look_elsewhere(index)
            time.sleep(POLL_SECONDS)
        with self._lock:
            back = [index for index in {e.drive for e in plan.extents} if index in self._lost]
            self._lost.difference_update(back)
        for index in back:
            self._reopen(index, self._m.drives[index].path)
            self._notify(f"drive {index}, {self._m.drives[index].path}, is back: going on")
        return not self._closed

    def _look_elsewhere(self, index: int) -> None:
        """Takes note of a missing drive that is mounted in another place."""
        drives = list(self._m.drives)
        place = elsewhere(self._m, drives[index])
        if place is not None:
            drives[index] = replace(drives[index], path=place)
            with self._lock:
                self._m = replace(self._m, drives=tuple(drives))

    def _missing_drives(self, plan: ReadPlan) -> list[int]:
        drives = sorted({extent.drive for extent in plan.extents})
        return [index for index in drives if not is_drive(self._m, self._m.drives[index], self._m.drives[index].path)]

    def _supply(
        self, supplier: Supplier, lost: Sequence[Extent], buffer: memoryview, stopped: Callable[[], bool]
    ) -> None:
        m = self._m
        indices = [self._slice(extent) for extent in lost]
        blobs = np.searchsorted(m.first, indices, side="right") - 1
        group: list[tuple[int, Extent]] = []
        for blob, index, extent, following in zip(blobs.tolist(), indices, lost, [*lost[1:], None], strict=True):
            group.append((index, extent))
            # Slices of one blob that lie side by side are one request.
            touches = following is not None and extent.at + extent.length == following.at
            if following is not None and touches and int(m.first[blob + 1]) > self._slice(following):
                continue
            first = group[0][1]
            view = buffer[first.at : extent.at + extent.length]
            begin = int(m.at[group[0][0]] - m.at[m.first[blob]])
            supplier.fetch(blob, begin, view, stopped)
            for i, e in group:
                data = buffer[e.at : e.at + e.length]
                checksum = xxhash.xxh3_64_intdigest(data)
                # Not the extent's own checksum: it is of before, when the slice may have been absent.
                if m.present[i] and checksum != int(m.checksum[i]):
                    raise SliceCorruptError(
                        f"{m.blob_name(blob)} was fetched again and differs from what was recorded",
                        remedy="the hub or mirror holds other bytes: use the one this install was made from",
                    )
                self._keeper.put(i, blob, checksum, data)
            group = []

    def _slice(self, extent: Extent) -> int:
        if not self._index:
            keys = zip(self._m.file.tolist(), self._m.offset.tolist(), strict=True)
            self._index = {key: i for i, key in enumerate(keys)}
        return self._index[extent.file, extent.offset]

    def _read(self, extent: Extent, buffer: memoryview) -> bool:
        """Reads one extent through a fresh descriptor: those from before a drive went away stay dead."""
        lead = extent.offset % PAGE
        low = extent.at - lead
        room = -(-(lead + extent.length) // PAGE) * PAGE
        try:
            file = DirectFile(self._m.file_path(extent.file))
            try:
                file.read(buffer[low : low + room], extent.offset - lead, lead + extent.length)
            finally:
                file.close()
        except (OSError, EOFError):
            return False
        return xxhash.xxh3_64_intdigest(buffer[extent.at : extent.at + extent.length]) == extent.checksum


def _with_cause(error: BaseException, cause: DeltafinError) -> BaseException:
    if isinstance(error, DeltafinError):
        return type(error)(f"{error.message}; fetching it again failed: {cause.message}", remedy=cause.remedy)
    return error
