"""Reading files past the page cache, with a stated step back where the system refuses.

Expert bytes are read once per use and far exceed RAM: cached, they would evict the spine and cost a copy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from pathlib import Path

from deltafin.macos import system
from deltafin.store.types import PAGE

_F_NOCACHE: int = getattr(fcntl, "F_NOCACHE", 48)
_F_RDAHEAD: int = getattr(fcntl, "F_RDAHEAD", 45)


class DirectFile:
    """A file opened for positional reads by any number of threads.

    Attributes:
        path: the file.
        direct: whether reads bypass the page cache.
        fallback: why not, empty when ``direct``.

    Args:
        path: a regular file; symbolic links are refused.

    Raises:
        OSError: the file cannot be opened.
    """

    __slots__ = ("_fds", "_lock", "direct", "fallback", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fallback = ""
        self._lock = threading.Lock()
        self.direct = True
        try:
            self._fds = [_open_direct(path)]
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOTTY):
                raise
            self._fds = []
            self._step_back(f"open: {e.strerror}")

    def read(self, view: memoryview, offset: int, wanted: int) -> None:
        """Fills ``view`` from ``offset`` until at least ``wanted`` bytes are there.

        Args:
            view: page-aligned memory, a whole number of pages.
            offset: a multiple of ``PAGE``.
            wanted: at most ``len(view)``; the file may end after it.

        Raises:
            EOFError: the file ends before ``wanted`` bytes.
            OSError: the system could not read.
        """
        done = 0
        while done < wanted:
            done = done // PAGE * PAGE  # a short direct read resumes on a page boundary
            got = self._pread(view[done:], offset + done)
            if got <= 0 or (done + got < wanted and got < PAGE):
                raise EOFError(f"{self.path} ends at byte {offset + done + max(got, 0)}")
            done += got

    def _pread(self, view: memoryview, offset: int) -> int:
        direct, fd = self.direct, self._fds[-1]
        try:
            got = os.preadv(fd, [view], offset)
        except OSError as e:
            # Some file systems accept the flag and refuse the read (larger blocks, network mounts).
            if e.errno != errno.EINVAL or not direct:
                raise
            self._step_back(f"read: {e.strerror}")
            got = os.preadv(self._fds[-1], [view], offset)
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fds[-1], offset, len(view), os.POSIX_FADV_DONTNEED)
        return got

    def _step_back(self, reason: str) -> None:
        with self._lock:
            if self.direct:
                # Other threads may still be reading through the first descriptor: it stays open until
                # ``close``.
                self._fds.append(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
                self.fallback = reason
                self.direct = False

    def close(self) -> None:
        """Closes the file; no read may be in flight."""
        while self._fds:
            os.close(self._fds.pop())


def _open_direct(path: Path) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    if system.is_mac():
        fd = os.open(path, flags)
        try:
            fcntl.fcntl(fd, _F_NOCACHE, 1)
        except OSError:
            os.close(fd)
            raise
        # What follows a slice is another expert: bytes that the system reads ahead are bytes that nobody asked for.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, _F_RDAHEAD, 0)
        return fd
    return os.open(path, flags | getattr(os, "O_DIRECT", 0))
