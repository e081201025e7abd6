"""sha256 of a file whose pieces arrive in any order."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

_PIECE = 16 << 20
_PENDING = 256 << 20


class RunningDigest:
    """Hashes pieces in file order as they come; what came too early and did not fit in memory is read back at the end.

    One caller at a time hashes, outside the lock; the others leave copies of their pieces and go on.

    Args:
        size: bytes of the file.
        read_back: (offset, bytes) → those bytes, from where they were written.
        pending: most bytes kept of pieces that came early.
    """

    def __init__(self, size: int, read_back: Callable[[int, int], bytes | memoryview], pending: int = _PENDING) -> None:
        self._size = size
        self._read_back = read_back
        self._room = pending
        self._hash = hashlib.sha256()
        self._at = 0
        self._busy = False
        self._early: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def offer(self, offset: int, data: memoryview | bytes) -> None:
        """A piece has arrived; the memory is the caller's again when this returns. May be called from any thread."""
        with self._lock:
            mine = offset == self._at and not self._busy
            keep = not mine and offset >= self._at and len(data) <= self._room
            self._busy |= mine
            if keep:
                self._room -= len(data)
        if mine:
            self._take(data)
        elif keep:
            copy = bytes(data)
            with self._lock:
                if offset < self._at or offset in self._early:
                    self._room += len(copy)
                else:
                    self._early[offset] = copy
                if self._busy or self._at not in self._early:
                    return
                self._busy = True
            self._take(b"")

    def finish(self) -> str:
        """The digest; every byte must have been offered or written where ``read_back`` finds it, and no offer may be
        under way."""
        while self._at < self._size:
            following = min((at for at in self._early if at > self._at), default=self._size)
            self._busy = True
            self._take(self._read_back(self._at, min(_PIECE, following - self._at)))
        return self._hash.hexdigest()

    def _take(self, data: memoryview | bytes) -> None:
        """Hashes the piece at the position, and those kept that follow; the caller has set ``_busy``."""
        while True:
            self._hash.update(data)
            with self._lock:
                self._at += len(data)
                for at in [at for at in self._early if at < self._at]:
                    self._room += len(self._early.pop(at))
                following = self._early.pop(self._at, None)
                if following is None:
                    self._busy = False
                    return
                self._room += len(following)
            data = following
