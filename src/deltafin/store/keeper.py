"""Keeping slices that were brought while the install was in use: written, made durable, then marked present.

Nobody waits for it: the bytes have been delivered before. What cannot be kept (a full or read-only drive) is said once
and fetched again when it is needed again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np

from deltafin.errors import DeltafinError
from deltafin.store.files import fsync_path, sync
from deltafin.store.manifest import Manifest, PresenceLog
from deltafin.store.types import SLICE_ALIGN

_MOST_WAITING = 320 << 20
"""Bytes in memory on their way to the drives: a layer's sixteen experts. Who brings more waits for the drives."""

_GATHER_SECONDS = 0.05
_SPARE_SECONDS = 5.0
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True, slots=True)
class _Item:
    index: int
    blob: int
    checksum: int
    data: memoryview  # padded
    buffer: mmap.mmap


class Keeper:
    """Writes slices in one thread, which starts with the first of them.

    Args:
        manifest: of the install; its arrays are updated once a slice is durable.
        notify: told once why slices are not kept.
    """

    def __init__(self, manifest: Manifest, notify: Callable[[str], None]) -> None:
        self._m = manifest
        self._notify = notify
        self._items: SimpleQueue[_Item | None] = SimpleQueue()
        self._waiting = 0  # bytes
        self._spare: list[mmap.mmap] = []  # touching fresh memory costs more than copying into it
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None
        self._told = False

    def put(self, index: int, blob: int, checksum: int, data: memoryview) -> None:
        """Keeps slice ``index``; its bytes are copied before this returns. May be called from any thread."""
        if self._m.layout == "in-place":
            # The released files are the user's, and may be in use by others: nothing writes to them unasked.
            self._tell(
                f"{self._m.blob_name(blob)} is damaged and is fetched for now: deltafin verify --repair mends it"
            )
            return
        nbytes = len(data) + -len(data) % SLICE_ALIGN
        with self._lock:
            while self._waiting and self._waiting + nbytes > _MOST_WAITING:
                self._lock.wait()
            self._waiting += nbytes
            buffer = self._spare.pop() if self._spare else None
        if buffer is None or len(buffer) < nbytes:
            # Small pages: the system may compact memory for tenths of a second to find large ones.
            buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = memoryview(buffer)
        # numpy copies without the interpreter lock: with it, sixteen experts at once would copy one after the other.
        np.copyto(np.frombuffer(buffer, np.uint8, len(data)), np.frombuffer(data, np.uint8))
        view[len(data) : nbytes] = bytes(nbytes - len(data))
        self._items.put(_Item(index, blob, checksum, view[:nbytes], buffer))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="keeper", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Returns when everything that was put is durable."""
        if self._thread is not None:
            self._items.put(None)
            self._thread.join()

    def _work(self) -> None:
        last = False
        while not last:
            batch: list[_Item] = []
            item = self._next()
            if item is not None:
                time.sleep(_GATHER_SECONDS)  # one sync serves all experts of a layer
            while item is not None:
                batch.append(item)
                try:
                    item = self._items.get_nowait()
                except Empty:
                    break
            else:
                last = True
            try:
                if batch:
                    self._keep(batch)
            except (OSError, DeltafinError) as e:
                reason = e.message if isinstance(e, DeltafinError) else f"{e.filename or 'a drive'}: {e.strerror}"
                self._tell(f"what is fetched cannot be kept: {reason}")
            with self._lock:
                self._waiting -= sum(len(item.data) for item in batch)
                self._spare += [item.buffer for item in batch]
                self._lock.notify_all()

    def _tell(self, text: str) -> None:
        with self._lock:
            told, self._told = self._told, True
        if not told:
            self._notify(text)

    def _next(self) -> _Item | None:
        try:
            return self._items.get(timeout=_SPARE_SECONDS)
        except Empty:
            with self._lock:
                self._spare.clear()
            return self._items.get()

    def _keep(self, batch: list[_Item]) -> None:
        m = self._m
        files: dict[int, int] = {}
        created: set[Path] = set()
        try:
            for item in batch:
                number = int(m.file[item.index])
                fd = files.get(number)
                if fd is None:
                    path = m.file_path(number)
                    if not path.exists():
                        created.add(path.parent)
                    fd = files[number] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
                    _switch_direct(fd, on=True)
                _write(fd, item.data, int(m.offset[item.index]))
            for fd in files.values():
                sync(fd)
            for folder in created:
                fsync_path(folder)
        finally:
            for fd in files.values():
                os.close(fd)
        log = PresenceLog(m.path, m.generation)
        try:
            log.commit((item.blob, item.index - int(m.first[item.blob]), item.checksum) for item in batch)
        finally:
            log.close()
        for item in batch:
            m.checksum[item.index] = item.checksum
            m.present[item.index] = True


def _switch_direct(fd: int, *, on: bool) -> None:
    """Past the page cache, where the system allows it: what was just computed with need not be cached as well."""
    with contextlib.suppress(OSError):
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)


def _write(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(fd, data[done:], offset + done)
        except OSError as e:
            if e.errno != errno.EINVAL or not fcntl.fcntl(fd, fcntl.F_GETFL) & _O_DIRECT:
                raise
            _switch_direct(fd, on=False)  # a file system that accepts the flag and refuses the write
